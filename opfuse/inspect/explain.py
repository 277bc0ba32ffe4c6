"""What a model does under the active recipe: the lowered graph, what fused and what did not, why, and at what cost."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from opfuse.compiler.cover import FUSED, Group, Outcome
from opfuse.compiler.graph import BACKWARD, FORWARD, Graph
from opfuse.compiler.plain import (
    SIDES,
    collective_casts,
    flow,
    groups_of,
    outcome,
    pipeline,
    products,
    rematerialized,
    sizes_read,
    stepped,
)
from opfuse.compiler.plan import Plan
from opfuse.compiler.rules import JOINT
from opfuse.core.state import stateful
from opfuse.domains import checked_arguments
from opfuse.errors import FusionError, PipelineError, describe, nearest, number_of
from opfuse.events import ProductChosen
from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.observe import CallInputs, SavedValue, Totals, observe
from opfuse.inspect.saved import RefusedSetting, listed, recipes_of, totals_line, totals_under
from opfuse.kernels.products.chained import OF_DERIVATIVES
from opfuse.recipes.availability import kernels_in_torch, support
from opfuse.recipes.delayed import DelayedScalingStates

WIDTH, MOST = 120, 5
"""Columns of a line; lines of one pass, or names, that a screenful has of a pipeline."""

ROUTINE = ("absent", "shadowed")
"""Outcomes that a screenful leaves out: those of most rules at most places."""

DETAILS = "details  every rule at every place, each product and each value saved: .details() in Python, --all on the command line"

_INDEX = re.compile(r"\b\d+:")


@dataclass(frozen=True)
class Explanation:
    """The plans of one call of a model.

    backend: native, emulated or high precision, and why. saved: every value kept for the backward pass by this call; totals:
    what they come to. saved_by_override: bytes under every backward override, or why the recipe or the call refuses it.
    from_environment: fields of the recipe that came from the environment, and their variables. rule: the only rule to tell of
    (None: all). kept: casts of weights that :func:`opfuse.kept_weights` keeps around the call, and their bytes.
    chains: products of this call with elementwise ops behind them, and why they were not one launch; none but on a GPU.
    """

    recipe: str
    backend: str
    reason: str
    plans: tuple[Plan, ...] = field(repr=False)
    saved: tuple[SavedValue, ...] = field(repr=False)
    totals: Totals
    saved_by_override: Mapping[str, int | RefusedSetting] = field(default_factory=dict)
    from_environment: Mapping[str, str] = field(default_factory=dict)
    rule: str | None = None
    kept: tuple[int, int] = (0, 0)
    chains: tuple[ProductChosen, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward pass, each block of memory once, parameters not at all."""
        return self.totals.bytes

    def outcomes(self, side: str) -> tuple[Outcome, ...]:
        """Outcomes of one direction; those of joint rules belong to both."""
        return tuple(o for plan in self.plans for o in plan.outcomes if o.direction in (side, JOINT))

    def narrowed(self, rule: str) -> Explanation:
        """The explanation with the outcomes of one rule only. FusionError for a rule that was not active."""
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
        """A screenful: pipelines that are alike once, rules that fused or were refused, sums."""
        section = _brief if self.rule is None else _of_rule
        return "\n".join((*_head(self), *_pipelines(self, section), *([] if self.rule else ["", DETAILS])))

    def details(self) -> str:
        """As text: every rule at every place, each product and each value saved, where ``str`` is a screenful."""
        saved = ["", "saved for backward", *listed(self.saved)] if self.saved and self.rule is None else []
        return "\n".join((*_head(self), *_pipelines(self, _full if self.rule is None else _of_rule), *saved))

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
            "chains": [{"shape": list(chain.shape), "ops": list(chain.ops), "why_apart": chain.apart} for chain in self.chains],
            "saved_bytes_by_override": {
                name: {"refused": saved.reason} if isinstance(saved, RefusedSetting) else saved
                for name, saved in self.saved_by_override.items()
            },
        }

    def mermaid(self) -> str:
        """A Mermaid flow chart of each direction of each pipeline; fused nodes share a box."""
        return "\n\n".join("\n".join(_mermaid(plan, side)) for plan in self.plans for side in SIDES)


ENVIRONMENT = "environment "
"""How the source of a recipe's field begins if its value came from an environment variable."""


