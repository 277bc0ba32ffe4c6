"""``invariant``: a model of transformers whose tokens have log-probabilities of the same bits in rollout and in training.

Products are made batch-invariant by their recipe, norms and routers run in tiles of a fixed number of rows, attention sums over
tiles of keys. What is left around them is watched in a forward pass: it must move values, or compute each by itself. Then the
model is compared with itself, token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opfuse.convert.converted import Converted, converted, is_converted
from opfuse.convert.fuse import fuse_, unfuse_
from opfuse.convert.invariant_attention import NAME, InvariantAttention, register_attention
from opfuse.convert.report import Report
from opfuse.convert.row_tiles import RowTiles, row_tiles, tile_rows
from opfuse.domains import checked_arguments
from opfuse.errors import ConversionError, OpfuseError, describe, with_article
from opfuse.numerics.log_probs import log_probs
from opfuse.recipes import CustomRecipe
from opfuse.tensors.quantizers import IdentityQuantizer
from opfuse.torch_private.stack import owners

__all__ = ["invariant"]


def _high_precision(role: Any) -> IdentityQuantizer:
    return IdentityQuantizer()


HIGH_PRECISION = CustomRecipe(qfactory=_high_precision, batch_invariant=True, backward_override=None)
"""The recipe of products that are not quantized."""

MOVES = {
    *("cat", "chunk", "clone", "contiguous", "copy", "detach", "embedding", "expand", "flatten", "getitem", "index_select"),
    *("masked_fill", "new_empty", "new_zeros", "ones_like", "permute", "repeat", "repeat_interleave", "reshape", "split"),
    *("bfloat16", "double", "float", "half", "squeeze", "stack", "to", "transpose", "type_as", "unflatten", "unsqueeze", "view"),
    *("device", "dim", "dtype", "is_cuda", "is_floating_point", "mT", "ndim", "numel", "requires_grad", "shape", "size"),
    *("where", "zeros_like"),
}
"""Functions that move values, round them, or tell what a tensor is; without underscores."""

EXACT = {
    *("add", "iadd", "radd", "sub", "isub", "rsub", "mul", "imul", "rmul", "div", "truediv"),
    *("neg", "clamp", "cos", "sin", "tanh"),
}
"""Functions of each value by itself that have the same bits at any place of a tensor, on each device."""

ON_A_GPU = {"sigmoid", "silu", "gelu", "softplus"}
"""Those that a CPU computes otherwise for the last values of a tensor."""


BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings of transformers whose angles depend on the longest sequence of a call."""


@checked_arguments(ConversionError)
def invariant(model: nn.Module) -> Report:
    """Make a token of ``model`` have a log-probability of the same bits in prefill, in decode with a KV cache, in any batch,
    padded or padding-free, with gradients and without; in place. Returns the report of :func:`fuse_` on what it then runs.

    model: a causal language model of transformers. Modules that :func:`fuse_` has converted keep their recipes, under
    ``batch_invariant=True``; all others compute in high precision, output heads and routers too. Norms and routers run in tiles
    of a fixed number of rows. Attention is causal, over whole sequences. The model then computes under these recipes alone, and
    calls that it is not invariant in are refused, as those in a region of another recipe or under torch.compile. :func:`unfuse_`
    gives modules their own forwards back; attention stays, until ``model.set_attn_implementation`` names another.

    :func:`log_probs` of its logits keep their bits. What is compared must have the same kind of device, library and dtypes.

    The model is called on a few tokens: what computes outside of these parts is refused, and so is a model whose bits differ
    on this machine. ConversionError in these cases, for sliding windows and dropout, and without transformers 5; RecipeError for
    a recipe whose rows depend on each other. The model then is as before, but not converted.
    """
    recipes = {module: forward.recipe for module in model.modules() if (forward := converted(module)) is not None}
    made = {
        module: HIGH_PRECISION if recipe is None else recipe.replace(batch_invariant=True) for module, recipe in recipes.items()
    }
    before = _check_model(model)
    register_attention()
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    try:
        told = fuse_(model, HIGH_PRECISION, policy=lambda module, path: made.get(module, HIGH_PRECISION))
        tiled = dict(_tiled(model, told))
        told = Report(tuple(replace(each, **tiled.get(each.path, {})) for each in told))
        for module in model.modules():
            if (forward := converted(module)) is not None:
                forward.report, forward.strict = told, True
        _try(model)
    except BaseException:
        if is_converted(model):
            unfuse_(model)
        model.set_attn_implementation(before)  # type: ignore[operator]
        raise
    return told


def _refuse(where: str, wanted: str, got: str, cure: str) -> NoReturn:
    raise ConversionError(describe(f"invariant {where}".rstrip(), wanted=wanted, got=got, cure=cure))


