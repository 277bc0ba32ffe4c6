"""A pipeline runs for the calls that it was proven for; any other call is the module's own forward, around converted products."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import opfuse
from opfuse.convert.leaves import norm_of
from opfuse.errors import OpfuseWarning
from opfuse.recipes import DelayedScaling, MXFP8BlockScaling
from tests.convert.blocks import Attention, GatedMLP, Residual
from tests.convert.test_fuse import EXACT, FP8, MAY_RUN_PLAIN
from tests.plans import plans_used


def products(plans):
    """How many products ran in how many pipelines."""
    return [sum(name.startswith("BasicLinear") for name in plan.ops) for plan in plans]


CALLS = {
    "as proven": (lambda m, x: m(x, x.clone()), [1]),
    "a residual that broadcasts": (lambda m, x: m(x, x[:1, :1].clone()), [1]),
    "the input as its residual": (lambda m, x: m(x, x), [1]),
    "five dimensions": (lambda m, x: m(x[None, None], x[None, None].clone()), [1]),
    "a residual of another dtype": (lambda m, x: m(x, x.bfloat16()), [1]),
    "no rows": (lambda m, x: m(x[:0], x[:0].clone()), [1]),
    "torch.autocast": (lambda m, x: torch.autocast("cpu", torch.bfloat16)(m)(x, x.clone()), [1]),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_a_pipeline_is_not_for_are_those_of_the_module(name):
    call, counts = CALLS[name]
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 8, 32)
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, EXACT)
    with plans_used() as plans:
        found = call(model, x)
    wanted = call(plain, x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(
        found, wanted, rtol=1e-2 if "autocast" in name else 1e-5, atol=1e-2 if "autocast" in name else 1e-5
    )
    assert products(plans) == counts
    whole = any("LayerNorm" in op for plan in plans for op in plan.ops)
    assert whole == (name == "as proven")


def test_a_block_with_a_vector_of_its_own_is_told_of_once():
    """A layer scale, as in ConvNeXt."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.mlp = nn.Parameter(torch.full((32,), 0.1)), GatedMLP()

        def forward(self, x):
            return x + self.scale * self.mlp(x)

    report = opfuse.fuse_(Scaled(), FP8)
    assert report["mlp"].became == "Linear×2 → SwiGLU → Linear"
    assert [entry.path for entry in report].count("") == 1
    assert "mlp" in report
    assert "other" not in report
    assert len(report) == len(list(report))


class Spelled(nn.Linear):
    """As Falcon writes it."""

    def forward(self, input):
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


def test_a_product_in_other_words_is_a_product():
    model, x = nn.Sequential(Spelled(32, 64), nn.ReLU(), Spelled(64, 32, bias=False)), torch.randn(8, 32)
    wanted = model(x)
    assert opfuse.fuse_(model, EXACT).fused == {"": "Linear → ReLU → Linear"}
    torch.testing.assert_close(model(x), wanted)


class BareNorm(nn.Module):
    """Divides by the root mean square, without an eps, and calls its parameter as JAX does."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.scale


def test_padding_adds_nothing_behind_a_norm_without_eps():
    """Rows of zeros would be divided by 0: NaN in the gradient of the norm's parameter."""
    torch.manual_seed(0)
    model, x = nn.Sequential(BareNorm(), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(5, 32, requires_grad=True)
    plain = copy.deepcopy(model)
    assert opfuse.fuse_(model, MXFP8BlockScaling()).fused == {"": "RMSNorm → Linear → GELUErf → Linear"}
    grads = [torch.autograd.grad(each(x).square().sum(), [x, *each.parameters()]) for each in (model, plain)]
    for one, other in zip(*grads):
        assert one.isfinite().all()
        assert ((one - other).norm() / other.norm()).item() < 0.15


def test_experts_without_tokens_and_a_gate_that_routes_nothing():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    assert opfuse.fuse_(Dense(), FP8).fused == {"": "Linear×2 → SwiGLU → Linear"}


def test_a_key_without_a_bias_has_a_product_of_its_own():
    """As Whisper's."""
    model = Attention()
    model.k.bias = None
    report = opfuse.fuse_(model, FP8)
    assert {entry.path: entry.became for entry in report.of("joined")} == {"v": "in q"}
    assert report["k"].became == "Linear"


def test_a_key_without_a_bias_keeps_none_beside_a_query_with_one():
    model, x = Attention(), torch.randn(2, 8, 32)
    model.k.bias = None
    wanted = model(x)
    opfuse.fuse_(model, EXACT)
    torch.testing.assert_close(model(x), wanted)


def test_fusing_again_under_the_same_recipe_changes_no_delayed_scale():
    recipe, x = DelayedScaling(amax_history_len=2), torch.randn(32, 32)
    model = nn.ModuleDict({"mlp": GatedMLP(), "attention": Attention()})
    opfuse.fuse_(model, recipe)
    opfuse.prepare_delayed(model, recipe)
    for scale in (1.0, 5.0):
        y = model["mlp"](scale * x), model["attention"](scale * x[None])
        sum(each.sum() for each in y).backward()
    before = model.state_dict()
    opfuse.fuse_(model, recipe)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert any("delayed_scaling" in key for key in before)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_an_exception_between_a_norm_and_its_reader_leaves_nothing_behind():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.RMSNorm(32), GatedMLP()

        def forward(self, x, mask=None):
            y = self.norm(x)
            if mask is not None:
                raise ValueError
            return self.mlp(y)

    model, x = Failing(), torch.randn(4, 32)
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, EXACT)
    with pytest.raises(ValueError):
        model(x, mask=x)
    torch.testing.assert_close(model(2 * x), plain(2 * x))
    torch.testing.assert_close(model.mlp(x), plain.mlp(x))


