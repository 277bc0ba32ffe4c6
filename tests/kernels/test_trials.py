"""Trials of kernels on devices that this project has not recorded: what they find, and what becomes of a kernel that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
import opfuse.inspect.casts
import opfuse.ops  # these two register all kernels
from opfuse import recipes
from opfuse.cli import certify, doctor, main
from opfuse.cli.certify import certified_kernels
from opfuse.compiler.plain import sizes_read
from opfuse.errors import OpfuseWarning, PlanMissError, UnsupportedError
from opfuse.events import PlanUsed, listeners, subscribed
from opfuse.formats import E4M3, ROWWISE, fp8_tensor, mxfp8
from opfuse.kernels.casts.tensor import cast_mx
from opfuse.kernels.casts.trials import DRAWS
from opfuse.kernels.engine import certificates, registry
from opfuse.kernels.engine.certificates import Certificate, Tried, certificate_of, certified
from opfuse.kernels.engine.cubins import CubinCache
from opfuse.kernels.engine.launch import dry_run
from opfuse.kernels.engine.registry import Arguments, Kernel, Tolerance, examine, kernels, leading, tensors_in
from opfuse.kernels.products import native
from opfuse.kernels.products.backends import BACKENDS, MX_GROUPS, Machine
from opfuse.kernels.products.certificate import certified_product, random_plane, trials
from opfuse.recipes.availability import Support
from tests.turns import in_turn

CPU = torch.device("cpu")


def test_every_kernel_of_a_cast_a_chain_a_norm_or_a_loss_has_trials() -> None:
    rooms = [kernel.run.__module__.split(".")[2] for kernel in kernels()]
    assert {kernel.name for kernel, room in zip(kernels(), rooms) if room in ("casts", "chains", "norms", "cross_entropy")} == {
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


def test_a_trial_that_is_called_exact_has_equal_bits_whatever_the_tolerance_is() -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        return torch.nextafter(x, x + 1)

    def made(name: str) -> Kernel:
        cases = {name: lambda device: Arguments((torch.ones(4, device=device),))}
        return Kernel("made", "made.cu", off, lambda x: x, Tolerance(1), lambda: cases)

    assert examine(made("near one"), CPU, off).passed
    assert examine(made("exact one"), CPU, off).fault.startswith("exact one: element (0,): wants 1.0")


def test_values_of_trials_are_drawn_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert examine(cast_mx, CPU, cast_mx.reference).passed


# -- on a device that is none ----------------------------------------------------------------------------------------------------


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine of which nobody has a record."""
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (10, 0),
        "get_device_name": lambda *_: "B200",
        "is_current_stream_capturing": lambda: False,
        "device": lambda *_: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(certificates, "runtime", lambda: SimpleNamespace(driverGetVersion=lambda: 13000))
    monkeypatch.setattr(certificates, "_cache", lambda: CubinCache(tmp_path / "kept"))
    forget()
    yield
    forget()


def forget() -> None:
    """What this process knows of the device."""
    certificates._known.clear()
    certificates.facts.cache_clear()
    certificates._digest.cache_clear()
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
    forget()
    made.right.clear()
    with warned if fault else nullcontext():
        assert made.is_right(0) is not fault
    assert len(tried) == 1


