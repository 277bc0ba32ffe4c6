"""The digest of kernels' sources follows their code, and not their prose."""

from __future__ import annotations

from pathlib import Path

import pytest

from opfuse.kernels.engine import sources
from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.sources import cuda_code, python_code, sources_digest

PYTHON = '''"""What it is."""

LIMIT = 448.0  # of e4m3
"""The largest value."""


def text(name: str) -> str:
    """Of a kernel,
    by name."""
    return f"""
// {name}
float x = 1.0f;  # no comment
"""
'''
TOLD_ANEW = '''"""What it is, in other words."""
# a remark
LIMIT = 448.0
"""The largest finite value of the format."""
def text(name: str) -> str:
    "Of a kernel."

    # two lines
    return f"""
// {name}
float x = 1.0f;  # no comment
"""
'''
CUDA = "// what it is\n\nfloat f(float x) {\n    return x / 2;  // halved\n}\n"


def test_python_is_its_code_alone():
    assert python_code(PYTHON) == python_code(TOLD_ANEW)
    assert python_code(PYTHON).splitlines() == [
        "LIMIT = 448.0",
        "def text(name: str) -> str:",
        '    return f"""',
        "// {name}",
        "float x = 1.0f;  # no comment",
        '"""',
    ]


@pytest.mark.parametrize(
    ("what", "instead"), [("448.0", "240.0"), ("1.0f", "2.0f"), ("// {name}", "//{name}"), ("name: str", "name:  str")]
)
def test_other_python_is_another_code(what, instead):
    assert python_code(PYTHON.replace(what, instead)) != python_code(PYTHON)


def test_cuda_is_its_code_alone():
    assert (
        cuda_code(CUDA)
        == cuda_code("/* what\nit is */\n" + CUDA.replace("halved", "by two"))
        == "float f(float x) {\n    return x / 2;\n}\n"
    )
    assert cuda_code(CUDA.replace("/ 2", "/ 4")) != cuda_code(CUDA)
    assert cuda_code(f'#line 7 "a.cu"\n{CUDA}') == cuda_code(CUDA)


def test_no_string_of_a_kernel_looks_like_a_comment():
    for path in SOURCES.rglob("*.cu*"):
        code = [line.split("//")[0] for line in path.read_text().splitlines()]
        assert all(line.count('"') % 2 == 0 for line in code), path.name


def test_names_and_code_of_files_are_in_the_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def digest(**files: str) -> str:
        package = tmp_path / str(len(list(tmp_path.iterdir()))) / "kernels"
        for name, text in files.items():
            (package / "cuda").mkdir(parents=True, exist_ok=True)
            (package / name.replace("_", ".")).write_text(text)
        monkeypatch.setattr(sources, "SOURCES", package / "cuda")
        return sources_digest()

    first = digest(a_py=PYTHON, b_cu=CUDA)
    assert digest(a_py=TOLD_ANEW, b_cu=CUDA.replace("halved", "by two")) == first
    assert digest(a_py=PYTHON, c_cu=CUDA) != first
    assert digest(a_py=PYTHON, b_cu=CUDA.replace("x / 2", "x / 4")) != first
    assert digest(a_py=PYTHON.replace("448", "240"), b_cu=CUDA) != first
