"""Modules that compute more than they seem to, and modules that were changed after ``fuse_``: nothing is left out in silence."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import re
import warnings
from types import MethodType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import opfuse
from opfuse import ops
from opfuse.errors import ConversionError, OpfuseWarning
from tests.convert.blocks import Attention, GatedMLP
from tests.convert.test_fuse import EXACT, FP8
from tests.plans import plans_used

X = torch.linspace(-2, 2, 64 * 32).view(64, 32)


def block(act=None, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64, **options), act or nn.GELU(), nn.Linear(64, 32))


class Switched(nn.Module):
    """Does what an attribute says, which it reads in a method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.negate = nn.Linear(32, 64), nn.Linear(64, 32), False

    def act(self, x):
        return F.gelu(-x if self.negate else x)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


class Settled(nn.Module):
    """Does what a private attribute, one of the class and a function say."""

    smooth = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self._on, self.act = nn.Linear(32, 64), nn.Linear(64, 32), True, F.gelu

    def forward(self, x):
        y = self.first(x)
        return self.second(self.act(y) if self._on and self.smooth else F.relu(y))


def settled():
    return type("OfItsOwn", (Settled,), {"smooth": True})()


# -- changed after fuse_ ---------------------------------------------------------------------------------------------------------


def negate(model):
    model.negate = True


def lose_a_bias(model):
    model[1].bias = None


def get_a_plain_bias(model):
    del model[1].bias
    model[1].bias = torch.ones(64)


def get_a_buffered_bias(model):
    del model[1].bias
    model[1].register_buffer("bias", torch.ones(64))


