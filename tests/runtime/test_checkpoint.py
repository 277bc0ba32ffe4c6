"""Activation checkpointing: the recomputation computes the bits of the forward pass, and is loud where it could not."""

from __future__ import annotations

import _thread
import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import opfuse
from opfuse import ops, recipes
from opfuse.errors import SavedTensorError, UnsupportedError
from opfuse.runtime.interpret import checkpoint_replay as recompute
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.torch_private import checkpoints as known
from tests.plans import plans_used
from tests.turns import in_turn

RECIPES = {
    "none": None,
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "fp8_current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
}
Checkpoint = Callable[..., torch.Tensor]


def block() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64), ops.Dropout(0.25)).bfloat16()


def plain(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    return second(first(x))


def each(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    return opfuse.checkpoint(second, opfuse.checkpoint(first, x))


def nested(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    return opfuse.checkpoint(lambda x: second(opfuse.checkpoint(first, x)), x)


def trained(checkpoint: Checkpoint, recipe: recipes.Recipe | None, steps: int = 3) -> list[torch.Tensor]:
    """Outputs and gradients of some steps of two blocks, and what the blocks remember afterwards."""
    first, second = block(), block()
    torch.manual_seed(1)
    seen = []
    for step in range(steps):
        x = (step + 1) * torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        x.retain_grad()
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = checkpoint(first, second, x)
        y.square().sum().backward()
        seen += [y.detach(), x.grad, *(p.grad.clone() for model in (first, second) for p in model.parameters())]
    for op in (*first, *second):
        seen += list(op.quantizer_states.to_dict().values())
    return [*seen, torch.get_rng_state()]


@pytest.mark.row("H26")
@pytest.mark.parametrize(("recipe", "checkpoint"), in_turn(RECIPES, [each, nested], of=2))
def test_recomputed_is_bitwise_what_was_not(recipe: str, checkpoint: Checkpoint) -> None:
    wanted, got = trained(plain, RECIPES[recipe]), trained(checkpoint, RECIPES[recipe])
    assert len(wanted) == len(got)
    assert all(torch.equal(w, g) for w, g in zip(wanted, got))
    if recipe != "none":
        assert not torch.equal(wanted[0], trained(plain, None)[0])


@pytest.mark.few
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_all_calls_of_a_checkpoint_within_another_are_those_of_a_plain_run(outer: bool, inner: bool) -> None:
    """Also the calls after the first one, which do not search again for what is around them. outer, inner: reentrant."""

    def within(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
        def inside(x: torch.Tensor) -> torch.Tensor:
            return torch_checkpoint(lambda x: second(first(x)), x, use_reentrant=inner)

        return torch_checkpoint(inside, x, use_reentrant=outer)

    delayed = RECIPES["delayed"]
    assert all(map(torch.equal, trained(within, delayed), trained(plain, delayed)))


@pytest.mark.few
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_calls_of_one_pipeline_in_checkpoints_within_others_keep_the_recipe_of_each(outer: bool, inner: bool) -> None:
    """A checkpoint repeats its own calls, and not those before it in the one around it. outer, inner: reentrant."""

    def made(inside: Checkpoint, around: Checkpoint) -> list[torch.Tensor]:
        model = block()
        torch.manual_seed(1)
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

        def calls(x: torch.Tensor) -> torch.Tensor:
            with opfuse.autocast(recipe=RECIPES["mxfp8"]):
                x = model(x)
            with opfuse.autocast(recipe=RECIPES["fp8_current"]):
                x = inside(model, x)
            with opfuse.autocast(recipe=RECIPES["mxfp8"]):
                return model(x)

        y = around(calls, x)
        y.float().square().sum().backward()
        return [y.detach(), x.grad]

    def plainly(function: Function, x: torch.Tensor) -> torch.Tensor:
        return function(x)

    def within(reentrant: bool) -> Checkpoint:
        return functools.partial(torch_checkpoint, use_reentrant=reentrant)

    assert all(map(torch.equal, made(within(inner), within(outer)), made(plainly, plainly)))


def test_it_keeps_no_activations_and_recomputes_each_block_once() -> None:
    model, calls = block(), []
    saved: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return model(x)

    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()), plans_used() as plans, hooks:
        y = opfuse.checkpoint(run, x)
    assert sum(saved) <= x.nbytes
    y.sum().backward()
    assert (len(calls), len(plans)) == (2, 1)
    assert model.cache_info().misses == 1  # the recomputation found the plan


def test_recipe_and_rules_reach_another_thread() -> None:
    model, x = block(), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    rules = opfuse.active_rules().without("epilogue")
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()), opfuse.use_rules(rules):
        y = opfuse.checkpoint(model, x)
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert x.grad is not None
    assert model.cache_info()[:4] == (1, 1, 1, "first plan: the cache was empty")


def test_two_backward_passes_over_one_graph() -> None:
    model, x = block(), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with opfuse.autocast(recipe=recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)):
        y = opfuse.checkpoint(model, x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [True, False])
def test_it_is_torchs_own_with_its_keywords(reentrant: bool, monkeypatch) -> None:
    given = []
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", lambda *args, **kwargs: given.append((args, kwargs)))
    opfuse.checkpoint(abs, 1, use_reentrant=reentrant, preserve_rng_state=False)
    opfuse.checkpoint(abs, 1)
    assert given == [
        ((abs, 1), {"use_reentrant": reentrant, "preserve_rng_state": False}),
        ((abs, 1), {"use_reentrant": False}),
    ]


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)


def keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> torch.utils.checkpoint.CheckpointPolicy:
    kept = torch.utils.checkpoint.CheckpointPolicy
    return kept.MUST_SAVE if op in PRODUCTS else kept.PREFER_RECOMPUTE


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_selective_checkpoint_may_keep_products(recipe: str) -> None:
    """They were scaled in place: RuntimeError, a tensor that is kept has been changed."""
    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, keep_products)

    def selective(first: ops.Sequential, second: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
        run = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, context_fn=contexts)
        return run(second.eval(), run(first.eval(), x))

    wanted = trained(lambda first, second, x: second.eval()(first.eval()(x)), RECIPES[recipe], steps=2)
    assert equal(trained(selective, RECIPES[recipe], steps=2), wanted)


# -- torch's own checkpoints -------------------------------------------------------------------------------------------------

HIGH = recipes.MXFP8BlockScaling(backward_override="high_precision")
TORCH_RECIPES = RECIPES | {"mxfp8 high_precision": HIGH}
torch_checkpoint = torch.utils.checkpoint.checkpoint
Function = Callable[..., torch.Tensor]


def under(recipe: recipes.Recipe | None) -> opfuse.autocast:
    return opfuse.autocast(enabled=recipe is not None, recipe=recipe)


def flat(run: Checkpoint, first: Function, second: Function, x: torch.Tensor) -> torch.Tensor:
    return run(second, run(first, x))


def within(run: Checkpoint, first: Function, second: Function, x: torch.Tensor) -> torch.Tensor:
    return run(lambda x: second(run(first, x)), x)


def hooked(run: Checkpoint, first: Function, second: Function, x: torch.Tensor) -> torch.Tensor:
    """With other hooks of saved tensors around and inside."""

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return first(x)

    with torch.autograd.graph.save_on_cpu():
        return run(second, run(offloaded, x))


SHAPES = {"flat": flat, "nested": within, "hooks": hooked}
KINDS: dict[str, Checkpoint] = {
    "plain": lambda function, x: function(x),
    "non-reentrant": lambda function, x: torch_checkpoint(function, x, use_reentrant=False),
    "late": lambda function, x: torch_checkpoint(function, x, use_reentrant=False, early_stop=False),
    "reentrant": lambda function, x: torch_checkpoint(function, x, use_reentrant=True),
    "opfuse": opfuse.checkpoint,
}


