"""The sources that say what kernels compute, and a digest of their code."""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator

from opfuse.kernels.engine.bindings import SOURCES

_CUDA_PROSE = re.compile(r"//[^\n]*|/\*.*?\*/|^#line [^\n]*", re.DOTALL | re.MULTILINE)


def sources_digest() -> str:
    """SHA-256 of the code of every file that says what kernels compute: figures with the same digest are of the same code.

    Comments, docstrings and blank lines do not count, so that prose may be mended without a new measurement.
    """
    package = SOURCES.parents[1]
    packages = (package / "numerics", package / "kernels")
    found = (path for each in packages for path in each.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
    files = {path.relative_to(package).as_posix(): path for path in found}
    digest = hashlib.sha256()
    for name in sorted(files):
        text = files[name].read_text(encoding="utf-8")
        code = python_code(text) if name.endswith(".py") else cuda_code(text)
        digest.update(f"{name}\0{len(code)}\0{code}".encode())
    return digest.hexdigest()


def cuda_code(text: str) -> str:
    """CUDA C++ without comments, ``#line``, blank lines and space at the ends of lines. No string may hold ``//`` or ``/*``."""
    return _joined(_CUDA_PROSE.sub("", text))


def python_code(text: str) -> str:
    """Python without comments, docstrings, blank lines and space at the ends of lines."""
    lines = text.splitlines(keepends=True)
    for start, end in _docstrings(ast.parse(text)):
        lines[start - 1 : end] = ["\n"] * (end - start + 1)
    comments = [each for each in tokenize.generate_tokens(io.StringIO("".join(lines)).readline) if each.type == tokenize.COMMENT]
    for each in comments:
        row, column = each.start
        lines[row - 1] = lines[row - 1][:column] + "\n"
    return _joined("".join(lines))


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """First and last line of each string that is a statement: docstrings, and those behind a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.end_lineno or node.lineno


def _joined(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())
