"""Quantizers that an op asks for by mode and slot, as ops written for te.ops do."""

import functools

import pytest
import torch

import opfuse
from opfuse import errors, ops, recipes
from opfuse.recipes import QuantizerRole
from tests.ops.test_op_errors import raised

DELAYED = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
BUILT_IN = [recipes.MXFP8BlockScaling(), recipes.Float8CurrentScaling(), recipes.NVFP4BlockScaling(), DELAYED]


class Caster(ops.BasicOperation):
    """y = dequantized cast of x, and likewise for the gradient: it casts in its own methods."""

    def num_quantizers(self, mode):
        return {"forward": 3, "backward": 2}[mode]

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, **kwargs):
        quantizer, ctx.grad_quantizer = self.get_quantizer("forward", 0), self.get_quantizer("backward", 0)
        return input_ * 1 if quantizer is None else quantizer.quantize(input_).dequantize()

    def op_backward(self, ctx, grad_output):
        assert self.get_quantizer("backward", 0) is None  # the recipe's region is over
        quantizer = ctx.grad_quantizer
        return grad_output if quantizer is None else quantizer.quantize(grad_output).dequantize(), ()


def test_slots_follow_from_the_roles_of_an_op():
    op = ops.BasicLinear(32, 32)
    assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (2, 1)
    assert [role.tensor_type for role in op.get_quantizer_roles("forward")] == ["input", "weight"]
    assert op.get_quantizer_roles("backward") == [QuantizerRole("linear", "grad_output", "")]
    assert [ops.GELU().num_quantizers(mode) for mode in ("forward", "backward")] == [0, 0]
    assert op.get_quantizer("forward", 0) is None
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        assert op.get_quantizer("forward", 0) == op.get_input_quantizer() is not None
        assert op.get_quantizer("backward", 0) == op.get_grad_output_quantizer() is not None
        assert ops.GELU().get_input_quantizer() is None


@pytest.mark.parametrize("recipe", BUILT_IN, ids=lambda recipe: type(recipe).__name__)
def test_an_op_that_gives_a_number_gets_quantizers_of_the_recipe(recipe):
    op = Caster()
    assert [role.tensor_type for role in op.get_quantizer_roles("forward")] == ["input", "weight", "output"]
    assert [role.tensor_type for role in op.get_quantizer_roles("backward")] == ["grad_output", "grad_input"]
    with opfuse.autocast(recipe=recipe):
        made = {(mode, i): op.get_quantizer(mode, i) for mode, n in (("forward", 3), ("backward", 2)) for i in range(n)}
    assert made["forward", 2].formats == made["forward", 0].formats
    assert made["backward", 1].formats == made["backward", 0].formats


def test_an_op_that_casts_itself_runs_and_trains():
    x = torch.randn(32, 32, requires_grad=True)
    recipe = recipes.MXFP8BlockScaling()
    with opfuse.autocast(recipe=recipe):
        y = ops.Sequential(Caster())(x)
    role = QuantizerRole(tensor_type="input")
    assert torch.equal(y, recipe.quantizer(role).quantize(x.detach()).dequantize())
    dy = torch.randn(32, 32)
    y.backward(dy)
    assert torch.equal(x.grad, recipe.quantizer(QuantizerRole(tensor_type="grad_output")).quantize(dy).dequantize())
    assert torch.equal(Caster()(x), x)


def test_delayed_scales_of_a_slot_move_when_a_step_trains_and_only_then():
    op, x = Caster(), torch.full((16, 16), 3.0, requires_grad=True)
    with torch.no_grad(), opfuse.autocast(recipe=DELAYED):
        op(8 * x)
    state = op.quantizer_states.get(QuantizerRole(tensor_type="input"), length=4, device=None)
    assert state.scale.item() == 1
    with opfuse.autocast(recipe=DELAYED):
        y = op(x)
    assert state.scale.item() == torch.tensor(448.0, device="cpu").div(3).item()
    y.backward(torch.full((16, 16), 5.0))
    gradient = op.quantizer_states.get(QuantizerRole(tensor_type="grad_output"), length=4, device=None)
    assert gradient.scale.item() == torch.tensor(57344.0).div(5).item()


def test_slots_of_one_role_have_a_state_each():
    class Two(Caster):
        def num_quantizers(self, mode):
            return 6

    op = Two()
    with opfuse.autocast(recipe=DELAYED):
        for i in range(6):
            op.get_quantizer("forward", i)
    assert len(op.quantizer_states) == 6


def test_what_is_no_slot():
    with raised(errors.QuantizerError, ValueError, "an index below 3", "got 3"):
        Caster().get_quantizer("forward", 3)
    with raised(errors.QuantizerError, ValueError, "'forward' or 'backward'", "sideways"):
        ops.GELU().num_quantizers("sideways")


def test_resetting_the_recipe_state_changes_nothing():
    op = Caster()
    with opfuse.autocast(recipe=DELAYED):
        op(torch.ones(16, 16, requires_grad=True))
    before = op.quantizer_states.to_dict()
    op.reset_recipe_state(recipes.MXFP8BlockScaling())
    op.reset_recipe_state(None)
    assert {name: tensor.tolist() for name, tensor in op.quantizer_states.to_dict().items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }


class Failing(Caster):
    def op_forward(self, ctx, input_, **kwargs):
        raise ArithmeticError


def test_after_a_forward_pass_that_failed_nothing_counts_that_records_no_gradients():
    op, x = Caster(), torch.full((32, 32), 3.0)
    with pytest.raises(ArithmeticError):
        ops.Sequential(Failing())(x.clone().requires_grad_())
    with torch.no_grad(), opfuse.autocast(recipe=DELAYED):
        op.get_quantizer("forward", 0).quantize(x)
    assert [state.amax_history.max().item() for state in op.quantizer_states] == [0.0]


def with_neighbours(ctx, x, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
    assert prev_op_grad_output_quantizer is next_op_input_quantizer is None
    return x * 2


class Wrapping(ops.BasicOperation):
    """Its method is called as it is written, whatever the function takes that it wraps."""

    def inner(self, ctx, x, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return x * 2

    @functools.wraps(inner)
    def op_forward(self, ctx, x):
        return self.inner(ctx, x, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None)

    def op_backward(self, ctx, dy):
        return dy * 2, ()


@pytest.mark.parametrize("method", [None, with_neighbours, lambda ctx, x: x * 2])
def test_quantizers_of_neighbours_go_to_methods_that_take_them(method):
    """Of the class, or of the op itself."""
    op, x = Wrapping(), torch.randn(4, 4)
    if method is not None:
        op.op_forward = method
    assert torch.equal(ops.Sequential(op)(x), x * 2)
