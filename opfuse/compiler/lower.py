"""Lowering: basic ops and the environment in, a graph with explicit quantization out.

Around an op with quantized operands stand ``quantize`` nodes, in this order: the input, parameters (aside), the op, and the
output gradient, which acts in the backward pass only. Which planes each of them makes follows from the policy tables and
from what needs a gradient; so which formats meet in a product is known before anything is cast. Where a collective stands
between a cast and the rank's own rows, the cast changes places with it if that changes no bit
(:mod:`opfuse.compiler.collectives`).

The quantize node of an output gradient keeps the value's number. So patterns of forward rules never meet it, and
``[basic_linear, bias, gelu, quantize]`` matches whether or not a gradient is quantized in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from opfuse.compiler.collectives import COLLECTIVES, Beside, Carried, carried, carrier, rows_behind
from opfuse.compiler.graph import (
    BACKWARD,
    BOTH,
    FORWARD,
    GEMM,
    GROUPED,
    TRANSPARENT,
    CastSpec,
    CollectiveCast,
    Graph,
    Node,
    ProductFormats,
)
from opfuse.core.cast import GRADIENT
from opfuse.core.operation import BasicOperation, Known
from opfuse.core.signature import Env, TensorSig
from opfuse.errors import GemmError, MissingPlaneError, PipelineError, RecipeError, describe, nearest
from opfuse.formats import COLUMNWISE, IDENTITY, USAGES, NumberFormat
from opfuse.kernels.products.backends import reads_tiled_scales
from opfuse.kernels.products.native import machine
from opfuse.recipes import Recipe
from opfuse.recipes.recipe import OVERRIDES, planes
from opfuse.tensors.gemm import GEMMS, clash
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.quantizers.base import casts_itself
from opfuse.tensors.tensor import QuantizedTensor


class Inputs(NamedTuple):
    """Signatures of what enters a pipeline: its input, the extra inputs the caller gives, all parameters; and each op's mode."""

    x: TensorSig
    extras: tuple[TensorSig, ...]
    params: tuple[TensorSig | None, ...]
    training: tuple[bool, ...]


@dataclass
class _GraphBuilder:
    """The graph so far: the current main value, and which values carry gradients.

    ops, known: the basic ops, and what is known of their methods. casts: quantized values and the nodes that made them. copies:
    values that are a copy of another, quantized or not, and share its gradient. cast_gradients: values whose gradient is
    quantized. products: of ops with quantized operands. collective_casts: collectives beside casts. moves: whether casts may
    change places with collectives, of which there are some. rows: in this case, a number that divides the number of rows of the
    current value.
    """

    env: Env
    ops: Sequence[BasicOperation]
    known: Sequence[Known]
    nodes: list[Node] = field(default_factory=list)
    values: int = 1
    current: int = 0
    grads: set[int] = field(default_factory=set)
    casts: dict[int, int] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    cast_gradients: set[int] = field(default_factory=set)
    exports: frozenset[str] = frozenset()
    channels: dict[str, int] = field(default_factory=dict)
    extra_inputs: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    products: list[ProductFormats] = field(default_factory=list)
    collective_casts: list[CollectiveCast] = field(default_factory=list)
    moves: bool = True
    rows: int = 1

    def new_value(self, *, grad: bool) -> int:
        value, self.values = self.values, self.values + 1
        if grad:
            self.grads.add(value)
        return value

    def add(self, **fields: Any) -> Node:
        node = Node(index=len(self.nodes), **fields)
        self.nodes.append(node)
        return node


def lower(
    ops: Sequence[BasicOperation], env: Env, inputs: Inputs, exports: frozenset[str] = frozenset(), *, moves: bool = True
) -> Graph:
    """The lowered graph of ``ops``. exports: channels that leave it. A channel that no op makes comes in as an extra input.

    moves: whether casts may change places with collectives; not if fused ops or functions claim the nodes of given ops.
    """
    known = [op.known for op in ops]
    traits = frozenset[str]().union(*[each.traits for each in known])
    moves = moves and inputs.x.quantized is None and not COLLECTIVES.isdisjoint(traits)
    b = _GraphBuilder(env, ops, known, exports=exports, moves=moves, rows=env.rows_class)
    if env.grad and inputs.x.requires_grad:
        b.grads.add(0)
    extras, signatures = iter(inputs.extras), iter(inputs.params)
    for index, op in enumerate(ops):
        params = dict(zip(op.parameter_names, signatures))  # names first: zip takes no signature beyond them
        _add_op(b, index, params, tuple([_extra_input(b, channel.name, extras) for channel in op.extra_input_channels]))
    graph = Graph.of(b.nodes, b.extra_inputs, [b.current, *b.returned], b.grads, b.products)
    return replace(graph, collective_casts=tuple(b.collective_casts))