class Calling(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def another_call(model):
    model[1].__class__ = Calling


def get_a_bias(model):
    model[1].bias = nn.Parameter(torch.ones(64))


def widened(model):
    """As transformers resizes embeddings: in place, with the sizes that the module tells."""
    for i, (name, size), dim in ((1, ("out_features", 96), 0), (3, ("in_features", 96), 1)):
        model[i].weight = nn.Parameter(torch.cat(2 * [model[i].weight.detach()], dim).narrow(dim, 0, size))
        setattr(model[i], name, size)
    model[1].bias = nn.Parameter(torch.ones(96))


def another_forward(model):
    model[1].forward = MethodType(lambda self, x: 2 * nn.Linear.forward(self, x), model[1])


def replaced(model):
    model.up_proj = nn.Linear(32, 64, bias=False)


class PrecomputedCast(nn.Module):
    """Linear layers around an activation that the module holds."""

    def __init__(self, act) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(32, 64), nn.Linear(64, 32), act

    def forward(self, x):
        return self.second(self.act(self.first(x)))


class Config:
    def __init__(self) -> None:
        self.smooth = True


class Configured(nn.Module):
    """Does what a field of a config says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.config = nn.Linear(32, 64), nn.Linear(64, 32), Config()

    def forward(self, x):
        y = self.first(x)
        return self.second(F.gelu(y) if self.config.smooth else F.relu(y))


class Typed(Configured):
    """Its config is none of transformers, so what is called as in those counts as well."""

    def __init__(self) -> None:
        super().__init__()
        self.config.dtype = None

    def forward(self, x):
        y = self.first(x)
        return self.second(F.gelu(y) if self.config.dtype is None else F.relu(y))


SMOOTH = True


def helper(y):
    return F.gelu(y) if SMOOTH else F.relu(y)


def closed():
    """A forward that reads a variable of a function around it."""
    smooth = True

    class Closed(Configured):
        def forward(self, x):
            y = self.first(x)
            return self.second(F.gelu(y) if smooth else F.relu(y))

        def change(self):
            nonlocal smooth
            smooth = False

    return Closed()


class Global(Configured):
    """Calls a function that reads a global."""

    @property
    def function(self):
        return helper

    def forward(self, x):
        return self.second(self.function(self.first(x)))


class Exactly(Settled):
    """Asks whether an attribute is True, and not 1."""

    def forward(self, x):
        y = self.first(x)
        return self.second(F.gelu(y) if self._on is True else F.relu(y))


class Default(Configured):
    def forward(self, x, act=F.gelu):
        return self.second(act(self.first(x)))


class DefaultOfKeyword(Configured):
    def forward(self, x, *, act=F.gelu):
        return self.second(act(self.first(x)))


class Saved(Config):
    """As in transformers, which writes what it saved into a config."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = None

    def save_pretrained(self) -> None:
        """Somewhere."""


class OfTransformers(Configured):
    def __init__(self) -> None:
        super().__init__()
        self.config = Saved()


def unlike(y):
    return F.silu(y)


@pytest.mark.parametrize(
    ("make", "change", "told"),
    [
        (Global, lambda model, patch: patch.setitem(globals(), "SMOOTH", False), "SMOOTH was True, is False"),
        (Global, lambda model, patch: patch.setitem(globals(), "helper", F.relu), "helper was <function helper"),
        (
            Global,
            lambda model, patch: patch.setattr(Global, "function", property(lambda self: F.relu)),
            "'function' was <property",
        ),
        (Global, lambda model, patch: patch.setattr(F, "gelu", F.silu), "gelu was <built-in"),
        (closed, lambda model, patch: model.change(), "a variable of a function around it was True, is False"),
        (Exactly, lambda model, patch: setattr(model, "_on", 1), "'_on' was True, is 1"),
        (Typed, lambda model, patch: setattr(model.config, "dtype", torch.float16), "dtype"),
        (
            Global,
            lambda model, patch: patch.setattr(helper, "__code__", unlike.__code__),
            "or the defaults of helper were replaced",
        ),
        (Default, lambda model, patch: patch.setattr(Default.forward, "__defaults__", (F.silu,)), "defaults of Default.forward"),
        (
            DefaultOfKeyword,
            lambda model, patch: patch.setattr(DefaultOfKeyword.forward, "__kwdefaults__", {"act": F.silu}),
            "defaults of DefaultOfKeyword.forward",
        ),
    ],
    ids=[
        *("a global", "a function", "a property", "of torch", "a variable around", "1 for True", "a config", "code", "a default"),
        "a default of a keyword",
    ],
)
def test_what_the_code_reads_from_outside_is_watched(make, change, told, monkeypatch):
    model = make()
    opfuse.fuse_(model, EXACT)
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    change(model, monkeypatch)
    with pytest.warns(OpfuseWarning, match=told):
        found = model(X)
    torch.testing.assert_close(found, opfuse.unfuse_(model)(X))


def bound():
    return PrecomputedCast(functools.partial(F.gelu, approximate="tanh"))


def hooked(model):
    model.up_proj.register_forward_hook(lambda module, args, y: 2 * y)


class Derived(nn.Module):
    """Reads a property of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    @property
    def act(self):
        return F.gelu

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def test_a_property_of_the_class_is_watched_also_after_a_pickle(monkeypatch):
    model = Derived()
    opfuse.fuse_(model, FP8)
    wanted = model(X)
    again = pickle.loads(pickle.dumps(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(again(X), wanted)
    monkeypatch.setattr(Derived, "act", property(lambda self: F.relu))
    for each in (model, again):
        with pytest.warns(OpfuseWarning, match="Derived has changed since fuse_: 'act' was <property"):
            assert not torch.equal(each(X), wanted)


class Naming(nn.Module):
    """Does what attributes of its submodules say: of one in the chain, of one beside it, of one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beside = nn.Linear(32, 64), nn.Linear(64, 32), nn.ModuleList([nn.Module()])
        self.others = nn.Module()
        self.first.negate = self.others.negate = self.beside[0].negate = False

    def forward(self, x):
        y = self.first(x)
        negate = self.first.negate or self.others.negate or self.beside[0].negate
        return self.second(F.relu(y) if negate else F.gelu(y))


CHANGES = {
    "an attribute of a submodule in the chain": (
        Naming,
        lambda model: setattr(model.first, "negate", True),
        "Naming.first has changed since fuse_: 'negate' was False, is True",
    ),
    "an attribute of a submodule beside it": (
        Naming,
        lambda model: setattr(model.others, "negate", True),
        "Naming.others has changed since fuse_: 'negate' was False, is True",
    ),
    "an attribute of a submodule in a list": (
        Naming,
        lambda model: setattr(model.beside[0], "negate", True),
        "Naming.beside.0 has changed since fuse_: 'negate' was False, is True",
    ),
    "an attribute of the module": (Switched, negate, "Switched has changed since fuse_: 'negate' was False, is True"),
    "a private one": (Settled, lambda model: setattr(model, "_on", False), "'_on' was True, is False"),
    "a function": (Settled, lambda model: setattr(model, "act", F.relu), "'act' was <.*gelu.*>, is <.*relu.*>"),
    "over a default": (Settled, lambda model: setattr(model, "smooth", False), "'smooth' was True, is False"),
    "a default": (settled, lambda model: setattr(type(model), "smooth", False), "'smooth' was True, is False"),
    "over a method": (Switched, lambda model: setattr(model, "act", F.relu), "'act' was <.*act.*>, is <.*relu.*>"),
    "a field of a config": (Configured, lambda model: setattr(model.config, "smooth", False), r"'smooth', True.*'smooth', False"),
    "a keyword of a partial": (bound, lambda model: model.act.keywords.update(approximate="none"), r"'tanh'.*'none'"),
    "an attribute of an activation": (
        block,
        lambda model: setattr(model[2], "approximate", "tanh"),
        "2 has changed since fuse_: 'approximate'",
    ),
    "eps": (block, lambda model: setattr(model[0], "eps", 0.5), "Sequential.0 has changed since fuse_: 'eps' was .*, is 0.5"),
    "a bias that is gone": (block, lose_a_bias, r"'parameters' was \('bias', torch.Size.*, is \('bias', None\). Cure"),
    "a bias": (lambda: block(bias=False), get_a_bias, r"'parameters' was \('bias', None\), is \('bias', torch.Size"),
    "a bias that is a tensor": (lambda: block(bias=False), get_a_plain_bias, "'parameters' was .*'bias', None"),
    "a bias that is a buffer": (lambda: block(bias=False), get_a_buffered_bias, "'parameters' was .*'bias', None"),
    "a call": (block, another_call, "'__call__ of its class' was "),
    "other sizes": (block, widened, "Sequential.1 has changed since fuse_: 'out_features' was 64, is 96"),
    "a weight norm": (
        block,
        lambda model: parametrizations.weight_norm(model[1]),
        r"'parametrizations' was missing, is a ModuleDict of torch",
    ),
    "a forward": (block, another_forward, "Sequential.1 has changed since fuse_: its forward was replaced"),
    "one more step": (block, lambda model: model.append(nn.Tanh()), r"'4' was missing, is Tanh\(\)"),
    "one step less": (block, lambda model: model.pop(3), r"Sequential has changed since fuse_: '3' was Linear\(.*\), is missing"),
    "another submodule": (GatedMLP, replaced, r"GatedMLP has changed since fuse_: 'up_proj' was Linear\(.*\), is Linear\("),
    "a hook": (GatedMLP, hooked, "up_proj has changed since fuse_: a hook was added to a module that is fused"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_fuse_is_told_once_and_has_its_effect(change):
    """The forward of the module runs then, over its submodules, which stay converted."""
    make, do, told = CHANGES[change]
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, EXACT)
    model(X)
    for each in (copy.deepcopy(model), model):
        do(each)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            each(X)
        assert any(re.search(told, str(warning.message)) for warning in seen)
        found = _after_a_seed(each)
    do(plain)
    torch.testing.assert_close(found, _after_a_seed(plain))
    if change == "a forward":
        return
    opfuse.fuse_(model, EXACT)
    torch.testing.assert_close(_after_a_seed(model), _after_a_seed(plain))


def _after_a_seed(model):
    torch.manual_seed(1)
    return model(X)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_another_probability_of_a_dropout_counts_at_once(p):
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(p))
    opfuse.fuse_(model, EXACT)
    model(X)
    model[1].p = 0.25
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpfuseWarning)
        assert (model(X) == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)


