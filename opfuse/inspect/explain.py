"""What a model does under the active recipe: the lowered graph, what fused and what did not, why, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from opfuse.compiler.cover import FUSED, Group, Outcome
from opfuse.compiler.graph import BACKWARD, FORWARD, Graph
from opfuse.compiler.plain import SIDES, flow, groups_of, meetings, outcome, pipeline, products, remade
from opfuse.compiler.plan import Plan
from opfuse.compiler.rules import JOINT
from opfuse.errors import FusionError, describe, nearest
from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.observe import CallInputs, SavedValue, Totals, observe
from opfuse.inspect.saved import RefusedSetting, listed, told, totals_under
from opfuse.recipes import current_recipe, support
from opfuse.recipes.delayed import DelayedScalingStates
from opfuse.tensors.gemm import ChainTold, chains_told

ENVIRONMENT = "environment "
"""How the source of a recipe's field begins that was taken from a variable."""


@dataclass(frozen=True)
class Explanation:
    """The plans of one call of a model.

    backend: native, emulated or high precision, and why. saved: every value kept for the backward pass by this call; totals:
    what they come to. saved_by_override: bytes under every backward override, or why the recipe or the call refuses it.
    from_environment: the variable that each field of the recipe was taken from which was not given. rule: the only one that is
    told of (None: all). kept: casts of weights that :func:`opfuse.kept_weights` keeps around the call, and their bytes.
    chains: products of this call with elementwise ops behind them, and why they were not one launch; none but on a GPU.
    """

    recipe: str
    backend: str
    reason: str
    plans: tuple[Plan, ...]
    saved: tuple[SavedValue, ...]
    totals: Totals
    saved_by_override: Mapping[str, int | RefusedSetting] = field(default_factory=dict)
    from_environment: Mapping[str, str] = field(default_factory=dict)
    rule: str | None = None
    kept: tuple[int, int] = (0, 0)
    chains: tuple[ChainTold, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward pass, each block of memory once, parameters not at all."""
        return self.totals.bytes

    def outcomes(self, side: str) -> tuple[Outcome, ...]:
        """Outcomes of one direction; those of joint rules belong to both."""
        return tuple(o for plan in self.plans for o in plan.outcomes if o.direction in (side, JOINT))

    def narrowed(self, rule: str) -> Explanation:
        """The same explanation with the outcomes of one rule only. FusionError for a rule that was not active."""
        known = sorted({outcome.rule for plan in self.plans for outcome in plan.outcomes})
        if rule not in known:
            got, cure = f"{rule!r}{nearest(rule, known)}", f"name one of {', '.join(known)}"
            raise FusionError(describe("explanation", wanted="an active rule", got=got, cure=cure))
        plans = (replace(plan, outcomes=tuple(o for o in plan.outcomes if o.rule == rule)) for plan in self.plans)
        return replace(self, plans=tuple(plans), rule=rule)

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
            "from_environment": dict(self.from_environment),
            "backend": self.backend,
            "reason": self.reason,
            "forward": [outcome(o) for o in self.outcomes(FORWARD)],
            "backward": [outcome(o) for o in self.outcomes(BACKWARD)],
            "pipelines": [pipeline(plan) for plan in self.plans],
            "saved": [asdict(value) for value in self.saved],
            "saved_bytes": self.saved_bytes,
            "kept_bytes": self.kept[1],
            "chains": [{"shape": list(each.shape), "ops": list(each.ops), "why_apart": each.why} for each in self.chains],
            "saved_bytes_by_override": {
                name: {"refused": saved.reason} if isinstance(saved, RefusedSetting) else saved
                for name, saved in self.saved_by_override.items()
            },
        }

    def mermaid(self) -> str:
        """A Mermaid flow chart of each direction of each pipeline; fused nodes share a box."""
        return "\n\n".join("\n".join(_mermaid(plan, side)) for plan in self.plans for side in SIDES)


def explain(model: nn.Module, *inputs: Any, overrides: bool = False, **named: Any) -> Explanation:
    """Explain ``model(*inputs, **named)`` under the active recipe, or those of converted modules, by running its forward once.

    The run leaves no trace: it works on copies of the inputs and of the model's buffers, makes plans that no cache keeps,
    delayed-scaling states record nothing and those that it makes are dropped, and random state is restored. Only hooks of
    the caller see it. overrides: also measure the bytes saved for backward under every backward override, as
    :func:`opfuse.saved` does in more detail; an override under which the call cannot run is told as refused, and why.

    OpfuseWarning for amaxes of delayed scaling that were not finite. PipelineError for what is no module or runs no op of opfuse;
    DtypeError for a first input that is no tensor.
    """
    active, given = current_recipe(), CallInputs(inputs, named)
    with chains_told() as chains:
        found = observe(model, given)
    for name, module in model.named_modules():
        if isinstance(states := getattr(module, "quantizer_states", None), DelayedScalingStates):
            states.tell(name or type(module).__name__)
    ran = dict.fromkeys(plan.key.env.recipe for plan in found.plans)  # converted modules have recipes of their own
    recipes = [active] if active is not None else [each for each in ran if each is not None]
    if not recipes:
        made = "none", "high precision", "no recipe is active", found.plans, found.values, found.totals
        return Explanation(*made, kept=found.kept)
    statuses = [support(each) for each in recipes]
    status = next((each for each in statuses if each.status != "native"), statuses[0])
    asked = overrides and len(recipes) == 1
    totals = totals_under(recipes[0], "backward_override", found.totals, model, given) if asked else {}
    by_override = {name: kept if isinstance(kept, RefusedSetting) else kept.bytes for name, kept in totals.items()}
    sources = {name: source for each in recipes for name, source in each.sources.items()}
    taken = {name: source.removeprefix(ENVIRONMENT) for name, source in sources.items() if source.startswith(ENVIRONMENT)}
    told_as = " and ".join(map(repr, recipes))
    made = told_as, status.status, status.reason, found.plans, found.values, found.totals
    return Explanation(*made, by_override, taken, kept=found.kept, chains=tuple(chains) if given.on_cuda else ())


# -- text ----------------------------------------------------------------------------------------------------------------


def _text(e: Explanation) -> Iterator[str]:
    yield f"recipe   {e.recipe}"
    for name, variable in e.from_environment.items():
        yield f"         {name} was taken from the environment, {variable}"
    yield f"backend  {e.backend}: {e.reason}"
    if e.rule is None:
        yield f"saved    {told(e.totals)}"
        for override, saved in e.saved_by_override.items():
            kept = str(saved) if isinstance(saved, RefusedSetting) else f"{saved} bytes"
            yield f"         under backward_override={override}: {kept}"
    if any(e.kept):
        casts, size = e.kept
        yield f"kept     {casts} casts of weights, {size} bytes beside what is saved"
    for shape, names, why in e.chains if e.rule is None else ():
        yield f"chain    {' '.join(names)} behind a product {tuple(shape)}: {f'apart, {why}' if why else 'one launch'}"
    told_of = [(plan.name, tuple(_pipeline(plan, e.rule))) for plan in e.plans]
    for same in alike(told_of, lambda each: (starred(each[0]), each[1])):
        sizes, *lines = same[0][1]
        yield from ("", f"{counted([name for name, _ in same])}: {sizes}", *lines)
    if e.saved and e.rule is None:
        yield ""
        yield "saved for backward"
        yield from listed(e.saved)


def _pipeline(plan: Plan, rule: str | None) -> Iterator[str]:
    """What is told of a plan behind its name. rule: the only one that is told of."""
    sizes = f"{len(plan.ops)} ops, {len(plan.graph.nodes)} nodes, {len(plan.segments)} autograd nodes"
    yield f"{sizes}{' (opaque)' if plan.opaque else ''}"
    yield f"  before   {' '.join(plan.ops)}"
    for side in SIDES:
        yield f"  {side:<8} {' '.join(_group_name(plan.graph, group) for group in groups_of(plan, side))}"
    if rule is None:
        yield from _products(plan)
    yield "  rules"
    yield from (f"    {each}" for each in plan.outcomes)
    if rule is not None:
        yield from (f"  to fire  {cure}" for cure in dict.fromkeys(map(to_fire, plan.outcomes)) if cure)


def _products(plan: Plan) -> Iterator[str]:
    """How each product is made, and which of their operands are made twice."""
    if plan.graph.products:
        yield "  products"
    for product in products(plan):
        yield f"    {product['op']} {product['product']}: {product['status']}, {product['reason']}"
    if plan.graph.meetings:
        yield "  rows of other ranks"
    for each in meetings(plan):
        how = each["format"] or f"values, cast anew: {each['why']}"
        yield f"    {each['op']} {each['product']} {each['operand']}: {how}"
    if plan.remade:
        yield "  made anew in the backward pass"
    for each in remade(plan):
        yield f"    {each['op']} {each['operand']}: {each['format'] or 'high precision'} of {' '.join(each['from'])}"


def to_fire(found: Outcome) -> str | None:
    """What would make a rule fire where it did not, as far as one thing is in its way; None where it did."""
    if found.status == FUSED:
        return None
    if found.by is not None:
        return f"at {' '.join(found.ops)}: have {found.rule} claim before {found.by}, or disable {found.by}"
    if found.guard is None:
        return f"have ops in a row that the pattern of {found.rule} names"
    if found.guard.startswith("pattern."):
        return f"at {' '.join(found.ops)}: go on with {found.wanted} in place of {found.got}"
    return f"at {' '.join(found.ops)}: {found.guard} has to be {found.wanted}, and is {found.got}"


def _group_name(graph: Graph, group: Group) -> str:
    names = " ".join(graph.nodes[i].name for i in group.nodes)
    return names if len(group.nodes) == 1 else f"{group.name}({names})"


def _mermaid(plan: Plan, side: str) -> Iterator[str]:
    nodes = plan.graph.nodes
    yield f"%% {plan.name}, {side}"
    yield "flowchart LR" if side == FORWARD else "flowchart RL"
    shown = set()
    for number, group in enumerate(groups_of(plan, side)):
        indent = "  "
        if group.claimed:
            yield f'  subgraph f{number}["{group.name}"]'
            indent = "    "
        for i in group.nodes:
            shown.add(i)
            yield f'{indent}n{i}["{nodes[i].name}"]'
        if group.claimed:
            yield "  end"
    for source, target in flow(plan.graph, side, shown):
        yield f"  n{source} --> n{target}"