def _add_op(b: _GraphBuilder, index: int, params: Mapping[str, TensorSig | None], extra_values: tuple[int, ...]) -> None:
    """The nodes of one op: the casts of its operands, the op, the cast of the gradient that comes back to it."""
    op, known = b.ops[index], b.known[index]
    needs = _needs(b, params, extra_values)
    casts = _casts(b, index, op, params, needs)
    inside, around = (tuple(casts.values()), {}) if known.casts_itself else ((), casts)
    grouping = op.grouping(needs) if GROUPED in known.traits else None
    if "input" in around:
        _cast_input(b, index, around["input"], () if grouping is None else (extra_values[grouping.splits],))
    operands = tuple([_cast_parameter(b, index, spec) for role, spec in around.items() if role in params])
    # A cast of the pipeline's own input gradient needs a node that the gradient flows through.
    if not known.is_cast or (GRADIENT in around and b.current == 0):
        node = b.add(
            kind="identity" if known.is_cast else known.word,
            op=index,
            spec=op.spec,
            traits=known.traits,
            params=tuple(params.items()),
            inputs=(b.current, *extra_values),
            outputs=tuple([b.new_value(grad=bool(needs)) for _ in range(1 + op.num_extra_outputs)]),
            operands=operands,
            directions=BOTH if needs else frozenset((FORWARD,)),
            needs=needs,
            grouping=grouping,
            casts=inside,
            takes_quantized=known.accepts_quantized,
        )
        _publish(b, op, node)
        if b.moves:
            b.rows = rows_behind(op, b.rows)
            _move_gradient_cast(b, node)
    if GRADIENT in around:
        _cast_gradient(b, _caster(b, index, GRADIENT), around[GRADIENT])


def _extra_input(b: _GraphBuilder, name: str | None, extras: Iterator[TensorSig]) -> int:
    if name is not None and name in b.channels:
        return b.channels[name]
    sig = next(extras)
    value = b.new_value(grad=b.env.grad and sig.requires_grad)
    b.extra_inputs.append(value)
    if name is not None:
        b.channels[name] = value
    return value


def _needs(b: _GraphBuilder, params: Mapping[str, TensorSig | None], extra_values: Sequence[int]) -> frozenset[str]:
    wanted = ["input"] if b.current in b.grads else []
    for name, sig in params.items() if b.env.grad else ():
        if sig is not None and sig.requires_grad:
            wanted.append(name)
    for i, value in enumerate(extra_values):
        if value in b.grads:
            wanted.append(f"extra{i}")
    return frozenset(wanted)


def _casts(
    b: _GraphBuilder, index: int, op: BasicOperation, params: Mapping[str, TensorSig | None], needs: frozenset[str]
) -> dict[str, CastSpec]:
    """The quantize nodes of one op, by role. GemmError if the formats of one of its products clash, and may not be mixed."""
    recipe = b.env.recipe
    if recipe is None:
        return {}
    multiplied = params.keys() & set(op.quantized_roles()) or params.keys()
    backward = (("dgrad",) if "input" in needs else ()) + (("wgrad",) if needs & multiplied else ())
    products = ("fprop",) + (backward if OVERRIDES[recipe.backward_override].backward == "quantized" else ())
    casts, stored = {}, {}
    for role in op.quantized_roles():
        if role == "input" and _leaves_cast(b, index):
            continue
        signature = params.get(role)
        is_stored = signature is not None and signature.quantized is not None
        if is_stored and (formats := _stored_formats(op, role, recipe, products)) is not None:
            stored[role] = formats
        elif (spec := _cast_of_operand(b, index, role, recipe, backward)) is not None:
            casts[role] = spec
    for product in _products_of(index, op, casts, stored, made=("fprop", *backward), quantized=products):
        reason = clash(product.name, product.left, product.right)
        if reason is not None and not recipe.allow_mixed_emulation:
            if product.name in backward:
                recipe.check_trainable()  # a recipe that never trains says so by the name of its field
            raise GemmError(f"{op.label} {reason}")
        b.products.append(product)
    if type(op).own_products is not BasicOperation.own_products:
        own = op.own_products(b.env, needs)
        b.products += [ProductFormats(index, name, *formats, own.sizes) for name, formats in own.formats.items()]
    if any(spec.groups for spec in casts.values()):
        ragged = op.ragged_products({role: spec.quantizer for role, spec in casts.items()}, b.env, needs)
        casts = {role: replace(spec, ragged=ragged) if spec.groups else spec for role, spec in casts.items()}
    return casts


