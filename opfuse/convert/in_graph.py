"""A converted module in a graph of torch.compile: one op, which decides by the recipe at run time, as an eager call does.

The products of one tensor are one op, if the graph writes to nothing that they read in between. Autograd does not see into the
op, which runs over stand-ins of its arguments. So the modules inside are called as shallow copies with stand-ins for
parameters, and the op runs an autograd of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from opfuse.convert.guards import code_of
from opfuse.convert.weights import replica, taking
from opfuse.core.operation import BasicOperation
from opfuse.core.tracers import enroll
from opfuse.core.watched import Tree
from opfuse.recipes import autocast, current_recipe, in_region
from opfuse.runtime.compile.backward_tape import BackwardTape
from opfuse.runtime.compile.custom_op import autocast_like, parameters_of
from opfuse.runtime.compile.saved_call import CallInside
from opfuse.runtime.interpret.checkpoint_replay import CalledPipeline, repeated
from opfuse.torch_private.compiler import fake_tensor_mode
from opfuse.torch_private.dispatch import without_modes


class OnePipeline(Protocol):
    """A pipeline of a converted module."""

    def spare_of(self, x: torch.Tensor) -> int: ...

    def __call__(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor: ...


class ForwardInGraph(CalledPipeline, Protocol):
    """The forward of a converted module, as far as an op runs it."""

    module: nn.Module
    arguments: tuple[str, ...]
    region: autocast | None

    def check_unchanged(self) -> None: ...

    def pipeline(self, *, shared: bool) -> OnePipeline | None: ...

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any: ...

    def whole(self, x: torch.Tensor) -> torch.Tensor: ...

    def outline(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]: ...


class InGraph:
    """A call of a converted module, or of several, as an op knows a pipeline.

    others: modules that share the product of ``owner``; the op returns the columns of all in one tensor, of which the graph takes
    views, since outputs of one op may not share memory.
    """

    ops: tuple[BasicOperation, ...] = ()
    """No ops of the caller's."""

    def __init__(self, owner: ForwardInGraph, *, others: Sequence[ForwardInGraph] = ()) -> None:
        self.ticket = enroll(self)
        self.owner, self.others = owner, tuple(others)
        self.label = owner.label
        self.modules = [each.module for each in (owner, *others)]
        self.form = f"{type(owner).__name__} {owner.arguments} {self.modules!r}"
        self._find()

    def get_ready(self) -> None:
        """Find the parameters, unless modules and names are those of the last time."""
        if not all(tree.stands for tree in self._trees):
            self._find()

    def _find(self) -> None:
        self._reached: Sequence[bool] | None = None
        self.code = code_of(type(part) for module in self.modules for part in module.modules())
        self._trees = tuple(map(Tree.of, self.modules))
        self.slots = tuple((slot, name) for tree in self._trees for slot, names in tree.parameters for name in names)

    def outline(self, given: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Stand-ins of the outputs for ``given``, which may have no values."""
        with autocast(enabled=False):
            return list(self.owner.outline(given)) or [self._plain(*given)]

    def reach(self, given: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Sequence[bool]:
        """Whether a gradient comes to each input and parameter, by the forwards that the modules had; empty where these do not
        tell of tensors without values. Which do is a matter of code, so of the first call's looks alone.
        """
        if self._reached is None:
            try:
                with torch.inference_mode(False), without_modes(), fake_tensor_mode()(allow_non_fake_inputs=True):
                    self._reached = self._reach([_like(each) for each in given], dtype)
            except Exception:  # of a stranger's code, on tensors without values
                self._reached = ()
        return self._reached

    def _reach(self, given: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Sequence[bool]:
        if self.owner.outline(given):
            return ()
        instead = {id(parameter): _like(parameter) for parameter in parameters_of(self)}
        with torch.enable_grad(), autocast_like(given[0], dtype):
            result = self._over(instead, partial(self._plain, *given))
        arguments = [*given, *[instead[id(parameter)] for parameter in parameters_of(self)]]
        asked = [each for each in arguments if each.requires_grad]
        grads = torch.autograd.grad(result, asked, result, allow_unused=True) if result.requires_grad else [None] * len(asked)
        found = {id(each) for each, grad in zip(asked, grads) if grad is not None}
        return [id(each) in found for each in arguments]

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The call outside of a graph, after a break, as an eager one."""
        return (self._around(partial(self._run, given)),)

    def run_inside(self, call: CallInside) -> tuple[torch.Tensor, ...]:
        """The call inside of an op."""
        result: tuple[torch.Tensor, ...] = self._around(partial(self._run_inside, call))
        return result

    def _around(self, run: Callable[[], Any]) -> Any:
        """What ``run()`` gives under the recipe of this call."""
        owner = self.owner
        region = nullcontext() if owner.region is None or in_region() else owner.region
        with region:
            repeat = repeated(owner)
            return run() if repeat is None else repeat(run)

    def _run_inside(self, call: CallInside) -> tuple[torch.Tensor, ...]:
        """A single pipeline notes its backward pass in a ledger; anything else is recorded by autograd."""
        pipeline = self.owner.pipeline(shared=bool(self.others))
        if current_recipe() is None or pipeline is None or pipeline.spare_of(call.given[0]):
            return call.recorded_by_autograd(lambda given, instead: self._over(instead, partial(self._run, given)))
        self._check()

        def alone(given: Sequence[torch.Tensor], ledger: BackwardTape) -> torch.Tensor:
            x, *arguments = given
            result: torch.Tensor = self._over(ledger, partial(pipeline, x, arguments))
            return result

        return call.recorded_on_tape(alone)

    def _over(self, instead: Mapping[int, torch.Tensor] | BackwardTape, run: Callable[[], Any]) -> Any:
        with taking(instead):
            return run()

    def _check(self) -> None:
        for each in (self.owner, *self.others):
            each.check_unchanged()

    def _run(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        if current_recipe() is None:
            return self._plain(*given)
        self._check()
        x, *arguments = given
        result: torch.Tensor = self.owner.whole(x) if self.others else self.owner.compute(x, arguments)
        return result

    def _plain(self, x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        """The result by the modules' original forwards."""
        results = [type(module).forward(replica(module, plain=True), x, *arguments) for module in self.modules]
        result: torch.Tensor = torch.cat(results, dim=-1) if self.others else results[0]
        return result


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same look, that a gradient may come to. Of a size that is a symbol, one that it had."""
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in tensor.shape]
    return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.dtype.is_floating_point)
