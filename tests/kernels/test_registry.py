"""The registry takes only kernels that can be tested, and sends tensors where they belong."""

import math

import pytest
import torch

from opfuse.errors import KernelError
from opfuse.kernels import quantize, registry
from opfuse.kernels.launch import Grid, Variant
from opfuse.kernels.registry import BITWISE, Arguments, Tolerance, kernel, kernels


def double(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
    return x * 2**times


CASES = {"one": lambda device: Arguments((torch.ones(1, device=device),), {"times": 3})}
GOOD = {"source": "amax.cu", "reference": double, "tolerance": BITWISE, "cases": CASES}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_KERNELS", {})


def launch_double(launch, x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
    launch(Variant("amax.cu", (f"TIMES={times}",)), "amax", Grid(1, 32), None, x.data_ptr(), device=0)
    return x


def renamed(launch, y: torch.Tensor, *, times: int = 1) -> torch.Tensor: ...
def reordered(launch, times: int, x: torch.Tensor) -> torch.Tensor: ...
def other_default(launch, x: torch.Tensor, *, times: int = 2) -> torch.Tensor: ...
def positional(launch, x: torch.Tensor, times: int = 1) -> torch.Tensor: ...


@pytest.mark.parametrize("run", [renamed, reordered, other_default, positional], ids=lambda f: f.__name__)
def test_a_launch_with_another_signature_is_refused(run):
    with pytest.raises(KernelError, match=f"kernel {run.__name__}: wants a launch with the parameters of its reference"):
        kernel(**GOOD)(run)
    assert list(kernels()) == []


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [({"cases": {}}, "at least one case"), ({"tolerance": None}, "a Tolerance"), ({"source": "none.cu"}, "a .cu file")],
)
def test_a_kernel_without_cases_tolerance_or_source_is_refused(changed, wanted):
    with pytest.raises(KernelError, match=f"kernel launch_double: wants {wanted}"):
        kernel(**GOOD | changed)(launch_double)


def test_a_kernel_of_a_cpu_tensor_is_its_definition():
    made = kernel(**GOOD)(launch_double)
    assert list(kernels()) == [made]
    assert made(torch.ones(2), times=3).tolist() == [8, 8]
    assert made.launches() == {(Variant("amax.cu", ("TIMES=3",)), "amax"): ("one",)}


def test_every_real_case_runs_and_differs_from_device_to_device_in_nothing():
    monkeypatched = dict(registry._KERNELS)
    assert monkeypatched == {}
    from opfuse.kernels import cast

    for made in (cast.tensor_amax, cast.cast_current, cast.cast_recording):
        assert made.reference is getattr(quantize, made.name)
        for case in list(made.cases.values())[::7]:
            first, second = case(torch.device("cpu")), case(torch.device("cpu"))
            assert BITWISE.mismatch(first.args[0], second.args[0]) is None
            made(*first.args, **first.kwargs)


def test_tolerance_names_the_first_wrong_element():
    wanted = torch.tensor([[1.0, 2.0, math.nan], [0.0, -1.0, math.inf]])
    assert BITWISE.mismatch(wanted.clone(), wanted) is None
    near = wanted.clone()
    near[1, 1] = torch.nextafter(near[1, 1], torch.tensor(0.0))
    assert "element (1, 1): wants -1.0, got -0.99999994" in BITWISE.mismatch(near, wanted)
    assert "1 of 6 differ" in BITWISE.mismatch(near, wanted)
    assert Tolerance(1).mismatch(near, wanted) is None
    for value in (-0.0, math.nan, 1e-45):
        wrong = wanted.clone()
        wrong[1, 0] = value
        assert "element (1, 0)" in BITWISE.mismatch(wrong, wanted)
    assert "element (0, 2)" in BITWISE.mismatch(torch.zeros(2, 3), wanted.where(wanted.isnan(), 0))
    assert "got torch.float64 (2, 3)" in BITWISE.mismatch(wanted.double(), wanted)
    assert "wants torch.uint8 (2,), got torch.uint8 (1,)" in BITWISE.mismatch(
        *(torch.zeros(n, dtype=torch.uint8) for n in (1, 2))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_between_neighbouring_floats_are_one(dtype):
    values = torch.linspace(-1, 1, 41, dtype=torch.float64).to(dtype)
    ordered = registry._ordered(values)
    assert (ordered.diff() > 0).all()
    integer = {4: torch.int32, 2: torch.int16}[values.element_size()]
    above = (values.abs().view(integer) + 1).view(dtype)
    assert (registry._ordered(above) - registry._ordered(values.abs())).unique().tolist() == [1]
    assert (registry._ordered(-values.abs()) - registry._ordered(-above)).unique().tolist() == [1]
