"""One entry for every op of ``ops.OPS``: how to make it, inputs it takes, and its formula in plain torch.

The formulas are written from the definitions and share no code with opfuse, but for ops that are one formula there,
too. They get tensors in fp64 and return the output, or (output, extra output); their gradients are autograd's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from opfuse import ops


@dataclass(frozen=True)
class Case:
    """An op, the shapes it is tried on, and what it computes.

    formula: ``formula(x, params, extras)``. trailing: last dimensions of x. extras: for each extra input "row" (one value a
    row) or "full" (the shape of x). kinks: points where a derivative jumps, which inputs stay away from. roundings: how often
    a value is rounded to the I/O dtype on its way.
    """

    make: Callable[[], torch.nn.Module]
    formula: Callable
    trailing: tuple[int, ...] = (8,)
    extras: tuple[str, ...] = ()
    kinks: tuple[float, ...] = ()
    roundings: int = 1


ROWS = (2, 3)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def srelu(x):
    return torch.clamp(x, min=0) ** 2


def tanh_srelu(x, scale=1.5):
    return (scale * torch.tanh(torch.clamp(x, min=0) / scale)) ** 2


def clamped(a, b, limit, alpha, offset):
    a = torch.clamp(a, max=limit)
    return a * torch.sigmoid(alpha * a) * (torch.clamp(b, -limit, limit) + offset)


def situ(a, b, beta1, beta2):
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * (beta2 * torch.tanh(b / beta2))


def halves(x, group=None):
    """(a, b) of the last dimension; with ``group``, they alternate in groups of that many columns."""
    if group is None:
        return x.chunk(2, dim=-1)
    columns = torch.arange(x.shape[-1])
    first = (columns // group) % 2 == 0
    return x[..., first], x[..., ~first]


def glu(act, group=None):
    def formula(x, params, extras):
        a, b = halves(x, group)
        y = act(a) * b
        return y * extras[0].unsqueeze(-1) if extras else y

    return formula


def pair(function, *constants, group=None):
    def formula(x, params, extras):
        y = function(*halves(x, group), *constants)
        return y * extras[0].unsqueeze(-1) if extras else y

    return formula


def unary(act):
    return lambda x, params, extras: act(x) * extras[0].unsqueeze(-1) if extras else act(x)


def layer_norm(x, params, extras, *, eps=1e-5, dims=1, shift=0.0):
    trailing = tuple(range(x.dim() - dims, x.dim()))
    centered = x - x.mean(trailing, keepdim=True)
    variance = (centered**2).mean(trailing, keepdim=True)
    return centered / torch.sqrt(variance + eps) * (params["weight"] + shift) + params["bias"]


def rms_norm(x, params, extras, *, eps=1e-5, dims=1, shift=0.0):
    trailing = tuple(range(x.dim() - dims, x.dim()))
    return x / torch.sqrt((x**2).mean(trailing, keepdim=True) + eps) * (params["weight"] + shift)


def dropout(x, params, extras):
    """The op draws its mask first thing from torch's generator; so does this, from the same seed."""
    torch.manual_seed(5)
    keep = torch.rand(x.shape, dtype=torch.float32) >= 0.25
    return torch.where(keep, x / 0.75, 0.0)