OTHER = {
    "driver": lambda patch: patch.setattr(certificates, "runtime", lambda: SimpleNamespace(driverGetVersion=lambda: 13010)),
    "library": lambda patch: patch.setattr(certificates, "version", lambda name: "13.9.9"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "2.99"),
    "library of CUDA 12": lambda patch: patch.setattr(certificates, "_is_installed", lambda name: True),
    "CUDA": lambda patch: patch.setattr(torch.version, "cuda", "13.1"),
    "capability": lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 3)),
    "code": lambda patch: patch.setattr(certificates, "_code", lambda: "0123456789abcdef" * 4),
    "device": lambda patch: patch.setattr(torch.cuda, "get_device_name", lambda *_: "B300"),
}


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("what", OTHER)
def test_another_driver_library_code_or_device_is_certified_anew(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same is not: what is kept is read by a later process."""
    monkeypatch.setattr(certificates, "_is_installed", lambda name: name == "nvidia-cublas")
    monkeypatch.setattr(certificates, "version", lambda name: "13.1.2")
    tried: list[int] = []
    product = Tried("mx", "scaled_mm, MXFP8", "the exact product", "")

    def ask() -> int:
        forget()
        certified(product, 0, lambda: tried.append(0) or Certificate(""))
        return len(tried)

    assert (ask(), ask()) == (1, 1)
    OTHER[what](monkeypatch)
    assert (ask(), ask()) == (2, 2)


@pytest.mark.usefixtures("blackwell")
def test_what_is_kept_names_the_driver_the_library_and_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_is_installed", lambda name: name == "nvidia-cublas")
    monkeypatch.setattr(certificates, "version", lambda name: "13.1.2")
    certified(Tried("mx", "scaled_mm, MXFP8", "", ""), 0, lambda: Certificate(""))
    (kept,) = (json.loads(path.read_text()) for path in (tmp_path / "kept").glob("*.certificate"))
    assert (kept["what"], kept["fault"]) == ("scaled_mm, MXFP8", "")
    named = {name: kept["of"][name] for name in ("device", "compute capability", "driver", "nvidia-cublas")}
    assert named == {"device": "B200", "compute capability": "10.0", "driver": 13000, "nvidia-cublas": "13.1.2"}
    assert certificates.sources_digest().startswith(kept["of"]["code"])


def found_wrong(key: str, name: str) -> None:
    """As if the first use on this device had found it, in an earlier process."""
    with pytest.warns(OpfuseWarning, match="wants the exact product, got element"):
        certified(Tried(key, name, "the exact product", ""), 0, lambda: Certificate("element (3, 5) is 7, wants 2"))
    forget()


@pytest.mark.usefixtures("blackwell")
def test_one_process_warns_once_of_what_it_uses_often() -> None:
    wrong = Tried("mx", "scaled_mm, MXFP8", "the exact product", ""), 0, lambda: Certificate("element (3, 5) is 7, wants 2")
    with pytest.warns(OpfuseWarning, match="wants the exact product") as told:
        found = [certified(*wrong).passed for _ in range(2)]
    assert (found, len(told)) == ([False, False], 1)


@pytest.mark.usefixtures("blackwell")
def test_each_device_of_a_machine_has_certificates_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its trials run on it."""
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("B200", "RTX 5090")[index])
    product = Tried("mx", "scaled_mm, MXFP8", "the exact product", "")
    assert certified(product, 0, lambda: Certificate("")).passed
    with pytest.warns(OpfuseWarning, match="scaled_mm, MXFP8 on RTX 5090: wants"):
        assert not certified(product, 1, lambda: Certificate("wrong")).passed
    assert entered == [0, 1]
    assert (certificate_of("mx", 0), certificate_of("mx", 1)) == (Certificate(""), Certificate("wrong"))


@pytest.mark.row("R10")
@pytest.mark.usefixtures("blackwell")
def test_a_product_of_the_library_that_failed_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what a recipe does here, by a model's explanation, and by doctor. It is native elsewhere, as are others here."""
    recipe, wrong = recipes.MXFP8BlockScaling(), "wrong here: element (3, 5) is 7, wants 2"
    assert recipes.support(recipe).status == "native"
    assert main(["doctor"]) == 0
    assert "wrong on this device" not in capsys.readouterr().out
    found_wrong("mx", "scaled_mm, MXFP8")
    assert recipes.support(recipe) == Support("emulated", wrong)
    assert recipes.support(recipe, (12, 0)).status == recipes.support(recipes.NVFP4BlockScaling()).status == "native"
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda arch: Machine((10, 0), (13, 0)))
    with opfuse.autocast(recipe=recipe):
        told = opfuse.explain(opfuse.ops.Sequential(opfuse.ops.Linear(64, 96)), torch.randn(32, 64, requires_grad=True))
    made = [(each["status"], each["reason"]) for each in told.to_dict()["pipelines"][0]["products"]]
    assert made == [("emulated", wrong)] * 3
    assert wrong in str(told)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == {"scaled_mm, MXFP8": "element (3, 5) is 7, wants 2"}
    assert found["recipes"]["mxfp8"] == {"status": "emulated", "reason": wrong}
    assert main(["doctor", "--only", "wrong"]) == 0
    shown = capsys.readouterr().out
    assert "wrong on this device" in shown
    assert "element (3, 5) is 7, wants 2" in shown


