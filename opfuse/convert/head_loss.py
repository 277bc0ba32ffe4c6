"""The loss of a causal language model of transformers by :class:`~opfuse.ops.LinearCrossEntropy`, without logits.

The model's own forward runs. While a call has labels, its output head keeps the hidden states that it is given and returns logits
of no tokens, and its loss function computes the loss from those. Whether that is the model's loss is tried when it is converted:
a copy of it runs its forward around a decoder and a head that return made-up values, and its loss function has to get the head's
result, or its softcap, as it was. When something is changed that the forward reads, that is tried again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from opfuse.convert.given import FORWARD, GivenForward, given_forward
from opfuse.convert.guards import ModuleGuard
from opfuse.convert.leaves import obstacle
from opfuse.convert.policy import Choice
from opfuse.convert.record import training_or_not
from opfuse.convert.weights import borrowing, replica
from opfuse.core.spec import spec_of
from opfuse.core.tracers import outside
from opfuse.errors import ConversionError, Described, QuantizerError, RecipeError, describe, with_article
from opfuse.ops.cross_entropy import LinearCrossEntropy
from opfuse.recipes import Recipe, autocast
from opfuse.recipes.autocast import in_region
from opfuse.torch_private.modules import HOOKS, has_global_hooks, has_hooks

LossKind = Literal["own", "fused"]
"""Whose loss a causal language model computes: its own, from its logits, or that of :class:`LinearCrossEntropy`."""

LOSS = "_loss_function"
"""The attribute of a model that transformers' ``loss_function`` returns."""

OWN_LOSS = "transformers.loss.loss_utils", "ForCausalLMLoss"
"""Module and name of the loss that is replaced."""

CURE = "call fuse_ without loss='fused'"


class LossCall:
    """A call with labels. head: of the model. hidden: the hidden states that it was given."""

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.hidden: torch.Tensor | None = None


_CALL: ContextVar[LossCall | None] = ContextVar("loss call", default=None)