class Rooted(BareNorm):
    """Multiplies by the root instead of dividing."""

    def forward(self, x):
        return x / torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.scale


class Whole(BareNorm):
    """Divides by the mean over all rows."""

    def forward(self, x):
        y = x.reshape(-1)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True))).view(x.shape) * self.scale


class Crossed(BareNorm):
    """Divides columns by the means of rows, of which there are as many."""

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1)) * self.scale


def test_what_divides_by_another_root_is_no_norm():
    for width in (3, 32):
        assert norm_of(BareNorm(width)) is not None
        assert [kind for kind in (Rooted, Whole, Crossed) if norm_of(kind(width)) is not None] == []


class ByDtype(nn.Module):
    """Another activation in half precision."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        y = self.up(x)
        return self.down(F.relu(y) if y.dtype == torch.bfloat16 else F.silu(y))


def test_a_forward_that_asks_for_the_dtype_is_proven_for_one():
    model, x = ByDtype(), torch.randn(8, 32)
    assert opfuse.fuse_(model, EXACT).fused == {"": "Linear → SiLU → Linear"}
    with plans_used() as plans:
        model(x)
    assert products(plans) == [2]
    model.bfloat16()
    with plans_used() as plans:
        found = model(x.bfloat16())
    assert products(plans) == [1, 1]
    torch.testing.assert_close(found, copy.deepcopy(opfuse.unfuse_(model))(x.bfloat16()), rtol=2**-6, atol=2**-6)


class Divided(nn.Module):
    """A SiLU by a function that torch.autocast computes in fp32 on some devices."""

    def forward(self, x):
        return x / (1 + torch.exp(-x))


class Gating(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.act = nn.Linear(32, 32), nn.Linear(32, 32), Divided()

    def forward(self, x):
        return self.act(self.gate(x)) * self.up(x)


AUTOCAST = {
    "an activation before the product": (lambda: nn.Sequential(nn.SiLU(), nn.Linear(32, 32)), "SiLU"),
    "a norm behind it": (lambda: nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)), "LayerNorm"),
    "a function of many casts": (lambda: nn.Sequential(nn.Linear(32, 32), Divided()), "SiLU"),
    "a gate of many casts": (Gating, "SwiGLU"),
}
"""Blocks, and what of them has another dtype under torch.autocast than the product."""


@pytest.mark.parametrize("name", AUTOCAST)
def test_what_torch_autocast_may_cast_otherwise_is_left_to_it(name):
    make, op = AUTOCAST[name]
    model, x = make(), torch.randn(8, 32)
    plain = copy.deepcopy(model)
    assert op in opfuse.fuse_(model, EXACT).fused[""]
    with plans_used() as plans, torch.autocast("cpu", torch.bfloat16):
        found, wanted = model(x), plain(x)
    assert products(plans) == [1] * len(plans)
    assert not any(op in each for plan in plans for each in plan.ops)
    assert found.dtype == wanted.dtype


@MAY_RUN_PLAIN
def test_fp64_is_left_alone_by_torch_autocast_and_another_dtype_is_refused_as_before():
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).double(), torch.randn(8, 32).double()
    wanted = model(x)
    opfuse.fuse_(model, EXACT)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="same dtype"):
        model(x.float())


def test_a_gate_without_a_bias_keeps_none_beside_an_up_with_one():
    model, x = GatedMLP(bias=True), torch.randn(8, 32)
    model.gate_proj.bias = None
    wanted = model(x)
    opfuse.fuse_(model, EXACT)
    torch.testing.assert_close(model(x), wanted)


def test_reading_forwards_leaves_no_hook_behind():
    hooks = {
        name: dict(value) for name, value in vars(nn.modules.module).items() if name.startswith("_global") and "hooks" in name
    }
    opfuse.fuse_(GatedMLP(), FP8)
    assert hooks == {name: dict(getattr(nn.modules.module, name)) for name in hooks}


def jagged(x):
    return torch.nested.nested_tensor([x[0, :2], x[1]], layout=torch.jagged)


def tangent(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent


FOLLOWED = {
    "vmap": lambda m, x: torch.func.vmap(m, in_dims=1)(x),
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).sum())(x),
    "grad of parameters": lambda m, x: torch.func.grad(lambda p: torch.func.functional_call(m, p, x).sum())(
        {name: p.detach() for name, p in m.named_parameters()}
    ),
    "hessian": lambda m, x: torch.func.hessian(lambda x: m(x).sum())(x[0, 0]),
    "a tangent": tangent,
    "a jagged tensor": lambda m, x: m(jagged(x)).values(),
    "a nested tensor": lambda m, x: torch.cat(m(torch.nested.nested_tensor([x[0, :2], x[1]])).unbind()),
    "a sparse tensor": lambda m, x: m[0](x[0].to_sparse()),
}


@MAY_RUN_PLAIN
@pytest.mark.parametrize("name", FOLLOWED)
def test_what_no_pipeline_can_run_is_the_forward_of_the_module(name):
    """In high precision, as it would be without opfuse."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), torch.randn(2, 4, 32)
    wanted = FOLLOWED[name](model, x)
    opfuse.fuse_(model, FP8)
    torch.testing.assert_close(FOLLOWED[name](model, x), wanted)


