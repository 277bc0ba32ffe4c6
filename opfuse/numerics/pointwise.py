"""How an elementwise op declares its math, once: a CUDA expression and a torch function for its value and for its gradient.

One declaration serves the op alone, every fused chain that holds it, forward and backward, and the tests that compare them::

    SOFTSIGN = Pointwise(
        "softsign",
        forward="x / (1.0f + fabsf(x))",
        backward=("dy / ((1.0f + fabsf(x)) * (1.0f + fabsf(x)))",),
        value=lambda x: x / (1 + x.abs()),
        grad=lambda dy, x: (dy / (1 + x.abs()).square(),),
    )
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from opfuse.errors import SpecError, describe, nearest

OperandKind = Literal["row", "column", "full"]
"""Shape of a second tensor of an op whose result is (..., n): "row" (n,), "column" (...), "full" (..., n)."""

INPUT_NAMES = (("x",), ("a", "b"))

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# A name that is read as a value: not the tail of a number or of another name, not called, not qualified.
_VARIABLE = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!\s*(?:\(|::))")
_C_WORDS = frozenset(("bool", "const", "double", "false", "float", "int", "long", "sizeof", "true", "unsigned", "void"))
# Keywords and alternative tokens of C++ up to C++23 ([lex.key], [lex.digraph]): no parameter of a function can have such a name.
_KEYWORDS = """
    alignas alignof and and_eq asm auto bitand bitor break case catch char char16_t char32_t char8_t class co_await co_return
    co_yield compl concept const_cast consteval constexpr constinit continue decltype default delete do dynamic_cast else enum
    explicit export extern for friend goto if inline mutable namespace new noexcept not not_eq nullptr operator or or_eq private
    protected public register reinterpret_cast requires return short signed static static_assert static_cast struct switch
    template this thread_local throw try typedef typeid typename union using virtual volatile wchar_t while xor xor_eq
"""
_RESERVED = _C_WORDS | {*_KEYWORDS.split()}


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic on ``dtypes`` runs in: fp64 as soon as one is fp64 (gradient checks), else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def variables(expression: str) -> frozenset[str]:
    """The names that a CUDA expression reads as values; functions, C words and upper-case macros are not variables."""
    return frozenset(n for n in _VARIABLE.findall(expression) if n not in _C_WORDS and not n.isupper())


def _is_free(name: str) -> bool:
    """Whether a parameter can have this name. Macros are in upper case; ``__`` and ``_Upper`` are the compiler's own names."""
    if not _IDENTIFIER.fullmatch(name) or name.isupper() or "__" in name or (name[0] == "_" and name[1:2].isupper()):
        return False
    return name not in _RESERVED | {"dy", "y"}


def substitute(expression: str, **replacements: str) -> str:
    """``expression`` with whole variables replaced, all at once; the caller parenthesises what it puts in."""
    return _VARIABLE.sub(lambda match: replacements.get(match[0], match[0]), expression)


