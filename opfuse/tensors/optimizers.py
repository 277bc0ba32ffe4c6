"""A torch optimizer that steps on high-precision masters of the parameters that live quantized.

Masters are in the optimizer's groups only while it steps: hooks of torch exchange them for the parameters. So every optimizer
class works, and whatever looks between steps (scalers, clipping, checkpoints by name, a closure) finds the model's parameters.
Masters live beside ``optimizer.state`` and enter state dicts there, since torch takes any state for that of an optimizer that
has stepped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from opfuse.errors import OpfuseWarning, OptimizerError, ShapeError, describe
from opfuse.tensors.masters import checked, exact, master_weights, stored_in, strayed
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.operations import copy_each
from opfuse.torch_private.tensors import version_of

MASTER = "master"
"""The name of a master among the state of its parameter in ``optimizer.state_dict()``."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
_LOAD = "load_state_dict of an optimizer with masters"
_WITH_MASTERS: WeakKeyDictionary[Optimizer, _Masters] = WeakKeyDictionary()


def with_masters(optimizer: AnyOptimizer, *, dtype: torch.dtype = torch.float32) -> AnyOptimizer:
    """Return ``optimizer``, whose ``step()`` now updates masters of parameters stored quantized and casts them back.

    Between steps its groups hold the model's parameters, so ``zero_grad``, ``GradScaler``, clipping, schedulers and
    torch.distributed.checkpoint work as usual. In a step the masters replace them, with gradients in ``dtype``, that of masters;
    while a closure runs, the parameters are back and have the current values. Other parameters are updated as usual.

    - A master starts as :func:`opfuse.master_weights` says; parameters of a group that is added later get one too.
    - Masters in torch.bfloat16 take half the bytes, and want an optimizer that rounds its updates at random, as those of
      torchao.optim with ``bf16_stochastic_round=True``. They round what they start from; parameters become their casts at once.
    - ``state_dict()`` has the masters, and ``load_state_dict`` writes them, bit for bit, and their casts into the parameters.
      Load after this call: without it torch would round the state to the parameters' dtype.
    - If something else writes a parameter, so that it is no longer the cast of its master, the master takes its values, with an
      OpfuseWarning.
    - After a step that raised, masters stay in the groups until the next one, which gives an OpfuseWarning: the gradients that
      ``optimizer.zero_grad()`` does not reach in between are zeroed by ``model.zero_grad()``.
    - Copying or pickling an optimizer drops its hooks, as in torch: build the other one and load the state.

    After ``fully_shard`` masters are shards like their parameters. An OpfuseWarning if nothing trainable is stored quantized,
    and of masters in bfloat16 whose optimizer is known to round them to the nearest value.
    OptimizerError for what is no torch optimizer, for a second call, and at the first step of one that keeps parameters outside
    its groups. DtypeError for another ``dtype``.
    """
    if not isinstance(optimizer, Optimizer):
        got, cure = f"a {type(optimizer).__name__}", "pass the optimizer: with_masters(torch.optim.AdamW(model.parameters()))"
        raise OptimizerError(describe("with_masters", wanted="a torch.optim.Optimizer", got=got, cure=cure))
    if optimizer in _WITH_MASTERS:
        cure = "call with_masters once, where the optimizer is built"
        raise OptimizerError(describe("with_masters", wanted="an optimizer without masters", got="one that has them", cure=cure))
    masters = _Masters(checked(dtype, "with_masters"))
    masters.settle(optimizer)
    if not masters.of:
        cure = "call it behind fuse_, or over a model made under quantized_model_init; without stored weights leave it out"
        _warn("with_masters", wanted="a trainable parameter that lives quantized", got="none in the groups", cure=cure)
    own = type(optimizer).__module__.startswith("torch.optim")  # none of which rounds at random
    if dtype == torch.bfloat16 and not getattr(optimizer, "bf16_stochastic_round", not own):
        wanted, got = "an optimizer that rounds at random for masters in bfloat16", f"{type(optimizer).__name__}, which does not"
        cure = "leave dtype out, for masters in fp32, or pass torchao.optim.AdamW8bit(…, bf16_stochastic_round=True)"
        _warn("with_masters", wanted=wanted, got=f"{got}, so that small updates are lost", cure=cure)
    optimizer.register_step_pre_hook(masters.before_step)
    optimizer.register_step_post_hook(masters.after_step)
    optimizer.register_state_dict_pre_hook(masters.settle)
    optimizer.register_state_dict_post_hook(masters.saved)
    optimizer.register_load_state_dict_pre_hook(masters.before_load)
    optimizer.register_load_state_dict_post_hook(masters.after_load)
    _WITH_MASTERS[optimizer] = masters
    return optimizer