@checked_arguments(PipelineError, but="model")
def explain(model: nn.Module, *inputs: Any, overrides: bool = False, **named: Any) -> Explanation:
    """Explain ``model(*inputs, **named)`` under the active recipe, or those of converted modules, by running its forward once.

    The run leaves no trace: it works on copies of the inputs and of the model's buffers, and makes plans that no cache keeps.
    Delayed-scaling states record nothing, those that it makes are dropped, and random state is restored. Only hooks of the caller
    see it. overrides: also measure the bytes saved for backward under every backward override, as :func:`opfuse.saved` does in
    more detail; an override under which the call cannot run is reported as refused, and why.

    OpfuseWarning for amaxes of delayed scaling that were not finite. PipelineError for what is no module or runs no op of opfuse;
    DtypeError for a first input that is no tensor.
    """
    given = CallInputs(inputs, named)
    found = observe(model, given)
    for name, op in stateful(model):
        if isinstance(states := getattr(op, "quantizer_states", None), DelayedScalingStates):
            states.warn_of_left_out(name)
    recipes = recipes_of(found)
    if not recipes:
        reason = "; ".join(filter(None, ("no recipe is active", kernels_in_torch())))
        made = "none", "high precision", reason, found.plans, found.values, found.totals
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
    return Explanation(*made, by_override, taken, kept=found.kept, chains=found.products if given.on_cuda else ())


# -- as text: a screenful, or in full; layers that are alike are shown once -------------------------------------------------


def _head(e: Explanation) -> Iterator[str]:
    yield f"recipe   {e.recipe}"
    for name, variable in e.from_environment.items():
        yield f"         {name} was taken from the environment, {variable}"
    yield f"backend  {e.backend}: {e.reason}"
    if e.rule is None:
        yield f"saved    {totals_line(e.totals)}"
        for override, saved in e.saved_by_override.items():
            kept = str(saved) if isinstance(saved, RefusedSetting) else number_of(saved, "byte")
            yield f"         under backward_override={override}: {kept}"
    if any(e.kept):
        casts, size = e.kept
        yield f"kept     {number_of(casts, 'cast')} of weights, {number_of(size, 'byte')} beside what is saved"
    for chain in e.chains if e.rule is None else ():
        how = f"apart, {chain.apart}" if chain.apart else "one launch"
        yield f"chain    {' '.join(chain.ops)} behind a product {tuple(chain.shape)}: {how}"
    if e.rule is None and e.chains and any(_derives(plan) for plan in e.plans):
        yield f"         {OF_DERIVATIVES}"


def _derives(plan: Plan) -> bool:
    """Whether a backward pass goes from a product of quantized operands to an activation before it."""
    quantized = {
        product.op for product in plan.graph.products if product.name == "dgrad" and None not in (product.left, product.right)
    }
    nodes = [node for node in plan.graph.view(BACKWARD) if not node.is_cast]
    nodes = [node for node in nodes if "activation" in node.traits or "elementwise" not in node.traits]
    return any("activation" in one.traits and two.op in quantized for one, two in itertools.pairwise(nodes))


def _pipelines(e: Explanation, section: Callable[[Plan], Iterable[str]]) -> Iterator[str]:
    """A section for each pipeline, under the names of all that have the same."""
    sections = [(plan.name, plan, tuple(section(plan))) for plan in e.plans]
    for same in alike(sections, lambda each: (starred(each[0]), each[2])):
        _, plan, lines = same[0]
        counts = {"basic op": plan.ops, "node": plan.graph.nodes, "autograd node": plan.segments}
        sizes = ", ".join(number_of(len(each), noun) for noun, each in counts.items())
        yield ""
        yield f"{counted([name for name, _, _ in same])}: {sizes}{' (opaque)' if plan.opaque else ''}"
        yield from lines


# -- a pipeline ------------------------------------------------------------------------------------------------------------


def _brief(plan: Plan) -> Iterator[str]:
    for side in SIDES:
        yield from _flow(plan, side, MOST)
    yield from _products_alike(plan)
    yield from _collective_casts(plan)
    yield from _sizes(plan)
    if plan.rematerialized:
        yield f"  made anew in the backward pass: {number_of(len(list(rematerialized(plan))), 'operand')} of products"
    yield from _in_steps(plan, MOST)
    shown = [outcome for outcome in plan.outcomes if outcome.status not in ROUTINE]
    yield from ("  rules", *_alike(shown)) if shown else ("  rules: none fused",)


