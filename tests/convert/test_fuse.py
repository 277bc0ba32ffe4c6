"""A converted module computes what it computed, keeps its parameters and state dict, and can be given back."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.convert.converted import converted
from opfuse.convert.weights import joined
from opfuse.errors import ConversionError, DtypeError, OpfuseWarning, PipelineError, SavedTensorError, UnsupportedError
from opfuse.recipes import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from opfuse.recipes.availability import Support, support
from opfuse.runtime.compile.saved_call import saved_calls
from opfuse.tensors.quantizers import IdentityQuantizer
from opfuse.tensors.tensor import QuantizedTensor
from tests.convert.blocks import Attention, GatedMLP, HalvesMLP, Layer, Model, Residual, TransposedMLP
from tests.plans import plans_used

FP8 = Float8CurrentScaling()


def nothing_quantized(role):
    return IdentityQuantizer()


EXACT = CustomRecipe(qfactory=nothing_quantized)
"""Pipelines run under it, and cast nothing."""

MAY_RUN_PLAIN = pytest.mark.filterwarnings("ignore:.*a call that its pipeline is not for:opfuse.errors.OpfuseWarning")
"""For tests of calls that run the module's own forward, which a warning says."""


def sequential():
    return nn.Sequential(
        nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(approximate="tanh"), nn.Sequential(nn.Linear(64, 32), nn.ReLU())
    )


BLOCKS = {
    "LayerNorm → Linear → GELU → Linear → ReLU": sequential,
    "Linear×2 → SwiGLU → Linear": GatedMLP,
    "Linear×2 → GEGLU → Linear": lambda: GatedMLP(bias=True, act=nn.GELU(approximate="tanh")),
    "Linear → SwiGLU → Linear": HalvesMLP,
    "Linear → GELU → Linear": TransposedMLP,
    "Linear → GELUErf": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU()),
    "Linear → AddExtraInput → LayerNorm": Residual,
    "Linear": lambda: nn.Linear(32, 48),
}


