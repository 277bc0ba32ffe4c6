"""What a forward computes, as an expression, and which activation, norm or product that is.

The recorded calls of a forward (``record.py``) are put together to one expression, in a normal form in which the spellings of one
formula are equal: ``x * rsqrt(m)``, ``x / sqrt(m)`` and ``x * m ** -0.5``, sums and products in any order, casts that only widen.
A module is known if its expression is that of a form below, in every dtype and mode, and a block if its expression is a chain
(``chain.py``); values are compared nowhere. What is in no table stays as it is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from opfuse.convert.code import NotRecorded
from opfuse.convert.record import CASTS, TRANSPOSES, VIEWS, RecordedForward, describe_node

ExpressionOf = Callable[[Any], Any]
"""The expression of a value that a node reads."""

NormalForm = tuple[Any, ...]
"""A name, then constants and expressions: ("sum", constant, terms), ("product", factor, ((base, count), …)), ("tanh", x) …"""
X: NormalForm = ("x",)


# -- the normal form -------------------------------------------------------------------------------------------------------------


def number(value: float) -> float:
    """A constant to ten digits, beyond which libraries round theirs differently."""
    return float(f"{value:.10g}")


def total(*terms: Any) -> Any:
    """The sum of expressions and numbers."""
    constant, parts = 0.0, list[NormalForm]()
    for term in terms:
        if isinstance(term, tuple) and term[0] == "sum":
            constant, parts = constant + term[1], [*parts, *term[2]]
        elif isinstance(term, tuple):
            parts.append(term)
        else:
            constant += term
    if not parts:
        return number(constant)
    if not constant and len(parts) == 1:
        return parts[0]
    return "sum", number(constant), tuple(sorted(parts, key=repr))


def product(*factors: Any) -> Any:
    """The product of expressions and numbers."""
    constant, powers = 1.0, Counter[NormalForm]()
    for factor in factors:
        if isinstance(factor, tuple) and factor[0] == "product":
            constant *= factor[1]
            powers.update(dict(factor[2]))
        elif isinstance(factor, tuple):
            powers[factor] += 1
        else:
            constant *= factor
    if not powers:
        return number(constant)
    factored = tuple(sorted(powers.items(), key=repr))
    return (
        factored[0][0]
        if constant == 1 and factored[0][1] == 1 and len(factored) == 1
        else ("product", number(constant), factored)
    )


def power(base: Any, exponent: float) -> Any:
    """A power. Whole positive ones are products; others stay apart, since sqrt(x) * sqrt(x) is not x below 0."""
    if not isinstance(base, tuple):
        return number(base**exponent)
    if exponent in (1, 2, 3, 4):
        return product(*[base] * int(exponent))
    if exponent == -1 and base[0] == "power" and base[2] == 0.5:
        return "power", base[1], -0.5
    return "power", base, float(exponent)


MOST_PARTS = 10_000
"""How many parts an expression may have; they double where a value is added to what is made of it, step after step."""


def expressions(nodes: Iterable[fx.Node], arguments: Mapping[fx.Node, NormalForm]) -> dict[fx.Node, Any]:
    """The expressions of a graph's nodes. NotRecorded for a function that no expression is written for.

    arguments: what stands for the placeholders.
    """
    known: dict[fx.Node, Any] = dict(arguments)

    def of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return known[value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _formless(repr(value))
        return number(value)

    sizes = dict.fromkeys(known, 1)
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            sizes[node] = 1 + sum(sizes[read] for read in (*node.args, *node.kwargs.values()) if isinstance(read, fx.Node))
            if sizes[node] > MOST_PARTS:
                raise _formless(f"a formula of more than {MOST_PARTS} parts")
            known[node] = READERS.get(node.op if node.op != "call_method" else str(node.target), _by_rule)(of, node)
    return known


def _formless(got: str) -> NotRecorded:
    return NotRecorded(got, "a function that opfuse has a formula for")


def text(form: Any, depth: int = 4) -> str:
    """An expression as one reads it, its innermost parts left out."""
    inner = partial(text, depth=depth - 1)
    match form:
        case _ if not depth:
            return "…"
        case "argument", index:
            return f"argument {index + 2}"
        case "sum", constant, terms:
            return " + ".join([*map(inner, terms), *[f"{constant:g}"] * bool(constant)])
        case "product", constant, powers:
            factors = [inner(base) for base, count in powers for _ in range(count)]
            return " * ".join([*[f"{constant:g}"] * (constant != 1), *factors])
        case ("call", name, *inside) | (name, *inside):
            return f"{name}({', '.join(map(inner, inside))})" if inside else str(name)
    return str(form)


# -- functions whose arguments say more than expressions do ---------------------------------------------------------------------


def _first(node: fx.Node) -> Any:
    """The tensor that a call reads, whether or not it is given by name."""
    return node.kwargs.get("input", *node.args[:1])


def _by_rule(of: ExpressionOf, node: fx.Node) -> Any:
    """By the table, for functions that read their arguments in order and have no options."""
    rule = RULES.get(str(node.target))
    if rule is None or node.kwargs:
        raise _formless(describe_node(node))
    values = [*map(of, node.args)]
    try:
        return rule(*values)
    except (ArithmeticError, RecursionError) as error:  # of constants, and of many steps
        raise _formless(str(error)) from error


def _submodule(of: ExpressionOf, node: fx.Node) -> Any:
    if len(node.args) != 1 or node.kwargs:
        raise _formless(f"{describe_node(node)} with more than one argument")
    return "call", str(node.target), of(node.args[0])


def _halves(of: ExpressionOf, node: fx.Node) -> Any:
    if (*node.args[1:], *node.kwargs.values()) != (2, -1):
        raise _formless(describe_node(node))
    return "halves", of(node.args[0])


def _cast(of: ExpressionOf, node: fx.Node) -> Any:
    """A cast to the dtype of an input or a parameter, or to a wide one, changes no more than a rounding."""
    x, dtype = _first(node), node.meta["dtype"]
    inputs = [each for each in node.graph.nodes if each.op in ("placeholder", "get_attr")]
    if dtype not in (torch.float32, torch.float64, x.meta["dtype"], *[each.meta["dtype"] for each in inputs]):
        raise _formless("a cast to fewer bits")
    return of(x)


def _view(of: ExpressionOf, node: fx.Node) -> Any:
    """A view that keeps rows, whatever their leading dimensions, is the rows themselves."""
    x = _first(node)
    if x.meta["shape"][-1:] != node.meta["shape"][-1:]:
        raise _formless(describe_node(node))
    return of(x)


def _transposed(of: ExpressionOf, node: fx.Node) -> Any:
    x = _first(node)
    options = (*node.args[1:], *node.kwargs.values())
    dims = [dim % 2 for part in options for dim in (part if isinstance(part, (tuple, list)) else (part,)) if isinstance(dim, int)]
    stays = dims == [0, 1] and node.target == "permute"  # where 0, 1 is the order that there is, and no exchange
    if len(x.meta["shape"]) != 2 or dims not in ([], [0, 1], [1, 0]) or stays:
        raise _formless("another transpose than that of a matrix")
    return "transposed", of(x)


def _mean(of: ExpressionOf, node: fx.Node) -> Any:
    x, dim, keepdim = _bound(node, "input", "dim", "keepdim")
    return "mean", of(x), tuple(dim) if isinstance(dim, (tuple, list)) else (dim,), bool(keepdim)


def _gelu(of: ExpressionOf, node: fx.Node) -> Any:
    x, approximate = _bound(node, "input", "approximate")
    return f"gelu {approximate or 'none'}", of(x)


def _rms_norm(of: ExpressionOf, node: fx.Node) -> Any:
    x, shape, weight, eps = _bound(node, "input", "normalized_shape", "weight", "eps")
    return "rms_norm", of(x), tuple(shape), of(weight), eps


def _linear(of: ExpressionOf, node: fx.Node) -> Any:
    x, weight, bias = _bound(node, "input", "weight", "bias")
    whole = "matmul", of(x), ("transposed", of(weight))
    return whole if bias is None else total(whole, of(bias))


READERS: Mapping[str, Callable[[ExpressionOf, fx.Node], Any]] = {
    "get_attr": lambda of, node: ("parameter", str(node.target)),
    "call_module": _submodule,
    "call_function": lambda of, node: ("half", node.args[1], of(node.args[0])),
    "chunk": _halves,
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(TRANSPOSES, _transposed),
    "mean": _mean,
    "gelu": _gelu,
    "rms_norm": _rms_norm,
    "linear": _linear,
}
"""How the expression of a node is read, by the kind of the node or by the function that it calls."""


def _bound(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of a call in order, None for one that is not given. NotRecorded for one of another name."""
    values = dict(zip(names, node.args)) | node.kwargs
    if values.keys() - set(names) or len(node.args) > len(names):
        raise _formless(f"{node.target} with {', '.join(map(str, values))}")
    return [values.get(name) for name in names]


