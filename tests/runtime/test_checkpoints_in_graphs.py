"""Checkpoints inside of compiled code, whose compiler runs calls again in the backward pass: in the context of the first run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import opfuse
from opfuse import ops, recipes
from opfuse.errors import UnsupportedError
from opfuse.runtime.compile.saved_call import saved_calls
from tests.ops.test_op_errors import raised
from tests.runtime.test_compiled import fresh, same  # noqa: F401 - each test begins with nothing compiled
from tests.turns import in_turn

pytestmark = pytest.mark.cpu
DELAYED = recipes.DelayedScaling(amax_history_len=2)
RECIPES = {
    "delayed": DELAYED,
    "current": recipes.Float8CurrentScaling(),
    "high precision": recipes.Float8CurrentScaling(backward_override="high_precision"),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_rht=True),
}
in_checkpoint = partial(checkpoint, use_reentrant=False)


class Blocks(nn.Module):
    """Two checkpoints, the second with a pipeline that the first has called; their recomputations run in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ops.Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
        self.second = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 32))

    def one(self, x):
        return torch.tanh(self.first(torch.sin(x))) + x

    def two(self, x):
        return self.second(self.first(x.cos())) * 2

    def forward(self, x):
        return in_checkpoint(self.two, in_checkpoint(self.one, x)).sin()


def steps(call: Callable[..., Any], model: nn.Module, recipe: Any, count: int = 4, passes: int = 1) -> list[torch.Tensor]:
    """Results, gradients and states. The region is left before the backward pass, around which is another. recipe: None for that
    of a converted model.
    """
    found = []
    for i in range(count):
        torch.manual_seed(i)
        x = (torch.randn(32, 32) * 10 ** (i % 2)).requires_grad_()
        with nullcontext() if recipe is None else opfuse.autocast(recipe=recipe):
            y = call(x)
        with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
            for left in reversed(range(passes)):
                y.square().mean().backward(retain_graph=left > 0)
        values = [y, x.grad, *[p.grad for p in model.parameters()], *model.state_dict().values()]
        found += [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]
        model.zero_grad()
    return found


