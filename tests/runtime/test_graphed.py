"""``opfuse.graphed`` around the capture itself, for which a function of torch stands in that needs no GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import UnsupportedError
from opfuse.runtime import graphs
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from tests.compiler.harness import randn

pytestmark = pytest.mark.cpu
UNWAITED = graphs._unwaited
DELAYED, SHORTER = (recipes.DelayedScaling(amax_history_len=length, margin=margin) for length, margin in ((4, 0), (2, 1)))


def captured(call, args, **_):
    """As ``torch.cuda.make_graphed_callables``: what each pass computes is written where the call before wrote it.

    Memory that the forward pass lets go of is that of gradients, so it writes there, too.
    """
    inputs = [each.detach().requires_grad_(each.requires_grad) for each in args]
    original, parameters, memory = call.forward, [*call.parameters()], {}

    def written(name, tensor):
        return memory.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            for name, tensor in memory.items():
                tensor.fill_(torch.nan if name != "y" else 0)
            ctx.given = [each.detach().copy_(t).requires_grad_(each.requires_grad) for each, t in zip(inputs, tensors)]
            with torch.enable_grad():
                ctx.y = original(*ctx.given)
            return written("y", ctx.y.detach())

        @staticmethod
        def backward(ctx, dy):
            wanted = [i for i, each in enumerate((*ctx.given, *parameters)) if each.requires_grad]
            found = torch.autograd.grad(ctx.y, [(*ctx.given, *parameters)[i] for i in wanted], dy, allow_unused=True)
            made = {i: written(i, each).detach() for i, each in zip(wanted, found) if each is not None}
            return tuple(made.get(i) for i in range(len(inputs) + len(parameters)))

    call.forward = lambda *tensors: Graphed.apply(*tensors, *parameters)
    return call


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "_check", lambda *_: None)
    monkeypatch.setattr(graphs, "_unwaited", graphs.nullcontext)
    monkeypatch.setattr(torch.random, "fork_rng", lambda **_: graphs.nullcontext())
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", captured)


class Counted(nn.Module):
    """A pipeline, and a buffer that counts its calls."""

    def __init__(self):
        super().__init__()
        self.inner = ops.Sequential(ops.Linear(64, 64, accumulate_into_main_grad=True), ops.GELU(), ops.Linear(64, 64))
        self.register_buffer("calls", torch.zeros(1))
        weight = self.inner[0].weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(64, 64), False

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def plain():
    return ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))


def states(model):
    return [state for op in model.modules() for state in getattr(op, "quantizer_states", ())]


def held(model):
    """Everything that a step changes, with values of their own."""
    weight = model.inner[0].weight
    tensors = [model.calls, weight.main_grad, *(t for s in states(model) for t in (s.scale, s.amax_history, s.left_out))]
    return [weight.grad_added_to_main_grad, *(tensor.clone() for tensor in tensors)]


def trained(recipe=DELAYED):
    model, x = Counted(), randn(32, 64).float().requires_grad_()
    for _ in range(3):
        with opfuse.autocast(recipe=recipe):
            model(x).sum().backward()
    model.inner[0].weight.grad_added_to_main_grad = False
    return model, x


def equal(got, wanted):
    return len(got) == len(wanted) and all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, wanted))


@pytest.mark.row("R12")
@pytest.mark.parametrize("at", [0, 1, 2, "capture"])
def test_what_warm_up_did_is_undone_when_it_fails(at, on_cpu, monkeypatch):
    """A step of warm-up that raises after it ran, and a capture that does."""
    model, x = trained()
    before, steps, run = held(model), [], graphs._step

    def step(call, args):
        run(call, [3 * each for each in args])
        steps.append(held(model))
        if len(steps) - 1 == at:
            refuse()

    def refuse(*_, **__):
        raise UnsupportedError("what this test refuses")

    monkeypatch.setattr(graphs, "_step", step)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    with pytest.raises(UnsupportedError, match="what this test refuses"):
        opfuse.graphed(model, (x,), recipe=DELAYED)
    assert not equal(steps[-1], before)
    assert equal(held(model), before)


@pytest.mark.row("R12")
def test_warm_up_under_another_recipe_leaves_converted_states(on_cpu):
    """Their history has another length, and their scale another margin, as after the first training call under it."""
    model, x = trained()
    before = [(s.scale.clone(), s.amax_history.clone()) for s in states(model)]
    opfuse.graphed(model, (x,), recipe=SHORTER)
    after = [(s.scale, s.amax_history) for s in states(model)]
    assert len(after) == 6
    for (scale, history), (old, longer) in zip(after, before):
        assert equal((scale, history), (old / 2, longer[:2]))


@pytest.mark.row("R12")
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_added_up_as_without_graphs(to_none, on_cpu):
    """autograd takes the first gradient as it comes, in memory that the next backward pass writes."""
    model, x = plain(), randn(32, 64).float()
    other, graph = copy.deepcopy(model), opfuse.graphed(model, (x.clone(),))
    for _ in range(3):
        for each in (model, other):
            each.zero_grad(set_to_none=to_none)
        for step in range(3):
            graph(x * step).backward(torch.ones(32, 64))
            other(x * step).backward(torch.ones(32, 64))
            assert equal([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    assert len({p.grad.data_ptr() for p in model.parameters()}) == 4


class Waits(ops.BasicOperation):
    def op_forward(self, ctx, x, **_):
        wait()
        return x.clone()

    def op_backward(self, ctx, dy):
        return dy, ()


def wait(*_, **__):
    raise RuntimeError("called a synchronizing CUDA operation")


@pytest.mark.row("R12")
@pytest.mark.parametrize("where", ["op", "cast", "module"])
def test_the_op_in_which_the_host_waits_is_named(where, on_cpu, monkeypatch):
    """It is found among the frames of the error: a method of the op, or a cast that is made for it."""
    name, part = {"op": ("Waits", Waits()), "cast": ("BasicLinear", plain()), "module": ("a module of torch", nn.Identity())}[
        where
    ]
    monkeypatch.setattr(graphs, "_unwaited", UNWAITED)
    monkeypatch.setattr(graphs, "CALLS", 0)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(nn.Identity, "forward", wait)
    if where == "cast":
        monkeypatch.setattr(Float8CurrentScalingQuantizer, "quantize", wait)
    with pytest.raises(UnsupportedError, match=rf"^opfuse\.graphed, .*{name}.*: wants a call that the host does not wait for"):
        opfuse.graphed(nn.Sequential(part), (randn(32, 64).float(),), recipe=recipes.Float8CurrentScaling())


class Scaled(nn.Module):
    """Has a parameter that no result depends on."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.weight * x


