"""The interpreter of one segment of a plan: values by number, gradients summed by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch

from opfuse.compiler.cover import Group
from opfuse.compiler.graph import BACKWARD, Node
from opfuse.compiler.plan import RANK_ALONE, Plan, Segment
from opfuse.compiler.rematerialize import RematerializedOperand
from opfuse.compiler.rules import Fusion, Term
from opfuse.core.cast import Cast
from opfuse.core.context import Context, Value, in_memory, plain, plain_or_none
from opfuse.core.grouped_cast import GroupedCast
from opfuse.core.numbered import run_backward, run_forward
from opfuse.core.operation import BasicOperation
from opfuse.core.protocol import NEIGHBOURS, checked_lists
from opfuse.core.quantizers import recording_gradients
from opfuse.errors import FusionError, PipelineError, describe
from opfuse.events import SegmentRan, TensorSaved, emit, listeners
from opfuse.recipes.counting import PassAround
from opfuse.runtime.interpret.gradients import Gradients, check_input_gradient
from opfuse.runtime.interpret.observed import GroupEvents
from opfuse.runtime.replay.partial import RepeatedCast, context_fingerprints, repeat
from opfuse.runtime.weights.cast_cache import PrecomputedCast
from opfuse.runtime.weights.packed import PlaceInBlock, from_blocks, to_blocks
from opfuse.tensors.quantizers.base import SharedAmax
from opfuse.tensors.ragged import groups_in
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor
from opfuse.torch_private.autograd import COMPARED, hooked
from opfuse.torch_private.dispatch import active_modes

Kwargs = Sequence[Mapping[str, Any]]

GradOutputs = dict[int, torch.Tensor | None]
"""Gradients of a segment's outputs, by value number."""

Result = list[torch.Tensor | None]
"""Gradients of its inputs, of its ops' parameters, the last op first, and of the inputs that are read again."""