def compiled(model: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.row("H26")
def test_the_bits_of_eager_checkpoints():
    eager, model = Blocks(), Blocks()
    model.load_state_dict(eager.state_dict())
    call = compiled(model)
    for kind, recipe in RECIPES.items():
        assert same(steps(eager, eager, recipe), steps(call, model, recipe)), kind
    assert not counters["graph_break"]


def test_calls_are_made_again_and_keep_nothing_until_then():
    model = Blocks()
    call, seen = compiled(model), []
    for _ in range(3):
        with opfuse.autocast(recipe=DELAYED):
            y = call(torch.randn(16, 32, requires_grad=True))
        seen.append(saved_calls())
        y.sum().backward()
    assert seen == [0, 0, 0]


def test_a_second_backward_pass_makes_them_again():
    eager, model = Blocks(), Blocks()
    model.load_state_dict(eager.state_dict())
    assert same(steps(eager, eager, DELAYED, passes=2), steps(compiled(model), model, DELAYED, passes=2))


@pytest.mark.parametrize("reentrant", in_turn([False, True], of=2))
def test_a_checkpoint_around_the_compiled_code_too(reentrant):
    eager, model = Blocks(), Blocks()
    model.load_state_dict(eager.state_dict())
    call = partial(checkpoint, compiled(model), use_reentrant=reentrant)
    assert same(steps(eager, eager, DELAYED), steps(call, model, DELAYED))


@pytest.mark.parametrize("kind", in_turn(["delayed", "current"], of=2))
def test_calls_that_a_policy_saves_are_not_made_again(kind):
    """The first run then is the only one; it counts its amaxes as any call does."""
    policy = partial(create_selective_checkpoint_contexts, [torch.ops.opfuse.pipeline.default])

    class Selective(Blocks):
        def forward(self, x):
            inside = partial(in_checkpoint, context_fn=policy)
            return inside(self.two, inside(self.one, x)).sin()

    eager, model = Blocks(), Selective()
    model.load_state_dict(eager.state_dict())
    assert same(steps(eager, eager, RECIPES[kind]), steps(compiled(model), model, RECIPES[kind]))


@pytest.mark.row("H26")
@pytest.mark.parametrize("around", [None, False, True])
def test_random_numbers_are_drawn_once(around):
    """Compilers know of no generator that an op draws from: a mask of its own in the backward pass would give other gradients.

    around: whether another checkpoint, reentrant or not, runs all again, and what draws behind it.
    """

    def dropped() -> nn.Module:
        torch.manual_seed(0)
        return ops.Sequential(ops.Linear(32, 32), ops.Dropout(0.5), ops.Linear(32, 32))

    found = []
    for outer in (lambda call: call, compiled):
        model = dropped()
        inner = outer(lambda x, model=model: in_checkpoint(model, x))
        whole = lambda x, inner=inner: nn.functional.dropout(inner(x), 0.5)  # noqa: E731
        call = whole if around is None else partial(checkpoint, whole, use_reentrant=around)
        found.append([*steps(call, model, RECIPES["current"]), torch.get_rng_state()])
    assert same(*found)


def test_equal_models_share_a_graph_and_not_what_it_makes_again():
    """Their calls have one number in the code."""
    models = [Blocks() for _ in range(4)]
    for one, other in zip(models[:2], models[2:]):
        other.load_state_dict(one.state_dict())
    call = torch.compile(lambda model, x: model(x), backend="aot_eager", fullgraph=True)
    found = []
    for run, pair in ((lambda model, x: model(x), models[:2]), (call, models[2:])):
        x = torch.linspace(-1, 1, 1024).reshape(32, 32)
        for i in range(3):
            with opfuse.autocast(recipe=DELAYED if i else RECIPES["current"]):
                results = [run(model, x) for model in pair]
            (results[0] * 3 + results[1]).square().sum().backward()
        found.append([*results, *[p.grad for model in pair for p in model.parameters()]])
    assert same(*found)
    assert counters["stats"]["unique_graphs"] <= 2


class Gated(torch.autograd.Function):
    """The identity; its gradient is multiplied by what the forward pass needs for nothing else."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].tanh(), None


def twice(part: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    return part(part(x.sin()) + 1)


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "a result that it needs there alone": lambda part: lambda x: Gated.apply(x, part(x.sin())),
    "2 runs of one call": lambda part: partial(twice, torch.compiler.nested_compile_region(part)),
}


def test_a_call_that_the_backward_pass_runs_without_a_checkpoint_is_refused():
    part = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    call = compiled(lambda x: Gated.apply(x, part(x.sin())) * 2)
    with opfuse.autocast(recipe=RECIPES["current"]):
        y = call(torch.randn(32, 32, requires_grad=True))
    with raised(UnsupportedError, RuntimeError, "a call in the forward pass", "the compiler put into the backward pass"):
        y.sum().backward()


@pytest.mark.parametrize("got", REFUSED)
def test_a_call_that_has_no_first_run_of_its_own_is_refused(got):
    """It would run under the recipe that is around the backward pass, or with the random numbers of another one. A torch that
    makes a call of each run, as 2.11 does, has the bits of eager code.
    """
    found = []
    for outer in (lambda call: call, compiled):
        torch.manual_seed(0)
        function = REFUSED[got](ops.Sequential(ops.Linear(32, 32), ops.Dropout(0.5), ops.Linear(32, 32)))
        call = outer(lambda x, function=function: in_checkpoint(function, x) * 2)
        x = torch.linspace(-1, 1, 1024).reshape(32, 32).requires_grad_()
        with opfuse.autocast(recipe=RECIPES["current"]):
            y = call(x)
        try:
            y.sum().backward()
        except (UnsupportedError, RuntimeError) as error:
            found.append(str(error))
        else:
            found.append([y.detach(), x.grad])
    wanted, made = found
    assert same(wanted, made) if isinstance(made, list) else "one run in the forward pass" in made and got in made


def test_compiled_autograd_is_refused():
    """Both passes of a graph are one function for it, in which nothing tells the runs apart."""
    model = Blocks()
    call = compiled(model)
    with opfuse.autocast(recipe=RECIPES["current"]):
        y = call(torch.randn(32, 32, requires_grad=True))
    around = compiled_autograd._enable(partial(torch.compile, backend="aot_eager"))
    with around, raised(UnsupportedError, RuntimeError, "one run in the forward pass", "compiled autograd"):
        y.sum().backward()


class Attention(nn.Module):
    """Three products of one tensor, which ``fuse_`` joins."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, width, bias=False) for width in (32, 16, 16))

    def forward(self, x):
        x = x.sin()
        return torch.cat((self.k(x), self.v(x)), -1) * self.q(x).sigmoid()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = in_checkpoint(layer, x) + x
        return x


def converted(model: nn.Module) -> nn.Module:
    opfuse.fuse_(model, RECIPES["block"])
    return model


@pytest.mark.row("H26")
def test_converted_modules_share_a_product_as_elsewhere():
    plain = Layers()
    eager = converted(copy.deepcopy(plain))
    model = copy.deepcopy(eager)
    found = steps(eager, eager, None)
    assert same(found, steps(compiled(model), model, None))
    assert not same(found, steps(plain, plain, None))
    assert not counters["graph_break"]
    found = torch._dynamo.explain(model)(torch.randn(32, 32, requires_grad=True))
    ops_of = [node.target for graph in found.graphs for part in graph.modules() for node in part.graph.nodes]
    assert ops_of.count(torch.ops.opfuse.pipeline) == 4
