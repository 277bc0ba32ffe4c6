"""An input that the op before the pipeline saves for itself: the pipeline saves it, too, which takes no memory; its cast goes."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.errors import SavedTensorError
from opfuse.recipes import Float8CurrentScaling
from opfuse.runtime.compile.backward_tape import BackwardTape
from opfuse.torch_private.autograd import is_saved_by_its_node
from tests.compiler.harness import randn, recipe_for

ROWS, WIDTH, HEADS = 64, 128, 4
KINDS = ["delayed", "fp8_current", "fp8_block", "nvfp4"]


class Attention(nn.Module):
    """Attention of torch whose result goes through a pipeline."""

    def __init__(self, *, joined: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = ops.Sequential(ops.Linear(WIDTH, 2 * WIDTH), ops.GELU(), ops.Linear(2 * WIDTH, WIDTH)).bfloat16()
        self.joined = joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, ROWS, HEADS, WIDTH // HEADS).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2)
        return self.out(y.reshape(ROWS, WIDTH) if self.joined else y.reshape(ROWS, WIDTH) * 1)


def recipe_of(kind, keep, override=None):
    fields = {"disable_stochastic_rounding": True} if kind == "nvfp4" else {}
    return recipe_for(kind, override, keep=keep, **fields)


def steps(call, model, recipe, count=3):
    """Results and gradients of steps: interpreted, recorded, repeated."""
    found = []
    for step in range(count):
        x = randn(ROWS, WIDTH, seed=step).requires_grad_()
        with opfuse.autocast(recipe=recipe):
            y = call(x)
        found += [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], randn(ROWS, WIDTH, seed=9))]
    return found


def equal(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def saved_by(model, recipe):
    """Bytes that the model's call saves beside its weights."""
    with opfuse.autocast(recipe=recipe):
        return opfuse.saved(model, randn(ROWS, WIDTH).requires_grad_()).totals.own