def _check_model(model: nn.Module) -> str:
    """The attention that it has now. ConversionError for a model that cannot be invariant, by its config and its modules."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        _refuse("", "a causal language model of transformers", with_article(type(model).__name__), "pass the model itself")
    kinds = [kind for kind in getattr(config.get_text_config(), "layer_types", None) or () if kind != "full_attention"]
    if kinds:
        _refuse("config", "layers of full attention", repr(kinds[0]), "use a model whose layers see all tokens before")
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            _refuse(path, "no dropout, which draws in training", f"p={module.p}", "set its p to 0")
        rotary: Any = getattr(module, "rope_type", None)
        for kind in rotary.values() if isinstance(rotary, dict) else (rotary,):
            if kind in BY_LENGTH:
                cure = "set rope_parameters in the model's config to a type that lengths do not change, as yarn"
                _refuse(path, "angles that follow from a token's position alone", f"rope_type {kind!r}", cure)
    return str(config._attn_implementation)


def _tiled(model: nn.Module, told: Report) -> Iterator[tuple[str, dict[str, Any]]]:
    """Put modules with parameters of their own that are not converted into tiles. The fields of their lines in the report."""
    for entry in told:
        module = model.get_submodule(entry.path)
        if entry.status not in ("kept", "refused") or isinstance(module, nn.Embedding):
            continue
        made = row_tiles(module, entry.path)
        if made is None:
            _refuse(entry.path, "a function of single rows", f"{with_article(entry.kind)}, which is none", entry.cure)
        made.install()
        parameter = next(module.parameters())
        became = f"its own forward, in tiles of {tile_rows(parameter.device.type, parameter.shape[-1])} rows"
        yield entry.path, {"status": "kept", "became": became, "wanted": "", "got": "", "cure": ""}


class _Watched(TorchFunctionMode):
    """Ends a forward pass of ``model`` that computes outside of parts that are invariant."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {id(module): path or type(module).__name__ for path, module in model.named_modules()}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func.__self__ if func.__name__ == "__get__" else func, "__name__", "")
        if not self._is_known(name.strip("_"), args, kwargs):
            self._check_place(name)
        return func(*args, **kwargs)

    def _is_known(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = [each for given in (*args, *kwargs.values()) for each in _flat(given)]
        floats = [each for each in tensors if each.is_floating_point()]
        on_gpu = bool(floats) and all(each.is_cuda for each in floats)
        if name == "matmul":  # of two numbers; on a GPU fewer bits of them may count by the sizes
            return bool(args[0].shape[-1] == 1) and (not on_gpu or torch.get_float32_matmul_precision() == "highest")
        if name == "dropout":  # that would draw nothing in training either
            return bool((*args, kwargs.get("p"))[1] == 0)
        return not floats or name in MOVES | EXACT or (name in ON_A_GPU and on_gpu)

    def _check_place(self, name: str) -> None:
        module = None
        for owner in owners():
            if isinstance(owner, (Converted, RowTiles, InvariantAttention)):
                return
            if module is None and isinstance(owner, nn.Module):
                module = owner
        where, cure = self.paths.get(id(module), type(module).__name__), "use a model that has none, or replace that module"
        _refuse(where, "values moved or computed one by one, outside of products, norms and attention", f"{name}()", cure)


def _flat(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _flat(each)


LENGTH = 6
"""Tokens of the sequences on which a model is tried."""


def _try(model: nn.Module) -> None:
    """ConversionError if the model computes what is not invariant, or a token's log-probability depends on how it is called."""
    device = next(model.parameters()).device
    words = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    tokens = torch.arange(2 * LENGTH, device=device).remainder(words).view(2, LENGTH)
    modes = {module: module.training for module in model.modules()}
    with torch.no_grad():
        try:
            with _Watched(model):
                logits = model(input_ids=tokens, use_cache=False).logits
                trained = model.train(not model.training)(input_ids=tokens, use_cache=False).logits
        except OpfuseError:
            raise
        except Exception as error:  # of a stranger's forward
            _refuse("", "a model to call on input_ids, which returns logits", str(error), "use a causal language model")
        finally:
            for module, training in modes.items():
                module.training = training
        whole = log_probs(logits, tokens)
        alone = [log_probs(model(input_ids=row[None], use_cache=False).logits, row[None]) for row in tokens]
        first = model(input_ids=tokens[:, :-1], use_cache=True)
        last = model(input_ids=tokens[:, -1:], past_key_values=first.past_key_values, use_cache=True)
    decoded = log_probs(torch.cat((first.logits, last.logits), 1), tokens)
    moded = log_probs(trained, tokens), "in training" if not model.training else "in eval()"
    for other, how in (moded, (torch.cat(alone), "alone"), (decoded, "with a KV cache")):
        if not torch.equal(whole, other):
            got = f"others {how}, by up to {(whole - other).abs().max().item():.3g}"
            cure = "use a model that has none of the modules that the report does not name"
            _refuse("", "log-probabilities of the same bits in each call", got, cure)
