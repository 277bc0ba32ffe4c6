"""``opfuse.graphed_step`` on the device: steps that graphs repeat have the bits of steps that run, and tell of changes."""

import contextlib
import copy
import gc
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opfuse
from opfuse import ops, recipes
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
        self.around_update = contextlib.nullcontext()

    def __call__(self, x, weight=1.0):
        if self.recipe is None:
            y = self.model(x)
        else:
            with opfuse.autocast(recipe=self.recipe):
                y = self.model(x)
        loss = ((y - x).float().square() * weight).mean()
        loss.backward()
        with self.around_update:
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


def with_masters(device, recipe, pipeline):
    """Weights that live quantized, and an optimizer of their masters."""
    torch.manual_seed(0)
    with opfuse.quantized_model_init(recipe=recipe):
        made = Training(device, recipe, model=ops.Sequential(*PIPELINES[pipeline]()).to(device))
    opfuse.with_masters(made.optimizer)
    return made


def check(one, other, graph, *, steps=range(STEPS), rows=lambda step: 128, offset=0):
    """Steps by the graph and as they are written have equal bits. offset: what the step of the graph adds to its input."""
    for step in steps:
        x = batch(step, one.device, rows(step))
        got, wanted = graph(x), other(x + offset)
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
    one, other = (with_masters(device, RECIPES[stored](), "swiglu") for _ in range(2))
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


def test_replays_say_of_main_grads_that_they_were_added_to(device):
    """As Megatron's gradient buffers want it: their owner sets the flag to False, and a pass that adds sets it to True."""

    def training():
        torch.manual_seed(0)
        model = ops.Linear(WIDTH, WIDTH, accumulate_into_main_grad=True, dtype=torch.bfloat16).to(device)
        weight = model.weight
        weight.main_grad = torch.zeros(weight.shape, device=device)

        def passes(x):
            with opfuse.autocast(recipe=RECIPES["current"]()):
                loss = model(x).float().square().mean()
            loss.backward()
            model.zero_grad()
            return loss

        return model, passes

    (model, passes), (other, plain) = training(), training()
    graph = opfuse.graphed_step(passes, model)
    for step in range(STEPS):
        for each in (model, other):
            each.weight.grad_added_to_main_grad = False
        x = batch(step, device)
        assert same((graph(x),), (plain(x).detach(),))
        assert model.weight.grad_added_to_main_grad is other.weight.grad_added_to_main_grad is True
        assert torch.equal(model.weight.main_grad, other.weight.main_grad)
    assert graph.replays == STEPS - 3


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
    replaced: "another value of an attribute",
    op: "ops of opfuse",
    lambda training: training.model.eval(): "another mode",
    lambda training: setattr(training.optimizer, "maximize_all", True): "another value of an attribute",
    lambda training: torch.set_float32_matmul_precision("medium"): "a setting of products",
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
    torch.set_float32_matmul_precision("highest")
    assert any(CHANGES[change] in str(each.message) for each in warned)
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
    with pytest.warns(OpfuseWarning, match="has another forward"):
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


def test_arguments_are_known_by_their_names(device):
    """Not by the order in which a caller or a batch has them."""
    trainings = pair(device)
    one, other = (lambda x, weight, training=training: training(x, weight) for training in trainings)
    graph = opfuse.graphed_step(one, trainings[0].model, trainings[0].optimizer)
    for step in range(STEPS):
        given = {"x": batch(step, device), "weight": batch(step + 1, device).abs()}
        if step % 2:
            given = dict(reversed(given.items()))
        assert torch.equal(graph(**given)["loss"], other(**given)["loss"])
    assert graph.replays == STEPS - 6


def test_masters_take_what_is_loaded_between_replays(device):
    one, other = (with_masters(device, RECIPES["block"](), "gelu") for _ in range(2))
    graph = one.graphed()
    check(one, other, graph)
    for training in (one, other):
        with torch.no_grad():
            training.model[0].weight.mul_(0.5)
    with pytest.warns(OpfuseWarning, match="masters start from them"):
        check(one, other, graph)
    assert graph.replays == 2 * STEPS - 3


