"""Presets equal their explicit formulas; factories by name, with state, and across processes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.config import loads
from opfuse.errors import ConfigError, RecipeError
from opfuse.recipes import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    UnknownFieldError,
    zoo,
)
from opfuse.recipes.zoo import PRESETS
from opfuse.tensors.gemm import gemm
from opfuse.tensors.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    GroupedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from opfuse.tensors.quantizers.composite import QuantizerRequest
from tests.compiler.harness import Step, differences, randn, run, same, to
from tests.compiler.pipelines import COMPOSED
from tests.processes import ran

BF16 = torch.bfloat16
Operand = Callable[[torch.Tensor], object]

ROTATED = {"with_rht": True, "with_post_rht_amax": True}
ROWS = Float8RowQuantizer(torch.float8_e4m3fn).quantize
MX = MXFP8Quantizer().quantize
NV = NVFP4Quantizer().quantize
NV_INPUT = NVFP4Quantizer(**ROTATED).quantize
NV_WEIGHT = NVFP4Quantizer(with_2d_quantization=True).quantize
NV_ROWS = NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False).quantize
NV_GRADIENT = NVFP4Quantizer(**ROTATED, stochastic_rounding=True).quantize


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What MXFP8 makes of x."""
    return MX(x).dequantize()


def nv_of_mx(w: torch.Tensor) -> object:
    """NVFP4 of what MXFP8 makes of w."""
    return NV(rounded(w))


def nv_of_nv(w: torch.Tensor) -> object:
    return NV(NV(w).dequantize())


FORMULAS: dict[str, dict[str, tuple[Operand, Operand]]] = {
    "fp8_row_scaled": dict.fromkeys(("fprop", "dgrad", "wgrad"), (ROWS, ROWS)),
    "mxfp8_fwd_high_precision_bwd": {"fprop": (MX, MX), "dgrad": (itself, rounded), "wgrad": (itself, rounded)},
    "mxfp8_fwd_original_bwd": {"fprop": (MX, MX), "dgrad": (itself, itself), "wgrad": (itself, itself)},
    "high_precision_fwd_mxfp8_bwd": {"fprop": (itself, itself), "dgrad": (MX, MX), "wgrad": (MX, MX)},
    "mxfp8_fwd_nvfp4_bwd": {"fprop": (MX, MX), "dgrad": (NV_GRADIENT, nv_of_mx), "wgrad": (NV_GRADIENT, NV_INPUT)},
    "nvfp4_1d_weights": {
        "fprop": (NV_INPUT, NV),
        "dgrad": (NV_GRADIENT, nv_of_nv),
        "wgrad": (NV_GRADIENT, NV_INPUT),
    },
    "nvfp4_row_scaled_fwd_mxfp8_bwd": dict.fromkeys(("fprop", "dgrad", "wgrad"), (MX, MX)),  # of what is no expert
    "nvfp4_row_scaled_fwd_high_precision_bwd": {
        "fprop": (NV_ROWS, NV),
        "dgrad": (itself, lambda w: NV(w).dequantize()),
        "wgrad": (itself, lambda x: NV_ROWS(x).dequantize()),
    },
    "nvfp4_linear_fp8_attention": {
        "fprop": (NV_INPUT, NV_WEIGHT),
        "dgrad": (NV_GRADIENT, NV_WEIGHT),
        "wgrad": (NV_GRADIENT, NV_INPUT),
    },
}
"""Per product what its operands are: fprop reads x and w, dgrad dy and w, wgrad dy and x."""

EQUALS: dict[str, Recipe] = {
    "mxfp8_fwd_high_precision_bwd": MXFP8BlockScaling(backward_override="dequantized"),
    "mxfp8_fwd_original_bwd": MXFP8BlockScaling(backward_override="high_precision"),
    "nvfp4_row_scaled_fwd_mxfp8_bwd": MXFP8BlockScaling(),
    "nvfp4_row_scaled_fwd_high_precision_bwd": NVFP4BlockScaling(
        row_scaled_activation=True, disable_rht=True, disable_2d_quantization=True, backward_override="dequantized"
    ),
    "nvfp4_linear_fp8_attention": NVFP4BlockScaling(),
}


@pytest.mark.row("X03")
def test_x03_every_preset_has_a_formula():
    assert FORMULAS.keys() == PRESETS.keys()
    assert all(getattr(zoo, name) is preset for name, preset in PRESETS.items())


