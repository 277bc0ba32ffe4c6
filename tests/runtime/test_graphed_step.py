"""``opfuse.graphed_step`` without a GPU: what it refuses, and when it repeats; for graphs see tests/gpu/test_graphed_step.py."""

import random
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import recipes
from opfuse.errors import OpfuseWarning, PipelineError, UnsupportedError
from opfuse.events import KernelLaunched, subscribed
from opfuse.runtime import graphed_step as code
from tests.ops.test_op_errors import raised


def test_what_is_no_step_or_no_part_of_one():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raised(PipelineError, ValueError, "graphed_step", "a function", "int"):
        opfuse.graphed_step(1, model)
    for parts, got in (((), "no module"), ((optimizer,), "no module"), ((model, optimizer, 1), "an? int")):
        with raised(PipelineError, ValueError, "graphed_step", "modules and optimizers", got):
            opfuse.graphed_step(model, *parts)


@pytest.mark.cpu
def test_what_a_graph_cannot_have():
    model = nn.Linear(2, 2)
    with raised(UnsupportedError, RuntimeError, "parameters on one GPU", "got cpu"):
        opfuse.graphed_step(model, model)
    with raised(UnsupportedError, RuntimeError, "parameters on one GPU", "cpu and meta"):
        opfuse.graphed_step(model, model, nn.Linear(2, 2, device="meta"))
    with raised(UnsupportedError, RuntimeError, "parameters on one GPU", "no parameters"):
        opfuse.graphed_step(model, nn.GELU())
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    with raised(UnsupportedError, RuntimeError, "that no ranks exchange", "DistributedDataParallel"):
        opfuse.graphed_step(model, model, nn.Sequential(wrapped))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the cure is that of a machine without a GPU")
def test_the_cure_without_a_gpu():
    with pytest.raises(UnsupportedError, match="Cure: call the step itself"):
        opfuse.graphed_step(print, nn.Linear(2, 2))


# -- arguments and results -------------------------------------------------------------------------------------------------------


def signature(*args, **kwargs):
    return code._signature((args, kwargs))


def test_values_of_arguments_have_graphs_of_their_own():
    different = [1, True, 1.0, "1", b"1", None, 0.0, -0.0, float("nan"), torch.float32, (1,), [1], {"x": 1}, {"y": 1}, [[1]]]
    assert len({signature(each) for each in different}) == len(different)
    assert signature(float("nan")) == signature(float("nan"))
    assert signature(1, 2) != signature(2, 1)
    assert signature(1, x=2) != signature(1, 2) != signature([1, 2])
    assert signature(x=1) != signature(y=1)


@pytest.mark.cpu
def test_arguments_that_cannot_be_copied():
    for given, got in ((torch.zeros(2), "one on cpu"), (nn.Parameter(torch.zeros(2)), "one on cpu"), (object(), "a object")):
        with raised(UnsupportedError, RuntimeError, got):
            signature([given])


@pytest.mark.cpu
def test_tensors_are_told_apart_by_what_a_graph_has_of_them():
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(code, "PLAIN", {FakeTensor})
        made = [torch.empty(2, 4, device="cuda"), torch.empty(4, 2, device="cuda"), torch.empty(4, 2, device="cuda").t()]
        made += [
            torch.empty(3, 4, device="cuda"),
            torch.empty(2, 4, device="cuda", dtype=torch.float16),
            torch.empty(2, 4, device="cuda:1"),
        ]
        assert len({signature(each) for each in made}) == len(made)
        assert signature(made[0]) == signature(torch.empty(2, 4, device="cuda"))
        with raised(UnsupportedError, RuntimeError, "one that wants a gradient"):
            signature(torch.empty(2, device="cuda", requires_grad=True))
        patch.setattr(code, "PLAIN", set())
        with raised(UnsupportedError, RuntimeError, "a FakeTensor"):
            signature(made[0])


@pytest.mark.cpu
def test_parameters_on_two_devices():
    with FakeTensorMode():
        here, second, cpu = (torch.empty(2, device=device) for device in ("cuda:0", "cuda:1", "cpu"))
    assert code._device_of([here, here]) == here.device
    for other in (second, cpu):
        with raised(UnsupportedError, RuntimeError, "parameters on one GPU", f"cuda:0 and {other.device}"):
            code._device_of([here, other])


def test_tensors_with_gaps_are_refused():
    code._check_dense([torch.zeros(4, 2), torch.zeros(4, 2).t()])
    with raised(UnsupportedError, RuntimeError, "without gaps", r"strides \(4, 1\) of shape \(2, 2\)"):
        code._check_dense([torch.zeros(2), torch.zeros(4, 2)[::2]])


@pytest.mark.cpu
def test_results_that_cannot_be_copied():
    here = torch.device("cpu")
    code._check_results({"loss": torch.zeros(1), "n": [1, 1.0, True, "x", None, torch.float32, here]}, here)
    for result, got in ((torch.zeros(1, device="meta"), "a tensor on meta"), (object(), "a object")):
        with raised(UnsupportedError, RuntimeError, "results to copy", got):
            code._check_results([torch.zeros(1), result], here)


