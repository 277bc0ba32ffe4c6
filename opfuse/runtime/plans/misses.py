"""What a call does that finds no plan: it checks what it is given and makes one, for itself or for later calls too, or raises.

It warns of misses that repeat and, once a process, of what a plan finds on this machine: a release of torch that nobody tried,
products that no hardware runs.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch.nn.utils.parametrize import is_parametrized

from opfuse.core.operation import BasicOperation, FusibleOperation, cure_of_extras
from opfuse.core.signature import is_foreign
from opfuse.core.state import StatefulModule
from opfuse.errors import (
    DtypeError,
    OpfuseWarning,
    PipelineError,
    PlanMissError,
    ShapeError,
    UnsupportedError,
    describe,
    number_of,
)
from opfuse.kernels.engine.launch import is_capturing
from opfuse.keys import Miss
from opfuse.recipes.availability import BF16, RATES, RECORD, Arch, support
from opfuse.recipes.recipe import Recipe
from opfuse.tensors.quantizers.base import is_library_code
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.modules import HOOKS
from opfuse.torch_private.names import TRIED
from opfuse.torch_private.sharding import is_flat_parameter
from opfuse.torch_private.tensors import base_of


class PlanPolicy(NamedTuple):
    """on_miss: as of :func:`on_miss`. trial, alone: as of :func:`trial_plans`."""

    on_miss: str = "plan"
    trial: bool = False
    alone: bool = False


_policy: ContextVar[PlanPolicy] = ContextVar("opfuse_plan_policy", default=PlanPolicy())  # noqa: B039

plan_policy = _policy.get
"""The policy of the context."""


@contextmanager
def _with_policy(**changes: Any) -> Iterator[None]:
    reset = _policy.set(plan_policy()._replace(**changes))
    try:
        yield
    finally:
        _policy.reset(reset)


@contextmanager
def on_miss(policy: str) -> Iterator[None]:
    """Inside the block a call without a plan makes one (``"plan"``) or raises PlanMissError (``"error"``)."""
    if policy not in ("plan", "error"):
        raise PlanMissError(describe("on_miss", wanted="'plan' or 'error'", got=repr(policy), cure="choose one of the two"))
    with _with_policy(on_miss=policy):
        yield


@contextmanager
def trial_plans(*, alone: bool = False) -> Iterator[None]:
    """Inside the block a plan is made for each call, which no cache keeps.

    alone: without fusions if that changes no bit: not under ``rounding="single"``, nor with fusion functions.
    """
    with _with_policy(trial=True, alone=alone):
        yield


def check_miss(where: str, why: Callable[[], str]) -> None:
    """PlanMissError where a plan may not be made now: inside ``on_miss("error")``, and while a CUDA graph is captured."""
    if plan_policy().on_miss == "error" or is_capturing():
        cure = "run the call once before graph capture or on_miss('error')"
        raise PlanMissError(describe(f"plan of {where}", wanted="a plan made before", got=why(), cure=cure))


SAME, AGAIN = 16, 3
"""How many misses in a row are warned of: if all differ in the same single leaf; if their keys had plans that were dropped."""

CURES = {
    "env.recipe": "make the recipe once, outside of the loop, and pass that object",
    "env.rows_class": "pad the rows to a multiple of 128, or keep to few sizes",
    "env.aligned": "pass tensors whose memory begins at a multiple of 16 bytes",
    "env.amax_group": "make the process group once",
    "rules": "register fusions once, outside of the loop",
    "inputs": "keep dtypes, devices and requires_grad of inputs and parameters as they are",
    "ops": "build the ops once; a change of an op is another pipeline",
}
"""What to do about a leaf, by the beginning of its path."""


class ThrashingDetector:
    """Detects misses of one cache of ``size`` plans that repeat."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.warned = False
        self._last: deque[Miss] = deque(maxlen=SAME)

    def record(self, where: str, miss: Miss) -> str | None:
        """The warning, once, when misses begin to repeat; else None. where: how the pipeline is called."""
        self._last.append(miss)
        if self.warned or len(self._last) < AGAIN or (found := self._pattern()) is None:
            return None
        self.warned = True
        path, got = found
        cure = next((cure for begin, cure in CURES.items() if path.startswith(begin)), "keep this value as it is")
        return describe(f"plans of {where}", wanted="keys that come back", got=got, cure=cure)

    def _pattern(self) -> tuple[str, str] | None:
        """The path of the leaf that changes, and what happens."""
        again = [miss for miss in list(self._last)[-AGAIN:] if miss.again]
        paths = Counter(difference.path for miss in self._last for difference in miss.differences)
        if len(again) == AGAIN:
            path = paths.most_common(1)[0][0] if paths else "key"
            return path, f"more than {self.size} in turn, so that each is dropped before it comes back; what flips is {path}"
        alone = {difference.path for miss in self._last for difference in miss.differences if len(miss.differences) == 1}
        if len(self._last) == SAME and len(alone) == 1 and paths.total() == SAME:
            path, last = alone.pop(), self._last[-1].differences[0]
            return path, f"{SAME} misses in a row that differ in {path} alone, the last time {last}"
        return None