def called(model, inputs):
    """The output and all gradients of one call."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = model(*inputs)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [y.detach(), *[x.grad for x in inputs], *grads]


def converted_exactly(model, run):
    """The report of converting ``model``. ``run()``, what one call of it gives, stays what it was.

    Bit for bit without a recipe and after ``unfuse_``; to the last digits of fp64 where pipelines compute it and cast nothing.
    """
    before = run()
    report = opfuse.fuse_(model)
    assert all(map(torch.equal, run(), before))
    with opfuse.autocast(recipe=EXACT):
        for _ in range(3):
            for one, other in zip(run(), before):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    opfuse.unfuse_(model)
    assert all(map(torch.equal, run(), before))
    return report


def inputs_of(model, dtype=torch.float32):
    count = 2 if isinstance(model, Residual) else 1
    return [torch.randn(4, 8, 32, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("became", BLOCKS)
def test_a_block_becomes_one_pipeline_and_computes_the_same(became):
    """Bitwise without a recipe, and under one that casts nothing as exactly as fp64 sums allow."""
    model = BLOCKS[became]().double()
    given = inputs_of(model, torch.float64)
    before = called(model, given)
    report = opfuse.fuse_(model)
    assert report.fused[""] == became
    assert report.share == 1
    assert all(map(torch.equal, called(model, given), before))
    with opfuse.autocast(recipe=EXACT), plans_used() as plans:
        for _ in range(3):  # interpreted, recorded, repeated
            got = called(model, given)
            for one, other in zip(got, before):
                torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert len(plans) == 3
    opfuse.unfuse_(model)
    assert all(map(torch.equal, called(model, given), before))


def test_a_gated_mlp_is_the_pipeline_one_would_write():
    mlp, x = GatedMLP(), [torch.randn(32, 32)]
    own = ops.Sequential(ops.Linear(32, 128, bias=False), ops.SwiGLU(), ops.Linear(64, 32, bias=False))
    with torch.no_grad():
        own[0].weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        own[2].weight.copy_(mlp.down_proj.weight)
    with opfuse.autocast(recipe=FP8):
        y, dx, both, down = called(own, x)
    opfuse.fuse_(mlp, FP8)
    for _ in range(3):
        assert all(map(torch.equal, called(mlp, x), [y, dx, *both.chunk(2), down]))


def test_parameters_names_and_state_dict_stay():
    model = Model()
    keys, values = [*model.state_dict()], [p.clone() for p in model.state_dict().values()]
    named, modules = dict(model.named_parameters()), dict(model.named_modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    opfuse.fuse_(model, FP8)
    assert [*model.state_dict()] == keys
    assert all(map(torch.equal, model.state_dict().values(), values))
    assert all(named[name] is parameter for name, parameter in model.named_parameters())
    assert all(modules[name] is module for name, module in model.named_modules())
    words = torch.randint(0, 48, (2, 16))
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1).flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1
    plain = Model()
    plain.load_state_dict(model.state_dict(), strict=True)
    opfuse.unfuse_(model)
    assert torch.equal(model(words), plain(words))


def test_the_report_tells_of_every_module_with_parameters():
    report = opfuse.fuse_(Model(), MXFP8BlockScaling())
    assert report.counts == {"Linear×3": 2, "Linear": 2, "Linear×2 → SwiGLU → Linear": 2}
    assert {entry.path: entry.status for entry in report.entries if entry.status != "fused"} == {
        "": "parts",
        "embed": "kept",
        "layers.0.first": "kept",
        "layers.0.second": "kept",
        "layers.0.attention": "parts",
        "layers.0.attention.k": "joined",
        "layers.0.attention.v": "joined",
        "layers.1.first": "kept",
        "layers.1.second": "kept",
        "layers.1.attention": "parts",
        "layers.1.attention.k": "joined",
        "layers.1.attention.v": "joined",
        "lm_head": "kept",
    }
    assert report["lm_head"].why == (
        "lm_head is not converted: a matrix tied to an embedding stays in high precision by default. "
        "To convert it, pass policy={'lm_head': 'default'}."
    )
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert report.share == matrices / (matrices + 48 * 32)
    text, page = str(report), report._repr_html_()
    for told in (
        "layers.*.mlp ×2",
        "Linear×2 → SwiGLU → Linear",
        "MXFP8BlockScaling",
        "6 fused, 4 joined, 3 parts, 6 kept, 0 refused",
    ):
        assert told in text
        assert told in page


def test_the_recipe_lives_in_the_module_and_a_region_counts_instead():
    model, x = GatedMLP(), torch.randn(32, 32)
    plain = model(x)
    opfuse.fuse_(model, FP8)
    with plans_used() as plans:
        own = model(x)
        with opfuse.autocast(recipe=MXFP8BlockScaling()):
            other = model(x)
        with opfuse.autocast(enabled=False):
            assert torch.equal(model(x), plain)
    assert [plan.key.env.recipe for plan in plans] == [FP8, MXFP8BlockScaling()]
    assert not torch.equal(own, plain)
    assert not torch.equal(own, other)


@pytest.mark.few
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", [FP8, DelayedScaling(amax_history_len=2), None], ids=["current", "delayed", "ambient"])
def test_checkpoints_recompute_what_was_computed(recipe, reentrant):
    """Also where the region of the forward pass is over in the backward pass."""
    torch.manual_seed(0)
    models = [GatedMLP(), GatedMLP()]
    models[1].load_state_dict(models[0].state_dict())
    runs = [lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=reentrant)]
    found = []
    for model, run in zip(models, runs):
        opfuse.fuse_(model, recipe)
        for scale in (1.0, 3.0, 0.5):
            x = (scale * torch.linspace(-1, 1, 1024).view(32, 32)).requires_grad_()
            if recipe is None:
                with opfuse.autocast(recipe=FP8):
                    y = run(model, x)
            else:
                y = run(model, x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]])
            model.zero_grad()
    for plain, again in zip(found[:3], found[3:]):
        assert all(map(torch.equal, plain, again))


def test_copies_and_pickles_are_converted_and_their_own():
    model, x = Model(), torch.randint(0, 48, (2, 16))
    opfuse.fuse_(model, DelayedScaling(amax_history_len=2))
    model(x).sum().backward()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = model(x)
    for twin in twins:
        assert torch.equal(twin(x), expected)
        mlp = twin.layers[0].mlp
        assert converted(mlp).module is mlp
        assert mlp.forward.__func__ is model.layers[0].mlp.forward.__func__  # of which dynamo makes one graph
        with torch.no_grad():
            mlp.down_proj.weight.zero_()
        assert not torch.equal(twin(x), expected)
        assert "forward" not in vars(opfuse.unfuse_(twin).layers[0].mlp)


def test_dropouts_draw_what_they_drew():
    """In training the module's own forward runs around converted products; in evaluation the pipeline."""
    model, x = TransposedMLP(p=0.5), torch.randn(4, 8, 32)
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, EXACT)
    for train in (True, False, True):
        found, states = [], []
        for each in (model.train(train), plain.train(train)):
            torch.manual_seed(0)
            found.append(each(x))
            states.append(torch.get_rng_state())
        assert torch.equal(found[0] == 0, found[1] == 0)
        assert torch.equal(*states)
        torch.testing.assert_close(*found)
    with plans_used() as plans:
        model(x)
    assert len(plans) == 2


def test_under_torch_autocast_fp32_parameters_are_multiplied_in_bf16():
    model, x = GatedMLP(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model.gate_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling(disable_rht=True)], ids=["mxfp8", "nvfp4"])
