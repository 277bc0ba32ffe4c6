"""A plan as plain values, for JSON: what fused where, which products run how, and the graph before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from opfuse.compiler.collectives import why_values_go
from opfuse.compiler.cover import Group, Outcome
from opfuse.compiler.graph import BACKWARD, FORWARD, QUANTIZE_GROUPS, CastSpec, Graph, ProductFormats
from opfuse.compiler.plan import RANK_ALONE, Plan
from opfuse.core.protocol import Grouping
from opfuse.core.signature import Env
from opfuse.formats import DEQUANTIZED, NumberFormat
from opfuse.kernels.products.backends import Machine
from opfuse.kernels.products.certificate import wrong_product
from opfuse.kernels.products.native import (
    OWN,
    invariant_refusal,
    layout_refusal,
    library_name,
    machine,
    native_name,
    native_refusal,
    wrong_runs,
)
from opfuse.kernels.products.tiles import rows_of
from opfuse.numerics.layouts import layout_of
from opfuse.numerics.row_groups import MOST_GROUPS, TILE
from opfuse.tensors.gemm import GEMMS, clash
from opfuse.tensors.ragged import casts_in_groups

SIDES = (FORWARD, BACKWARD)


def groups_of(plan: Plan, side: str) -> list[Group]:
    """The groups of one pass, in the order in which they run."""
    if side == FORWARD:
        return [group for segment in plan.segments for group in segment.forward]
    return [group for segment in reversed(plan.segments) for group in segment.backward]


def outcome(found: Outcome) -> dict[str, Any]:
    """What became of a rule at a place; what does not apply is left out."""
    values = {name: getattr(found, name) for name in ("rule", "direction", "status", "by", "guard", "wanted", "got")}
    return {name: value for name, value in values.items() if value is not None} | {"ops": list(found.ops)}


def products(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each matrix product of ops with quantized operands: its formats (None: high precision), native or emulated, and why."""
    nodes = {node.op: node for node in plan.graph.nodes if not node.is_cast}
    in_groups = {node.op for node in plan.graph.nodes if node.is_cast and node.spec.ragged is not None}
    env = plan.key.env
    for product in plan.graph.products:
        node = nodes[product.op]
        tiled = product.op in in_groups  # each group of rows, of which nobody here knows how many there are, begins on a tile
        status, reason = how(product, node.spec, env._replace(rows_class=TILE) if tiled else env)
        formats = {side: None if fmt is None else str(fmt) for side, fmt in (("left", product.left), ("right", product.right))}
        yield {"op": node.name, "product": product.name, **formats, "status": status, "reason": reason}


class How(NamedTuple):
    """``native``, ``emulated`` or ``high precision``, and why."""

    status: str
    reason: str


def how(product: ProductFormats, spec: Any, env: Env) -> How:
    """How ``product`` of an op with hyper-parameters ``spec`` runs in ``env``; of a native one also who makes it."""
    if product.left is None or product.right is None:
        return How("high precision", "an operand is in high precision")
    if DEQUANTIZED in (product.left, product.right):
        return How("emulated", "it reads the dequantized values of a quantizer of one's own")
    if (reason := clash(product.name, product.left, product.right)) is not None:
        return How("emulated", reason.problem)
    what, of_spec = GEMMS[product.name], (getattr(spec, "in_features", 0), getattr(spec, "out_features", 0))
    rows, into, out = product.sizes or (env.rows_class, *of_spec)
    widths = {"input": (rows, into), "weight": (out, into), "grad_output": (rows, out)}
    left, right = (
        layout_of(fmt, plane, widths[role])
        for fmt, plane, role in ((product.left, what.left_plane, what.left), (product.right, what.right_plane, what.right))
    )
    on = machine(env.arch)
    asked = left, right, env.autocast or torch.bfloat16, on
    ours, refused = not layout_refusal(*asked, own=True), native_refusal(*asked)
    if env.product(product.name).get("invariant", False):
        family = product.left.family
        return _invariant(family, invariant_refusal(*asked) or wrong_product(family, on), env, on, ours=ours)
    if refused and not ours:
        return How("emulated", refused)
    alone = hasattr(spec, "num_groups") or bool(refused)
    return How("native", _maker(product.left, product.right, on, ours=ours, alone=alone))


def _maker(left: NumberFormat, right: NumberFormat, on: Machine, *, ours: bool, alone: bool) -> str:
    """Who makes a native product. ours: whether the package's own kernel takes it; alone: whether it then does so at any size, as
    in one launch for groups, or where the library refuses.
    """
    return OWN[left.family][0].name if ours and alone else native_name(left, right, on)


def _invariant(family: str, refusal: str, env: Env, on: Machine, *, ours: bool) -> How:
    """How a product runs in which no row depends on others."""
    if ours:
        return How("native", f"{OWN[family][0].name}, batch-invariant: one order of sums for any number of rows")
    tiles = f"batch-invariant: in tiles of {rows_of(env.device)} rows"
    return How("emulated", f"{refusal}; {tiles}") if refusal else How("native", f"{library_name(family, on)}, {tiles}")