class HeadForward(GivenForward):
    """The forward of an output head: in a call with labels it keeps what it is given."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # named as that of nn.Linear
        call = _CALL.get()
        if call is None or call.head is not self.module:
            return type(self.module).forward(self.module, input)  # type: ignore[no-any-return]
        call.hidden = input
        weight: Any = self.module.weight
        return input.new_empty((*input.shape[:-2], 0, weight.shape[0]))


class ModelLoss(GivenForward):
    """The forward and the loss function of a causal language model, and what it was tried with.

    own: the loss function that the model had. held: whether it was an attribute of the model itself. softcap: of its logits.
    called, computing: what the head and the loss function run, as it was then.
    quantized: whether the loss casts what its products multiply, by the recipe of the ``autocast`` region and, outside of one, by
    ``recipe``. guard: what its forward reads, as it was when it was tried.
    """

    def __init__(self, model: nn.Module, head: nn.Linear, path: str, softcap: float | None, choice: Choice | None) -> None:
        super().__init__(model, path)
        self.quantized, self.recipe = choice is not None, None if choice is None else choice.recipe
        self.region = None if self.recipe is None else autocast(recipe=self.recipe)
        self.head, self.softcap = head, softcap
        self.at_head = HeadForward(head, next(name for name, part in model.named_modules(prefix=path) if part is head))
        self.own: Callable[..., torch.Tensor] = model.loss_function  # type: ignore[assignment]
        self.held = LOSS in vars(model)
        self.called, self.computing = _called(head), _computing(model, self.own, self.held)
        self.loss = LossFunction(self)
        self.ops: dict[Any, LinearCrossEntropy] = {}
        for reduction in ("mean", "sum"):  # now, since nothing can make ops in compiled code
            self._op(reduction, -100)
        self._watch()

    def _watch(self) -> None:
        """Note what the forward reads, and where it takes labels."""
        self.guard = ModuleGuard(self.module, self.label, {})
        self.labels_at = [*inspect.signature(self.kind.forward).parameters].index("labels") - 1  # behind self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self.module).forward
        labels = args[self.labels_at] if len(args) > self.labels_at else kwargs.get("labels")
        if labels is None:
            return own(self.module, *args, **kwargs)
        if got := outside(_change)(self) if torch.compiler.is_compiling() else _change(self):
            cure = "call fuse_ again after such a change, or opfuse.unfuse_ and fuse_ without loss='fused'"
            raise ConversionError(describe(f"{self.label} loss", wanted="head, logits and loss as they were", got=got, cure=cure))
        token = _CALL.set(LossCall(self.head))
        try:
            output = own(self.module, *args, **kwargs)
        finally:
            _CALL.reset(token)
        return _without_logits(output, self.head)

    def change(self) -> str:
        """What has changed since ``fuse_``, of which the loss would hear nothing: logits are not made; empty: nothing."""
        if self.module.get_output_embeddings() is not self.head:  # type: ignore[operator]
            return "another output head, such as an adapter around it"
        if not isinstance(given_forward(self.head), HeadForward) or _called(self.head) != self.called:
            return "an output head whose forward was replaced, or that of its class, or torch's linear"
        if has_hooks(self.head) or has_global_hooks():
            return "a hook on the output head, or on all modules, that may change its result"
        if vars(self.module).get(LOSS) is not self.loss or _computing(self.module, self.own, self.held) != self.computing:
            return "another loss_function, or other functions in it"
        return self._other_logits()

    def _other_logits(self) -> str:
        """What the forward reads that was changed, if its logits are others since; empty: they are not. It is tried again."""
        change = self.guard.change()
        if change is None:
            return ""
        try:
            now = _softcap(self.module, self.head)
        except _OtherLossError as other:
            wanted, got = other.args
            return f"{change.problem}; the loss wants {wanted}, got {got}"
        if now != self.softcap:
            return f"{change.problem}; the softcap is {now}"
        self._watch()
        return ""

    def compute(self, hidden: torch.Tensor, labels: torch.Tensor, reduction: str, ignore_index: int) -> torch.Tensor:
        """The loss of hidden states and of the labels for each."""
        op = self._op(reduction, ignore_index)
        with nullcontext() if self.region is None or in_region() else self.region:
            loss: torch.Tensor = op(hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).to(hidden.device))
        return loss

    def _op(self, reduction: str, ignore_index: int) -> LinearCrossEntropy:
        words, features = self.head.weight.shape
        bias = self.head.bias is not None
        options = {"use_bias": bias, "softcap": self.softcap, "reduction": reduction, "ignore_index": ignore_index}
        options["quantized"] = self.quantized
        key = words, features, *options.values()
        if key not in self.ops:
            spec = spec_of(LinearCrossEntropy)(features, words, **options)
            self.ops[key] = borrowing(LinearCrossEntropy, vars(spec).values(), self.head, "weight", *["bias"] * bias)
        return self.ops[key]

    def install(self) -> None:
        """Replace the forward and the loss function of the model, and the forward of its head."""
        super().install()
        self.at_head.install()
        vars(self.module)[LOSS] = self.loss

    def remove(self, module: nn.Module) -> None:
        super().remove(module)
        self.at_head.remove(self.head)
        if vars(module).get(LOSS) is self.loss:  # and not one that somebody has set since
            vars(module).pop(LOSS)
            if self.held:
                vars(module)[LOSS] = self.own


def _called(head: nn.Module) -> tuple[object, ...]:
    """What a call of the head runs."""
    return type(head).__call__, type(head).forward, nn.functional.linear


def _computing(model: nn.Module, own: Callable[..., Any], held: bool) -> tuple[object, ...]:
    """What the model computes its loss by: transformers' table says it anew at each call, and the function looks others up."""
    names: Mapping[str, Any] = vars(inspect.getmodule(own))
    table = names["LOSS_MAPPING"]
    listed = None if held else table.get(getattr(model, "loss_type", None), table.get("ForCausalLM"))
    return listed, names["fixed_cross_entropy"], nn.functional.cross_entropy


def _change(loss: ModelLoss) -> str:
    return loss.change()


class LossFunction:
    """What ``model.loss_function`` is: transformers' ``ForCausalLMLoss``, of the hidden states where the head has kept some."""

    def __init__(self, of: ModelLoss) -> None:
        self.of = of

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        *,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        call = _CALL.get()
        if call is None or call.head is not self.of.head or call.hidden is None:
            more = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, "shift_labels": shift_labels}
            return self.of.own(logits, labels, vocab_size, **more, **kwargs)
        if shift_labels is None:  # tokens before n predict n
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if num_items_in_batch is None:
            return self.of.compute(call.hidden, shift_labels, "mean", ignore_index)
        loss = self.of.compute(call.hidden, shift_labels, "sum", ignore_index)
        items = num_items_in_batch
        return loss / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)