@pytest.mark.row("R10")
@pytest.mark.usefixtures("blackwell")
def test_products_of_groups_that_failed_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the host reads the sizes of groups: of a plan for a GPU, made on a CPU."""
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda arch: Machine((10, 0), (13, 0)))
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        experts = opfuse.ops.Sequential(opfuse.ops.GroupedLinear(2, 128, 256, bias=False))
        told = opfuse.explain(experts, torch.randn(96, 128, requires_grad=True), torch.tensor([64, 32]))
    (plan,) = told.plans
    plan = replace(plan, key=plan.key._replace(env=plan.key.env._replace(device="cuda", arch=(10, 0))))
    assert sizes_read(plan) == {}
    found_wrong(MX_GROUPS, "scaled_grouped_mm, MXFP8 in groups")
    assert [*sizes_read(plan).values()] == ["wrong here: element (3, 5) is 7, wants 2"]
    assert doctor.wrong() == {"scaled_grouped_mm, MXFP8 in groups": "element (3, 5) is 7, wants 2"}


HOPPER, BLACKWELL = Machine((9, 0), (13, 0)), Machine((10, 0), (13, 0))


@pytest.mark.usefixtures("blackwell")
def test_products_that_are_recorded_are_not_tried_and_those_that_a_device_lacks_are_no_products() -> None:
    def unasked(*_: Any) -> torch.Tensor:
        pytest.fail("nothing is multiplied here")

    assert certified_product("tensor", 0, HOPPER, unasked).passed
    assert not certified_product("mx", 0, HOPPER, unasked).passed


@pytest.mark.usefixtures("blackwell")
def test_a_product_that_passed_is_told_of() -> None:
    assert "certified on first use" in recipes.support("mxfp8").reason
    assert certified(Tried("mx", "scaled_mm, MXFP8", "", ""), 0, lambda: Certificate("")).passed
    assert "certified here" in recipes.support("mxfp8").reason


class OnDevice(torch.Tensor):
    """Says that it is of a GPU."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


