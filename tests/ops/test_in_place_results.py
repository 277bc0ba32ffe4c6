"""Results that the caller changes in place, as after any torch module: what autograd then computes, and what it must refuse."""

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import SavedTensorError
from tests.ops.op_cases import ALL, make, tuple_of
from tests.turns import in_turn

RECIPES = {"none": None, "mxfp8": recipes.MXFP8BlockScaling(), "current": recipes.Float8CurrentScaling()}
RANKS = {1: (), 2: (64,), 3: (2, 32), 4: (2, 1, 32)}
WIDTH = 32
SPLITS = torch.tensor([32, 0, 32])
SINGLE = {name: case for name, case in ALL if not name.startswith("make_extra_output")}

MODULES = {
    "linear": lambda bias: (ops.Linear(WIDTH, WIDTH, bias=bias),),
    "basic linear": lambda bias: (ops.BasicLinear(WIDTH, WIDTH), *(ops.Bias(WIDTH) for _ in range(bias))),
    "grouped linear": lambda bias: (ops.GroupedLinear(3, WIDTH, WIDTH, bias=bias),),
    "rms norm": lambda bias: (ops.RMSNorm(WIDTH),),
    "layer norm": lambda bias: (ops.LayerNorm(WIDTH),),
    "norm and linear": lambda bias: (ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH, bias=bias)),
    "mlp": lambda bias: (ops.Linear(WIDTH, 2 * WIDTH, bias=bias), ops.SwiGLU(), ops.Linear(WIDTH, WIDTH, bias=bias)),
    "linear and reshape": lambda bias: (ops.Linear(WIDTH, WIDTH, bias=bias), ops.Reshape((-1, 16))),
    "linear and identity": lambda bias: (ops.Linear(WIDTH, WIDTH, bias=bias), ops.Identity()),
    "linear and quantize": lambda bias: (ops.Linear(WIDTH, WIDTH, bias=bias), ops.Quantize(forward=False, backward=True)),
}


def gradients(model, inputs, last, recipe=None):
    """The result of ``last(model(*inputs))``, and all gradients of its squares."""
    torch.manual_seed(3)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = last(model(*inputs))
    leaves = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def equal(results, wanted):
    return all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "recipe", "bias", "rank"), in_turn(MODULES, RECIPES, (True, False), RANKS, of=len(RANKS)))
def test_an_activation_in_place_behind_a_pipeline(name, rank, bias, recipe):
    recipe = RECIPES[recipe]
    if rank == 1 and (recipe is not None or name == "grouped linear"):
        recipe, name = None, "linear"  # a vector has one row, which neither comes in groups nor fills blocks
    model = ops.Sequential(*MODULES[name](bias))
    inputs = [torch.randn(*RANKS[rank], WIDTH, requires_grad=True), *[SPLITS] * (name == "grouped linear")]
    wanted = gradients(model, inputs, nn.ReLU(), recipe)
    assert equal(gradients(model, inputs, nn.ReLU(inplace=True), recipe), wanted)