def _without_logits(output: Any, head: nn.Module) -> Any:
    """The output of a model without its logits, which are those of no tokens: in a tuple, others may stand before them."""
    if isinstance(output, tuple):
        empty = 0, len(head.weight)  # type: ignore[arg-type]
        return tuple(each for each in output if not (isinstance(each, torch.Tensor) and each.shape[-2:] == empty))
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


# -- whether a model has such a loss -----------------------------------------------------------------------------------------


class _OtherLossError(Exception):
    """A model has another loss: what was wanted, and what was found."""


class ReachedLoss(NamedTuple):
    """What a forward gave its loss function, and what it returned as the loss where the function returned 1."""

    logits: Any
    labels: Any
    words: Any
    result: Any


def head_of_loss(model: nn.Module) -> nn.Module | None:
    """The output head of the causal language model in ``model``, if there is one."""
    part = next((part for part in model.modules() if _has_loss(part)), None)
    return None if part is None else part.get_output_embeddings()  # type: ignore[operator]


def unfit_in_chunks(recipe: Recipe, features: int, words: int) -> Described | None:
    """Why a fused loss cannot multiply what ``recipe`` casts, chunk by chunk; None: it can."""
    try:
        LinearCrossEntropy(features, words, quantized=True, device="meta").casts(recipe, ("input", "weight"))
    except (QuantizerError, RecipeError) as error:
        return cast(Described, error.args[0])
    return None


def model_loss(model: nn.Module, converted: Mapping[nn.Module, Any], choice: Choice | None) -> ModelLoss:
    """The loss of the causal language model in ``model``, to be installed.

    converted: the modules that are. choice: what the policy has for the output head, if that is to be converted; None: products
    in high precision. ConversionError if there is no such model, or if its loss may be another.
    """
    found = next(((path, part) for path, part in model.named_modules() if _has_loss(part)), None)
    if found is None:
        got = f"none in {with_article(type(model).__name__)}"
        wanted = "a causal language model of transformers, with labels, an output head and a loss_function"
        raise ConversionError(describe("fuse_ loss='fused'", wanted=wanted, got=got, cure=CURE))
    path, part = found
    try:
        head = _checked_head(part, converted)
        return ModelLoss(part, head, path, _softcap(part, head), choice)
    except _OtherLossError as why:
        wanted, got = why.args
        where = f"fuse_ loss='fused' {path or type(part).__name__}"
        raise ConversionError(describe(where, wanted=wanted, got=got, cure=CURE)) from why


def _has_loss(module: nn.Module) -> bool:
    if not callable(getattr(module, "get_output_embeddings", None)) or not hasattr(module, "config"):
        return False
    return "labels" in inspect.signature(type(module).forward).parameters and module.get_output_embeddings() is not None  # type: ignore[operator]


