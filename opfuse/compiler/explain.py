"""What a model does under the active recipe: the lowered graph, what fused and what did not, why, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from opfuse.compiler.cover import Group, Outcome
from opfuse.compiler.fuser import recorded_plans
from opfuse.compiler.graph import BACKWARD, FORWARD, Graph
from opfuse.compiler.plan import Plan
from opfuse.compiler.rules import JOINT
from opfuse.errors import RecipeError
from opfuse.recipes import autocast, current_amax_group, current_recipe, support
from opfuse.recipes.delayed import DelayedScalingStates, Snapshot
from opfuse.recipes.policy import KEEP

SIDES = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class Explanation:
    """The plans of one call of a model.

    backend: native, emulated or high precision, and why. saved_bytes: kept for the backward pass by this call.
    saved_by_override: the same under every backward override that the recipe takes (None where it refuses one).
    """

    recipe: str
    backend: str
    reason: str
    plans: tuple[Plan, ...]
    saved_bytes: int
    saved_by_override: Mapping[str, int | None] = field(default_factory=dict)

    def outcomes(self, side: str) -> tuple[Outcome, ...]:
        """Outcomes of one direction; those of joint rules belong to both."""
        return tuple(o for plan in self.plans for o in plan.outcomes if o.direction in (side, JOINT))

    def narrowed(self, rule: str) -> Explanation:
        """The same explanation with the outcomes of one rule only."""
        plans = (replace(plan, outcomes=tuple(o for o in plan.outcomes if o.rule == rule)) for plan in self.plans)
        return replace(self, plans=tuple(plans))

    @property
    def fusions(self) -> tuple[str, ...]:
        """Names of the rules that fused, once for each place."""
        return tuple(name for plan in self.plans for name in plan.fusions)

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: ``forward`` and ``backward`` outcomes, the pipelines before and after, bytes, backend."""
        return {
            "recipe": self.recipe,
            "backend": self.backend,
            "reason": self.reason,
            "forward": [_outcome(o) for o in self.outcomes(FORWARD)],
            "backward": [_outcome(o) for o in self.outcomes(BACKWARD)],
            "pipelines": [_pipeline(plan) for plan in self.plans],
            "saved_bytes": self.saved_bytes,
            "saved_bytes_by_override": dict(self.saved_by_override),
        }

    def mermaid(self) -> str:
        """A Mermaid flow chart of each direction of each pipeline; fused nodes share a box."""
        return "\n\n".join("\n".join(_mermaid(plan, side)) for plan in self.plans for side in SIDES)


def explain(model: nn.Module, x: torch.Tensor, *extra_inputs: torch.Tensor, overrides: bool = False) -> Explanation:
    """Explain ``model(x, *extra_inputs)`` under the active recipe, by running its forward once.

    The run leaves no trace: it works on copies of the inputs and of the model's buffers, makes plans that no cache keeps,
    delayed-scaling states record nothing and those that it makes are dropped, and random state is restored. Only hooks of
    the caller see it. overrides: also measure the bytes saved for backward under every backward override.
    """
    recipe = current_recipe()
    plans, saved = _observe(model, x, extra_inputs)
    if recipe is None:
        return Explanation("none", "high precision", "no recipe is active", plans, saved)
    status = support(recipe)
    by_override: dict[str, int | None] = {}
    for override in KEEP if overrides else ():
        try:
            changed = recipe.replace(backward_override=override)
        except RecipeError:
            by_override[str(override)] = None
            continue
        with autocast(recipe=changed, amax_reduction_group=current_amax_group()):
            by_override[str(override)] = _observe(model, x, extra_inputs)[1]
    return Explanation(repr(recipe), status.status, status.reason, plans, saved, by_override)


