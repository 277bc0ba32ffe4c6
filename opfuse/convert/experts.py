"""Converts a module that holds all experts of a mixture in two parameters: they become grouped products over sorted rows.

Such a module is recognised by what it computes. It does nothing to floats but what :data:`FUNCTIONS` lists, and with small random
parameters it returns sum_k w_k (W_down g(W_gate x + b_gate, W_up x + b_up) + b_down) for each token x, over the experts k that
its second argument names for the token, with weights w from its third argument; and its gradients are those of that sum. g is a
gated unit; the biases are zero, or two more parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opfuse.convert.code import BUILTINS, NotRecorded, check_effects
from opfuse.convert.converted import Converted
from opfuse.convert.guards import Proven
from opfuse.convert.leaves import GATED, leaf_of, likeness, obstacle, once
from opfuse.convert.pipeline import INPUT, PipelineRun
from opfuse.convert.record import (
    ACTIVATIONS,
    ARITHMETIC,
    CASTS,
    MODES,
    NAMES,
    mode,
    required_arguments,
    training_or_not,
)
from opfuse.convert.weights import LocalParameters, MadeParameters, replica
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import spec_fields
from opfuse.ops.activation import GEGLU, ClampedSwiGLU, GatedActivation, ScaledGEGLU, ScaledSwiGLU, SwiGLU
from opfuse.ops.all_to_all import AllToAllDispatch, AllToAllReturn
from opfuse.ops.grouped_linear import GroupedLinear
from opfuse.ops.routing import TokenCombine, TokenPermute
from opfuse.recipes import Recipe

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""How far results may be off by the dtype of tokens and matrices: those of a token, relative to the largest of them, in fp64, the
norm of all in others."""

MANY = 300
"""More tokens than the others, for forwards with a capacity; so a forward that cuts off more at once is not seen."""

SIZES = (1e-2, 1.0, 10.0, 100.0, 1e4)
"""Magnitudes of the tokens that are tried, since some experts clamp large values."""


class Experts(NamedTuple):
    """A module with experts.

    both: name of the parameter that holds gate and up, (experts, 2 inner, width), or (experts, width, 2 inner) if ``transposed``.
    down: name of the parameter (experts, width, inner), or (experts, inner, width). gate: the unit between them. biases: names of
    the biases of both and of down, or none.
    """

    module: nn.Module
    both: str
    down: str
    gate: GatedActivation
    transposed: bool
    biases: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of experts, width, and inner width."""
        experts, *matrix = self.module._parameters[self.down].shape  # type: ignore[union-attr]
        width, inner = matrix[::-1] if self.transposed else matrix
        return experts, width, inner

    @property
    def elements(self) -> int:
        """How many elements all matrices have."""
        experts, width, inner = self.sizes
        return 3 * experts * width * inner

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the forward takes: tokens, experts, weights."""
        required = required_arguments(self.module)
        return required if len(required) == 3 else tuple(inspect.signature(type(self.module).forward).parameters)[1:]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What its parameters have to be, by name."""
        experts, width, inner = self.sizes
        matrices = {self.both: (2 * inner, width), self.down: (width, inner)}
        shapes = {name: (experts, *(size[::-1] if self.transposed else size)) for name, size in matrices.items()}
        return {**shapes, **dict(zip(self.biases, ((experts, 2 * inner), (experts, width))))}


def experts_of(module: nn.Module) -> Experts | None:
    """The experts of a module; None if it has none, or computes something else."""
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    matrices, biases = ([name for name, shape in shapes.items() if len(shape) == dims] for dims in (3, 2))
    if len(matrices) != 2 or len(biases) not in (0, 2) or len(shapes) != len(matrices) + len(biases):
        return None
    if len(required_arguments(module)) not in (1, 3) or getattr(module, "_is_expert_parallel", False):
        return None
    # A copy is tried, with matrices of its own, since other threads may call the module meanwhile.
    found = once(("experts", likeness(module)), lambda: _experts_of(replica(module, plain=True), shapes, matrices, biases))
    return found and found._replace(module=module, gate=copy.deepcopy(found.gate))


def _experts_of(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], matrices: Sequence[str], biases: Sequence[str]
) -> Experts | None:
    for (both, down), transposed, gate in product(permutations(matrices), (False, True), _gates_of(module)):
        for names in permutations(biases):
            found = Experts(module, both, down, gate, transposed, names)
            if found.shapes == shapes and len(found.arguments) == 3 and all(_computes(found, *each) for each in _TRIED):
                return found
    return None


INTERLEAVES = (None, 1)
"""How gate and up lie in one matrix: one behind the other, or row by row in turns."""

LIMITS = 0.1, 1000.0
"""Between these a unit may be clamped: tokens of :data:`SIZES` make values on both sides of the bound, for gate and up."""


def _gates_of(module: nn.Module) -> Iterator[GatedActivation]:
    """The units that the module may have between its products: of its activation, or clamped by numbers of its own."""
    if len(module._modules) == 1:
        (child,) = module.children()
        leaf = leaf_of(child) if obstacle(child) is None else None
        if leaf is not None and leaf.name in GATED:
            yield from (GATED[leaf.name](glu_interleave_size=size) for size in INTERLEAVES)
    elif not module._modules:
        numbers = sorted({value for value in vars(module).values() if type(value) is float and value > 0})
        for (limit, alpha), offset, size in product(permutations(numbers, 2), (1.0, 0.0), INTERLEAVES):
            if LIMITS[0] <= limit <= LIMITS[1]:
                yield ClampedSwiGLU(limit=limit, alpha=alpha, glu_linear_offset=offset, glu_interleave_size=size)


FUNCTIONS = (
    ACTIVATIONS
    | ARITHMETIC
    | CASTS
    | {"linear", "matmul", "chunk", "__getitem__", "index_add", "zeros_like", "shape", "dtype", "device"}
)
"""What may be done to tensors of floats. All of it but ReLU is analytic, so forwards that agree at random points agree
everywhere. Routing is not, and is calculated with integers. A clamp is analytic between its bounds and outside of them, and is
allowed at the bounds of the unit that is tried, on both sides of which the random values lie.
"""


_TRIED: tuple[tuple[str, torch.dtype, int], ...] = (
    *[(each, torch.float64, 5) for each in MODES],
    *[("evaluation", dtype, 5) for dtype in CLOSE],
    ("evaluation", torch.float64, MANY),
)
"""Modes, dtypes and numbers of tokens."""


DRAWS = "rand", "normal"
"""How names of functions begin that draw numbers from nothing. A generator's state would not tell: other threads draw."""


