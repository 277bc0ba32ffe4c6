"""A kernel is three files: those of docs/kernels.md are found by all that looks at kernels, and one that is missing is named."""

import re
import sys
from pathlib import Path

import pytest
import torch

from opfuse import kernels
from opfuse.errors import KernelError
from opfuse.kernels.engine import compiling, parameters, registry
from opfuse.kernels.engine.bindings import SOURCES
from tests.kernels import cases, catalogue
from tests.kernels.test_launch import complaints, entries_of

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
FILES = ("scaled.py", "cuda/scaled.cu", "cases/scaled.py")


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Writes the files of the page, in their order, beside those of the package: ``added(left_out)``, then forgets them."""
    blocks = re.findall(r"^```(?:py|cpp)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == len(FILES)
    (tmp_path / "cases").mkdir()
    (tmp_path / "cuda").mkdir()
    for path in SOURCES.iterdir():
        (tmp_path / "cuda" / path.name).symlink_to(path)
    monkeypatch.setattr(compiling, "SOURCES", tmp_path / "cuda")
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    monkeypatch.setattr(cases, "__path__", [*cases.__path__, str(tmp_path / "cases")])
    monkeypatch.setattr(registry, "_KERNELS", dict(registry._KERNELS))

    def add(left_out=None):
        for name, text in zip(FILES, blocks):
            if name != left_out:
                (tmp_path / name).write_text(text)

    yield add
    for known in (compiling.assemble, compiling.code_of, parameters.parameter_of):
        known.cache_clear()
    for module in ("opfuse.kernels.scaled", "tests.kernels.cases.scaled"):
        sys.modules.pop(module, None)
        vars(sys.modules[module.rpartition(".")[0]]).pop("scaled", None)


def test_a_kernel_is_the_three_files_of_the_page(added):
    added()
    table = catalogue.joined(catalogue.tables())
    (scaled,) = table.keys() - catalogue.CASES.keys()
    assert {kernel.name: kernel for kernel in registry.kernels()} == {kernel.name: kernel for kernel in table}
    launches = scaled.launches(table[scaled])
    assert [(entry, names) for (_, entry), names in launches.items()] == [("scaled", ("1", "257", "4099"))]
    for variant, entry in launches:
        assert entries_of(variant) == {entry}
        assert complaints(variant, "sm_90a") == {}
    arguments = table[scaled]["257"](torch.device("cpu"))
    assert scaled(*arguments.args).equal(0.3 * arguments.args[0])


def test_a_kernel_without_cases_is_named(added):
    added("cases/scaled.py")
    __import__("opfuse.kernels.scaled")
    missing = {kernel.name for kernel in registry.kernels()} - {kernel.name for kernel in catalogue.joined(catalogue.tables())}
    assert missing == {"scaled"}  # as test_every_kernel_has_cases says


def test_a_kernel_without_a_source_is_named(added):
    added("cuda/scaled.cu")
    with pytest.raises(KernelError, match=r"scaled\.cu: wants a file cuda/scaled\.cu, got none\. Cure: write it"):
        catalogue.joined(catalogue.tables())


def test_a_kernel_has_one_table_of_cases():
    table = dict([next(iter(catalogue.CASES.items()))])
    with pytest.raises(KernelError, match=r"wants one table of cases, got cases/one.py and cases/other.py\. Cure: name"):
        catalogue.joined([("one", table), ("other", table)])