def test_rows_that_fill_no_block_are_filled_with_zeros(recipe):
    """As by hand: the rows of zeros add nothing to any gradient. Where no gradient is wanted, none are added."""
    model, x = GatedMLP(bias=True), torch.randn(2, 17, 32)
    opfuse.fuse_(model, recipe)
    got = called(model, [x])
    own = nn.functional.pad(x.view(34, 32), (0, 0, 0, -34 % 32))
    own.requires_grad_()
    y = model(own)
    dy = torch.linspace(-1, 1, got[0].numel()).view(34, 32)
    y.backward(nn.functional.pad(dy, (0, 0, 0, -34 % 32)))
    wanted = [y[:34].view(2, 17, 32), own.grad[:34].view(2, 17, 32), *[p.grad for p in model.parameters()]]
    if isinstance(recipe, MXFP8BlockScaling):  # NVFP4 fills to 16, and rounds gradients at random
        assert all(map(torch.equal, got, wanted))
    assert torch.equal(got[0], wanted[0])
    with torch.no_grad():
        assert model(x[:1, :1]).shape == (1, 1, 32)


def test_packed_weights_are_not_copied_and_stay_parameters():
    """The same bits as with copies, before and after an optimizer's step, and after the memory was parted again."""
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    parameters = [*models[1].parameters()]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    opfuse.fuse_(models[0], FP8)
    opfuse.fuse_(models[1], FP8, pack=True)
    words = torch.randint(0, 48, (2, 16))
    for step in range(4):
        if step == 3:
            models[1].double().float()
        for model, optimizer in zip(models, optimizers):
            model(words).square().sum().backward()
            optimizer.step()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        assert all(map(torch.equal, (p.grad for p in models[0].parameters()), (p.grad for p in models[1].parameters())))
        gate, up = (getattr(models[1].layers[0].mlp, name).weight for name in ("gate_proj", "up_proj"))
        assert (joined([gate, up]).data_ptr() == gate.data_ptr()) is (step < 3)
        for module, first, last in ((models[1].layers[0].mlp, "gate_proj", "up_proj"), (models[1].layers[0].attention, "q", "v")):
            places = [getattr(module, name).weight.untyped_storage().data_ptr() for name in (first, last)]
            assert (len(set(places)) == 1) is (step < 3)
    assert all(one is other for one, other in zip(parameters, models[1].parameters()))


def test_what_a_call_copies_of_weights_is_not_saved():
    """By default casts of weights are made anew; of weights that a call copies to join them, the cast is saved."""

    def saved(keep: str | None, *, pack: bool) -> int:
        torch.manual_seed(0)
        model, found = GatedMLP(), {}
        opfuse.fuse_(model, FP8.replace(keep=keep), pack=pack)
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep_size(tensor: torch.Tensor) -> torch.Tensor:
            parts = tensor.held.tensors() if isinstance(tensor, QuantizedTensor) else [tensor]
            found.update({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts})
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep_size, lambda tensor: tensor):
            model(torch.randn(32, 32, requires_grad=True))
        return sum(size for place, size in found.items() if place not in own)

    joined_elements, down = 2 * GatedMLP().up_proj.weight.numel(), GatedMLP().down_proj.weight.numel()
    every = saved("all", pack=False)
    assert every == saved("all", pack=True)
    assert every - saved(None, pack=False) == down  # a byte each; in place of the scale, the amax it follows from
    assert every - saved(None, pack=True) == joined_elements + down


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_packed_weight_that_changes_before_the_backward_pass_is_noticed(name, trained):
    """Parts of one memory count their writes by themselves, frozen or not."""
    model, x = GatedMLP().requires_grad_(trained), torch.randn(32, 32, requires_grad=True)
    opfuse.fuse_(model, FP8.replace(backward_override="high_precision"), pack=True)
    y = model(x)
    with torch.no_grad():
        model.get_submodule(name).weight.add_(1)
    with pytest.raises(SavedTensorError, match="as the forward pass left"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)  # which reads the weights, and asks for no gradient of theirs
    with pytest.raises(SavedTensorError, match="as the forward pass left"):
        y.sum().backward()


def test_threads_do_not_take_each_others_tensors():
    """What a norm has handed on, and what a shared product has computed."""
    layer, x, other = Layer(), torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    opfuse.fuse_(layer, FP8)
    normed, columns = layer.mlp(layer.second(x)), [getattr(layer.attention, name)(x) for name in "qkv"]
    assert not torch.equal(normed, layer.mlp(x))
    handed, query = layer.second(x), layer.attention.q(x)
    thread = threading.Thread(target=layer, args=(other,))
    thread.start()
    thread.join()
    found = [query, layer.attention.k(x), layer.attention.v(x)]
    assert all(map(torch.equal, found, columns))
    assert torch.equal(layer.mlp(handed), normed)