class Remembers(nn.Module):
    """Adds rows of a table that is made for the longest input so far, as rotary embeddings do, and is no buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.table = torch.zeros(0, WIDTH)

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.arange(len(x) * WIDTH, device=x.device, dtype=x.dtype).view(len(x), WIDTH) / 1e5
        return x * self.scale + self.table[: len(x)]


def test_tensors_that_are_neither_parameters_nor_buffers(device):
    """A table that is made anew for a longer input: graphs of shorter ones would read memory that is free."""
    model = nn.Sequential(Remembers(), nn.Linear(WIDTH, WIDTH))
    one, other = (Training(device, model=copy.deepcopy(model)) for _ in range(2))
    graph = one.graphed()
    check(one, other, graph)
    with pytest.warns(OpfuseWarning, match="another value of an attribute"):
        check(one, other, graph, rows=lambda step: 256)
    before = graph.replays
    check(one, other, graph, steps=range(2 * STEPS), rows=lambda step: 128 * (1 + step % 2))
    assert graph.replays == before + 2 * STEPS - 3
    assert graph.graphs == 2

    offset = [torch.zeros(WIDTH, device=device, dtype=torch.bfloat16)]
    here = offset[0]

    def step(x):
        return one(x + here)

    graph = opfuse.graphed_step(step, one.model, one.optimizer)
    check(one, other, graph)
    here = torch.ones(WIDTH, device=device, dtype=torch.bfloat16)
    with pytest.warns(OpfuseWarning, match="a tensor that the step reads"):
        check(one, other, graph, offset=here)


def check_two_recipes(device, called):
    first, second = (recipes.DelayedScaling(amax_history_len=length, margin=margin) for length, margin in ((16, 0), (4, 3)))
    one, other = pair(device, first)
    graph = one.graphed()
    for step in range(3 * STEPS):
        if called(step):
            one.recipe = other.recipe = second
            x = batch(step, device)
            assert torch.equal(one(x)["loss"], other(x)["loss"])
            one.recipe = other.recipe = first
        check(one, other, graph, steps=[step])


def test_a_state_that_serves_another_recipe_between_replays(device):
    with pytest.warns(OpfuseWarning, match="delayed scales are loaded, or serve another recipe"):
        check_two_recipes(device, lambda step: step == STEPS)


def test_graphs_are_captured_again_while_their_memory_is_alive(device):
    one, other = (Training(device, make=torch.optim.SGD, zeroes=False) for _ in range(2))

    def passes(training):
        def run(x):
            loss = training.model(x).float().square().mean()
            loss.backward()
            return loss

        return run

    graph, held = opfuse.graphed_step(passes(one), one.model), []
    for _ in range(2):
        for step in range(STEPS):
            graph(batch(step, device))
            held.append([p.grad for p in one.model.parameters()])
            one.model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OpfuseWarning)
            one.model.eval()
            graph(batch(0, device))
            one.model.zero_grad()
    del other
    assert graph.replays > STEPS


def test_versions_rise_of_what_a_replay_writes_and_of_nothing_else(device):
    training = Training(device, RECIPES["current"](), fused=True)
    average = copy.deepcopy(training.model).requires_grad_(False)

    def step(x):
        result = training(x)
        for mean, now in zip(average.parameters(), training.model.parameters()):
            mean.lerp_(now, 0.5)
        return result

    graph = opfuse.graphed_step(step, training.model, average, training.optimizer)
    x = batch(0, device)

    def evaluated():
        with torch.no_grad(), opfuse.autocast(recipe=training.recipe):
            return average(x)

    with opfuse.kept_weights(average):
        for number in range(STEPS):
            graph(batch(number, device))
            kept = [evaluated() for _ in range(2)][-1]
            with torch.no_grad():
                wanted = copy.deepcopy(average)
            with torch.no_grad(), opfuse.autocast(recipe=training.recipe):
                assert torch.equal(kept, wanted(x)), number
    look = opfuse.graphed_step(torch.no_grad()(lambda x: training.model(x).float().mean()), training.model)
    for _ in range(4):
        look(x)
    y = training.model(x)
    look(x)
    y.sum().backward()  # which an evaluation does not forbid
    training.optimizer.zero_grad()


def test_kept_casts_know_of_scales_that_replays_move(device):
    """Of a frozen weight, whose delayed scale follows what was found in it before it was frozen."""
    one, other = pair(device, RECIPES["delayed"]())
    for training in (one, other):
        with torch.no_grad():
            training.model[1].weight.mul_(8)
        training.model[1].weight.requires_grad_(False)
    graph = one.graphed()
    with opfuse.kept_weights(one.model):
        check(one, other, graph, steps=range(2 * STEPS))
        with torch.no_grad(), opfuse.autocast(recipe=one.recipe):
            given = one.model(batch(0, device))
    with torch.no_grad(), opfuse.autocast(recipe=one.recipe):
        assert torch.equal(given, other.model(batch(0, device)))


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
    assert taken[2] < 1.5 * taken[0], taken
    del graph
    left = reserved() - before
    assert left < taken[0] / 4, (left, taken)


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
        (opfuse.tensors.quantizers.Float8BlockQuantizer(torch.float8_e4m3fn)(batch(0, device)), "QuantizedTensor"),
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


def test_moments_in_8_bits_step_in_the_graph(device):
    """torchao makes its rate and its counts of steps on the default device, and rounds by numbers that the device draws."""
    eight = pytest.importorskip("torchao.optim").AdamW8bit

    def made():
        with torch.device(device):
            training = Training(device, RECIPES["current"](), make=eight, bf16_stochastic_round=True)
        training.around_update = torch.device(device)
        return training

    one, other = made(), made()
    graph = one.graphed()
    for step in range(STEPS):
        x = batch(step, device)
        for each in (one, other):
            each.optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + step))
        torch.cuda.manual_seed(step)
        got = graph(x)
        torch.cuda.manual_seed(step)
        assert torch.equal(got["loss"], other(x)["loss"]), step
        assert same([*one.model.parameters()], [*other.model.parameters()]), step
    assert graph.replays == STEPS - 3
    states = [[*each.optimizer.state.values()] for each in (one, other)]
    for name in ("exp_avg", "exp_avg_sq"):
        codes = [[state[name].codes for state in some if hasattr(state[name], "codes")] for some in states]
        assert codes[0]
        assert same(*codes)
    assert {state["step"].item() for state in states[0]} == {STEPS}


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


def test_a_refusal_holds_for_later_calls_and_leaves_the_device_as_it_was(device):
    training = Training(device, model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))
    graph = opfuse.graphed_step(lambda x: training(x)["loss"].item(), training.model, training.optimizer)
    here = torch.cuda.current_stream()
    for step in range(3):
        graph(batch(step, device))
    for _ in range(2):
        with raised(UnsupportedError, RuntimeError, "a CUDA graph can hold"):
            graph(batch(3, device))
    assert torch.cuda.current_stream() == here
    training(batch(4, device))
    assert torch.rand(4, device=device).isfinite().all()
    for wrong in ("optimizer", "scheduler"):
        training = Training(device, rate=torch.tensor(1e-2, device=device))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.7)
        parts = () if wrong == "optimizer" else (training.optimizer,)
        calls = []

        def step(x, training=training, wrong=wrong, scheduler=scheduler, calls=calls):
            calls.append(training(x)["loss"])
            if wrong == "scheduler":
                scheduler.step()

        graph = opfuse.graphed_step(step, training.model, *parts)
        for number in range(6):
            with raised(UnsupportedError, RuntimeError, "graphed_step"):
                graph(batch(number, device))
        assert len(calls) == 1


def test_an_error_of_the_step_is_its_own(device):
    training = Training(device)
    failing = []

    def step(x):
        training(x)
        if failing:
            try:
                {}["labels"]
            except KeyError as error:
                raise ValueError("the batch has no labels") from error

    graph = opfuse.graphed_step(step, training.model, training.optimizer)
    failing.append(True)
    for _ in range(2):
        with pytest.raises(ValueError, match="no labels"):
            graph(batch(0, device))
    failing.clear()
    for number in range(3):
        graph(batch(number, device))
    failing.append(True)
    with pytest.raises(ValueError, match="no labels"):
        graph(batch(0, device))
    failing.clear()
    for number in range(5):
        graph(batch(number, device))
    assert graph.replays == 2


def test_what_the_host_would_do_at_each_step(device):
    training = Training(device)

    def draws(x):
        return training(x, weight=random.random())

    def writes(x):
        x.mul_(0.5)
        return training(x)

    def from_cpu(x):
        return training(x)["loss"].to("cpu")

    def other(x):
        return object()

    refused = {draws: "random numbers", writes: "an argument", from_cpu: "results to copy", other: "results to copy"}
    for step, words in refused.items():
        graph = opfuse.graphed_step(step, training.model, training.optimizer)
        with raised(UnsupportedError, RuntimeError, words):
            for number in range(3):
                graph(batch(number, device))
    graph = training.graphed()
    with torch.autocast("cuda"), raised(UnsupportedError, RuntimeError, "torch.autocast"):
        graph(batch(0, device))
    with raised(UnsupportedError, RuntimeError, "without gaps"):
        graph(batch(0, device, 256)[::2])


def test_numbers_that_change_are_said_to_be_no_graphs(device):
    training = Training(device)
    graph = training.graphed()
    for step in range(64):
        graph(batch(step, device), 1.0 + step)
    with pytest.warns(OpfuseWarning, match="shapes or values of arguments"):
        graph(batch(0, device), 0.0)
    assert graph.replays == 0


def test_hooks_of_parameters_run(device):
    training = Training(device)
    graph, seen = training.graphed(), []
    next(training.model.parameters()).register_hook(lambda grad: seen.append(1))
    with pytest.warns(OpfuseWarning, match="hooks"):
        graph(batch(0, device))
    for step in range(STEPS):
        graph(batch(step, device))
    assert len(seen) == STEPS + 1


def test_ranks(device):
    with raised(UnsupportedError, RuntimeError, "DistributedDataParallel"):
        model = nn.Linear(2, 2, device=device)
        wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
        nn.Module.__init__(wrapped)
        wrapped.module = model
        opfuse.graphed_step(lambda: F.relu(model.weight), wrapped)