def steps(kind: str, shape: str, recipe: recipes.Recipe | None, place: str, between: str) -> list[torch.Tensor]:
    """Outputs, gradients and states of two steps of two micro-batches, whose backward passes come after both forward passes.

    place: of the regions, "outside" or "inside" the checkpoint, or "two", one after the other inside. between: what happens
    before and during the backward pass: "nothing", a "call" of the same pipelines, or another "region".
    """
    models = first, second = block().eval(), block().eval()  # dropout would draw other numbers where there are more calls
    torch.manual_seed(1)
    seen: list[torch.Tensor] = []

    def inside(model: ops.Sequential) -> Function:
        def run(x: torch.Tensor) -> torch.Tensor:
            with under(recipe):
                y = model[:2](x)
            if place != "two":
                with under(recipe):
                    return model[2:](y)
            with under(recipe):
                return model[2:](2 * y)

        def whole(x: torch.Tensor) -> torch.Tensor:
            with under(recipe):
                return model(x)

        return run if place == "two" else whole

    functions = models if place == "outside" else tuple(map(inside, models))
    for step in range(2):
        xs = [(3 * step + i + 1) * torch.randn(32, 64, dtype=torch.bfloat16) for i in range(2)]
        ys = []
        for x in xs:
            x.requires_grad_()
            with under(recipe if place == "outside" else None):
                ys.append(SHAPES[shape](KINDS[kind], *functions, x))
        if between == "call":
            with torch.no_grad(), under(recipes.Float8CurrentScaling()):
                second(first(xs[0]))
            second(first(xs[0].detach()))
        with under(recipes.MXFP8BlockScaling() if between == "region" else None):
            for y in reversed(ys):
                y.square().sum().backward()
        seen += [*(y.detach() for y in ys), *(x.grad for x in xs)]
        seen += [p.grad.clone() for model in models for p in model.parameters()]
    states = [op.quantizer_states for model in models for op in model if hasattr(op, "quantizer_states")]
    return seen + [tensor for each in states for tensor in each.to_dict().values()]


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted))


unchecked = functools.cache(lambda recipe, place: steps("plain", "flat", TORCH_RECIPES[recipe], place, "nothing"))
"""What every kind of checkpoint must compute; random numbers are drawn from seeds of its own."""


@pytest.mark.row("H26")
@pytest.mark.parametrize(("recipe", "kind"), in_turn(TORCH_RECIPES, ["non-reentrant", "reentrant"], of=2))
def test_torchs_own_checkpoints_recompute_the_forward_pass(recipe: str, kind: str) -> None:
    assert equal(steps(kind, "flat", TORCH_RECIPES[recipe], "outside", "nothing"), unchecked(recipe, "outside"))


PLACES = [("outside", "nothing"), ("outside", "call"), ("inside", "region"), ("inside", "call"), ("two", "nothing")]


def nestings():
    """At every run one shape for every second kind and place, in turn, so that a shape meets several kinds and places."""
    kinds = [kind for kind in KINDS if kind != "plain"]
    for (i, kind), (j, place), (k, shape) in itertools.product(*map(enumerate, (kinds, PLACES, SHAPES))):
        yield pytest.param(kind, shape, *place, marks=() if (i + j + k) % (2 * len(SHAPES)) == 0 else pytest.mark.slow)


@pytest.mark.few(apart=True)
@pytest.mark.row("H26")
@pytest.mark.parametrize(("kind", "shape", "place", "between"), [*nestings()])
def test_checkpoints_find_the_region_and_the_scales_of_the_forward_pass(kind: str, shape: str, place: str, between: str) -> None:
    """Under delayed scaling, which another scale, and an amax that is counted twice, would show in."""
    assert equal(steps(kind, shape, RECIPES["delayed"], place, between), unchecked("delayed", place))


SHARING: dict[str, Callable[[Checkpoint, ops.Sequential, torch.Tensor], torch.Tensor]] = {
    "two": lambda run, model, x: run(model, run(model, x)),
    "one, and then a call": lambda run, model, x: model(run(model, x)),
    "a call, and then one": lambda run, model, x: run(model, model(x)),
    "two in one": lambda run, model, x: run(lambda x: run(model, run(model, x)), x),
    "three deep": lambda run, model, x: run(lambda x: run(lambda x: model(run(model, x)), x), x),
    "two calls in one": lambda run, model, x: run(lambda x: model(model(x)), x),
}
"""Ways to call one model twice."""


