"""Pages name what exists: files, chapters, and paths in text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = {"CHANGELOG.md"}
"""Pages that tell of what was there once."""
EXAMPLES = {"opfuse/kernels/scaled.py", "opfuse/kernels/cuda/scaled.cu", "tests/kernels/cases/scaled.py"}
"""Files of the chapter on kernels, which its reader writes."""


def chapters(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in chapters(target)):
            yield link


def dead_paths(page: Path) -> Iterator[str]:
    """Paths below the root in backquotes; those with a placeholder or a pattern are none."""
    for path in re.findall(r"`((?:opfuse|tests|docs|benchmarks|configs|examples)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        if path not in EXAMPLES and not (ROOT / path).exists():
            yield path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [*dead_links(page)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    assert [*dead_paths(page)] == []


RUN = {
    "CONTRIBUTING.md": {"python": "tests/ops/test_new_activation.py"},
    "README.md": {"python": "tests/test_readme.py", "py": "tests/test_package.py"},
    "conformance.md": {"python": "tests/test_readme.py"},
    "fuse.md": {"py": "tests/convert/test_architectures.py"},
    "fusions.md": {"python": "tests/test_readme.py"},
    "howto.md": {"py": "tests/test_howto.py"},
    "kernels.md": {"py": "tests/kernels/test_new_kernel.py", "python": "tests/kernels/test_contract.py"},
    "migrate.md": {"python": "tests/te/test_te.py"},
    "ops.md": {"python": "tests/test_readme.py"},
    "pytorch.md": {"python": "tests/test_pytorch_page.py"},
    "questions.md": {"py": "tests/test_questions.py"},
    "recipes.md": {"python": "tests/test_readme.py"},
    "symptoms.md": {"py": "tests/test_questions.py"},
    "torch.md": {"python": "tests/test_readme.py", "py": "tests/test_readme.py"},
    "trace.md": {"py": "tests/test_trace.py"},
    "tutorial.md": {"python": "tests/test_readme.py"},
    "weights.md": {"python": "tests/interchange/test_layouts.py"},
}
"""The tests that run the Python blocks of a page: those in ``python`` one after another, those in ``py`` each by itself."""


def test_every_block_of_python_is_run_by_a_test() -> None:
    shown = {page.name: set(re.findall(r"^ *```(py\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES}
    assert {name: kinds for name, kinds in shown.items() if kinds} == {name: set(kinds) for name, kinds in RUN.items()}
    files = [(name.partition(".")[0], ROOT / file) for name, kinds in RUN.items() for file in kinds.values()]
    assert [file for name, file in files if name not in file.read_text(encoding="utf-8")] == []


def test_the_glossary_has_terms_that_a_user_meets_on_another_page() -> None:
    inside = {"acceptance", "architecture", "conformance", "glossary", "kernels", "trace"}
    met = " ".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md") if page.stem not in inside)
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    terms = [term for row in rows if row not in ("term", "---") for term in row.split(", ")]
    assert terms == list(dict.fromkeys(terms))
    assert [term for term in terms if not re.search(rf"\b{re.escape(term)}", met, re.IGNORECASE)] == []


def test_the_map_shows_every_package_and_no_file_or_name_that_is_gone() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "opfuse"
    rows = dict(re.findall(r"^\| `(\w+)/` \|(.*)$", page, re.MULTILINE))
    assert set(rows) == {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    files = [(name, file) for name, row in rows.items() for file in re.findall(r"`([\w/]+\.py)`", row)]
    assert [pair for pair in files if not (package / pair[0] / pair[1]).exists()] == []
    known = [f"/{path.relative_to(ROOT)}" for place in (package, ROOT / "tests") for path in place.rglob("*.py")]
    elsewhere = re.findall(r"`([\w/]+\.py)`", re.sub(r"^\| (?:`\w+/`|single files) \|.*$", "", page, flags=re.MULTILINE))
    assert [name for name in elsewhere if not any(path.endswith(f"/{name}") for path in known)] == []
    placed = re.findall(r"`([\w.]+)` (?:of|in) `([\w/]+\.py)`", page)
    texts = {file: (package / file).read_text(encoding="utf-8") for _, file in placed}
    assert [(name, file) for name, file in placed if name.rpartition(".")[2] not in texts[file]] == []
    assert len(page.encode()) <= 12 * 1024


def test_every_file_says_what_it_holds() -> None:
    """In the first line of its docstring, a sentence."""
    files = [path for path in (ROOT / "opfuse").rglob("*.py") if path.name != "__init__.py"]
    silent = [path for path in files if not (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").strip()]
    assert silent == [], "begin these with a docstring that says what they hold"