def _cast_of_operand(b: _GraphBuilder, index: int, role: str, recipe: Recipe, backward: tuple[str, ...]) -> CastSpec | None:
    """The cast of an operand with the planes that its products read; None if all of them read high precision."""
    op = b.ops[index]
    quantizer, state = b.ops[_caster(b, index, role)].make_quantizer(role, recipe)
    if recipe.batch_invariant and op.quantizer_role(role).tensor_type == "input":
        recipe.check_row_local(f"{op.label} {role} under {type(recipe).__name__}", quantizer)
    narrowed = op.narrow_quantizer(quantizer, role, recipe.backward_override, backward)
    return None if narrowed is None else CastSpec(role, _in_read_order(narrowed, b.env), state, op.cast_groups(role))


def _caster(b: _GraphBuilder, index: int, role: str) -> int:
    """The op whose quantizer casts an operand: the op itself, unless an explicit Quantize meets the tensor first."""
    op = b.ops[index]
    if b.known[index].casts_itself or op.cast_groups(role) or role not in ("input", GRADIENT):
        return index
    if role == "input":
        return b.nodes[b.casts[b.current]].op if b.current in b.casts else index
    last = index
    for i in range(index + 1, len(b.ops)):
        if not _is_copy(b, i):
            break
        if _casts_gradient(b.ops[i], b.env.recipe):
            last = i
    return last


def _is_copy(b: _GraphBuilder, index: int) -> bool:
    """Whether the gradient of the op's input is that of its output: not a sum over two outputs."""
    return TRANSPARENT in b.known[index].traits and not b.ops[index].num_extra_outputs


def _casts_gradient(op: BasicOperation, recipe: Recipe | None) -> bool:
    if recipe is None or GRADIENT not in op.quantized_roles():
        return False
    quantizer, _ = op.make_quantizer(GRADIENT, recipe)
    return op.narrow_quantizer(quantizer, GRADIENT, recipe.backward_override, ()) is not None


def _leaves_cast(b: _GraphBuilder, index: int) -> bool:
    """Whether an explicit Quantize leaves the cast to the product after it, which casts groups of rows apart."""
    if not b.known[index].is_cast:
        return False
    after = next((i for i in range(index + 1, len(b.ops)) if not _is_copy(b, i)), None)
    return after is not None and not b.known[after].casts_itself and b.ops[after].cast_groups("input") > 0


def _cast_parameter(b: _GraphBuilder, op: int, spec: CastSpec) -> tuple[str, int]:
    value = b.new_value(grad=False)
    b.add(kind=spec.kind, op=op, spec=spec, outputs=(value,), directions=frozenset((FORWARD,)), side=True)
    return spec.role, value


def _cast_input(b: _GraphBuilder, op: int, spec: CastSpec, splits: Sequence[int]) -> None:
    """A node for the cast, unless an explicit Quantize has one, which then makes the planes that are read here.

    splits: the value that has the rows of each group, if there are groups.
    """
    earlier = None if spec.groups else b.casts.get(b.current)
    if earlier is not None:
        b.nodes[earlier] = replace(b.nodes[earlier], spec=spec)
        return
    # The cast of an explicit Quantize stays where it is: the product after it replaces the spec, and would lose the transfer.
    collective = _collective_before(b, spec) if b.moves and not b.known[op].is_cast else None
    if collective is None:
        _add_cast(b, op, spec, splits)
        return
    found = _moved(b, op, spec, collective, FORWARD)
    if found.transfer is None:
        _add_cast(b, op, spec, splits)
        return
    b.nodes.pop()
    b.current = collective.inputs[0]
    _add_cast(b, op, found.spec, ())
    b.nodes.append(replace(collective, index=len(b.nodes), inputs=(b.current,), transfer=found.transfer))
    (b.current,) = collective.outputs
    b.casts[b.current] = len(b.nodes) - 2


def _collective_before(b: _GraphBuilder, spec: CastSpec) -> Node | None:
    """The collective that made the current value, if its rows could have been cast before they travelled."""
    node = b.nodes[-1] if b.nodes and not spec.groups else None
    made = node is not None and not node.is_cast and node.outputs == (b.current,)
    return node if made and node is not None and carrier(b.ops[node.op], FORWARD) is not None else None