@pytest.mark.row("H26")
@pytest.mark.parametrize("shape", SHARING)
def test_a_model_in_several_reentrant_checkpoints_is_updated_once(shape: str) -> None:
    """Each of them has a backward pass of its own; after each of these its gradients' scales were updated."""

    def trained(kind: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, seen = ops.Sequential(ops.Linear(32, 32), ops.GELU()).bfloat16(), []
        for step in range(3):
            x = (4**step * torch.randn(16, 32, dtype=torch.bfloat16)).requires_grad_()
            with under(RECIPES["delayed"]):
                y = SHARING[shape](KINDS[kind], model, x)
            y.square().sum().backward()
            seen += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
            model.zero_grad()
        return seen + [tensor for op in model for tensor in op.quantizer_states.to_dict().values()]

    wanted = trained("plain")
    assert equal(trained("reentrant"), wanted)
    assert equal(trained("non-reentrant"), wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torch_checkpoints_in_high_precision_run_beside_recipes(reentrant: bool) -> None:
    model, found = block(), []
    for recipe in (None, recipes.MXFP8BlockScaling()):
        torch.manual_seed(1)
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        y = torch_checkpoint(model, x, use_reentrant=reentrant)
        with torch.no_grad(), under(recipe):
            model(torch.randn(32, 64, dtype=torch.bfloat16))
        with under(recipe):
            y.sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@pytest.mark.few
@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda x: x[..., :8].mul_(2)], ids=["all", "through a view"])
@pytest.mark.parametrize("kind", ["none", "fp8_current"])
def test_a_write_to_what_the_recomputation_saved_is_refused(kind: str, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Torch compares no versions of what a checkpoint saves. Without a checkpoint autograd refuses the same backward pass."""
    model = block()

    def function(x: torch.Tensor, writes: bool) -> torch.Tensor:
        h = x * 2
        y = model(h)
        if writes:
            write(h)
        return y.sin() * y

    for number in range(6):  # interpreted, recorded, replayed
        for writes in (False, True):
            x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
            with opfuse.autocast(enabled=kind != "none", recipe=RECIPES[kind]):
                y = opfuse.checkpoint(function, x, writes)
            with pytest.raises(SavedTensorError, match="changed in place") if writes else nullcontext():
                y.float().sum().backward()
            assert (x.grad is None) == writes, number


class ExpInPlace(ops.BasicOperation):
    """Adds the exponential of its extra input, which it overwrites with that and saves."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        (ctx,), ((extra,),) = basic_op_ctxs, basic_op_extra_inputs
        ctx.dirty.append(extra.exp_())
        ctx.save_for_backward(extra)
        return input_ + extra, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        (exp,) = basic_op_ctxs[0].saved_tensors
        return grad_output, [()], [(grad_output * exp,)]


@pytest.mark.parametrize("op", [functools.partial(ops.AddExtraInput, in_place=True), ExpInPlace])
def test_writes_before_and_by_a_pipeline_in_a_checkpoint_are_none_after_it(op: Callable[[], ops.BasicOperation]) -> None:
    """A pipeline may save what it overwrites itself; what is written before it, or is not saved, counts for nothing."""
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(16, 16), op(), ops.GELU(), ops.Linear(16, 16))

    def function(x: torch.Tensor) -> torch.Tensor:
        h, residual = x * 2, x * 3
        h.add_(1)
        residual[0].mul_(2)
        return model(h, residual).mul_(2) * 1

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 32).view(2, 16).requires_grad_()
        model.zero_grad()
        run(x).sum().backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters())]

    for _ in range(6):
        assert equal(gradients(lambda x: opfuse.checkpoint(function, x)), gradients(function))


def test_what_is_ambient_is_over_when_a_checkpoint_runs_again() -> None:
    """The recipe of the forward pass is that of its pipelines; a function that asks itself sees what torch has it see."""
    found = []

    def run(x: torch.Tensor) -> torch.Tensor:
        found.append(recipes.current_recipe())
        return 2 * x

    x = torch.randn(4, requires_grad=True)
    with under(HIGH):
        y = opfuse.checkpoint(lambda x: run(x).square(), x)
    y.sum().backward()
    assert found == [HIGH, None]


