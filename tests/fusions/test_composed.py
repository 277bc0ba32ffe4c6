"""R4 over whole pipelines: all built-in rules at once against no rule, bit for bit, on models and on random compositions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opfuse.fusions import RULES
from tests.compiler.harness import CASES, UNFUSED, Step, differences, outcome, recipe_for, run
from tests.compiler.pipelines import BLOCKS, COMPOSED, pipeline
from tests.turns import in_turn

FIRES = {
    "mlp": {"epilogue"},
    "swiglu mlp": {"epilogue"},
    "residual": {"epilogue", "backward_add_rms_norm"},
    "residual in place": {"epilogue", "linear_add", "backward_linear_add"},
    "dropout": {"epilogue"},
    "scaled activation": {"epilogue", "backward_linear_scale"},
    "scaled residual": {"linear_scale_add", "backward_linear_scale"},
    "two taps": {"backward_add_rms_norm", "backward_linear_add", "epilogue"},
    "explicit casts": {"epilogue"},
}


DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.few(2, apart=True)
@pytest.mark.row("B21")
@pytest.mark.parametrize(("composed", "name", "override", "dtype"), in_turn(COMPOSED, CASES, DTYPES, of=3 * len(DTYPES)))
def test_r4_composed_pipelines(composed, name, override, dtype):
    made = COMPOSED[composed]()
    model, tensors, recipe = made.model(dtype), made.tensors(dtype), recipe_for(name, override, dtype=dtype)
    fused, unfused = (run(model, *tensors, step=Step(recipe, rules, steps=2)) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    fired = {rule for plan in fused.plans for rule in plan.fusions}
    assert fired >= FIRES[composed]
    assert not any(plan.fusions for plan in unfused.plans)


@given(
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=2, max_size=8),
    case=st.sampled_from(CASES),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    frozen=st.sets(st.integers(0, 7)),
    grads=st.tuples(st.booleans(), st.frozensets(st.integers(0, 2), max_size=2)),
)
@settings(max_examples=60)
def test_r4_random_pipelines(blocks, case, dtype, frozen, grads):
    """frozen: parameters that want no gradient. grads: whether the input wants one, and the outputs that get none."""
    made = pipeline(blocks)
    model, tensors = made.model(dtype), made.tensors(dtype)
    for i, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(i not in frozen)
    input_grad, silent = grads
    step = Step(recipe_for(*case, dtype=dtype), input_grad=input_grad, silent=silent)
    fused, unfused = (run(model, *tensors, step=step.with_rules(rules)) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []


@given(
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=2, max_size=6),
    case=st.sampled_from(CASES),
    dtypes=st.tuples(*[st.sampled_from((torch.bfloat16, torch.float16, torch.float32))] * 2),
    autocast=st.sampled_from((None, torch.bfloat16, torch.float16)),
    leading=st.sampled_from(((64,), (2, 16), (2, 2, 8), (33,), (1,), (0,))),
)
@example(["l2 norm", "linear"], ("delayed", None), (torch.float16, torch.bfloat16), None, (64,))
@example(["quantize gradient", "add"], ("delayed", None), (torch.bfloat16, torch.bfloat16), torch.float16, (64,))
@example(["add", "linear"], ("fp8_block", None), (torch.bfloat16, torch.bfloat16), None, (0,))
@settings(max_examples=50)
def test_r4_random_dtypes_and_shapes(blocks, case, dtypes, autocast, leading):
    """Inputs and parameters of different dtypes, torch.autocast, ragged and empty shapes: equal tensors, or the same error."""
    made = pipeline(blocks)
    model, tensors = made.model(dtypes[0]), made.tensors(dtypes[1], leading=leading)
    step = Step(recipe_for(*case))
    with torch.autocast(torch.get_default_device().type, autocast, enabled=autocast is not None):
        fused, unfused = (outcome(lambda r=rules: run(model, *tensors, step=step.with_rules(r))) for rules in (RULES, UNFUSED))
    failed = isinstance(fused, str) or isinstance(unfused, str)
    assert fused == unfused if failed else not differences(fused.tensors, unfused.tensors)
