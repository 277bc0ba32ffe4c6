"""Calls of a compiled graph that are made again as a whole: the bits of calls step by step, whatever changes between them."""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops, recipes
from opfuse.errors import SavedTensorError
from opfuse.events import GroupRan, PlanUsed, subscribed
from opfuse.runtime.compile.saved_call import saved_calls
from tests.ops.test_op_errors import raised
from tests.runtime.test_entered import entered
from tests.turns import in_turn

pytestmark = pytest.mark.cpu
FP8 = recipes.Float8CurrentScaling()
KINDS = {
    "current": FP8,
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=2),
    "high precision": FP8.replace(backward_override="high_precision"),
    "all": FP8.replace(keep="all"),
}


REPEATED = {"current", "block", "delayed", "high precision"}
"""Recipes under which tests of something else compare calls that are repeated."""

STEPS = 16
"""Functions that the steps of a call enter at least, beside those of one that is made as a whole."""


class Attention(nn.Module):
    """Three products of one input, which ``fuse_`` joins, and a gated unit behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, width, bias=False) for width in (64, 32, 32))
        self.mlp = Gated()

    def forward(self, x):
        y = torch.cat((self.k(x), self.v(x)), -1) * self.q(x).sigmoid()
        return self.mlp(x + y)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Pipelines(nn.Module):
    """With an extra output of one pipeline that another reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ops.Sequential(ops.RMSNorm(64), ops.MakeExtraOutput(), ops.Linear(64, 64), ops.GELU())
        self.second = ops.Sequential(ops.Linear(64, 64, bias=False), ops.AddExtraInput(), ops.Linear(64, 64))

    def forward(self, x):
        y, normed = self.first(torch.sin(x))
        return self.second(torch.tanh(y), normed)


def converted() -> nn.Module:
    model = Attention().bfloat16()
    opfuse.fuse_(model, pack=True)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pipelines": lambda: Pipelines().bfloat16(),
    "converted": converted,
}


class Pair:
    """A compiled model and one that is called, with equal weights; each step is compared bit by bit."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.models = [MODELS[kind]() for _ in range(2)]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.compiled = torch.compile(self.models[0], backend="aot_eager", fullgraph=True)

    def step(
        self,
        recipe: Any = FP8,
        x: torch.Tensor | None = None,
        inside: Callable[[], Any] = nullcontext,
        *,
        wanted: bool = True,
    ) -> None:
        """wanted: whether the input gets a gradient."""
        given = torch.randn(2, 64, 64).bfloat16() if x is None else x
        found = []
        for call, model in ((self.compiled, self.models[0]), (self.models[1], self.models[1])):
            torch.manual_seed(1)
            x = given.detach().requires_grad_(wanted)
            with inside(), opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                y = call(x)
            y.square().mean().backward()
            found.append([y.detach(), x.grad, *[p.grad for p in model.parameters()], *model.state_dict().values()])
            model.zero_grad()
        for one, other in zip(*found, strict=True):
            if recipe is None and one is not None:
                torch.testing.assert_close(one, other)  # a graph sums the gradients of plain products in another order
            else:
                assert one is other is None or torch.equal(one, other)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        for model in self.models:
            change(model)

    def functions(self, call: Callable[[Any, torch.Tensor], Any] = lambda compiled, x: compiled(x)) -> int:
        """How many functions of the library a call enters, behind one like it."""
        x = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        with opfuse.autocast(recipe=FP8):
            return [entered(lambda: call(self.compiled, x)).functions for _ in range(2)][-1]

    def is_repeated(self) -> bool:
        """Whether a call enters fewer functions than one that is made step by step, as where somebody sees what is saved."""
        return self.functions() + STEPS < self.functions(seen)


def seen(call: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        y: torch.Tensor = call(x)
    return y


def checkpointed(call: Any, x: torch.Tensor, *, reentrant: bool = False) -> torch.Tensor:
    y: torch.Tensor = checkpoint(call, x, use_reentrant=reentrant)
    return y


@contextmanager
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert saved_calls() == 0


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """But for tests that share what is compiled."""
    with nullcontext() if "compiled_pair" in request.fixturenames else fresh():
        yield


@pytest.fixture(scope="module")
def compiled_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Of the model that ``of_pipelines``, ``of_converted`` or ``of_both`` name. What it compiled is shared by tests that leave
    the model as it is; pytest runs those of a model one after the other."""
    with fresh():
        made = [Pair(request.param)]
        yield made[0]
        made.clear()