@pytest.fixture
def emulates(blackwell: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of the library is not called where it is wrong; the names of emulated ones are enough."""
    monkeypatch.setattr(native, "machine_of", lambda device: BLACKWELL)
    monkeypatch.setattr(native, "on_kernels", lambda x: True)
    for name in ("scaled_mm", "scaled_grouped_mm"):
        monkeypatch.setattr(native.F, name, lambda *_, **__: pytest.fail("it is wrong here"))
    for name in ("multiply", "multiply_tiles", "product_of_rows"):
        monkeypatch.setattr(native.emulation, name, lambda *_, **__: "emulated")


@pytest.mark.usefixtures("emulates")
@pytest.mark.parametrize("invariant", [False, True])
def test_a_product_that_failed_is_emulated(invariant: bool) -> None:
    random = torch.Generator().manual_seed(0)
    planes = [random_plane(mxfp8(E4M3), ROWWISE, 128, 256, random) for _ in range(2)]
    found_wrong("mx", "scaled_mm, MXFP8")
    there = [plane._replace(data=plane.data.as_subclass(OnDevice)) for plane in planes]
    with pytest.warns(OpfuseWarning, match="scaled_mm, MXFP8 on B200"):
        assert native.multiply(*there, out_dtype=torch.bfloat16, invariant=invariant) == "emulated"


@pytest.mark.usefixtures("emulates")
def test_products_of_groups_that_failed_are_emulated() -> None:
    left, rights, groups = next(trials(MX_GROUPS, BACKENDS[MX_GROUPS][0])).operands
    found_wrong(MX_GROUPS, "scaled_grouped_mm, MXFP8 in groups")
    there = left._replace(data=left.data.as_subclass(OnDevice))
    with pytest.warns(OpfuseWarning, match="MXFP8 in groups on B200"):
        assert native.multiply_rows(there, rights, groups, out_dtype=torch.bfloat16) == "emulated"
    assert not native.runs_are_right(mxfp8(E4M3), 0)
    assert native.runs_are_right(fp8_tensor(E4M3), 0)


@pytest.mark.usefixtures("blackwell")
def test_a_kernel_that_failed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "wrong here, so torch computes them: kernel cast_mx"
    assert wrong not in recipes.support("mxfp8").reason
    assert certified(Tried("kernel cast_row", "kernel cast_row", "", ""), 0, lambda: Certificate("")).passed
    found_wrong("kernel cast_mx", "kernel cast_mx")
    assert recipes.support("mxfp8").reason.endswith(wrong)
    assert recipes.support("mxfp8").status == "native"
    assert wrong not in recipes.support("mxfp8", (12, 0)).reason
    model, x = opfuse.ops.Sequential(opfuse.ops.Linear(64, 96)), torch.randn(32, 64)
    assert wrong in str(opfuse.explain(model, x))
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert wrong in str(opfuse.explain(model, x))
    assert doctor.wrong() == {"kernel cast_mx": "element (3, 5) is 7, wants 2"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    forget()
    monkeypatch.setattr(certificates, "runtime", lambda: pytest.fail("nothing is looked for on a device that is recorded"))
    assert doctor.wrong() == {}


@pytest.mark.usefixtures("blackwell")
def test_what_was_wrong_has_the_name_of_the_product_of_this_device() -> None:
    """FP8 blocks are multiplied by one product on Hopper, and by another one here."""
    found_wrong("block", "scaled_mm, FP8 blocks as MXFP8")
    assert doctor.wrong() == {"scaled_mm, FP8 blocks as MXFP8": "element (3, 5) is 7, wants 2"}


@pytest.mark.usefixtures("blackwell")
def test_a_batch_invariant_product_that_failed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made in tiles by the same product of the library."""
    monkeypatch.setattr("opfuse.compiler.plain.machine", lambda arch: Machine((10, 0), (13, 0)))

    def fprop() -> tuple[str, str]:
        with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(batch_invariant=True)):
            told = opfuse.explain(opfuse.ops.Sequential(opfuse.ops.Linear(64, 96)), torch.randn(32, 64))
        made, *_ = told.to_dict()["pipelines"][0]["products"]
        return made["status"], made["reason"]

    assert fprop()[0] == "native"
    found_wrong("mx", "scaled_mm, MXFP8")
    status, reason = fprop()
    assert status == "emulated"
    assert reason.startswith("wrong here: element (3, 5) is 7, wants 2; batch-invariant")


