"""What ``opfuse.graphed_step`` compares before each replay: ordinary steps leave it as it is, and every change shows in it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.runtime.graph_inputs import (
    ABOUT,
    Fixed,
    GraphInputs,
    Objects,
    delayed_states,
    memory_of,
    numbers_drawn,
    read_around,
)
from opfuse.tensors.quantizers import MXFP8Quantizer

WIDTH = 64


class Table(nn.Module):
    """Keeps a tensor that is no buffer, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(WIDTH)
        self.register_buffer("square", torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.table


class Training:
    def __init__(self, recipe, *, fused=False, compiled=False):
        torch.manual_seed(0)
        parts = (nn.Linear(WIDTH, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, WIDTH), nn.BatchNorm1d(WIDTH), Table())
        own = ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 256), ops.SwiGLU(), ops.Linear(128, WIDTH)
        self.model = (nn.Sequential(*parts) if fused else ops.Sequential(*own)).bfloat16()
        if fused:
            opfuse.fuse_(self.model, recipe)
        if compiled:
            self.model.compile(backend="aot_eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(1e-3))
        self.recipe, self.fused = recipe, fused
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16())
        self.optimizer.add_param_group({"params": [self.square]})
        self.inputs = GraphInputs(self, [self.model], [self.optimizer])

    def __call__(self, rows=128):
        with torch.enable_grad() if self.fused else opfuse.autocast(recipe=self.recipe):
            loss = self.model(torch.randn(rows, WIDTH).bfloat16()).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fixed(self):
        return self.inputs.fixed(self.inputs.parameters())

    def changed(self, before):
        return [name for name, was, now in zip(Fixed._fields, before, self.fixed()) if was != now]


@pytest.mark.few
@pytest.mark.parametrize("recipe", [recipes.DelayedScaling, recipes.Float8BlockScaling], ids=lambda recipe: recipe.__name__)
@pytest.mark.parametrize("how", [{}, {"fused": True}, {"fused": True, "compiled": True}], ids=["ops", "converted", "compiled"])
def test_steps_of_several_shapes_and_evaluations_change_nothing(recipe, how):
    training = Training(recipe(), **how)
    training()
    before = training.fixed()
    for rows in (128, 64, 128, 32):
        training(rows)
        training.model.eval()
        with torch.no_grad():
            training.model(torch.randn(16, WIDTH).bfloat16())
        training.model.train()
        assert training.changed(before) == []


def first(training):
    return training.model[0]