# -- what a plan finds on this machine -------------------------------------------------------------------------------------------


def warn_of_machine(recipe: Recipe | None, device: str, arch: Arch) -> None:
    """Warn, once each, of an untried torch and of a recipe whose products are emulated on a CUDA device."""
    _warn_of_torch(torch.__version__)
    if recipe is not None and device == "cuda":
        _warn_of_emulation(recipe, arch)


@cache
def _warn_of_torch(installed: str) -> None:
    release = _release(installed)
    if not _release(TRIED[0]) <= release <= _release(TRIED[-1]):
        wanted, cure = f"a release from {TRIED[0]} to {TRIED[-1]}, which were tried", "run `opfuse doctor --only torch`"
        text = describe("torch", wanted=wanted, got=installed, cure=f"{cure}, which names what has changed")
        warnings.warn(text, OpfuseWarning, stacklevel=4)


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


_emulated: set[tuple[str, Arch]] = set()


def _warn_of_emulation(recipe: Recipe, arch: Arch) -> None:
    if (key := (recipe.kind, arch)) in _emulated:
        return
    _emulated.add(key)
    found = support(recipe, arch)
    if found.status == "emulated":
        got = f"emulated products on compute capability {arch[0]}.{arch[1]}: {found.reason}"
        text = describe(f"recipe {recipe.kind}", wanted="products that this GPU runs natively", got=got, cure=_cost(recipe.kind))
        warnings.warn(text, OpfuseWarning, stacklevel=5)


def _cost(kind: str) -> str:
    """What emulation costs, and where a user learns what else there is."""
    rate = RATES.get(kind)
    slow = "" if rate is None or rate >= BF16 else f", at {BF16 / rate:.2f} times the time of bf16 on an H200 ({RECORD})"
    return f"go on with the exact numbers{slow}, or choose a native recipe from `opfuse doctor`"


# -- what a call is given: later calls of the key have passed ------------------------------------------------------------------

_warned: WeakSet[FusibleOperation] = WeakSet()
_warned_plain: WeakSet[FusibleOperation] = WeakSet()


class PipelineInputs(Protocol):
    """The parts of a pipeline that the checks read, as :class:`~opfuse.runtime.fuser.OperationFuser` says."""

    label: str
    ops: tuple[BasicOperation, ...]
    members: tuple[FusibleOperation, ...]
    extra_inputs: tuple[str | None, ...]


def check_count(pipeline: PipelineInputs, extras: Sequence[torch.Tensor]) -> None:
    """PipelineError unless ``extras`` are as many as the pipeline's extra inputs."""
    if len(extras) != len(pipeline.extra_inputs):
        wanted = number_of(len(pipeline.extra_inputs), "extra input")
        raise PipelineError(describe(pipeline.label, wanted=wanted, got=len(extras), cure=cure_of_extras(pipeline.ops)))


