"""Makes an elementwise op of one formula: CUDA text and torch function of its value and of its gradient.

    MISH = formula("mish", lambda x: x * x.softplus().tanh())

The function is called once, with expressions that record what is done to them: + - * /, whole powers, and the methods of
:data:`FUNCTIONS`. Gradients are derived backwards, from dy through each step to each name, and added up in fp32. Where they
cancel, or an exponential overflows, write value and gradient by hand, as a :class:`~opfuse.numerics.pointwise.Pointwise`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from opfuse.errors import SpecError, describe, nearest
from opfuse.numerics.pointwise import OperandKind, Pointwise, substitute


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)).

    Not ``torch.sigmoid``: on a CPU its last bit depends on where in memory an element sits (vector body or scalar tail), so a
    sharded or reshaped tensor would differ from the whole one. exp, tanh and rsqrt have no such dependence.
    """
    return torch.reciprocal(1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), with an exponential that never overflows."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


class Function(NamedTuple):
    """A method of expressions: a CUDA expression of x, the same in torch, and its derivative as one."""

    cuda: str
    torch: Callable[[Tensor], Tensor]
    slope: Callable[[Expression], Expression]


FUNCTIONS: Mapping[str, Function] = {
    "abs": Function("fabsf(x)", torch.abs, lambda x: x.sign()),
    "erf": Function("erff(x)", torch.erf, lambda x: 1.1283791670955126 * (-x * x).exp()),
    "exp": Function("expf(x)", torch.exp, lambda x: x.exp()),
    "log": Function("logf(x)", torch.log, lambda x: 1 / x),
    "log1p": Function("log1pf(x)", torch.log1p, lambda x: 1 / (1 + x)),
    "sigmoid": Function("sigmoid(x)", sigmoid, lambda x: x.sigmoid() * (1 - x.sigmoid())),
    "sign": Function("(float)((x > 0.0f) - (x < 0.0f))", torch.sign, lambda x: expressed(0)),
    "softplus": Function("(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))))", softplus, lambda x: x.sigmoid()),
    "sqrt": Function("sqrtf(x)", torch.sqrt, lambda x: 0.5 / x.sqrt()),
    "tanh": Function("tanhf(x)", torch.tanh, lambda x: 1 - x.tanh() * x.tanh()),
}

SUM, PRODUCT, ATOM = range(3)


@dataclass(frozen=True, eq=False)
class Expression:
    """A value in a formula.

    text: in CUDA. value: in torch, from tensors and constants by name. parts: the expressions that it is made of, each with a
    function from the gradient of the whole to its own. binding: of the text, SUM, PRODUCT or ATOM, which decides where
    parentheses are needed. number: its value, if it is a number.
    """

    text: str
    value: Callable[[Mapping[str, Any]], Any]
    parts: tuple[tuple[Expression, Callable[[Expression], Expression]], ...] = ()
    binding: int = ATOM
    number: float | None = None

    def __getattr__(self, name: str) -> Callable[[], Expression]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in FUNCTIONS:
            _refuse(f"{name!r}{nearest(name, FUNCTIONS)}")
        cuda, run, slope = FUNCTIONS[name]
        made = substitute(cuda, x=self.text if self.binding == ATOM else f"({self.text})")
        return lambda: Expression(made, lambda given: run(_tensor(self.value(given))), ((self, lambda dy: dy * slope(self)),))

    def __add__(self, other: Any) -> Expression:
        return _binary("+", self, other, lambda dy: dy, lambda dy: dy)

    def __sub__(self, other: Any) -> Expression:
        return _binary("-", self, other, lambda dy: dy, lambda dy: -dy)

    def __mul__(self, other: Any) -> Expression:
        return _binary("*", self, other, lambda dy: dy * other, lambda dy: dy * self)

    def __truediv__(self, other: Any) -> Expression:
        return _binary("/", self, other, lambda dy: dy / other, lambda dy: -(dy * (self / other) / other))

    def __radd__(self, other: Any) -> Expression:
        return expressed(other) + self

    def __rsub__(self, other: Any) -> Expression:
        return expressed(other) - self

    def __rmul__(self, other: Any) -> Expression:
        return expressed(other) * self

    def __rtruediv__(self, other: Any) -> Expression:
        return expressed(other) / self

    def __neg__(self) -> Expression:
        return -1 * self

    def __pow__(self, power: int) -> Expression:
        if not isinstance(power, int) or not 1 <= power <= 8:
            _refuse(f"a power of {power!r}")
        return reduce(operator.mul, [self] * power)

    def __bool__(self) -> bool:
        return _refuse("a comparison or a branch")

    def _compare(self, other: Any) -> bool:
        """Refuse: an answer would choose a branch once, for all values."""
        return _refuse("a comparison or a branch")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = object.__hash__  # keys of a dictionary are compared by identity first

    def __float__(self) -> float:
        return _refuse("a function of Python's numbers", "write methods of x, such as x.tanh()")

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: Any) -> NoReturn:
        name = function.__name__
        _refuse(f"torch's {name}", *([f"write the method, x.{name}()"] if name in FUNCTIONS else ()))