def sizes_read(plan: Plan) -> dict[str, str]:
    """Ops whose sizes of groups the host reads where a GPU has them, and so waits, and why; none on other devices."""
    if plan.key.env.device != "cuda":
        return {}
    emulated = {each["op"]: f"{each['product']}: {each['reason']}" for each in products(plan) if each["status"] == "emulated"}
    found = {}
    for node in plan.graph.nodes:
        if node.grouping is not None:
            casts = [
                each.spec for each in plan.graph.nodes if each.is_cast and each.op == node.op and each.kind == QUANTIZE_GROUPS
            ]
            why = _why_read(node.grouping, casts) or emulated.get(node.name, "")
            found[node.name] = why or next((_refusal_in_groups(each, plan.key.env) for each in casts), "")
    return {name: why for name, why in found.items() if why}


def _why_read(grouping: Grouping, casts: Sequence[CastSpec]) -> str:
    """Why neither casts nor sums of groups leave their sizes on a GPU; an empty string if they do."""
    if grouping.summed:
        return "gradients of biases sum the rows of each group"
    if casts and grouping.number > MOST_GROUPS:
        return f"wants at most {MOST_GROUPS} groups, got {grouping.number}"
    apart = [cast.quantizer for cast in casts if cast.ragged is None]
    unknown = dict.fromkeys(repr(quantizer) for quantizer in apart if not casts_in_groups(quantizer, grouping.number))
    if unknown:
        return f"no kernel casts groups by {' or '.join(unknown)}"
    return "weights have several formats" if apart else ""


def _refusal_in_groups(cast: CastSpec, env: Env) -> str:
    """Why a device that multiplies each group does not where it alone knows their sizes; an empty string if it does."""
    if cast.ragged is None:
        return ""
    on = machine(env.arch)
    return cast.ragged.refusal(on, torch.bfloat16) or wrong_runs(cast.ragged.inputs, on)


def rematerialized(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each operand that the backward pass makes anew: from what, and in which format (None: high precision)."""
    nodes = plan.graph.nodes
    for reader, operands in plan.rematerialized.items():
        for operand in operands:
            chain = [nodes[i].name for i in operand.chain] or ["the input" if operand.given else "the parameter"]
            fmt = None if operand.anew is None else str(operand.anew.quantizer.formats[not operand.anew.quantizer.rowwise])
            yield {"op": nodes[reader].name, "operand": operand.role, "from": chain, "format": fmt}


def collective_casts(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each collective beside a cast: the operand, the format in which rows travel (None: high precision), and why that."""
    for collective in plan.graph.collective_casts:
        fmt = None if collective.format is None else str(collective.format)
        yield {
            "op": plan.ops[collective.op],
            "product": plan.ops[collective.product],
            "operand": collective.role,
            "format": fmt,
            "why": collective.why,
        }
    yield from _exchanges(plan)


def _exchanges(plan: Plan) -> Iterator[dict[str, Any]]:
    """The same of rows that go to experts on other ranks, in either pass, for a product that casts them."""
    for node in plan.graph.nodes:
        spec = None if RANK_ALONE.isdisjoint(node.traits) else plan.graph.cast_of_experts(node)
        if spec is not None:
            why = why_values_go(spec, plan.key.env, node.spec)
            fmt = None if why else str(spec.quantizer.formats[0])
            yield {"op": node.name, "product": "", "operand": spec.role, "format": fmt, "why": why}


def pipeline(plan: Plan) -> dict[str, Any]:
    """The graph, its segments, and the groups of either pass."""
    return {
        "name": plan.name,
        "opaque": plan.opaque,
        "before": list(plan.ops),
        "nodes": [node.name for node in plan.graph.nodes],
        "products": list(products(plan)),
        "remade": list(rematerialized(plan)),
        "meetings": list(collective_casts(plan)),
        "sizes_read": sizes_read(plan),
        "edges": [[source, target] for source, target in plan.graph.digraph.edges()],
        "runs_at_every_call": stepped(plan),
        "segments": [[segment.nodes.start, segment.nodes.stop] for segment in plan.segments],
        **{
            f"{side}_groups": [{"fusion": g.name if g.claimed else None, "nodes": list(g.nodes)} for g in groups_of(plan, side)]
            for side in SIDES
        },
    }


def stepped(plan: Plan) -> dict[str, str]:
    """Why segments are run by the interpreter at every call, by their nodes; only segments that have run.

    A reason that is only one pass's says which.
    """
    nodes = plan.graph.nodes
    found = ((segment, segment.user_code.why) for segment in plan.segments)
    return {" ".join(nodes[i].name for i in segment.nodes): _of_passes(why) for segment, why in found if why}


def _of_passes(why: Mapping[str, str]) -> str:
    reasons = set(why.values())
    if len(why) == len(SIDES) and len(reasons) == 1:
        return reasons.pop()
    return "; ".join(f"{side}: {reason}" for side, reason in why.items())


def flow(graph: Graph, side: str, shown: set[int]) -> Iterator[tuple[int, int]]:
    """Edges between the nodes ``shown``: from producers to readers forward, and along their gradients backward."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        if node.index not in shown:
            continue
        for value in (*node.inputs, *(value for _, value in node.operands)):
            root = graph.gradient_of(value) if side == BACKWARD else value
            if root in last:
                yield (last[root], node.index) if side == FORWARD else (node.index, last[root])
        last.update(dict.fromkeys((graph.gradient_of(v) if side == BACKWARD else v for v in node.outputs), node.index))