def test_modules_of_torch_around_an_op():
    model = nn.Sequential(ops.Linear(8, 8, bias=False), nn.ReLU(inplace=True), ops.RMSNorm(8), nn.SiLU(inplace=True))
    torch.testing.assert_close(
        gradients(model, [torch.ones(2, 3, 8, requires_grad=True)], lambda y: y.mul_(2)),
        gradients(
            nn.Sequential(model[0], nn.ReLU(), model[2], nn.SiLU()), [torch.ones(2, 3, 8, requires_grad=True)], lambda y: y * 2
        ),
    )


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "rows"), in_turn(sorted(SINGLE), ["none", "3", "2 3", "2 1 3", "0 3"], of=2))
def test_every_output_of_every_op_but_a_copy_may_be_changed_in_place(name, rows):
    case, leading = SINGLE[name], tuple(int(size) for size in rows.split() if size != "none")
    try:
        op, x, extras = make(case, torch.float32, leading)
        count = len(tuple_of(op(x, *extras)))
    except (opfuse.errors.OpfuseError, RuntimeError, IndexError):
        assert leading in ((), (0, 3))  # what some ops refuse, and some formulas
        return
    leaves = [x, *extras, *op.parameters()]

    def grads(i, change):
        torch.manual_seed(5)
        y = tuple_of(op(x * 1, *extras))[i]
        return torch.autograd.grad(change(y).sum(), leaves, allow_unused=True, materialize_grads=True)

    for i in range(count):
        assert equal(grads(i, lambda y: y.mul_(2)), grads(i, lambda y: y * 2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_result_without_gradient_is_changed_by_one_with(mode):
    """torch refuses it where the result is a view that was made while it recorded nothing."""
    for op in (ops.Linear(8, 8, bias=False), ops.RMSNorm(8)):
        op.requires_grad_(False)
        with mode():
            y = op(torch.ones(2, 3, 8))
        factor = torch.ones(8, requires_grad=True)
        wanted = y.clone()
        y.mul_(factor).sum().backward()
        torch.testing.assert_close(factor.grad, wanted.sum((0, 1)))


@pytest.mark.parametrize("change", [lambda y: y.unsqueeze_(0), lambda y: y.transpose_(0, 1), lambda y: y.resize_(6, 8)])
def test_its_shape_may_be_changed_in_place(change):
    with torch.no_grad():
        y = ops.Linear(8, 8, bias=False)(torch.ones(2, 3, 8))
    assert change(y).numel() == 48


class Stacked(ops.BasicOperation):
    """y = exp(x), made as a matrix and returned as a view of it; saves the result itself."""

    saves = ("y",)

    def op_forward(self, ctx, input_, **_):
        y = input_.reshape(-1, input_.shape[-1]).exp().view(input_.shape)
        ctx.save(y=y)
        self.made = y.data_ptr()
        return y

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.saved.y, ()


def test_a_view_that_a_users_op_made_is_handed_out_without_a_copy():
    op, x = Stacked(), torch.randn(2, 3, 8, requires_grad=True)
    y = op(x)
    assert y.data_ptr() == op.made
    assert not y._is_view()
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())


@pytest.mark.parametrize("write", [lambda y: y.mul_(2), lambda y: y[0].zero_(), lambda y: y.detach().add_(1)])
def test_a_result_that_its_gradient_needs_is_missed_at_backward(write):
    """As behind torch.exp, or any op that saves what it returns."""
    y = Stacked()(torch.randn(2, 3, 8, requires_grad=True))
    write(y)
    with pytest.raises(
        SavedTensorError, match="saved tensors as the forward pass left them, got one changed in place since"
    ) as error:
        y.sum().backward()
    assert ", nodes 0..0: wants" in str(error.value)


def test_a_tap_that_the_next_op_saved_is_missed_at_backward():
    model = ops.Sequential(ops.Linear(8, 8, bias=False), ops.MakeExtraOutput(), ops.Linear(8, 8))
    y, tap = model(torch.randn(2, 3, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        tap.mul_(2)
    tap.detach().mul_(2)
    with pytest.raises(SavedTensorError, match="got one changed in place since"):
        y.sum().backward()


class Alias(ops.BasicOperation):
    """Returns what it is told to, which lies in the memory of its input, and an extra output of its own."""

    num_extra_outputs = 1
    saves = ()

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        y, extra = self.outputs(input_)
        return y, [(extra,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return grad_output, [()], [()]


@pytest.mark.parametrize(
    "outputs",
    [
        lambda x: (x.view(-1), x * 1),
        lambda x: (x.detach()[1:], x * 1),
        lambda x: (y := (x * 1).view(-1), y),
        lambda x: (y := (x * 1).view(-1), y[2:]),
    ],
    ids=["view of the input", "detached view of the input", "twice the same", "overlapping"],
)
def test_memory_that_is_also_someone_elses_stays_a_view_which_nobody_may_write(outputs):
    """Else the other one's gradient would be wrong, and nobody would know."""
    h = torch.randn(3, 8, requires_grad=True) * 1
    y, _ = Alias(outputs)(h)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.mul_(2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", [(64, WIDTH), (2, 32, WIDTH)], ids=["matrix", "stack"])
@pytest.mark.parametrize("changed", [0, 1], ids=["output", "extra output"])
def test_the_two_outputs_of_a_copy_are_one_tensor_which_nobody_may_write(changed, shape, recipe):
    model = ops.Sequential(ops.Linear(WIDTH, WIDTH, bias=False), ops.MakeExtraOutput())
    x = torch.randn(shape, requires_grad=True)
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        results = model(x)
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            results[changed].mul_(2)
        kept = [result.detach().clone() for result in results]
        own = results[changed].clone().mul_(2)  # what the message advises
        assert equal(results, kept)
        grad = torch.autograd.grad(own.sum() + results[1 - changed].sum(), x)
        wanted = torch.autograd.grad(3 * model[:1](x).sum(), x)
    torch.testing.assert_close(grad, wanted, rtol=0.1 if recipe else 1e-5, atol=0.1 if recipe else 1e-5)


@pytest.mark.parametrize("changed", [0, 1], ids=["output", "extra output"])
def test_a_write_to_one_output_of_one_node_never_passes_for_the_other_unnoticed(changed):
    """Both come from the node that computed them: no input stands between."""
    results = Alias(lambda x: (y := x * 2, y))(torch.randn(3, 8, requires_grad=True))

    def write_one_and_read_the_other():
        results[changed].mul_(2)
        results[1 - changed].sum().backward()

    with pytest.raises(RuntimeError, match="is a view and"):
        write_one_and_read_the_other()


@pytest.mark.parametrize("op", [ops.Reshape((4, 6)), ops.Identity()], ids=["reshape", "identity"])
def test_a_view_is_torchs_own(op):
    """What it returns lies in the caller's tensor; a change in place is one of that tensor, and autograd follows it."""
    for change, read in ((lambda h, y: y.mul_(3), lambda h, y: h), (lambda h, y: h.mul_(3), lambda h, y: y)):
        leaf = torch.randn(3, 8, requires_grad=True)
        h = leaf * 1
        y = op(h)
        change(h, y)
        read(h, y).square().sum().backward()
        torch.testing.assert_close(leaf.grad, 18 * leaf.detach())
    leaf = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"a (view of a )?leaf Variable that requires grad"):
        op(leaf).mul_(2)


def test_a_view_of_a_result_that_was_saved_is_missed_at_backward():
    y = ops.Sequential(Stacked(), ops.Reshape((6, 8)))(torch.randn(2, 3, 8, requires_grad=True))
    y.mul_(2)
    with pytest.raises(SavedTensorError, match="got one changed in place since"):
        y.sum().backward()
