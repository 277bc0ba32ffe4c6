"""Arguments of ops: what a field of a spec cannot hold is refused where the op is made, what it can comes back from ``repr``."""

import copy
import dataclasses
import inspect
import math
import pickle
from typing import Annotated

import numpy as np
import pytest
import torch

from opfuse import errors, ops
from opfuse.config import loads
from opfuse.config.operations import IN_CODE
from opfuse.core.spec import argument, domains, hyper_parameters, spec_of
from opfuse.domains import numbers

REQUIRED = {
    "linear": {"in_features": 8, "out_features": 4},
    "basic_linear": {"in_features": 8, "out_features": 4},
    "grouped_linear": {"num_groups": 3, "in_features": 8, "out_features": 4},
    "token_dispatch": {"num_groups": 4, "features": 8},
    "token_permute": {"num_groups": 4},
    "linear_cross_entropy": {"in_features": 8, "vocabulary": 16},
    "bias": {"size": 8},
    "constant_scale": {"scale": 0.5},
    "scaled_tanh_srelu": {"tanh_clamp_scale": 1.5},
    "reshape": {"shape": (4, -1)},
    "dropout": {"p": 0.25},
    "layer_norm": {"normalized_shape": 8},
    "rms_norm": {"normalized_shape": (3, 8)},
}
"""What a constructor cannot do without."""

FIELDS = [(kind, field) for kind, cls in ops.OPS.items() for field in domains(spec_of(cls))]

NO_NUMBER = ("false", "1", "x", b"1", object(), {}, {1}, [[1]], 1j, True, math.nan, torch.ones(2), torch.tensor(True), np.True_)
NO_INTEGER = (*NO_NUMBER, 1.5, 1.0, math.inf, 2**40, 10**400, -1, 0, torch.tensor(1.5), np.float32(2))
WRONG = {
    "bool": ("false", "", 0, 1, 1.0, None, [], object(), torch.tensor(True)),
    "Size": (*NO_INTEGER, None, [1]),
    "Size | None": (*NO_INTEGER, [1]),
    "int": (*NO_NUMBER, None, 1.5, 1.0, math.inf, [1]),
    "float": (*NO_NUMBER, None, math.inf, -math.inf, 1e39, 10**400),
    "Positive": (*NO_NUMBER, None, math.inf, 0, 0.0, -1.5, 1e-46, 10**400),
    "Positive | None": (*NO_NUMBER, math.inf, 0, 0.0, -1.5, 1e-46, 10**400),
    "Smoothing": (*NO_NUMBER, None, math.inf, -0.1, 1.5, 10**400),
    "Literal['mean', 'sum', 'none']": ("", "Mean", "max", None, 1, True, [], object()),
    "NonNegative": (*NO_NUMBER, None, math.inf, -1e-9, 10**400),
    "Annotated[float, PROBABILITY]": (*NO_NUMBER, None, math.inf, -0.1, 1, 1.0, 2),
    "SizesLike": (*(value for value in NO_INTEGER), None, [], (8, 0), (8, "4"), (True,), range(3)),
    "Shape": (5, None, "23", (-1, -1), (2, -2), (2, 1.5), (None,), {2}, torch.ones(2), object()),
}
"""Values that no field of a type holds, whatever else it asks for."""


def made(kind, **given):
    return ops.OPS[kind](**{**REQUIRED.get(kind, {}), **given})


def type_of(kind, field):
    return next(f.type for f in dataclasses.fields(spec_of(ops.OPS[kind])) if f.name == field)


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda v: v)
def test_a_value_outside_of_a_field_is_refused_with_its_place(kind, field):
    for wrong in WRONG[type_of(kind, field)]:
        with pytest.raises(errors.SpecError) as caught:
            made(kind, **{argument(field): wrong})
        assert str(caught.value).startswith(f"{ops.OPS[kind].__name__}.{argument(field)}: wants "), wrong
        assert "Cure: " in str(caught.value)