def _moved(b: _GraphBuilder, op: int, spec: CastSpec, collective: Node, direction: str) -> Carried:
    """The cast that stands on the other side of ``collective``, if it can. The builder's rows are those behind it."""
    params = b.ops[op].parameter_values()
    dtypes = [b.env.autocast] if b.env.autocast else [value.dtype for value in params if value is not None]
    width = min((dtype.itemsize for dtype in dtypes), default=2)
    joins = carrier(b.ops[collective.op], direction)
    rows = b.rows // b.ops[collective.op].process_group_size if joins and direction == FORWARD else b.rows
    found = carried(spec, Beside(b.ops[op], b.ops[collective.op], b.env, rows, width, direction))
    if joins:
        fmt = None if found.transfer is None else spec.quantizer.formats[not spec.quantizer.rowwise]
        b.collective_casts.append(CollectiveCast(collective.op, op, spec.role, fmt, found.why))
    return found


def _add_cast(b: _GraphBuilder, op: int, spec: CastSpec, splits: Sequence[int]) -> None:
    value = b.new_value(grad=b.current in b.grads)
    inputs = (b.current, *splits) if spec.groups else (b.current,)
    node = b.add(kind=spec.kind, op=op, spec=spec, inputs=inputs, outputs=(value,), directions=frozenset((FORWARD,)))
    if not spec.groups:
        b.casts[value] = node.index
    b.copies[value] = b.current
    b.current = value


def _cast_gradient(b: _GraphBuilder, op: int, spec: CastSpec) -> None:
    original = b.current
    while original in b.copies:
        original = b.copies[original]
    if b.current in b.grads and original not in b.cast_gradients:
        b.cast_gradients.add(original)
        b.add(kind=spec.kind, op=op, spec=spec, inputs=(b.current,), outputs=(b.current,), directions=frozenset((BACKWARD,)))


def _move_gradient_cast(b: _GraphBuilder, collective: Node) -> None:
    """Move the gradient cast of the op before ``collective`` to the other side, where it casts this rank's rows alone."""
    cast = b.nodes[-2] if len(b.nodes) > 1 else None
    if cast is None or cast.directions != {BACKWARD} or collective.inputs != cast.outputs:
        return
    if carrier(b.ops[collective.op], BACKWARD) is None or (out := collective.outputs[0]) not in b.grads:
        return
    found = _moved(b, cast.op, cast.spec, collective, BACKWARD)
    if found.transfer is not None:
        b.nodes[-2] = replace(collective, index=cast.index, transfer=found.transfer)
        b.nodes[-1] = replace(cast, index=collective.index, spec=found.spec, inputs=(out,), outputs=(out,))
        b.cast_gradients.add(out)


def _publish(b: _GraphBuilder, op: BasicOperation, node: Node) -> None:
    """Make the node's outputs known: the main one goes on, the extra ones to their channels and to the caller."""
    b.current, *extra_outputs = node.outputs
    if _is_copy(b, node.op):
        b.copies[b.current] = node.inputs[0]
    if TRANSPARENT in node.traits and node.inputs[0] in b.casts:
        b.casts[b.current] = b.casts[node.inputs[0]]
    for channel, value in zip(op.extra_output_channels, extra_outputs):
        if channel.name is not None:
            b.channels[channel.name] = value
        if channel.to_caller or channel.name in b.exports:
            b.returned.append(value)


# -- formats that meet in products -----------------------------------------------------------------------------------------------

Formats = Mapping[str, NumberFormat]
"""Formats by usage."""


def _stored_formats(op: BasicOperation, role: str, recipe: Recipe, products: Sequence[str]) -> Formats | None:
    """The formats in which a quantized parameter enters ``products``; None if it is cast anew, by ``on_recipe_change``.

    RecipeError where the policy refuses another format than the recipe's; MissingPlaneError for a plane that is read, was not
    made and cannot be derived. What is read is asked of the planes themselves: a quantizer says how later casts are made.
    """
    stored = op.parameter(role)
    if not isinstance(stored, QuantizedTensor):
        return {}
    read = planes(op.quantizer_role(role).tensor_type, tuple(products)) if GEMM in op.known.traits else frozenset(stored.usages)
    found: dict[str, NumberFormat] = {usage: fmt for usage in USAGES if usage in read and (fmt := _format(stored, usage))}
    formats = op.stored_quantizer(role, recipe).formats
    wanted: dict[str, NumberFormat] = {usage: fmt for usage, fmt in zip(USAGES, formats) if usage in found}
    if _as_stored(found) == _as_stored(wanted) or recipe.on_recipe_change == "keep":
        _check_found(op, role, stored, read)
        return found
    if recipe.on_recipe_change == "dequantize":
        return None
    raise RecipeError(
        describe(
            f"{op.label} {role} under {type(recipe).__name__}",
            wanted=f"a parameter stored as the recipe casts it, {_listed(wanted)}",
            got=f"one stored as {_listed(found)}",
            cure="compute under the recipe that it was cast by, or recipe.replace(on_recipe_change='dequantize'), which casts "
            "its values for each call, or on_recipe_change='keep', which multiplies it as it is",
        )
    )