def _observe(model: nn.Module, x: torch.Tensor, extras: Sequence[torch.Tensor]) -> tuple[tuple[Plan, ...], int]:
    """The plans that a call runs, and the bytes it saves for backward, counting shared memory once and parameters not at all."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters() if type(p) is nn.Parameter}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is torch.Tensor and (pointer := tensor.untyped_storage().data_ptr()) not in parameters:
            saved[pointer] = max(saved.get(pointer, 0), tensor.nbytes)
        return tensor

    copies = {id(tensor): _copy(tensor) for tensor in (x, *extras)}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with _undone(model), recorded_plans(trial=True) as plans, hooks:
        torch.func.functional_call(model, buffers, tuple(copies[id(tensor)] for tensor in (x, *extras)))
    return tuple(plans), sum(saved.values())


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    states = [getattr(module, "quantizer_states", None) for module in model.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(Snapshot().replaying())
        for state in states:
            if isinstance(state, DelayedScalingStates):
                stack.enter_context(state.kept())
        yield


def _copy(x: torch.Tensor) -> torch.Tensor:
    """``x`` in memory of its own, as aligned, as much a leaf and with the same need of a gradient: its plan is the same."""
    copy = x.detach().clone()
    if type(x) is torch.Tensor and (shift := (x.data_ptr() - copy.data_ptr()) % 16):
        room = x.new_empty(x.numel() + 16)
        shift = (x.data_ptr() - room.data_ptr()) % 16 // x.element_size()
        copy = room[shift : shift + x.numel()].view(x.shape).copy_(copy)
    if x.requires_grad and not x.is_leaf and type(x) is torch.Tensor:
        return copy.copy_(copy.clone().requires_grad_())
    return copy.requires_grad_(x.requires_grad)


# -- text ----------------------------------------------------------------------------------------------------------------


def _text(e: Explanation) -> Iterator[str]:
    yield f"recipe   {e.recipe}"
    yield f"backend  {e.backend}: {e.reason}"
    yield f"saved    {e.saved_bytes} bytes for backward"
    for override, saved in e.saved_by_override.items():
        yield f"         {'refused by this recipe' if saved is None else f'{saved} bytes'} under backward_override={override}"
    for plan in e.plans:
        yield ""
        sizes = f"{len(plan.ops)} ops, {len(plan.graph.nodes)} nodes, {len(plan.segments)} autograd nodes"
        yield f"{plan.name}: {sizes}{' (opaque)' if plan.opaque else ''}"
        yield f"  before   {' '.join(plan.ops)}"
        for side in SIDES:
            yield f"  {side:<8} {' '.join(_group_name(plan.graph, group) for group in _groups(plan, side))}"
        yield "  rules"
        yield from (f"    {outcome}" for outcome in plan.outcomes)


def _groups(plan: Plan, side: str) -> list[Group]:
    if side == FORWARD:
        return [group for segment in plan.segments for group in segment.forward]
    return [group for segment in reversed(plan.segments) for group in segment.backward]


def _group_name(graph: Graph, group: Group) -> str:
    names = " ".join(graph.nodes[i].name for i in group.nodes)
    return names if len(group.nodes) == 1 else f"{group.name}({names})"


# -- plain values --------------------------------------------------------------------------------------------------------


def _outcome(outcome: Outcome) -> dict[str, Any]:
    values = {name: getattr(outcome, name) for name in ("rule", "direction", "status", "by", "guard", "wanted", "got")}
    return {name: value for name, value in values.items() if value is not None} | {"ops": list(outcome.ops)}


def _pipeline(plan: Plan) -> dict[str, Any]:
    return {
        "name": plan.name,
        "opaque": plan.opaque,
        "before": list(plan.ops),
        "nodes": [node.name for node in plan.graph.nodes],
        "edges": [[source, target] for source, target in plan.graph.digraph.edges()],
        "segments": [[segment.nodes.start, segment.nodes.stop] for segment in plan.segments],
        **{
            f"{side}_groups": [
                {"fusion": g.name if len(g.nodes) > 1 else None, "nodes": list(g.nodes)} for g in _groups(plan, side)
            ]
            for side in SIDES
        },
    }


def _mermaid(plan: Plan, side: str) -> Iterator[str]:
    nodes = plan.graph.nodes
    yield f"%% {plan.name}, {side}"
    yield "flowchart LR" if side == FORWARD else "flowchart RL"
    shown = set()
    for number, group in enumerate(_groups(plan, side)):
        indent = "  "
        if len(group.nodes) > 1:
            yield f'  subgraph f{number}["{group.name}"]'
            indent = "    "
        for i in group.nodes:
            shown.add(i)
            yield f'{indent}n{i}["{nodes[i].name}"]'
        if len(group.nodes) > 1:
            yield "  end"
    for source, target in _flow(plan.graph, side, shown):
        yield f"  n{source} --> n{target}"


def _flow(graph: Graph, side: str, shown: set[int]) -> Iterator[tuple[int, int]]:
    """Who hands a value to whom: readers of a value forward, and back along the same gradients."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        if node.index not in shown:
            continue
        for value in (*node.inputs, *(value for _, value in node.operands)):
            root = graph.gradient_of(value) if side == BACKWARD else value
            if root in last:
                yield (last[root], node.index) if side == FORWARD else (node.index, last[root])
        last.update(dict.fromkeys((graph.gradient_of(v) if side == BACKWARD else v for v in node.outputs), node.index))