class Grouped(torch.nn.Module):
    """A grouped op whose groups are the first row, none, and the other rows."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x, *extras):
        return self.op(x, self.splits(x), *extras)

    @staticmethod
    def splits(x):
        rows = x[..., 0].numel()
        return torch.tensor([min(rows, 1), 0, rows - min(rows, 1)])


def grouped_linear(x, params, extras):
    rows = x.reshape(-1, x.shape[-1])
    kinds = [[p for name, p in params.items() if name.startswith(f"op.{kind}")] for kind in ("weight", "bias")]
    weights, biases = (list(found[0]) if len(found) == 1 else found for found in kinds)
    pieces = [piece @ w.T for piece, w in zip(rows.split(Grouped.splits(x).tolist()), weights)]
    if biases:
        factors = extras[0].reshape(-1, 1) if extras else torch.ones_like(rows[:, :1])
        pieces = [piece + f * b for piece, b, f in zip(pieces, biases, factors.split([len(piece) for piece in pieces]))]
    return torch.cat(pieces).reshape(*x.shape[:-1], -1)


class Routed(torch.nn.Module):
    """A router that keeps its integers to itself; or, with ``combine``, routes back what it routed."""

    def __init__(self, top_k, combine=False):
        super().__init__()
        self.op = ops.TokenDispatch(4, 8, top_k=top_k)
        self.combine = ops.TokenCombine() if combine else None

    def forward(self, x):
        rows, splits, probabilities, places = self.op(x.reshape(-1, 8))
        assert splits.sum() == len(rows)
        if self.combine is None:
            return rows, probabilities
        return self.combine(rows * probabilities[:, None], places).reshape(x.shape)


class Permuted(torch.nn.Module):
    """Each token, by its number, to one group and the one behind it."""

    def __init__(self):
        super().__init__()
        self.op = ops.TokenPermute(3)

    def forward(self, x):
        return self.op(x.reshape(-1, 8), self.chosen(x))[0]

    @staticmethod
    def chosen(x):
        first = torch.arange(x[..., 0].numel()) % 3
        return torch.stack((first, (first + 1) % 3), 1)


class Weighted(torch.nn.Module):
    """The rows from the last to the first, each by a weight."""

    def __init__(self):
        super().__init__()
        self.op = ops.TokenCombine(weighted=True, typed=True)

    def forward(self, x, weights):
        rows, cast = x.reshape(-1, 8), torch.is_autocast_enabled(x.device.type)
        places = torch.arange(len(rows)).flip(0).unsqueeze(1)
        like = torch.empty(0, dtype=torch.get_autocast_dtype(x.device.type) if cast else x.dtype)
        return self.op(rows, places, weights.reshape(-1, 1), like)


class Scored(torch.nn.Module):
    """A head that keeps its targets to itself: the number of each row, of which every fourth is ignored."""

    def __init__(self, **options):
        super().__init__()
        self.op = ops.LinearCrossEntropy(8, 5, chunk=2, **options)

    def forward(self, x):
        return self.op(x, self.targets(x))

    @staticmethod
    def targets(x):
        rows = torch.arange(x[..., 0].numel()).reshape(x.shape[:-1])
        return torch.where(rows % 4 == 3, -100, rows % 5)


def scored(reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None, bias=False):
    def formula(x, params, extras):
        targets = Scored.targets(x).flatten()
        logits = x.reshape(-1, 8) @ params["op.weight"].T + (params["op.bias"] if bias else 0.0)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        losses = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="none")
        losses = losses + z_loss * torch.logsumexp(logits, -1) ** 2 * (targets != -100)
        return {"none": losses.reshape(x.shape[:-1]), "sum": losses.sum()}.get(reduction, losses.sum() / (targets != -100).sum())

    return formula


def permuted(x, params, extras):
    chosen = Permuted.chosen(x)
    return x.reshape(-1, 8)[torch.cat([(chosen == group).any(1).nonzero().flatten() for group in range(3)])]


def routed(top_k, combine=False):
    def formula(x, params, extras):
        tokens = x.reshape(-1, x.shape[-1])
        p = torch.softmax(tokens @ params["op.weight"].T, -1)
        chosen = p.argsort(dim=-1, descending=True)[:, :top_k]
        if combine:
            return (tokens * p.gather(1, chosen).sum(1, keepdim=True)).reshape(x.shape)
        pairs = [(token, group) for group in range(4) for token in range(len(tokens)) if group in chosen[token]]
        token, group = (torch.tensor([pair[i] for pair in pairs], dtype=torch.int64) for i in (0, 1))
        return tokens[token], p[token, group]

    return formula


LIMIT = 1.25

CASES: dict[str, list[Case]] = {
    "linear": [
        Case(lambda: ops.Linear(8, 5), lambda x, p, e: x @ p["weight"].T + p["bias"], roundings=2),
        Case(lambda: ops.Linear(8, 5, bias=False), lambda x, p, e: x @ p["weight"].T),
    ],
    "basic_linear": [Case(lambda: ops.BasicLinear(8, 5), lambda x, p, e: x @ p["weight"].T)],
    "grouped_linear": [
        Case(lambda: Grouped(ops.GroupedLinear(3, 8, 5)), grouped_linear, roundings=2),
        Case(lambda: Grouped(ops.GroupedLinear(3, 8, 5, bias=False, single_grouped_weight=True)), grouped_linear),
        Case(lambda: Grouped(ops.GroupedLinear(3, 8, 5, scale_bias=True)), grouped_linear, extras=("row",), roundings=2),
        Case(
            lambda: Grouped(ops.GroupedLinear(3, 8, 5, scale_bias=True, single_grouped_bias=True, single_grouped_weight=True)),
            grouped_linear,
            extras=("row",),
            roundings=2,
        ),
    ],
    "token_dispatch": [Case(lambda k=k: Routed(k), routed(k)) for k in (1, 2)],
    "token_permute": [Case(Permuted, permuted)],
    "token_combine": [
        Case(lambda: Routed(2, combine=True), routed(2, combine=True), roundings=3),
        Case(Weighted, lambda x, p, e: x.reshape(-1, 8).flip(0) * e[0].reshape(-1, 1), extras=("row",)),
    ],
    "linear_cross_entropy": [
        Case(lambda o=o: Scored(**o), scored(**o), roundings=2)
        for o in (
            {},
            {"reduction": "none", "bias": True},
            {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0},
        )
    ],
    "bias": [Case(lambda: ops.Bias(8), lambda x, p, e: x + p["bias"])],
    "gelu": [Case(ops.GELU, unary(gelu))],
    "gelu_erf": [Case(ops.GELUErf, unary(gelu_erf))],
    "qgelu": [Case(ops.QGELU, unary(qgelu))],
    "relu": [Case(ops.ReLU, unary(F.relu), kinks=(0.0,))],
    "srelu": [Case(ops.SReLU, unary(srelu), kinks=(0.0,))],
    "silu": [Case(ops.SiLU, unary(lambda x: x * torch.sigmoid(x)))],
    "glu": [Case(ops.GLU, glu(torch.sigmoid))],
    "geglu": [Case(ops.GEGLU, glu(gelu))],
    "geglu_erf": [Case(ops.GEGLUErf, glu(gelu_erf))],
    "qgeglu": [Case(ops.QGEGLU, glu(qgelu))],
    "reglu": [Case(ops.ReGLU, glu(F.relu), kinks=(0.0,))],
    "sreglu": [Case(ops.SReGLU, glu(srelu), kinks=(0.0,))],
    "swiglu": [
        Case(ops.SwiGLU, glu(F.silu)),
        Case(lambda: ops.SwiGLU(glu_interleave_size=2), glu(F.silu, group=2)),
        Case(lambda: ops.SwiGLU(glu_interleave_size=4), glu(F.silu)),
    ],
    "clamped_swiglu": [
        Case(ops.ClampedSwiGLU, pair(clamped, 7.0, 1.702, 1.0)),
        Case(
            lambda: ops.ClampedSwiGLU(limit=LIMIT, alpha=1.5, glu_linear_offset=0.5),
            pair(clamped, LIMIT, 1.5, 0.5),
            kinks=(-LIMIT, LIMIT),
        ),
        Case(
            lambda: ops.ClampedSwiGLU(limit=LIMIT, glu_interleave_size=2),
            pair(clamped, LIMIT, 1.702, 1.0, group=2),
            kinks=(-LIMIT, LIMIT),
        ),
    ],
    "situglu": [
        Case(ops.SiTUGLU, pair(situ, 4.0, 25.0)),
        Case(lambda: ops.SiTUGLU(beta1=1.5, beta2=2.0, glu_interleave_size=1), pair(situ, 1.5, 2.0, group=1)),
    ],
    "scaled_swiglu": [
        Case(ops.ScaledSwiGLU, glu(F.silu), extras=("row",)),
        Case(lambda: ops.ScaledSwiGLU(glu_interleave_size=2), glu(F.silu, group=2), extras=("row",)),
    ],
    "scaled_geglu": [Case(ops.ScaledGEGLU, glu(gelu), extras=("row",))],
    "scaled_situglu": [
        Case(ops.ScaledSiTUGLU, pair(situ, 4.0, 25.0), extras=("row",)),
        Case(lambda: ops.ScaledSiTUGLU(beta1=1.5, glu_interleave_size=2), pair(situ, 1.5, 25.0, group=2), extras=("row",)),
    ],
    "scaled_clamped_qgeglu": [
        Case(ops.ScaledClampedQGeGLU, pair(clamped, 7.0, 1.702, 1.0), extras=("row",)),
        Case(
            lambda: ops.ScaledClampedQGeGLU(limit=LIMIT, glu_interleave_size=2),
            pair(clamped, LIMIT, 1.702, 1.0, group=2),
            extras=("row",),
            kinks=(-LIMIT, LIMIT),
        ),
    ],
    "scaled_tanh_srelu": [
        Case(lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=1.5), unary(tanh_srelu), extras=("row",), kinks=(0.0,))
    ],
    "scaled_srelu": [Case(ops.ScaledSReLU, unary(srelu), extras=("row",), kinks=(0.0,))],
    "add_extra_input": [Case(ops.AddExtraInput, lambda x, p, e: x + e[0], extras=("full",))],
    "make_extra_output": [
        Case(ops.MakeExtraOutput, lambda x, p, e: (x, x)),
        Case(lambda: ops.MakeExtraOutput(in_place=True), lambda x, p, e: (x, x)),
    ],
    "constant_scale": [Case(lambda: ops.ConstantScale(-0.75), lambda x, p, e: -0.75 * x)],
    "identity": [Case(ops.Identity, lambda x, p, e: x)],
    "reshape": [Case(lambda: ops.Reshape((4, -1)), lambda x, p, e: x.reshape(4, -1))],
    "quantize": [Case(lambda: ops.Quantize(True, True), lambda x, p, e: x)],
    "dropout": [
        Case(lambda: ops.Dropout(0.25), dropout),
        Case(lambda: ops.Dropout(0.25).eval(), lambda x, p, e: x),
        Case(lambda: ops.Dropout(0.0), lambda x, p, e: x),
    ],
    "layer_norm": [
        Case(lambda: ops.LayerNorm(8), layer_norm),
        Case(
            lambda: ops.LayerNorm((3, 8), eps=0.1, zero_centered_gamma=True),
            lambda x, p, e: layer_norm(x, p, e, eps=0.1, dims=2, shift=1.0),
            trailing=(3, 8),
        ),
    ],
    "rms_norm": [
        Case(lambda: ops.RMSNorm(8), rms_norm),
        Case(
            lambda: ops.RMSNorm((3, 8), eps=0.1, zero_centered_gamma=True),
            lambda x, p, e: rms_norm(x, p, e, eps=0.1, dims=2, shift=1.0),
            trailing=(3, 8),
        ),
    ],
    "l2_normalization": [
        Case(ops.L2Normalization, lambda x, p, e: x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)),
        Case(lambda: ops.L2Normalization(eps=0.5), lambda x, p, e: x / torch.sqrt((x**2).sum(-1, keepdim=True) + 0.5)),
    ],
}

CASES |= {
    kind: [Case(cls, unary(cls.math.value))]
    for kind, cls in ops.OPS.items()
    if issubclass(cls, ops.PointwiseOperation) and cls.math.derived and kind not in CASES
}
"""What a formula says, in fp64: its gradients are derived, and compared with autograd's."""