# -- more than they seem to be ---------------------------------------------------------------------------------------------------


def weight_norm(linear):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(linear)


def buffered(linear):
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)
    return linear


class Halved(nn.Linear):
    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value / 2 if name == "weight" and "bias" in self._parameters else value


def halved(linear):
    made = Halved(32, 64)
    made._parameters.update(linear._parameters)
    return made


class Doubled(nn.Linear):
    def _call_impl(self, *args):
        return 2 * super()._call_impl(*args)


SEEMING = {
    "weight norm": (weight_norm, "a weight that is no parameter"),
    "weight norm by parametrization": (parametrizations.weight_norm, "a parametrization"),
    "a pruned weight": (lambda linear: prune.l1_unstructured(linear, "weight", 0.5), "a weight that is no parameter"),
    "a pruned bias": (lambda linear: prune.l1_unstructured(linear, "bias", 0.5), "a bias that is no parameter"),
    "a buffer": (buffered, "a weight that is no parameter"),
    "a weight that is read otherwise": (halved, "a weight that is no parameter"),
    "a call of its own": (lambda _: Doubled(32, 64), ""),
}


@pytest.mark.parametrize("name", SEEMING)
def test_a_linear_layer_with_something_around_it_keeps_it(name):
    make, told = SEEMING[name]
    model = block()
    model[1] = make(model[1])
    expected = model(X)
    report = opfuse.fuse_(model, EXACT)
    assert report[""].status == "parts"
    assert told in (report["1"].got if told else "")
    torch.testing.assert_close(model(X), expected)