def test_a_module_says_once_that_a_call_ran_in_high_precision():
    """Where nothing of it ran under its recipe, at the line of the call."""
    model, x = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), torch.randn(8, 32)
    opfuse.fuse_(model, FP8)
    text = r"Sequential: a call that its pipeline is not for ran in high precision, and not under Float8CurrentScaling\(\)"
    with pytest.warns(OpfuseWarning, match=text) as told:
        found = torch.func.vmap(model)(x)
    assert [each.filename for each in told] == [__file__]
    torch.testing.assert_close(torch.func.vmap(model)(x), found)
    with plans_used() as plans:
        model(x)
    assert plans


# -- what others could notice ----------------------------------------------------------------------------------------------------

LOG, COUNTS, STATE = [], np.zeros(1), SimpleNamespace(calls=0)
LOGGER = logging.getLogger("tests.convert.test_proven")
CALLS_MADE = 0
HOOKED = nn.ReLU()


class Noted:
    """What a class keeps."""

    calls = 0
    seen: list = []


def raise_global(self, x):
    global CALLS_MADE  # noqa: PLW0603
    CALLS_MADE += 1


def raise_caught(self, x):
    try:
        _ = x.no_such_thing
    except AttributeError:
        LOG.append(1)


def count_in_default(self, x, log=LOG):
    log.append(1)


EFFECTS = {
    "print": lambda self, x: print("called"),  # noqa: T201
    "a list": lambda self, x: LOG.append(x.shape),
    "a list as a default": count_in_default,
    "a warning": lambda self, x: warnings.warn("called", UserWarning, stacklevel=1),
    "a logger": lambda self, x: LOGGER.warning("called"),
    "a global": raise_global,
    "an array": lambda self, x: COUNTS.__iadd__(1),
    "an array that it has": lambda self, x: self.counts.__iadd__(1),
    "a class": lambda self, x: Noted.seen.append(1),
    "an attribute of a class": lambda self, x: setattr(Noted, "calls", Noted.calls + 1),
    "an object": lambda self, x: vars(STATE).update(calls=STATE.calls + 1),
    "a config": lambda self, x: self.cfg.count(),
    "after an error": raise_caught,
    "a generator of numbers": lambda self, x: self.draw.random(),
    "the time": lambda self, x: LOG.append(time.time()),
    "a method of torch": lambda self, x: self.register_buffer("called", x),
    "a function of torch": lambda self, x: torch.manual_seed(0),
    "modules": lambda self, x: self.parts.append(nn.Identity()),
    "an object of torch": lambda self, x: self.handle.remove(),
}


class Cfg:
    def __init__(self):
        self.calls = 0

    def count(self):
        self.calls += 1


class Effective(nn.Module):
    """Does something that others notice, beside what it computes."""

    effect = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.counts, self.cfg, self.draw = np.zeros(1), Cfg(), np.random.default_rng(0)
        self.parts, self.handle = nn.ModuleList(), HOOKED.register_forward_hook(print)

    def forward(self, x):
        self.effect(x)
        return self.down(F.gelu(self.up(x)))