# -- calls and optimizers --------------------------------------------------------------------------------------------------------


def test_calls_inside_of_a_region_and_with_gradients():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    code._check_call(parameters)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()), raised(UnsupportedError, RuntimeError, "outside of autocast"):
        code._check_call(parameters)
    torch.set_autocast_enabled("cuda", True)
    try:
        with raised(UnsupportedError, RuntimeError, "outside of torch.autocast"):
            code._check_call(parameters)
        torch.set_autocast_cache_enabled(False)
        code._check_call(parameters)
    finally:
        torch.set_autocast_cache_enabled(True)
        torch.set_autocast_enabled("cuda", False)
    parameters[0].grad = parameters[2].grad = torch.zeros(2)
    with raised(PipelineError, ValueError, "without gradients", "2 that are not None"):
        code._check_call(parameters)


@pytest.mark.cpu
def test_optimizers_that_are_not_known_or_count_on_the_cpu():
    weight = nn.Parameter(torch.zeros(2))
    plain, other = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    code._check_optimizer(plain, [other, plain])  # parameters themselves do not count
    with raised(UnsupportedError, RuntimeError, "all optimizers", "SGD beside them"):
        code._check_optimizer(plain, [other])
    plain.state[weight] = {"step": torch.zeros((), device="meta")}
    code._check_optimizer(plain, [plain])
    plain.state[weight] = {"step": torch.zeros(())}
    for each in (plain, torch.optim.SGD([weight], lr=torch.tensor(0.1))):
        with raised(UnsupportedError, RuntimeError, "no tensor on the CPU", "SGD, which"):
            code._check_optimizer(each, [each])


# -- errors ----------------------------------------------------------------------------------------------------------------------


def error_of(*errors):
    """What is told of a capture in which these were raised, one after another."""
    failed = []
    for error in errors:
        with pytest.raises(type(error)), code._noted(failed):
            raise error
    return code._reason(failed[0])


def test_the_first_error_is_told_and_those_of_others_are_their_own():
    first = ValueError("no labels")
    assert error_of(first, RuntimeError("capture failed")) is first
    for error in (torch.OutOfMemoryError("full"), PipelineError("ours"), UnsupportedError("ours")):
        assert error_of(error) is error


def multiplied():
    return nn.ReLU()(nn.Linear(3, 3)(torch.zeros(2)))  # which ends in code of torch


def test_a_step_that_cannot_be_captured_is_told_with_its_line():
    told = error_of(RuntimeError("not permitted when capturing\nCompile with debugging"), ValueError("later"))
    assert isinstance(told, UnsupportedError)
    assert "not permitted when capturing at " in str(told)
    assert "test_graphed_step.py:" in str(told)
    assert ", raise error" in str(told)
    assert "Compile with" not in str(told)
    assert "got RuntimeError at" in str(error_of(RuntimeError()))
    assert "got nowhere. Cure" in str(code._reason(RuntimeError("nowhere")))
    with pytest.raises(RuntimeError) as caught:
        multiplied()
    assert "nn.ReLU()(nn.Linear(3, 3)" in str(code._reason(caught.value))


# -- what is kept ----------------------------------------------------------------------------------------------------------------


