"""Converts a module that holds all experts of a mixture in two parameters: they become grouped products over sorted rows.

Such a module is recognised by what it computes. With small random parameters it must return sum_k w_k W_down (act(W_gate x) *
(W_up x)) for each token x, over the experts k that its second argument names for the token, with weights w from its third
argument; and its gradients must be those of that sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from opfuse.convert.chain import arguments_of
from opfuse.convert.converted import Converted
from opfuse.convert.leaves import GATED, obstacle
from opfuse.convert.parts import PipelineRun
from opfuse.convert.probe import UNGATED, ActivationOf, activation_of_module, found_in_both_modes, kept, with_gradients
from opfuse.convert.weights import MadeParameters
from opfuse.ops.grouped_linear import GroupedLinear
from opfuse.ops.routing import by_group, rows_of
from opfuse.recipes import Recipe

CLOSE = 1e-9
"""How far a token's results may be off, relative to the largest of them."""

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
    if len(three) != 2 or len(three) < len(module._parameters) or len(arguments_of(module)) != 3:
        return None
    children = [child for child in module.children() if obstacle(child) is None]
    acts = [name for child in children if (name := activation_of_module(child)) is not None]
    if len(acts) != 1 or acts[0] not in GATED or len(module._modules) != 1 or getattr(module, "_is_expert_parallel", False):
        return None
    for both, down in (three, three[::-1]):
        found = Experts(module, both, down, acts[0])
        experts, width, inner = found.sizes
        shape = module._parameters[both].shape  # type: ignore[union-attr]
        if tuple(shape) == (experts, 2 * inner, width) and found_in_both_modes(module, partial(_computes, found)):
            return found
    return None


def _computes(found: Experts) -> bool:
    experts, width, inner = found.sizes[0], 6, 4
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64, device="cpu")

    both, down, weights = random(experts, 2 * inner, width), random(experts, width, inner), random(5, 2)
    x = random(5, width) * torch.tensor(SIZES, dtype=torch.float64, device="cpu").unsqueeze(-1)
    index = torch.randint(experts, (5, 2), generator=draw, device="cpu")

    def ours(x: torch.Tensor, both: torch.Tensor, down: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("tkiw,tw->tki", both[index], x).chunk(2, -1)
        return torch.einsum("tkwi,tki,tk->tw", down[index], ActivationOf.apply(gate, UNGATED[found.act]) * up, weights)

    def theirs(x: torch.Tensor, both: torch.Tensor, down: torch.Tensor, weights: torch.Tensor) -> Any:
        vars(found.module)["_parameters"] = {found.both: both, found.down: down}
        return inspect.unwrap(type(found.module).forward)(found.module, x, index, weights)

    with kept(found.module) as assigned:
        got = with_gradients(theirs, x, both, down, weights)
        if set(assigned()) - {"_parameters"}:
            return False
    wanted = with_gradients(ours, x, both, down, weights)
    if got is None or wanted is None or got[0].shape != wanted[0].shape:
        return False
    return all(((one - other).abs().amax(-1) <= CLOSE * other.abs().amax(-1)).all() for one, other in zip(got, wanted))


class Routed(Converted):
    """The forward of a module with experts."""

    experts: int

    def outline(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A tensor like the tokens; which expert gets which token depends on values."""
        return (torch.empty_like(given[0]),)

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy each token for each of its experts, sorted by expert; run them; weight the results and sum those of each token."""
        index, weights = arguments
        order, places, splits = by_group(index, self.experts)
        (run,) = self.parts
        rows = run(rows_of(x, order // index.shape[-1], places), [splits])
        parts = rows_of(rows, places.flatten(), order.unsqueeze(1)).view(*index.shape, -1)
        return (parts * weights.unsqueeze(-1)).sum(-2).to(x.dtype)


def build_experts(found: Experts, path: str, recipe: Recipe | None) -> Routed:
    """The new forward of a module with experts."""
    experts, width, inner = found.sizes
    run = PipelineRun(path=path)
    for name, sizes in ((found.both, (width, 2 * inner)), (found.down, (inner, width))):
        op, made = _grouped(found.module, name, experts, *sizes)
        op.name = f"{path}.{name}".lstrip(".")
        run.ops.append(op)
        run.names.append(name)
        run.made.append(made)
        run.extras.append(0)
    run.ops.insert(1, GATED[found.act]())
    run.names.insert(1, found.act)
    acts = dict(found.module.named_children())
    routed = Routed(found.module, path, arguments=arguments_of(found.module), parts=(run,), members=acts, recipe=recipe)
    routed.experts = experts
    return routed


def _grouped(module: nn.Module, name: str, experts: int, columns: int, rows: int) -> tuple[GroupedLinear, MadeParameters]:
    """A grouped product (columns to rows) whose weights are the parameter ``name`` of ``module``, and what lends it that."""
    made = MadeParameters({"weight": ((module, name, False),)})
    options: dict[str, Any] = {"bias": False, "single_grouped_weight": True, "pad_splits": True}
    op = GroupedLinear(experts, columns, rows, **options, device="meta", dtype=module._parameters[name].dtype)  # type: ignore[union-attr]
    del op._parameters["weight"]
    op.__dict__["owner"] = made
    return op, made