def test_frozen_and_inference_calls():
    model, x = GatedMLP(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    model.gate_proj.weight.requires_grad_(False)
    model(x).sum().backward()
    assert model.gate_proj.weight.grad is None
    assert model.up_proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


# -- which modules ---------------------------------------------------------------------------------------------------------------


def test_a_filter_leaves_modules_alone():
    report = opfuse.fuse_(Model(), FP8, filter_fn=lambda module, path: not path.endswith("down_proj"))
    assert report["layers.0.mlp"].status == "parts"
    assert report["layers.0.mlp.gate_proj"].became == "Linear×2"
    assert report["layers.0.mlp.down_proj"].status == "kept"
    report = opfuse.fuse_(Model(), FP8, filter_fn=lambda module, path: isinstance(module, nn.Linear))
    assert report.counts == {"Linear": 14}


def test_a_policy_gives_recipes_by_pattern_or_function():
    model, words = Model(), torch.randint(0, 48, (2, 16))
    mx = MXFP8BlockScaling()
    report = opfuse.fuse_(model, FP8, policy={"layers.1": None, "*.mlp": mx, "lm_head": FP8})
    assert report["layers.1.mlp"].status == "parts"
    assert report["layers.1.mlp.gate_proj"].got == "your policy leaves it alone ('layers.1': None)"
    assert report["layers.0.mlp"].recipe == "MXFP8BlockScaling"
    with plans_used() as plans:
        model(words)
    assert [type(plan.key.env.recipe).__name__ for plan in plans] == 2 * ["Float8CurrentScaling"] + [
        "MXFP8BlockScaling",
        "Float8CurrentScaling",
    ]
    report = opfuse.fuse_(model, FP8, policy=lambda module, path: None if path.startswith("layers.0.") else "default")
    assert {path.split(".")[1] for path in report.fused} == {"1"}


def test_a_policy_that_parts_a_chain_leaves_it_in_parts():
    report = opfuse.fuse_(GatedMLP(), FP8, policy={"down_proj": MXFP8BlockScaling()})
    assert report[""].status == "parts"
    assert report["down_proj"].recipe == "MXFP8BlockScaling"
    assert report.counts == {"Linear×2": 1, "Linear": 1}


def test_sizes_that_a_recipe_cannot_take_are_told_at_once():
    model = nn.Sequential(nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 32))
    report = opfuse.fuse_(nn.ModuleList([model, nn.Linear(32, 32)]), MXFP8BlockScaling())
    assert report.fused == {"1": "Linear"}
    assert "sizes divisible by 32 for MXFP8BlockScaling, got 40 output features. Cure: give it other" in report["0.0"].why
    assert "wants sizes divisible by 32 for MXFP8BlockScaling, got 40 output features; give it other sizes" in str(report)
    assert report["0.0"].cure.endswith("policy={'0.0': recipes.Float8CurrentScaling()}")
    assert opfuse.fuse_(model, MXFP8BlockScaling(), policy={"0": Float8CurrentScaling()})["0"].recipe == "Float8CurrentScaling"
    assert model(torch.randn(3, 32)).shape == (3, 32)


def test_parameters_in_fp64_are_left_alone_by_recipes_that_cannot_cast_them():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32).double())
    report = opfuse.fuse_(model, FP8)
    assert report.fused == {"0": "Linear"}
    assert report["2"].why.endswith("torch.float16, got torch.float64. Cure: call model.to(torch.float32) before fuse_.")
    with pytest.raises(ConversionError, match=r"got torch.float64. Cure: call model.to\(torch.float32\) before fuse_"):
        opfuse.fuse_(nn.Linear(32, 32).double(), FP8)
    later = nn.Linear(32, 32)
    opfuse.fuse_(later, FP8)
    later.double()
    with pytest.raises(DtypeError, match=r"got torch.float64, .* Cure: call model.to\(torch.float32\)\.$"):
        later(torch.randn(32, 32).double())


def test_what_hooks_would_miss_is_called_as_it_is():
    model, seen = GatedMLP(), []
    model.up_proj.register_forward_hook(lambda *_: seen.append(1))
    report = opfuse.fuse_(model, FP8)
    assert report.counts == {"Linear": 3}
    assert seen == []
    model(torch.randn(32, 32))
    assert seen == [1]


def test_hooks_that_come_later_are_told_once():
    model, x = GatedMLP(), torch.randn(32, 32)
    opfuse.fuse_(model, FP8)
    model.up_proj.register_forward_hook(lambda *_: None)
    with pytest.warns(OpfuseWarning, match="up_proj has changed since fuse_: a hook was added to a module that is fused"):
        model(x)
    model(x)


def test_hooks_of_all_modules_that_come_later_are_told_once():
    model, x, seen = GatedMLP(), torch.randn(32, 32), []
    opfuse.fuse_(model, FP8)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with pytest.warns(OpfuseWarning, match="GatedMLP has changed since fuse_: hooks for all modules were registered"):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(x)
    finally:
        hook.remove()
    children = [model.gate_proj, model.act_fn, model.up_proj, model.down_proj]
    assert seen == 2 * [*children, model]


def test_a_matrix_that_nobody_calls_is_not_said_to_be_fused():
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
    report = opfuse.fuse_(model, FP8)
    assert report["1.self_attn.out_proj"].status == "refused"
    assert report["1.self_attn"].status == "kept"
    assert "reads without calling" in report["1.self_attn.out_proj"].why
    assert report["1.linear1"].status == "fused"
    assert model(torch.randn(2, 16, 32)).shape == (2, 16, 32)


class Mish(ops.Activation):
    math = ops.formula("mish_of_a_model", lambda x: x * x.softplus().tanh())