class Moody(nn.Module):
    """Another activation in training than in evaluation."""

    def forward(self, x):
        return F.gelu(x) if self.training else F.relu(x)


class Graded(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y if torch.is_grad_enabled() else F.relu(y)


DRAWS = {"torch": lambda: torch.rand(()), "random": random.random, "numpy": np.random.random}


class Skipping(nn.Sequential):
    """Stochastic depth, as it is often written."""

    draw = "torch"

    def forward(self, x):
        return x if self.training and DRAWS[self.draw]() < 0.5 else super().forward(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_does_more_than_one_thing_does_them(training):
    moody, graded = block(Moody()).train(training), Graded(*block()).train(training)
    for model, grad in ((moody, True), (graded, True), (graded, False)):
        for mode in (True, False):
            model.train(mode)
            with torch.set_grad_enabled(grad):
                expected = model(X)
                opfuse.fuse_(model.train(training), EXACT)
                torch.testing.assert_close(model.train(mode)(X), expected)
            opfuse.unfuse_(model)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_forward_that_draws_lots_goes_on_drawing(draw):
    torch.manual_seed(0)
    np.random.seed(0)
    model = Skipping(*block())
    model.draw = draw
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert "" not in opfuse.fuse_(model, EXACT).fused
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert {torch.equal(model(X), X) for _ in range(32)} == {True, False}


# -- fuse_ and unfuse_ -----------------------------------------------------------------------------------------------------------


def test_a_forward_over_that_of_fuse_is_told_before_anything_changes():
    model = nn.ModuleList([block(), GatedMLP()])
    opfuse.fuse_(model, FP8)
    own = model[0].forward
    model[0].forward = lambda x: 2 * own(x)
    for call in (opfuse.unfuse_, opfuse.fuse_):
        with pytest.raises(ConversionError, match=r"0.forward: wants the one that fuse_ gave, got <function .*put over it"):
            call(model)
    quantized = model[1](X)
    model[0].forward = own
    opfuse.unfuse_(model)
    assert not torch.equal(model[1](X), quantized)
    assert all("forward" not in vars(module) for module in model.modules())


def test_what_is_no_policy_and_no_filter_is_refused():
    with pytest.raises(
        ConversionError, match=r"fuse_ policy: wants 'auto', a mapping, or a function of module and path, got \['0'\]"
    ):
        opfuse.fuse_(block(), FP8, policy=["0"])
    with pytest.raises(ConversionError, match=r"fuse_ filter_fn: wants a function of module and path, got '0'. Cure: write"):
        opfuse.fuse_(block(), FP8, filter_fn="0")


@pytest.mark.parametrize("name", ["filter_fn", "policy"])
@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda module: True, r"<lambda>\(module\)"),
        (lambda module, path, *, depth: True, r"<lambda>\(module, path, \*, depth\)"),
        (len, r"len\(obj, /\)"),
    ],
)
def test_a_function_that_takes_other_arguments_is_refused_before_the_model_is_looked_at(name, function, got):
    model = block()
    opfuse.fuse_(model, FP8)
    before = {module: vars(module).get("forward") for module in model.modules()}
    with pytest.raises(ConversionError, match=rf"fuse_ {name}: wants .*a function of module and path, got {got}. Cure: write"):
        opfuse.fuse_(model, FP8, **{name: function})
    assert {module: vars(module).get("forward") for module in model.modules()} == before