def test_the_oldest_of_too_many_signatures_goes(monkeypatch):
    monkeypatch.setattr(code, "SHAPES", 2)
    step = code.GraphedStep.__new__(code.GraphedStep)
    step._specialized, step._warned = {}, set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, _ = (step._specialization(number, ()) for number in (1, 2))
        assert step._specialization(1, ()) is first
        first.graph = object()
        step._specialization(3, ())
    assert [*step._specialized] == [2, 3]
    assert step.graphs == 0
    with pytest.warns(OpfuseWarning, match="more than 2 shapes"):
        step._specialization(4, ())
    assert [*step._specialized] == [3, 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step._specialization(5, ())  # which is told once
    with raised(UnsupportedError, RuntimeError, "without gaps"):
        step._specialization(6, [torch.zeros(4, 2)[::2]])
    assert 6 not in step._specialized


# -- steps without a GPU ---------------------------------------------------------------------------------------------------------


class Imitated(code.GraphedStep):
    """Whose graph repeats the result of the call in which it was captured."""

    def __init__(self, step, *modules, optimizers=()):
        self._step, self._inputs, self._device = step, code.GraphInputs(step, modules, optimizers), torch.device("cpu")
        self._specialized, self._warned, self._fixed, self._refusal, self._restarts, self.replays = {}, set(), None, None, 0, 0

    def _as_written(self, given):
        return self._step(*given[0], **given[1])

    def _captured(self, found, given, parameters):
        result = self._as_written(given)
        found.graph = SimpleNamespace(replay=lambda _: result)
        self._fixed, self._restarts = self._inputs.fixed(parameters), 0
        self._warned.clear()
        return found.graph


@pytest.fixture
def without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


@pytest.mark.usefixtures("without_a_device")
def test_variables_that_change_between_steps_drop_graphs_and_those_that_steps_change_do_not():
    rate, counted = 1, 0

    def step():
        nonlocal counted
        counted += 1
        return rate

    model = nn.Linear(2, 2)
    graph = Imitated(step, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [graph() for _ in range(6)] == [1] * 6
        assert (graph.replays, counted) == (3, 4)
        handle = model.register_forward_hook(print)
        with pytest.warns(OpfuseWarning, match="hooks"):
            assert graph() == 1
        handle.remove()
        assert (graph(), counted, graph.replays) == (1, 5, 4)
    handle = model.register_forward_hook(print)
    counted = 10
    assert graph() == 1  # as written, while the variable has changed before
    handle.remove()
    with pytest.warns(OpfuseWarning, match="a variable around the step"):
        graph()
    assert [graph() for _ in range(6)] == [1] * 6
    rate = 2
    with pytest.warns(OpfuseWarning, match="a variable around the step"):
        assert [graph() for _ in range(6)] == [2] * 6


@pytest.mark.usefixtures("without_a_device")
def test_what_a_first_step_makes_is_kept_and_what_each_makes_is_said():
    class Makes(nn.Module):
        def __init__(self, each):
            super().__init__()
            self.each, self.longest, self.weight = each, 0, nn.Parameter(torch.zeros(2))

        def forward(self, length):
            if self.each or length > self.longest:
                self.longest = self.longest + length
            return self.longest

    module = Makes(each=False)
    module.forward = lambda length: setattr(module, "length", int(str(length)))  # another object, which says the same
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = Imitated(module, module)
        assert [graph(512) for _ in range(6)] == [None] * 6
        assert graph.replays == 3

    module = Makes(each=False)
    graph = Imitated(module, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [graph(1) for _ in range(6)] == [1] * 6
        assert (graph.graphs, graph.replays) == (1, 3)
    assert graph(2) == 3  # the graph of the other length reads what was there before
    with pytest.warns(OpfuseWarning, match="another value of an attribute"):
        assert graph(1) == 3
    assert graph.graphs == 0

    module = Makes(each=True)
    graph = Imitated(module, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [graph(1) for _ in range(8)] == [*range(1, 9)]  # each second one begins anew
    with pytest.warns(OpfuseWarning, match="another value of an attribute"):
        assert graph(1) == 9
    assert [graph(1) for _ in range(3)] == [10, 11, 12]
    assert graph.replays == 0


@pytest.mark.usefixtures("without_a_device")
def test_a_step_runs_as_written_while_somebody_follows_it():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    @contextmanager
    def global_hook():
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        yield
        handle.remove()

    ran = []
    graph = Imitated(lambda: ran.append(1), nn.Linear(2, 2))
    for _ in range(5):
        graph()
    assert (len(ran), graph.replays) == (4, 2)
    for followed in (
        subscribed(print, KernelLaunched),
        Mode(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
        global_hook(),
    ):
        before = len(ran)
        with followed, warnings.catch_warnings():
            warnings.simplefilter("ignore", OpfuseWarning)
            graph()
            graph()
        assert len(ran) == before + 2, followed
        graph()
        assert len(ran) == before + 2


def test_masters_take_what_was_written_before_each_replay(monkeypatch, without_a_device):
    settled = []
    monkeypatch.setattr(code, "settle_masters", settled.append)
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    graph = Imitated(lambda: None, model, optimizers=optimizers)
    for _ in range(code.WARM):
        graph()
    assert settled == []
    for number in (1, 2):
        graph()
        assert settled == optimizers * number


@pytest.mark.usefixtures("without_a_device")
def test_what_a_replay_could_not_do_is_refused_for_all_calls():
    model = nn.Linear(2, 2)
    optimizer, unknown = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    rated = torch.optim.SGD(model.parameters(), lr=torch.zeros(()))

    def steps(which):
        model.weight.grad = torch.zeros(2, 2)
        which.step()
        model.weight.grad = None

    refused = {
        "all optimizers": lambda: steps(unknown),
        "a scheduler": lambda: rated.param_groups[0]["lr"].add_(1),
        "random numbers": random.random,
        "results to copy": object,
    }
    for words, does in refused.items():
        ran = []

        def step(ran=ran, does=does):
            ran.append(1)
            return does()

        graph = Imitated(step, model, optimizers=[optimizer, rated])
        if words == "random numbers":  # compilers draw in the first
            graph()
        for _ in range(3):
            with raised(UnsupportedError, RuntimeError, "graphed_step", words):
                graph()
        assert len(ran) == 1 + (words == "random numbers")
    Imitated(lambda: steps(optimizer), model, optimizers=[optimizer])()
    graph = Imitated(lambda x: x.add_(1), model)
    with raised(UnsupportedError, RuntimeError, "into an argument"):
        graph._warm(code._Specialization(), ((torch.zeros(2),), {}))
