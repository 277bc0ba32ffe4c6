"""Converts a module that holds all experts of a mixture in two parameters: they become grouped products over sorted rows.

Such a module is recognised by what it computes. It does nothing to floats but what :data:`FUNCTIONS` lists, and with small random
parameters it returns sum_k w_k W_down (act(W_gate x) * (W_up x)) for each token x, over the experts k that its second argument
names for the token, with weights w from its third argument; and its gradients are those of that sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from opfuse.convert.code import BUILTINS, NotRecorded, check_effects
from opfuse.convert.converted import Converted
from opfuse.convert.guards import Proven
from opfuse.convert.leaves import GATED, UNGATED, leaf_of, obstacle
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
from opfuse.convert.weights import MadeParameters
from opfuse.ops.activation import Activation
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

    both: name of the parameter (experts, 2 inner, width) that holds gate and up, gate first. down: name of the parameter
    (experts, width, inner). act: name of the activation.
    """

    module: nn.Module
    both: str
    down: str
    act: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of experts, width, and inner width."""
        experts, width, inner = self.module._parameters[self.down].shape  # type: ignore[union-attr]
        return experts, width, inner

    @property
    def elements(self) -> int:
        """How many elements all matrices have."""
        experts, width, inner = self.sizes
        return 3 * experts * width * inner


def experts_of(module: nn.Module) -> Experts | None:
    """The experts of a module; None if it has none, or computes something else."""
    three = [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]
    arguments = required_arguments(module)
    if len(three) != 2 or len(three) < len(module._parameters) or len(arguments) != 3 or len(module._modules) != 1:
        return None
    (child,) = module.children()
    leaf = leaf_of(child) if obstacle(child) is None else None
    if leaf is None or leaf.name not in GATED or getattr(module, "_is_expert_parallel", False):
        return None
    for both, down in (three, three[::-1]):
        found = Experts(module, both, down, leaf.name)
        experts, width, inner = found.sizes
        shape = module._parameters[both].shape  # type: ignore[union-attr]
        if tuple(shape) == (experts, 2 * inner, width) and all(_computes(found, *each) for each in _TRIED):
            return found
    return None


FUNCTIONS = (
    ACTIVATIONS
    | ARITHMETIC
    | CASTS
    | {"linear", "matmul", "chunk", "__getitem__", "index_add", "zeros_like", "shape", "dtype", "device"}
)
"""What may be done to tensors of floats. All of it but ReLU is analytic, so forwards that agree at random points agree
everywhere. Routing is not, and is calculated with integers.
"""


_TRIED: tuple[tuple[str, torch.dtype, int], ...] = (
    *[(each, torch.float64, 5) for each in MODES],
    *[("evaluation", dtype, 5) for dtype in CLOSE],
    ("evaluation", torch.float64, MANY),
)
"""Modes, dtypes and numbers of tokens."""


class _OnlyFunctions(TorchFunctionMode):
    """Ends a forward that does anything else to floats, such as a comparison or a clamp, or that takes a part of integers."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func.__self__ if func.__name__ == "__get__" else func, "__name__", "")
        name = NAMES.get(name, name)
        given = [*args, *(kwargs or {}).values()]
        floats = any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in given)
        if name == "__getitem__" and not floats and _cuts(args[1]):
            raise NotRecorded("a slice of what is routed", "all tokens that are routed to an expert")
        if floats and not FUNCTIONS & {name, name.removesuffix("_")}:
            raise NotRecorded(f"the call of {name}", "linear functions of tokens, and an activation")
        return func(*args, **(kwargs or {}))


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
    x = random(tokens, width)
    if dtype is torch.float64:
        x *= torch.tensor(SIZES, dtype=dtype, device="cpu").repeat(tokens // len(SIZES)).unsqueeze(-1)
    index = torch.randint(experts, (tokens, 2), generator=draw, device="cpu")

    def ours(x: torch.Tensor, both: torch.Tensor, down: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("tkiw,tw->tki", both[index], x).chunk(2, -1)
        return torch.einsum("tkwi,tki,tk->tw", down[index], _ActivationOf.apply(gate, UNGATED[found.act]) * up, weights)  # type: ignore[no-untyped-call]

    def theirs(x: torch.Tensor, both: torch.Tensor, down: torch.Tensor, weights: torch.Tensor) -> Any:
        vars(found.module)["_parameters"] = {found.both: both, found.down: down}
        check_effects(found.module, BUILTINS | {"range"}, unwraps=True)
        with _OnlyFunctions():
            return inspect.unwrap(type(found.module).forward)(found.module, x, index, weights)

    state = torch.get_rng_state()
    with mode(each) as training, training_or_not(found.module, training):
        given = [each.to(dtype) for each in (x, both, down, weights)]
        got = _with_gradients(theirs, *given)
        if not torch.equal(torch.get_rng_state(), state):
            return False
        wanted = _with_gradients(ours, *[each.double() for each in given])
    if got is None or wanted is None or got[0].shape != wanted[0].shape:
        return False
    pairs = [(one.double() - other, other) for one, other in zip(got, wanted)]
    if dtype is not torch.float64:  # sums of a token may cancel
        return all(off.norm() <= CLOSE[dtype] * other.norm() for off, other in pairs)
    return all((off.abs().amax(-1) <= CLOSE[dtype] * other.abs().amax(-1)).all() for off, other in pairs)


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


class _ActivationOf(torch.autograd.Function):
    """The activation of an op, and its gradient, on fp64 values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: type[Activation]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.math = op.math
        return op.math.value(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (dx,) = ctx.math.grad(dy, *ctx.saved_tensors)
        return dx, None


SPLITS, PLACES = "splits", "places"
"""The channels that carry the number of rows of each expert, and where the rows of each token lie."""


class Routed(Converted):
    """The forward of a module with experts. A number that is no expert's, as routers write for one on another device, adds
    nothing.
    """

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
            or 0 in x.shape
            or 0 in index.shape
            or index.is_floating_point()
            or not weights.is_floating_point()
        ):
            return False
        cast = torch.is_autocast_enabled(x.device.type)
        return cast or all(p is None or p.dtype == x.dtype for p in self.module._parameters.values())

    def outline(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A tensor like the tokens; which expert gets which token depends on values."""
        return (torch.empty_like(given[0]),)


def build_experts(found: Experts, path: str, recipe: Recipe | None) -> Routed:
    """The new forward of a module with experts."""
    experts, width, inner = found.sizes
    permute = TokenPermute(experts)
    combine = TokenCombine(weighted=True)
    for number, channel in enumerate((SPLITS, PLACES)):
        permute.set_extra_output_channel(number, channel, output_to_caller=False)
    combine.set_extra_input_channel(0, PLACES)
    run = PipelineRun(ops=[permute], names=["permute"], extras=[0, 1, INPUT], path=path)
    for name, sizes in ((found.both, (width, 2 * inner)), (found.down, (inner, width))):
        op, made = _grouped(found.module, name, experts, *sizes)
        op.name = f"{path}.{name}".lstrip(".")
        op.set_extra_input_channel(0, SPLITS)
        run.ops.append(op)
        run.names.append(name)
        run.made.append(made)
    run.ops.insert(2, GATED[found.act]())
    run.names.insert(2, found.act)
    run.ops.append(combine)
    run.names.append("combine")
    return Routed(
        found.module,
        path,
        arguments=required_arguments(found.module),
        run=run,
        members=dict(found.module.named_children()),
        recipe=recipe,
        proven=Proven(),
    )


def _grouped(module: nn.Module, name: str, experts: int, columns: int, rows: int) -> tuple[GroupedLinear, MadeParameters]:
    """A grouped product (columns to rows) whose weights are the parameter ``name`` of ``module``, and what lends it that."""
    made = MadeParameters({"weight": ((module, name, False),)})
    options: dict[str, Any] = {"bias": False, "single_grouped_weight": True, "pad_splits": True}
    op = GroupedLinear(experts, columns, rows, **options, device="meta", dtype=module._parameters[name].dtype)  # type: ignore[union-attr]
    del op._parameters["weight"]
    op.__dict__["owner"] = made
    return op, made