@pytest.mark.parametrize("name", ["filter_fn", "policy"])
def test_a_function_that_raises_leaves_the_model_as_it_was(name):
    model = block()
    opfuse.fuse_(model, FP8)
    before = {module: vars(module).get("forward") for module in model.modules()}
    with pytest.raises(ZeroDivisionError):
        opfuse.fuse_(model, FP8, **{name: lambda module, path: 1 / 0})
    assert {module: vars(module).get("forward") for module in model.modules()} == before


def test_parameters_without_a_shape_are_refused():
    with pytest.raises(
        ConversionError, match=r"fuse_ 0.weight: wants a shape, got a parameter without one. Cure: call the model"
    ):
        opfuse.fuse_(nn.Sequential(nn.LazyLinear(8)), FP8)


def test_ops_of_opfuse_are_told_of():
    model = nn.ModuleList([ops.Sequential(ops.Linear(32, 32)), nn.Linear(32, 32)])
    report = opfuse.fuse_(model, FP8)
    assert report["0.0"].status == "kept"
    assert report.share == 0.5
    with pytest.raises(ConversionError, match=r"report: wants the path of a module in the report, got '00'; did you mean '0.0'"):
        report["00"]
    with pytest.raises(
        ConversionError, match=r"got a ModuleList without any; 0\.0: it is an op of opfuse already. Cure: call it inside of"
    ):
        opfuse.fuse_(model[:1], FP8)


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CLASSES = {
    "of a part": lambda model, _: setattr(model[1], "__class__", Twice),
    "its forward": lambda _, patch: patch.setattr(nn.GELU, "forward", lambda self, x: x * 3),
    "of the whole": lambda model, _: setattr(model, "__class__", type("Other", (nn.Sequential,), {"forward": lambda self, x: x})),
}


@pytest.mark.parametrize("change", CLASSES)
def test_another_class_or_forward_of_a_class_is_seen(change, monkeypatch):
    """As libraries patch them late."""
    model = block()
    opfuse.fuse_(model, EXACT)
    model(X)
    CLASSES[change](model, monkeypatch)
    wanted = copy.deepcopy(model)
    with pytest.warns(OpfuseWarning, match="forward of its class"):
        found = model(X)
    for module in wanted.modules():
        vars(module).pop("forward", None)
    torch.testing.assert_close(found, wanted(X))


