"""A converted module in a graph of torch.compile: one op, whose run decides by the recipe of then, as an eager call does.

What modules hand to each other by identity when they run, dynamo follows while it traces: a norm and its reader are one op, and
so are the products of one tensor. The op runs outside of autograd's sight, over stand-ins of its arguments. So the modules
inside are called as shallow copies, whose parameters are stand-ins, and autograd is made to look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from opfuse.convert.weights import replica, taking
from opfuse.core.operation import BasicOperation
from opfuse.core.tracers import enroll
from opfuse.recipes import autocast, current_recipe, in_region
from opfuse.runtime.recompute import CalledPipeline, repeated


class ForwardInGraph(CalledPipeline, Protocol):
    """The forward of a converted module, as far as an op runs it."""

    module: nn.Module
    arguments: tuple[str, ...]
    region: autocast | None
    normed: Any

    def check_members(self) -> None: ...

    def compute(self, x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any: ...

    def through(self, parts: Sequence[Any], x: torch.Tensor, arguments: Sequence[torch.Tensor]) -> Any: ...

    def whole(self, x: torch.Tensor) -> torch.Tensor: ...

    def outline(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]: ...

    def unrecorded(self, run: Callable[[], Any]) -> Any: ...


class InGraph:
    """A call of a converted module, or of several, as an op knows a pipeline.

    norm: whose module handed its input on. others: modules that share the product of ``owner``; the op gives the columns of all
    in one tensor, of which the graph takes views: outputs of one op may not lie in one memory.
    """

    ops: tuple[BasicOperation, ...] = ()
    """None that a pipeline of the caller has."""

    def __init__(
        self, owner: ForwardInGraph, *, norm: ForwardInGraph | None = None, others: Sequence[ForwardInGraph] = ()
    ) -> None:
        self.ticket = enroll(self)
        self.owner, self.norm, self.others = owner, norm, tuple(others)
        self.label = owner.label
        self.modules = [each.module for each in (norm, owner, *others) if each is not None]
        self.form = f"{type(owner).__name__} {norm is None} {owner.arguments} {self.modules!r}"
        self.get_ready()

    def get_ready(self) -> None:
        """Find the parameters."""
        self.slots = tuple(
            (part._parameters, name) for each in self.modules for part in each.modules() for name in part._parameters
        )

    def outline(self, given: Sequence[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Outputs that look as those for ``given``, which may have no values."""
        with autocast(enabled=False):
            return list(self.owner.outline(given)) or [self._plain(*given)]

    def __call__(
        self, x: torch.Tensor, /, *extras: torch.Tensor, instead: Mapping[int, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        owner, given = self.owner, (x, *extras)
        with ExitStack() as around:
            if instead is not None:
                around.enter_context(_seen_by_autograd())
                around.enter_context(taking(instead))
            if owner.region is not None and not in_region():
                around.enter_context(owner.region)
            repeat, run = repeated(owner), partial(self._run, *given)
            result: torch.Tensor = run() if repeat is None else repeat(partial(owner.unrecorded, run))
        return (result,)

    def _run(self, *given: torch.Tensor) -> torch.Tensor:
        if current_recipe() is None:
            return self._plain(*given)
        for each in (self.owner, *self.others):
            each.check_members()
        x, *arguments = given
        if self.others:
            return self.owner.whole(x)
        run = self.owner.compute if self.norm is None else partial(self.owner.through, self.owner.normed)
        result: torch.Tensor = run(x, arguments)
        return result

    def _plain(self, x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        """By the forwards that the modules had."""
        first, *rest = [replica(module, plain=True) for module in self.modules]
        if self.norm is not None:
            x, first, rest = first(x), rest[0], []
        results = [module(x, *arguments) for module in (first, *rest)]
        result: torch.Tensor = torch.cat(results, dim=-1) if rest else results[0]
        return result


_AUTOGRAD = ("AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA")


@contextmanager
def _seen_by_autograd() -> Iterator[None]:
    """Inside an op, which autograd does not look into, have it record what torch's ops do."""
    with torch._C._PreserveDispatchKeyGuard():  # type: ignore[attr-defined]
        for name in _AUTOGRAD:
            torch._C._dispatch_tls_set_dispatch_key_excluded(getattr(torch._C.DispatchKey, name), False)  # type: ignore[attr-defined]
        yield