_REPLACED = "opfuse_replaced_by"
"""The attribute of a parameter that says which one a module has in its place, and where."""


def mark_replaced(parameter: torch.Tensor | None, other: torch.Tensor, path: str) -> None:
    """Have the steps of optimizers that hold ``parameter`` raise: a module of the model has ``other`` at ``path`` now."""
    if parameter is not None:
        setattr(parameter, _REPLACED, (path, other))
        _watch_steps()


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_replaced)


def _check_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """OptimizerError at a step that would train what no module reads; one of frozen parameters trains nothing."""
    path = next((path for p in _parameters(optimizer) if (path := _replaced_at(p)) is not None), None)
    if path is not None:
        got = f"{path} as it was before fuse_ or unfuse_, which put a parameter over the same bytes in its place"
        cure = "make the optimizer behind fuse_: opfuse.with_masters(torch.optim.AdamW(model.parameters()))"
        where = f"{type(optimizer).__name__}.step"
        raise OptimizerError(describe(where, wanted="parameters of the model", got=got, cure=cure))


def _replaced_at(parameter: torch.Tensor) -> str | None:
    """Where a module has another parameter in the place of this one, if either is trained."""
    path, now = None, parameter
    while (found := getattr(now, _REPLACED, None)) is not None:
        path, now = found
    return path if now.requires_grad or parameter.grad is not None else None


def settle_masters(optimizer: Optimizer) -> None:
    """Have masters take what was written into their parameters since the last step, as a step does first; of others, nothing."""
    masters = _WITH_MASTERS.get(optimizer)
    if masters is not None:
        masters.settle(optimizer)


