"""What opfuse uses of torch that torch does not promise to keep: it behaves as expected, and stands in one place."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import opfuse
from opfuse.cli.app import app
from opfuse.errors import UnsupportedError
from opfuse.torch_private import names
from opfuse.torch_private.table import ENTRIES_OF, NAMES, NEEDS

PACKAGE = Path(opfuse.__file__).parent
PLACE = PACKAGE / "torch_private"
OTHERS = sorted(path for path in PACKAGE.rglob("*.py") if PLACE not in path.parents)

# -- the names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_torch_does_what_opfuse_expects(name):
    entry = NAMES[name]
    if not NEEDS[entry.needs]():
        pytest.skip(f"needs {entry.needs}")
    assert (fault := entry.fault()) is None, fault


def test_a_fault_says_what_is_wrong_and_what_for(monkeypatch):
    monkeypatch.setattr(names, "NAMES", {})
    names.private("torch._C._turned", lambda turn: turn(), use="turning tensors", breaks="tensors would not turn")
    names.attribute("torch.Tensor._turns", lambda read: read(torch.zeros(1)) == 0, use="counting turns", breaks="none is counted")
    names.private("torch.add", lambda add: bool(add(torch.ones(1), 1) == 3), use="adding", breaks="sums would be wrong")
    assert [*names.faults(slow=False)] == [
        "torch._C._turned is gone or behaves otherwise: opfuse uses it for turning tensors. Else tensors would not turn.",
        "torch.Tensor._turns is gone or behaves otherwise: opfuse uses it for counting turns. Else none is counted.",
        "torch.add is gone or behaves otherwise: opfuse uses it for adding. Else sums would be wrong.",
    ]


def test_a_name_stands_once(monkeypatch):
    monkeypatch.setattr(names, "NAMES", {})
    names.private("torch.add", bool, use="adding", breaks="sums would be wrong")
    with pytest.raises(ValueError, match="each once"):
        names.private("torch.add", bool, use="adding", breaks="sums would be wrong")


def test_a_name_that_is_gone_fails_when_it_is_used(monkeypatch):
    monkeypatch.setattr(names, "NAMES", {})
    gone = names.private("torch._C._turned", bool, use="turning tensors", breaks="tensors would not turn")
    for used in (lambda: gone(1), lambda: gone.part, lambda: isinstance(1, gone)):
        with pytest.raises(UnsupportedError, match=r"torch\._C\._turned, for turning tensors"):
            used()


def test_doctor_names_what_a_torch_has_changed(monkeypatch):
    run = CliRunner().invoke
    assert "differs from" not in run(app, ["doctor"]).output
    fault = "torch._C._turned is gone or behaves otherwise: opfuse uses it for turning tensors. Else tensors would not turn."
    monkeypatch.setitem(names.NAMES, "torch._C._turned", names.PrivateName("torch._C._turned", "turning tensors",
                                                                           "tensors would not turn", lambda: False))  # fmt: skip
    assert f"- {fault}" in run(app, ["doctor"]).output
    assert json.loads(run(app, ["doctor", "--json"]).output)["torch"]["faults"] == [fault]


# -- their place ---------------------------------------------------------------------------------------------------------------

ALLOWED = {
    "_parameters": "a module's dictionary, which all code that replaces parameters writes; read at every call",
    "_modules": "a module's dictionary, which all code that replaces modules writes; read at every call",
    "_buffers": "a module's dictionary, beside the two others",
    "_apply": "a method that a module overrides bears its name",
    "_save_to_state_dict": "a method that a module overrides bears its name",
    "_load_from_state_dict": "a method that a module overrides bears its name",
}
"""Private names of torch that may stand elsewhere, and why."""

STACK = {
    *("_getframe", "_current_frames", "currentframe", "tb_frame", "gi_frame"),
    *("f_back", "f_code", "f_locals", "f_globals", "f_lineno"),
}
"""What reads Python's stack."""

TYPES = (
    *(torch.Tensor, torch.UntypedStorage, nn.Module(), nn.modules.module),
    *(torch.autograd.forward_ad, torch.compiler, torch._ops.OpOverload),
)
"""Objects whose private attributes are looked for, on whatever they are read."""

ATTRIBUTES = {name.rpartition(".")[2] for name in NAMES} | {name for kind in TYPES for name in dir(kind)}
PRIVATE = {name for name in ATTRIBUTES if name.startswith("_") and not name.startswith("__")} - ALLOWED.keys()


WORDS = "|".join((r"torch(\.\w+)*\._[\w.]*", *sorted(PRIVATE | STACK)))
"""What a text may not be as a whole: getattr and sys.modules take these."""

ATEN = "torch.ops.aten"
"""torch's operations, whose names are theirs wherever they come from."""


def dotted(node: ast.AST) -> list[str]:
    """The names of ``a.b.c``; of an attribute of a call and such, only those after it."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def own_names(nodes: Collection[ast.AST]) -> set[str]:
    """What the classes of a file define themselves: their methods, and attributes that they assign."""
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return defined | stored | fields


def findings(source: str) -> Iterator[str]:
    """Private names of torch and readings of the stack in a text of Python."""
    nodes = [*ast.walk(ast.parse(source))]
    own = own_names(nodes)
    imported = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value and ".".join(dotted(node.value)) == ATEN:
            imported |= {".".join(dotted(each)): ATEN for each in getattr(node, "targets", None) or [node.target]}
    yield from filter(is_private, imported.values())
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, *rest = dotted(node)
            path = ".".join((imported.get(first, first), *rest))
            of_torch = first in imported and is_private(path)
            of_another = node.attr in PRIVATE and not path.startswith(ATEN) and (node.attr not in own or first != "self")
            if of_torch or of_another or node.attr in STACK:
                yield path
        elif isinstance(node, ast.Constant) and re.fullmatch(WORDS, str(node.value)):
            yield repr(node.value)


def is_private(path: str) -> bool:
    """Whether a part of a dotted name below torch is private; names of torch's operations are not."""
    parts = path.split(".")
    return not path.startswith(ATEN) and any(part.startswith("_") and not part.startswith("__") for part in parts)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_names_what_is_private_in_torch(path):
    found = [*findings(path.read_text(encoding="utf-8"))]
    assert not found, f"{path}: move {', '.join(found)} to opfuse/torch_private, with an entry"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch._C._anything()",
        "from torch.utils._pytree import tree_map",
        "from torch._dynamo import reset",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "def f(t): return t._version",
        "def f(t): return getattr(t, '_base', None)",
        "def f(t): return t.untyped_storage()._cdata",
        "def f(m): return m._forward_hooks",
        "import torch\ntorch.compiler._is_exporting_flag",
        "import sys\nsys._getframe(1)",
        "def f(frame): return frame.f_back",
        "import sys\n'torch._dynamo' in sys.modules",
    ],
)
def test_what_is_private_is_found(source):
    assert [*findings(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.ops.aten._to_copy.default",
        "import torch\naten = torch.ops.aten\nx = aten._foreach_copy_",
        "class A:\n    def f(self): return self._version\n    def _version(self): ...",
    ],
)
def test_what_is_not_private_is_let_be(source):
    assert not [*findings(source)]


def test_each_module_of_the_package_is_in_the_table():
    files = {path.stem for path in PLACE.glob("*.py")} - {"__init__", "names", "table"}
    assert files == {module.__name__.rpartition(".")[2] for module in ENTRIES_OF}
