"""Kernels: a .cu file, a thin launch, and the torch function that defines the result.

Calling a kernel launches it for a CUDA tensor, and runs the definition for any other tensor, and for all under
``OPFUSE_REFERENCE=1``. The calls on which the two are compared are in ``tests/kernels/cases``.

Running the cases with a launcher that records shows what a kernel launches, on a CPU. So tests compile variants without a GPU:
as many as cover each definition and each op of a chain once in every run, all of them for every architecture among slow tests.
"""

from __future__ import annotations

import functools
import inspect
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from opfuse.environment import variable
from opfuse.errors import KernelError, describe
from opfuse.events import KernelSized, emit, listeners
from opfuse.kernels.engine.certificates import Certificate, Tried, certificate_of, certified, is_recorded_arch
from opfuse.kernels.engine.compiling import Variant, source_text
from opfuse.kernels.engine.launch import Grid, is_dry, launch, stands_for_gpu
from opfuse.torch_private.dispatch import in_fake_mode

P = ParamSpec("P")
R = TypeVar("R")

OLDEST = (8, 0)
"""The first compute capability with the warp reductions that kernels use."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Launcher(Protocol):
    """The function with which a launch function queues its kernels."""

    def __call__(
        self, variant: Variant, entry: str, grid: Grid, layout: struct.Struct, *fields: int | float, device: int
    ) -> None:
        """Queue kernel ``entry`` of ``variant``; its parameter is ``fields`` packed by ``layout``."""


@dataclass(frozen=True)
class Tolerance:
    """How far a launch may be from the definition.

    ulp: units in the last place of floats; 0 for equal bits. With 0, integers must be equal, too; otherwise they may be 1 apart,
    as FP8 codes of floats that differ may be: a step of E4M3 is at least 16 units of bf16, and more of other floats.
    """

    ulp: int = 0

    def __str__(self) -> str:
        return f"{self.ulp} ulp" if self.ulp else "bitwise"

    def mismatch(self, got: torch.Tensor, wanted: torch.Tensor) -> str | None:
        """Which element is the first that is too far off, and how many are; None if none is. NaN equals NaN."""
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            return f"wants {wanted.dtype} {tuple(wanted.shape)}, got {got.dtype} {tuple(got.shape)}"
        got, wanted = got.detach().cpu(), wanted.detach().cpu()
        most = self.ulp if got.is_floating_point() else min(self.ulp, 1)
        wrong = (_ordered(got) - _ordered(wanted)).abs() > most
        wrong &= ~(got.isnan() & wanted.isnan())
        if not wrong.any():
            return None
        at = tuple(wrong.nonzero()[0].tolist())
        return f"element {at}: wants {wanted[at].item()!r}, got {got[at].item()!r}; {int(wrong.sum())} of {wrong.numel()} differ"


BITWISE = Tolerance()


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 in the order of the values, with steps of one between neighbouring floats; -0 and +0 are one step apart."""
    if not x.is_floating_point():
        return x.to(torch.int64)
    bits = x.contiguous().view(_SIGNED[x.element_size()]).to(torch.int64)
    return torch.where(bits < 0, -(bits & ~(-1 << (8 * x.element_size() - 1))) - 1, bits)


