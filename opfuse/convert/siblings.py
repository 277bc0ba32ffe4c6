"""Products of one tensor, such as query, key and value: one product computes all, and each module returns its columns.

The recorded forward of the module around them shows which read the same tensor, as far as it can be followed; no result
depends on that. When the model runs, the first of them computes all, and the others take their columns only if they get that
very tensor, unwritten, in the same modes, with the same parameters: then these are what they would compute. Otherwise they
compute their own.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from opfuse.convert.converted import Converted, casting
from opfuse.convert.in_graph import InGraph
from opfuse.convert.leaves import weight_of
from opfuse.convert.pipeline import PipelineRun
from opfuse.convert.record import LEADING, mode, record, required_arguments, rows
from opfuse.convert.weights import MadeParameters, Weight, state_of
from opfuse.core.context import versions
from opfuse.core.operation import BasicOperation
from opfuse.inspect.alike import short
from opfuse.recipes import current_recipe, note_use
from opfuse.runtime.compiled import autocast_dtype, hindrance, moment
from opfuse.torch_private.modules import has_global_hooks, has_hooks


class _Waiting(NamedTuple):
    """Columns that were computed and not yet returned. source, state: of which tensor, and its state then. left: by module."""

    source: weakref.ref[torch.Tensor]
    state: Any
    left: dict[int, torch.Tensor]


class Shared:
    """One product for several modules.

    plain: modules return views of columns of one matrix; else contiguous tensors. waiting: by thread. members: the modules'
    forwards, in order. followed: in a graph of torch.compile, the moment of the product, and the columns not yet returned.
    """

    def __init__(self, run: PipelineRun, columns: Sequence[int], *, plain: bool) -> None:
        self.run = run
        self.columns = tuple(columns)
        self.plain = plain
        self.waiting: dict[int, _Waiting] = {}
        self.members: list[Sibling] = []
        self.in_graph: InGraph | None = None
        self.followed: tuple[Any, list[torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting": {}, "in_graph": None, "followed": None}

    def parted(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The columns of all modules, each a tensor that may be written without the others."""
        parts: Sequence[torch.Tensor] = _Columns.apply(whole, self.columns, self.run.made[0])  # type: ignore[no-untyped-call]
        plain = self.plain and not any(has_hooks(each.module) for each in self.members)
        return parts if plain else [part.contiguous() for part in parts]

    def views(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """The same in a graph, whose compiler sees to it that views may be written."""
        ends = accumulate(self.columns)
        parts = [whole.narrow(-1, end - columns, columns) for end, columns in zip(ends, self.columns)]
        return parts if self.plain else [part.contiguous() for part in parts]

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of the first module; those of the others are kept until they are taken, or until ``x`` is gone."""
        one, *others = self.parted(self.run(x, ()))
        thread, waiting = get_ident(), self.waiting
        waiting[thread] = _Waiting(
            weakref.ref(x, lambda _: waiting.pop(thread, None)), self._state(x), dict(enumerate(others, 1))
        )
        return one

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """The columns of another module; None if they were not computed for this tensor in its present state and mode."""
        waiting = self.waiting.get(get_ident())
        if waiting is None or waiting.source() is not x or waiting.state != self._state(x):
            return None
        found = waiting.left.pop(index, None)
        if not waiting.left:
            self.waiting.pop(get_ident(), None)
        return found

    def is_blind(self, x: torch.Tensor) -> bool:
        """Whether hooks may write to ``x`` unnoticed: tensors made in inference mode count no writes."""
        return x.is_inference() and (has_global_hooks() or any(has_hooks(each.module) for each in self.members))

    def _state(self, x: torch.Tensor) -> tuple[Any, ...]:
        """What columns of ``x`` depend on: the recipe, the modes, counts of writes to ``x`` and to the parameters."""
        own = state_of(*(each.module for each in self.members))
        return current_recipe(), torch.is_grad_enabled(), autocast_dtype(x), x.data_ptr(), versions(x), own


class _Columns(torch.autograd.Function):
    """Columns of a matrix that nobody else has. They share its memory, and no count of writes: no two of them overlap.

    The weights of columns that no loss depends on get no gradient, as those of a product of their own get none.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, columns: Sequence[int], made: MadeParameters) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.columns, ctx.like, ctx.reached = columns, whole.detach()[..., :1], made.reached
        return tuple(part.data for part in whole.split(tuple(columns), dim=-1))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        ctx.reached[:] = [grad is not None for grad in grads]
        blank = ctx.like.new_zeros(())
        parts = [blank.expand(*ctx.like.shape[:-1], n) if grad is None else grad for n, grad in zip(ctx.columns, grads)]
        return torch.cat(parts, dim=-1), None, None


