"""A rehearsal: a run of a segment that launches no kernels and finds which ones it needs, so that they are compiled together.

Otherwise each kernel is compiled at its first launch, one after another, those of the backward pass in the backward pass. A
rehearsal takes place only if a kernel is missing on disk. It computes with whatever is in memory. So it writes to no memory but
its own: an op that would write in place to its inputs, or to a ``main_grad``, is left out. It must not use values as indices,
change states or random generators, or wait for other ranks, which may have their kernels; an op that would ends it, with the
kernels found so far. No code of the user's own runs in it: a backward pass that has some is not rehearsed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opfuse.compiler.graph import BACKWARD
from opfuse.core.context import plain
from opfuse.kernels.casts.delayed import updating
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.joining import with_joined
from opfuse.kernels.engine.launch import dry_run
from opfuse.recipes.passes import Pass, running
from opfuse.runtime.interpret.interpreter import Interpreter
from opfuse.runtime.replay.recorder import PLAIN
from opfuse.torch_private.dispatch import UncompiledMode, arguments_of, schema_of
from opfuse.torch_private.operations import tree_leaves

_log = logging.getLogger("opfuse.programs")

_INDEXING = ("index", "gather", "scatter", "embedding", "take", "put", "masked_scatter", "masked_select", "one_hot", "bincount")
"""Prefixes of the names of ops that use values as indices."""

_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _Stop(Exception):
    """Ends a rehearsal. Never leaves the module."""


class _Harmless(UncompiledMode):
    """Leaves out what writes in place to memory that was not made inside; ends a rehearsal at other such ops, at one whose values
    matter, and at one that waits for other ranks.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = schema_of(func).name.partition("::")
        if "c10d" in namespace:
            raise _Stop(f"{name} waits for other ranks")
        if name.startswith(_INDEXING) or not _BY_VALUES.isdisjoint(func.tags):
            raise _Stop(f"{name} reads values")
        if not _memory(_written(func, args, kwargs)) <= self._made:
            if name.endswith("_"):
                return args[0]
            raise _Stop(f"{name} may write what came in")
        result = func(*args, **kwargs)
        self._made |= _memory(result) - _memory((args, kwargs))
        return result


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op writes to, as its schema says."""
    declared = arguments_of(func)
    values = {argument.name: value for argument, value in zip(declared, args)} | dict(kwargs)
    return [values[argument.name] for argument in declared if argument.is_write and argument.name in values]


def _memory(values: Any) -> set[int]:
    """Where the tensors among some values lie."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def rehearsed(interpreter: Interpreter, tensors: Sequence[torch.Tensor]) -> list[Variant]:
    """The kernels that both passes of a segment launch for inputs like ``tensors``, as far as they can be found."""
    plan, segment, ops = interpreter.plan, interpreter.segment, interpreter.ops
    parameters = [value for i in segment.ops for value in ops[i].parameter_values() if value is not None]
    if not all(type(tensor) in PLAIN for tensor in (*tensors, *parameters)):
        return []
    devices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    twin = Interpreter(plan, segment, ops, ({},) * len(ops))
    twin.precomputed = dict(interpreter.precomputed)
    with dry_run() as needed, running(Pass.DRY_RUN), torch.random.fork_rng(devices), torch.no_grad():
        try:
            with _Harmless():
                _run(twin, tensors)
        except Exception as reason:  # whatever it is, the call itself tells of it, or meets nothing of the kind
            _log.debug("%s, nodes %s: rehearsed in part, since %s", plan.name, segment.nodes, reason)
        if any(cast.live_states for cast in plan.casts.values()):  # by who owns the region, when its passes are over
            needed.append(updating())
        return with_joined(needed)


def _run(twin: Interpreter, tensors: Sequence[torch.Tensor]) -> None:
    segment = twin.segment
    values = twin.forward(tensors)
    if segment.requires_grad and BACKWARD not in segment.user_code.users:
        saved = twin.released()
        outputs = zip(segment.outputs, values)
        grads: dict[int, torch.Tensor | None] = {number: torch.empty_like(plain(value)) for number, value in outputs}
        twin.gradients(grads, iter(saved))