@pytest.fixture
def pair(compiled_pair: Pair) -> Pair:
    """Calls of it are repeated, whatever another test did."""
    return repeated(compiled_pair)


def repeated(found: Pair) -> Pair:
    found.both(nn.Module.zero_grad)
    for _ in range(5):
        found.step()
    assert found.is_repeated()
    for _ in range(2):
        found.step()  # the hooks of that look have entered layouts of their own
    return found


of_pipelines, of_converted = (
    pytest.mark.parametrize(
        "compiled_pair", [pytest.param(kind, marks=() if kind == first else pytest.mark.slow) for kind in MODELS], indirect=True
    )
    for first in MODELS
)
"""One model runs every time and the other with -m slow; each is called until it is repeated, for every test."""

of_both = pytest.mark.parametrize("compiled_pair", MODELS, indirect=True)


@of_both
@pytest.mark.few
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in REPEATED)) for kind in KINDS])
def test_every_recipe_has_the_numbers_of_eager_calls(pair, kind):
    for _ in range(6):
        pair.step(KINDS[kind])


@of_converted
def test_recipes_sizes_and_modes_in_turns(pair):
    """None of them is taken for another that was repeated."""
    block = KINDS["block"]
    for recipe, rows in ((block, 64), (FP8, 64), (None, 64), (FP8, 128), (FP8.replace(backward_override="dequantized"), 64)) * 4:
        pair.step(recipe, torch.randn(2, rows, 64).bfloat16())
    for wanted in (True, False, False, True) * 2:
        pair.step(wanted=wanted)
    for rows in (33, 64, 7, 33, 7):  # which are filled up
        pair.step(FP8, torch.randn(2, rows, 64).bfloat16())


@of_pipelines
def test_how_an_input_lies(pair):
    whole, wide = torch.randn(2 * 64 * 64 + 1).bfloat16(), torch.randn(2, 64, 128).bfloat16()
    given = {
        "unaligned": whole[1:].view(2, 64, 64),
        "strided": wide[..., ::2],
        "rows apart": wide[..., :64],
        "transposed": whole[1:].view(64, 2, 64).transpose(0, 1),
        "expanded": whole[: 64 * 64].view(1, 64, 64).expand(2, 64, 64),
    }
    for x in [*given.values()] * 3:
        pair.step(x=x)


def test_an_input_with_the_negative_bit():
    """Whose values are not those in memory."""
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(64, 64), ops.GELU())
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    whole = torch.complex(torch.zeros(64, 64), torch.randn(64, 64))
    for x in (whole.imag, whole.conj().imag, whole.imag, whole.conj().imag) * 3:
        given = [x.detach().requires_grad_() for _ in range(2)]
        with opfuse.autocast(recipe=FP8):
            one, other = (run(each) for run, each in zip((call, model), given))
        one.sum().backward()
        other.sum().backward()
        assert torch.equal(one, other)
        assert torch.equal(*[each.grad for each in given])


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_groups_of_other_sizes_are_not_taken_for_those_of_before(recipe):
    """Sizes that lie on the host decide what its programs do."""
    torch.manual_seed(0)
    model = ops.Sequential(ops.GroupedLinear(3, 64, 64, bias=False), ops.GELU()).bfloat16()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for sizes in ([32, 64, 32], [64, 32, 32], [0, 128, 0], [32, 64, 32]) * 4:
        x, found = torch.randn(128, 64).bfloat16(), []
        for run in (call, model):
            given = x.clone().requires_grad_()
            with opfuse.autocast(recipe=KINDS[recipe]):
                y = run(given, torch.tensor(sizes))
            y.square().mean().backward()
            found.append([y.detach(), given.grad, *[p.grad for p in model.parameters()]])
            model.zero_grad()
        assert all(map(torch.equal, *found)), sizes


