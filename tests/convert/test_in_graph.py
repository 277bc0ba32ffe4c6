"""What converted modules hand to each other in a graph, or where nothing counts writes, is what it was, or is made anew."""

from __future__ import annotations

import copy

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import opfuse
from opfuse.convert.pipeline import PipelineRun
from opfuse.errors import OpfuseWarning, UnsupportedError
from tests.convert.blocks import Attention
from tests.convert.test_fuse import EXACT, FP8, Layer
from tests.plans import plans_used
from tests.runtime.test_compiled import numbers
from tests.turns import in_turn


class Projections(Attention):
    def forward(self, x):
        return torch.stack([self.q(x), self.k(x), self.v(x)])


class Scaled(torch.nn.Module):
    """Has its layer read a tensor of its own, which hooks may write to."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(2 * x)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_and_not(inner, **options):
    """A converted module, a copy that dynamo follows, and the function that is compiled over that."""
    opfuse.fuse_(inner, FP8)
    other = copy.deepcopy(inner)
    call = torch.compile(Scaled(other), **{"backend": "aot_eager", "fullgraph": True} | options)
    return inner, other, call


def silently(write):
    """A hook that leaves the result as it is."""

    def hook(*seen):
        write(*seen)

    return hook


WRITES = {
    "x": lambda module, given, result: given[0].add_(1),
    "a view of x": lambda module, given, result: given[0][1].zero_(),
    "x by index": lambda module, given, result: given[0].__setitem__(0, 3.0),
}


@pytest.mark.cpu
@pytest.mark.parametrize("write", WRITES)
def test_products_of_a_tensor_that_was_written_between_are_made_anew(write):
    """A hook of the first projection writes, which nobody saw when the model was converted."""
    model, other, call = compiled_and_not(Projections())
    for each in (model, other):
        each.q.register_forward_hook(silently(WRITES[write]))
    x = torch.randn(2, 16, 32)
    with torch.no_grad():
        assert torch.equal(call(x), Scaled(model)(x))


@pytest.mark.cpu
def test_products_of_one_tensor_stay_one_and_none_outlives_its_graph():
    model, other, call = compiled_and_not(Projections())
    x = torch.randn(2, 16, 32)
    with torch.no_grad(), plans_used() as plans:
        found = call(x)
    assert len(plans) == 1
    assert other.q.forward.__self__.shared.followed is None
    assert torch.equal(found, Scaled(model)(x))
    other.q.register_forward_hook(torch._dynamo.disable(silently(WRITES["x"])))
    model.q.register_forward_hook(silently(WRITES["x"]))
    with torch.no_grad():
        assert torch.equal(torch.compile(Scaled(other), backend="eager")(x), Scaled(model)(x))


@torch.library.custom_op("opfuse_tests::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor) -> None:
    """Adds 1 in place, in an op of another library that says so."""
    x.add_(1)


LIBRARY = torch.library.Library("opfuse_tests", "FRAGMENT")
LIBRARY.define("shift_unseen(Tensor(a!) x) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("shift_unseen", silently(lambda x: x.add_(1)), "CompositeExplicitAutograd")
torch.library.register_fake("opfuse_tests::shift_unseen", lambda x: None, lib=LIBRARY)

OUTSIDE = {
    "by a method": lambda x: x.add_(1),
    "by a view": lambda x: x.view(-1)[::2].mul_(2),
    "as out=": lambda x: torch.add(x, 1, out=x),
    "in a list": lambda x: torch._foreach_add_([x], 1.0),
    "as a copy in a list": lambda x: torch._foreach_copy_([x], [x + 1]),
    "by a library's op": shift_,
    "by an op whose fake writes nothing": torch.ops.opfuse_tests.shift_unseen,
}


@pytest.mark.cpu
@pytest.mark.parametrize("write", in_turn(OUTSIDE, of=2))
def test_products_of_a_tensor_that_a_caller_writes_to_are_made_anew(write):
    """The caller calls the projections one by one, outside of the layer's forward."""
    model, other, _ = compiled_and_not(Projections())

    def between(module, x):
        x = 2 * x
        first = module.q(x)
        OUTSIDE[write](x)
        return first, module.k(x), module.v(x)

    x = torch.randn(2, 16, 32)
    found, wanted = torch.compile(between, backend="aot_eager")(other, x), between(model, x)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[1], model.k(2 * x))