class Interpreter:
    """One segment of a plan over live ops, in one call. precomputed: casts of weights that are made already.

    in_parts: whether what is the library's in passes with code of the user's own is repeated. events: emits each group that runs;
    None where nobody listens. places: where in blocks of kept casts the saved tensors lie. outer: the backward pass that
    recomputes the call, of which that of the segment is to be a part; None if none does.
    """

    outer: PassAround = None

    def __init__(
        self,
        plan: Plan,
        segment: Segment,
        ops: Sequence[BasicOperation],
        kwargs: Kwargs,
        precomputed: Sequence[PrecomputedCast] = (),
        *,
        in_parts: bool = False,
        events: GroupEvents | None = None,
    ) -> None:
        self.plan = plan
        self.segment = segment
        self.ops = ops
        self.kwargs = kwargs
        self.in_parts, self.events = in_parts, events
        self.precomputed = {cast.node: cast.storage for cast in precomputed} if precomputed else {}
        self.blocks = [*{id(block): block for cast in precomputed for block in cast.blocks}.values()] if precomputed else []
        self.places: tuple[PlaceInBlock, ...] = ()
        self.contexts: dict[int, Context] = {}
        self.dirty: list[tuple[int, torch.Tensor]] = []
        self._amaxes: dict[int, SharedAmax] = {}

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[Value]:
        """The segment's outputs for its inputs, in the segment's order."""
        if SegmentRan in listeners():
            emit(SegmentRan(ended=False))
        values: dict[int, Value] = dict(zip(self.segment.inputs, tensors))
        for group in self.segment.forward:
            if self.events is None:
                self._forward_group(group, values)
            else:
                self.events.forward(self._forward_group, group, values)
        if self.plan.rematerialized:
            self._save_for_casts(values)
        return [*map(values.__getitem__, self.segment.outputs)]

    def _forward_group(self, group: Group, values: dict[int, Value]) -> None:
        first = self.plan.graph.nodes[group.nodes[0]]
        if group.rule is not None:
            self._forward_fused(group.rule, group, values)
        elif group.opaque is not None:
            self._forward_opaque(group, values)
        elif first.is_cast:
            self._forward_cast(first, values)
        else:
            self._forward_op(first, values)

    def _context(self, node: Node, values: Mapping[int, Value]) -> Context:
        op: Any = self._cast_of(node) if node.is_cast else self.ops[node.op]
        context = Context(op, self.plan.key.env, node.needs)
        if node.index in self.plan.rematerialized:
            context.rematerialized = frozenset([operand.role for operand in self._rematerialized(node.index)])
        context.is_remade = node.index in self.plan.rematerialized.remade
        if node.transfer is not None:  # of what is made anew, a plane travels in the backward pass
            context.transfer = node.transfer if context.is_remade else node.transfer.at_once()
        if not RANK_ALONE.isdisjoint(node.traits):
            context.cast_there = self.plan.graph.cast_of_experts(node)
        if node.inputs and node.inputs[0] in values:
            x = values[node.inputs[0]]
            context._input_shape, context._input_dtype = x.shape, x.dtype
        elif node.inputs:
            self._trace_input(context, node, values)
        if node.operands:
            context.operands = {name: values[value] for name, value in node.operands if value in values}
        # What comes through a channel from the same fused op is not there yet.
        if len(node.inputs) > 1:
            context.extras = tuple(plain(values[value]) if value in values else None for value in node.inputs[1:])
            context.extra_dtypes = [None if extra is None else extra.dtype for extra in context.extras]
        if node.casts:
            own = self.plan.own_casts[node.index].items()
            context.casts = {role: self._caster(node.index, cast) for role, cast in own}
        self.contexts[node.index] = context
        return context

    def _trace_input(self, context: Context, node: Node, values: Mapping[int, Value]) -> None:
        """Inside of a fused op, what is known of an op's input: that of a cast, or the context of the op that makes it."""
        graph, value = self.plan.graph, node.inputs[0]
        while value not in values and graph.nodes[graph.producer[value]].is_cast:
            value = graph.nodes[graph.producer[value]].inputs[0]
        if value in values:
            context._input_shape, context._input_dtype = values[value].shape, values[value].dtype
        else:
            context._before = self.contexts.get(graph.producer[value])

    def _forward_cast(self, node: Node, values: dict[int, Value]) -> None:
        if node.index in self.precomputed:
            values[node.outputs[0]] = self.precomputed[node.index]
            return
        cast = self._cast_of(node)
        source = self.ops[node.op].parameter(cast.role) if node.side else values[node.inputs[0]]
        values[node.outputs[0]] = self._caster(node.index, cast)(source, *map(values.__getitem__, node.inputs[1:]))

    def _caster(self, node: int, cast: Cast) -> Callable[..., Value]:
        """What does a cast of a node."""
        return RepeatedCast(self.plan, node, cast) if self.in_parts else cast

    def _cast_of(self, node: Node) -> Cast:
        """What a quantize node runs: for the forward product alone where the backward pass makes the cast anew."""
        once = self.plan.rematerialized.cast_once.get(node.index)
        # In parts, a cast is repeated by its identity, which one that is made for a call has not.
        if once is None or node.index not in self.plan.rematerialized.measured_once or self.in_parts:
            return once or self.plan.casts[node.index]
        shared = SharedAmax()
        sharing = once.sharing(shared)
        if sharing is not None:
            self._amaxes[node.index] = shared
        return sharing or once

    def _rematerialized(self, reader: int) -> Sequence[RematerializedOperand]:
        """The operands of a product that this call does not save: all that the plan rematerializes, but for precomputed casts,
        which are there already. In a checkpoint it saves none: of its two runs, which must save alike, one may find nothing
        precomputed.
        """
        operands = self.plan.rematerialized.get(reader, ())
        if not self.precomputed or not operands:
            return operands
        compared = hooked() == COMPARED
        there = {node for node in self.precomputed if not compared or self.plan.casts[node].live_states}  # by an earlier scale
        return [operand for operand in operands if operand.source not in there]

    def _save_for_casts(self, values: Mapping[int, Value]) -> None:
        """Save what the casts need that the backward pass makes anew: a delayed scale, which may have been updated by then, or
        the amax of the tensor, so that it need not be read twice; and the input that is cast.
        """
        for operand in [operand for reader in self.segment.nodes for operand in self._rematerialized(reader)]:
            needed: dict[str, Value | None] = {"x": values[0]} if operand.given else {}
            if operand.anew is not None and operand.anew.live_states:
                needed["scale"] = operand.anew.scale_of_call()
            elif operand.source in self._amaxes and (operand.chain or hooked() != COMPARED):
                # Of two runs of a checkpoint, which must save alike, one may find that a parameter is cast already.
                needed |= {f"amax{i or ''}": amax for i, amax in enumerate(self._amaxes[operand.source].tensors())}
            if needed:
                context = self.contexts.setdefault(operand.source, Context(operand.forward, self.plan.key.env, frozenset()))
                context._store(needed)

    def _make_anew(self, group: Group, contexts: Mapping[int, Context]) -> None:
        """Put into the contexts of products what the forward pass has not saved."""
        for operand in (operand for reader in group.nodes for operand in self.plan.rematerialized.get(reader, ())):
            context = contexts.get(operand.reader)
            if context is None or operand.role not in context.rematerialized:
                continue
            anew = operand.anew
            if anew is not None and anew.live_states:
                anew = anew.under(contexts[operand.source].saved.scale)
            elif anew is not None and (amaxes := _amaxes_of(contexts.get(operand.source))):
                anew = anew.sharing(SharedAmax.of(amaxes)) or anew
            if isinstance(anew, GroupedCast) and operand.chain:
                anew = replace(anew, splits=vars(context).get("sizes") or context.saved.splits)
            chain = [contexts[i] for i in operand.chain]
            if chain:
                context._saved[operand.name] = chain[0].op.remake(chain, anew)
            else:  # a cast of the input or of the parameter, which are saved
                values: Any = contexts[operand.source].saved.x if operand.given else context._saved[operand.name]
                context._saved[operand.name] = cast(Cast, anew)(values)

    def _forward_op(self, node: Node, values: dict[int, Value]) -> None:
        op = self.ops[node.op]
        context = self._context(node, values)
        x = values[node.inputs[0]]
        x = x if node.takes_quantized else plain(x)
        if op.asks_quantizers:
            with recording_gradients(self.plan.key.env.grad):
                output, extras = run_forward(op, context, x, self.kwargs[node.op])
        else:
            output, extras = run_forward(op, context, x, self.kwargs[node.op])
        if node.casts:
            output = plain(output)
        self._store(node, node.outputs, (output, *extras), values)

    def _store(self, node: Node, numbers: Sequence[int], outputs: Sequence[Any], values: dict[int, Value]) -> None:
        if len(outputs) != len(numbers):
            cure = "return all of them, or leave them in its context, and set num_extra_outputs to their number"
            raise PipelineError(describe(f"{self.ops[node.op].label} outputs", wanted=len(numbers), got=len(outputs), cure=cure))
        values.update(zip(numbers, map(in_memory, outputs)))
        if dirty := self.contexts[node.index].dirty:
            self.dirty += [(node.outputs[0], tensor) for tensor in dirty]

    def _forward_fused(self, rule: Fusion, group: Group, values: dict[int, Value]) -> None:
        nodes = self.plan.graph.nodes
        first, last = nodes[group.nodes[0]], nodes[group.nodes[-1]]
        x = values[first.inputs[0]]
        made = {i: self._context(nodes[i], values) for i in group.nodes}
        output = cast(Callable[..., Any], rule.forward)(x if first.takes_quantized else plain(x), **_bind(rule, group, made))
        _check_result(f"{rule.name} forward", output)
        if rule.backward is None:
            _check_saved(rule.name, [(term, made[i]) for term, place in zip(rule.pattern, group.binding) for i in place])
        for i in group.nodes[:-1]:
            self._store(nodes[i], nodes[i].outputs[1:], made[i].extra_outputs, values)
        self._store(last, last.outputs, (output, *made[last.index].extra_outputs), values)

    def _forward_opaque(self, group: Group, values: dict[int, Value]) -> None:
        nodes = self._op_nodes(group)
        contexts = self._contexts(group, {i: self._context(node, values) for i, node in nodes.items()})
        chain = [node for i in group.nodes if not (node := self.plan.graph.nodes[i]).side]
        with recording_gradients(self.plan.key.env.grad):
            found = group.opaque.fuser_forward(
                contexts,
                plain(values[chain[0].inputs[0]]),
                basic_op_extra_inputs=[context.extras for context in contexts],
                **NEIGHBOURS,
                basic_op_kwargs=[self.kwargs[i] for i in group.ops],
            )
        output, extra_outputs = checked_lists(group.opaque, "fuser_forward", found, len(contexts))
        for i, extras in zip(group.ops, extra_outputs):
            if i in nodes:
                self._store(nodes[i], nodes[i].outputs[1:], extras, values)
        _check_result(f"{group.name} fuser_forward", output)
        if not group.opaque.overrides("fuser_backward"):
            _check_saved(group.name, ((f"basic_op_ctxs[{i}]", context) for i, context in enumerate(contexts)))
        values[chain[-1].outputs[0]] = in_memory(output)
        self._check_outputs(group, nodes.values(), values)

    def _check_outputs(self, group: Group, nodes: Iterable[Node], values: Mapping[int, Value | None]) -> None:
        """FusionError for an extra output that a fused op left out though someone else reads it."""
        graph = self.plan.graph
        for value in (value for node in nodes for value in node.outputs[1:] if values[value] is None):
            if value in graph.outputs or any(reader not in group.nodes for reader in graph.consumers.get(value, ())):
                wanted, cure = "a tensor for every extra output that leaves it", "return it, or keep its readers in the fused op"
                raise FusionError(describe(f"{group.name} extra outputs", wanted=wanted, got=None, cure=cure))

    def _op_nodes(self, group: Group) -> dict[int, Node]:
        """The nodes of the basic ops that a fused op stands for, by op; an explicit Quantize has none of its own."""
        nodes = (node for op in group.ops for node in self.plan.graph.by_op.get(op, ()))
        return {node.op: node for node in nodes if not node.is_cast}

    def _contexts(self, group: Group, made: Mapping[int, Context]) -> list[Context]:
        """A context for each op of a fused op: those ``made``; one without a node only knows whether gradients pass it."""
        by_op = self.plan.graph.by_op
        first = next(node for op in group.ops for node in by_op.get(op, ()) if not node.side)
        passes = first.inputs[0] in self.plan.graph.grads
        contexts = []
        for i in group.ops:
            context = made.get(i) or Context(self.ops[i], self.plan.key.env, frozenset(("input",) if passes else ()))
            context.casts = self._absorbed(group, i)
            passes = passes or context.requires_grad
            contexts.append(context)
        return contexts

    def _absorbed(self, group: Group, op: int) -> Mapping[str, Callable[..., Value]]:
        """The casts of one op that a user's fused op took over, or that the op makes by itself, by role."""
        nodes = [node for i in group.nodes if (node := self.plan.graph.nodes[i]).op == op]
        inside = [self.plan.own_casts.get(node.index, {}) for node in nodes]
        around = {node.spec.role: self.plan.casts[node.index] for node in nodes if node.is_cast}
        return {role: self._caster(group.nodes[0], cast) for casts in (*inside, around) for role, cast in casts.items()}

    def released(self) -> list[torch.Tensor]:
        """The saved tensors of the segment; whatever else its contexts hold of this call is let go."""
        if TensorSaved in listeners():
            for index, context in self.contexts.items():
                for name, value in context.saved_state().items():
                    if value is not None:
                        emit(TensorSaved(self.plan, index, name, value))
        saved: list[torch.Tensor] = []
        for context in self.contexts.values():
            saved += context.release()
        if self.blocks:
            saved, self.places = to_blocks(saved, self.blocks)
        self.dirty, self.kwargs, self.precomputed, self.blocks, self._amaxes = [], (), {}, [], {}
        if SegmentRan in listeners():
            emit(SegmentRan(ended=True))
        return saved

    # -- backward ----------------------------------------------------------------------------------------------------

    def gradients(self, grad_outputs: GradOutputs, tensors: Iterator[torch.Tensor]) -> Result:
        """For the gradients of the outputs those of what the segment has read."""
        if watched := SegmentRan in listeners():
            emit(SegmentRan(ended=False))
        grads = self.backward(grad_outputs, tensors)
        inputs = [_handed_on(grads.take(value)) for value in self.segment.inputs]
        again = [_handed_on(grads.take(value)) for value in self.segment.again]
        params = [grads.params.get((i, name)) for i in reversed(self.segment.ops) for name in self.ops[i].parameter_names]
        if watched:
            emit(SegmentRan(ended=True))
        return [*inputs, *params, *again]

    def backward(self, grad_outputs: Mapping[int, torch.Tensor | None], tensors: Iterator[torch.Tensor]) -> Gradients:
        """Gradients of the segment's inputs and parameters for those of its outputs; ``tensors`` is what was saved."""
        if self.places:
            tensors = from_blocks(tensors, self.places)
        contexts = {index: context.restored(tensors) for index, context in self.contexts.items()}
        grads = Gradients(self.plan, contexts, self.segment.again)
        for value, grad in grad_outputs.items():
            grads.add(value, grad.held if isinstance(grad, QuantizedTensor) else grad)
        if self.in_parts and not active_modes():
            repeat(self.plan, self.segment, self._fingerprints, grads, self._backward_groups)
        else:
            self._backward_groups(self.segment.backward, grads)
        return grads

    @cached_property
    def _fingerprints(self) -> Sequence[tuple[Any, ...] | None]:
        """What the contexts tell each stretch of a backward pass that is repeated in part."""
        return context_fingerprints(self.segment.user_code.backward, self.contexts)

    def _backward_groups(self, groups: Iterable[Group], grads: Gradients) -> None:
        nodes, contexts = self.plan.graph.nodes, grads.contexts
        for group in groups:
            parts = [group]
            if group.rule is not None and group.rule.direction == BACKWARD and not grads.has(nodes[group.nodes[-1]].outputs[:1]):
                # Only an extra output in its midst may have got a gradient: the saved state is that of the ops one by one.
                parts = [Group((index,)) for index in reversed(group.nodes)]
            for part in parts:
                if self.events is None:
                    self._backward_group(part, grads)
                else:
                    self.events.backward(self._backward_group, part, grads)
            for index in contexts.keys() & set(group.nodes):
                contexts[index].forget()

    def _backward_group(self, group: Group, grads: Gradients) -> None:
        last = self.plan.graph.nodes[group.nodes[-1]]
        if not grads.has([value for i in group.nodes for value in self.plan.graph.nodes[i].outputs]):
            return
        if self.plan.rematerialized:
            self._make_anew(group, grads.contexts)
        if group.rule is not None:
            self._backward_fused(group.rule, group, grads)
        elif group.opaque is not None:
            self._backward_opaque(group, grads)
        elif last.is_cast:
            self._backward_cast(last, grads)
        else:
            self._backward_op(last, grads)

    def _backward_cast(self, node: Node, grads: Gradients) -> None:
        context, dy = self._cast_context(node, grads), cast(Value, grads.take(node.outputs[0]))
        if context.reader is not None and not (isinstance(dy, QuantizedStorage) and groups_in(dy)):
            dy = context.reader.grad_output = plain(dy)  # rows that came from other ranks as codes have no other values
        grads.put(node.outputs[0], self._caster(node.index, context.op)(dy, *context.extras))

    def _cast_context(self, node: Node, grads: Gradients) -> Context:
        """The context of a cast of a gradient; of one in groups, its extras say how many rows each has."""
        context = Context(self.plan.casts[node.index], self.plan.key.env, frozenset())
        if isinstance(context.op, GroupedCast):
            context.reader = reader = grads.contexts[self.plan.graph.producer[node.outputs[0]]]
            context.extras = (reader.sizes or reader.saved.splits,)
        return context

    def _backward_op(self, node: Node, grads: Gradients) -> None:
        op = self.ops[node.op]
        context = grads.contexts[node.index]
        dy = grads.take(node.outputs[0])
        if len(node.outputs) > 1:
            context.grad_extras = tuple(plain_or_none(grads.take(value)) for value in node.outputs[1:])
        grad_input, grad_params, grad_extras = run_backward(op, context, dy if node.takes_quantized else plain_or_none(dy))
        context.set_grads(params=grad_params, extras=grad_extras)
        grads.collect(node)
        check_input_gradient(context, grad_input)
        grads.add(node.inputs[0], grad_input)

    def _backward_fused(self, rule: Fusion, group: Group, grads: Gradients) -> None:
        nodes = self.plan.graph.nodes
        last = nodes[group.nodes[-1]]
        for index in group.nodes:
            if not nodes[index].is_cast:
                grads.contexts[index].grad_extras = tuple(plain_or_none(grads.take(value)) for value in nodes[index].outputs[1:])
        dy = grads.take(last.outputs[0])
        # A joint rule also sees the ops that want no gradient, but only the casts that act on gradients.
        made = {i: grads.contexts[i] for place in group.binding for i in place if not nodes[i].is_cast}
        made |= {i: self._cast_context(nodes[i], grads) for i in group.nodes if nodes[i].is_cast}
        dy = dy if last.takes_quantized else plain_or_none(dy)
        dx = cast(Callable[..., Any], rule.backward)(dy, **_bind(rule, group, made))
        if nodes[group.nodes[0]].inputs[0] in self.plan.graph.grads:
            _check_result(f"{rule.name} backward", dx)
        self._finish([nodes[i] for i in group.nodes], dx, grads)

    def _backward_opaque(self, group: Group, grads: Gradients) -> None:
        nodes = self._op_nodes(group)
        chain = [self.plan.graph.nodes[i] for i in group.nodes]
        active = {node.op: grads.contexts[node.index] for node in nodes.values() if node.index in grads.contexts}
        contexts = self._contexts(group, active)
        for i, context in zip(group.ops, contexts):
            values = nodes[i].outputs[1:] if i in nodes else ()
            context.grad_extras = tuple(plain_or_none(grads.take(value)) for value in values)
        found = group.opaque.fuser_backward(
            contexts,
            plain_or_none(grads.take(chain[-1].outputs[0])),
            basic_op_grad_extra_outputs=[c.grad_extras for c in contexts],
        )
        dx, params, extras = checked_lists(group.opaque, "fuser_backward", found, len(contexts))
        if dx is not None:
            _check_result(f"{group.name} fuser_backward", dx)
        for context, grad_params, grad_extras in zip(contexts, params, extras):
            context.set_grads(params=grad_params, extras=grad_extras)
        self._finish(chain, dx, grads)

    def _finish(self, members: Sequence[Node], dx: Value | None, grads: Gradients) -> None:
        for node in reversed(members):  # the order of ops that run alone, in which gradients of one value are summed
            if not node.is_cast:
                grads.collect(node)
        first = members[0]
        if first.is_cast:
            grads.put(first.inputs[0], dx)
        else:
            check_input_gradient(grads.contexts.get(first.index), dx)
            grads.add(first.inputs[0], dx)