RULES: Mapping[str, Callable[..., Any]] = {
    "add": total,
    "sub": lambda a, b: total(a, product(-1.0, b)),
    "rsub": lambda a, b: total(b, product(-1.0, a)),
    "neg": lambda a: product(-1.0, a),
    "mul": product,
    "div": lambda a, b: product(a, power(b, -1.0)),
    "rdiv": lambda a, b: product(b, power(a, -1.0)),
    "pow": lambda a, n: power(a, n) if not isinstance(n, tuple) else ("pow", a, n),
    "square": lambda a: power(a, 2.0),
    "sqrt": lambda a: power(a, 0.5),
    "rsqrt": lambda a: power(a, -0.5),
    "reciprocal": lambda a: power(a, -1.0),
    "matmul": lambda a, b: ("matmul", a, b),
    "mm": lambda a, b: ("matmul", a, b),
    "addmm": lambda c, a, b: total(("matmul", a, b), c),
    **{name: (lambda a, name=name: (name, a)) for name in ("exp", "erf", "tanh", "sigmoid", "relu", "silu")},
}
"""How a function's expression follows from those of its arguments."""


def expression(recording: RecordedForward, *, in_autocast: bool = False) -> Any:
    """The expression of a whole forward of one argument. NotRecorded if there is none.

    in_autocast: the result may have another dtype than the argument, as torch.autocast gives it.
    """
    first, *others = [node for node in recording.nodes if node.op == "placeholder"]
    result: Any = recording.nodes[-1].args[0]
    if others or result.meta["shape"][:-1] != first.meta["shape"][:-1]:
        raise _formless("a result of other rows")
    if result.meta["dtype"] != first.meta["dtype"] and not in_autocast:
        raise _formless("a result of another dtype")
    return expressions(recording.nodes, {first: X})[result]


