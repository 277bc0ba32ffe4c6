"""``opfuse check --rule``: a rule that is right passes; one that is wrong, raises or never fires is told, and why."""

import json
import sys

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.cli import main
from opfuse.compiler.rules import fusion, is_, is_not
from opfuse.config import rule_trial
from opfuse.config.rule_pipelines import RulePipelines
from opfuse.config.rule_trial import DIFFERENT, EQUAL, IDLE, RAISED, RecipeCase, recipe_cases, rule_at, try_rule
from opfuse.errors import FusionError
from opfuse.fusions import RULES
from opfuse.recipes import RECIPES
from tests.turns import in_turn

PATTERN = "linear=basic_linear scale=constant_scale"
FEW = (RecipeCase("none"), RecipeCase("fp8_current"), RecipeCase("fp8_current", "dequantized"))

RULES_OF_A_USER = """
from opfuse.compiler.rules import fusion, is_, multiple_of
from opfuse.ops import register_fusion

PATTERN = "linear=basic_linear scale=constant_scale"

def scaled(x, *, linear, scale):
    return scale.op.op_forward(scale, linear.op.produce(linear, x))

def twice(x, *, linear, scale):
    return 2 * scaled(x, linear=linear, scale=scale)

RIGHT = fusion("right", PATTERN, when=(multiple_of("linear.out_features", 48), is_("env.recipe", None)), forward=scaled)
TWICE = fusion("twice", PATTERN, forward=twice)
NEVER = fusion("never", PATTERN, when=(is_("env.arch", (99, 0)),), forward=scaled)
"""


def scaled(x, *, linear, scale):
    return scale.op.op_forward(scale, linear.op.produce(linear, x))


def unscaled_gradient(dy, *, linear, quantize, scale):
    grad = dy if quantize is None else quantize.op(dy)
    linear.set_grads(params=(linear.op.weight_gradient(linear, grad),))
    return linear.op.input_gradient(linear, grad)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of a user in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(rule_trial, "recipe_cases", lambda: FEW)
    (tmp_path / "rules_of_mine.py").write_text(RULES_OF_A_USER)
    yield "rules_of_mine"
    sys.modules.pop("rules_of_mine", None)


def statuses(report):
    return [result.status for result in report.results]


def test_every_recipe_and_override_is_tried():
    assert {case.kind for case in recipe_cases()} == {"none", *RECIPES}
    assert [case.override for case in recipe_cases() if case.kind == "mxfp8"] == [None, "dequantized", "high_precision"]
    assert [case.override for case in recipe_cases() if case.kind == "delayed"] == [None]


def test_a_right_rule_passes():
    report = try_rule(fusion("right", PATTERN, when=(is_not("env.recipe", None),), forward=scaled), cases=FEW)
    assert report.ok
    assert statuses(report) == [IDLE, EQUAL, EQUAL]
    assert report.results[0].summary == "not fired: env.recipe: wants a recipe, got None"
    assert min(result.fired for result in report.results[1:]) >= 15  # blocks, tails, no rows, two dtypes, alone and not
    assert report.verdict == "fusion 'right' equals its ops, bit for bit; it fired under 2 of 3 recipes"


@pytest.mark.parametrize(
    "name", in_turn(["linear_add", "backward_linear_add", "dispatch_cast", "backward_groups", "epilogue"], of=3)
)
def test_built_in_rules_pass(name):
    """With extra inputs and outputs, hyper-parameters that guards want, casts beside products and in groups, traits."""
    rule = next(rule for rule in RULES.rules if rule.name == name)
    report = try_rule(rule, cases=[RecipeCase("fp8_block")])
    assert report.ok, report.verdict


def test_twice_the_answer_is_found():
    def twice(x, *, linear, scale):
        return 2 * scaled(x, linear=linear, scale=scale)

    report = try_rule(fusion("twice", PATTERN, forward=twice), cases=FEW)
    assert statuses(report) == [DIFFERENT] * 3
    found = report.results[0].difference
    assert (found.tensor, found.at) == ("the output", (0, 0))
    assert float(found.got) == 2 * float(found.wanted)
    assert found.differing == found.elements == 64 * 64
    assert report.verdict == "fusion 'twice' is wrong under 3 of 3 recipes"