def test_an_activation_of_ones_own_is_an_op_of_the_pipeline():
    """Written as docs/ops.md does, it stands in a torch model as any activation does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), Mish(), nn.Linear(64, 32))
    pipeline = ops.Sequential(ops.Linear(32, 64), Mish(), ops.Linear(64, 32))
    pipeline.load_state_dict(model.state_dict())
    x = torch.randn(16, 32)
    assert opfuse.fuse_(model, FP8).fused == {"": "Linear → Mish → Linear"}
    with opfuse.autocast(recipe=FP8):
        assert torch.equal(model(x), pipeline(x))
    assert any(
        "mish" in name for each in opfuse.explain(model, x).outcomes("forward") if each.status == "fused" for name in each.ops
    )


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return x @ self.weight


class Twice(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


OTHERS = {
    "a linear layer with a forward of its own": (Twice(32, 32), "refused", "a Twice, whose forward computes something else"),
    "other matrices": (
        nn.Bilinear(4, 4, 4),
        "kept",
        "opfuse has no op for a Bilinear, whose forward uses its own weight and bias",
    ),
    "a cell": (nn.RNNCell(4, 4, bias=False), "kept", "opfuse has no op for an RNNCell, whose forward uses its own weight_ih and"),
    "a table": (nn.EmbeddingBag(4, 4), "kept", "an embedding is a table lookup, with nothing to multiply"),
    "half a norm": (nn.LayerNorm(32, bias=False), "kept", "a norm of 32 columns; norms run as ops from 1024 on"),
    "a factor": (nn.PReLU(4), "kept", "it has no matrix to multiply with"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_why_a_module_is_not_converted_is_what_keeps_it(name):
    module, status, got = OTHERS[name]
    report = opfuse.fuse_(nn.ModuleList([module, nn.Linear(32, 32)]), FP8)
    assert report["0"].status == status
    assert report["0"].got.startswith(got)
    assert (report[""].wanted, report[""].got) == ("a forward", "none")


def test_what_cannot_be_converted_is_kept_where_that_is_asked_for():
    model = nn.ModuleDict({"first": Twice(32, 32), "gate": Table(), "experts": nn.Linear(32, 32)})
    assert opfuse.fuse_(model, FP8)["gate"].got == "a router stays in high precision by default"
    report = opfuse.fuse_(model, FP8, policy={"first": None, "gate": "default"})
    assert (report["first"].status, report["first"].got) == ("kept", "your policy leaves it alone ('first': None)")
    assert report.fused["gate"] == "Linear"
    del model["experts"]
    assert opfuse.fuse_(model, FP8).fused == {"gate": "Linear"}  # without experts beside it a gate is no router
    report = opfuse.fuse_(model, FP8, filter_fn=lambda module, path: path != "first")
    assert (report["first"].status, report["first"].got) == ("kept", "filter_fn returned False for it")


def test_fusing_again_starts_anew():
    model = Model()
    first = opfuse.fuse_(model, FP8)
    assert opfuse.fuse_(model, FP8) == first
    own = {path: converted(module) for path, module in model.named_modules()}
    with pytest.raises(
        ConversionError, match=r"patterns that match a module with weights, got 'layer.0'; did you mean 'layers.0"
    ):
        opfuse.fuse_(model, FP8, policy={"layer.0": None})
    assert {path: converted(module) for path, module in model.named_modules()} == own


def test_errors_say_what_to_do():
    with pytest.raises(ConversionError, match=r"wants a model with layers to convert, got a ReLU without any"):
        opfuse.fuse_(nn.ReLU())
    with pytest.raises(ConversionError, match=r"got a Linear without any; filter_fn returned False for it. Cure: return True"):
        opfuse.fuse_(nn.Linear(4, 4), filter_fn=lambda *_: False)
    with pytest.raises(ConversionError, match=r"got a Conv2d without any. Cure: pass a model with linear layers"):
        opfuse.fuse_(nn.Conv2d(3, 3, 3))
    with pytest.raises(
        ConversionError, match=r"fuse_ policy '0': wants a recipe, None or 'default', got 'none'. Cure: None leaves"
    ):
        opfuse.fuse_(nn.Sequential(nn.Linear(16, 16)), FP8, policy={"0": "none"})
    with pytest.raises(ConversionError, match=r"wants an nn.Module, got str"):
        opfuse.fuse_("model")
    with pytest.raises(ConversionError, match=r"call opfuse.fuse_ first"):
        opfuse.unfuse_(nn.Linear(4, 4))


def test_wrong_arguments_are_refused_by_the_forward_that_it_was():
    model = Residual()
    opfuse.fuse_(model, FP8)
    x = torch.randn(2, 32)
    assert torch.equal(model(hidden=x, residual=x), model(x, x))
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'residual'"):
        model(x)


def test_a_layer_around_it_is_explained():
    model = Layer()
    opfuse.fuse_(model, FP8)
    with opfuse.autocast(recipe=FP8):
        text = str(opfuse.explain(model, torch.randn(32, 32, requires_grad=True)))
    assert "swiglu" in text
    assert "mlp" in text


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    assert saved_calls() == 0


def trained(calls, inputs, recipe):
    """What three calls of each give, under a recipe that may keep state."""
    found = []
    for call in calls:
        torch.manual_seed(1)
        found.append([])
        for i in range(3):
            with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                found[-1] += called(call, [x * (1 + i) for x in inputs])
    return found


@pytest.mark.cpu
@pytest.mark.row("H26")
@pytest.mark.parametrize("make", [pytest.param(GatedMLP, marks=pytest.mark.slow), TransposedMLP, Residual, Layer])
def test_converted_modules_are_ops_of_one_graph(make, dynamo):
    """The products of one tensor are one op: bit for bit what runs without a compiler. A ``Layer`` holds a ``GatedMLP``.

    Without a recipe a sum of gradients inside of an op comes before one outside: it may differ in its last digit.
    """
    model = make()
    inputs = inputs_of(model)
    opfuse.fuse_(model)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for recipe in (FP8, DelayedScaling(amax_history_len=2)):
        assert all(map(torch.equal, *trained([compiled, other], inputs, recipe))), recipe
    for one, two in zip(*trained([compiled, other], inputs, None)):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    assert dynamo["stats"]["unique_graphs"] == 1
    assert not dynamo["graph_break"]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.cpu
def test_a_checkpoint_around_a_compiled_module_and_then_changes_of_it(dynamo):
    """Of a packed weight before the backward pass, and of a submodule, for which the op looks again."""
    model = GatedMLP()
    inputs = inputs_of(model)
    opfuse.fuse_(model, pack=True)
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, *trained([Checkpointed(compiled), other], inputs, FP8)))
    with opfuse.autocast(recipe=FP8.replace(backward_override="high_precision")):
        y = compiled(*inputs)
    with torch.no_grad():
        model.up_proj.weight.mul_(1)
    with pytest.raises(SavedTensorError, match="as the forward pass left"):
        y.sum().backward()
    model.requires_grad_(False)
    with opfuse.autocast(recipe=FP8.replace(backward_override="high_precision")):
        y = compiled(inputs[0].requires_grad_())
    with torch.no_grad():
        model.up_proj.weight.mul_(2)
    with pytest.raises(SavedTensorError, match="as the forward pass left"):
        y.sum().backward()
    model.down_proj = nn.Linear(64, 32, bias=False)
    with pytest.raises((ConversionError, UnsupportedError)), opfuse.autocast(recipe=FP8):
        compiled(*inputs)


@pytest.mark.cpu
def test_layers_of_a_converted_model_share_a_graph_and_copies_have_their_own(dynamo):
    """A change of what the graph was made of is seen: the call is traced anew, with the module's own forward."""
    layers = nn.Sequential(*[Layer() for _ in range(2)])
    opfuse.fuse_(layers, FP8)
    other = copy.deepcopy(layers)
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, *trained([layers, other], [torch.randn(2, 16, 32)], FP8)))
    assert dynamo["stats"]["unique_graphs"] == 1
    twin, x = copy.deepcopy(other), torch.randn(2, 16, 32)
    with torch.no_grad():
        twin[0].mlp.down_proj.weight.zero_()
        calls = [torch.compile(each, backend="eager", fullgraph=True) for each in (twin, other)]
        assert torch.equal(calls[0](x), twin(x))
        assert not torch.equal(calls[1](x), twin(x))
        for model in (layers, other):
            model[1].mlp.down_proj.bias = nn.Parameter(torch.ones(32))
            with pytest.warns(OpfuseWarning, match="parameters"):
                found = model(x)
        assert torch.equal(layers(x), found)


