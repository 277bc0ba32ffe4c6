"""What is native, what is emulated, and the reason given."""

import pytest
import torch

import opfuse
from opfuse.errors import GemmError, RecipeError
from opfuse.formats import E4M3, E5M2
from opfuse.recipes import (
    RECIPES,
    CustomRecipe,
    DelayedScalingRequest,
    MXFP8BlockScaling,
    availability,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    support,
    support_matrix,
    zoo,
)
from opfuse.recipes.availability import ARCHS, GATES, NativeGemm, Support
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer

QUERIES = {
    "fp8_current": is_fp8_available,
    "fp8_block": is_fp8_block_scaling_available,
    "mxfp8": is_mxfp8_available,
    "nvfp4": is_nvfp4_available,
}

HARDWARE = {
    "delayed": "..1111",
    "fp8_current": "..1111",
    "fp8_block": "...111",
    "mxfp8": "....1.",
    "nvfp4": "....11",
}
"""Which of ARCHS has the product, by the hardware rules alone."""


@pytest.fixture
def _on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def everything_native():
    return tuple(NativeGemm(kind, f"{kind} product", (0, 0), (999, 0)) for kind in GATES)


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("kind", QUERIES)
def test_g1_every_format_runs_on_the_cpu_and_says_emulated(kind):
    answer, reason = QUERIES[kind](return_reason=True)
    assert answer is True
    assert reason.startswith("emulated: the CPU has no product")
    assert QUERIES[kind]() is True
    assert QUERIES[kind](native=True) is False
    assert QUERIES[kind](native=True, return_reason=True) == (False, reason)


@pytest.mark.parametrize("kind", GATES)
def test_h_hardware_gates(kind, monkeypatch):
    monkeypatch.setattr(availability, "NATIVE_GEMMS", everything_native())
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    found = "".join("1" if support(kind, arch).status == "native" else "." for arch in ARCHS)
    assert found == HARDWARE[kind]
    assert all(support(kind, arch).status == "emulated" for arch in ARCHS[:2])


def test_block_scaling_wants_cuda_12_9(monkeypatch):
    monkeypatch.setattr(availability, "NATIVE_GEMMS", everything_native())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert support("fp8_block", (9, 0)) == Support("emulated", "CUDA: wants >= 12.9, got 12.8")
    assert support("fp8_current", (9, 0)).status == "native"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert support("fp8_block", (9, 0)).status == "native"


def delayed(role):
    return DelayedScalingRequest()


def delayed_gradient(role):
    wide = role.tensor_type == "weight"
    return DelayedScalingRequest() if role.is_gradient else Float8CurrentScalingQuantizer((E5M2 if wide else E4M3).dtype)


def named_alone(role):
    raise RecipeError(f"no quantizer of {role}")