CHANGES = {
    "load_state_dict(assign=True)": (
        lambda t: t.model.load_state_dict(copy.deepcopy(t.model.state_dict()), assign=True),
        "parameters",
    ),
    "p.data = other": (lambda t: setattr(first(t).weight, "data", first(t).weight.data.clone()), "parameters"),
    "fewer rows of p.data": (lambda t: setattr(first(t).weight, "data", first(t).weight.data[:64]), "parameters"),
    "p.data = its columns as rows": (lambda t: setattr(t.square, "data", t.square.data.t()), "parameters"),
    "p.data = its bits": (lambda t: setattr(t.square, "data", t.square.data.view(torch.float16)), "parameters"),
    "a buffer that is transposed in its place": (lambda t: t.model[5].square.t_(), "parameters"),
    "a buffer": (lambda t: setattr(t.model[4], "running_mean", torch.zeros(WIDTH)), "parameters"),
    "main_grad": (lambda t: setattr(first(t).weight, "main_grad", torch.zeros(128, WIDTH)), "parameters"),
    "requires_grad": (lambda t: first(t).weight.requires_grad_(False), "parameters"),
    "a module": (lambda t: t.model.__setitem__(1, nn.ReLU()), "modules"),
    "an attribute": (lambda t: setattr(t.model[2], "p", 0.2), "modules"),
    "a tensor that is no buffer": (lambda t: setattr(t.model[5], "table", torch.ones(WIDTH)), "modules"),
    "eval()": (lambda t: t.model[2].eval(), "modules"),
    "unfuse_": (lambda t: opfuse.unfuse_(t.model), "modules"),
    "an attribute of the optimizer": (lambda t: setattr(t.optimizer, "count", 1), "modules"),
    "a hook around steps": (lambda t: t.optimizer.register_step_post_hook(lambda *_: None), "modules"),
    "a setting": (lambda t: t.optimizer.param_groups[0].update(weight_decay=0.5), "settings"),
    "a setting in a tuple": (lambda t: t.optimizer.param_groups[0].update(betas=(0.9, 0.99)), "settings"),
    "another rate tensor": (lambda t: t.optimizer.param_groups[0].update(lr=torch.tensor(1e-3)), "settings"),
    "states": (lambda t: t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict())), "states"),
    "no_grad": (lambda t: torch.set_grad_enabled(False), "torch"),
    "products": (lambda t: torch.set_float32_matmul_precision("medium"), "torch"),
    "default dtype": (lambda t: torch.set_default_dtype(torch.bfloat16), "torch"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_shows(what):
    training = Training(recipes.Float8BlockScaling(), fused=True)
    training()
    before, (change, field) = training.fixed(), CHANGES[what]
    settings = torch.is_grad_enabled(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        change(training)
        assert field in training.changed(before)
    finally:
        torch.set_grad_enabled(settings[0])
        torch.set_float32_matmul_precision(settings[1])
        torch.set_default_dtype(settings[2])


def test_what_is_written_in_its_place_is_no_change():
    training = Training(recipes.Float8BlockScaling(), fused=True)
    training()
    before = training.fixed()
    with torch.no_grad():
        training.optimizer.param_groups[0]["lr"].fill_(1e-4)
        training.model.load_state_dict(copy.deepcopy(training.model.state_dict()))
        first(training).weight.mul_(0.5)
    assert training.changed(before) == []


def test_ops_rules_and_scales():
    training = Training(recipes.DelayedScaling())
    training()
    states = [state for op in training.model for state in op.quantizer_states]
    training.inputs.scaled.update(dict.fromkeys(states))
    before = training.fixed()
    training()
    assert training.changed(before) == []
    training.recipe = recipes.DelayedScaling(margin=1)
    training()
    assert training.changed(before) == ["scales", "values"]
    before = training.fixed()
    with opfuse.use_rules(opfuse.RuleSet(())):
        assert training.changed(before) == ["rules"]
    training.model[2].op_forward = training.model[2].op_forward
    assert "ops" in training.changed(before)


def test_tensors_that_a_step_finds_around_it():
    held, number = torch.zeros(2), 1

    def step():
        return held * number * TENSOR

    class Holds:
        def __init__(self):
            self.held, self.number = held, 1

        def step(self):
            return self.held

        __call__ = step

    assert [each is held or each is TENSOR for each in read_around(step).tensors] == [True, True]
    for each in (Holds().step, Holds()):
        (found,) = read_around(each).tensors
        assert found is held
    assert read_around(print).tensors == []


TENSOR = torch.ones(2)


def test_each_field_says_what_has_happened():
    assert ABOUT.keys() == {*Fixed._fields}


def test_hooks_are_seen():
    training = Training(recipes.Float8BlockScaling(), fused=True)
    parameters = training.inputs.parameters()
    assert not training.inputs.has_hooks(parameters)
    for register in (
        training.model[1].register_forward_hook,
        training.model[1].register_full_backward_pre_hook,
        parameters[0].register_hook,
        parameters[0].register_post_accumulate_grad_hook,
    ):
        handle = register(lambda *_: None)
        assert training.inputs.has_hooks(parameters)
        handle.remove()
        assert not training.inputs.has_hooks(parameters)
    handle = parameters[-1].register_hook(lambda grad: None)
    assert training.inputs.has_hooks(parameters)
    handle.remove()


def test_all_modules_groups_and_optimizers_are_looked_at():
    one, other, alone = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Parameter(torch.zeros(2))
    groups = [{"params": [one.weight]}, {"params": [alone], "betas": (torch.tensor(0.9), 0.99)}]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.AdamW(groups, lr=0.1)]
    inputs = GraphInputs(print, [one, other], optimizers)

    def check(change, field):
        before = inputs.fixed(inputs.parameters())
        change()
        after = inputs.fixed(inputs.parameters())
        assert field in [name for name, was, now in zip(Fixed._fields, before, after) if was != now]

    assert list(map(id, inputs.parameters())) == list(map(id, [one.weight, one.bias, other.weight, alone]))
    check(lambda: setattr(other, "weight", nn.Parameter(other.weight.data)), "parameters")  # another one in the same memory
    check(lambda: other.register_parameter("more", nn.Parameter(torch.zeros(2))), "parameters")
    assert any(each is other.more for each in inputs.parameters())
    check(lambda: setattr(other, "number", 1), "modules")
    check(lambda: optimizers[1].param_groups[1].update(weight_decay=0.5), "settings")
    check(lambda: optimizers[1].param_groups[1].update(betas=(torch.tensor(0.9), 0.99)), "settings")
    check(lambda: optimizers[1].state[alone].update(step=torch.zeros(())), "states")


def test_a_module_that_is_replaced_is_noticed_in_each_of_several():
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    inputs = GraphInputs(print, models, [])
    for model in models:
        model[0] = nn.Linear(2, 2)
        assert any(each is model[0].weight for each in inputs.parameters())


def test_writes_are_counted_of_parameters_buffers_and_settings():
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    inputs = GraphInputs(print, [model], [optimizer])
    before, settings = inputs.versions(inputs.parameters()), inputs.versions_of_settings()
    with torch.no_grad():
        model.weight.mul_(2)
        model.running_mean.mul_(2)
    after = inputs.versions(inputs.parameters())
    assert {tensor for tensor in after if after[tensor] != before[tensor]} == {model.weight, model.running_mean}
    assert inputs.versions_of_settings() == settings  # of which parameters are none
    optimizer.param_groups[0]["lr"].mul_(0.5)
    assert inputs.versions_of_settings() != settings


def test_a_tensor_around_a_step_is_compared_by_itself_and_where_it_lies():
    held = torch.zeros(2)
    inputs = GraphInputs(lambda: held, [], [])
    before = inputs.fixed([])
    held.add_(1)
    assert inputs.fixed([]) == before
    held.data = held.data.clone()
    moved = inputs.fixed([])
    assert moved.read != before.read
    held = held.view(2)  # another one in the same memory
    assert inputs.fixed([]).read != moved.read


def test_methods_of_objects_without_a_dictionary_and_cells_that_are_empty():
    held = torch.zeros(2)

    class Slots:
        __slots__ = ()

        def step(self):
            return held * TENSOR

    assert [each is held or each is TENSOR for each in read_around(Slots().step).tensors] == [True, True]

    def step():
        return later * held

    (found,) = read_around(step).tensors
    assert found is held
    later = 1


loss = torch.zeros(3)
RATE, MODE = 0.5, object()


def test_what_has_the_name_of_an_attribute_is_not_read():
    """A script binds ``loss`` anew after each step, and the step reads ``output.loss``."""

    def step(output):
        output.loss.backward()
        return [part.loss * TENSOR for part in output.parts]

    assert [each is TENSOR for each in read_around(step).tensors] == [True]


def test_variables_that_a_step_reads_are_compared(monkeypatch):
    held, number = object(), 1

    class Trainer:
        def __init__(self):
            self.recipe, self.loss, self.backward = recipes.MXFP8BlockScaling(), 0.0, 1

        def step(self, output):
            output.loss.backward()
            with opfuse.autocast(recipe=self.recipe):
                return [held, [RATE * number for _ in range(2)], MODE]

        def __call__(self, output):
            return self.recipe

    trainer = Trainer()
    for step in (trainer.step, trainer):
        inputs = GraphInputs(step, [], [])
        before = inputs.fixed([])
        trainer.loss, trainer.backward, trainer.other = 1.0, 2, 3
        assert inputs.fixed([]) == before
        trainer.recipe = recipes.MXFP8BlockScaling()
        assert [n for n, was, now in zip(Fixed._fields, before, inputs.fixed([])) if was != now] == ["values"]
    inputs = GraphInputs(trainer.step, [], [])
    for name, others in {"RATE": (0.25, None, 0.5), "MODE": (object(), 1, True, torch.zeros(1))}.items():
        for other in others:
            before = inputs.fixed([])
            monkeypatch.setitem(globals(), name, other)
            assert inputs.fixed([]).values != before.values, other
    before = inputs.fixed([])
    number = 2
    assert inputs.fixed([]).values != before.values
    number = int("2")
    before = inputs.fixed([])
    held = None
    assert inputs.fixed([]).values != before.values


def test_constants_are_the_same_by_what_they_are_and_objects_by_themselves():
    made = [int("512"), float("0.5"), "".join(["f", "p8"]), 0.0]
    again = [int("512"), float("0.5"), "".join(["f", "p8"]), 0.0]
    assert Objects(made) == Objects(again)
    for other in ([513, *again[1:]], [512.0, *again[1:]], [*again[:3], -0.0], [*again[:3], False], again[:3], [*again, 1]):
        assert Objects(made) != Objects(other), other
    assert Objects(made) != again
    assert Objects([(512, 1.5)]) != Objects([(int("512"), 1.5)])
    held = nn.Linear(2, 2)
    assert Objects([held, int("512")]) == Objects([held, 512])
    assert Objects([held, int("512")]) != Objects([nn.Linear(2, 2), 512])


def test_states_that_are_lists_are_compared_by_their_parts():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    inputs, state = GraphInputs(print, [], [optimizer]), {"of": [torch.zeros(3), {"x": torch.zeros(3)}], "n": 1}
    optimizer.state[weight] = state
    before = inputs.fixed([])
    optimizer.state[weight] = {"of": [state["of"][0], {**state["of"][1]}], "n": 1}
    assert inputs.fixed([]) == before
    state["of"][1]["x"] = torch.zeros(3)
    optimizer.state[weight] = state
    assert inputs.fixed([]).states != before.states


def test_where_tensors_lie():
    class Other(torch.Tensor):
        pass

    for one in (torch.zeros(4, 2), torch.zeros(4, 2).as_subclass(Other)):
        assert memory_of(one) == memory_of(one.view(4, 2))
        assert memory_of(one) != memory_of(one.clone())
        assert memory_of(one) != memory_of(one[:2])
        square = one[:2]
        assert memory_of(square) != memory_of(square.t())
        assert memory_of(one) != memory_of(one.view(torch.int32))
    made = MXFP8Quantizer()(torch.ones(64, 64))
    here = memory_of(made)
    assert here == memory_of(made)
    for number, tensor in enumerate(made.record.tensors()):
        whole, moved = tensor.data, tensor.data.clone()
        tensor.data = moved
        assert memory_of(made) != here, number
        tensor.data = whole
    assert memory_of(made) == here
    assert memory_of("fast") == "fast"


def test_settings_of_torch_are_compared():
    inputs = GraphInputs(print, [], [])
    before, dtype = inputs.fixed([]), torch.get_autocast_dtype("cuda")
    with torch.inference_mode(), torch.enable_grad():
        assert inputs.fixed([]).torch != before.torch
    for change, back in (
        (lambda: torch.set_autocast_enabled("cuda", True), lambda: torch.set_autocast_enabled("cuda", False)),
        (lambda: torch.set_autocast_dtype("cuda", torch.bfloat16), lambda: torch.set_autocast_dtype("cuda", dtype)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
    ):
        change()
        try:
            assert inputs.fixed([]).torch != before.torch
        finally:
            back()
        assert inputs.fixed([]) == before


def test_delayed_states_are_those_of_all_ops():
    training = Training(recipes.DelayedScaling())
    training()
    states = {state for op in training.model for state in op.quantizer_states}
    assert states
    assert states <= {*delayed_states()}


DRAWS = {
    "python": random.random,
    "torch": lambda: torch.rand(1),
    "numpy": np.random.rand,
    "numpy, as many as it makes at once": lambda: np.random.bytes(4 * 624),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.cpu
def test_random_numbers_of_the_host_are_noticed(draw):
    for _ in range(2):
        before = numbers_drawn()
        assert numbers_drawn() == before
        DRAWS[draw]()
        assert numbers_drawn() != before