def check_call(pipeline: PipelineInputs, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> None:
    """All checks of a call: typed errors for tensors, weights and devices that it cannot take; warnings for hooks.

    Made where no plan is found: the key of a plan tells how many inputs there are, and of what kinds.
    """
    check_count(pipeline, extras)
    check_tensors(pipeline.label, *extras, what="extra input")
    for i, tensor in enumerate((x, *extras)):
        if tensor.is_nested or tensor.layout != torch.strided:
            raise _not_strided(pipeline.label, tensor)
        if is_foreign(tensor):
            raise _foreign(f"{pipeline.label} {f'extra input {i - 1}' if i else 'input'}", tensor, _LOCAL)
    for op in pipeline.ops:
        _check_parameters(op)
        _warn_of_plain(op)
        # A module of torch that lends its parameters has no states: the op that fuse_ made of it has them.
        (op.owner if isinstance(op.owner, StatefulModule) else op).note_called()
    _check_devices(pipeline, x, extras)
    _warn_of_hooks(pipeline.members)


def check_tensors(label: str, *given: object, what: str = "input") -> None:
    """DtypeError, a TypeError, for the first that is no tensor."""
    for value in given:
        if not isinstance(value, torch.Tensor):
            got = type(value).__name__
            raise DtypeError(describe(f"{label} {what}", wanted="a torch.Tensor", got=got, cure="pass a tensor"))


def resolved(pipeline: PipelineInputs, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The input and the extra inputs of a call, some with torch's negative bit, without it.

    UnsupportedError for an extra input with this bit where an op writes into extra inputs: it would write into a copy.
    """
    for op in pipeline.ops:
        if op.writes_extras and any(extra.is_neg() for extra in given[1:]):
            raise _negative(f"{op.label} extra input", "a tensor to overwrite", "pass extra.resolve_neg()")
    return tuple(tensor.resolve_neg() for tensor in given)


def _negative(where: str, wanted: str, cure: str) -> UnsupportedError:
    got = "one with torch's negative bit, as z.conj().imag has it"
    return UnsupportedError(describe(where, wanted=f"{wanted} as it lies in memory", got=got, cure=cure))


def _not_strided(label: str, tensor: torch.Tensor) -> UnsupportedError:
    """Of a sparse or nested tensor."""
    got, cure = str(tensor.layout), "pass x.to_dense()"
    if tensor.is_nested:
        got = "a nested tensor"
        cure = "pass torch.nested.to_padded_tensor(x, 0.0), or the rows of all parts as one tensor"
    return UnsupportedError(describe(label, wanted="strided tensors", got=got, cure=cure))


_LOCAL = "pass x.to_local() where it is whole on each rank, else x.full_tensor()"
_GATHERED = (
    "fully_shard the pipeline or the module that is called, not single ops of it; for tensor parallelism, opfuse.TensorParallel"
)


def _foreign(where: str, tensor: torch.Tensor, cure: str) -> UnsupportedError:
    """Of a DTensor, and of other subclasses that run their operations themselves."""
    got = f"a {type(tensor).__name__}, which dispatches its own operations"
    return UnsupportedError(describe(where, wanted="a plain or a quantized tensor", got=got, cure=cure))


def _check_parameters(op: BasicOperation) -> None:
    """What an op's parameters must be: its own, in memory that kernels read and, for an op of opfuse, of its dtype and shape.

    PipelineError where one is no longer a parameter of its op: weight_norm, pruning, any parametrization. UnsupportedError where
    it is a view into a flat parameter, as ``FullyShardedDataParallel`` makes them, dispatches its own operations or has torch's
    negative bit. DtypeError in a dtype that ops do not compute in, as ``model.to(torch.complex64)`` leaves it. ShapeError for one
    that was replaced by one of another shape: it would broadcast, or normalise other dimensions. An op of a user's own decides
    for itself which dtypes and shapes it takes.
    """
    owner = op.__dict__["owner"]
    moved: list[str] = []
    flat: list[str] = []
    for name, held, key in op.parameter_slots():
        parameter = held.get(key)
        if key not in held:
            moved.append(name)
            if name in vars(owner) and f"{name}_orig" not in owner._parameters:
                flat.append(name)
        elif parameter is not None and (base := base_of(parameter)) is not None and is_flat_parameter(base):
            flat.append(name)
    if flat:
        cure = "shard the Sequential, or a module around it, with torch.distributed.fsdp.fully_shard"
        got = f"{', '.join(flat)} as a plain tensor, as FullyShardedDataParallel leaves it"
        raise UnsupportedError(describe(f"{op.label} parameters", wanted="parameters of its own", got=got, cure=cure))
    if moved or is_parametrized(op) or is_parametrized(owner):
        got = f"{', '.join(moved) or 'one of them'} computed by a parametrization, weight norm or pruning"
        cure = "remove it (torch.nn.utils.parametrize.remove_parametrizations), or use the plain torch.nn module"
        raise PipelineError(describe(f"{op.label} parameters", wanted="parameters of its own", got=got, cure=cure))
    for name, parameter in zip(op.parameter_names, op.parameter_values()):
        if parameter is None:
            continue
        if is_foreign(parameter):
            raise _foreign(f"{op.label} {name}", parameter, _GATHERED)
        if parameter.is_neg():
            cure = f"assign it anew: {name}.data = {name}.data.resolve_neg()"
            raise _negative(f"{op.label} {name}", "a parameter to read", cure)
        if is_library_code(op):
            op.checked_dtype(name, parameter.dtype)
            shape, wanted = tuple(parameter.shape), op.parameter_shape(name)
            if wanted is not None and shape != tuple(wanted):
                cure = "make an op of that size; an op keeps the sizes that it was made with"
                raise ShapeError(describe(f"{op.label} {name}", wanted=f"shape {tuple(wanted)}", got=shape, cure=cure))


_VALUES = "give it memory, module.to_empty(device=...), and values, reset_parameters() of each op or load_state_dict()"
"""The cure for ops on the meta device. A first call does not do this: random weights would pass for loaded ones."""


def _check_devices(pipeline: PipelineInputs, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> None:
    """PipelineError for tensors that are not where the input is; from the first op of a user's own on, that op decides.

    Integers, such as split sizes, may stay on the CPU.
    """
    own = list(takewhile(is_library_code, pipeline.ops))
    for i, extra in enumerate(extras if len(own) == len(pipeline.ops) else ()):
        if extra.device != x.device and (extra.is_floating_point() or extra.device.type != "cpu"):
            raise _elsewhere(f"{pipeline.label} extra input {i}", extra, x)
    for op in own:
        for name, parameter in zip(op.parameter_names, op.parameter_values()):
            if parameter is not None and parameter.device != x.device:
                raise _elsewhere(f"{op.label} {name}", parameter, x)


def _elsewhere(where: str, tensor: torch.Tensor, x: torch.Tensor) -> PipelineError:
    cure = _VALUES if tensor.is_meta else "move the module or the tensor with .to(device)"
    return PipelineError(describe(where, wanted=f"the input's device {x.device}", got=str(tensor.device), cure=cure))


def _warn_of_plain(op: BasicOperation) -> None:
    """One OpfuseWarning for each op whose weight was made quantized and is plain: calls cast it, and a gather sends values."""
    for name in op.stored:
        if op not in _warned_plain and not isinstance(op.parameter(name), QuantizedTensor):
            _warned_plain.add(op)
            got = "a plain one: another was assigned, or its rows were sharded where its format cannot be cut, or shares scales"
            cure = "none needed: it trains in high precision; or have each rank hold whole blocks of rows"
            where, wanted = f"{op.name or op.label} {name}", "a weight that lives quantized, as it was made"
            warnings.warn(describe(where, wanted=wanted, got=got, cure=cure), OpfuseWarning, stacklevel=2)


def _warn_of_hooks(members: Iterable[FusibleOperation]) -> None:
    """One OpfuseWarning for each op with module hooks: a Sequential runs the op's math and does not call the module.

    Likewise for a basic op of a fused op with a ``forward`` of its own.
    """
    parts: dict[FusibleOperation, None] = {}
    for member in members:
        parts.update(dict.fromkeys((member, *member.basic_ops)))
    for op in parts:
        if op in _warned:
            continue
        if not op.joins:
            where, got = f"{op.label} in a fused op", "a forward of its own, which never runs"
            wanted = "none but protocol methods"
            cure = "override op_forward and op_backward, or put the op into the Sequential by itself"
        elif any(map(vars(op).get, HOOKS)):
            where, got = f"{op.label} hooks", "hooks that never run"
            wanted = "none on an op of a pipeline"
            cure = "register them on the Sequential, or on an nn.Module around the op"
        else:
            continue
        _warned.add(op)
        warnings.warn(describe(where, wanted=wanted, got=got, cure=cure), OpfuseWarning, stacklevel=2)
