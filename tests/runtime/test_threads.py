"""Threads, processes and interleaved microbatches: each call has the recipe of its own thread, and the bits of a call alone."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

import opfuse
from opfuse import ops, recipes
from opfuse.recipes import current_recipe
from opfuse.runtime.replay.replayable import SEEN, Replayable
from tests.compiler.harness import generator_of
from tests.processes import run_ranks
from tests.turns import in_turn

pytestmark = pytest.mark.cpu
RECIPES = (
    None,
    recipes.DelayedScaling(amax_history_len=2),
    recipes.Float8CurrentScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
)
DELAYED = RECIPES[1]


def model_of(seed=0, stored=None):
    """stored: a recipe in whose formats the weights live."""
    torch.manual_seed(seed)
    with opfuse.quantized_model_init(enabled=stored is not None, recipe=stored):
        return ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.SwiGLU(), ops.Linear(32, 32))


def batches(count):
    return [torch.randn(32, 32, generator=generator_of(i)) * (1 + i) for i in range(count)]


def trained(model, recipe, steps=5):
    """The gradients of all steps, and the state that they leave."""
    found = []
    for x in batches(steps):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.square().mean().backward()
        found += [y.detach(), *[p.grad.clone() for p in model.parameters()]]
    return found, states(model)


def states(model):
    held = [getattr(op, "quantizer_states", ()) for run in model.runs() for op in run.ops]
    return [tensor for of_op in held for state in of_op for tensor in (state.scale, state.amax_history)]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def in_threads(*functions):
    """What each returns in a thread of its own, all begun at once."""
    found, gate = [None] * len(functions), threading.Barrier(len(functions))

    def run(i):
        gate.wait()
        found[i] = functions[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.row("R13")
@pytest.mark.parametrize("stored", in_turn([False, True], of=2))
def test_r13_threads_train_under_recipes_of_their_own(stored):
    models = [model_of(i, recipe if stored else None) for i, recipe in enumerate(RECIPES)]
    alone = [trained(copy.deepcopy(model), recipe) for model, recipe in zip(models, RECIPES)]
    with opfuse.autocast(recipe=recipes.NVFP4BlockScaling()):  # of this thread, and of no other
        together = in_threads(*[lambda m=m, r=r: trained(m, r) for m, r in zip(models, RECIPES)])
    for recipe, one, other in zip(RECIPES, together, alone):
        assert same(one[0], other[0]), recipe
        assert same(one[1], other[1]), recipe
    assert alone[1][1]  # states of delayed scaling


class Interrupted:
    """A look during which other threads note looks of their own, once it has been hashed ``after`` times."""

    def __init__(self, programs: Replayable, after: int) -> None:
        self.programs, self.left = programs, after

    def __hash__(self) -> int:
        self.left -= 1
        if self.left == 0:
            for other in range(self.programs.limit):
                self.programs.add(other, SEEN)
        return id(self)


@pytest.mark.parametrize("after", range(1, 6))
def test_a_look_may_be_pushed_out_while_it_is_noted(after):
    """As where threads call one model with many shapes: each look is noted again when it is recorded."""
    programs = Replayable(limit=3)
    look = Interrupted(programs, 0)
    programs.add(look, SEEN)
    look.left = after
    programs.add(look, "recorded")
    assert len(programs) <= programs.limit
    assert programs.get(look, "recorded") == "recorded"


@pytest.mark.row("R13")
def test_r13_threads_share_one_model_for_inference():
    """Plans and programs are made while others run; each call has the bits of one that is alone."""
    model, xs = model_of(), batches(8)
    shared = copy.deepcopy(model)

    @torch.no_grad()
    def calls(recipe):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            return [model(x) for x in xs]

    wanted = [calls(recipe) for recipe in RECIPES[2:]]
    model = shared  # which has no plans yet
    for got, want in zip(in_threads(*[lambda r=r: calls(r) for r in RECIPES[2:] * 2]), wanted * 2):
        assert same(got, want)


def test_a_thread_has_no_recipe_until_it_enters_a_region():
    with opfuse.autocast(recipe=DELAYED):
        (found,) = in_threads(current_recipe)
        assert current_recipe() == DELAYED
    assert found is None


@pytest.mark.few
@pytest.mark.row("R13")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_r13_two_microbatches_go_forward_before_either_goes_backward(recipe, stored):
    """As 1F1B has them: the bits of one pass after the other, where a region is around the pair: scales move at its end."""
    model, xs = model_of(stored=recipe if stored else None), batches(4)
    other = copy.deepcopy(model)
    for turn in range(0, 4, 2):
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            one, two = (model(x) for x in xs[turn : turn + 2])
            one.square().mean().backward()
            two.square().mean().backward()
        with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
            for x in xs[turn : turn + 2]:
                other(x).square().mean().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    assert same(states(model), states(other))


class Computed(Dataset):
    """Computes its items with a pipeline, in the process of a worker."""

    def __init__(self):
        self.models = model_of(), model_of(stored=RECIPES[2])

    def __len__(self):
        return 4

    @torch.no_grad()
    def __getitem__(self, i):
        with opfuse.autocast(recipe=RECIPES[2]):
            return torch.cat([model(batches(4)[i]) for model in self.models])


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader(context):
    """Forked after this process has run pipelines, whose plans the worker has, and begun anew."""
    data = Computed()
    wanted = [data[i] for i in range(4)]
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=context)
    assert same([*loader], wanted)


def child(model, recipe, queue):
    torch.set_num_threads(1)
    found, left = trained(model, recipe)
    queue.put([each.numpy() for each in (*found, *left)])


def parent(rank, context):
    model = model_of()
    trained(model, DELAYED)
    model.zero_grad()
    here = copy.deepcopy(model)
    queue = mp.get_context(context).SimpleQueue()
    process = mp.get_context(context).Process(target=child, args=(model, DELAYED, queue))
    process.start()
    got = [torch.from_numpy(each) for each in queue.get()]
    process.join()
    found, left = trained(here, DELAYED)
    assert same(got, [*found, *left])


@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_model_goes_to_another_process_with_its_scales(context):
    """Forked from a process without threads of autograd, such as other tests start: torch refuses backward passes there.

    Pickled, to a process that has imported torch already, or that begins with that.
    """
    if context == "fork":
        run_ranks(parent, context, ranks=1)
    else:
        parent(0, context)
