"""An Accelerator that is given a recipe converts what it prepares; nothing else of Accelerate changes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import opfuse
from opfuse.errors import ConversionError, OpfuseWarning, ShapeError
from opfuse.recipes import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

accelerate = pytest.importorskip("accelerate", reason="of the extra `test`")

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs  # noqa: E402

from opfuse.convert.accelerate import Accelerator, OpfuseRecipeKwargs  # noqa: E402
from tests.processes import ran  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.integrations.finegrained_fp8 import FP8Linear

RECIPE = Float8CurrentScaling()


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def converted() -> nn.Module:
    other = model()
    opfuse.fuse_(other, RECIPE)
    return other


def x() -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def losses(accelerator: accelerate.Accelerator, module: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module, optimizer = accelerator.prepare(module, optimizer)
    found = []
    for _ in range(3):
        loss = module(x()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_prepare_converts_as_fuse_does_before_it(mixed):
    made, plain, wanted = model(), model(), model()
    accelerator = Accelerator(cpu=True, mixed_precision=mixed, kwargs_handlers=[OpfuseRecipeKwargs(RECIPE)])
    got = losses(accelerator, made)
    opfuse.fuse_(wanted, RECIPE)
    assert got == losses(accelerate.Accelerator(cpu=True, mixed_precision=mixed), wanted)
    assert got != losses(accelerate.Accelerator(cpu=True, mixed_precision=mixed), plain)
    assert all(torch.equal(one, other) for one, other in zip(made.parameters(), wanted.parameters()))
    assert "Linear → GELUErf → Linear" in str(opfuse.report(accelerator.unwrap_model(made, keep_fp32_wrapper=False)))


def test_without_a_handler_it_is_accelerate_s_own():
    made = model()
    assert losses(Accelerator(cpu=True), made) == losses(accelerate.Accelerator(cpu=True), model())
    with pytest.raises(ConversionError):
        opfuse.report(made)


def test_other_handlers_and_the_policy_arrive():
    handlers = [
        AutocastKwargs(cache_enabled=False),
        OpfuseRecipeKwargs(policy={"0": None, "2": MXFP8BlockScaling()}),
        DistributedDataParallelKwargs(bucket_cap_mb=3),
    ]
    accelerator, made = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers), model()
    assert accelerator.autocast_handler is handlers[0]
    assert accelerator.ddp_handler is handlers[2]
    accelerator.prepare_model(made)
    told = {each.path: each for each in opfuse.report(accelerator.unwrap_model(made, keep_fp32_wrapper=False))}
    assert told["0"].status == "kept"
    assert "MXFP8BlockScaling" in str(told["2"])


def test_a_model_that_is_converted_stays_as_it_is():
    made = model()
    before = opfuse.fuse_(made, Float8BlockScaling())
    accelerator = Accelerator(cpu=True, kwargs_handlers=[OpfuseRecipeKwargs(RECIPE)])
    assert accelerator.prepare(accelerator.prepare(made)) is made
    assert str(opfuse.report(made)) == str(before)


@pytest.mark.parametrize("during", [True, False])
def test_evaluation_computes_under_the_recipe_or_not(during):
    handler = OpfuseRecipeKwargs(RECIPE, use_autocast_during_eval=during)
    made = Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(model())
    assert len(made._forward_pre_hooks) == (not during)
    low, high = made(x()), model()(x())
    assert not torch.equal(low, high)
    assert torch.equal(made.eval()(x()), low if during else high)
    with pytest.raises(ShapeError if during else RuntimeError):
        made(torch.randn(3, 5))  # which leaves no region behind
    assert torch.equal(made.train()(x()), low)
    assert torch.equal(converted()(x()), low)  # nor outside of it


@pytest.mark.parametrize("mixed", ["no", "bf16"])
@pytest.mark.parametrize("copied", [False, True])
def test_unfuse_leaves_the_model_as_it_was_and_prepare_converts_it_again(copied, mixed):
    """Also a copy, whose hooks are its own."""
    handler = OpfuseRecipeKwargs(RECIPE, use_autocast_during_eval=False)
    made, accelerator = model(), Accelerator(cpu=True, mixed_precision=mixed, kwargs_handlers=[handler])
    accelerator.prepare(made)
    accelerator.unwrap_model(made, keep_fp32_wrapper=False)
    low = made(x())
    other = copy.deepcopy(made) if copied else made
    opfuse.unfuse_(other)
    assert not other._forward_hooks
    assert not other._forward_pre_hooks
    assert not other._forward_hooks_always_called
    assert len(made._forward_hooks) == copied
    assert torch.equal(other(x()), model()(x()))
    for _ in range(2):
        Accelerator(cpu=True, mixed_precision=mixed, kwargs_handlers=[handler]).prepare(other)
        assert torch.equal(other(x()), low)
        assert len(other._forward_hooks) == 1


def test_what_is_left_of_a_model_that_is_converted_in_part_is_told():
    """Of what the handler would convert."""
    made = nn.ModuleDict({"a": model(), "b": model(), "c": model(), "embed": nn.Embedding(8, 64)})
    opfuse.fuse_(made["a"], Float8BlockScaling())
    handler = OpfuseRecipeKwargs(RECIPE, policy={"c": None, "b": "default"})
    with pytest.warns(
        OpfuseWarning, match=r"prepare of a ModuleDict: it is converted in part.*: 2 modules .*, b\.0 and b\.2\. Cure"
    ):
        Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(made)
    assert opfuse.report(made)["a"].recipe == "Float8BlockScaling"
    opfuse.unfuse_(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OpfuseWarning)
        Accelerator(cpu=True, kwargs_handlers=[handler]).prepare(made)
    assert {*opfuse.report(made).fused} == {"a", "b"}


@pytest.mark.parametrize("place", ["argument", "environment"])
def test_another_library_s_fp8_is_refused(place, monkeypatch):
    """Also where none is installed, of which Accelerate would tell."""
    options = {"mixed_precision": "fp8"} if place == "argument" else {}
    monkeypatch.setattr("accelerate.state.is_fp8_available", lambda: place == "environment")
    if place == "environment":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConversionError, match=r"mixed_precision: wants .*got 'fp8'.*the recipe stands in the handler"):
        Accelerator(cpu=True, kwargs_handlers=[OpfuseRecipeKwargs(RECIPE)], **options)


def test_two_handlers_are_refused():
    with pytest.raises(ConversionError, match="wants one OpfuseRecipeKwargs, got 2"):
        Accelerator(cpu=True, kwargs_handlers=[OpfuseRecipeKwargs(), OpfuseRecipeKwargs()])


def test_an_optimizer_over_parameters_that_are_no_more_is_refused():
    """FP8 matrices of transformers become parameters that are stored quantized; steps over the old ones would change nothing."""
    torch.manual_seed(0)
    linear = FP8Linear(256, 256, block_size=(128, 128), activation_scheme="dynamic")
    linear.weight = nn.Parameter(torch.randn(256, 256).to(torch.float8_e4m3fn), requires_grad=False)
    linear.weight_scale_inv = nn.Parameter(torch.ones(2, 2))
    made = nn.Sequential(linear, nn.Linear(256, 64))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[OpfuseRecipeKwargs(Float8BlockScaling())])
    with pytest.raises(ConversionError, match="call fuse_ before you make the optimizer"):
        accelerator.prepare(made, optimizer)


def test_without_accelerate_the_error_says_what_to_install():
    script = "import sys; sys.modules['accelerate'] = None; import opfuse.convert.accelerate"
    done = ran(script, check=False)
    assert "UnsupportedError: opfuse.convert.accelerate: wants the package accelerate, got none. Cure: pip install" in done.stderr