def test_hooks_write_to_tensors_of_inference_mode_which_count_no_writes():
    model = Projections()
    opfuse.fuse_(model, FP8)
    model.q.register_forward_hook(silently(WRITES["x"]))
    with torch.inference_mode():
        x = torch.randn(2, 16, 32)
        assert torch.equal(model(x.clone())[1], model.k(x + 1))
        with plans_used() as plans:
            model.q._forward_hooks.clear()
            model(x)
    assert len(plans) == 1


@pytest.mark.filterwarnings("ignore::opfuse.errors.OpfuseWarning")
def test_hooks_of_all_modules_write_to_tensors_of_inference_mode():
    model = Projections()
    opfuse.fuse_(model, FP8)
    hook = torch.nn.modules.module.register_module_forward_hook(
        silently(lambda module, given, _: given[0].add_(module is model.q))
    )
    try:
        with torch.inference_mode():
            x = torch.randn(2, 16, 32)
            assert torch.equal(model(x.clone())[1], model.k(x + 1))
    finally:
        hook.remove()


@pytest.mark.cpu
def test_a_product_in_another_mode_is_made_anew():
    model, other, _ = compiled_and_not(Projections())

    def both(module, x):
        first = module.q(x)
        with torch.no_grad():
            return first, module.k(x)

    x = torch.randn(2, 16, 32)
    found, wanted = torch.compile(both, backend="aot_eager", fullgraph=True)(other, x), both(model, x)
    assert all(map(torch.equal, found, wanted))
    assert [each.requires_grad for each in found] == [True, False]


@pytest.mark.cpu
def test_parameters_that_a_graph_writes_to_are_refused():
    _, other, call = compiled_and_not(Projections())
    other.q.register_forward_hook(silently(lambda *_: other.k.weight.mul_(2)))
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"what the graph wrote to them. Cure: .* outside of the graph"):
        call(torch.randn(2, 16, 32))


@pytest.mark.cpu
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_layer_that_nobody_writes_to_runs_its_pipelines(trains):
    """What compares moments is in no graph that runs, forward or backward."""
    seen, layer = [], Layer()
    opfuse.fuse_(layer, FP8)

    def compiler(graph, given):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    with torch.set_grad_enabled(trains):
        result = torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(2, 16, 32, requires_grad=trains))
    if trains:
        result.sum().backward()
    assert seen.count("aten.rsqrt.default") == 2
    counts = {target: seen.count(target) for target in seen if target.startswith("opfuse.")}
    assert counts == {"opfuse.pipeline.default": 3} | ({"opfuse.pipeline_backward.default": 3} if trains else {})


@pytest.mark.cpu
@pytest.mark.parametrize("name", in_turn(["q", "k"], of=2))
def test_a_bias_that_goes_after_compiling_goes(name):
    """The graph is made anew, with the module's own forward in it; the others go on as pipelines."""
    model, x = Projections(), torch.randn(2, 16, 32)
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, EXACT)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(call(x), plain(x))
    for each in (model, plain):
        each.get_submodule(name).bias = None
    with pytest.warns(OpfuseWarning, match=f"{name} has changed since fuse_: .*'bias'"):
        found = call(x)
    torch.testing.assert_close(found, plain(x))


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.spare = (torch.nn.Parameter(torch.full((32,), 2.0)) for _ in range(2))
        self.cuts = self.spares = False

    def forward(self, x):
        y = torch.sin(x) * (self.spare if self.spares else self.scale)
        return y.detach() if self.cuts else y


class Parts(torch.nn.Module):
    """A part that opfuse does not know between two layers, and a layer that nobody calls."""

    def __init__(self, *, cuts=False):
        super().__init__()
        self.first, self.part, self.last, self.idle = (
            torch.nn.Linear(32, 32),
            Part(),
            torch.nn.Linear(32, 32),
            torch.nn.Linear(8, 8),
        )
        self.part.cuts = cuts

    def forward(self, x):
        return self.last(self.part(self.first(x)))