def test_an_explanation_names_the_recipes_of_converted_modules(monkeypatch):
    """They hold where no region is active; an active one counts instead."""
    model, x = Model(), torch.randint(0, 48, (2, 16))
    opfuse.fuse_(model, FP8)
    found = opfuse.explain(model, x)
    assert (found.recipe, found.backend) == (repr(FP8), support(FP8).status)
    opfuse.fuse_(model, FP8, policy={"*.mlp": DelayedScaling()})
    assert {*opfuse.explain(model, x).recipe.split(" and ")} == {repr(FP8), repr(DelayedScaling())}
    status = {"delayed": "native", FP8.kind: "emulated"}
    monkeypatch.setattr("opfuse.inspect.explain.support", lambda recipe: Support(status[recipe.kind], ""))
    for _ in range(2):
        found = opfuse.explain(model, x, overrides=True)
        assert (found.backend, found.saved_by_override) == ("emulated", {})  # of one of them; overrides are a recipe's
        status = {kind: "emulated" if told == "native" else "native" for kind, told in status.items()}
    monkeypatch.undo()
    with opfuse.autocast(recipe=EXACT):
        assert opfuse.explain(model, x).recipe == repr(EXACT)


class Shouting(nn.Linear):
    """Prints what it wants to."""

    def __init__(self):
        super().__init__(32, 32)
        self.extra_repr = shout


def shout():
    return "LOUD"


class Wordy(nn.Linear):
    """Says what it is on two lines."""

    def extra_repr(self):
        return "one line\nand another"