LEGAL = {
    "bool": (True, False),
    "Size": (1, 3, np.int64(2), torch.tensor(4), torch.tensor([2], dtype=torch.int32)[0]),
    "Size | None": (None, 4, np.int8(2)),
    "int": (-100, 0, 7, np.int64(-1), torch.tensor(3)),
    "float": (0, -1.5, np.float32(0.5), torch.tensor(2.0), 1e-300),
    "Positive": (1, 2.5, np.float64(1e-9)),
    "Positive | None": (None, 30, 2.5),
    "Smoothing": (0, 0.1, 1, np.float32(0.25)),
    "Literal['mean', 'sum', 'none']": ("mean", "sum", "none"),
    "NonNegative": (0, 1e-5, np.float32(0.25)),
    "Annotated[float, PROBABILITY]": (0, 0.5, np.float32(0.25), 1 - 2**-53),
    "SizesLike": (4, (2, 3), [2, 3], torch.Size((2, 3)), np.array([2, 3]), range(2, 4), np.int64(4), torch.tensor(4)),
    "Shape": ((), (2, -1), [0, 3], torch.Size((2, 3)), (np.int64(-1), 2), torch.tensor([2, -1])),
}


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda v: v)
def test_a_legal_value_is_kept_in_its_normal_form_and_comes_back_from_repr(kind, field):
    for value in LEGAL[type_of(kind, field)]:
        op = made(kind, **{argument(field): value})
        assert eval(repr(op), vars(ops)).spec == op.spec, repr(op)
        assert copy.deepcopy(op).spec == op.spec
        kept = getattr(op.spec, field)
        for part in kept if isinstance(kept, tuple) else (kept,):
            assert type(part) in (bool, int, float, str, type(None)), "numbers of numpy and torch have no identity in a key"


@pytest.mark.parametrize("kind", ops.OPS)
def test_an_unknown_keyword_names_the_nearest_one(kind):
    with pytest.raises(errors.UnknownArgumentError, match=ops.OPS[kind].__name__) as caught:
        made(kind, colour=3)
    assert isinstance(caught.value, TypeError)
    for field in domains(spec_of(ops.OPS[kind])):
        name = argument(field)
        if len(name) > 3:
            with pytest.raises(errors.UnknownArgumentError, match=f"did you mean '{name}'"):
                made(kind, **{name[0] + name: 3})


LEARNED = ("linear", "basic_linear", "grouped_linear", "linear_cross_entropy", "token_dispatch", "bias", "layer_norm", "rms_norm")