# -- activations -----------------------------------------------------------------------------------------------------------------

_C = math.sqrt(2 / math.pi)
_CUBE = product(0.044715, power(X, 3))

ACTIVATIONS: Mapping[NormalForm, str] = {
    ("gelu tanh", X): "gelu",
    product(0.5, X, total(1, ("tanh", product(_C, total(X, _CUBE))))): "gelu",
    product(0.5, X, total(1, ("tanh", product(_C, X, total(1, product(0.044715, X, X)))))): "gelu",
    ("gelu none", X): "gelu_erf",
    product(0.5, X, total(1, ("erf", product(X, 1 / math.sqrt(2))))): "gelu_erf",
    product(X, ("sigmoid", product(1.702, X))): "qgelu",
    ("relu", X): "relu",
    power(("relu", X), 2): "srelu",
    ("silu", X): "silu",
    product(X, ("sigmoid", X)): "silu",
    product(X, power(total(1, ("exp", product(-1, X))), -1)): "silu",
}
"""The activations that have an op, as libraries write them, by the name of the op."""


# -- norms -----------------------------------------------------------------------------------------------------------------------


def rms_norm_form(form: Any, weight: str, columns: int) -> tuple[float, bool] | None:
    """The eps of x / sqrt(mean(x^2) + eps) * weight, and whether it multiplies with 1 + weight; None for another expression.

    weight: the name of the parameter.
    """
    for eps in dict.fromkeys((*_numbers(form), 0.0)):
        for centered in (False, True):
            if form in _rms_norms(weight, columns, eps, centered):
                return eps, centered
    return None


@cache
def _rms_norms(weight: str, columns: int, eps: float, centered: bool) -> tuple[Any, ...]:
    factor = ("parameter", weight)
    by_hand = product(
        X, power(total(("mean", power(X, 2.0), (-1,), True), eps), -0.5), total(1.0, factor) if centered else factor
    )
    return (by_hand,) if centered else (by_hand, ("rms_norm", X, (columns,), factor, eps))


def _numbers(form: Any) -> Iterator[float]:
    """Constants of an expression that may be an eps."""
    for part in form if isinstance(form, tuple) else ():
        if isinstance(part, float) and 0 < part < 1:
            yield part
        yield from _numbers(part)


# -- products --------------------------------------------------------------------------------------------------------------------


def products(has_bias: bool) -> Mapping[NormalForm, bool]:
    """The expressions of a product with ``weight`` and, if it has one, ``bias``; True if the weight is (in, out)."""
    weight, bias = ("parameter", "weight"), [("parameter", "bias")] * has_bias
    return {
        total(("matmul", X, ("transposed", weight)), *bias): False,
        total(("matmul", X, weight), *bias): True,
    }
