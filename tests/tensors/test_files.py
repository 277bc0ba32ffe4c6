"""Quantized tensors in safetensors, plane by plane: every format, every way into a model, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import QuantizedTensorError, RecipeError
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.quantizers import GroupedQuantizer, MXFP8Quantizer
from tests.tensors.quantized_samples import QUANTIZERS, Blocks64, make, planes, same_bytes, values

pytestmark = [pytest.mark.cpu, pytest.mark.row("H28")]

SAMPLES = {kind: lambda kind=kind: make(kind) for kind in QUANTIZERS} | {
    "rows alone": lambda: MXFP8Quantizer(columnwise=False)(values()),
    "columns alone": lambda: MXFP8Quantizer(rowwise=False)(values()),
    "three dimensions": lambda: make("nvfp4", (2, 32, 64)),
    "flat": lambda: make("mxfp8").view(-1),
    "no rows": lambda: make("current", (0, 32)),
    "a group": lambda: GroupedQuantizer((MXFP8Quantizer(),) * 2)(values((2, 32, 96))),
    "a padded group": lambda: GroupedQuantizer((MXFP8Quantizer(),) * 2, (10, 20), padded=True)(values((30, 96))),
}


def through(state):
    """A state dict after a file of safetensors has held it."""
    import safetensors.torch as st  # with libraries that only the tests of a CPU need

    return st.load(st.save(opfuse.to_planes(state)))


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_tensor_comes_back_bit_for_bit(kind):
    t = SAMPLES[kind]()
    found = opfuse.from_planes(through({"0.weight": t, "0.bias": torch.ones(2)}))
    assert found.keys() == {"0.weight", "0.bias"}
    twin = found["0.weight"]
    assert type(twin) is QuantizedTensor
    assert same_bytes(planes(twin), planes(t))
    assert (twin.shape, twin.dtype, twin.signature, twin.quantizer) == (t.shape, t.dtype, t.signature, t.quantizer)
    assert twin.record.nbytes == t.record.nbytes
    assert torch.equal(twin.dequantize(), t.dequantize())
    if kind != "columns alone":
        twin.detach().copy_(values(twin.shape, seed=1).float())
        t.copy_(values(t.shape, seed=1).float())
        assert same_bytes(planes(twin), planes(t))


def test_names_of_planes():
    def names(t):
        return list(opfuse.to_planes({"w": t}))

    rows, columns = ["w.rowwise.data", "w.rowwise.scale"], ["w.columnwise.data", "w.columnwise.scale"]
    assert names(make("mxfp8")) == [*rows, *columns, "w.planes"]
    assert names(make("nvfp4")) == [*rows, "w.rowwise.amax", *columns, "w.planes"]
    assert names(make("identity")) == ["w.rowwise.data", "w.planes"]
    assert "w.columnwise.members.1.scale" in names(SAMPLES["a group"]())


def test_other_entries_are_left_alone():
    state = {"a": torch.ones(2), "b": 3, "c.planes": torch.zeros(9, dtype=torch.uint8), "d.planes": torch.ones(2)}
    assert opfuse.to_planes(state) == state
    assert opfuse.from_planes(state) == state


def test_a_format_of_ones_own_takes_bytes_and_no_values():
    t = Blocks64()(values())
    twin = opfuse.from_planes(through({"w": t}))["w"]
    assert twin.quantizer is None
    assert same_bytes(planes(twin), planes(t))
    assert torch.equal(twin.dequantize(), t.dequantize())


def test_a_shard_is_refused():
    shard = torch.ones(2)
    shard._local_tensor = make("mxfp8")
    with pytest.raises(QuantizedTensorError, match=r"to_planes w: wants a whole tensor.*full_tensor"):
        opfuse.to_planes({"w": shard})


# -- models ------------------------------------------------------------------------------------------------------------------

FIELDS = {"fp8_current": {}, "fp8_block": {}, "mxfp8": {}, "nvfp4": {"disable_rht": True}, "delayed": {}}
RECIPES = {kind: recipes.recipe_of(kind, fields) for kind, fields in FIELDS.items()}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def stored(recipe, make=lambda: ops.Sequential(ops.Linear(128, 128), ops.GELU())):
    with opfuse.quantized_model_init(recipe=recipe):
        return make()


def output(model, recipe):
    torch.manual_seed(1)
    with opfuse.autocast(recipe=recipe):
        return model(torch.randn(128, 128, requires_grad=True))


@pytest.mark.few(apart=True)
@every_recipe
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_model_loads_its_planes(recipe, assign):
    model, fresh = stored(recipe), stored(recipe)
    output(model, recipe).sum().backward()
    parameter = fresh[0].weight
    fresh.load_state_dict(through(model.state_dict()), assign=assign)
    assert (fresh[0].weight is parameter) is not assign
    assert isinstance(fresh[0].weight, QuantizedTensor)
    assert same_bytes(planes(fresh[0].weight), planes(model[0].weight))
    assert fresh[0].weight.quantizer == model[0].weight.quantizer
    assert torch.equal(output(fresh, recipe), output(model, recipe))


def test_a_model_on_the_meta_device_takes_its_planes_over():
    recipe = RECIPES["mxfp8"]
    model = stored(recipe)
    with torch.device("meta"):
        fresh = stored(recipe)
    fresh.load_state_dict(through(model.state_dict()), assign=True)
    assert torch.equal(output(fresh, recipe), output(model, recipe))


@every_recipe
def test_plain_modules_get_the_values(recipe):
    model = stored(recipe)
    state = through(model.state_dict())
    weight = model[0].weight.dequantize()
    for fresh, given in (
        (ops.Sequential(ops.Linear(128, 128)), state),
        (nn.Sequential(nn.Linear(128, 128)), opfuse.from_planes(state)),
        (nn.Sequential(nn.Linear(128, 128)), opfuse.plain_state_dict(state)),
        (nn.Sequential(nn.Linear(128, 128)), model.state_dict()),
    ):
        fresh.load_state_dict(given)
        assert type(fresh[0].weight.data) is torch.Tensor
        assert torch.equal(fresh[0].weight, weight)


def test_a_plain_state_dict_has_high_precision_and_no_states():
    model = stored(RECIPES["delayed"])
    output(model, RECIPES["delayed"]).sum().backward()
    assert any("delayed_scaling" in name for name in model.state_dict())
    plain = opfuse.plain_state_dict(model.state_dict())
    assert {name: type(value) for name, value in plain.items()} == {"0.weight": torch.Tensor, "0.bias": torch.Tensor}
    nn.Sequential(nn.Linear(128, 128)).load_state_dict(plain, assign=True)


FORMS = {"apart": {}, "one": {"single_grouped_weight": True}}


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
def test_weights_of_groups_load_whichever_way_they_are_held(saved, loaded):
    recipe = RECIPES["mxfp8"]
    model, fresh = (stored(recipe, lambda form=form: ops.GroupedLinear(2, 64, 64, **FORMS[form])) for form in (saved, loaded))
    state = through(model.state_dict())
    fresh.load_state_dict(state)
    both = [[each.parameter(name).dequantize().view(-1, 64) for name in each.weight_names] for each in (model, fresh)]
    assert torch.equal(*map(torch.cat, both))
    if saved == loaded == "one":
        assert isinstance(fresh.weight.rowwise, GroupedPlane)
        assert same_bytes(planes(fresh.weight), planes(model.weight))


# -- under another recipe ----------------------------------------------------------------------------------------------------


@pytest.mark.row("U06")
@pytest.mark.parametrize(
    ("old", "new"), [("delayed", "mxfp8"), ("nvfp4", "fp8_current"), ("mxfp8", "nvfp4"), ("fp8_block", "mxfp8")]
)
def test_a_weight_of_another_recipe_is_converted_or_refused(old, new):
    """Copied, the values are cast as the parameter is; assigned, the recipe of a call says what it does with such a weight."""
    recipe, source = RECIPES[new], stored(RECIPES[old])
    state = through(source.state_dict())
    copied, assigned = stored(recipe), stored(recipe)
    before = copied[0].weight.quantizer
    copied.load_state_dict(state)
    assert copied[0].weight.quantizer == before
    assert same_bytes(planes(copied[0].weight), planes(before(source[0].weight.dequantize())))
    assigned.load_state_dict(state, assign=True)
    with pytest.raises(RecipeError, match="on_recipe_change"):
        output(assigned, recipe)
    plain = ops.Sequential(ops.Linear(128, 128), ops.GELU())
    plain.load_state_dict(state)
    assert torch.equal(output(assigned, recipe.replace(on_recipe_change="dequantize")), output(plain, recipe))


# -- what is refused ---------------------------------------------------------------------------------------------------------


def said(state, change):
    """The state dict with another text, which has no checksum: what it says is looked at as well."""
    text = json.loads(bytes(state["w.planes"].tolist()))
    text.pop("crc32", None)
    change(text)
    state["w.planes"] = torch.frombuffer(bytearray(json.dumps(text).encode()), dtype=torch.uint8)


def put(*path):
    """Another value in the text, at a path."""

    def change(text):
        *first, last, value = path
        for name in first:
            text = text[name]
        text[last] = value

    return lambda state: said(state, change)


BAD = {
    "no data": lambda state: state.pop("w.rowwise.data"),
    "no scale": lambda state: state.pop("w.columnwise.scale"),
    "no tensor": lambda state: state.update({"w.rowwise.data": None}),
    "fewer rows": lambda state: state.update({"w.rowwise.data": state["w.rowwise.data"][1:]}),
    "fewer scales": lambda state: state.update({"w.rowwise.scale": state["w.rowwise.scale"][:1]}),
    "another dtype": lambda state: state.update({"w.rowwise.scale": state["w.rowwise.scale"].float()}),
    "half a text": lambda state: state.update({"w.planes": state["w.planes"][:-9]}),
    "another version": put("opfuse", 2),
    "another shape": put("record", "shape", [64, 97]),
    "more rows than there are": put("record", "shape", [65, 96]),
    "a shape of planes": put("record", "rowwise", "shape", [2**40, 96]),
    "a negative shape": put("record", "rowwise", "shape", [-64, -96]),
    "a shape of halves": put("record", "rowwise", "shape", [64.0, 96.0]),
    "the other direction": put("record", "rowwise", "usage", "columnwise"),
    "no plane": put("record", "rowwise", 3),
    "no record": put("record", None),
    "no format": put("record", "rowwise", "format", "mxfp8_e4m3"),
    "an unknown family": put("record", "rowwise", "format", "family", "mx2"),
    "an unknown type": put("record", "rowwise", "type", "Module"),
    "a type of Python": put("record", "dtype", {"type": "dtype", "name": "load"}),
    "an unknown field": put("record", "rowwise", "rows", 3),
    "no quantizer": put("quantizer", {"type": "dtype", "name": "uint8"}),
    "a bad quantizer": put("quantizer", "fp8_dtype", "uint8"),
}


@pytest.mark.parametrize("kind", BAD)
def test_planes_that_are_no_whole_record_are_refused(kind):
    state = opfuse.to_planes({"w": make("mxfp8")})
    said(state, lambda text: None)
    assert opfuse.from_planes(state).keys() == {"w"}  # as files of earlier versions are
    BAD[kind](state)
    before = copy.copy(state)
    with pytest.raises(QuantizedTensorError, match=r"planes of w: wants a whole record, got .*\. Cure: "):
        opfuse.from_planes(state)
    assert state.keys() == before.keys()


@pytest.mark.parametrize("name", ["w.rowwise.data", "w.columnwise.scale", "w.rowwise.amax", "w.planes"])
def test_a_byte_that_changed_is_refused(name):
    """Of the text, a digit of the largest number: another one, which is as good."""
    state = opfuse.from_planes(through({"w": make("mxfp8" if "amax" not in name else "nvfp4")}))
    state = {key: value.clone() for key, value in opfuse.to_planes(state).items()}
    at = bytes(state["w.planes"].tolist()).index(b"448.0") if name == "w.planes" else 0
    state[name].view(-1).view(torch.uint8)[at] ^= 1
    with pytest.raises(QuantizedTensorError, match=r"planes of w: wants a whole record, got \w+: damaged data"):
        opfuse.from_planes(state)


def test_arrays_without_their_text_are_refused():
    state = opfuse.to_planes({"w": SAMPLES["a group"](), "v": make("mxfp8")})
    state["w.plales"] = state.pop("w.planes")
    with pytest.raises(
        QuantizedTensorError, match=r"planes of w: wants a whole record, got w\.rowwise\.members\.0\.data without"
    ):
        opfuse.from_planes(state)


def test_an_array_too_many_is_unexpected():
    model = stored(RECIPES["mxfp8"])
    state = through(model.state_dict()) | {"0.weight.rowwise.amax": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.weight\.rowwise\.amax"):
        model.load_state_dict(state)