ALL = [(f"{kind}-{i}", case) for kind, cases in CASES.items() for i, case in enumerate(cases)]
"""Every case with its name."""


def away(x, kinks):
    """``x`` with every value at least 0.05 from each kink."""
    for kink in kinks:
        near = (x - kink).abs() < 0.05
        x = torch.where(near, kink + torch.where(x < kink, -0.05, 0.05), x)
    return x


def make(case, dtype, leading=ROWS):
    """(op, x, extras): the op with random parameters, x with these leading dimensions; all of ``dtype``, wanting gradients."""
    op = case.make().to(dtype)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    shape = (*leading, *case.trailing)
    x = away(torch.randn(shape, dtype=torch.float64), case.kinks).to(dtype).requires_grad_()
    shapes = {"row": leading, "full": shape}
    return op, x, [torch.randn(shapes[extra], dtype=torch.float64).to(dtype).requires_grad_() for extra in case.extras]


def tuple_of(value):
    """``value`` as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def reference(case, op, x, extras, grads):
    """Outputs and gradients (x, extras, parameters by name) of the formula in fp64, from the same values."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *extras, *op.parameters())]
    names = [name for name, _ in op.named_parameters()]
    params = dict(zip(names, leaves[1 + len(extras) :]))
    outputs = tuple_of(case.formula(leaves[0], params, leaves[1 : 1 + len(extras)]))
    wanted = torch.autograd.grad(outputs, leaves, [g.double() for g in grads], allow_unused=True, materialize_grads=True)
    return outputs, wanted