@pytest.mark.parametrize("kind", LEARNED)
def test_where_and_in_what_dtype_parameters_are_made(kind):
    for wrong in ("bf16", torch.int8, torch.float8_e4m3fn, torch.complex64, float, 0, "", object()):
        with pytest.raises(errors.DtypeError, match=f"{ops.OPS[kind].__name__}: wants a dtype"):
            made(kind, dtype=wrong)
    for wrong in ("cdua", "cpu:x", "", 1.5, object(), torch.float32):
        with pytest.raises(errors.SpecError, match=rf"{ops.OPS[kind].__name__}\.device: wants a device of torch"):
            made(kind, device=wrong)
    with pytest.raises(errors.SpecError, match="did you mean 'cuda'"):
        made(kind, device="cdua")
    for device in ("meta", torch.device("meta"), "cpu", "cpu:0", None):
        assert {p.dtype for p in made(kind, device=device, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_device_that_is_not_here_and_sizes_that_none_holds():
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(errors.UnsupportedError, match=f"RMSNorm: wants a device that holds .*got {missing}: "):
        ops.RMSNorm(8, device=missing)
    with pytest.raises(errors.UnsupportedError, match="Linear: wants a device that holds a parameter"):
        ops.Linear(2**31, 2**31, device="meta")


SCALE = numbers("a number below 4", exclusiveMaximum=4)


@dataclasses.dataclass(frozen=True)
class MineSpec:
    scale: Annotated[float, SCALE]
    other: object = None


class Mine(ops.BasicOperation):
    """An op of a user, whose spec declares what it holds."""

    def __init__(self, scale, other=None):
        super().__init__(MineSpec(scale, other))


class Declared(ops.BasicOperation):
    """An op of a user, whose constructor is the declaration."""

    @hyper_parameters
    def __init__(self, scale: Annotated[float, SCALE], *, bias: bool = True, device=None):
        super().__init__()
        self.seen = scale, bias


class Narrow(Declared):
    """Other arguments, the same spec."""

    def __init__(self, scale):
        super().__init__(scale / 2, bias=False)


class Own(Declared):
    """A spec of its own."""

    @hyper_parameters
    def __init__(self, half: float):
        super().__init__(2 * half)


def test_the_arguments_of_a_constructor_are_the_spec():
    op = Declared(3, device="cpu")
    assert (op.seen, op.scale, op.use_bias) == ((3.0, True), 3.0, True)
    assert repr(op.spec) == "DeclaredSpec(scale=3.0, use_bias=True)"
    assert list(inspect.signature(Declared).parameters) == ["scale", "bias", "device"]
    assert Narrow(3).spec == spec_of(Declared)(1.5, use_bias=False)
    assert (Own(1).spec, Own(1).seen) == (spec_of(Own)(1.0), (2.0, True))
    assert copy.deepcopy(op).spec == pickle.loads(pickle.dumps(op.spec)) == op.spec
    op.__init__(1)
    assert op.scale == 1.0
    with pytest.raises(errors.SpecError, match=r"Narrow\.scale: wants a number below 4, got 5"):
        Narrow(10)
    with pytest.raises(TypeError, match=r"Declared.__init__\(\) missing 1 required positional argument: 'scale'"):
        Declared()


def test_a_users_spec_is_checked_by_its_own_declarations():
    assert Mine(3).scale == 3.0
    assert Mine(3, other="anything").other == "anything"
    with pytest.raises(errors.SpecError, match=r"Mine\.scale: wants a number below 4, got 4"):
        Mine(4)
    with pytest.raises(errors.UnknownArgumentError, match="did you mean 'scale'"):
        Mine(scael=4)
    with pytest.raises(errors.SpecError, match="a frozen dataclass"):
        ops.Identity("x")


SPELLINGS = {"normalized_shape": "size"}


def yaml(value):
    """A value as a file writes it; None for one that no file can."""
    if type(value) is tuple:
        return str(list(value))
    if type(value) is float:
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}.get(str(value), f"{value:.2e}")
    return {str: repr, bool: lambda v: str(v).lower(), int: str}.get(type(value), lambda v: None)(value)


def finding(kind, key, text):
    """What is found in a file with one op whose ``key`` is ``text``, and what is underlined there."""
    rest = {SPELLINGS.get(name, name): value for name, value in REQUIRED.get(kind, {}).items()}
    given = ", ".join(f"{name}: {text if name == key else yaml(value)}" for name, value in ({key: None} | rest).items())
    with pytest.raises(errors.ConfigError) as caught:
        loads(f"version: 1\nrecipe: {{kind: none}}\npipeline: {{ops: [\n{{op: {kind}, {given}}}]}}\n", "f.yaml")
    (found,) = caught.value.findings
    column = found.span.column - 1
    return found, found.source[column : column + found.span.width]


@pytest.mark.parametrize(("kind", "field"), [pair for pair in FIELDS if pair[1] not in IN_CODE], ids=lambda v: v)
def test_a_file_gives_the_same_finding_with_its_place(kind, field):
    domain, key = domains(spec_of(ops.OPS[kind]))[field], SPELLINGS.get(field, argument(field))
    texts = [text for wrong in WRONG[type_of(kind, field)] if (text := yaml(wrong)) is not None and len(text) < 100]
    assert len(texts) >= 3
    for text in texts:
        found, under = finding(kind, key, text)
        wanted = domain.wanted.replace("None", "null").replace("True", "true").replace("False", "false")
        assert (found.code, under) == ("bad-value", text)
        assert found.message.startswith(f"{key} wants {wanted}, got "), found.message


def test_a_bias_that_no_op_would_add_is_refused():
    class Whole(ops.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight, self.bias)

    given = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(errors.SpecError, match=r"bias: wants None, for bias=False, got a parameter \(4,\)"):
        ops.Linear(8, 4, bias=False).bias = given
    for linear in (ops.Linear(8, 4), Whole(8, 4, bias=False)):
        linear.bias = None
        linear.bias = given
        x = torch.ones(2, 8)
        torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, linear.weight, given))
