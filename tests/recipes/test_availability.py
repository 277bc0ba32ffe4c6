"""What is native, what is emulated, and the reason given."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import opfuse
from opfuse.cli import doctor
from opfuse.errors import GemmError, RecipeError
from opfuse.formats import E4M3, E5M2
from opfuse.kernels.products.backends import BACKENDS
from opfuse.kernels.products.native import layout_refusal
from opfuse.recipes import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
    availability,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    kinds,
    support,
    support_matrix,
    zoo,
)
from opfuse.recipes.availability import ARCHS, Support
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer, IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer

QUERIES = {
    "fp8_current": is_fp8_available,
    "fp8_block": is_fp8_block_scaling_available,
    "mxfp8": is_mxfp8_available,
    "nvfp4": is_nvfp4_available,
}

BLACKWELL = [(10, 0), (10, 3), (12, 0)]
NATIVE = {
    "delayed": [(8, 9), (9, 0), *BLACKWELL],
    "fp8_current": [(8, 9), (9, 0), *BLACKWELL],
    "fp8_block": [(9, 0), *BLACKWELL],
    "mxfp8": BLACKWELL,
    "nvfp4": BLACKWELL,
}
"""Compute capabilities on which the package calls native products, by kind."""


@pytest.fixture
def _on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("_on_cpu")
@pytest.mark.parametrize("kind", QUERIES)
def test_g1_every_format_runs_on_the_cpu_and_says_emulated(kind):
    answer, reason = QUERIES[kind](return_reason=True)
    assert answer is True
    assert reason.startswith("emulated: the CPU has no product")
    assert QUERIES[kind]() is True
    assert QUERIES[kind](native=True) is False
    assert QUERIES[kind](native=True, return_reason=True) == (False, reason)


@pytest.mark.parametrize("kind", RECIPES)
def test_h_a_kind_is_native_where_its_formats_have_a_back_end(kind, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    native = [arch for arch in ARCHS if support(kind, arch).status == "native"]
    assert native == NATIVE.get(kind, []), f"say in NATIVE of this file where {kind} is native"
    unrecorded = [arch for arch in NATIVE.get(kind, []) if arch != (9, 0)]
    assert all("certified on first use" in support(kind, arch).reason for arch in unrecorded)
    assert "certified" not in support(kind, (9, 0)).reason


@pytest.fixture
def _fresh():
    layout_refusal.cache_clear()
    yield
    layout_refusal.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_a_back_end_more_is_a_kind_more(monkeypatch):
    """No list of kinds says what is native: the back ends of formats do."""
    hopper = BACKENDS["block"][0]
    monkeypatch.setitem(BACKENDS, "block", (hopper, hopper._replace(name="a product", rules=(), since=(10, 0), below=(12, 0))))
    assert support("fp8_block", (10, 0)).status == "native"
    assert support("fp8_block", (12, 0)) == Support("emulated", "compute capability: wants >= 9.0 and < 12.0, got 12.0")


def test_block_scaling_wants_cuda_12_9(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert support("fp8_block", (9, 0)) == Support("emulated", "CUDA: wants >= 12.9, got 12.8")
    assert support("fp8_current", (9, 0)).status == "native"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert support("fp8_block", (9, 0)).status == "native"


def test_fields_count_and_not_the_kind_alone():
    assert support(Float8BlockScaling(), (9, 0)).status == "native"
    reason = "dgrad: elements: wants e4m3 twice, got ('e5m2', 'e4m3')"
    assert support(Float8BlockScaling(fp8_format=Format.HYBRID), (9, 0)) == Support("emulated", reason)
    assert support(Float8BlockScaling(fp8_format=Format.HYBRID), (10, 0)).status == "native"
    reason = "block scales: wants powers of two on both sides, got any fp32 and any fp32"
    assert support(Float8BlockScaling(use_f32_scales=True), (10, 0)) == Support("emulated", reason)
    assert support(Float8BlockScaling(use_f32_scales=True), (9, 0)).status == "native"


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows(Recipe):
    """A user's recipe. names: whether it casts layers with a name alone."""

    kind: ClassVar[str] = "rows"
    names: bool = False
    delays: bool = False

    def delayed_scaling(self, role):
        return DelayedScaling() if self.delays else None

    def quantizer(self, role, *, state=None):
        if self.names and not role.name:
            raise KeyError(role)
        return self.delayed_scaling(role).quantizer(role, state=state) if self.delays else zoo.fp8_row_scaled(role)


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        ({}, "native", "fprop, dgrad, wgrad by scaled_mm, per row"),
        ({"delays": True}, "native", "fprop, dgrad, wgrad by product.cu or scaled_mm, per tensor"),
        ({"names": True}, "emulated", "fprop: the recipe refuses a linear layer without a name"),
    ],
)
def test_a_recipe_of_the_users_own_is_supported_as_its_formats_are(fields, status, reason, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert support(Rows(**fields), (9, 0)) == Support(status, reason)
    model = opfuse.ops.Sequential(layer := opfuse.ops.Linear(32, 32))
    layer.name = "layer"
    with opfuse.autocast(recipe=Rows(**fields)):
        assert opfuse.explain(model, torch.ones(32, 32)).backend == "emulated"


def test_doctor_tells_of_a_recipe_that_joins_the_table(monkeypatch):
    for module in (availability, doctor, kinds):
        monkeypatch.setattr(module, "RECIPES", {**RECIPES, "rows": Rows})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert doctor.recipes()["rows"]["status"] == support("rows").status
    assert [row["status"] for row in doctor.matrix() if row["kind"] == "rows"] == ["emulated"] * 2 + ["native"] * 5


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
        (
            {"qfactory": "high_precision_fwd_mxfp8_bwd"},
            "emulated",
            "dgrad: compute capability: wants >= 10.0 and < 13.0, got 9.0",
        ),
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
    reason = "the CPU has no product of this format"
    assert support(CustomRecipe(qfactory="fp8_row_scaled"), (0, 0)) == Support("emulated", reason)


def test_a_custom_recipe_asks_for_the_cuda_of_its_products(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert support(CustomRecipe(qfactory="fp8_row_scaled"), (9, 0)) == Support("emulated", "CUDA: wants >= 12.9, got 12.8")


def test_reasons_name_wanted_and_got():
    assert support("mxfp8", (9, 0)).reason == "compute capability: wants >= 10.0 and < 13.0, got 9.0"
    assert support("fp8_current", (8, 0)).reason == "compute capability: wants >= 8.9 and < 13.0, got 8.0"


def test_native_on_this_machine(monkeypatch):
    monkeypatch.setattr(availability, "device_arch", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    told = "native: fprop, dgrad, wgrad by product.cu or scaled_mm, per tensor"
    assert is_fp8_available(native=True, return_reason=True) == (True, told)
    assert not is_mxfp8_available(native=True)
    assert support(MXFP8BlockScaling()) == support("mxfp8", (9, 0))


def test_matrix_has_a_row_for_every_kind_and_arch():
    rows = support_matrix()
    assert [(row.kind, row.arch) for row in rows] == [(kind, arch) for kind in RECIPES for arch in ARCHS]
    assert all(row.reason for row in rows)


def test_unknown_kind_is_refused_with_a_suggestion():
    with pytest.raises(RecipeError, match="did you mean 'nvfp4'"):
        support("nvpf4")
