"""Normalisations on a device: casts in the same kernel against the two kernels, rows in any batch, what the rules launch."""

import pytest
import torch

from opfuse import ops
from opfuse.compiler.registry import RuleSet
from opfuse.fusions import RULES
from opfuse.kernels.casts.encoding import RecordingScale
from opfuse.kernels.engine import registry
from opfuse.kernels.norms.cast import norm_cast
from opfuse.kernels.norms.norm import norm_backward, norm_forward
from opfuse.numerics.norm import norm_forward as definition
from tests.compiler.harness import UNFUSED, Step, differences, recipe_for, run, to
from tests.kernels.cases import norms

BF16, FP32 = torch.bfloat16, torch.float32
each_kind = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "l2_normalization"])


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(left, right):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("case", norms.CAST)
def test_r4_cast_in_the_kernel_equals_the_cast_of_its_result(case, device):
    """Codes and scales, the statistics, and the amax that a cast records."""
    (x, norm, encode), options = norms.CAST[case](device)
    amax = encode.amax.clone() if isinstance(encode, RecordingScale) else None
    encoded, statistics = norm_cast(x, norm, encode, **options)
    recorded = None if amax is None else encode.amax.clone()
    if amax is not None:
        encode.amax.copy_(amax)
    y, wanted = norm_forward(x, norm, **options)
    assert same([t for plane in encoded for t in plane], [t for plane in encode(y) for t in plane])
    assert same([t for t in statistics if t is not None], [t for t in wanted if t is not None])
    if amax is not None:
        assert same([recorded], [encode.amax])
        assert (recorded >= y.abs().max()).all() or y.isnan().any()


@each_kind
@pytest.mark.parametrize("columns", [40, 1000, 1032, 8192, 20000])
def test_a_row_is_the_same_in_any_batch(kind, columns, device):
    (dy, x, norm, statistics), _ = norms.Rows(kind, (70, columns)).backward(None, device)
    y, _ = norm_forward(x, norm)
    dx = norm_backward(dy, x, norm, statistics).x
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70)):
        part, of_part = norm_forward(x[rows].clone(), norm)
        assert same([part, of_part.rstd], [y[rows], statistics.rstd[rows]])
        assert same([norm_backward(dy[rows].clone(), x[rows].clone(), norm, of_part).x], [dx[rows]])


@each_kind
def test_r11_fifty_runs_give_the_same_bits(kind, device):
    arguments, options = norms.Rows(kind, (3000, 2048)).backward("per_op", device)
    first = [t for t in norm_backward(*arguments, **options) if t is not None]
    assert all(same([t for t in norm_backward(*arguments, **options) if t is not None], first) for _ in range(50))


def test_what_a_kernel_cannot_take_goes_to_the_definition(device):
    x, weight = torch.randn(5, 64, device=device), torch.ones(64, device=device, dtype=torch.float64)
    norm = norms.Norm("rms_norm", weight)
    assert torch.equal(norm_forward(x, norm)[0], definition(x, norm)[0])
    assert norm_forward(x.double(), norm)[0].dtype == torch.float64


@pytest.fixture
def launched(monkeypatch):
    """Sources and definitions of the kernels that were queued."""
    seen, launch = [], registry.launch

    def record(variant, *args, **kwargs):
        seen.append((variant.source, *variant.defines))
        launch(variant, *args, **kwargs)

    monkeypatch.setattr(registry, "launch", record)
    return seen


def step(make, rules, recipe, device):
    torch.manual_seed(0)
    model = make()
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    return run(to(model, BF16).to(device), x.to(device), step=Step(recipe, rules, steps=2))


CASTS = {
    "delayed": "CAST=Recording",
    "fp8_row": "CAST=RowScaled",
    "fp8_block": "CAST=Blocks",
    "mxfp8": "CAST=Microscaled",
    "fp8_current": "MEASURES=1",
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_r4_a_norm_and_its_cast_are_one_kernel(norm, name, device, launched):
    """Without a weight gradient there is nothing to cast by columns. Outputs, gradients, saved state as without the rule."""

    def model():
        made = ops.Sequential(norm(256), ops.Linear(256, 256))
        made[1].weight.requires_grad_(False)
        return made

    recipe = recipe_for(name)
    unfused = step(model, UNFUSED, recipe, device)
    assert not any(CASTS[name] in each for each in launched)
    fused = step(model, RuleSet(tuple(rule for rule in RULES.rules if rule.name == "epilogue")), recipe, device)
    assert fused.outcomes("epilogue")[0].status == "fused"
    assert any(CASTS[name] in each for each in launched)
    assert differences(fused.tensors, unfused.tensors) == []


@pytest.mark.parametrize("name", ["fp8_row", "fp8_block", "mxfp8"])
def test_r4_an_override_that_saves_the_original_stores_and_casts_it_in_the_norm(name, device, launched):
    def model():
        return ops.Sequential(ops.RMSNorm(256), ops.Linear(256, 256))

    recipe = recipe_for(name, "high_precision", keep="all")  # by default the norm's result is made anew, not stored
    unfused, fused = (step(model, rules, recipe, device) for rules in (UNFUSED, RULES))
    assert differences(fused.tensors, unfused.tensors) == []
    assert any({CASTS[name], "STORES=1"} <= {*each} for each in launched)


@pytest.mark.parametrize("name", ["none", "delayed", "fp8_current", "fp8_row", "fp8_block", "mxfp8"])
def test_r4_all_rules_around_a_norm(name, device, launched):
    def model():
        return ops.Sequential(
            ops.MakeExtraOutput(), ops.RMSNorm(256), ops.Linear(256, 512), ops.SwiGLU(), ops.LayerNorm(256), ops.Linear(256, 256)
        )

    recipe = recipe_for(name)
    fused, unfused = (step(model, rules, recipe, device) for rules in (RULES, UNFUSED))
    assert differences(fused.tensors, unfused.tensors) == []
    assert any(each[0] == "norm_backward.cu" and "ADD=1" in each for each in launched)