class Activation:
    """An activation as an object has it, whose method a module holds."""

    def __init__(self, function) -> None:
        self.function = function

    def run(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("act", "other"),
    [
        (functools.partial(F.gelu, approximate="tanh"), functools.partial(F.gelu, approximate="none")),
        (Activation(F.gelu).run, Activation(F.silu).run),
    ],
    ids=["partial", "bound method"],
)
def test_an_activation_that_was_bound_to_what_it_needs_is_watched(act, other):
    """Another one counts from then on; a copy of the model has its own."""
    model = PrecomputedCast(act)
    opfuse.fuse_(model, FP8)
    wanted = model(X)
    assert torch.equal(copy.deepcopy(model)(X), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), wanted)
    model.act = other
    with pytest.warns(OpfuseWarning, match=r"has changed since fuse_: 'act' was .*Cure: call opfuse\.fuse_ again"):
        assert not torch.equal(model(X), wanted)
    opfuse.fuse_(model, FP8)
    assert not torch.equal(model(X), wanted)


def replica(module):
    """As DataParallel makes one for each device."""
    copy_ = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        copy_._parameters[name] = None if parameter is None else nn.Parameter(2 * parameter.detach())
    copy_._modules = {name: replica(child) for name, child in module._modules.items()}
    return copy_


def shallow(module):
    copy_ = copy.copy(module)
    copy_._parameters = {name: p if p is None else nn.Parameter(2 * p.detach()) for name, p in module._parameters.items()}
    copy_._modules = {name: shallow(child) for name, child in module._modules.items()}
    return copy_


@pytest.mark.parametrize("make", [GatedMLP, block, Attention, lambda: nn.Sequential(nn.Linear(32, 64))])
@pytest.mark.parametrize("copied", [replica, shallow])
def test_a_copy_of_the_attributes_computes_with_its_own_parameters(make, copied):
    """In high precision, of which it tells once for each module."""
    torch.manual_seed(0)
    model = make()
    wanted = copied(model)(X)
    opfuse.fuse_(model, FP8)
    before = model(X)
    with pytest.warns(OpfuseWarning, match="this is a shallow copy of a converted module"):
        assert torch.equal(copied(model)(X), wanted)
    assert torch.equal(copied(model)(X), wanted)
    assert torch.equal(model(X), before)


class Marking(nn.Module):
    """Leaves a mark on what it is given."""

    def forward(self, x):
        x.mark = 1
        return x


class Reading(nn.Module):
    def forward(self, x):
        return 2 * x if hasattr(x, "mark") else 1 * x


@pytest.mark.parametrize("parts", [(Marking, Reading), (Reading,)], ids=["of its own", "of a caller"])
def test_marks_on_tensors_are_set_and_read(parts):
    model, x = nn.Sequential(*[part() for part in parts], nn.Linear(32, 32)), X.clone()
    if len(parts) == 1:
        x.mark = 1
    wanted = model(x)
    opfuse.fuse_(model, EXACT)
    torch.testing.assert_close(model(x), wanted)


class Borrowing(nn.Module):
    """Has the forward of another module, as libraries bind one."""


def test_a_function_around_the_forward_of_a_class_that_got_another_one_is_refused(monkeypatch):
    """It would call the class's forward of its time, which nobody knows."""

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model = Layer(32, 32)
    plain, x = model(X), X.clone()
    opfuse.fuse_(model, EXACT)
    before = model.forward
    model.forward = lambda x: 2 * before(x)
    assert torch.allclose(model(x), 2 * plain)
    monkeypatch.setattr(Layer, "forward", lambda self, x: -nn.Linear.forward(self, x))
    refused = r"wants one forward of its class since fuse_ ran.*opfuse\.unfuse_"
    with pytest.warns(OpfuseWarning, match="forward of its class"), pytest.raises(ConversionError, match=refused):
        model(x)
    model.forward = before
    assert torch.allclose(model(x), -plain)