@pytest.mark.usefixtures("blackwell")
def test_without_cupy_nothing_is_known_and_whoever_asks_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under OPFUSE_REFERENCE=1, which works without it; doctor says what is missing."""

    def missing() -> None:
        raise UnsupportedError("CUDA kernels: wants CuPy, got none")

    monkeypatch.setattr(certificates, "runtime", missing)
    assert "certified on first use" in recipes.support("mxfp8").reason
    assert doctor.wrong() == {}
    assert main(["doctor"]) == 0
    with pytest.raises(UnsupportedError, match="wants CuPy"):
        cast_mx.is_right(0)


@pytest.mark.usefixtures("blackwell")
def test_who_asks_about_the_cpu_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a process that was forked cannot do."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: pytest.fail("it starts CUDA"))
    assert recipes.support("mxfp8", (0, 0)) == Support("emulated", "the CPU has no product of this format")


def test_certifying_without_a_gpu_says_where_to_do_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--certify"]) == 3
    assert "doctor --certify: wants a CUDA device, got none" in capsys.readouterr().err


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("fault", ["", "element (3, 5) is 7, wants 2"])
def test_certifying_prints_a_block_for_a_report(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names driver and library; one fault makes the command fail."""
    monkeypatch.setattr(certificates, "_is_installed", lambda name: name == "nvidia-cublas")
    monkeypatch.setattr(certificates, "version", lambda name: "13.1.2")
    monkeypatch.setattr(certify, "examine", lambda family, *_: Certificate(fault if family == "mx" else ""))
    monkeypatch.setattr(certify, "examine_kernel", lambda kernel, device: Certificate(""))
    monkeypatch.setattr(certify, "_speed", lambda family, backend: "1.50")
    assert main(["doctor", "--certify"]) == (1 if fault else 0)
    shown = capsys.readouterr().out
    assert all(part in shown for part in (opfuse.__version__, "driver 13000", "nvidia-cublas 13.1.2", "device B200"))
    assert "kernel cast_mx, bitwise" in shown
    assert (fault or "scaled_mm, MXFP8") in shown
    assert main(["doctor", "--certify", "--json"]) == (1 if fault else 0)
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["scaled_mm, MXFP8"]["result"] == (fault or "right")
    assert rows["scaled_mm, MXFP8"].get("x bf16") == (None if fault else "1.50")  # what is wrong is not timed


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("before", ["", "element (3, 5) is 7, wants 2"])
def test_certifying_anew_replaces_what_earlier_trials_found(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a fault of the moment, which would have a right product emulated for good; and the reverse."""
    now = "" if before else "element (0, 0) is 1, wants 2"
    for key, name in (("mx", "scaled_mm, MXFP8"), ("kernel cast_mx", "kernel cast_mx")):
        certificates.keep(Tried(key, name, "", ""), 0, Certificate(before))
    forget()
    monkeypatch.setattr(certify, "examine", lambda *_: Certificate(now))
    monkeypatch.setattr(certify, "examine_kernel", lambda *_: Certificate(now))
    monkeypatch.setattr(certify, "_speed", lambda family, backend: "1.50")
    assert bool(doctor.wrong()) is bool(before)
    assert main(["doctor", "--certify", "--json"]) == (1 if now else 0)
    for _ in range(2):  # in this process, and in a later one
        assert bool(doctor.wrong()) is bool(now)
        assert ("wrong here" in recipes.support("mxfp8").reason) is bool(now)
        forget()


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("fault", ["", "bf16: element (3, 5): wants 1, got 2"])
def test_certifying_fails_of_a_wrong_kernel_and_not_of_what_is_emulated(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))
    monkeypatch.setattr(certify, "examine", lambda *_: Certificate(""))
    monkeypatch.setattr(certify, "examine_kernel", lambda kernel, device: Certificate(fault if kernel is cast_mx else ""))
    monkeypatch.setattr(certify, "_speed", lambda family, backend: "1.50")
    assert main(["doctor", "--certify", "--json"]) == (1 if fault else 0)
    rows = {row["what"]: row["result"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["kernel cast_mx, bitwise"] == (fault or "right")
    assert rows["scaled_grouped_mm, MXFP8 in groups"].startswith("emulated: compute capability: wants >= 10.0 and < 11.0")


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
def test_trials_see_no_autograd_no_mode_and_no_recorder() -> None:
    seen, noted = [], []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            noted.append(func)
            return func(*args, **(kwargs or {}))

    def look() -> Certificate:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), dict(listeners())))
        noted.clear()
        torch.ones(1).exp()
        seen.append(len(noted))
        return Certificate("")

    with torch.inference_mode(), Noted(), subscribed(lambda event: None, PlanUsed):
        assert certified(Tried("a key", "a name", "", ""), 0, look).passed
    assert seen == [(False, False, {}), 0]


def test_the_arguments_of_trials_lie_on_the_device_that_is_asked() -> None:
    for kernel in certified_kernels():
        for case in kernel.trials().values():
            x = leading(case(torch.device("meta")).args)
            assert x is not None
            assert x.is_meta
