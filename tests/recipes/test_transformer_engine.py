"""Recipe objects of TransformerEngine, as look-alikes: only the class name and the attributes count."""

import enum
import warnings
from dataclasses import dataclass

import pytest

from opfuse import recipes
from opfuse.errors import OpfuseWarning, RecipeError
from opfuse.recipes import as_recipe, autocast, current_recipe


class Format(enum.Enum):
    E4M3 = (448, 448)
    HYBRID = (448, 57344)


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: object = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class Float8CurrentScaling:
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp = QParams()
    fp8_dpa: bool = False
    backward_override: str | None = None


@dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    backward_override: str | None = None


@dataclass
class NVFP4BlockScaling:
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    fp8_format: Format = Format.E4M3
    backward_override: str | None = None

    def __post_init__(self):
        rotated = not self.disable_rht
        self._cached_repr = "text"
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=rotated)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=rotated, stochastic_rounding=not self.disable_stochastic_rounding
        )


class SubclassOfTheirs(MXFP8BlockScaling):
    pass


CASES = [
    (DelayedScaling(), recipes.DelayedScaling()),
    (
        DelayedScaling(margin=2, fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False),
        recipes.DelayedScaling(
            margin=2, fp8_format="E4M3", amax_history_len=16, amax_compute_algo="most_recent", reduce_amax=False
        ),
    ),
    (Float8CurrentScaling(use_power_2_scales=True), recipes.Float8CurrentScaling(use_power_2_scales=True)),
    (MXFP8BlockScaling(backward_override="dequantized"), recipes.MXFP8BlockScaling(backward_override="dequantized")),
    (MXFP8BlockScaling(fp8_format=Format.HYBRID), recipes.MXFP8BlockScaling(fp8_format="HYBRID")),
    (NVFP4BlockScaling(), recipes.NVFP4BlockScaling()),
    (
        NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True, nvfp4_4over6="all"),
        recipes.NVFP4BlockScaling(disable_rht=True, disable_2d_quantization=True, nvfp4_4over6="all"),
    ),
    (
        NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="none"),
        recipes.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256=None),
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), CASES, ids=[repr(ours)[:40] for _, ours in CASES])
def test_conversion_keeps_every_field_and_is_silent_about_defaults(theirs, ours):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert as_recipe(theirs) == ours


def test_converted_fields_do_not_ask_the_environment(monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    recipe = as_recipe(MXFP8BlockScaling())
    assert recipe.backward_override is None
    assert recipe.sources["backward_override"] == "TransformerEngine recipe"
    assert recipe.sources["rounding"] == "default"


def test_unmapped_fields_are_reported_in_one_warning():
    with pytest.warns(OpfuseWarning, match=r"DelayedScaling.*fp8_dpa=True, fp8_mha=True") as caught:
        recipe = as_recipe(DelayedScaling(margin=1, fp8_dpa=True, fp8_mha=True))
    assert len(caught) == 1
    assert recipe == recipes.DelayedScaling(margin=1)


def test_attributes_set_afterwards_are_reported():
    current = Float8CurrentScaling()
    current.fp8_quant_fwd_inp = QParams(amax_epsilon=1e-3)
    with pytest.warns(OpfuseWarning, match="fp8_quant_fwd_inp=.*0.001"):
        as_recipe(current)
    rotated = NVFP4BlockScaling()
    rotated.fp4_quant_fwd_weight = QParams(random_hadamard_transform=True)
    with pytest.warns(OpfuseWarning, match="fp4_quant_fwd_weight"):
        as_recipe(rotated)


def test_values_that_ours_cannot_hold_are_refused():
    with pytest.raises(RecipeError, match="amax_compute_algo"):
        as_recipe(DelayedScaling(amax_compute_algo=max))
    with pytest.raises(RecipeError, match="DelayedScaling"):
        as_recipe(DelayedScaling(backward_override="dequantized"))
    with pytest.raises(RecipeError, match="MXFP8BlockScaling"):
        as_recipe(SubclassOfTheirs())


@pytest.mark.parametrize("given", [recipes.Float8CurrentScaling, "fp8_current", "fp8_curent", "Float8CurentScaling"])
def test_what_names_a_recipe_is_told_how_to_write_one(given):
    with pytest.raises(RecipeError, match=r"Cure: write opfuse\.recipes\.Float8CurrentScaling\(\)"):
        as_recipe(given)


def test_own_recipes_pass_through():
    ours = recipes.MXFP8BlockScaling()
    assert as_recipe(ours) is ours


def test_autocast_takes_their_recipe():
    with autocast(recipe=MXFP8BlockScaling(backward_override="high_precision")):
        assert current_recipe() == recipes.MXFP8BlockScaling(backward_override="high_precision")