def test_a_linear_layer_with_the_weight_of_another_has_its_shape():
    """What the module says of its sizes is what it was made with."""
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(32, 32, bias=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.append(nn.Linear(32, 0, bias=False))
    model[0].weight = model[2].weight = model[1].weight
    plain = model(X)
    opfuse.fuse_(model, EXACT)
    assert torch.equal(model(X), plain)


@pytest.mark.parametrize("copied", [False, True])
def test_a_forward_that_is_called_directly_or_bound_to_another_module_is_that_of_its_module(copied):
    model, x = GatedMLP(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    if copied:
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.down_proj.weight.mul_(3)
    borrowing = Borrowing()
    borrowing.forward = model.forward
    assert torch.equal(model.forward(x), model(x))
    assert torch.equal(borrowing(x), model(x))


class Calculating:
    """Of a class attribute, a field, and a property that reads a field which no forward names."""

    slope = 1.0

    def __init__(self):
        self.eps = 1.0

    @property
    def act(self):
        return F.relu if self.eps == 1.0 else F.silu


class Calculated(nn.Module):
    shared = Calculating()

    def __init__(self):
        super().__init__()
        self.a, self.b, self.config = nn.Linear(8, 8), nn.Linear(8, 8), Calculating()

    def forward(self, x):
        return self.b(self.config.act(self.a(x)) * self.config.slope)


class OfClass(Calculated):
    def forward(self, x):
        return self.b(self.shared.act(self.a(x)))


CONFIGS = {
    "a field that a property reads": (Calculated, lambda model, patch: patch.setattr(model.config, "eps", 2.0)),
    "an attribute of its class": (Calculated, lambda model, patch: patch.setattr(Calculating, "slope", 2.0)),
    "a field of an object of the class": (OfClass, lambda model, patch: patch.setattr(OfClass.shared, "eps", 2.0)),
}


@pytest.mark.filterwarnings("ignore::opfuse.errors.OpfuseWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_config_calculates_is_seen(name, monkeypatch):
    make, change = CONFIGS[name]
    plain, x = make(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    torch.testing.assert_close(model(x), plain(x))
    for each in (plain, model):
        change(each, monkeypatch)
    torch.testing.assert_close(model(x), plain(x))


SHARDED = {
    "FSDP1": (
        lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "a flat one.*fully_shard, which keeps",
    ),
    "FSDP2 of parts": (
        lambda model: [fully_shard(part, mesh=init_device_mesh("cpu", (1,))) for part in (model[0], model[2])] and model,
        "a hook was added.* call fully_shard on modules that run as a whole",
    ),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:FSDP.device_id")
@pytest.mark.parametrize("how", SHARDED)
def test_what_no_pipeline_runs_in_is_told_with_the_way_to_shard_it(how, tmp_path):
    shard, told = SHARDED[how]
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        opfuse.fuse_(model, FP8)
        model = shard(model)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(torch.randn(32, 64)).sum().backward()
    finally:
        dist.destroy_process_group()
    messages = [str(each.message) for each in found if "has changed since fuse_" in str(each.message)]
    assert messages
    assert all(re.search(told, message) for message in messages), messages


def test_a_global_that_is_another_one_in_the_process_that_unpickles_is_told(monkeypatch):
    model = Global()
    opfuse.fuse_(model, EXACT)
    written = pickle.dumps(model)
    monkeypatch.setitem(globals(), "SMOOTH", False)
    read = pickle.loads(written)
    with pytest.warns(OpfuseWarning, match="SMOOTH was True, is False"):
        found = read(X)
    torch.testing.assert_close(found, opfuse.unfuse_(read)(X))


def test_what_transformers_writes_into_a_config_that_it_saves_changes_nothing():
    model = OfTransformers()
    opfuse.fuse_(model, EXACT)
    model.config.dtype = torch.float16
    with plans_used() as plans:
        model(X)
    assert plans