@pytest.mark.cpu  # a device adds up the gradient of a bias in another order
@pytest.mark.row("X03")
@pytest.mark.parametrize("preset", PRESETS)
def test_x03_a_preset_is_its_explicit_formula(preset):
    torch.manual_seed(0)
    model, x, dy = to(ops.Sequential(ops.Linear(64, 96)), BF16), randn(32, 64), randn(32, 96, seed=100)
    got = run(model, x, step=Step(CustomRecipe(qfactory=preset), seed=5)).tensors
    weight, bias = (p.detach() for p in model.parameters())
    torch.manual_seed(5)  # the gradient is cast once, for both products
    casts = {cast: cast(dy) for cast in {left for left, _ in (FORMULAS[preset][name] for name in ("dgrad", "wgrad"))}}

    def product(name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        one, other = FORMULAS[preset][name]
        return gemm(name, casts[one] if left is dy else one(left), other(right), dtype=BF16)

    assert same(got["output 0"], product("fprop", x, weight) + bias)
    assert same(got["grad of input"], product("dgrad", dy, weight))
    assert same(got["grad of 0.weight"], product("wgrad", dy, x))
    assert same(got["grad of 0.bias"], dy.float().sum(0).to(BF16))


@pytest.mark.few
@pytest.mark.row("X03", "H33")
@pytest.mark.parametrize("preset", EQUALS)
@pytest.mark.parametrize("composed", COMPOSED)
def test_x03_h33_a_preset_is_the_recipe_of_the_same_formats(composed, preset):
    made = COMPOSED[composed]()
    model, tensors = made.model(), made.tensors()
    got, want = (run(model, *tensors, step=Step(r)).tensors for r in (CustomRecipe(qfactory=preset), EQUALS[preset]))
    assert [key for key in want if not key.startswith("saved") and not same(got[key], want[key])] == []


@pytest.mark.row("X03")
def test_x03_attention_beside_linears():
    class Attention(ops.BasicOperation):
        def num_quantizers(self, mode):
            return {"forward": 3, "backward": 2}[mode]

    class Dpa(Attention):
        pass

    role = QuantizerRole(tensor_type="weight", name="fc1")
    with opfuse.autocast(recipe=CustomRecipe(qfactory=zoo.nvfp4_linear_fp8_attention)):
        for op in (Attention(), Dpa()):
            forward, backward = op.get_quantizer("forward", 0), op.get_quantizer("backward", 0)
            assert forward == Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
            assert backward == Float8CurrentScalingQuantizer(torch.float8_e5m2)
    assert zoo.nvfp4_linear_fp8_attention(role) == NVFP4Quantizer(with_2d_quantization=True)
    with pytest.raises(RecipeError, match=r"wants a tensor_type of input, weight, grad_output, .*did you mean 'weight'"):
        zoo.nvfp4_1d_weights(QuantizerRole(tensor_type="weights"))


# -- by name ---------------------------------------------------------------------------------------------------------------

YAML = """version: 1
recipe: {{kind: custom, qfactory: {preset}, rounding: single}}
pipeline: {{dtype: bfloat16, ops: [{{op: linear, in_features: 64, out_features: 64}}]}}
"""


@pytest.mark.row("X03", "H08")
@pytest.mark.parametrize("preset", PRESETS)
def test_x03_h08_a_name_stands_for_the_function_in_python_and_in_configurations(preset):
    recipe = CustomRecipe(qfactory=preset, rounding="single")
    assert recipe == CustomRecipe(qfactory=PRESETS[preset], rounding="single")
    assert recipe.qfactory is PRESETS[preset]
    config = loads(YAML.format(preset=preset), "here.yaml")
    assert config.recipe == recipe
    assert config.recipe.sources["qfactory"].startswith("here.yaml:2:")
    x = randn(64, 64).requires_grad_()
    with opfuse.autocast(recipe=config.recipe):
        config.build()(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.row("H08")
def test_h08_names_that_there_are_not():
    with pytest.raises(
        RecipeError, match=r"CustomRecipe\.qfactory: wants a function of a QuantizerRole, or the name of a preset"
    ):
        CustomRecipe(qfactory="mxfp8")
    with pytest.raises(RecipeError, match="CustomRecipe: wants a qfactory, got None"):
        CustomRecipe()
    with pytest.raises(ConfigError, match="did you mean 'nvfp4_1d_weights'"):
        loads(YAML.format(preset="nvfp4_1d_weight"))


@pytest.mark.row("H08")
def test_h08_another_function_is_another_plan():
    model, x = to(ops.Sequential(ops.Linear(64, 64)), BF16), randn(32, 64)
    with torch.no_grad():
        for preset in (*PRESETS, *PRESETS):
            with opfuse.autocast(recipe=CustomRecipe(qfactory=preset)):
                model(x)
    assert model.cache_info().plans == model.cache_info().misses == len(PRESETS)
    assert "recipe.qfactory" in model.cache_info().last_miss


# -- with state, and elsewhere ---------------------------------------------------------------------------------------------


def inputs_delayed(role: QuantizerRole) -> Quantizer | QuantizerRequest:
    """Per-tensor FP8; activations with delayed scaling."""
    if role.tensor_type == "input":
        return DelayedScalingRequest(amax_history_len=4, margin=1)
    return Float8CurrentScalingQuantizer(torch.float8_e4m3fn)


@pytest.mark.row("H08", "H32")
def test_h08_h32_a_request_is_a_value_with_the_fields_of_the_recipe():
    assert DelayedScalingRequest(margin=1) == DelayedScalingRequest(margin=1) != DelayedScalingRequest()
    assert DelayedScalingRequest(margin=1).recipe == DelayedScaling(margin=1)
    with pytest.raises(UnknownFieldError, match="did you mean 'amax_history_len'"):
        DelayedScalingRequest(amax_history_length=4)
    with pytest.raises(RecipeError, match=r"wants fields of scaling, got \['rounding', 'split_accumulator'\]. Cure: set it on"):
        DelayedScalingRequest(split_accumulator="all", rounding="single")
    recipe, role = CustomRecipe(qfactory=inputs_delayed), QuantizerRole()
    assert recipe.delayed_scaling(role) == DelayedScaling(amax_history_len=4, margin=1)
    assert recipe.delayed_scaling(QuantizerRole(tensor_type="weight")) is None
    with pytest.raises(RecipeError, match="wants a DelayedScalingState"):
        recipe.quantizer(role)
    with pytest.raises(RecipeError, match=r"wants a Quantizer or a DelayedScalingRequest, got <.*QuantizerRequest"):
        CustomRecipe(qfactory=lambda role: QuantizerRequest()).quantizer(role)
    with pytest.raises(RecipeError, match=r"got <class .*MXFP8Quantizer'>\. Cure: return an object, MXFP8Quantizer\(\)"):
        CustomRecipe(qfactory=lambda role: MXFP8Quantizer).quantizer(role)

    def no_role() -> MXFP8Quantizer:
        return MXFP8Quantizer()

    for taking in (no_role, lambda role, more: MXFP8Quantizer()):
        with pytest.raises(RecipeError, match=r"qfactory: wants a function of a QuantizerRole, or the name of a preset"):
            CustomRecipe(qfactory=taking)
    with pytest.raises(RecipeError, match=r"wants a Quantizer or a DelayedScalingRequest, got GroupedQuantizer"):
        CustomRecipe(qfactory=lambda role: GroupedQuantizer((MXFP8Quantizer(),))).quantizer(role)


@pytest.mark.row("H08", "H32")
def test_h08_h32_the_state_of_a_request_is_saved_and_loaded_with_the_op():
    recipe, x = CustomRecipe(qfactory=inputs_delayed), randn(32, 64)
    models = [to(ops.Sequential(ops.Linear(64, 64)), BF16) for _ in range(2)]
    with opfuse.autocast(recipe=recipe):
        models[0](x)
    models[1].load_state_dict(models[0].state_dict())
    got, want = (run(model, x, step=Step(recipe)).tensors for model in reversed(models))
    assert differences(got, want) == []
    scale = models[1][0].quantizer_states.to_dict()["input/scale"]
    assert scale.item() == (torch.full((), 448.0) / x.float().abs().max() / 2).item()


@pytest.mark.row("H28")
def test_h28_a_factory_at_module_scope_is_found_in_another_process(tmp_path):
    (tmp_path / "recipe.pkl").write_bytes(pickle.dumps(CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd, rounding="single")))
    code = (
        "import pickle, sys; from opfuse.recipes import CustomRecipe, zoo\n"
        "r = pickle.load(open(sys.argv[1], 'rb')); assert r.qfactory is zoo.mxfp8_fwd_nvfp4_bwd and r.rounding == 'single'\n"
        "assert r == CustomRecipe(qfactory='mxfp8_fwd_nvfp4_bwd', rounding='single')"
    )
    ran(code, tmp_path / "recipe.pkl", cwd=Path(zoo.__file__.split("/opfuse/")[0]))
    here = pickle.loads(pickle.dumps(CustomRecipe(qfactory=inputs_delayed)))
    assert here == CustomRecipe(qfactory=inputs_delayed)


@pytest.mark.row("H28")
def test_h28_a_closure_is_refused_where_it_would_have_to_be_written():
    def closure(role: QuantizerRole) -> Quantizer:
        return MXFP8Quantizer()

    for qfactory in (closure, lambda role: MXFP8Quantizer()):
        recipe = CustomRecipe(qfactory=qfactory)
        with pytest.raises(RecipeError, match=r"wants a factory that another process can import, got .*<.*>.*top of a module"):
            pickle.dumps(recipe)
        assert copy.deepcopy(recipe) is recipe
        with opfuse.quantized_model_init(recipe=recipe):
            model = ops.Sequential(ops.Linear(64, 64, dtype=BF16))
        loaded = pickle.loads(pickle.dumps(model[0].weight))  # the planes and their quantizer, which knows of no factory
        assert same(loaded.dequantize(), model[0].weight.detach().dequantize())


def test_an_unknown_preset_is_told_the_nearest_and_all():
    with pytest.raises(RecipeError, match="got 'mxfp8_fwd_nvfp4'; did you mean 'mxfp8_fwd_nvfp4_bwd'") as caught:
        CustomRecipe(qfactory="mxfp8_fwd_nvfp4")
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(RecipeError, match="did you mean 'mxfp8_fwd"):
        CustomRecipe(qfactory="mxfp8_fwd")
    with pytest.raises(RecipeError, match=r"got 3\. Cure"):
        CustomRecipe(qfactory=3)