class _OnlyFunctions(TorchFunctionMode):
    """Ends a forward that does anything else to floats, such as a comparison, that takes a part of integers, or draws numbers.

    bounds: those that it may clamp at.
    """

    def __init__(self, bounds: Collection[tuple[float | None, float]] = ()) -> None:
        super().__init__()
        self.bounds = bounds

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func.__self__ if func.__name__ == "__get__" else func, "__name__", "")
        name = NAMES.get(name, name)
        given = [*args, *(kwargs or {}).values()]
        floats = any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in given)
        if name.startswith(DRAWS):  # of floats none is allowed
            raise NotRecorded(f"the call of {name}", "no random numbers")
        if name == "__getitem__" and not floats and _cuts(args[1]):
            raise NotRecorded("a slice of what is routed", "all tokens that are routed to an expert")
        clamps = name == "clamp" and inspect.signature(_bounds).bind(*args, **(kwargs or {}))
        if clamps and _bounds(*clamps.args, **clamps.kwargs) in self.bounds:
            return func(*args, **(kwargs or {}))
        if floats and not FUNCTIONS & {name, name.removesuffix("_")}:
            raise NotRecorded(f"the call of {name}", "linear functions of tokens, and an activation")
        return func(*args, **(kwargs or {}))


def _bounds(x: torch.Tensor, min: Any = None, max: Any = None) -> tuple[Any, Any]:
    return min, max


def _cuts(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, slice) and part != slice(None) for part in parts)


