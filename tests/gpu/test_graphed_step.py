"""``opfuse.graphed_step`` on the device: steps that graphs repeat have the bits of steps that run, and tell of changes."""

import copy
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opfuse
from opfuse import ops
from opfuse.errors import OpfuseWarning, PipelineError, UnsupportedError
from tests.gpu.test_pipelines import PIPELINES, RECIPES, WIDTH, same
from tests.ops.test_op_errors import raised

STEPS = 12


class Training:
    """A model, its optimizer, and a step of both."""

    def __init__(self, device, recipe=None, *, model=None, rate=1e-2, make=torch.optim.AdamW, zeroes=True, **settings):
        torch.manual_seed(0)
        self.model = (ops.Sequential(*PIPELINES["swiglu"]()) if model is None else model).to(device=device, dtype=torch.bfloat16)
        settings = {"capturable": True, **settings} if make is torch.optim.AdamW else settings
        self.optimizer = make(self.model.parameters(), lr=rate, **settings)
        self.recipe, self.zeroes, self.device = recipe, zeroes, device

    def __call__(self, x, weight=1.0):
        if self.recipe is None:
            y = self.model(x)
        else:
            with opfuse.autocast(recipe=self.recipe):
                y = self.model(x)
        loss = ((y - x).float().square() * weight).mean()
        loss.backward()
        self.optimizer.step()
        if self.zeroes:
            self.optimizer.zero_grad()
        return {"loss": loss, "y": y}

    @property
    def values(self):
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        delayed = [
            t for op in self.model.modules() for s in getattr(op, "quantizer_states", ()) for t in (s.scale, s.amax_history)
        ]
        return [*self.model.parameters(), *states, *delayed]

    def graphed(self):
        return opfuse.graphed_step(self, self.model, self.optimizer)


def batch(step, device, rows=128):
    generator = torch.Generator(device).manual_seed(step)
    return torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16, generator=generator) * (1 + step % 3)


def pair(device, recipe=None, **how):
    return Training(device, recipe, **how), Training(device, recipe, **how)


def check(one, other, graph, *, steps=range(STEPS), rows=lambda step: 128):
    """Steps by the graph and as they are written have equal bits."""
    for step in steps:
        x = batch(step, one.device, rows(step))
        got, wanted = graph(x), other(x)
        assert torch.equal(got["loss"], wanted["loss"]), step
        assert torch.equal(got["y"], wanted["y"]), step
        assert not got["loss"].requires_grad
        assert same(one.values, other.values), step


def settings_of(how):
    return {"fused": how == "fused"} if how != "foreach" else {"foreach": True}


@pytest.mark.row("R12")
@pytest.mark.parametrize("kind", [None, *RECIPES])
def test_steps_of_two_shapes_have_the_bits_of_steps_as_they_are_written(kind, device):
    one, other = pair(device, RECIPES[kind]() if kind else None, fused=True)
    graph = one.graphed()
    check(one, other, graph, steps=range(3 * STEPS), rows=lambda step: 128 + 128 * (step % 3 == 2))
    assert graph.graphs == 2
    assert graph.replays == 3 * STEPS - 6


@pytest.mark.parametrize("how", ["fused", "foreach"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_converted_model_that_is_compiled(how, dropout, device):
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Dropout(dropout), nn.Linear(512, WIDTH))
        opfuse.fuse_(model := model.to(device=device, dtype=torch.bfloat16), RECIPES["current"]())
        model.compile(dynamic=False)
        return model

    torch._dynamo.reset()
    one, other = (Training(device, model=made(), **settings_of(how)) for _ in range(2))
    graph = one.graphed()
    for step in range(STEPS):
        x = batch(step, device)
        torch.cuda.manual_seed(step)
        got = graph(x)
        torch.cuda.manual_seed(step)
        assert torch.equal(got["loss"], other(x)["loss"]), step
        assert same(one.values, other.values), step
    assert graph.replays == STEPS - 3


@pytest.mark.parametrize("stored", ["current", "block", "mxfp8"])
def test_masters_of_weights_that_live_quantized_step_in_the_graph(stored, device):
    recipe = RECIPES[stored]()

    def made():
        torch.manual_seed(0)
        with opfuse.quantized_model_init(recipe=recipe):
            made = Training(device, recipe, model=ops.Sequential(*PIPELINES["swiglu"]()).to(device))
        opfuse.with_masters(made.optimizer)
        return made

    one, other = made(), made()
    graph = one.graphed()
    check(one, other, graph)
    assert graph.replays == STEPS - 3


def test_a_scheduler_writes_a_rate_on_the_gpu_and_microbatches_add_up(device):
    def made():
        made = Training(device, RECIPES["block"](), rate=torch.tensor(1e-2, device=device))
        made.scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.7)
        return made

    one, other = made(), made()

    def step_of(training):
        def step(many, *, clip):
            for x in many:
                with opfuse.autocast(recipe=training.recipe):
                    loss = (training.model(x) - x).float().square().mean()
                loss.backward()
            norm = nn.utils.clip_grad_norm_(training.model.parameters(), clip)
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss, norm

        return step

    graph, plain = opfuse.graphed_step(step_of(one), one.model, one.optimizer), step_of(other)
    for step in range(STEPS):
        many = [batch(3 * step + i, device) for i in range(3)]
        for call, training in ((graph, one), (plain, other)):
            results = call(many, clip=0.5 if step < 8 else 0.1)
            training.scheduler.step()
            training.results = results
        assert same(one.results, [each.detach() for each in other.results]), step
        assert same(one.values, other.values), step
    assert graph.graphs == 2  # one for each value of clip
    assert graph.replays == STEPS - 6