def test_a_wrong_backward_pass_is_found():
    pattern = "linear=basic_linear quantize? scale=constant_scale"
    report = try_rule(fusion("unscaled_gradient", pattern, backward=unscaled_gradient), cases=FEW)
    assert statuses(report) == [DIFFERENT] * 3
    assert report.results[0].difference.tensor == "the gradient of the input"
    assert "the gradient of 0.weight" in report.results[0].difference.others


@pytest.mark.parametrize(("factor", "status"), [(1, EQUAL), (2, DIFFERENT)])
def test_a_rule_for_both_passes_keeps_what_it_likes(factor, status):
    def forward(x, *, act, scale):
        y = scale.op.op_forward(scale, act.op.op_forward(act, x))
        act.save_for_backward(x * 1)
        return y

    def backward(dy, *, act, scale):
        (x,) = act.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            y = torch.nn.functional.relu(leaf)
        grad, _ = scale.op.op_backward(scale, dy)
        return factor * torch.autograd.grad(y, leaf, grad)[0]

    rule = fusion("both", "act=relu scale=constant_scale", forward=forward, backward=backward)
    assert statuses(try_rule(rule, cases=FEW[:2])) == [status] * 2


def test_wrong_planes_that_are_saved_are_found():
    def casts_anew(x, *, linear, scale):
        y = scaled(x, linear=linear, scale=scale)
        saved = linear.saved_state()
        planes = saved["x"].with_tensors([torch.zeros_like(part) for part in saved["x"].tensors()])
        linear.save(**{**saved, "x": planes})
        return y

    for kind in ("mxfp8", "nvfp4", "fp8_block"):
        (result,) = try_rule(fusion("casts_anew", PATTERN, forward=casts_anew), cases=[RecipeCase(kind)]).results
        assert result.status == DIFFERENT
        assert "the gradient of 0.weight" in (result.difference.tensor, *result.difference.others)
        assert any("what 2:basic_linear saved as 'x', " in name for name in result.difference.others)