class _Masters:
    """The masters of one optimizer, and its hooks, which exchange them for their parameters and back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.of: dict[torch.Tensor, torch.Tensor] = {}
        self._seen: dict[torch.Tensor, object] = {}
        self._loading: dict[torch.Tensor, torch.Tensor | None] = {}
        self._inside = False

    @torch.no_grad()
    def settle(self, optimizer: Optimizer) -> None:
        """Give every parameter that needs one a master with its values."""
        self._adopt(optimizer)
        others = [p for p in self.of if self._seen[p] != _write_stamp(p) and strayed(p, self.of[p])]
        for p in others:
            self.of[p].copy_(exact(p))
        self._round(others)
        self._remember(self.of)
        if others:
            got = f"{len(others)} of {len(self.of)} with other values"
            cure = "none, if the new values are meant: masters start from them"
            _warn("with_masters", wanted="parameters that are the casts of their masters", got=got, cure=cure)

    def _adopt(self, optimizer: Optimizer) -> None:
        if self._inside:  # torch calls no hook at the end of a step or a load that raises
            self._rest(optimizer)
            got, cure = "one that raised, after which zero_grad() meets masters", "call model.zero_grad() after it"
            _warn("with_masters", wanted="a step, or a load, that ends", got=got, cure=cure)
        wanting = (p for p in _parameters(optimizer) if p.requires_grad and p not in self.of)
        new = master_weights(wanting, dtype=self.dtype)
        self.of.update(new)
        self._round(list(new))
        self._remember(new)

    # -- step ----------------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Put masters in the places of their parameters, and wrap a closure so that it finds the parameters."""
        self._enter(optimizer)
        own, *rest = args

        def outside(closure: Any) -> Any:
            return self._outside(optimizer, closure) if callable(closure) else closure

        return (own, *map(outside, rest)), {name: outside(value) for name, value in kwargs.items()}

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Put the parameters back, as casts of their masters."""
        self._leave(optimizer)

    def _outside(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._leave(optimizer)
            result = closure()
            self._enter(optimizer)
            return result

        return run

    @torch.no_grad()
    def _enter(self, optimizer: Optimizer) -> None:
        self.settle(optimizer)
        given = [p for p in self.of if p.grad is not None]
        grads = dict(zip(given, _in_dtype([p.grad for p in given], self.dtype)))
        for p, master in self.of.items():
            master.grad = grads.get(p)
        self._exchange(optimizer, self.of)
        self._inside = True

    @torch.no_grad()
    def _leave(self, optimizer: Optimizer) -> None:
        self._rest(optimizer)
        if any(self._seen[p] != _write_stamp(p) for p in self.of):
            got, cure = f"{type(optimizer).__name__}, which writes the parameters", "call with_masters on the optimizer inside it"
            raise OptimizerError(describe("with_masters", wanted="an optimizer that steps on its groups", got=got, cure=cure))
        updated = [p for p, master in self.of.items() if master.grad is not None]
        self._cast(updated)
        for p in updated:
            self.of[p].grad = None
        self._remember(updated)

    def _round(self, parameters: Sequence[torch.Tensor]) -> None:
        """Where masters cannot hold the values of ``parameters``, give these the ones that masters have."""
        if self.dtype != torch.float32:
            self._cast(parameters)

    @torch.no_grad()
    def _cast(self, parameters: Sequence[torch.Tensor]) -> None:
        """Write the casts of masters into their ``parameters``; scales of all shards are found in one collective."""
        if parameters:
            copy_each([stored_in(p) for p in parameters], [stored_in(self.of[p]) for p in parameters])
            increment_version([p for p in parameters if stored_in(p) is not p])

    def _rest(self, optimizer: Optimizer) -> None:
        if self._inside:
            self._exchange(optimizer, {master: p for p, master in self.of.items()})
        self._inside = False

    @staticmethod
    def _exchange(optimizer: Optimizer, others: dict[torch.Tensor, torch.Tensor]) -> None:
        """In place: an optimizer may hold the list of a group, or the state of a parameter, while its closure runs."""
        for group in optimizer.param_groups:
            group["params"][:] = [others.get(p, p) for p in group["params"]]
        for p in others.keys() & optimizer.state.keys():
            optimizer.state[others[p]] = optimizer.state.pop(p)

    def _remember(self, parameters: Iterable[torch.Tensor]) -> None:
        self._seen.update((p, _write_stamp(p)) for p in parameters)

    # -- state dicts ---------------------------------------------------------------------------------------------------

    def saved(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict`` with the masters; the dictionaries in it are the optimizer's own and stay as they are."""
        state = dict(state_dict["state"])
        for p, number in zip(_parameters(optimizer), _numbers(state_dict)):
            if p in self.of:
                state[number] = {**state.get(number, {}), MASTER: self.of[p]}
        return {**state_dict, "state": state}

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """``state_dict`` less its masters. They stand in the groups, to whose dtype torch casts what it loads."""
        self._adopt(optimizer)
        if [len(group["params"]) for group in optimizer.param_groups] != [len(g["params"]) for g in state_dict["param_groups"]]:
            return None  # which torch refuses
        state, loading = dict(state_dict["state"]), {}
        for p, number in zip(_parameters(optimizer), _numbers(state_dict)):
            if p in self.of:
                entries = dict(state.get(number, {}))
                loading[p] = _fitting(p, entries.pop(MASTER, None))
                state[number] = entries
        self._loading = loading
        self._exchange(optimizer, self.of)
        self._inside = True
        return {**state_dict, "state": {number: entries for number, entries in state.items() if entries != {}}}

    @torch.no_grad()
    def after_load(self, optimizer: Optimizer) -> None:
        """The masters that were loaded, and their casts in the parameters."""
        self._rest(optimizer)
        loading, self._loading = self._loading, {}
        missing = [p for p, values in loading.items() if values is None]
        for p, values in loading.items():
            self.of[p].copy_(exact(p) if values is None else values)
        self._cast([p for p, values in loading.items() if values is not None])
        self._round(missing)
        self._remember(loading)
        if missing:
            got = f"none for {len(missing)} of {len(loading)}"
            cure = "none, if it was saved without masters: they start from the parameters"
            _warn(_LOAD, wanted="a master of each quantized parameter", got=got, cure=cure)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _numbers(state_dict: dict[str, Any]) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))


def _fitting(parameter: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor | None:
    """``values``, which ``copy_`` must not spread over another shape; ShapeError if it would."""
    if values is not None and values.shape != parameter.shape:
        cure = "load the state of the same model"
        wanted, got = f"a master of shape {tuple(parameter.shape)}", tuple(values.shape)
        raise ShapeError(describe(_LOAD, wanted=wanted, got=got, cure=cure))
    return values


def _in_dtype(grads: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """The gradients in ``dtype``: those that are, themselves; copies of others, those of one dtype at a time."""
    made = [g if g.dtype == dtype else torch.empty_like(g, dtype=dtype) for g in grads]
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for new, old in zip(made, grads):
        if new is not old:
            news, olds = groups.setdefault((old.device, old.dtype), ([], []))
            news.append(stored_in(new))
            olds.append(stored_in(old))
    for news, olds in groups.values():
        copy_each(news, olds)
    return made


def _write_stamp(parameter: torch.Tensor) -> object:
    """Changes whenever something writes ``parameter``, its ``.data`` or its planes; may change without."""
    held = stored_in(parameter)
    planes = held.held.tensors() if isinstance(held, QuantizedTensor) else [held]
    return [(plane.data_ptr(), version_of(plane)) for plane in planes]


def _warn(where: str, *, wanted: str, got: str, cure: str) -> None:
    warnings.warn(describe(where, wanted=wanted, got=got, cure=cure), OpfuseWarning, stacklevel=4)
