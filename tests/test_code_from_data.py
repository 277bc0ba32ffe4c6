"""R16: nothing in the package turns data into code, by whatever route Python has for it.

What a module uses is read from its syntax tree: every name is followed to what it was imported as, so that a call of
``import_module("pickle")``, ``from builtins import eval as run`` and a mere ``f = exec`` are found as well.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import opfuse

PACKAGE = Path(opfuse.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN = {
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "builtins.__builtins__"),
    *(
        "pickle",
        "_pickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        "jsonpickle",
        "yaml",
        "code",
        "codeop",
        "runpy",
        "imp",
    ),
    *(
        "types.FunctionType",
        "types.CodeType",
        "types.LambdaType",
        "torch.hub",
        "torch.package",
        "torch.jit.load",
        "pandas.read_pickle",
    ),
    *("importlib.util", "importlib.machinery", "importlib._bootstrap"),
}
"""Modules and functions that run, load or build code, by their full name; what is below one of them is as well."""
HARMLESS = {"importlib.util.find_spec"}
TYPES = {"types.FunctionType", "types.CodeType", "types.LambdaType"}
"""They build code when they are called; to ask for them is harmless."""
BY_NAME = {"importlib.import_module", "importlib.__import__", "pkgutil.resolve_name"}
"""They import what a string names: a literal of a module that may be imported, or what ``NAMES`` lists."""
ARGUMENTS = {
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
    "ruamel.yaml.YAML": ("typ", "safe"),
}
"""Functions that are harmless under one value of an argument, which must stand there."""
NAMES = {
    "__init__.py": ("_NAMES[name]", "f'opfuse.{name}'"),
    "kernels/engine/bindings.py": ("self.__name__",),
    "compiler/registry.py": ("sys.modules['opfuse'].RULE_TABLE",),
    "torch_private/names.py": ("module",),
    "config/rule_trial.py": ("module_name",),
}
"""Imports of what a table of the source names: public names, commands, nvmath, built-in rules, private parts of torch; and of the
module that a user names on the command line, as with ``python -m``.
"""
WRITTEN = {
    "runtime/replay/codegen.py": {"builtins.exec", "builtins.compile"},
    "convert/method_calls.py": {"builtins.compile"},
}
"""Code that the library writes itself, from steps that it recorded (tests/program/test_line.py says what may stand in it), and
the source of a method that is loaded already, compiled to be compared and never run."""


def used(tree: ast.Module, file: str = "") -> Iterator[str]:
    """Whatever a module uses that could turn data into code, with its line."""
    nodes = [*ast.walk(tree)]
    known = _names(nodes)
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = [name for alias in node.names for name in [_imported(node, alias)]]
        elif isinstance(node, ast.Name | ast.Attribute):
            found = [_full(node, known)]
        else:
            continue
        for name in found:
            if name and (wrong := _wrong(name, calls.get(id(node)), node, file)):
                yield f"{wrong} in line {node.lineno}"


def _imported(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    if isinstance(node, ast.Import):
        return alias.name
    return "" if node.level else f"{node.module}.{alias.name}"


def _names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """What names of a module mean, by their full name: those that it imports, and those of Python itself."""
    known = {name: f"builtins.{name}" for name in (*dir(builtins), "__builtins__")}
    for node in nodes:
        if isinstance(node, ast.Import):
            known |= {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            known |= {alias.asname or alias.name: _imported(node, alias) for alias in node.names}
    return known


def _full(node: ast.expr, known: dict[str, str]) -> str:
    """``np.load`` as ``numpy.load``; what a literal names, where it is imported by one; empty for anything else."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _full(node.value, known)):
        return f"{base}.{node.attr}"
    if isinstance(node, ast.Call) and node.args and _full(node.func, known) in (*BY_NAME, "builtins.__import__"):
        return _literal(node.args[0])
    return ""