def _computes(found: Experts, each: str, dtype: torch.dtype, tokens: int) -> bool:
    """Whether the module computes the sum of this file's beginning, with its gradients, in one of the modes of a call."""
    experts, width, inner = found.sizes[0], 6, 4
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64, device="cpu")

    both, down, weights = random(experts, 2 * inner, width), random(experts, width, inner), random(tokens, 2)
    biases = [random(experts, rows) for rows in (2 * inner, width)][: len(found.biases)]
    x = random(tokens, width)
    if dtype is torch.float64:
        x *= torch.tensor(SIZES, dtype=dtype, device="cpu").repeat(tokens // len(SIZES)).unsqueeze(-1)
    index = torch.randint(experts, (tokens, 2), generator=draw, device="cpu")
    limit = found.gate.constants.get("limit")
    bounds = () if limit is None else ((None, limit), (-limit, limit))

    def ours(
        x: torch.Tensor, both: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, *biases: torch.Tensor
    ) -> torch.Tensor:
        first, last = (bias[index] for bias in biases) if biases else (0, 0)
        gated = torch.einsum("tkiw,tw->tki", both[index], x) + first
        interleaved = found.gate.spec.glu_interleave_size is not None
        halves = (gated[..., ::2], gated[..., 1::2]) if interleaved else gated.chunk(2, -1)
        y = torch.einsum("tkwi,tki->tkw", down[index], _Gate.apply(*halves, found.gate)) + last  # type: ignore[no-untyped-call]
        return torch.einsum("tkw,tk->tw", y, weights)

    def theirs(x: torch.Tensor, both: torch.Tensor, down: torch.Tensor, weights: torch.Tensor, *biases: torch.Tensor) -> Any:
        matrices = [each.mT if found.transposed else each for each in (both, down)]
        vars(found.module)["_parameters"] = dict(zip((found.both, found.down, *found.biases), (*matrices, *biases)))
        check_effects(found.module, BUILTINS | {"range"}, unwraps=True)
        with _OnlyFunctions(bounds):
            return inspect.unwrap(type(found.module).forward)(found.module, x, index, weights)

    with mode(each) as training, training_or_not(found.module, training):
        given = [each.to(dtype) for each in (x, both, down, weights, *biases)]
        got = _with_gradients(theirs, *given)
        wanted = _with_gradients(ours, *[each.double() for each in given])
    if got is None or wanted is None or got[0].shape != wanted[0].shape:
        return False
    pairs = [(one.double() - other, other) for one, other in zip(got, wanted)]
    if dtype is not torch.float64:  # sums of a token may cancel
        return all(off.norm() <= CLOSE[dtype] * other.norm() for off, other in pairs)
    return all((off.abs().amax(-1) <= CLOSE[dtype] * _largest(other, tokens)).all() for off, other in pairs)


TAIL = 1e-5
"""The result of a token is compared as if it were at least this part of the largest one among tokens of its magnitude: torch's
GELU, x (1 + tanh u) / 2, loses as many digits as its result is small beside x."""


def _largest(values: torch.Tensor, tokens: int) -> torch.Tensor:
    """The largest magnitude in the last dimension; for a token at least :data:`TAIL` of that of others of its size."""
    largest = values.abs().amax(-1)
    if values.ndim != 2 or len(values) != tokens:
        return largest
    return torch.maximum(largest, TAIL * largest.view(-1, len(SIZES)).amax(0).repeat(tokens // len(SIZES)))


def _with_gradients(function: Callable[..., Any], *given: torch.Tensor) -> list[torch.Tensor] | None:
    """What ``function`` makes of the tensors ``given`` and, where gradients are on, the gradients of its sum for each of them.

    None where it fails, where the result is no tensor of numbers, and where some of them get no gradient.
    """
    leaves = [each.clone().requires_grad_(torch.is_grad_enabled()) for each in given]
    try:
        y = function(*leaves)
        if not isinstance(y, torch.Tensor) or not y.is_floating_point():
            return None
        return [y.detach(), *(torch.autograd.grad(y.sum(), leaves) if torch.is_grad_enabled() else ())]
    except (Exception, NotRecorded):  # whatever a stranger's code raises, it is none of ours
        return None


class _Gate(torch.autograd.Function):
    """The gated unit of an op, and its gradients, on fp64 values."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, op: GatedActivation) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.op = op
        return op.math.value(a, b, **op.constants)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        da, db = ctx.op.math.grad(dy, *ctx.saved_tensors, **ctx.op.constants)
        return da, db, None


SPLITS, PLACES, WEIGHTS = "splits", "places", "weights"
"""The channels that carry the number of rows of each expert, where the rows of each token lie, and the weight of each row."""

OWN, COUNTS, ORDER, OWN_WEIGHTS = "own", "counts", "order", "own_weights"
"""Those of experts over ranks: rows of each expert of this rank, how rows of all ranks came to it, and their weights."""


class Routed(Converted):
    """The forward of a module with experts. A number that is no expert's, as routers write for one on another device, adds
    nothing.

    found: the experts.
    """

    found: Experts
    takes_none = False
    """Whether its pipeline is also for calls without tokens."""

    def _is_proven(self, given: Sequence[Any]) -> bool:
        """Tokens (n, width) of the dtype of the matrices, an integer (n, k) of experts, and weights (n, k).

        The values of a row lie side by side: from tokens of other strides, a forward's ``zeros_like`` makes a result of the same
        strides, which code may ask about.
        """
        x, index, weights = given
        plain = all(type(each) is torch.Tensor for each in given) and x.dim() == index.dim() == weights.dim() == 2
        if (
            not plain
            or index.shape != weights.shape
            or len(index) != len(x)
            or x.stride(-1) != 1
            or 0 in (x.shape[1], index.shape[1])
            or not (len(x) or self.takes_none)
            or index.is_floating_point()
            or not weights.is_floating_point()
        ):
            return False
        dtypes = {x.dtype, *(p.dtype for p in self.module._parameters.values() if p is not None)}
        if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # which does not know meta
            return len(dtypes) == 1
        return torch.float64 not in dtypes  # which torch.autocast leaves alone

    def outline(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A tensor like the tokens; which expert gets which token depends on values."""
        return (torch.empty_like(given[0]),)


AnyRouted = TypeVar("AnyRouted", bound=Routed)


class Spread(NamedTuple):
    """Experts that a process group of ``ranks`` shares in equal parts, of which this is one. quantized: whether codes travel
    where they can.
    """

    group: Any
    rank: int
    ranks: int
    quantized: bool


def build_experts(found: Experts, path: str, recipe: Recipe | None) -> Routed:
    """The new forward of a module with experts."""
    return routed(Routed, found, pipeline_of(found, path), path, recipe)


def routed(kind: type[AnyRouted], found: Experts, run: PipelineRun, path: str, recipe: Recipe | None) -> AnyRouted:
    """A forward that runs a pipeline of :func:`pipeline_of`."""
    members = dict(found.module.named_children())
    made = kind(found.module, path, arguments=found.arguments, run=run, members=members, recipe=recipe, proven=Proven())
    made.found = found
    return made


def pipeline_of(found: Experts, path: str, over: Spread | None = None) -> PipelineRun:
    """The ops of a module with experts; ``over`` ranks, they are those of one rank, and rows go to others and come back."""
    experts, width, inner = found.sizes
    run = PipelineRun(extras=[0, 1, INPUT], path=path)

    def add(name: str, op: BasicOperation, reads: Sequence[str] = (), gives: Sequence[str] = ()) -> None:
        for number, channel in enumerate(reads):
            op.set_extra_input_channel(number, channel)
        for number, channel in enumerate(gives):
            op.set_extra_output_channel(number, channel, output_to_caller=False)
        run.ops.append(op)
        run.names.append(name)

    def add_product(number: int, name: str, columns: int, rows: int) -> None:
        sources = {"weight": (name, found.transposed)}
        if found.biases:
            sources["bias"] = found.biases[number], False
        op, made = _grouped(found.module, sources, (experts, columns, rows), over)
        op.name = f"{path}.{name}".lstrip(".")
        run.made.append(made)
        add(name, op, (OWN if over else SPLITS,))

    def add_exchange(name: str, kind: type[AllToAllDispatch | AllToAllReturn], **channels: Sequence[str]) -> None:
        if over is not None:
            options = {"weighted": weighs} if kind is AllToAllDispatch else {}
            op = kind(experts, over.group, quantized=over.quantized and not found.biases, **options)
            add(name, op, **channels)

    # The activation multiplies rows by their weights, before the last product, so that the weights' gradient needs no result of
    # that product. Of products with biases the weighted sum does it, since weights multiply the biases, too.
    gate = None if found.biases else _scaled(found.gate)
    weighs = gate is not None
    weights, own_weights = ([WEIGHTS], [OWN_WEIGHTS]) if weighs else ([], [])
    sent = OWN, COUNTS, ORDER
    add("permute", TokenPermute(experts, weighted=weighs), gives=(SPLITS, PLACES, *weights))
    add_exchange("dispatch", AllToAllDispatch, reads=(SPLITS, *weights), gives=(*sent, *own_weights))
    add_product(0, found.both, width, 2 * inner)
    add(found.gate.kind, gate or found.gate, own_weights if over else weights)
    add_product(1, found.down, inner, width)
    add_exchange("return", AllToAllReturn, reads=(SPLITS, *sent))
    add("combine", TokenCombine(weighted=not weighs, typed=True), (PLACES,))
    return run


def _scaled(gate: GatedActivation) -> GatedActivation | None:
    """The unit whose result is multiplied by a scale for each row; None if there is none."""
    kind = _SCALED.get(type(gate))
    return None if kind is None else kind(**{name: getattr(gate.spec, name) for name in spec_fields(gate)})


_SCALED: Mapping[type[GatedActivation], type[GatedActivation]] = {SwiGLU: ScaledSwiGLU, GEGLU: ScaledGEGLU}


def _grouped(
    module: nn.Module, sources: Mapping[str, tuple[str, bool]], sizes: tuple[int, int, int], over: Spread | None
) -> tuple[GroupedLinear, MadeParameters]:
    """A grouped product, and what lends it its parameters.

    sources: by the op's names, those of ``module``, and whether they are transposed. sizes: experts, columns and rows. over: the
    ranks that share the experts.
    """
    experts, columns, rows = sizes
    lends, ranks = (MadeParameters, 1) if over is None else (LocalParameters, over.ranks)
    made = lends({own: ((module, name, transposed),) for own, (name, transposed) in sources.items()})
    options: dict[str, Any] = {
        "bias": "bias" in sources,
        "single_grouped_weight": True,
        "single_grouped_bias": True,
        "pad_splits": True,
    }
    dtype = module._parameters[sources["weight"][0]].dtype  # type: ignore[union-attr]
    op = GroupedLinear(experts // ranks, columns, rows, **options, device="meta", dtype=dtype)
    if over is not None:
        op.slot_part, op.slot_parts = over.rank, over.ranks
    for own in sources:
        del op._parameters[own]
    op.__dict__["owner"] = made
    return op, made