class Arguments(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = {}


Case = Callable[[torch.device], Arguments]
"""Makes the arguments of a call on a device; the same values on every device and at every call."""


@dataclass(frozen=True, eq=False)
class Kernel(Generic[P, R]):
    """A function of CUDA tensors with the arguments and results of its ``reference``."""

    name: str
    source: str
    run: Callable[Concatenate[Launcher, P], R]
    reference: Callable[P, R]
    tolerance: Tolerance
    trials: Callable[[], Mapping[str, Case]] | None = None
    right: dict[int, bool] = field(default_factory=dict, repr=False)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x = leading(args or (kwargs.get(self._first),))
        if x is not None and x.is_cuda and x.numel() and runs_kernels(x):
            right = self.right.get(x.get_device())
            if right or (right is None and self.is_right(x.get_device())):
                return self.run(launch, *args, **kwargs)
        elif x is not None and x.is_meta and x.numel() and stands_for_gpu():
            return self._sized(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def _sized(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """What a call makes of tensors without memory."""
        made = self.run(_queues_nothing, *args, **kwargs)
        if KernelSized in listeners():
            emit(KernelSized((args, kwargs)))
        return made

    def is_right(self, device: int) -> bool:
        """Whether launches on a CUDA device have the results of the definition, as far as it was tried (certificates.py).

        Tried at the first launch on a device that this project has not recorded; of several threads one tries. PlanMissError
        while a stream is captured.
        """
        if self.trials is None or is_recorded_arch(torch.cuda.get_device_capability(device)):
            return self.right.setdefault(device, True)
        if is_dry():
            return True
        with _trying:
            if device not in self.right and self not in _tried:  # which a trial launches itself
                _tried.append(self)
                try:
                    found = certified(tried(self), device, lambda: examine(self, torch.device("cuda", device)))
                    self.right[device] = found.passed
                finally:
                    _tried.remove(self)
            return self.right.get(device, True)

    @functools.cached_property
    def _first(self) -> str:
        """The name of the parameter that decides where a call runs."""
        return next(iter(inspect.signature(self.reference).parameters))

    def launches(self, cases: Mapping[str, Case]) -> dict[tuple[Variant, str], tuple[str, ...]]:
        """By (variant, entry), the kernels that these cases launch, each with the names of its cases; needs no GPU."""
        found: dict[tuple[Variant, str], tuple[str, ...]] = {}
        for name, case in cases.items():

            def record(variant: Variant, entry: str, *_: Any, name: str = name, **__: Any) -> None:
                found[variant, entry] = (*found.get((variant, entry), ()), name)

            arguments = case(torch.device("cpu"))
            x = leading(arguments.args)
            if x is not None and x.numel():
                self.run(record, *arguments.args, **arguments.kwargs)
        return found


def _queues_nothing(variant: Variant, entry: str, grid: Grid, layout: struct.Struct, *fields: int | float, device: int) -> None:
    """The launcher of tensors without memory."""


_trying, _tried = threading.RLock(), list[Kernel[Any, Any]]()
"""The kernels that are tried now, by the thread that has the lock."""


def _key(kernel: Kernel[Any, Any]) -> str:
    return f"kernel {kernel.name}"


def tried(kernel: Kernel[Any, Any]) -> Tried:
    """A kernel, as certificates have it."""
    instead = "torch computes the definition here, slower, and right"
    return Tried(_key(kernel), _key(kernel), "the bits of its definition", instead)


def wrong_kernels(device: int) -> dict[str, str]:
    """By name, the kernels that were found to be wrong on a CUDA device and are computed by their definitions; what was wrong."""
    if is_recorded_arch(torch.cuda.get_device_capability(device)):
        return {}
    found = {_key(kernel): certificate_of(_key(kernel), device) for kernel in kernels() if kernel.trials is not None}
    return {name: known.fault for name, known in found.items() if known is not None and not known.passed}


def examine(kernel: Kernel[Any, Any], device: torch.device, run: Callable[..., Any] | None = None) -> Certificate:
    """Compare launches on ``device`` with the definition on the CPU, on the kernel's trials; waits for it.

    run: what is compared; None: the kernel's launches. Names of trials that begin with "exact" have equal bits, whatever the
    kernel's tolerance is.
    """
    run = run or functools.partial(kernel.run, launch)
    for name, case in (kernel.trials or dict)().items():
        with torch.device("cpu"):  # where values are drawn, whatever torch's default device is
            here, there = case(torch.device("cpu")), case(device)
        tolerance = BITWISE if name.startswith("exact") else kernel.tolerance
        try:
            wanted, got = kernel.reference(*here.args, **here.kwargs), run(*there.args, **there.kwargs)
            pairs = zip(tensors_in((got, there.args)), tensors_in((wanted, here.args)), strict=True)
            fault = next((fault for pair in pairs if (fault := tolerance.mismatch(*pair))), "")
        except torch.OutOfMemoryError:  # of the moment, and no verdict to be kept
            raise
        except Exception as error:  # whatever a launch raises: it does not run here
            fault = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if fault:
            return Certificate(f"{name}: {fault}")
    return Certificate("")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(each)


CaseTable = Mapping[Kernel[..., Any], Mapping[str, Case]]
"""Calls that reach every branch of a kernel and every variant that is ever compiled, by kernel and by the name of the case."""


def leading(args: Sequence[Any]) -> torch.Tensor | None:
    """The tensor that decides where a call runs: the first argument, or the first tensor of a sequence there; None if neither."""
    first = args[0]
    if isinstance(first, torch.Tensor):
        return first
    return leading(first) if isinstance(first, (list, tuple)) and first else None


_DENSE = frozenset((torch.Tensor, torch.nn.Parameter))


def is_dense(x: object) -> bool:
    """Whether ``x`` is a plain tensor or parameter, whose address kernels can read; other classes of tensors may have none."""
    return type(x) in _DENSE


def runs_kernels(x: torch.Tensor) -> bool:
    """Whether kernels run on this CUDA tensor: if it is dense, its device new enough, and no tracer runs."""
    return type(x) in _DENSE and kernels_run_on(x.get_device())


def on_kernels(x: torch.Tensor) -> bool:
    """Whether ``x`` is on a GPU whose kernels run on it, or stands for such a tensor (launch.py)."""
    return runs_kernels(x) if x.is_cuda else x.is_meta and stands_for_gpu()


def kernels_run_on(device: int) -> bool:
    """Whether kernels run on dense tensors of this CUDA device here and now."""
    return _enabled(device) and not torch.compiler.is_compiling() and not in_fake_mode()


@functools.cache
def _enabled(device: int) -> bool:
    """Whether the device and the environment allow kernels; the environment is read at the first launch on a device."""
    wanted = variable("OPFUSE_REFERENCE") in ("", "0") and torch.version.cuda is not None
    return wanted and torch.cuda.get_device_capability(device) >= OLDEST


@contextmanager
def definitions_alone() -> Iterator[None]:
    """Inside, the definitions compute everything in this process, on every device, as under ``OPFUSE_REFERENCE=1``."""
    global _enabled  # noqa: PLW0603 - the switch that is asked at every launch
    before, _enabled = _enabled, functools.cache(lambda device: False)
    try:
        yield
    finally:
        _enabled = before


_KERNELS: dict[str, Kernel[Any, Any]] = {}


def kernels() -> Iterator[Kernel[Any, Any]]:
    """Every registered kernel, by name."""
    return (_KERNELS[name] for name in sorted(_KERNELS))


def kernel(
    source: str,
    *,
    reference: Callable[P, R],
    tolerance: Tolerance,
    trials: Callable[[], Mapping[str, Case]] | None = None,
) -> Callable[[Callable[Concatenate[Launcher, P], R]], Kernel[P, R]]:
    """Register a launch function under its own name. KernelError unless it can be tested against ``reference``.

    The calls on which it is tested are in ``CASES`` of a module in ``tests/kernels/cases``.

    Args:
        source: the .cu file, in ``opfuse/kernels/cuda``.
        reference: the definition. The launch function takes a launcher, then exactly its parameters.
        tolerance: how far the two may differ.
        trials: makes a few small calls, by name, on which the two are compared before the first launch on a device that this
            project has not recorded; None: on none.
    """

    def register(run: Callable[Concatenate[Launcher, P], R]) -> Kernel[P, R]:
        name = run.__name__
        _check(name, "a launch with the parameters of its reference", _parameters(reference), _parameters(run)[1:])
        source_text(source, f"kernel {name}")
        _check(name, "a Tolerance", True, isinstance(tolerance, Tolerance))
        made = Kernel(name, source, run, reference, tolerance, trials)
        _KERNELS[name] = made
        return made

    return register


def _parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def _check(name: str, wanted: str, expected: object, got: object) -> None:
    if got != expected:
        raise KernelError(describe(f"kernel {name}", wanted=f"{wanted} ({expected})", got=got, cure="register it with these"))