_SPARED = {COLUMNWISE: ", or compute the backward pass under a backward_override"}
"""How a call can do without a plane."""


def _format(stored: QuantizedTensor, usage: str) -> NumberFormat | None:
    """The format in which a product reads a plane; None for one that was not made and cannot be derived."""
    try:
        return stored.format_of(usage)
    except MissingPlaneError:
        return None


def _check_found(op: BasicOperation, role: str, stored: QuantizedTensor, read: Collection[str]) -> None:
    """MissingPlaneError for a plane that is read and cannot be had."""
    for usage in USAGES:
        if usage in read and _format(stored, usage) is None:
            wanted, got = f"{usage} data, which a product of this call reads", f"a parameter stored without: {stored.held.why}"
            cure = "quantize it in both directions" + _SPARED.get(usage, "")
            raise MissingPlaneError(describe(f"{op.label} {role}", wanted=wanted, got=got, cure=cure))


def _as_stored(formats: Formats) -> Formats:
    return {usage: fmt.as_stored for usage, fmt in formats.items()}


def _listed(formats: Formats) -> str:
    return " and ".join(f"{fmt} {usage}" for usage, fmt in formats.items())


def _products_of(
    index: int,
    op: BasicOperation,
    casts: Mapping[str, CastSpec],
    stored: Mapping[str, Formats],
    *,
    made: Sequence[str],
    quantized: Sequence[str],
) -> Iterator[ProductFormats]:
    """The products ``made`` by the op at ``index``, of which those ``quantized`` read its casts and its stored parameters."""
    if GEMM not in op.known.traits:
        return
    formats: dict[str, Formats] = {role: dict(zip(USAGES, spec.quantizer.formats)) for role, spec in casts.items()}
    operands = [(op.quantizer_role(role).tensor_type, each) for role, each in (formats | dict(stored)).items()]
    for name in made:
        what = GEMMS[name]
        left: dict[NumberFormat | None, None] = {}
        right: dict[NumberFormat | None, None] = {}
        for tensor_type, each in operands if name in quantized else ():
            for side, role, plane in ((left, what.left, what.left_plane), (right, what.right, what.right_plane)):
                if tensor_type == role:
                    side[None if each[plane] == IDENTITY else each[plane]] = None
        for one, other in itertools.product(left or (None,), right or (None,)):
            yield ProductFormats(index, name, one, other)


def _in_read_order(quantizer: Quantizer, env: Env) -> Quantizer:
    """The quantizer, whose casts store scales as the products of the device read them: one kernel writes them so at once."""
    reads_tiles = any(reads_tiled_scales(fmt.family, machine(env.arch)) for fmt in quantizer.formats)
    return replace(quantizer, optimize_for_gemm=True) if reads_tiles and casts_itself(quantizer) else quantizer


# -- channels --------------------------------------------------------------------------------------------------------------------


def _among(name: str, produced: Sequence[str]) -> str:
    return f"only {', '.join(map(repr, produced))}{nearest(name, produced)}" if produced else "none that produces any"


def check_channels(ops: Sequence[BasicOperation], imports: Collection[str] = ()) -> None:
    """PipelineError unless every channel has one producer, before all of its consumers; ``imports`` were produced earlier."""
    produced = set(imports)
    for op in ops:
        for i, channel in enumerate(op.extra_input_channels):
            if channel.name is not None and channel.name not in produced:
                wanted, got = f"an earlier op that produces channel {channel.name!r}", _among(channel.name, sorted(produced))
                cure = "put the producer before the consumer, or take the input from the caller"
                raise PipelineError(describe(f"{op.label} extra input {i}", wanted=wanted, got=got, cure=cure))
        for channel in op.extra_output_channels:
            if channel.name in produced:
                where, wanted = f"{op.label} extra output", "one producer a channel"
                got, cure = f"a second producer of {channel.name!r}", "rename one of the channels"
                raise PipelineError(describe(where, wanted=wanted, got=got, cure=cure))
            if channel.name is not None:
                produced.add(channel.name)