def without_gradient(call, model, x):
    call(x).sum().backward()
    return {name for name, each in (("x", x), *model.named_parameters()) if each.grad is None}


@pytest.mark.few
@pytest.mark.cpu
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("cuts", [False, True])
def test_what_no_result_depends_on_has_no_gradient_in_a_graph_either(backend, cuts):
    """torch.compile leaves None there, over plain torch; zeros would decay under an optimizer that decays weights."""
    plain, model = Parts(cuts=cuts), Parts(cuts=cuts)
    wanted = without_gradient(torch.compile(plain, backend=backend), plain, torch.randn(4, 32, requires_grad=True))
    opfuse.fuse_(model, FP8)
    call = torch.compile(model, backend=backend, fullgraph=True)
    assert without_gradient(call, model, torch.randn(4, 32, requires_grad=True)) == wanted
    assert wanted >= {"part.spare", "idle.weight", "idle.bias"}
    assert ("x" in wanted) == cuts
    for each in (plain, model):
        each.part.spares = True
        each.zero_grad(set_to_none=True)
    wanted = without_gradient(torch.compile(plain, backend=backend), plain, torch.randn(4, 32, requires_grad=True))
    assert without_gradient(call, model, torch.randn(4, 32, requires_grad=True)) == wanted


def test_a_file_of_a_compiler_is_of_what_the_forward_does():
    """Modules that look alike share no graph on disk if the code of a method differs."""

    def mlp(activation):
        class Mlp(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

            def forward(self, x):
                return self.down(self.act(self.up(x)))

            act = activation

        model = Mlp()
        opfuse.fuse_(model, FP8)
        return numbers(model)

    def gelu(self, x):
        return torch.nn.functional.gelu(x)

    def silu(self, x):
        return torch.nn.functional.silu(x)

    (of_gelu, *others), (of_silu, *same) = mlp(gelu), mlp(silu)
    assert mlp(gelu) == (of_gelu, *others)
    assert of_gelu != of_silu
    assert others == same


VIEWS = {
    "rows of a matrix": lambda x: x.flatten(0, 1),
    "time first": lambda x: x.transpose(0, 1),
    "a part of the columns": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "a row that is repeated": lambda x: x[:, :1].expand_as(x),
    "every second row": lambda x: x[:, ::2],
}


class Twice(torch.nn.Module):
    """Of one product, or of two that share it."""

    def __init__(self, count):
        super().__init__()
        self.one, self.other = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32) if count == 2 else None

    def forward(self, x):
        one, other = self.one(x), x.sin() if self.other is None else self.other(x)
        return one * other


def once():
    return Twice(1)


def twice():
    return Twice(2)


@pytest.mark.parametrize(("view", "make"), in_turn(VIEWS, (once, twice, Layer), of=3))
def test_the_gradient_of_an_input_that_is_no_matrix_in_memory(view, make):
    """In a graph it is the one of a call, and nothing is lost on the way to what was called."""
    torch.manual_seed(0)
    model = make()
    opfuse.fuse_(model, FP8)
    leaf = torch.randn(4, 32, 32, requires_grad=True)
    found = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        for _ in range(3):  # interpreted, recorded, repeated
            y = call(VIEWS[view](leaf))
            found.append((y, *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])))
    assert found[0][1].any()
    for other in found[1:]:
        torch.testing.assert_close(found[0], other)


def test_a_copy_of_an_input_that_no_tape_saw_is_an_error(monkeypatch):
    """What a pipeline is given in place of the input would end its gradient there; a graph gets no zeros for it."""
    model = torch.nn.Linear(32, 32)
    opfuse.fuse_(model, FP8)
    run = PipelineRun._filled
    monkeypatch.setattr(PipelineRun, "_filled", lambda self, fuser, x, extras: run(self, fuser, x.clone(), extras))
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()  # which autograd sees
    with pytest.raises(UnsupportedError, match="wants steps that gradients pass, got a copy of an input"):
        torch.compile(model, backend="aot_eager")(torch.randn(16, 32, requires_grad=True))