def _full(plan: Plan) -> Iterator[str]:
    yield from _before_and_after(plan)
    if plan.graph.products:
        yield "  products"
    for product in products(plan):
        yield f"    {product['op']} {product['product']}: {product['status']}, {product['reason']}"
    yield from _collective_casts(plan)
    yield from _sizes(plan)
    if plan.rematerialized:
        yield "  made anew in the backward pass"
    for each in rematerialized(plan):
        yield f"    {each['op']} {each['operand']}: {each['format'] or 'high precision'} of {' '.join(each['from'])}"
    yield from _in_steps(plan)
    yield "  rules"
    yield from (f"    {each}" for each in plan.outcomes)


def _of_rule(plan: Plan) -> Iterator[str]:
    """What became of one rule, and what would make it fire."""
    yield from _before_and_after(plan)
    yield "  rules"
    yield from (f"    {outcome}" for outcome in plan.outcomes)
    yield from (f"  to fire  {cure}" for cure in dict.fromkeys(map(to_fire, plan.outcomes)) if cure)


def _collective_casts(plan: Plan) -> Iterator[str]:
    """How rows of other ranks come."""
    found = list(collective_casts(plan))
    if found:
        yield "  rows of other ranks"
    for collective in found:
        how = collective["format"] or f"values, cast anew: {collective['why']}"
        yield "    " + " ".join(filter(None, (collective["op"], collective["product"], f"{collective['operand']}: {how}")))


def _sizes(plan: Plan) -> Iterator[str]:
    """Where the host waits for a GPU."""
    found = sizes_read(plan)
    if found:
        yield "  sizes of groups that the host reads"
    yield from (f"    {op}: {why}" for op, why in found.items())


def _in_steps(plan: Plan, most: int | None = None) -> Iterator[str]:
    """What no program repeats, and why: code of the user's own runs at every call."""
    found = dict.fromkeys(stepped(plan).values())
    if found:
        yield "  runs at every call"
    yield from (f"    {why}" for why in list(found)[:most])
    if most is not None and len(found) > most:
        yield f"    and {len(found) - most} more"


def _before_and_after(plan: Plan) -> Iterator[str]:
    yield from _wrapped("before", list(plan.ops))
    for side in SIDES:
        yield from _flow(plan, side)


def _flow(plan: Plan, side: str, most: int | None = None) -> Iterator[str]:
    yield from _wrapped(side, [_group_name(plan.graph, group) for group in groups_of(plan, side)], most)


def _wrapped(head: str, words: list[str], most: int | None = None) -> Iterator[str]:
    """Lines of ``words``, each of which stays whole; at most so many lines."""
    whole = " ".join(word.replace(" ", "\xa0") for word in words)
    lines = textwrap.wrap(whole, WIDTH - 11, break_long_words=False, break_on_hyphens=False) or [""]
    for number, line in enumerate(lines[:most]):
        end = " …" if number + 1 == most and len(lines) > most else ""
        yield f"  {'' if number else head:<8} {line}{end}".replace("\xa0", " ").rstrip()


def _products_alike(plan: Plan) -> Iterator[str]:
    """How products are made: a line for all that are made alike."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for product in products(plan):
        made = found.setdefault((product["status"], product["reason"]), {})
        made.setdefault(product["op"], []).append(product["product"])
    if found:
        yield "  products"
    for (status, reason), made in found.items():
        by_products: dict[str, list[str]] = {}
        for op, several in made.items():
            by_products.setdefault(" ".join(several), []).append(op)
        for names, of in by_products.items():
            yield f"    {names} of {' '.join(of) if len(of) <= MOST else f'{len(of)} ops'}: {status}, {reason}"


def _alike(outcomes: list[Outcome]) -> Iterator[str]:
    """Lines of outcomes; those of one rule that became the same of the same kinds of ops are one, with the first place."""

    def became(each: Outcome) -> Outcome:
        return replace(each, ops=tuple(_INDEX.sub("", op) for op in each.ops))

    for places in alike(outcomes, became):
        yield f"    {places[0]}" + (f"  and {len(places) - 1} alike" if len(places) > 1 else "")


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


# -- as a flow chart --------------------------------------------------------------------------------------------------------


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
