"""The packages import one way."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import networkx as nx
import pytest

import opfuse
from tests.processes import ran

PACKAGE = Path(opfuse.__file__).parent
PACKAGES = (
    *("leaf", "numerics", "kernels", "tensors", "recipes", "core", "compiler", "runtime", "inspect"),
    *("ops", "te", "fusions", "interchange", "convert", "config", "train", "cli", "__main__"),
)
"""In import order: a package imports only itself and packages to its left."""
LEAVES = dict.fromkeys(("formats", "keys", "errors", "domains", "environment", "sources", "events", "torch_private"), 0)
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> tuple[str, ...]:
    """Dotted name below the package: ``("compiler", "plan")``; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if path.stem == "__init__" else parts


def rank(name: str) -> int | None:
    """Position of a package or leaf in the import order; None if there is no such thing."""
    return LEAVES.get(name, PACKAGES.index(name) if name in PACKAGES else None)


def imports(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[tuple[str, int, ast.AST]]:
    """Modules that are imported, absolute, with line and node; ``from opfuse import x`` counts as ``opfuse.x``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(("opfuse", *package[: len(package) - node.level + 1], *filter(None, (node.module,))))
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "opfuse" else [base]
            yield from ((name, node.lineno, node) for name in names)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file, found once: the checks go through each file several times."""
    return [*ast.walk(parsed(path))]


def findings(path: Path) -> list[str]:
    """Imports of ``path`` that go against the order, anywhere in the file."""
    own = name_of(path)
    if not own:
        return []
    package = own if path.stem == "__init__" else own[:-1]
    found = []
    for module, line, _ in imports(nodes(path), package):
        parts = module.split(".")
        if parts[0] != "opfuse" or len(parts) == 1:
            continue
        wanted, there = rank(own[0]), rank(parts[1])
        if wanted is None or (there is not None and there > wanted):
            found.append(f"{path.relative_to(PACKAGE)}:{line} imports {module}")
        if own[0] in LEAVES and parts[1] not in ("errors", "torch_private"):
            found.append(f"{path.relative_to(PACKAGE)}:{line}: a leaf imports {module}")
    return found


def test_imports_run_one_way():
    assert [found for path in MODULES for found in findings(path)] == []


def test_every_module_belongs_to_a_room():
    outside = {name_of(path)[0] for path in MODULES if name_of(path)} - set(PACKAGES) - set(LEAVES)
    assert outside == set()


def test_no_import_hides_in_a_function():
    """Only the command line defers imports, so that its help is fast."""
    hidden = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for path in MODULES
        if name_of(path)[:1] != ("cli",)
        for function in nodes(path)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for module, line, _ in imports(ast.walk(function), name_of(path))
        if module.split(".")[0] == "opfuse"
    ]
    assert hidden == []


def words(path: Path) -> Iterator[str]:
    """Names of the classes of a file, and of its type aliases."""
    yield from (node.name for node in nodes(path) if isinstance(node, ast.ClassDef))
    for node in parsed(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (each.id for each in targets if isinstance(each, ast.Name) and re.match("_?[A-Z][a-z]", each.id))


def test_a_word_has_one_meaning():
    """No two classes or type aliases of the package share a name, private ones included."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for word in words(path):
            places.setdefault(word.lstrip("_"), []).append(f"{path.relative_to(PACKAGE)}: {word}")
    assert {word: found for word, found in places.items() if len(found) > 1} == {}


HOT = """
import sys
import torch
from opfuse import autocast, ops, recipes

model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))
for _ in range(2):  # the second call is recorded
    with autocast(recipe=recipes.MXFP8BlockScaling()):
        model(torch.randn(32, 64)).sum().backward()
others = {"networkx", "matplotlib", "typer", "torch._dynamo"}
print(sorted(sys.modules.keys() & others))
"""


def test_training_loads_nothing_that_only_studies_tests_or_compiles_it():
    done = ran(HOT)
    assert done.stdout == "[]\n"


def module_graph(package: Path) -> nx.DiGraph:
    """Which module imports which, anywhere in its file: in a function, or for type checkers alone."""
    names = {".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__"): path
             for path in sorted(package.rglob("*.py"))}  # fmt: skip
    graph = nx.DiGraph()
    for name, path in names.items():
        for node in nodes(path):
            if isinstance(node, ast.Import):
                read = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parts = (name if path.stem == "__init__" else name.rpartition(".")[0]).split(".")
                base = (
                    ".".join((*parts[: len(parts) - node.level + 1], *filter(None, (node.module,))))
                    if node.level
                    else node.module
                )
                read = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base for alias in node.names]
            else:
                continue
            graph.add_edges_from((name, each) for each in read if each in names and each != name)
    return graph


def circles(package: Path) -> list[list[str]]:
    """Modules that import each other, however far around."""
    return [sorted(found) for found in nx.strongly_connected_components(module_graph(package)) if len(found) > 1]


def test_no_modules_import_each_other():
    """Not inside a package either; a name for type checkers counts, since a reader follows it."""
    assert circles(PACKAGE) == []


HIDDEN = {"plain": "from package.b import x", "relative": "from . import b", "function": "def f():\n    import package.b",
          "types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x"}  # fmt: skip


@pytest.mark.parametrize("kind", HIDDEN)
def test_a_circle_is_found(kind, tmp_path):
    (tmp_path / "package").mkdir()
    for name, text in {"__init__": "", "a": HIDDEN[kind], "b": "from package.c import y", "c": "import package.a"}.items():
        (tmp_path / "package" / f"{name}.py").write_text(text)
    assert circles(tmp_path / "package") == [["package.a", "package.b", "package.c"]]


def test_the_pages_tell_the_order():
    rules = (PACKAGE.parent / "AGENTS.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"in no circle: (.*?)\. ", rules)
    leaves, *packages = told.split(" < ")
    assert leaves.split(", ") == [*LEAVES]
    assert packages == [name for name in PACKAGES if name not in ("leaf", "__main__")]
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE) == ["torch_private", *packages]


SAMPLES = {
    "from opfuse.compiler import plan": True,
    "import opfuse.ops.linear": True,
    "def f():\n    from opfuse.fusions import RULES": True,
    "from opfuse import cli": True,
    "from ..compiler import plan": True,
    "from opfuse.formats import E4M3": False,
    "from opfuse.tensors import gemm": False,
    "from . import base": False,
}


@pytest.mark.parametrize("source", SAMPLES)
def test_the_order_is_enforced(source, tmp_path, monkeypatch):
    """The same check over a file that stands in the tensor package."""
    (tmp_path / "tensors").mkdir()
    path = tmp_path / "tensors" / "sample.py"
    path.write_text(source)
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    assert bool(findings(path)) is SAMPLES[source]