def frozen(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def scaled(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def moved_together(model: nn.Module) -> None:
    """What is packed stays so, in other memory; what was there is no more."""
    copies: dict[int, torch.UntypedStorage] = {}
    for p in model.parameters():
        there = p.untyped_storage()
        copies.setdefault(there.data_ptr(), there.clone())
    for p in model.parameters():
        storage, offset = copies[p.untyped_storage().data_ptr()], p.storage_offset()
        p.data.view(torch.uint8).fill_(255)
        p.data = torch.empty(0, dtype=p.dtype).set_(storage, offset, p.shape, p.stride())


def turned_round(model: nn.Module) -> None:
    """What is packed lies in one memory still, in the other order, so no tensor over it is the whole."""
    packed: dict[int, list[nn.Parameter]] = {}
    for p in model.parameters():
        packed.setdefault(p.untyped_storage().data_ptr(), []).append(p)
    for parts in packed.values():
        whole = torch.cat([p.data.flatten() for p in reversed(parts)])
        for p, part in zip(reversed(parts), whole.split([p.numel() for p in reversed(parts)])):
            p.data = part.view(p.shape)


def apart_in_place(model: nn.Module) -> None:
    """Each parameter has a storage of its own where it was, as if an allocator had given all addresses again."""
    for p in model.parameters():
        there = p.data
        p.data = torch.frombuffer((ctypes.c_uint8 * there.nbytes).from_address(there.data_ptr()), dtype=p.dtype).view(p.shape)
        vars(model).setdefault("memory", []).append(there)


def last_moved(model: nn.Module) -> None:
    """Of each product that is packed, and every other parameter: the last one alone has memory of its own."""
    last = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    for p in last.values():
        p.data, old = p.data.clone(), p.data
        old.view(torch.uint8).fill_(255)


def moved(model: nn.Module) -> None:
    """To memory of its own, which undoes what was packed."""
    for p in model.parameters():
        p.data = p.data.clone()


def misaligned(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.empty(p.numel() + 1, dtype=p.dtype)[1:].view(p.shape).copy_(p.data)


def replaced(model: nn.Module) -> None:
    for module in model.modules():
        for name, p in [*module._parameters.items()]:
            if p is not None:
                setattr(module, name, nn.Parameter(p.detach().clone() + 0.01))


def evaluated(model: nn.Module) -> None:
    model.eval()


PACKED = [moved_together, apart_in_place, moved_together, turned_round, last_moved]
CHANGES = [scaled, frozen, evaluated, *PACKED, moved, misaligned, replaced]
"""Those that leave packed weights where they lie come first."""


@pytest.mark.parametrize(("kind", "start"), in_turn(MODELS, [0, 1], of=2))
def test_what_changes_in_a_model(kind, start):
    """Every second one, in one model."""
    pair = repeated(Pair(kind))
    for change in CHANGES[start::2]:
        for _ in range(2):
            pair.both(change)
            for _ in range(4):
                pair.step()


@contextmanager
def kept(pair: Pair) -> Iterator[None]:
    with opfuse.kept_weights(pair.models[0]), opfuse.kept_weights(pair.models[1]):
        yield


def test_an_op_that_changes(monkeypatch):
    """By a method that is written into its class, as debuggers do, and back."""
    pair, own = Pair("pipelines"), ops.GELU.op_forward
    for forward in (own, lambda self, ctx, x, **kwargs: own(self, ctx, 2 * x, **kwargs)) * 2:
        monkeypatch.setattr(ops.GELU, "op_forward", forward)
        for _ in range(5):
            pair.step()


AROUND: dict[str, Callable[[Pair], AbstractContextManager[Any]]] = {
    "casts that are kept": kept,
    "rules without fusions": lambda _: opfuse.use_rules(opfuse.active_rules().unfused),
    "no programs": lambda _: opfuse.interpreted(),
    "torch.autocast": lambda _: torch.autocast("cpu", torch.float16),
    "a look at groups": lambda _: subscribed(lambda event: None, GroupRan),
    "a look at plans": lambda _: subscribed(lambda event: None, PlanUsed),
    "no plans": lambda _: opfuse.on_miss("error"),
    "hooks of saved tensors": lambda _: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


ALIKE = {"rules without fusions", "torch.autocast", "no plans"}
"""What a call is repeated inside of, by a key of its own."""


@of_both
@pytest.mark.few
@pytest.mark.parametrize("start", [0, 1])
def test_what_stands_around_a_call(pair, start):
    """Every second one, around one model."""
    for around in [*AROUND][start::2]:
        least = pair.functions()
        for _ in range(2):
            for _ in range(4):
                if around == "no plans":
                    pair.step()
                pair.step(inside=lambda around=around: AROUND[around](pair))
            pair.step()
        assert pair.is_repeated(), around
        with AROUND[around](pair):
            assert (pair.functions() > least + STEPS) is (around not in ALIKE), around


@of_both
@pytest.mark.few
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_checkpoints_repeat_a_call_under_its_first_recipe(pair, reentrant, recipe):
    for _ in range(3):
        pair.step(KINDS[recipe])
    for _ in range(3):
        found = []
        for call, model in ((pair.compiled, pair.models[0]), (pair.models[1], pair.models[1])):
            x = torch.linspace(-1, 1, 2 * 64 * 64, dtype=torch.bfloat16).view(2, 64, 64).requires_grad_()
            with opfuse.autocast(recipe=KINDS[recipe]):
                y = checkpointed(call, x, reentrant=reentrant)
            with opfuse.autocast(recipe=KINDS["block"]):
                y.square().mean().backward()
            found.append([y.detach(), x.grad, *[p.grad for p in model.parameters()], *model.state_dict().values()])
            model.zero_grad()
        assert all(map(torch.equal, *found))
        pair.step(KINDS[recipe])


@of_converted
def test_a_call_in_a_checkpoint_is_repeated_as_a_whole(pair):
    """It enters fewer functions than one that is made step by step, although it looks for the checkpoint."""
    for _ in range(5):
        checkpointed_calls = pair.functions(checkpointed)
    assert checkpointed_calls < pair.functions(seen)


UNREAD = {"first.2.bias", "second.2.bias", "mlp.down.bias"}
"""Parameters that no backward pass reads, not even as a neighbour of one in the same memory."""


@of_both
def test_a_write_to_what_was_saved_is_refused(pair):
    """To the last part of a joined product too, of which a program saves the first one's memory."""
    found = set()
    for name, p in pair.models[0].named_parameters():
        with opfuse.autocast(recipe=KINDS["high precision"]):
            for _ in range(5):
                pair.compiled(torch.randn(2, 64, 64).bfloat16().requires_grad_()).sum().backward()
            y = pair.compiled(torch.randn(2, 64, 64).bfloat16().requires_grad_()).sum()
        with torch.no_grad():
            p.mul_(1.0)
        if name in UNREAD:
            y.backward()
            continue
        with raised(SavedTensorError, RuntimeError, "saved tensors as the forward pass left them", "changed in place"):
            y.backward()
        found.add(name)
    assert found == dict(pair.models[0].named_parameters()).keys() - UNREAD


def test_what_is_saved_of_an_input_is_a_copy():
    """A compiler may overwrite an argument that its graph reads no more."""
    pair, found = Pair("converted"), []
    for written in (False, False, False, False, True):
        torch.manual_seed(1)
        x = torch.randn(2, 64, 64).bfloat16().requires_grad_()
        with opfuse.autocast(recipe=KINDS["high precision"]):
            y = pair.compiled(x)
        if written:
            x.data.zero_()
        y.square().mean().backward()
        found.append([x.grad, *[p.grad for p in pair.models[0].parameters()]])
        pair.models[0].zero_grad()
    assert all(map(torch.equal, found[-1], found[-2]))


@of_pipelines
@functorch_config.patch(donated_buffer=False)
def test_a_second_backward_pass_wants_the_graph(pair):
    torch._dynamo.reset()
    with opfuse.autocast(recipe=FP8):
        y = pair.compiled(x := torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)).square().mean()
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.backward(retain_graph=True)
    assert torch.equal(x.grad, first)
    y.backward()
    with pytest.raises(RuntimeError):
        y.backward()


@of_converted
def test_threads_share_what_is_repeated(pair):
    given = [torch.randn(2, 64, 64, dtype=torch.bfloat16) for _ in range(4)]
    found: dict[int, torch.Tensor] = {}

    def run(i: int) -> None:
        for _ in range(8):
            x = given[i].clone().requires_grad_()
            with opfuse.autocast(recipe=FP8):
                pair.compiled(x).square().mean().backward()
            found[i] = x.grad

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(given):
        x.requires_grad_()
        with opfuse.autocast(recipe=FP8):
            pair.models[1](x).square().mean().backward()
        assert torch.equal(found[i], x.grad)


def test_other_rules_have_plans_of_their_own():
    pair = Pair("pipelines")
    for _ in range(5):
        pair.step()
    first, rules = pair.models[0].first, opfuse.active_rules()
    for fewer in (rules.without(rules.names[0]), rules.unfused):
        missed = first.cache_info().misses
        for _ in range(5):
            pair.step(inside=lambda fewer=fewer: opfuse.use_rules(fewer))
        assert first.cache_info().misses == missed + 1


@pytest.mark.parametrize("compiled_pair", ["pipelines"], indirect=True)
def test_a_plan_that_was_dropped_is_made_anew(pair):
    first, missed = pair.models[0].first, pair.models[0].first.cache_info().misses
    for run in first.runs():
        run.cache.clear()
    pair.step()
    assert first.cache_info().misses == missed + 1


@of_converted
def test_programs_that_were_dropped_are_not_kept_for_calls_as_a_whole(pair, monkeypatch):
    least, other = pair.functions(), ops.Sequential(ops.Linear(64, 64)).bfloat16()
    monkeypatch.setenv("OPFUSE_PROGRAM_BYTES", "1")
    for _ in range(3):
        with opfuse.autocast(recipe=FP8):
            other(torch.randn(64, 64, dtype=torch.bfloat16))
    x = torch.randn(2, 64, 64).bfloat16().requires_grad_()
    with opfuse.autocast(recipe=FP8):
        assert entered(lambda: pair.compiled(x)).functions > least + STEPS


@pytest.mark.parametrize("compiled_pair", ["pipelines"], indirect=True)
def test_hits_are_counted(pair):
    """Only pipelines have counts of their own."""
    infos = [model.first.cache_info() for model in pair.models]
    pair.step()
    assert [model.first.cache_info().hits - info.hits for model, info in zip(pair.models, infos)] == [1, 1]


@of_pipelines
def test_a_region_with_repeated_calls_alone_is_used(pair):
    x = torch.randn(2, 64, 64).bfloat16().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with opfuse.autocast(recipe=FP8):
                pair.compiled(x)


def test_a_result_that_is_an_input_is_a_copy():
    model = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(64, 64)).bfloat16()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(6):
        x = torch.randn(64, 64).bfloat16().requires_grad_()
        with opfuse.autocast(recipe=FP8):
            y, other = call(x)
        assert torch.equal(other, x)
        assert other.data_ptr() != x.data_ptr()
        (y.sum() + other.sum()).backward()


def alive() -> int:
    """Bytes of the memory of all tensors."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided]
    storages = [each.untyped_storage() for each in tensors if not each.is_meta]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


@of_converted
@pytest.mark.parametrize("recipe", in_turn(["current", "high precision"], of=2))
def test_a_call_as_a_whole_keeps_no_more_than_its_steps(pair, recipe):
    """Neither its inputs nor what a backward pass has read."""
    kept = []
    for call in range(5):
        x = torch.randn(2, 64, 64).bfloat16().requires_grad_()
        before = alive() if call > 2 else 0  # when it is made as a whole, and when somebody looks
        with opfuse.autocast(recipe=KINDS[recipe]), AROUND["a look at plans"](pair) if call == 4 else nullcontext():
            y = pair.compiled(x)
        kept += [alive() - before] if call > 2 else []
        del y
    assert kept[0] == kept[1] > 0


@of_converted
def test_copies_of_a_model_share_nothing(pair):
    other = copy.deepcopy(pair.models[0])
    scaled(other)
    call = torch.compile(other, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    with opfuse.autocast(recipe=FP8):
        found = [call(x).detach() for _ in range(4)]
        assert all(torch.equal(each, other(x)) for each in found)
    pair.step()