def _amaxes_of(cast_of: Context | None) -> list[torch.Tensor]:
    """The amaxes that were saved for a cast, if there are any."""
    saved = () if cast_of is None else cast_of._saved.items()
    return [cast(torch.Tensor, value) for name, value in saved if name.startswith("amax")]


def _handed_on(grad: Value | None) -> torch.Tensor | None:
    """A gradient for the segment before: rows that came as codes from other ranks as they are, others in high precision."""
    if isinstance(grad, QuantizedStorage) and groups_in(grad) is not None:
        return QuantizedTensor(grad)
    return plain_or_none(grad)


def _bind(rule: Fusion, group: Group, contexts: Mapping[int, Context]) -> dict[str, Any]:
    """The arguments of an implementation: the contexts that there are in its pass, by the names of the pattern."""
    bound: dict[str, Any] = {}
    for term, place in zip(rule.pattern, group.binding):
        found = tuple([contexts[i] for i in place if i in contexts])
        bound[term.name] = found if term.high != 1 else (found[0] if found else None)
    return bound


def _check_result(where: str, result: object) -> None:
    """FusionError for an implementation that returned no tensor."""
    if not isinstance(result, (torch.Tensor, QuantizedStorage)):
        cure = "return the tensor that it computed, alone"
        raise FusionError(describe(where, wanted="a tensor", got=type(result).__name__, cure=cure))


def _check_saved(name: str, contexts: Iterable[tuple[Term | str, Context]]) -> None:
    """FusionError for a forward-only fusion that did not save what its ops' own backward passes read.

    contexts: the place of its pattern, or how the implementation writes the context, and the context. One without a node, as that
    of an explicit Quantize, has no backward pass.
    """
    for place, context in contexts:
        saves = context.op.promised if context.requires_grad and isinstance(context.op, BasicOperation) else None
        if saves is None:
            continue
        context.op.remember(context)
        if not context.complete():
            written = place if isinstance(place, str) else place.name if place.high == 1 else f"each of {place.name}"
            values = ", ".join(f"{each}=..." for each in saves)
            cure = f"call {written}.save({values}), None for what no gradient reads, or give the fusion a backward of its own"
            where = f"{name}: saved state of {context.op.label}"
            got = tuple(each if value is not None else f"{each}=None" for each, value in context._saved.items())
            raise FusionError(describe(where, wanted=f"exactly {saves}", got=got, cure=cure))