def noticed(model):
    """All that effects change."""
    state = (
        CALLS_MADE,
        len(LOG),
        COUNTS.tolist(),
        vars(STATE).copy(),
        Noted.calls,
        len(Noted.seen),
        torch.initial_seed(),
        len(HOOKED._forward_hooks),
    )
    return (
        *state,
        model.counts.tolist(),
        model.cfg.calls,
        str(model.draw.bit_generator.state),
        [*model._buffers],
        len(model.parts),
    )


@pytest.mark.parametrize("name", EFFECTS)
def test_what_others_notice_happens_at_calls_and_never_before(name, capsys, caplog):
    model, x = type("Made", (Effective,), {"effect": EFFECTS[name]})(), torch.randn(8, 32)
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = noticed(model)
        assert opfuse.fuse_(model, EXACT).fused == {"up": "Linear", "down": "Linear"}
        assert noticed(model) == before
        assert (capsys.readouterr().out, [*caplog.records], [*seen]) == ("", [], [])
        model(x)
        outputs = capsys.readouterr().out, [*caplog.records], [*seen]
    assert noticed(model) != before or any(outputs)


def test_a_branch_that_no_call_takes_counts_as_well():
    class Debugged(Effective):
        debug = False

        def effect(self, x):
            if self.debug:
                print(LOG)  # noqa: T201

    report = opfuse.fuse_(Debugged(), EXACT)
    assert report.fused == {"up": "Linear", "down": "Linear"}
    assert "Debugged.effect, which also reads print" in report[""].got


# -- what decides ----------------------------------------------------------------------------------------------------------------


class Decided(nn.Module):
    """Chooses between two activations."""

    decide = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down((F.gelu if self.decide(x) else F.relu)(self.up(x)))


DECISIONS = {
    "a number of sizes": lambda self, x: len(x.shape) == 3,
    "a size that counts": lambda self, x: len([0] * x.shape[0]) > 8,
    "a size that is an index": lambda self, x: [0, 0, 1, 0, 0, 1][x.shape[0]],
    "the last but one, as an index": lambda self, x: [0, 0, 1, 1, 1, 1][x.shape[-2]],
    "a range": lambda self, x: len(range(x.shape[0])) > 8,
    "a range that is run": lambda self, x: sum(1 for _ in range(x.shape[0])) > 8,
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_forward_that_decides_by_sizes_is_left_to_itself(name):
    model = type("Made", (Decided,), {"decide": DECISIONS[name]})()
    assert opfuse.fuse_(model, EXACT).fused == {"up": "Linear", "down": "Linear"}


class ThreeSizes(Decided):
    """Works for batches of sequences alone."""

    def forward(self, x):
        _, _, _ = x.shape
        return self.down(F.gelu(self.up(x)))


class Negated(nn.Module):
    def forward(self, x, negate=False):
        return F.gelu(-x if negate else x)


class WithKeyword(Decided):
    def __init__(self):
        super().__init__()
        self.act = Negated()

    def forward(self, x):
        return self.down(self.act(self.up(x), negate=True))


class NarrowNorm(BareNorm):
    """Computes in fp32 whatever it is given."""

    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True))).to(x.dtype) * self.scale


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (ThreeSizes(), torch.randn(8, 32)),
        (WithKeyword(), torch.randn(8, 32)),
        (nn.Sequential(NarrowNorm(), nn.Linear(32, 32), nn.GELU()).double(), torch.randn(8, 32, dtype=torch.float64)),
    ],
    ids=["leading dimensions", "a keyword of a submodule", "fp64 in a leaf of fp32"],
)
def test_what_the_chain_does_not_show_is_as_it_was(model, x):
    def result():
        try:
            return model(x)
        except ValueError:
            return "raises"

    wanted = result()
    opfuse.fuse_(model, EXACT)
    found = result()
    if isinstance(wanted, str):
        assert found == wanted
    else:
        torch.testing.assert_close(found, wanted)


class ViewedProduct(nn.Module):
    """x W, of rows that it views as a matrix, as GPT-2 has it."""

    def __init__(self, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, 32))

    def forward(self, x):
        return (x.view(-1, x.size(-1)) @ self.weight).view(*x.shape[:-1], 32)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_forward_cannot_view_as_a_matrix_is_refused_as_before(autocast):
    """A product by another spelling takes what its forward takes: rows in turn, with gaps between them, and no exchanged ones."""
    model = nn.Sequential(ViewedProduct(16), nn.SiLU(), ViewedProduct(32))
    opfuse.fuse_(model, EXACT)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            model(torch.randn(5, 2, 16).transpose(0, 1))
        with plans_used() as plans:
            model(torch.randn(2, 5, 32)[..., :16])
            model(torch.randn(1, 5, 32)[:, ::2, ::2])
    assert plans