def expressed(value: Any) -> Expression:
    """``value``, or the expression of a number."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(type(value).__name__)
    number = float(value)
    return Expression(f"{number!r}f" if number >= 0 else f"({number!r}f)", lambda given: number, number=number)


def _tensor(value: Tensor | float) -> Tensor:
    """A constant as a tensor without dimensions, which changes no dtype."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device="cpu")


_RUN = {"+": (SUM, operator.add), "-": (SUM, operator.sub), "*": (PRODUCT, operator.mul), "/": (PRODUCT, operator.truediv)}


def _binary(
    sign: str,
    left: Expression,
    other: Any,
    to_left: Callable[[Expression], Expression],
    to_right: Callable[[Expression], Expression],
) -> Expression:
    """The expression of ``left sign other``, simplified if it is times 1, times 0 or plus 0: derivatives are full of these."""
    right = expressed(other)
    match sign, left.number, right.number:
        case ("*", 0.0, _) | ("/", 0.0, _) | ("*", _, 1.0) | ("/", _, 1.0) | ("+" | "-", _, 0.0):
            return left
        case ("*", _, 0.0) | ("*", 1.0, _) | ("+", 0.0, _):
            return right
    binding, run = _RUN[sign]
    first = left.text if left.binding >= binding else f"({left.text})"
    second = right.text if right.binding > binding else f"({right.text})"
    parts = ((left, to_left), (right, to_right))
    return Expression(f"{first} {sign} {second}", lambda given: run(left.value(given), right.value(given)), parts, binding)


def _refuse(got: str, cure: str = "declare the op as an ops.Pointwise") -> NoReturn:
    wanted = f"numbers, + - * /, powers from 1 to 8, and the methods {', '.join(FUNCTIONS)}"
    raise SpecError(describe("a formula", wanted=wanted, got=got, cure=cure))


def formula(
    name: str, of: Callable[..., Any], *, operands: Mapping[str, OperandKind] | None = None, constants: tuple[str, ...] = ()
) -> Pointwise:
    """The op whose value is ``of(x)``, or ``of(a, b)`` for a gated unit; further parameters are operands and constants, by name.

    Operands have gradients. SpecError for what a formula cannot say, and for a parameter that is not declared.
    """
    operands = operands or {}
    inputs = tuple(n for n in inspect.signature(of).parameters if n not in operands and n not in constants)
    leaves = {n: Expression(n, lambda given, n=n: given[n]) for n in ("dy", *inputs, *operands, *constants)}  # type: ignore[misc]
    y = expressed(of(**{n: leaf for n, leaf in leaves.items() if n != "dy"}))
    slopes = _slopes(y, leaves["dy"])
    if not any(leaves[n] in slopes for n in inputs):
        _refuse(f"one that reads nothing of {', '.join(inputs)}")
    found = {n: slopes.get(leaves[n], expressed(0)) for n in (*inputs, *operands)}

    def gradients(wanted: Any, dy: Tensor, *given: Tensor, **others: Any) -> dict[str, Tensor]:
        values = {"dy": dy, **dict(zip(inputs, given)), **others}
        made = {n: found[n].value(values) for n in wanted}
        return {n: grad if isinstance(grad, Tensor) else torch.full_like(dy, grad) for n, grad in made.items()}

    return Pointwise(
        name,
        forward=y.text,
        backward=tuple(found[n].text for n in inputs),
        value=lambda *given, **others: y.value({**dict(zip(inputs, given)), **others}),
        grad=lambda *given, **others: tuple(gradients(inputs, *given, **others).values()),
        inputs=inputs,
        operands=operands,
        constants=constants,
        operand_backward={n: found[n].text for n in operands},
        operand_grad=(lambda *given, **others: gradients(operands, *given, **others)) if operands else None,
        derived=True,
    )


def _slopes(y: Expression, dy: Expression) -> dict[Expression, Expression]:
    """The gradient of each part of ``y`` for ``dy``: the sum over all places where the part stands."""
    found: dict[Expression, Expression] = {}
    todo = [(y, dy)]
    while todo:
        part, gradient = todo.pop()
        found[part] = found[part] + gradient if part in found else gradient
        todo += [(inner, to(gradient)) for inner, to in part.parts]
    return found
