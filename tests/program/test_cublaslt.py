"""The bindings of cuBLASLt are imported without the packages around them, which take half a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from opfuse.runtime.replay import cublaslt

pytestmark = pytest.mark.cpu


@pytest.fixture
def nvmath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of that name, of which nothing is imported before or after the test."""
    folder = tmp_path / "nvmath"
    (folder / "bindings").mkdir(parents=True)
    (folder / "__init__.py").write_text("from nvmath import bindings\nwhole = True\n")
    (folder / "bindings" / "__init__.py").write_text("from nvmath.bindings import cublasLt, other\n")
    (folder / "bindings" / "other.py").touch()
    (folder / "bindings" / "inner.py").write_text("value = 7\n")
    (folder / "bindings" / "cublasLt.py").write_text("from nvmath.bindings.inner import value\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvmath"]:
        monkeypatch.delitem(sys.modules, name)
    cublaslt.library.cache_clear()
    yield folder / "bindings" / "cublasLt.py"
    cublaslt.library.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvmath"]:
        sys.modules.pop(name)


def test_the_module_comes_without_its_packages_and_is_theirs_afterwards(nvmath: Path) -> None:
    library = cublaslt.library()
    assert library.value == 7
    assert {name for name in sys.modules if name.startswith("nvmath")} == {"nvmath.bindings.cublasLt", "nvmath.bindings.inner"}
    import nvmath as package

    assert package.whole
    assert package.bindings.cublasLt is library
    assert "nvmath.bindings.other" in sys.modules


def test_packages_that_are_imported_stay(nvmath: Path) -> None:
    import nvmath as package

    assert cublaslt.library() is package.bindings.cublasLt
    assert sys.modules["nvmath"] is package


@pytest.mark.parametrize("fault", ["ImportError", "OSError", "RuntimeError"])
def test_bindings_that_do_not_load_are_none(nvmath: Path, fault: str) -> None:
    nvmath.write_text(f"raise {fault}('no library')")
    assert cublaslt.library() is None
    assert not {name for name in sys.modules if name.startswith("nvmath")}