def mixed(role):
    return zoo.fp8_row_scaled(role) if role.tensor_type != "input" else zoo.mxfp8_fwd_original_bwd(role)


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({"qfactory": "fp8_row_scaled"}, "native", "fprop, dgrad, wgrad by scaled_mm, per row"),
        ({"qfactory": "fp8_row_scaled", "backward_override": "dequantized"}, "native", "fprop by scaled_mm, per row"),
        ({"qfactory": delayed}, "native", "fprop, dgrad, wgrad by product.cu or scaled_mm, per tensor"),
        ({"qfactory": delayed_gradient}, "emulated", "dgrad: elements: wants at most one e5m2, got ('e5m2', 'e5m2')"),
        ({"qfactory": delayed, "backward_override": "dequantized"}, "refused", "CustomRecipe.qfactory("),
        ({"qfactory": mixed}, "refused", "fprop of input and weight: wants two formats"),
        ({"qfactory": "high_precision_fwd_mxfp8_bwd"}, "emulated", "dgrad: no native product of mx formats"),
        ({"qfactory": named_alone}, "emulated", "fprop: the factory refuses a linear layer without a name"),
        ({"qfactory": mixed, "allow_mixed_emulation": True}, "emulated", "fprop of input and weight: wants two formats"),
        ({"qfactory": lambda role: IdentityQuantizer()}, "native", "all products are in high precision"),
    ],
)
def test_a_custom_recipe_is_native_if_all_of_its_products_are(fields, status, reason, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = support(CustomRecipe(**fields), (9, 0))
    assert found.status == status
    assert found.reason.startswith(reason)


def mixed_backward(role):
    return Float8CurrentScalingQuantizer(E5M2.dtype) if role.is_gradient else MXFP8Quantizer()


def row_scaled_nvfp4(role):
    return NVFP4Quantizer(row_scaled_nvfp4=True)


REFUSED = [
    {"qfactory": delayed, "backward_override": "dequantized"},
    {"qfactory": mixed},
    {"qfactory": mixed_backward},
    {"qfactory": row_scaled_nvfp4},
]


@pytest.mark.parametrize("fields", REFUSED, ids=lambda fields: fields["qfactory"].__name__)
def test_a_custom_recipe_that_is_refused_refuses_calls(fields):
    """On every device: what a recipe asks for is not a matter of hardware."""
    recipe = CustomRecipe(**fields)
    assert {support(recipe, arch).status for arch in ARCHS} == {"refused"}
    x = torch.ones(32, 32, requires_grad=True)
    with pytest.raises((RecipeError, GemmError)), opfuse.autocast(recipe=recipe):
        opfuse.ops.Sequential(opfuse.ops.Linear(32, 32))(x)


def test_a_custom_recipe_on_a_cpu_is_emulated():
    reason = "fprop: the CPU has no product of this format"
    assert support(CustomRecipe(qfactory="fp8_row_scaled"), (0, 0)) == Support("emulated", reason)


def test_a_custom_recipe_asks_for_the_cuda_of_its_products(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert support(CustomRecipe(qfactory="fp8_row_scaled"), (9, 0)) == Support("emulated", "fprop: CUDA: wants >= 12.9, got 12.8")


def test_reasons_name_wanted_and_got():
    nowhere = "; this package does not call such a product yet"
    assert support("mxfp8", (9, 0)).reason == f"compute capability: wants >= 10.0 and < 12.0, got 9.0{nowhere}"
    assert support("nvfp4", (8, 9)).reason == f"compute capability: wants >= 10.0, got 8.9{nowhere}"
    assert support("fp8_block", (8, 9)).reason == "compute capability: wants >= 9.0, got 8.9"


def test_native_needs_a_product_of_this_package(monkeypatch):
    monkeypatch.setattr(availability, "NATIVE_GEMMS", ())
    assert all(row.status == "emulated" for row in support_matrix())
    assert "does not call it" in support("fp8_current", (9, 0)).reason
    monkeypatch.setattr(availability, "NATIVE_GEMMS", (NativeGemm("fp8_current", "scaled product", (9, 0), (10, 0)),))
    assert support("fp8_current", (9, 0)) == Support("native", "scaled product")
    assert support("fp8_current", (10, 0)).status == "emulated"
    assert support("delayed", (9, 0)).status == "emulated"


def test_native_on_this_machine(monkeypatch):
    monkeypatch.setattr(availability, "NATIVE_GEMMS", everything_native())
    monkeypatch.setattr(availability, "device_arch", lambda: (10, 0))
    assert is_mxfp8_available(native=True, return_reason=True) == (True, "native: mxfp8 product")
    assert support(MXFP8BlockScaling()) == support("mxfp8", (10, 0))


def test_matrix_has_a_row_for_every_kind_and_arch():
    rows = support_matrix()
    assert [(row.kind, row.arch) for row in rows] == [(kind, arch) for kind in RECIPES for arch in ARCHS]
    assert all(row.reason for row in rows)


def test_unknown_kind_is_refused_with_a_suggestion():
    with pytest.raises(RecipeError, match="did you mean 'nvfp4'"):
        support("nvpf4")
