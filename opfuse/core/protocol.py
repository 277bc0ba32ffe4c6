"""What the compiler passes to the methods of an op, and what it takes back from them."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch

from opfuse.errors import PipelineError, describe
from opfuse.tensors.storage import QuantizedStorage

QUANTIZERS = ("prev_op_grad_output_quantizer", "next_op_input_quantizer")

PASSED: dict[str, tuple[str, ...]] = {
    "op_forward": QUANTIZERS,
    "op_backward": (),
    "fuser_forward": ("basic_op_extra_inputs", *QUANTIZERS, "basic_op_kwargs"),
    "fuser_backward": ("basic_op_grad_extra_outputs",),
}
"""The keywords that each method is called with, behind a context and a tensor. The first two are called by the last two."""

CALLER = {"op_forward": "fuser_forward", "op_backward": "fuser_backward"}


def check_signatures(cls: type, base: type) -> None:
    """PipelineError for a method written in ``cls`` that cannot be called as ``base`` has it called."""
    for name, keywords in PASSED.items():
        method = vars(cls).get(name)
        caller = CALLER.get(name, "")
        if not inspect.isfunction(method) or getattr(cls, caller, None) is not getattr(base, caller, None):
            continue
        try:
            inspect.signature(method, follow_wrapped=False).bind(None, None, None, **dict.fromkeys(keywords))
        except TypeError as error:
            wanted = (
                f"to be called with a context, a tensor{' and ' * bool(keywords)}{', '.join(f'{word}=' for word in keywords)}"
            )
            cure = "add **kwargs to its parameters" if keywords else "write it as op_backward(self, ctx, grad_output)"
            raise PipelineError(describe(f"{cls.__name__}.{name}", wanted=wanted, got=f"{error}", cure=cure)) from None


def refuse_missing(label: str, methods: str) -> NoReturn:
    """PipelineError for an op that was called without one of ``methods``."""
    raise PipelineError(describe(label, wanted=methods, got="neither", cure="override one of them"))


def checked_output(label: str, output: Any) -> Any:
    """``output`` of ``op_forward``; PipelineError if it is no tensor."""
    if not isinstance(output, (torch.Tensor, QuantizedStorage)):
        cure = "return the output; extra outputs are fuser_forward's"
        raise PipelineError(describe(f"{label} op_forward", wanted="a tensor", got=type(output).__name__, cure=cure))
    return output


def checked_gradients(label: str, found: Any) -> tuple[Any, Any]:
    """What ``op_backward`` returned; PipelineError unless it is a pair."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        got = f"{len(found)} values" if isinstance(found, (tuple, list)) else type(found).__name__
        wanted, cure = (
            "the gradient of the input and those of the parameters",
            "return dx, (dw, db), or dx, () without parameters",
        )
        raise PipelineError(describe(f"{label} op_backward", wanted=wanted, got=got, cure=cure))
    return found[0], found[1]
