"""What the compiler passes to the methods of an op, and what it takes back from them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from torch import nn

from opfuse.errors import PipelineError, describe, number_of
from opfuse.tensors.storage import QuantizedStorage


@runtime_checkable
class RunsOps(Protocol):
    """What stands for the ``forward`` of a module and runs ops that are no submodules of it."""

    def named_ops(self) -> Iterator[tuple[str, Any]]:
        """The ops, each with the path that people know it by."""

    @property
    def runs(self) -> Iterable[Any]:
        """What runs them: each has a ``fuser``, its pipeline, None before the first call."""

    def told(self) -> Iterable[Sequence[str]]:
        """What became of each module of the model that was converted: module, class, recipe, what it became, status."""


def runs_ops(module: nn.Module) -> RunsOps | None:
    """What stands for the ``forward`` of ``module`` and runs ops, if something does."""
    own = getattr(vars(module).get("forward"), "__self__", None)
    return own if isinstance(own, RunsOps) else None


class Grouping(NamedTuple):
    """How the rows of an op are in groups.

    number: of groups. splits: which extra input says how many rows each has. padded: whether a cast fills the last blocks of a
    group with rows of zeros. summed: whether the backward pass sums the rows of each group, of which the host has to know the
    number.
    """

    number: int
    splits: int = 0
    padded: bool = False
    summed: bool = False


NEIGHBOURS: Mapping[str, None] = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}
"""The quantizers that te.ops gives ``op_forward`` and ``fuser_forward``."""

PASSED: Mapping[str, tuple[str, ...]] = {
    "op_forward": (),
    "op_backward": (),
    "fuser_forward": ("basic_op_extra_inputs", *NEIGHBOURS, "basic_op_kwargs"),
    "fuser_backward": ("basic_op_grad_extra_outputs",),
}
"""The keywords that each method is called with, behind a context and a tensor. The first two may be called by the last two."""

CALLER = {"op_forward": "fuser_forward", "op_backward": "fuser_backward"}
"""The method of te.ops that calls each method of an op, unless a subclass overrides it."""

LISTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "fuser_forward": (("extra outputs",), "return y, [()], for an op without any"),
    "fuser_backward": (
        ("gradients of parameters", "gradients of extra inputs"),
        "return dx, [(dw, db)], [()], for an op with two parameters and no extra inputs",
    ),
}
"""What the methods of te.ops return behind a tensor, and how that is written."""


def check_signatures(cls: type, base: type) -> None:
    """PipelineError for a method written in ``cls`` that cannot be called as ``base`` has it called."""
    for name, keywords in PASSED.items():
        method = vars(cls).get(name)
        caller = CALLER.get(name, "")
        if not inspect.isfunction(method) or getattr(cls, caller, None) is not getattr(base, caller, None):
            continue
        if (error := misfit(method, keywords)) is None or (name == "op_forward" and misfit(method, NEIGHBOURS) is None):
            continue
        wanted = f"to be called with a context, a tensor{' and ' * bool(keywords)}{', '.join(f'{word}=' for word in keywords)}"
        form = f"{name}(self, ctx, {'grad_output' if 'backward' in name else 'x'})"
        cure = "add **kwargs to its parameters" if keywords else f"write it as {form}"
        raise PipelineError(describe(f"{cls.__name__}.{name}", wanted=wanted, got=f"{error}", cure=cure))


def misfit(method: Any, keywords: Iterable[str]) -> TypeError | None:
    """What keeps a function from being called with an op, a context, a tensor and these keywords."""
    try:
        inspect.signature(method, follow_wrapped=False).bind(None, None, None, **dict.fromkeys(keywords))
    except TypeError as error:
        return error
    return None


def takes_neighbours(method: Any) -> bool:
    """Whether the ``op_forward`` of an op, as it is now, takes the keywords of :data:`NEIGHBOURS`."""
    written = getattr(method, "__func__", None)
    return _takes_neighbours(method, 2) if written is None else _takes_neighbours(written, 3)


@lru_cache(maxsize=256)
def _takes_neighbours(function: Any, given: int) -> bool:
    try:
        inspect.signature(function, follow_wrapped=False).bind(*[None] * given, **NEIGHBOURS)
    except (TypeError, ValueError):  # ValueError: a function without a signature
        return False
    return True


def refuse_missing(label: str, methods: str) -> NoReturn:
    """PipelineError for an op that was called without one of ``methods``."""
    raise PipelineError(describe(label, wanted=methods, got="neither", cure="override one of them"))


def checked_outputs(op: Any, output: Any) -> tuple[Any, tuple[Any, ...]]:
    """What ``op_forward`` returned: the output, and the extra outputs that stand behind it; PipelineError for anything else."""
    extras: tuple[Any, ...] = ()
    if op.num_extra_outputs and isinstance(output, tuple) and output:
        output, *rest = output
        extras = tuple(rest)
    cure = "return the output, alone or, if num_extra_outputs says so, with extra outputs behind it"
    check_tensor(op, "op_forward", output, cure)
    return output, extras


def check_tensor(op: Any, what: str, output: object, cure: str) -> None:
    """PipelineError for what is neither a tensor nor a quantized value. Labels are slow, so one is made for an error alone."""
    if not isinstance(output, (torch.Tensor, QuantizedStorage)):
        raise PipelineError(describe(f"{op.label} {what}", wanted="a tensor", got=_form(output), cure=cure))


def checked_lists(op: Any, method: str, found: Any, ops: int) -> tuple[Any, ...]:
    """What a method of te.ops returned for so many ops: a tensor, then the lists of :data:`LISTS`, with an entry for each op.

    PipelineError for anything else. An empty list stands for one of empty entries.
    """
    names, cure = LISTS[method]
    lists = found[1:] if isinstance(found, (tuple, list)) else ()
    if len(lists) == len(names) and all(isinstance(each, (tuple, list)) and len(each) in (0, ops) for each in lists):
        entries = ([checked_tensors(op, name, one) for one in each] for name, each in zip(names, lists))
        return (found[0], *(each or [()] * ops for each in entries))
    wanted = f"a tensor, then a list of {' and one of '.join(names)}, with an entry for each of {number_of(ops, 'op')}"
    raise PipelineError(describe(f"{op.label} {method}", wanted=wanted, got=_form(found), cure=cure))


def checked_tensors(op: Any, what: str, found: Any) -> tuple[torch.Tensor | None, ...]:
    """``found`` as a tuple; PipelineError unless it is a collection of tensors and None. what: how the error calls them."""
    if not isinstance(found, (tuple, list)) and (not isinstance(found, Iterable) or isinstance(found, torch.Tensor)):
        cure = "return them in a tuple, with None for one that is not there; () if the op has no such tensors"
        raise PipelineError(describe(f"{op.label} {what}", wanted="a tuple of tensors", got=_form(found), cure=cure))
    tensors = tuple(found)
    for each in tensors:
        if each is not None and not isinstance(each, torch.Tensor):
            where, wanted = f"{op.label} {what}", "tensors, or None"
            raise PipelineError(describe(where, wanted=wanted, got=_form(each), cure="return one tensor for each"))
    return tensors


def _form(found: object) -> str:
    """What came instead of a result, in a few words."""
    if isinstance(found, (tuple, list)):
        return f"a {type(found).__name__} of {', '.join(type(each).__name__ for each in found) or 'nothing'}"
    return "None" if found is None else f"a {type(found).__name__}"


def checked_gradients(op: Any, ctx: Any, found: Any) -> tuple[Any, Any, Any]:
    """What ``op_backward`` returned: gradients of the input, of parameters and of extra inputs; PipelineError for anything else.

    The last may be left out if there are no extra inputs, or if their gradients are in the context.
    """
    count = len(found) if isinstance(found, (tuple, list)) else 0
    if count == 2 and len(ctx.grad_inputs) == op.num_extra_inputs:
        return found[0], found[1], ctx.grad_inputs
    if count == 3 and op.num_extra_inputs:
        return found[0], found[1], found[2]
    wanted, cure = (
        ("the gradients of the input, of the parameters and of the extra inputs", "return dx, (dw,), (d_extra,)")
        if op.num_extra_inputs
        else ("the gradient of the input and those of the parameters", "return dx, (dw, db), or dx, () without parameters")
    )
    raise PipelineError(describe(f"{op.label} op_backward", wanted=wanted, got=_form(found), cure=cure))
