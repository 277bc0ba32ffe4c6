"""What is legal and probably not meant is told once, with the place."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.errors import OpfuseWarning

MX = recipes.MXFP8BlockScaling()


def told(call):
    """The OpfuseWarnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [warning for warning in found if issubclass(warning.category, OpfuseWarning)]


def test_a_region_in_which_no_op_runs():
    def region(inside, **options):
        with opfuse.autocast(recipe=MX, **options):
            inside()

    def region_of_high_precision(inside):
        with opfuse.autocast(recipe=MX), opfuse.autocast(enabled=False):
            inside()

    model, plain, x = ops.Sequential(ops.Linear(32, 32)), nn.Linear(32, 32), torch.randn(32, 32)
    for _ in range(2):
        assert told(lambda: region(lambda: model(x))) == []
    assert told(lambda: region(lambda: model[0](x))) == []
    assert told(lambda: region(lambda: region(lambda: model(x)))) == []
    assert told(lambda: region(lambda: region(lambda: None) or model(x))) == []
    assert told(lambda: region(lambda: opfuse.explain(model, x))) == []
    assert told(lambda: region(lambda: plain(x), enabled=False)) == []
    assert told(lambda: region(lambda: ops.RMSNorm(32)(x))) == []  # of opfuse, though it has nothing to quantize
    (warning,) = told(lambda: region_of_high_precision(lambda: model(x)))
    assert "wants ops of opfuse that run under the recipe, got none" in str(warning.message)
    (warning,) = told(lambda: region(lambda: plain(x)))
    assert "wants ops of opfuse that run under the recipe, got none" in str(warning.message)
    assert warning.filename == __file__
    lines, first = inspect.getsourcelines(region)
    assert first <= warning.lineno < first + len(lines)
    assert told(lambda: region(lambda: plain(x))) == []


def test_a_decorated_function_in_which_no_op_runs():
    @opfuse.autocast(recipe=MX)
    def nothing():
        pass

    (warning,) = told(nothing)
    assert warning.filename == __file__


def test_a_region_that_raises_is_not_told():
    def region():
        with pytest.raises(ZeroDivisionError), opfuse.autocast(recipe=MX):
            raise ZeroDivisionError

    assert told(region) == []


def test_modules_of_torch_in_a_sequential_under_a_recipe():
    x = torch.randn(32, 32)

    def run(model):
        with opfuse.autocast(recipe=MX):
            model(x)

    forgotten = ops.Sequential(nn.Linear(32, 32), ops.GELU(), nn.Sequential(nn.Linear(32, 32)))
    assert told(lambda: forgotten(x)) == []
    first, *_ = told(lambda: run(forgotten))
    assert "Linear(in_features=32, out_features=32, bias=True), which stays as it is" in str(first.message)
    assert first.filename == __file__
    assert not any("stays as it is" in str(w.message) for w in told(lambda: run(forgotten)))
    assert told(lambda: run(ops.Sequential(ops.Linear(32, 32), nn.Linear(32, 32)))) == []
    assert not any("stays as it is" in str(w.message) for w in told(lambda: run(ops.Sequential(ops.GELU(), nn.Tanh()))))


def test_a_fusion_function_that_changes_nothing():
    def misses(ops_, *, recipe):
        return [op if not isinstance(op, ops.Linear) else ops.FusedOperation(op.basic_ops) for op in ops_]

    def fuses(ops_, *, recipe):
        return [ops.FusedOperation(ops_)] if len(ops_) > 1 else ops_

    model, x = ops.Sequential(ops.Linear(8, 8)), torch.randn(4, 8)
    with ops.register_forward_fusion(misses):
        (warning,) = told(lambda: model(x))
        assert "fusion function 'misses' (" in str(warning.message)
        assert f"{__file__}:{misses.__code__.co_firstlineno}" in str(warning.message)
        assert "none in [BasicLinear(in_features=8, out_features=8), Bias(size=8)]" in str(warning.message)
        assert told(lambda: copy.deepcopy(model)(x[:3])) == []
        assert any(o.rule == "misses" and o.status == "absent" for o in opfuse.explain(model, x).plans[0].outcomes)
    with ops.register_forward_fusion(fuses):
        assert told(lambda: model(x)) == []
        assert told(lambda: ops.GELU()(x)) == []


HOOKS = {
    "register_forward_pre_hook": lambda *_: None,
    "register_forward_hook": lambda *_: None,
    "register_full_backward_pre_hook": lambda *_: None,
    "register_full_backward_hook": lambda *_: None,
}


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_registered_after_the_first_call(register):
    model, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(4, 8)
    model(x)
    (warning,) = told(lambda: getattr(model[1], register)(HOOKS[register]))
    assert "GELU() hooks" in str(warning.message)
    assert warning.filename == __file__
    alone = ops.GELU()
    alone(x)
    assert told(lambda: getattr(alone, register)(HOOKS[register])) == []
    assert told(lambda: getattr(copy.deepcopy(model)[0], register)(HOOKS[register])) == []


def test_a_forward_of_its_own_inside_a_fused_op():
    class Mine(ops.GELU):
        def forward(self, x):
            return 2 * super().forward(x)

    model, x = ops.Sequential(ops.FusedOperation([ops.BasicLinear(8, 8), Mine()])), torch.randn(4, 8)
    (warning,) = told(lambda: model(x))
    assert "a forward of its own, which never runs" in str(warning.message)
    assert told(lambda: model(x[:3])) == []