def test_a_function_that_calls_other_pipelines_when_it_runs_again_is_refused() -> None:
    models, calls = [block().eval(), block()[:4].eval()], []

    def run(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return models[len(calls) - 1](x)

    y = torch_checkpoint(run, torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True), use_reentrant=False)
    with pytest.raises(UnsupportedError, match=r"recomputation by a checkpoint: wants a call of .* got a call of"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_call_in_a_hook_of_the_backward_pass_is_a_call_of_its_own(reentrant: bool) -> None:
    model, found = block().eval(), []
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

    def probe(grad: torch.Tensor) -> None:
        with under(recipes.MXFP8BlockScaling()):
            found.append(model(x.detach()))

    def run(x: torch.Tensor) -> torch.Tensor:
        y = model(2 * x)
        if y.requires_grad:
            y.register_hook(probe)
        return 2 * y

    torch_checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    with under(recipes.MXFP8BlockScaling()):
        assert all(torch.equal(each, model(x.detach())) for each in found)
    assert found


class Averaged(torch.autograd.Function):
    """No checkpoint: its forward calls a pipeline, and its backward another one."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, model: ops.Sequential, other: ops.Sequential) -> torch.Tensor:
        ctx.other = other
        ctx.save_for_backward(x)
        return model(x)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.other(dy), None, None


def test_the_backward_of_a_function_may_call_another_pipeline() -> None:
    model, other = block().eval(), block().eval()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with under(recipes.MXFP8BlockScaling()):
        y = Averaged.apply(x, model, other)
        wanted = model(x)
    assert torch.equal(y, wanted)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(x.grad, other(dy))


def test_what_an_op_calls_in_its_backward_pass_is_a_call_of_its_own() -> None:
    """Here after the region of the forward pass, so in high precision: the op is no checkpoint that calls the same again."""
    inner, x, seen = block()[:4], torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True), []

    class Calls(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            seen.append(inner(x.detach()))
            return 2 * input_

        def op_backward(self, ctx, grad_output):
            seen.append(inner(x.detach()))
            return 2 * grad_output, ()

    with opfuse.autocast(recipe=RECIPES["mxfp8"]):
        y = ops.Sequential(Calls())(x)
        quantized = inner(x.detach())
    y.sum().backward()
    assert torch.equal(seen[0], quantized)
    assert torch.equal(seen[1], inner(x.detach()))
    assert not torch.equal(*seen)


@pytest.mark.few
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", ["none", "fp8_current", "delayed"])
def test_a_backward_pass_inside_a_checkpoint_is_the_same_again_or_refused(recipe: str, reentrant: bool) -> None:
    """Torch runs it twice; under delayed scaling the second would cast with other scales (dW 60 % off) and count twice."""
    model = block()[:4]

    def stepped(x: torch.Tensor) -> torch.Tensor:
        with opfuse.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
            inner = x.detach().requires_grad_()
            with torch.enable_grad():
                (grad,) = torch.autograd.grad(model(inner).square().sum(), inner)
            return model(x + grad)

    grads = []
    for run in (stepped, lambda x: torch.utils.checkpoint.checkpoint(stepped, x, use_reentrant=reentrant)):
        x = torch.ones(32, 64, dtype=torch.bfloat16, requires_grad=True)
        model.zero_grad()
        if recipe == "delayed" and run is not stepped:
            with pytest.raises(UnsupportedError, match="inside the function of a checkpoint"):
                run(x)
            return
        run(x).sum().backward()
        grads.append([x.grad, *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_pass_inside_a_checkpoint_is_seen_from_a_thread_of_autograd(reentrant: bool, monkeypatch) -> None:
    """A GPU's part of a pass runs on a thread of its own, while the one that called it waits in the engine."""
    seen: list[UnsupportedError | None] = []

    def look(done: Any) -> None:
        try:
            recompute.check_once("a pipeline")
            seen.append(None)
        except UnsupportedError as error:
            seen.append(error)
        finally:
            done.release()

    def _engine_run_backward() -> None:
        monkeypatch.setattr(recompute, "_CHECKED", [None])
        done = threading.Lock()
        done.acquire()
        _thread.start_new_thread(look, (done,))  # in C, as is the wait: this is the last frame of Python
        done.acquire()

    def stepped(x: torch.Tensor) -> torch.Tensor:
        _engine_run_backward()
        return 2 * x

    x = torch.ones(2, requires_grad=True)
    stepped(x)
    torch.utils.checkpoint.checkpoint(stepped, x, use_reentrant=reentrant)
    assert seen[0] is None
    assert "inside the function of a checkpoint" in str(seen[1])


@pytest.mark.parametrize(("reentrant", "depth"), [(None, 63), (True, 61), (False, 61), (True, 63), (False, 63)])
def test_a_backward_pass_inside_a_checkpoint_is_seen_deep_in_others(reentrant: bool | None, depth: int) -> None:
    """Autograd runs passes that are 60 deep in others on a thread of its own, where no frame tells of the checkpoint.

    On that thread, too, there may be a pass within a pass: it has a GPU's part of a reentrant checkpoint.
    """
    seen: list[int] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.depth:
                nested(ctx.depth - 1)
                return grad, None
            seen.append(threading.get_ident())
            recompute.check_once("a pipeline")
            return grad, None

    def nested(depth: int) -> None:
        with torch.enable_grad():
            Nested.apply(torch.ones(1, requires_grad=True), depth).backward()

    def stepped(x: torch.Tensor) -> torch.Tensor:
        nested(depth)
        return 2 * x

    x = torch.ones(2, requires_grad=True)
    if reentrant is None:
        stepped(x)
    else:
        with pytest.raises(UnsupportedError, match="inside the function of a checkpoint"):
            torch.utils.checkpoint.checkpoint(stepped, x, use_reentrant=reentrant)
    assert threading.get_ident() not in seen
    assert len(seen) == 1


def test_validation_in_a_checkpoint_counts_no_amax() -> None:
    model = block().eval()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    for reentrant in (True, False):
        with torch.no_grad(), under(RECIPES["delayed"]):
            torch_checkpoint(model, x, use_reentrant=reentrant)
    assert not any(state.amax_history.any() for op in model for state in getattr(op, "quantizer_states", ()))


def test_calls_without_gradients_count_no_amax_where_a_reentrant_checkpoint_counts_them() -> None:
    """Both are one program: neither has gradients, and the checkpoint's forward pass is one of a training step all the same."""

    def states(repeated: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32)), torch.randn(32, 32)
        for _ in range(4):
            with nullcontext() if repeated else interpreted(), under(recipes.DelayedScaling(amax_history_len=4)):
                y = torch_checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
            y.sum().backward()
            with nullcontext() if repeated else interpreted(), under(recipes.DelayedScaling(amax_history_len=4)), torch.no_grad():
                model((100 * x).requires_grad_())
        return [value for name, value in model.state_dict().items() if "amax_history" in name]

    assert all(map(torch.equal, states(repeated=True), states(repeated=False)))


