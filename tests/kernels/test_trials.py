"""Trials of kernels on devices that this project has not recorded: what they find, and what becomes of a kernel that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import opfuse.inspect.casts
import opfuse.ops  # noqa: F401 - these two register all kernels
from opfuse.cli.certify import certified_kernels
from opfuse.errors import OpfuseWarning, PlanMissError
from opfuse.kernels.casts.tensor import cast_mx
from opfuse.kernels.casts.trials import DRAWS
from opfuse.kernels.engine import certificates, registry
from opfuse.kernels.engine.certificates import Certificate, Tried, certified
from opfuse.kernels.engine.cubins import CubinCache
from opfuse.kernels.engine.launch import dry_run
from opfuse.kernels.engine.registry import Kernel, examine, kernels, leading, tensors_in
from tests.turns import in_turn

CPU = torch.device("cpu")


def test_every_kernel_of_a_cast_a_chain_or_a_norm_has_trials() -> None:
    rooms = [kernel.run.__module__.split(".")[2] for kernel in kernels()]
    assert {kernel.name for kernel, room in zip(kernels(), rooms) if room in ("casts", "chains", "norms")} == {
        kernel.name for kernel in certified_kernels()
    }


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_matrices_have_what_is_hard(draw) -> None:
    x = draw.matrix()
    finite = x[x.isfinite()].abs()
    assert bool(x.isnan().any()) is bool(x.isinf().any()) is draw.nonfinite
    assert float(finite.max()) == torch.finfo(draw.dtype).max
    assert 0 < float(finite[finite > 0].min()) < torch.finfo(draw.dtype).smallest_normal
    assert not x[4:16, :16].any()


def spoiled(value: Any, how: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The first argument of a call with a tensor changed; of a list, which holds several of a kind, all."""
    if isinstance(value, torch.Tensor):
        return how(value.clone())
    return [spoiled(each, how) for each in value] if isinstance(value, list) else (spoiled(value[0], how), *value[1:])


def without_last_row(x: torch.Tensor) -> torch.Tensor:
    x[-1] = 0
    return x


def without_nan(x: torch.Tensor) -> torch.Tensor:
    return x.where(~x.isnan(), 0)


@pytest.mark.parametrize(("kernel", "how"), in_turn(certified_kernels(), (without_last_row, without_nan), of=2))
def test_planted_faults_are_found(kernel: Kernel, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Wherever there is something to be wrong about: a gradient has no NaN, and bytes are all codes."""

    def wrong(first: Any, *args: Any, **kwargs: Any) -> Any:
        return kernel.reference(spoiled(first, how), *args, **kwargs)

    firsts = [case(CPU).args[0] for case in kernel.trials().values()]
    pairs = [pair for first in firsts for pair in zip(tensors_in(first), tensors_in(spoiled(first, how)), strict=True)]
    changes = not all(torch.equal(*(each.nan_to_num(nan=7.0) for each in pair)) for pair in pairs)
    assert changes or how is without_nan
    assert ("element" in examine(kernel, CPU, wrong).fault) is changes


def test_a_definition_passes_and_what_raises_is_a_fault() -> None:
    assert examine(cast_mx, CPU, cast_mx.reference).passed

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("an illegal instruction was encountered\nmore")

    assert examine(cast_mx, CPU, raising).fault.endswith("RuntimeError: an illegal instruction was encountered")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):  # it would be kept for good, although the kernel is right
        examine(cast_mx, CPU, full)


# -- on a device that is none ----------------------------------------------------------------------------------------------------


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine of which nobody has a record."""
    for name, value in {
        "get_device_capability": lambda *_: (10, 0),
        "get_device_name": lambda *_: "B200",
        "is_current_stream_capturing": lambda: False,
        "device": lambda *_: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(certificates, "runtime", lambda: SimpleNamespace(driverGetVersion=lambda: 13000))
    monkeypatch.setattr(certificates, "_known", {})
    monkeypatch.setattr(certificates, "_cache", lambda: CubinCache(tmp_path / "kept"))
    monkeypatch.setattr(certificates, "_digest", lambda key, device: f"{abs(hash((key, device))):032x}")
    cast_mx.right.clear()
    yield
    cast_mx.right.clear()


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that calls are of CUDA tensors."""
    x = SimpleNamespace(is_cuda=True, numel=lambda: 1, get_device=lambda: 0)
    monkeypatch.setattr(registry, "leading", lambda args: x)
    monkeypatch.setattr(registry, "runs_kernels", lambda x: True)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("fault", ["", "bf16: element (3, 5): wants 1, got 2"])
def test_a_kernel_is_tried_once_and_a_wrong_one_is_never_launched_again(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning tells of it, once; what is known stays beside the compiled kernels."""
    tried, ran = [], []
    monkeypatch.setattr(registry, "examine", lambda kernel, device: tried.append(device) or Certificate(fault))
    made = Kernel("made", "made.cu", lambda launch, x: ran.append("launch"), lambda x: ran.append("definition"), None, dict)
    on_device(monkeypatch)
    warned = pytest.warns(OpfuseWarning, match="kernel made on B200: wants the bits of its definition, got bf16: element")
    with warned if fault else nullcontext() as told:
        made(1)
        made(1)
    assert ran == ["definition" if fault else "launch"] * 2
    assert tried == [torch.device("cuda", 0)]
    assert not fault or len(told) == 1
    assert "opfuse doctor --certify" in str(told[0].message) if fault else True
    certificates._known.clear()
    made.right.clear()
    with warned if fault else nullcontext():
        assert made.is_right(0) is not fault
    assert len(tried) == 1


@pytest.mark.usefixtures("blackwell")
def test_what_was_never_tried_is_refused_during_capture_and_not_tried_without_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "examine", lambda *_: pytest.fail("nothing is tried here"))
    with dry_run():
        assert cast_mx.is_right(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PlanMissError, match="kernel cast_mx: wants what is certified, during graph capture"):
        cast_mx.is_right(0)
    assert cast_mx.right == {}


@pytest.mark.parametrize(("arch", "tried"), [((9, 0), False), ((8, 0), True), ((8, 9), True), ((10, 3), True), ((12, 0), True)])
@pytest.mark.usefixtures("blackwell")
def test_what_is_recorded_is_not_tried(arch: tuple[int, int], tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: arch)
    seen: list[Kernel] = []
    monkeypatch.setattr(registry, "examine", lambda kernel, device: seen.append(kernel) or Certificate(""))
    assert cast_mx.is_right(0)
    assert bool(seen) is tried


@pytest.mark.usefixtures("blackwell")
def test_a_trial_that_calls_its_own_kernel_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "examine", lambda kernel, device: Certificate("" if kernel.is_right(0) else "wrong"))
    assert cast_mx.is_right(0)


@pytest.mark.usefixtures("blackwell")
def test_trials_see_no_autograd_and_no_inference_mode() -> None:
    seen = []

    def look() -> Certificate:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return Certificate("")

    with torch.inference_mode():
        assert certified(Tried("a key", "a name", "", ""), 0, look).passed
    assert seen == [(False, False)]


def test_the_arguments_of_trials_lie_on_the_device_that_is_asked() -> None:
    for kernel in certified_kernels():
        for case in kernel.trials().values():
            x = leading(case(torch.device("meta")).args)
            assert x is not None
            assert x.is_meta