@pytest.mark.row("R12")
def test_what_has_no_gradient_and_what_has_no_grad_are_left_as_they_are(on_cpu):
    """A parameter that the call does not use, and an input that another op made."""
    model, x = Scaled(), torch.arange(4.0, requires_grad=True)
    graph = opfuse.graphed(model, (torch.ones(4, requires_grad=True),))
    for step in range(1, 4):
        graph(3 * x).backward(torch.ones(4))
        assert equal((x.grad, model.weight.grad), (3.0 * step * torch.ones(4), 3 * step * x.detach()))
        assert model.unused.grad is None


@pytest.mark.row("R12")
def test_another_mode_than_at_the_capture_runs_without_graphs(on_cpu):
    """Parts of the model keep the modes that they have, and the model may change its mode beside its graphs."""
    model = nn.Sequential(plain(), nn.Dropout(0.0), nn.Dropout(0.0))
    model[1].eval()
    x = randn(32, 64).float()
    graph = opfuse.graphed(model, (x.clone(),))
    assert (graph.training, model.training, model[1].training) == (True, True, False)
    memory = graph(x).data_ptr()
    assert graph(2 * x).data_ptr() == memory
    for change, replayed in ((model.eval, False), (graph.train, True), (graph.eval, False), (model.train, True)):
        change()
        assert (graph(x).data_ptr() == memory) == replayed
        assert torch.equal(graph(x), model(x))