def test_a_fault_of_tails_alone_is_found():
    def whole_blocks(x, *, linear, scale):
        y = scaled(x, linear=linear, scale=scale)
        y[x.shape[0] // 32 * 32 :] = 0
        return y

    (result,) = try_rule(fusion("whole_blocks", PATTERN, forward=whole_blocks), cases=FEW[:1]).results
    assert result.status == DIFFERENT
    assert "of shape (33, 64)" in result.call
    assert result.difference.at == (32, 0)


def test_a_changed_input_is_found():
    def in_place(x, *, linear, scale):
        return scaled(x.add_(1), linear=linear, scale=scale)

    (result,) = try_rule(fusion("in_place", PATTERN, forward=in_place), cases=FEW[:1]).results
    assert "the input after the call" in result.difference.others


def test_wrong_saved_state_is_found():
    """What a forward rule saves is what the ops' own backward passes read."""

    def saves_twice(x, *, act, scale):
        y = act.op.op_forward(act, x)
        act.save(**{name: value if value is None else 2 * value for name, value in act.saved_state().items()})
        return scale.op.op_forward(scale, y)

    (result,) = try_rule(fusion("saves_twice", "act=gelu scale=constant_scale", forward=saves_twice), cases=FEW[:1]).results
    assert result.status == DIFFERENT
    assert any("what 0:gelu saved as" in name for name in result.difference.others)


def test_a_rule_that_raises_is_told_with_its_line():
    def raises(x, *, linear, scale):
        return linear.op.produce(linear, x) * scale.spec.factor

    report = try_rule(fusion("raises", PATTERN, forward=raises), cases=FEW[:2])
    assert statuses(report) == [RAISED] * 2
    line = raises.__code__.co_firstlineno + 1
    wanted = f"AttributeError: 'ConstantScaleSpec' object has no attribute 'factor' ({__file__}:{line})"
    assert report.results[0].error == wanted
    assert report.faults() == [[*report.results]]


def test_a_rule_that_never_fires_is_told_why():
    report = try_rule(fusion("never", PATTERN, when=(is_("env.rounding", "single"),), forward=scaled), cases=FEW)
    assert not report.ok
    assert statuses(report) == [IDLE] * 3
    got = "none: env.rounding: wants 'single', got 'per_op' (under 3 recipes)"
    assert report.verdict.startswith(f"fusion 'never': wants a call in which it fires, got {got}. Cure: ")


class NeedsText(ops.BasicOperation):
    """An op of a user whose constructor asks for what no trial knows."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def op_forward(self, ctx, input_, **_):
        return input_

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


class MovedBy(ops.PointwiseOperation):
    """An op of a user."""

    math = ops.formula("shifted", lambda x, shift: x + shift, constants=("shift",))

    @opfuse.core.spec.hyper_parameters
    def __init__(self, shift: float) -> None:
        super().__init__()


def test_ops_of_a_user_are_built_or_it_is_told_why_not():
    def shifted(x, *, shift, scale):
        return scale.op.op_forward(scale, shift.op.op_forward(shift, x))

    assert try_rule(fusion("shifted", "shift=moved_by scale=constant_scale", forward=shifted), cases=FEW[:1]).ok
    with pytest.raises(FusionError, match="no value is known for the argument 'text' of NeedsText"):
        try_rule(fusion("text", "shift=needs_text scale=constant_scale", forward=shifted), cases=FEW[:1])


def test_pipelines_fill_leave_out_and_repeat_places():
    rule = next(rule for rule in RULES.rules if rule.name == "linear_add")
    kinds = {tuple(op.kind for op in made.model) for made in RulePipelines(rule, torch.device("cpu")).calls(0)}
    assert ("basic_linear", "bias", "add_extra_input") in kinds
    assert any("bias" not in row for row in kinds)


def test_the_command_and_its_exit_codes(module, capsys):
    assert main(["check", "--rule", f"{module}:NEVER", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rule never (rules_of_mine.py:15), forward: linear=basic_linear scale=constant_scale\n")
    assert "fusion 'never': wants a call in which it fires, got none: env.arch: wants (99, 0), got (0, 0)" in out
    assert main(["check", "--rule", f"{module}:TWICE", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "\nBasicLinear(in_features=64, out_features=64) ConstantScale(scale=0.3) on bfloat16 of shape (64, 64)\n" in out
    assert "  under none: the output at (0, 0) wants " in out
    assert "  the same under every other recipe\n" in out
    assert out.endswith("fusion 'twice' is wrong under 3 of 3 recipes\n")
    assert main(["check", "--rule", f"{module}:RIGHT", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rule"], found["ok"], found["results"][0]["status"]) == ("right", True, EQUAL)
    assert {result["status"] for result in found["results"][1:]} == {IDLE}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere", "wants MODULE:RULE, got 'nowhere'"),
        ("no_such_module:RULE", "wants a module that can be imported, got ModuleNotFoundError"),
        ("rules_of_mine:RIHGT", "wants 'RIHGT' in rules_of_mine, got none; did you mean 'RIGHT'?"),
        ("rules_of_mine:scaled", "wants a fusion rule, got <function scaled"),
    ],
)
def test_what_is_no_rule_is_one_message(module, capsys, name, text):
    assert main(["check", "--rule", name]) == 1
    assert text in capsys.readouterr().err


def test_a_registration_names_its_rule(module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    rule = rule_at(f"{module}:TWICE")
    with opfuse.register_fusion(rule, prepend=True) as registered:
        monkeypatch.setattr(sys.modules[module], "REGISTERED", registered, raising=False)
        assert rule_at(f"{module}:REGISTERED") == rule


@pytest.mark.parametrize("arguments", [[], ["quickstart", "--rule", "m:R"], ["--rule", "m:R", "--format", "github"]])
def test_usage(arguments, capsys):
    assert main(["check", *arguments]) == 2
    assert "Usage" in capsys.readouterr().err
