"""What type checkers make of a user's script: every public name is there, with its type."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import opfuse

ROOT = Path(opfuse.__file__).parents[1]
MODULES = ("opfuse", *(f"opfuse.{name}" for name in ("config", "convert", "fusions", "ops", "recipes", "te", "tensors", "train")))
NAMES = {module: importlib.import_module(module).__all__ for module in MODULES}

SCRIPT = """
import torch
from torch import nn

import opfuse
import opfuse.te as te
from opfuse import ops, recipes
from opfuse.convert import Report


class Cubed(ops.Activation):
    math = ops.formula("cubed", lambda x: x * x * x)


def trained(model: nn.Module, x: torch.Tensor) -> str:
    with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()), opfuse.interpreted():
        model(x).sum().backward()
    told = opfuse.explain(model, x, overrides=True)
    with opfuse.watch(model, every=10) as watched:
        model(x)
    return f"{told} {opfuse.saved(model, x).totals.own} {watched.records}"


model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64, dtype=torch.bfloat16), ops.GELU(), Cubed(), te.ops.Linear(64, 64))
report: Report = opfuse.fuse_(nn.Sequential(nn.Linear(8, 8)), recipes.Float8CurrentScaling())
print(trained(model, torch.randn(8, 64)), report, opfuse.support(recipes.NVFP4BlockScaling()).status)
"""


def checked(checker: list[str], script: str, folder: Path) -> str:
    """What a type checker says of a script."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    run = subprocess.run([sys.executable, "-m", *checker, str(path)], check=False, cwd=ROOT, capture_output=True, text=True)
    assert not run.stderr, run.stderr
    return run.stdout


CHECKERS = {"mypy": ["mypy", "--strict"], "pyright": ["pyright", "--pythonpath", sys.executable]}
EACH = pytest.mark.parametrize("checker", ["pyright", pytest.param("mypy", marks=pytest.mark.slow)])
"""Pyright reads what a script names, in six seconds, and mypy the whole package, which `make types` does with every change."""


@EACH
def test_a_script_with_every_public_name(checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"wants {checker}")
    told = [f"from {module} import {name} as {module.replace('.', '_')}_{name}" for module in MODULES for name in NAMES[module]]
    asked = [f"reveal_type({module.replace('.', '_')}_{name})" for module in MODULES for name in NAMES[module]]
    found = checked(CHECKERS[checker], "\n".join((*told, *asked, SCRIPT)), tmp_path)
    errors = re.findall(r".*\berror: .*", found)
    assert [each for each in errors if not each.endswith("[unused-ignore]")] == []  # which differs between releases of torch
    types = re.findall(r'Revealed type is "(.*)"|Type of ".*?" is "(.*)"', found)
    assert len(types) == len(asked)
    assert [name for name, each in zip(asked, types) if "".join(each) in ("Any", "Unknown")] == []


@EACH
def test_a_name_that_there_is_not_is_an_error(checker: str, tmp_path: Path) -> None:
    if find_spec(checker) is None:
        pytest.skip(f"wants {checker}")
    found = checked(CHECKERS[checker], "import opfuse\n\nopfuse.fuse(1)\nopfuse.ops.Lineer(8, 8)\n", tmp_path)
    assert len(re.findall(r"\berror:.*(?:fuse|Lineer)", found)) == 2


def test_names_are_listed_where_they_are() -> None:
    for module in MODULES[1:]:
        assert set(NAMES[module]) <= vars(importlib.import_module(module)).keys()
    unlisted = {cls.__name__ for cls in opfuse.ops.OPS.values()} - set(opfuse.ops.__all__)
    assert unlisted == set(), "add these to __all__ in opfuse/ops/__init__.py"
    stub = ast.parse((ROOT / "opfuse" / "__init__.pyi").read_text(encoding="utf-8"))
    typed = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(typed) == sorted(opfuse.__all__)
    elsewhere = {name for name in typed if getattr(importlib.import_module(typed[name]), name, None) is not getattr(opfuse, name)}
    assert elsewhere == set(), "opfuse/__init__.pyi imports these from where they are not"