def test_an_optimizer_outside_finds_the_gradients(device):
    one, other = (Training(device, RECIPES["current"](), make=torch.optim.SGD, zeroes=False) for _ in range(2))

    def passes(training):
        def run(x):
            with opfuse.autocast(recipe=training.recipe):
                loss = training.model(x).float().square().mean()
            loss.backward()
            return loss

        return run

    graph, plain = opfuse.graphed_step(passes(one), one.model), passes(other)
    for step in range(STEPS):
        x = batch(step, device)
        losses = graph(x), plain(x).detach()
        assert same(*zip(losses))
        assert same([p.grad for p in one.model.parameters()], [p.grad for p in other.model.parameters()])
        for training in (one, other):
            training.optimizer.step()
            training.optimizer.zero_grad()
    assert graph.replays == STEPS - 3
    graph(batch(0, device))
    with raised(PipelineError, ValueError, "without gradients", "3 that are not None"):
        graph(batch(0, device))


def relaid(training):
    """A module in place of another, with new parameters, which the optimizer is told of."""
    training.model[3] = ops.Linear(2 * WIDTH, WIDTH, bias=False, device=training.device, dtype=torch.bfloat16)
    with torch.no_grad():
        training.model[3].weight.fill_(0.01)
    training.optimizer.param_groups[0]["params"] = list(training.model.parameters())


def rate(training):
    training.optimizer.param_groups[0]["lr"] = 1e-3


def memory(training):
    for each in training.model.parameters():
        each.data = each.data.clone() * 0.5


def states(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def frozen(training):
    next(training.model.parameters()).requires_grad_(False)


def replaced(training):
    training.model[2] = ops.SwiGLU()


def op(training):
    """A method of one object in place of its class's."""
    training.model[2].op_forward = training.model[2].op_forward


CHANGES = {
    rate: "settings of an optimizer",
    relaid: "parameters or buffers",
    memory: "parameters or buffers",
    states: "states of an optimizer",
    frozen: "want gradients otherwise",
    replaced: "modules are others",
    op: "ops of opfuse",
    lambda training: training.model.eval(): "another mode",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_said_and_the_step_is_captured_again(change, device):
    one, other = pair(device, RECIPES["delayed"]())
    graph = one.graphed()
    check(one, other, graph)
    change(one)
    change(other)
    with pytest.warns(OpfuseWarning) as warned:
        check(one, other, graph)
    assert any(f"{CHANGES[change]}" in str(each.message) for each in warned)
    assert all("graphs are dropped" in str(each.message) for each in warned)
    assert graph.replays == 2 * STEPS - 6
    assert graph.graphs == 1


def test_a_model_that_is_unfused_runs_as_it_was(device):
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH)).to(device=device, dtype=torch.bfloat16)
    trainings = []
    for _ in range(2):
        converted = copy.deepcopy(model)
        opfuse.fuse_(converted, RECIPES["current"]())
        trainings.append(Training(device, model=converted))
    one, other = trainings
    graph = one.graphed()
    check(one, other, graph)
    for training in trainings:
        opfuse.unfuse_(training.model)
    with pytest.warns(OpfuseWarning, match="fuse_ has given them another forward"):
        check(one, other, graph)


def test_a_rate_that_changes_at_each_step_is_said_once_and_followed(device):
    one, other = pair(device, RECIPES["current"]())
    graph = one.graphed()

    def steps():
        for step in range(STEPS):
            for training in (one, other):
                training.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            yield step

    with pytest.warns(OpfuseWarning, match="lr=torch.tensor") as warned:
        check(one, other, graph, steps=steps())
    assert len(warned) == 1
    assert graph.replays == 0


def test_kept_casts_and_saved_tensors_know_of_replays(device):
    """A scope that keeps casts makes them anew after a replay; a graph of autograd from before is refused, as after a step."""
    one, other = pair(device, RECIPES["current"](), fused=True)
    graph = one.graphed()
    x = batch(0, device)

    def evaluated(training):
        with torch.no_grad(), opfuse.autocast(recipe=training.recipe):
            return training.model(x)

    with opfuse.kept_weights(one.model):
        for step in range(STEPS):
            check(one, other, graph, steps=[step])
            for _ in range(2):
                assert torch.equal(evaluated(one), evaluated(other)), step
    y = one.model(x)
    graph(x)
    with pytest.raises(RuntimeError):
        y.sum().backward()
    one.optimizer.zero_grad()


