"""Products of one tensor, such as query, key and value: one product computes all, and each module returns its columns.

The forward of the module around them says which read the same tensor. When the model runs, the first of them computes all, and
the others recognise the tensor by identity. A module that is called with another tensor, or out of order, computes its own.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from opfuse.convert.around import beginning_of, name_of, writes_before
from opfuse.convert.converted import Converted, casting
from opfuse.convert.in_graph import InGraph
from opfuse.convert.leaves import weight_of
from opfuse.convert.members import has_global_hooks, has_hooks
from opfuse.convert.parts import PipelineRun
from opfuse.convert.weights import MadeParameters, Weight, state_of
from opfuse.core.context import versions
from opfuse.core.operation import BasicOperation
from opfuse.inspect.alike import short
from opfuse.recipes import current_recipe, note_use
from opfuse.runtime.compiled import autocast_dtype, hindrance, moment


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
        """The columns of all modules."""
        parts = whole.split(self.columns, dim=-1)
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
        return current_recipe(), torch.is_grad_enabled(), autocast_dtype(x), versions(x), own


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

    def check_members(self) -> None:
        """Check this module; the first checks all, since its product reads the parameters of all."""
        for each in [self] if self.index else self.shared.members:
            Converted.check_members(each)

    def get_ready(self) -> None:
        """Make what dynamo reads; the first also makes the call for all."""
        super().get_ready()
        shared = self.shared
        if not self.index and shared.in_graph is None:
            shared.in_graph = InGraph(self, others=[each for each in shared.members if each is not self])

    def _as_op(self, call: InGraph, given: Sequence[Any]) -> Any:
        """In a graph the first computes all; the others recognise the tensor as long as nothing that the product read is written.
        Across graphs that is not known.
        """
        shared, whole, (x,) = self.shared, self.shared.in_graph, given
        followed, shared.followed = shared.followed, None
        if whole is None or hindrance(whole, x, (), None):
            return super()._as_op(call, given)
        if self.index == 0:
            first, *others = shared.parted(super()._as_op(whole, given))
            shared.followed = moment(whole, x), others
            return first
        if followed is None or followed[0] != moment(whole, x):
            return super()._as_op(call, given)
        if self.index < len(followed[1]):
            shared.followed = followed
        return followed[1][self.index - 1]

    def pipeline(self, *, normed: bool, shared: bool) -> PipelineRun | None:
        """The pipeline of all modules, if ``shared``."""
        return self.shared.run if shared else None

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The columns of all modules, in one tensor."""
        return self.shared.run(x, ())

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any:
        if self.shared.is_blind(x):
            return super().compute(x, arguments)
        if self.index == 0:
            return self.shared.first(x)
        found = self.shared.take(self.index, x)
        if found is None:
            return super().compute(x, arguments)
        note_use()
        return found


def siblings(module: nn.Module, made: Mapping[nn.Module, Converted]) -> Iterator[list[Sibling]]:
    """Groups of submodules of ``module``, each converted alone so far, that can share a product, in the order of their calls."""
    alone = {name: weight for name, child in module.named_children() if child in made and (weight := weight_of(child))}
    if len(alone) < 2:
        return
    by_value: dict[Any, list[fx.Node]] = defaultdict(list)
    nodes = beginning_of(module)
    written = writes_before(module, nodes)
    calls = [name_of(node) for node in nodes if node.op == "call_module"]
    for node in nodes:
        if node.op == "call_module" and len(node.args) == 1 and not node.kwargs and calls.count(name_of(node)) == 1:
            by_value[node.args[0], written[node], node.meta["modes"]].append(node)
    for readers in by_value.values():
        group = [node for node in readers if name_of(node) in alone]
        agreeing = [node for node in group if _agree(alone[name_of(group[0])], alone[name_of(node)], made)]
        if len(agreeing) > 1:
            weights = [alone[name_of(node)] for node in agreeing]
            yield _joined(weights, [made[weight.module] for weight in weights], plain=all(map(_is_parted, agreeing)))


def _agree(one: Weight, other: Weight, made: Mapping[nn.Module, Converted]) -> bool:
    return one.agrees(other) and made[one.module].recipe == made[other.module].recipe


def _is_parted(node: fx.Node) -> bool:
    """Whether the result is only reshaped, or viewed with its last dimension split: both work on columns of a wider matrix."""
    return all(
        user.op == "call_method" and (user.target == "reshape" or (user.target == "view" and _parts(user.args[1:])))
        for user in node.users
    )


def _parts(shape: Sequence[Any]) -> bool:
    (sizes,) = shape if len(shape) == 1 else (shape,)
    return isinstance(sizes, (tuple, list)) and len(sizes) == 4


def _joined(weights: Sequence[Weight], alone: Sequence[Converted], *, plain: bool) -> list[Sibling]:
    name = "+".join(each.path for each in alone)
    run = PipelineRun(path=short(name))
    run.multiply(weights, name, (name, f"{name}.bias"))
    shared, found = Shared(run, [weight.out_features for weight in weights], plain=plain), []
    for index, own in enumerate(alone):
        sibling = Sibling(own.module, own.path, arguments=own.arguments, parts=own.parts, members=own.members, recipe=own.recipe)
        sibling.shared, sibling.index = shared, index
        found.append(sibling)
    shared.members = found
    return found
