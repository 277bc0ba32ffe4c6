"""The registry takes only kernels that can be tested, and sends tensors where they belong."""

import importlib
import math
import pkgutil

import pytest
import torch

import opfuse.kernels
from opfuse.errors import KernelError
from opfuse.formats import E4M3, E5M2
from opfuse.kernels.casts.tensor import cast_current, cast_recording, tensor_amax
from opfuse.kernels.chains.cast import backward_chain_cast, forward_chain_cast
from opfuse.kernels.engine import registry
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.registry import BITWISE, Arguments, Tolerance, kernel, kernels
from opfuse.kernels.norms.cast import norm_cast
from opfuse.numerics import casts as definition
from opfuse.numerics.scalars import encode
from tests.kernels.cases.chain_casts import OF_GROUPS
from tests.kernels.catalogue import CASES

for module in pkgutil.walk_packages(opfuse.kernels.__path__, "opfuse.kernels."):  # which no cases may import yet
    importlib.import_module(module.name)


def double(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
    return x * 2**times


OWN = {"one": lambda device: Arguments((torch.ones(1, device=device),), {"times": 3})}
GOOD = {"source": "amax.cu", "reference": double, "tolerance": BITWISE}


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    before = dict(registry._KERNELS)
    monkeypatch.setattr(registry, "_KERNELS", {})
    return before


def test_every_kernel_has_cases(own_registry):
    assert {*own_registry} - {kernel.name for kernel in CASES} == set(), (
        "give these cases, in CASES of a module of tests/kernels/cases"
    )
    assert dict(own_registry) == {kernel.name: kernel for kernel in CASES}
    assert all(CASES.values())


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
    [({"tolerance": None}, "a Tolerance"), ({"source": "none.cu"}, "a file cuda/none.cu, got none")],
)
def test_a_kernel_without_tolerance_or_source_is_refused(changed, wanted):
    with pytest.raises(KernelError, match=f"kernel launch_double: wants {wanted}"):
        kernel(**GOOD | changed)(launch_double)


def test_a_kernel_of_a_cpu_tensor_is_its_definition():
    made = kernel(**GOOD)(launch_double)
    assert list(kernels()) == [made]
    assert made(torch.ones(2), times=3).tolist() == [8, 8]
    assert made.launches(OWN) == {(Variant("amax.cu", ("TIMES=3",)), "amax"): ("one",)}


def test_every_real_case_runs_and_differs_from_device_to_device_in_nothing():
    for made in (tensor_amax, cast_current, cast_recording):
        assert made.reference is getattr(definition, made.name)
        for case in list(CASES[made].values())[::7]:
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


def test_integers_are_equal_where_floats_are_and_neighbours_elsewhere():
    wanted = torch.tensor([[126, 0, 255]], dtype=torch.uint8)
    for tolerance, most in ((BITWISE, 0), (Tolerance(1), 1), (Tolerance(4), 1)):
        for off in range(5):
            got = wanted - torch.tensor([[off, 0, 0]], dtype=torch.uint8)
            mismatch = tolerance.mismatch(got, wanted)
            assert (mismatch is None) == (off <= most)
            assert mismatch is None or f"element (0, 0): wants 126, got {126 - off}; 1 of 3" in mismatch


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_of_values_four_units_apart_are_neighbours(dtype, element):
    """As far as a backward chain may be off: every positive value of 16 bits, under a scale that is no power of two."""
    values = torch.arange(1 << 15, dtype=torch.int16).view(dtype)
    codes = encode(values[values.isfinite()].float() * 3.7, element).int()
    assert (codes[4:] - codes[:-4]).max() == 1


# -- values that are not finite ----------------------------------------------------------------------------------------------

KINDS = {
    forward_chain_cast.name: ("delayed", "current", "1x128", "128x128", "MX", "MX swizzled", OF_GROUPS),
    backward_chain_cast.name: ("delayed", "1x128", "128x128", "MX", "MX swizzled", OF_GROUPS),
}


def codes_of(made, case):
    encoded, *_ = made.reference(*case.args, **case.kwargs)
    return [(data.view(case.args[-1].layouts[0].element.dtype).float(), scale) for data, scale in encoded]


@pytest.mark.parametrize("made", [forward_chain_cast, backward_chain_cast], ids=lambda made: made.name)
def test_r18_each_fused_cast_meets_results_that_are_not_finite(made):
    """A plain chain and a gated one for each kind; few codes show it, and few scales where there are many."""
    cases = {name: case for name, case in CASES[made].items() if "nonfinite" in name}
    assert len(cases) == 2 * len(KINDS[made.name])
    for kind in KINDS[made.name]:
        assert sorted("reglu" in name for name in cases if f"nonfinite, {kind}, " in name) == [False, True]
    for case in cases.values():
        for values, scale in codes_of(made, case(torch.device("cpu"))):
            assert 0 < (~values.isfinite()).sum() < values.numel() / 100
            unknown = scale == 255 if scale.dtype == torch.uint8 else scale.isnan()
            assert scale.numel() == 1 or 0 < unknown.sum() <= scale.numel() / 3


def test_r18_casts_of_norms_under_a_measured_amax_meet_what_is_not_finite_both_ways():
    """In two passes that store nothing, and by another cast of what was stored."""
    ways = {False: [], True: []}
    for name, case in CASES[norm_cast].items():
        if " measured " in name and "with original" not in name:
            arguments = case(torch.device("cpu"))
            ways[arguments.args[2].under is not None].append(bool(arguments.args[0].isfinite().all()))
    assert ways[False]
    assert not all(ways[True])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steps_between_neighbouring_floats_are_one(dtype):
    values = torch.linspace(-1, 1, 41, dtype=torch.float64).to(dtype)
    ordered = registry._ordered(values)
    assert (ordered.diff() > 0).all()
    integer = {4: torch.int32, 2: torch.int16}[values.element_size()]
    above = (values.abs().view(integer) + 1).view(dtype)
    assert (registry._ordered(above) - registry._ordered(values.abs())).unique().tolist() == [1]
    assert (registry._ordered(-values.abs()) - registry._ordered(-above)).unique().tolist() == [1]