class Sibling(Converted):
    """The forward of a module that shares its product with others."""

    shared: Shared
    index: int

    @property
    def made(self) -> list[MadeParameters]:
        return self.shared.run.made

    @property
    def runs(self) -> tuple[PipelineRun, ...]:
        return (*super().runs, *([] if self.index else [self.shared.run]))

    @property
    def products(self) -> dict[str, BasicOperation]:
        """Its own product, for calls alone; the first also has the product of all."""
        alone = super().products
        if self.index:
            return alone
        (product,) = casting([self.shared.run]).values()
        return alone | {"shared": product}

    def check_unchanged(self) -> None:
        """Check this module; the first checks all, since its product reads the parameters of all."""
        for each in [self] if self.index else self.shared.members:
            Converted.check_unchanged(each)

    def get_ready(self) -> None:
        """Make what dynamo reads; the first also makes the call for all."""
        super().get_ready()
        shared = self.shared
        if not self.index and shared.in_graph is None:
            shared.in_graph = InGraph(self, others=[each for each in shared.members if each is not self])

    def _as_op(self, call: Any, given: Sequence[Any]) -> Any:
        """In a graph the first computes all; the others recognise the tensor as long as nothing that the product read is written.
        Across graphs that is not known.
        """
        shared, whole, (x,) = self.shared, self.shared.in_graph, given
        followed, shared.followed = shared.followed, None
        if whole is None or hindrance(whole, x, (), None):
            return super()._as_op(call, given)
        if self.index == 0:
            if self._trains_apart(x):
                return super()._as_op(call, given)
            first, *others = shared.views(super()._as_op(whole, given))
            shared.followed = moment(whole, x), others
            return first
        if followed is None or followed[0] != moment(whole, x):
            return super()._as_op(call, given)
        if self.index < len(followed[1]):
            shared.followed = followed
        return followed[1][self.index - 1]

    def pipeline(self, *, shared: bool) -> PipelineRun | None:
        """The pipeline of all modules, if ``shared``."""
        return self.shared.run if shared else None

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of all modules, in one tensor."""
        return self.shared.run(x, ())

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        if self.shared.is_blind(x):
            return super().compute(x, arguments)
        if self.index == 0:
            alone = self._trains_apart(x) or any(each.is_changed() for each in self.shared.members if each is not self)
            return super().compute(x, arguments) if alone else self.shared.first(x)
        found = self.shared.take(self.index, x)
        if found is None:
            return super().compute(x, arguments)
        note_use()
        return found

    def _trains_apart(self, x: torch.Tensor) -> bool:
        """Whether some of the results want a gradient and others do not."""
        wants = {any(p is not None and p.requires_grad for p in each._parameters()) for each in self.shared.members}
        return len(wants) > 1 and not x.requires_grad


def siblings(module: nn.Module, made: Mapping[nn.Module, Converted]) -> Iterator[list[Sibling]]:
    """Groups of submodules of ``module``, each converted alone so far, that can share a product, in the order of their calls."""
    alone = {name: weight for name, child in module.named_children() if (weight := _alone(child, made)) is not None}
    if len(alone) < 2:
        return
    by_value: dict[Any, list[fx.Node]] = defaultdict(list)
    calls = [node for node in _beginning(module, alone.values()) if node.op == "call_module"]
    counts = Counter(str(node.target) for node in calls)
    for node in calls:
        reads = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        if (
            reads and counts[str(node.target)] == 1 and (node.users or "read" in node.meta)
        ):  # else it is returned, for who knows what
            by_value[node.args[0], node.meta["modes"]].append(node)
    for readers in by_value.values():
        group = [node for node in readers if str(node.target) in alone]
        agreeing = [node for node in group if _agree(alone[str(group[0].target)], alone[str(node.target)], made)]
        if len(agreeing) > 1:
            weights = [alone[str(node.target)] for node in agreeing]
            yield _joined(weights, [made[weight.module] for weight in weights], plain=all(map(_is_parted, agreeing)))


def _alone(child: nn.Module, made: Mapping[nn.Module, Converted]) -> Weight | None:
    """The product that a submodule is, or that it begins with: adapters call the layer that they wrap, on their input."""
    for module in (child, child._modules.get("base_layer")):
        if module is not None and type(made.get(module)) is Converted and (weight := weight_of(module)) is not None:
            return weight
    return None


def _beginning(module: nn.Module, weights: Iterable[Weight]) -> list[fx.Node]:
    """What a forward does, as far as it can be followed: with an input for its first argument and None for the others that it
    needs, or with inputs for all of them.
    """
    weight = next(iter(weights))
    names, found = required_arguments(module), list[list[fx.Node]]([[]])
    with mode("evaluation") as training:
        for count in dict.fromkeys((1, len(names))) if names else ():
            like = weight.module._parameters["weight"]
            given = {name: rows(LEADING[0], weight.in_features, like) if n < count else None for n, name in enumerate(names)}
            found.append(record(module, given, training=training, may_write=True).nodes)
    return max(found, key=len)


def _agree(one: Weight, other: Weight, made: Mapping[nn.Module, Converted]) -> bool:
    return one.agrees(other) and made[one.module].recipe == made[other.module].recipe


def _is_parted(node: fx.Node) -> bool:
    """Whether the result is only reshaped, or viewed with its last dimension split: both work on columns of a wider matrix."""
    users = [user for user in node.users if user.op == "call_method"]
    return len(users) == len(node.users) > 0 and all(
        user.target == "reshape" or (user.target == "view" and len(user.meta.get("shape", ())) == 4) for user in users
    )


def _joined(weights: Sequence[Weight], alone: Sequence[Converted], *, plain: bool) -> list[Sibling]:
    name = "+".join(each.path for each in alone)
    run = PipelineRun(path=short(name))
    run.multiply(weights, name, (name, f"{name}.bias"))
    shared, found = Shared(run, [weight.out_features for weight in weights], plain=plain), []
    for index, own in enumerate(alone):
        sibling = Sibling(
            own.module, own.path, arguments=own.arguments, run=own.run, members={}, recipe=own.recipe, proven=own.proven
        )
        sibling.shared, sibling.index = shared, index
        found.append(sibling)
    shared.members = found
    return found
