"""Pieces of CUDA text: structs, functions, loops over the elements of a pack."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from opfuse.numerics.pointwise import variables


def expression(name: str, body: str) -> str:
    """A function of the variables that a CUDA expression reads, in the order of their names."""
    parameters = ", ".join(f"float {variable}" for variable in sorted(variables(body)))
    return f"OPFUSE_FN float {name}({parameters}) {{ return {body}; }}"


def struct(name: str, fields: Iterable[str], what: str) -> str:
    """A struct of packs of N elements."""
    return f"// {name}: {what}.\ntemplate <int N>\nstruct {name} {{{block(fields)}}};"


def function(head: str, body: Iterable[str]) -> str:
    """A device function."""
    return f"OPFUSE_FN {head} {{{block(body)}}}"


def each(target: str, c_type: str, value: str) -> str:
    """A pack made element by element, with the operands' names in scope."""
    return f"{target} = pack_of<{c_type}, N>([&](int i) {{ return {value}; }});"


def loop(statement: str) -> str:
    """A statement for every element i."""
    return f"#pragma unroll\nfor (int i = 0; i < N; ++i) {statement}"


def block(lines: Iterable[str]) -> str:
    """Statements between braces."""
    lines = list(lines)
    return "\n" + textwrap.indent("\n".join(lines), "    ") + "\n" if lines else ""
