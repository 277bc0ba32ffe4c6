"""The documentation site: every page is in its menu, it builds without a warning, and the reference has every public name."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import opfuse

ROOT = Path(__file__).resolve().parent.parent


def pages(menu: object) -> Iterator[str]:
    """The files that a menu of mkdocs.yml names."""
    if isinstance(menu, str):
        yield menu
    for below in menu if isinstance(menu, list) else menu.values() if isinstance(menu, dict) else ():
        yield from pages(below)


def test_every_page_is_in_the_menu() -> None:
    menu = YAML(typ="safe", pure=True).load(ROOT / "mkdocs.yml")["nav"]
    assert sorted(pages(menu)) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_every_example_has_a_place() -> None:
    shown = re.findall(r"^\[`examples/(\w+\.py)`\]", (ROOT / "docs" / "howto.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_the_reference_says_of_every_module_how_stable_it_is() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(opfuse[.\w]*)` \| (stable|may change|internal)\b", text, re.MULTILINE)
    package = ROOT / "opfuse"
    files = [path.stem for path in package.glob("*.py") if not path.stem.startswith("__")]
    rooms = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
    assert sorted(module for module, _ in rows) == sorted(("opfuse", *(f"opfuse.{name}" for name in (*files, *rooms))))
    stability = dict(rows)
    assert [name for name in opfuse.__all__ if stability.get(f"opfuse.{name}") == "internal"] == []


def test_the_site_links_to_a_repository_only_if_the_package_names_one() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    assert YAML(typ="safe", pure=True).load(ROOT / "mkdocs.yml").get("repo_url") == urls.get("Repository")


@pytest.mark.docs
def test_the_site_builds_without_a_warning() -> None:
    """It stays where `make docs` says that it is."""
    site = ROOT / "build" / "site"
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (site / "api" / "index.html").read_text(encoding="utf-8")
    names = [name for group in opfuse.GROUPS.values() for name in group]
    for name in (*names, "is_fp8_available", "register_forward_fusion", "replace_raw_data"):
        assert f">{name}<" in reference, name
    assert ":func:" not in reference
    shown = re.sub(r"\s+", "", html.unescape(re.sub(r"<[^>]+>", "", reference)))
    assert "fuse_(model:Module,recipe:object=None,*,filter_fn:Filter|None=None," in shown
    assert "Linear(in_features:Size,out_features:Size,bias:bool=True,*," in shown
    assert f"opfuse {opfuse.__version__}" in reference
    assert "prefers-color-scheme: dark" in reference
    assert "opfuse report CONFIG|RUN|TRACE" in (site / "cli" / "index.html").read_text(encoding="utf-8")
    howto = re.sub(r"<[^>]+>", "", (site / "howto" / "index.html").read_text(encoding="utf-8"))
    assert "opfuse.fuse_(model, opfuse.recipes.Float8CurrentScaling())" in howto
    assert (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[2] in (site / "index.html").read_text(encoding="utf-8")