def compiled(model):
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.few
@pytest.mark.row("B35")
@pytest.mark.parametrize("how", [lambda model: model, compiled], ids=["called", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_b35_bits_are_those_of_a_cast_that_is_saved(kind, how):
    model, every = Attention(), Attention()
    wanted = steps(every, every, recipe_of(kind, "all"))
    assert equal(steps(how(model), model, recipe_of(kind, None)), wanted)


@pytest.mark.row("B35")
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_b35_bits_are_those_of_a_cast_that_is_saved_under_an_override(override):
    model, every = Attention(), Attention()
    wanted = steps(every, every, recipe_of("fp8_current", "all", override))
    assert equal(steps(model, model, recipe_of("fp8_current", None, override)), wanted)


@pytest.mark.row("B35")
@pytest.mark.parametrize("first", [torch.sigmoid, torch.sin])
def test_b35_graphs_that_save_the_input_and_graphs_that_do_not_share_a_pipeline(first):
    torch.compiler.reset()
    model = Attention().out
    calls = [torch.compile(lambda x, f=f: model(f(x)), backend="aot_eager", fullgraph=True) for f in (torch.sigmoid, torch.sin)]
    for f, call in list(zip((torch.sigmoid, torch.sin), calls))[:: 1 if first is torch.sigmoid else -1] * 4:
        wanted = steps(lambda x, f=f: model(f(x)), model, Float8CurrentScaling(), count=1)
        assert equal(steps(call, model, Float8CurrentScaling(), count=1), wanted)


@pytest.mark.row("B35")
@pytest.mark.parametrize("kind", KINDS)
def test_b35_what_attention_saves_is_saved_once(kind):
    """The product before is not asked: its result is copied, so its cast is saved, about a byte an element or half of one."""
    apart = saved_by(Attention(joined=False), recipe_of(kind, None)) - 2 * ROWS * WIDTH  # the copy is not attention's
    together = saved_by(Attention(), recipe_of(kind, None))
    fewer = apart + 2 * ROWS * WIDTH - together
    assert fewer >= ROWS * WIDTH * (0.5 if kind == "nvfp4" else 1)


@pytest.fixture
def frozen():
    """What was there before a test is not looked at: the objects of a process that ran other tests take seconds to list."""
    gc.collect()
    gc.freeze()


def alive():
    """Bytes of all tensors that a test with ``frozen`` has made."""
    gc.collect()
    blocks = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, nn.Parameter):
            storage = each.untyped_storage()
            blocks[storage.data_ptr()] = storage.nbytes()
    return sum(blocks.values())


@pytest.mark.row("B35")
@pytest.mark.usefixtures("frozen")
def test_b35_a_compiled_call_leaves_its_input_to_the_graph():
    """A backend that shows what is alive between both passes."""
    held = {}
    for joined in (False, True):
        model = Attention(joined=joined)
        call = compiled(model)
        for _ in range(3):
            x = randn(ROWS, WIDTH).requires_grad_()
            before = alive()
            with opfuse.autocast(recipe=Float8CurrentScaling()):
                y = call(x)
            held.setdefault(joined, []).append(alive() - before)
            y.sum().backward()
            del y
    assert all(apart - together >= ROWS * WIDTH for apart, together in zip(held[False], held[True], strict=True))


LEFT = {
    "made by an op that does not save it": (torch.sin, 1),
    "no matrix as it lies": (lambda x: x.sigmoid().transpose(0, 1), 3),  # with what the sigmoid saves
}
"""Other inputs, and bytes that are kept for an element."""


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("name", LEFT)
def test_a_compiled_call_keeps_the_cast_of_any_other_input(name):
    """And nothing else for each element: not the input in 16 bits."""
    torch.compiler.reset()
    before_it, kept = LEFT[name]
    width = before_it(randn(ROWS, WIDTH)).shape[-1]
    last = ops.Sequential(ops.Linear(width, 16, bias=False)).bfloat16()
    call = torch.compile(lambda x: last(before_it(x)), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        x = randn(ROWS, WIDTH).requires_grad_()
        before = alive()
        with opfuse.autocast(recipe=Float8CurrentScaling()):
            y = call(x)
        assert alive() - before - y.nbytes < (kept + 0.5) * x.numel()
        y.sum().backward()
        del y


def test_a_tape_leaves_out_the_input_alone():
    """All its elements in their order, in any shape; not a part of it, another order, another dtype or other memory."""
    x = torch.arange(12.0).view(3, 4)
    tape = BackwardTape([x], [x], input_saved=True)
    saved = [torch.ones(2), x.view(12), x[:1], x.t(), x.view(torch.int32), x, x + 1, torch.empty(0)]
    kept = tape.save(saved)
    assert len(kept.tensors) == len(saved) - 2
    tape._again.x = x.clone().t().contiguous().t()  # as a compiler may lay it out
    found = kept.unpack(True)
    assert all(map(torch.equal, found, saved))
    assert found[1].is_contiguous()
    assert found[5].is_contiguous()
    none = torch.empty(0, 4)
    of_nothing = BackwardTape([none], [none], input_saved=True).save([torch.empty(0, 4, dtype=torch.uint8)])
    assert of_nothing.unpack(False)[0].dtype == torch.uint8


@pytest.mark.parametrize("how", [lambda model: model, compiled], ids=["called", "compiled"])
def test_a_graph_that_is_kept_reads_it_twice(how):
    model = Attention()
    call = how(model)
    for _ in range(3):
        x = randn(ROWS, WIDTH).requires_grad_()
        with opfuse.autocast(recipe=Float8CurrentScaling()):
            y = call(x)
        first = torch.autograd.grad(y.sum(), [x, *model.parameters()], retain_graph=True)
        assert equal(torch.autograd.grad(y.sum(), [x, *model.parameters()]), first)


def test_a_write_to_it_is_noticed():
    model, x = Attention().out, randn(ROWS, WIDTH).requires_grad_()
    with opfuse.autocast(recipe=Float8CurrentScaling()):
        given = x.sigmoid()
        y = model(given)
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(SavedTensorError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("around", [torch.autograd.graph.save_on_cpu, opfuse.offloaded])
def test_hooks_that_store_tensors_get_the_cast(around):
    """They would store the result of attention twice."""
    sizes = []

    def seen(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    model, x = Attention(), randn(ROWS, WIDTH).requires_grad_()
    wanted = steps(model, model, Float8CurrentScaling(), count=1)
    model = Attention()
    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor), opfuse.autocast(recipe=Float8CurrentScaling()):
        model(x)
    assert ROWS * WIDTH in sizes
    with around():
        assert equal(steps(model, model, Float8CurrentScaling(), count=1), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_the_call(reentrant):
    model = Attention()
    wanted = steps(model, model, Float8CurrentScaling())
    found = []
    for step in range(3):
        x = randn(ROWS, WIDTH, seed=step).requires_grad_()
        model.zero_grad()
        with opfuse.autocast(recipe=Float8CurrentScaling()):
            y = checkpoint(model, x, use_reentrant=reentrant)
        y.backward(randn(ROWS, WIDTH, seed=9))
        found += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    assert equal(found, wanted)


def leaf():
    return torch.randn(4, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("made", "saved"),
    [
        (lambda: leaf().sigmoid(), True),
        (lambda: leaf().relu().view(2, 16), True),
        (lambda: leaf().softmax(-1).transpose(0, 1), True),
        (lambda: leaf().softmax(-1).permute(1, 0).unsqueeze(0), True),
        (lambda: leaf().sigmoid().t().unsqueeze(0).squeeze(0).squeeze(), True),
        (lambda: torch.pow(leaf(), torch.full((8,), 2.0)), False),
        (lambda: leaf().amax(0), False),
        (lambda: leaf().sigmoid()[:2], False),
        (lambda: leaf().sigmoid().transpose(0, 1).contiguous(), False),
        (lambda: leaf().sigmoid() + 1, False),
        (lambda: leaf().max(-1).values, False),
        (lambda: F.silu(leaf()), False),
        (leaf, False),
        (lambda: leaf().detach(), False),
    ],
)
def test_which_results_are_saved_by_their_op(made, saved):
    assert is_saved_by_its_node(made()) is saved


def test_no_plan_depends_on_it_where_nothing_is_saved():
    model, x = Attention().out, randn(ROWS, WIDTH).requires_grad_().sigmoid()
    with opfuse.autocast(recipe=Float8CurrentScaling()), torch.no_grad():
        model(x)
        model(x.detach())
    assert model.cache_info().last_miss.startswith("inputs.x.requires_grad: True -> False (")


def test_explain_names_it():
    model, x = Attention(), randn(ROWS, WIDTH).requires_grad_()
    with opfuse.autocast(recipe=Float8CurrentScaling()):
        assert "basic_linear input: fp8_tensor_e4m3 of the input" in opfuse.explain(model, x).details()