def test_a_watched_model_runs_as_written_and_says_so(device, tmp_path):
    one, other = pair(device, RECIPES["current"]())
    graph = one.graphed()
    check(one, other, graph)
    before = graph.replays
    with pytest.warns(OpfuseWarning, match="hooks"), opfuse.watch(one.model, every=1) as watch:
        check(one, other, graph, steps=range(2))
    assert watch.step == 2
    assert watch.records
    assert graph.replays == before
    check(one, other, graph)
    assert graph.replays == before + STEPS


def test_graphs_of_many_shapes_share_memory_which_is_freed(device):

    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)

    training = Training(device, RECIPES["current"]())
    graph = training.graphed()
    for step in range(5):
        graph(batch(step, device))
    before, taken = reserved(), []
    for rows in (2**17, 2**16, 2**15):
        for step in range(5):
            graph(batch(step, device, rows))
        taken.append(reserved() - before)
    assert graph.graphs == 4
    assert taken[0] > 2**17 * WIDTH * 2
    assert taken[2] < 1.5 * taken[0]
    del graph
    assert reserved() - before < taken[0] / 4


def test_results_are_copies_and_arguments_are_left_alone(device):
    training = Training(device, RECIPES["current"]())
    graph = training.graphed()
    given = [batch(step, device) for step in range(8)]
    before = [each.clone() for each in given]
    losses = [graph(each)["loss"] for each in given]
    assert len({loss.item() for loss in losses}) == len(losses)
    assert same(given, before)
    assert len({loss.data_ptr() for loss in losses}) == len(losses)


# -- what is refused ------------------------------------------------------------------------------------------------------------


def test_arguments(device):
    training = Training(device)
    graph = training.graphed()
    for given, got in (
        (batch(0, "cpu"), "one on cpu"),
        (batch(0, device).requires_grad_(), "one that wants a gradient"),
        (object(), "an? object"),
    ):
        with raised(UnsupportedError, RuntimeError, "graphed_step", got):
            graph(given)
    with opfuse.autocast(recipe=RECIPES["current"]()), raised(UnsupportedError, RuntimeError, "outside of autocast"):
        graph(batch(0, device))


def test_parts(device):
    training = Training(device)
    for parts, got in (((), "no module"), ((training.optimizer,), "no module"), ((training.model, 1), "an? int")):
        with raised(PipelineError, ValueError, got):
            opfuse.graphed_step(training, *parts)
    with raised(PipelineError, ValueError, "a function"):
        opfuse.graphed_step(1, training.model)
    with raised(UnsupportedError, RuntimeError, "one GPU", "cpu"):
        opfuse.graphed_step(training, nn.Linear(2, 2))
    with raised(UnsupportedError, RuntimeError, "one GPU", "no parameters"):
        opfuse.graphed_step(training, nn.GELU())


def test_numbers_of_the_cpu(device):
    for how, where in (
        ({"capturable": False, "fused": False}, "on the CPU"),
        ({"rate": torch.tensor(1e-2), "fused": True}, "on the CPU"),
    ):
        graph = Training(device, **how).graphed()
        with raised(UnsupportedError, RuntimeError, where, "AdamW"):
            graph(batch(0, device))
    training = Training(device)
    with raised(UnsupportedError, RuntimeError, "all optimizers", "AdamW"):
        opfuse.graphed_step(training, training.model)(batch(0, device))
    eight = pytest.importorskip("torchao.optim").AdamW8bit
    with raised(UnsupportedError, RuntimeError, "on the CPU", "AdamW8bit"):
        Training(device, make=eight).graphed()(batch(0, device))


def test_schedulers_inside(device):
    training = Training(device, rate=torch.tensor(1e-2, device=device))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.7)

    def step(x):
        training(x)
        scheduler.step()

    graph = opfuse.graphed_step(step, training.model, training.optimizer)
    with raised(UnsupportedError, RuntimeError, "as a scheduler does"):
        graph(batch(0, device))


def test_code_that_waits_and_code_that_cannot_be_captured(device):
    training = Training(device)

    def waits(x):
        return training(x)["loss"].item()

    graph = opfuse.graphed_step(waits, training.model, training.optimizer)
    for step in range(3):
        graph(batch(step, device))
    with raised(UnsupportedError, RuntimeError, "a CUDA graph can hold", "capturing", r"test_graphed_step.py:\d+", r"item\(\)"):
        graph(batch(3, device))
    assert all(p.grad is None for p in training.model.parameters())

    pinned = torch.ones(1)

    def copies(x):
        return {"x": training(x)["y"], "pinned": pinned.to(device, non_blocking=True)}

    graph = opfuse.graphed_step(copies, training.model, training.optimizer)
    with raised(UnsupportedError, RuntimeError, "graphed_step"):
        for step in range(4):
            graph(batch(step, device))
    assert all(p.grad is None for p in training.model.parameters())
    other = training.graphed()  # the device goes on
    with warnings.catch_warnings():
        for step in range(5):
            other(batch(step, device))
    assert other.replays == 2


def test_ranks(device):
    with raised(UnsupportedError, RuntimeError, "DistributedDataParallel"):
        model = nn.Linear(2, 2, device=device)
        wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
        nn.Module.__init__(wrapped)
        wrapped.module = model
        opfuse.graphed_step(lambda: F.relu(model.weight), wrapped)