def test_print_shows_what_a_module_runs_as():
    """Until it is changed, and no more after unfuse_; copies show it as well, but for shallow ones, which run plain."""
    model = nn.Sequential(Attention(), nn.Linear(32, 32), Shouting())
    before = repr(model)
    with pytest.raises(ConversionError, match=r"report: wants modules that fuse_ has converted, got none in a Sequential"):
        opfuse.report(model)
    given = opfuse.fuse_(model, FP8)
    shown = repr(model)
    assert "(q): Linear(in_features=32, out_features=32, bias=True, opfuse: Linear×3, Float8CurrentScaling)" in shown
    assert "(v): Linear(in_features=32, out_features=32, bias=True, opfuse: in q, Float8CurrentScaling)" in shown
    assert "(2): Shouting(LOUD)" in shown
    assert repr(copy.deepcopy(model)) == repr(pickle.loads(pickle.dumps(model))) == shown
    with pytest.warns(OpfuseWarning, match="a shallow copy"):
        assert repr(copy.copy(model[1])) == "Linear(in_features=32, out_features=32, bias=True)"
    assert str(opfuse.report(model)) == str(given)
    model[0].q.in_features = 31
    assert "out_features=32, bias=True, opfuse: its own forward)" in repr(model[0].q)
    assert repr(opfuse.unfuse_(model)) == before.replace("in_features=32", "in_features=31", 1)


def test_print_shows_what_a_part_of_a_pipeline_is_in():
    """Each below what its class says; what an unconverted module says is as it was."""
    model = nn.ModuleList([GatedMLP(), nn.Sequential(Wordy(32, 32), nn.GELU()), Wordy(32, 32)])
    before = repr(model)
    opfuse.fuse_(model, FP8)
    shown = repr(model)
    assert "(0): GatedMLP(\n    opfuse: Linear×2 → SwiGLU → Linear, Float8CurrentScaling\n    (gate_proj): Linear(" in shown
    assert shown.count("bias=False, opfuse: in GatedMLP, Float8CurrentScaling)") == 3
    assert "Wordy(\n      one line\n      and another\n      opfuse: in Sequential, Float8CurrentScaling\n    )" in shown
    assert "(2): Wordy(\n    one line\n    and another\n    opfuse: Linear, Float8CurrentScaling\n  )" in shown
    assert "(act_fn): SiLU()" in shown
    model[0].act_fn = nn.ReLU()
    assert "(0): GatedMLP(\n    opfuse: its own forward\n" in repr(model)
    model[0].act_fn = nn.SiLU()
    assert repr(opfuse.unfuse_(model)) == before


def test_a_report_of_a_part_of_a_pipeline_says_what_it_is_in():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(32, 32), nn.GELU()), "a0": nn.Linear(32, 16)})
    opfuse.fuse_(model, FP8)
    (line,) = opfuse.report(model["a"][0])
    assert (line.path, line.kind, line.status, line.became) == ("", "Linear", "joined", "in Sequential")
    assert opfuse.report(model["a"]).fused == {"": "Linear → GELUErf"}  # and nothing of a0, whose path begins alike
    assert len(opfuse.report(model["a"])) == 1


class Choosing(nn.Module):
    """A mixture as far as a report is concerned: its gate stands beside experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList([GatedMLP()])


def test_lines_of_layers_that_say_the_same_of_their_own_paths_are_one():
    """Its cure can be typed as it stands: a star in a policy is any layer."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Choosing() for _ in range(3)]), "norms": nn.ModuleList()})
    model["norms"].extend([nn.RMSNorm(32), nn.RMSNorm(64)])
    given = opfuse.fuse_(model, FP8)
    lines = [line.split("  ")[0] for line in str(given).splitlines()]
    assert lines[2:6] == ["layers.*.gate ×3", "layers.*.experts.* ×3", "norms.0", "norms.1"]
    cure = "policy={'layers.*.gate': 'default'}"
    assert cure in str(given)
    assert cure in str(opfuse.report(model["layers"]))
    assert cure.replace("*", "1") in str(opfuse.report(model["layers"][1]))
    assert cure.replace("*", "1") in given["layers.1.gate"].why
    assert opfuse.fuse_(model, FP8, policy={"layers.*.gate": "default"}).counts["Linear"] == 3


def test_inference_is_under_the_recipe_as_the_report_says_once():
    """The same numbers as in training; the original ones inside of a region that is not enabled. No warning tells of it."""
    model, x = GatedMLP(), torch.randn(16, 32)
    plain = model(x)
    told = str(opfuse.fuse_(model))
    assert "eval()" not in told  # no recipe outside of autocast: the original numbers
    told = str(opfuse.fuse_(model, FP8))
    footer = told.splitlines()[-1]
    assert "eval() and generate()" in footer
    assert told.count("eval()") == 1
    trained = model(x)
    model.eval()
    with torch.inference_mode():
        assert torch.equal(model(x), trained)
        assert not torch.equal(trained, plain)
        with opfuse.autocast(enabled=False):
            assert torch.equal(model(x), plain)
    assert "opfuse.autocast(enabled=False)" in footer