@dataclass(frozen=True, eq=False)
class Pointwise:
    """One elementwise op: y = f(inputs, operands; constants), computed in fp32 (fp64 where a tensor is fp64).

    forward: CUDA fp32 expression of y over the names of inputs, operands and constants; it may call the functions of
        activations.cuh and of CUDA's math library.
    backward: one CUDA expression for each input, its gradient, which may also read ``dy``.
    value: ``value(*inputs, **operands, **constants)``, the torch definition of ``forward``. Tensors arrive in the compute
        dtype and broadcast against each other; constants are Python floats.
    grad: ``grad(dy, *inputs, **operands, **constants)``, the torch definition of ``backward``, one tensor for each input.
        What no backward expression reads may arrive as None.
    inputs: ("x",), or ("a", "b") for a gated unit: the first and the second half of the last dimension.
    operands: further tensors, by name, and how they broadcast.
    constants: names of scalar hyper-parameters.
    operand_backward: CUDA expression of an operand's gradient before its reduction (row: over all rows; column: over
        the columns; full: none). An operand without an entry gets no gradient.
    operand_grad: the torch definition of ``operand_backward``: same arguments as ``grad``, a dict of unreduced gradients.
    derived: all of it follows from one expression (``formula``).

    SpecError if names collide, an expression reads an undeclared name, or expressions and functions do not match in number.
    """

    name: str
    forward: str
    backward: tuple[str, ...]
    value: Callable[..., Tensor]
    grad: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[str, ...] = ("x",)
    operands: Mapping[str, OperandKind] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    operand_backward: Mapping[str, str] = field(default_factory=dict)
    operand_grad: Callable[..., Mapping[str, Tensor]] | None = None
    derived: bool = False

    def __post_init__(self) -> None:
        for part, wanted, got, cure in self._findings():
            raise SpecError(describe(f"Pointwise {self.name!r} {part}", wanted=wanted, got=got, cure=cure))

    @cached_property
    def reads(self) -> Mapping[str, frozenset[str]]:
        """Inputs and operands whose values the gradient of each input, and of each operand that has one, reads."""
        gradients = {**dict(zip(self.inputs, self.backward)), **self.operand_backward}
        return {name: variables(expression) & {*self.inputs, *self.operands} for name, expression in gradients.items()}

    @cached_property
    def is_known(self) -> bool:
        """Whether its value is computed by code of the library throughout, which gives the same bits whenever it runs."""
        if not str(getattr(self.value, "__module__", "")).startswith("opfuse."):
            return False
        made_of = [cell.cell_contents for cell in getattr(self.value, "__closure__", None) or ()]
        return all(each.is_known for each in made_of if isinstance(each, Pointwise))

    @cached_property
    def backward_reads(self) -> frozenset[str]:
        """Inputs and operands whose values some backward expression reads: what outlives the forward pass if all are wanted."""
        return frozenset().union(*self.reads.values())

    @property
    def needs_input(self) -> bool:
        """Whether the backward pass reads the op's input."""
        return not self.backward_reads.isdisjoint(self.inputs)

    @property
    def is_gated(self) -> bool:
        """Whether the op reads two halves of the last dimension, so that y has half the columns of its input."""
        return len(self.inputs) == 2

    def result_shape(self, shape: torch.Size) -> torch.Size:
        """The shape of y for inputs side by side in the last dimension of ``shape``; of halves, what is over is left out."""
        return torch.Size((*shape[:-1], shape[-1] // 2)) if self.is_gated else shape

    def input_shape(self, shape: torch.Size) -> torch.Size:
        """The shape of the inputs side by side for a y of ``shape``."""
        return torch.Size((*shape[:-1], 2 * shape[-1])) if self.is_gated else shape

    def _findings(self) -> Iterator[tuple[str, object, object, str]]:
        names = (*self.inputs, *self.operands, *self.constants)
        if not _IDENTIFIER.fullmatch(self.name):
            yield "name", "a C identifier", self.name, "the name becomes part of a kernel's name"
        if self.inputs not in INPUT_NAMES:
            yield "inputs", " or ".join(map(str, INPUT_NAMES)), self.inputs, "take further tensors as operands"
        for name in names:
            if not _is_free(name) or names.count(name) > 1:
                yield "names", "distinct lower-case C identifiers other than dy, y and the words of C++", name, "rename it"
        for name, kind in self.operands.items():
            if kind not in get_args(OperandKind):
                yield f"operand {name}", get_args(OperandKind), kind, "say how the operand broadcasts"
        if not isinstance(self.backward, tuple) or len(self.backward) != len(self.inputs):
            yield "backward", f"a tuple, one for each of {self.inputs}", self.backward, "give every input a gradient"
        if not set(self.operand_backward) <= set(self.operands):
            yield "operand_backward", f"only {tuple(self.operands)}", tuple(self.operand_backward), "declare the operand"
        if bool(self.operand_backward) != (self.operand_grad is not None):
            yield (
                "operand_grad",
                "a function exactly if operand_backward has entries",
                self.operand_grad,
                "define both or neither",
            )
        for part, expression, known in self._expressions(names):
            if not isinstance(expression, str) or not expression.strip() or ";" in expression:
                yield part, "one CUDA expression", expression, "move statements into a device function"
            for unknown in sorted(variables(expression) - set(known)):
                yield (
                    part,
                    f"only the names {known}",
                    f"{unknown!r}{nearest(unknown, known)}",
                    "declare it as an operand or a constant",
                )

    def _expressions(self, names: tuple[str, ...]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        yield "forward", self.forward, names
        for name, expression in (*zip(self.inputs, self.backward), *self.operand_backward.items()):
            yield f"gradient of {name}", expression, ("dy", *names)


def gated(act: Pointwise, name: str) -> Pointwise:
    """The gated unit y = act(a) * b of an activation without operands; ``a`` is the first half of the columns.

    SpecError if ``act`` is gated already or takes operands.
    """
    _require_plain(act, f"gated({act.name})", wanted=len(act.inputs) == 1)
    gate = substitute(act.forward, x="a")
    return Pointwise(
        name,
        forward=f"({gate}) * b",
        backward=(substitute(act.backward[0], x="a", dy="(dy * b)"), f"dy * ({gate})"),
        value=lambda a, b, **constants: act.value(a, **constants) * b,
        grad=lambda dy, a, b, **constants: (*act.grad(dy * b, a, **constants), dy * act.value(a, **constants)),
        inputs=("a", "b"),
        constants=act.constants,
    )


def scaled(p: Pointwise, name: str) -> Pointwise:
    """y = p(inputs) * scale, with one ``scale`` for each row of y, itself differentiable: d scale = sum of dy * p(inputs).

    The product is one op with its activation: the value of ``p`` is not rounded before it. SpecError if ``p`` takes operands.
    """
    _require_plain(p, f"scaled({p.name})")
    return Pointwise(
        name,
        forward=f"({p.forward}) * scale",
        backward=tuple(substitute(expression, dy="(dy * scale)") for expression in p.backward),
        value=lambda *inputs, scale, **constants: p.value(*inputs, **constants) * scale,
        grad=lambda dy, *inputs, scale, **constants: p.grad(dy * scale, *inputs, **constants),
        inputs=p.inputs,
        operands={"scale": "column"},
        constants=p.constants,
        operand_backward={"scale": f"dy * ({p.forward})"},
        operand_grad=lambda dy, *inputs, scale, **constants: {"scale": dy * p.value(*inputs, **constants)},
    )


def _require_plain(p: Pointwise, where: str, *, wanted: bool = True) -> None:
    if p.operands or not wanted:
        got = f"inputs {p.inputs}, operands {tuple(p.operands)}"
        raise SpecError(describe(where, wanted="an activation without operands", got=got, cure="declare the combination itself"))