def _literal(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _wrong(name: str, call: ast.Call | None, node: ast.AST, file: str) -> str:
    if name in BY_NAME and isinstance(node, ast.Name | ast.Attribute):
        return _imported_by_name(name, call, file)
    if name in ARGUMENTS and isinstance(node, ast.Name | ast.Attribute):
        keyword, value = ARGUMENTS[name]
        given = next((each.value for each in call.keywords if each.arg == keyword), None) if call else None
        return "" if isinstance(given, ast.Constant) and given.value == value else f"{name} without {keyword}={value!r}"
    if name in HARMLESS or (name == "importlib.util" and isinstance(node, ast.Attribute)):
        return ""
    if name in TYPES:
        return "" if call is None else name
    parts = name.split(".")
    return name if any(".".join(parts[:end]) in FORBIDDEN for end in range(1, len(parts) + 1)) else ""


def _imported_by_name(name: str, call: ast.Call | None, file: str) -> str:
    if call is None or not call.args:
        return f"{name}, handed on"
    if literal := _literal(call.args[0]):
        return _wrong(literal.replace(":", "."), None, call, file)
    return "" if ast.unparse(call.args[0]) in NAMES.get(file, ()) else f"{name} of {ast.unparse(call.args[0])}"


@pytest.mark.row("R16")
def test_r16_nothing_turns_data_into_code() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
    found = {
        file: [each for each in used(tree, file) if each.partition(" in line")[0] not in WRITTEN.get(file, ())]
        for file, tree in files.items()
    }
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.row("R16")
def test_r16_what_is_listed_is_used() -> None:
    """An exception that nothing needs any more would hide the next one."""
    for file, sources in NAMES.items():
        text = ast.unparse(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))
        assert all(f"({source})" in text for source in sources), file
    for file, names in WRITTEN.items():
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        assert names == {each.partition(" in line")[0] for each in used(tree, file)}


ROUTES = {
    "eval('1')": True,
    "f = exec": True,
    "compile('1', 'f', 'eval')": True,
    "re.compile('x')": False,
    "model.eval()": False,
    "def f(self):\n    return self.compile()": False,
    "import pickle": True,
    "from pickle import loads as f": True,
    "import torch.hub": True,
    "import importlib\nimportlib.import_module('pickle')": True,
    "from importlib import import_module as load\nload('pickle').loads(b'')": True,
    "import importlib as i\ni.import_module('math')": False,
    "import importlib\nimportlib.import_module(name)": True,
    "import importlib\nf = importlib.import_module": True,
    "__import__('pickle')": True,
    "__import__('math')": True,
    "import builtins\nbuiltins.eval('1')": True,
    "from builtins import eval as e\ne('1')": True,
    "__builtins__['eval']": True,
    "from importlib.util import find_spec": False,
    "import importlib.util\nimportlib.util.spec_from_file_location('m', path)": True,
    "import yaml\nyaml.load(text)": True,
    "from ruamel.yaml import YAML\nYAML(typ='safe', pure=True)": False,
    "from ruamel.yaml import YAML\nYAML(typ='unsafe')": True,
    "from ruamel.yaml import YAML\nYAML()": True,
    "import torch\ntorch.load(path)": True,
    "import torch as t\nt.load(path, weights_only=False)": True,
    "import torch\ntorch.load(path, weights_only=True)": False,
    "from torch import load\nload(path)": True,
    "import numpy as np\nnp.load(path, allow_pickle=True)": True,
    "import numpy as np\nnp.load(path, allow_pickle=False)": False,
    "import types\ntypes.FunctionType(code, {})": True,
    "import types\nisinstance(f, types.FunctionType)": False,
    "import pkgutil\npkgutil.resolve_name('pickle:loads')": True,
    "import pkgutil\npkgutil.resolve_name(name)": True,
}


@pytest.mark.row("R16")
@pytest.mark.parametrize("source", ROUTES)
def test_r16_every_route_is_seen(source: str) -> None:
    assert bool(list(used(ast.parse(source)))) is ROUTES[source]