def test_a_report_at_any_time_is_of_the_model_as_it_is_now():
    """Whole or a part of it, with what was changed since; a copy has a report of its own."""
    model = nn.ModuleDict({"first": Layer(), "second": Layer(), "norm": nn.LayerNorm(32)})
    given = opfuse.fuse_(model, FP8, policy={"second.mlp": None})
    part = opfuse.report(model["second"])
    assert [(entry.path, entry.status, entry.got) for entry in part] == [
        (entry.path.removeprefix("second").removeprefix("."), entry.status, entry.got)
        for entry in given
        if entry.path.startswith("second")
    ]
    changed = next(entry.path for entry in given if entry.path.startswith("first.") and entry.status == "fused")
    other = copy.deepcopy(model)
    model.get_submodule(changed).register_parameter("more", nn.Parameter(torch.zeros(1)))
    now = opfuse.report(model)
    assert now[changed].status == "kept"
    assert "more" in now[changed].got
    assert "call opfuse.fuse_ again" in now[changed].cure
    assert [entry for entry in now if entry.path != changed] == [entry for entry in given if entry.path != changed]
    assert opfuse.report(other)[changed].status == "fused"
    opfuse.fuse_(model, FP8)
    assert len(opfuse.report(model).of("fused")) >= len(given.of("fused"))


def test_a_report_of_a_model_that_is_converted_in_parts_says_what_each_module_is():
    """Also of parts in parts, of parts that were unfused, and of what nobody has converted, whose weights count."""
    model = nn.ModuleDict({"first": Layer(), "second": Layer(), "embed": nn.Embedding(8, 32), "head": nn.Linear(32, 64)})
    given = opfuse.fuse_(model["first"], FP8)
    now = opfuse.report(model)
    assert now.fused == {f"first.{path}": became for path, became in given.fused.items()}
    assert [line.status for line in given] == [line.status for line in now if line.path.startswith("first.")]
    assert {line.path for line in now if line.got.startswith("it is outside")} == {
        name for name, part in model.named_modules() if name.startswith(("second", "head")) and isinstance(part, nn.Linear)
    }
    fused, total = (sum(p.numel() for p in part.parameters() if p.dim() > 1) for part in (model["first"], model))
    assert now.share == pytest.approx(fused / (total - model["embed"].weight.numel()))

    whole = opfuse.fuse_(model, FP8, policy={"head": "default"})
    assert str(opfuse.report(model)) == str(whole)
    opfuse.fuse_(model["second"].mlp, EXACT)
    now = opfuse.report(model)
    assert now["second.mlp"].recipe == type(EXACT).__name__
    assert now["first.mlp"].recipe == type(FP8).__name__
    assert [line.path for line in now] == [line.path for line in whole]

    opfuse.unfuse_(model["head"])
    assert opfuse.report(model)["head"].got == "it was put there after fuse_, or unfuse_ was called on it"
    assert opfuse.report(model).share < now.share


def test_a_report_has_the_parts_of_a_pipeline_that_run_by_themselves_since_a_change():
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    opfuse.fuse_(model, FP8)
    assert [line.path for line in opfuse.report(model)] == [""]
    model[1].register_forward_hook(lambda *_: None)
    whole, *parts = opfuse.report(model)
    assert (whole.status, whole.weights) == ("kept", 0)
    assert [(line.path, line.status, line.became, line.recipe) for line in parts] == [
        (path, "fused", "Linear", type(FP8).__name__) for path in ("0", "2")
    ]
    assert opfuse.report(model).share == 1.0


def test_a_call_of_a_converted_model_without_a_recipe_is_not_taken_for_one_that_is_not_converted():
    model, x = nn.Sequential(nn.Linear(64, 96), nn.GELU()), torch.randn(32, 64)
    opfuse.fuse_(model, FP8)
    for ask in (opfuse.explain, opfuse.saved):
        with opfuse.autocast(enabled=False), pytest.raises(PipelineError, match=r"a converted Sequential .* no recipe is active"):
            ask(model, x)


def test_a_report_of_modules_that_were_moved_says_what_they_are():
    model = nn.ModuleList([GatedMLP(), GatedMLP()])
    opfuse.fuse_(model, FP8)
    other = nn.ModuleDict({"layers": nn.ModuleList([model[1]]), "more": nn.Linear(32, 32)})
    now = opfuse.report(other)
    assert now.fused == {"layers.0": "Linear×2 → SwiGLU → Linear"}
    assert now["more"].status == "kept"


def test_an_input_that_torch_copies_may_be_written_to_before_the_backward_pass():
    """Rows that cannot be viewed as a matrix: ``linear`` keeps a copy of them. Of others both keep the tensor itself."""
    plain = torch.nn.Linear(32, 32)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    for each in (plain, model):
        x = torch.ones(4, 2, 32).transpose(0, 1)
        y = each(x)
        x.mul_(2)
        y.sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    for each in (plain, model):
        x = torch.ones(4, 2, 32)
        y = each(x)
        x.mul_(2)
        with pytest.raises(Exception, match=r"modified by an inplace operation|changed in place since"):
            y.sum().backward()