def _checked_head(model: nn.Module, converted: Mapping[nn.Module, Any]) -> nn.Linear:
    """The output head; _OtherLossError if it is no plain nn.Linear, or if somebody runs it or the model otherwise."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise _OtherLossError("an nn.Linear as output head", with_article(type(head).__name__))
    for module, name in ((model, "the model"), (head, "the output head")):
        if module in converted:
            raise _OtherLossError(f"{name} with the forward of its class", f"{name}, which the policy converts")
        if FORWARD in vars(module):
            raise _OtherLossError(f"{name} with its own forward", "another one, put over it")
    if (hindered := obstacle(head)) is not None:
        raise _OtherLossError("an output head without extras", hindered[0])
    loss = getattr(model, "loss_function", None)
    place, name = OWN_LOSS
    inner = getattr(loss, "__globals__", {}).get("fixed_cross_entropy")
    of_torch = nn.functional.cross_entropy, "torch.nn.functional", "cross_entropy"
    for each, module_name, wanted in ((loss, place, name), (inner, place, "fixed_cross_entropy"), of_torch):
        if (getattr(each, "__module__", ""), getattr(each, "__name__", "")) != (module_name, wanted):
            raise _OtherLossError(f"the loss {wanted}", getattr(each, "__name__", repr(each)))
        if hasattr(each, "__wrapped__"):
            raise _OtherLossError(f"the loss {wanted} of transformers", "one that wraps it")
    return head


TOKENS = 3
"""Of the call that is tried."""


def _softcap(model: nn.Module, head: nn.Linear) -> float | None:
    """The softcap of the logits; _OtherLossError unless they go from the head to the loss with that alone."""
    twin = replica(model, plain=True)
    decoder, at_head = getattr(twin, "base_model", twin), twin.get_output_embeddings()  # type: ignore[operator]
    if decoder is twin or not {decoder, at_head} <= {*twin.modules()}:
        raise _OtherLossError("a decoder under the name base_model_prefix", "none")
    words, _ = head.weight.shape
    draw = torch.Generator().manual_seed(0)
    made = 40 * torch.randn(1, TOKENS, words, generator=draw, device="cpu")
    few = made[:, :0]  # as in calls: what the forward makes of logits beside the loss shows in its result
    cases = [*product((made, few), (True, False), (True, False))]
    tried = [_tried(twin, (decoder, at_head), *case) for case in cases]
    logits = tried[0].logits
    for (given, *_), each in zip(cases, tried):
        if each.words != words:
            raise _OtherLossError(f"a loss over the {words} words of the output head", f"one over {each.words}")
        if not isinstance(each.logits, torch.Tensor) or each.logits.shape != given.shape:
            raise _OtherLossError("a loss of all logits", "one of a part of them")
        if given is made and not torch.equal(each.logits, logits):
            raise _OtherLossError("the same logits in training and in evaluation, with a mask and without", "others")
        if each.result != tried[0].result:
            raise _OtherLossError("logits that nothing but the loss reads", "a loss to which the forward adds some of them")
    if torch.equal(logits, made):
        return None
    cap = getattr(model.config, "final_logit_softcapping", None)
    if isinstance(cap, (int, float)) and torch.allclose(logits, cap * torch.tanh(made / cap), rtol=1e-5, atol=1e-5):
        return float(cap)
    raise _OtherLossError(
        "logits that go to the loss as they are, or under final_logit_softcapping", "others, such as scaled ones"
    )


def _tried(twin: nn.Module, parts: tuple[nn.Module, Any], made: torch.Tensor, training: bool, masked: bool) -> ReachedLoss:
    """What the forward gives its loss function where the head makes ``made``; _OtherLossError if it does not, or not once."""
    labels = torch.zeros(1, TOKENS, dtype=torch.int64, device="cpu")
    decoder, at_head = parts
    hidden = torch.zeros(1, TOKENS, at_head.weight.shape[1], device="cpu")
    found: list[ReachedLoss] = []
    calls: list[nn.Module] = []

    def record(logits: Any = None, labels: Any = None, vocab_size: Any = None, **_: Any) -> torch.Tensor:
        found.append(ReachedLoss(logits, labels, vocab_size, None))
        return torch.ones((), device="cpu")

    def given(of: nn.Module, result: Any, *_: Any, **__: Any) -> Any:
        calls.append(of)
        return result

    takes = inspect.signature(type(twin).forward).parameters
    options: dict[str, Any] = {name: False for name in ("output_router_logits",) if name in takes}  # no decoder routes here
    if masked and "attention_mask" in takes:
        options["attention_mask"] = torch.ones_like(labels)
    for part, result in ((decoder, _Outputs(hidden)), (at_head, made)):
        vars(part).update({FORWARD: partial(given, part, result), **{name: {} for name in HOOKS}})
    vars(twin)[LOSS] = record
    with torch.no_grad(), training_or_not(twin, training):
        try:
            output = type(twin).forward(twin, input_ids=labels, labels=labels, **options)
        except Exception as error:  # of a stranger's forward, which wants something else
            raise _OtherLossError(
                "a forward of decoder, output head and loss_function", f"{type(error).__name__}: {error}"[:200]
            ) from error
    if len(found) != 1 or found[0].labels is not labels:
        raise _OtherLossError(
            "one call of loss_function with the labels", "none" if not found else "other labels, or several calls"
        )
    if calls.count(at_head) != 1:
        raise _OtherLossError("one call of the output head", f"{calls.count(at_head)}")
    loss = output[0] if isinstance(output, tuple) else getattr(output, "loss", None)
    return found[0]._replace(result=loss.item() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else loss)


class _Outputs:
    """What a decoder returns: hidden states, first or by name, and None for all else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