def test_a_torch_whose_checkpoint_works_in_another_way_is_refused(monkeypatch) -> None:
    """One whose runs share no object: a checkpoint could not be told from another."""
    monkeypatch.setattr(known, "_is_own", lambda value: False)
    known._places.cache_clear()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    try:
        with torch.autograd.graph.save_on_cpu():
            block()(x)  # no checkpoint, so nothing need be known of one
        with pytest.raises(UnsupportedError, match="a torch with a known checkpoint"):
            torch_checkpoint(block(), x, use_reentrant=False)
    finally:
        known._places.cache_clear()


class Outer(torch.autograd.Function):
    """Calls a function in its forward, as a reentrant checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], Any]) -> torch.Tensor:
        call()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def test_a_search_that_found_nothing_around_compiled_code_stands_for_that_run_alone() -> None:
    """A function of autograd in a module of torch._functorch is what runs compiled code."""
    methods = {name: vars(Outer)[name] for name in ("forward", "backward")}
    globals_ = {"__name__": "torch._functorch.sample"}
    moved = {name: staticmethod(FunctionType(each.__func__.__code__, globals_, name)) for name, each in methods.items()}
    compiled = type("Compiled", (torch.autograd.Function,), moved)
    x, seen = torch.ones(1, requires_grad=True), list[int]()

    def look() -> None:
        seen.extend(len([*known.checkpoints()]) for _ in range(2))

    alive = compiled.apply(x, look)
    assert seen == [0, 0]
    seen.clear()
    Outer.apply(x, lambda: compiled.apply(x, look))
    assert seen == [1, 1]
    seen.clear()
    compiled.apply(x, lambda: Outer.apply(x, look))
    assert seen == [1, 1]
    assert alive.grad_fn is not None
