"""Weights that live quantized stay the parameters they are: when they are moved, and when they are given values anew."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning, ShapeError
from opfuse.tensors import QuantizedTensor

KINDS = ("fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed")
FORMS = {
    "linear": ops.Linear,
    "basic linear": ops.BasicLinear,
    "grouped": lambda *sizes, **options: ops.GroupedLinear(2, *sizes, **options),
    "grouped single": lambda *sizes, **options: ops.GroupedLinear(2, *sizes, single_grouped_weight=True, **options),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_form = pytest.mark.parametrize("form", FORMS)


def stored(form: str = "linear", kind: str = "mxfp8", *, preserve: bool = True, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    recipe = recipes.recipe_of(kind, {})
    with opfuse.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return FORMS[form](128, 128, dtype=torch.bfloat16, **options)


def weights(layer: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in layer.named_parameters() if isinstance(p, QuantizedTensor)}


def planes(layer: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for weight in weights(layer).values() for tensor in weight.record.tensors()]


# -- Module.to and its kin ---------------------------------------------------------------------------------------------------

MOVES = {
    "to nothing": lambda layer: layer.to(torch.get_default_device()),
    "to the same dtype": lambda layer: layer.to(torch.bfloat16),
    "cpu": lambda layer: layer.cpu(),
    "cuda": lambda layer: layer.cuda(),
    "there and back": lambda layer: layer.cpu().to(torch.get_default_device()),
    "float": lambda layer: layer.float(),
    "half": lambda layer: layer.half(),
    "to a dtype": lambda layer: layer.to(torch.float32),
    "share_memory": lambda layer: layer.share_memory(),
}


@pytest.mark.parametrize("move", MOVES)
@every_form
def test_a_moved_parameter_keeps_its_bytes_its_attributes_its_gradient_and_its_hooks(form, move):
    if move == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    layer = ops.Sequential(stored(form))
    found, before, preserved = weights(layer), planes(layer), {}
    references = [weakref.ref(p) for p in found.values()]
    seen: list[str] = []
    for name, p in found.items():
        p.main_grad, p.tag = torch.ones(3), name
        p.grad = torch.ones(p.shape, dtype=p.dtype)
        preserved[name] = p.get_high_precision_init_val()
        p.register_hook(lambda grad, name=name: seen.append(f"{name} hook"))
        p.register_post_accumulate_grad_hook(lambda p: seen.append(f"{p.tag} accumulated"))
    grads = {name: p.grad for name, p in found.items()}
    MOVES[move](layer)
    assert all(weights(layer)[name] is p for name, p in found.items())
    assert [reference() is not None for reference in references] == [True] * len(found)
    for name, p in found.items():
        assert (p.tag, p.main_grad.tolist()) == (name, [1.0] * 3)
        assert p.get_high_precision_init_val() is preserved[name]
        assert p.grad is grads[name]
        assert (p.grad.dtype, p.grad.device) == (p.dtype, p.device)
        assert {tensor.device for tensor in p.record.tensors()} == {p.device}
        p.grad = None
        p.dequantize().sum().backward()
        assert torch.equal(p.grad, torch.ones_like(p.grad))
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(planes(layer), before, strict=True))
    assert sorted(seen) == sorted(f"{name} {what}" for name in found for what in ("hook", "accumulated"))


def test_a_moved_parameter_is_that_of_the_graph_that_waits_for_its_backward_pass():
    """torch swaps tensors of a subclass, and poisons the gradient node of the old one."""
    layer, x = stored(), torch.randn(32, 128, dtype=torch.bfloat16)
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):
        y = layer(x)
    layer.cpu().to(torch.get_default_device())
    y.sum().backward()
    assert layer.weight.grad.any()


@every_form
def test_to_the_meta_device_and_back_the_parameter_stays(form):
    layer = stored(form)
    found, seen = weights(layer), []
    for name, p in found.items():
        p.tag = name
        p.register_hook(lambda grad: seen.append(grad.shape))
    for move in (lambda: layer.to("meta"), lambda: layer.to_empty(device="cpu")):
        move()
        assert all(weights(layer)[name] is p and p.tag == name for name, p in found.items())
        assert {t.device for p in found.values() for t in p.record.tensors()} == {next(iter(found.values())).device}
    layer.reset_parameters()
    for p in found.values():
        p.dequantize().sum().backward()
    assert seen == [p.shape for p in found.values()]


def test_a_change_that_fails_leaves_the_parameters_where_they_were():
    layer = stored()
    before = dict(layer._parameters)

    def fail(tensor):
        if tensor is layer.bias:
            raise RuntimeError("no memory")
        return tensor.to(torch.float32)

    with pytest.raises(RuntimeError, match="no memory"):
        layer._apply(fail)
    assert list(layer._parameters.items()) == list(before.items())


# -- reset_parameters --------------------------------------------------------------------------------------------------------


@every_kind
@every_form
def test_reset_parameters_writes_in_place(form, kind):
    """So an optimizer that was built before steps on what the layer computes with."""
    layer, fresh = stored(form, kind), stored(form, kind)
    found = dict(layer.named_parameters())
    with torch.no_grad():
        for p in found.values():
            p.fill_(5.0)
    torch.manual_seed(0)
    layer.reset_parameters()
    assert all(p is found[name] for name, p in layer.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(planes(layer), planes(fresh), strict=True))
    for name, p in weights(layer).items():
        assert torch.equal(p.get_high_precision_init_val(), weights(fresh)[name].get_high_precision_init_val())


@every_form
def test_values_are_those_of_nn_linear_plain_or_quantized(form):
    plain = FORMS[form](128, 128, dtype=torch.bfloat16)
    before = dict(plain.named_parameters())
    torch.manual_seed(0)
    plain.reset_parameters()
    assert all(p is before[name] for name, p in plain.named_parameters())
    torch.manual_seed(0)
    groups = 1 if "linear" in form else 2
    drawn = [nn.Linear(128, 128, bias=False, dtype=torch.bfloat16).weight for _ in range(groups)]
    assert torch.equal(torch.cat([p.view(-1, 128) for name, p in before.items() if "weight" in name]), torch.cat(drawn))
    for name, p in weights(stored(form)).items():
        assert torch.equal(p.get_high_precision_init_val(), before[name].detach().cpu())


@pytest.mark.cpu
def test_a_value_that_was_let_go_is_not_preserved_again():
    layer = stored()
    layer.weight.clear_high_precision_init_val()
    layer.reset_parameters()
    assert layer.weight.get_high_precision_init_val() is None
    copied = copy.deepcopy(stored())
    copied.reset_parameters()
    assert (
        copied.weight.quantizer.quantize(copied.weight.get_high_precision_init_val())
        .dequantize()
        .equal(copied.weight.detach().dequantize())
    )


def test_a_plain_weight_stays_plain_and_tells_so():
    layer = ops.Linear(32, 32)
    with opfuse.quantized_model_init(), pytest.warns(OpfuseWarning, match=r"a plain one, which stays plain\. Cure: build"):
        layer.reset_parameters()
    assert type(layer.weight) is nn.Parameter


# -- the meta device ---------------------------------------------------------------------------------------------------------


@every_kind
@every_form
def test_quantized_on_the_meta_device_and_given_values_later(form, kind):
    layer = stored(form, kind, device="meta")
    assert all(p.is_meta and p.get_high_precision_init_val() is None for p in weights(layer).values())
    assert weights(layer).keys() == weights(stored(form, kind)).keys()
    layer.to_empty(device=torch.get_default_device())
    torch.manual_seed(0)
    layer.reset_parameters()
    fresh = stored(form, kind)
    assert all(torch.equal(a, b) for a, b in zip(planes(layer), planes(fresh), strict=True))
    for name, p in weights(layer).items():
        assert p.quantizer == weights(fresh)[name].quantizer
        assert torch.equal(p.get_high_precision_init_val(), weights(fresh)[name].get_high_precision_init_val())


def test_under_a_device_context_too():
    with torch.device("meta"):
        layer = stored()
    assert layer.weight.is_meta
    assert isinstance(layer.weight, QuantizedTensor)


def test_load_state_dict_with_assign_materialises():
    source, layer = stored(), stored(device="meta")
    layer.load_state_dict(source.state_dict(), assign=True)
    assert all(torch.equal(a, b) for a, b in zip(planes(layer), planes(source), strict=True))


def test_a_shape_that_the_format_cannot_take_is_refused_when_the_op_is_made():
    for device in ("meta", None):
        with opfuse.quantized_model_init(recipe=recipes.MXFP8BlockScaling()), pytest.raises(ShapeError, match="weight"):
            ops.Linear(33, 33, device=device)
