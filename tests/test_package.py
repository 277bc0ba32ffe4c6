"""What is installed: the wheel has all that a command reads, the source distribution all that its tests read."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from setuptools import find_namespace_packages

import opfuse
from opfuse.config.load import examples
from opfuse.torch_private.names import TRIED

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DATA = PROJECT["tool"]["setuptools"]["package-data"]


def test_files_that_are_no_code_are_declared() -> None:
    files = [path for path in (ROOT / "opfuse").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    names = [path.relative_to(ROOT / "opfuse").as_posix() for path in files]
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in DATA["opfuse"])] == []
    assert DATA["opfuse.configs"] == ["*.yaml"]
    assert 'package_dir={"opfuse.configs": "configs"}' in (ROOT / "setup.py").read_text()
    assert sorted(examples().values()) == sorted((ROOT / "configs").iterdir())


def test_every_room_is_a_package_with_or_without_a_file_of_its_own() -> None:
    assert "packages=[*find_namespace_packages(" in (ROOT / "setup.py").read_text()
    found = set(find_namespace_packages(str(ROOT), include=["opfuse*"]))
    assert {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "opfuse").rglob("*.py")} <= found


def test_what_stands_at_the_top_is_in_the_source_distribution() -> None:
    """Tests read docs, benchmarks, the Makefile and the examples."""
    manifest = (ROOT / "MANIFEST.in").read_text()
    for name in (".github", "benchmarks", "configs", "docs", "examples", "tests"):
        assert f"graft {name}\n" in manifest
    for name in ("AGENTS.md", "Makefile", "SECURITY.md", ".pre-commit-config.yaml", "constraints.txt"):
        assert name in manifest


def test_the_version_stands_in_one_place() -> None:
    """The distribution has that of the package, which setuptools reads without importing it."""
    said = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.split()[-1] == opfuse.__version__
    versioned = re.compile(rf"^(__)?version(__)?\b.*{re.escape(opfuse.__version__)}", re.MULTILINE)
    others = [path for path in ROOT.iterdir() if path.suffix in (".cff", ".py", ".toml", ".yml")]
    files = [ROOT / "opfuse" / "__init__.py", *others]
    assert [path.name for path in files if versioned.search(path.read_text(encoding="utf-8"))] == ["__init__.py"]


def test_continuous_integration_runs_the_versions_that_are_promised() -> None:
    workflow = YAML(typ="safe").load(ROOT / ".github" / "workflows" / "ci.yml")
    promised = [each.rpartition(" ")[2] for each in PROJECT["project"]["classifiers"] if ":: Python :: 3." in each]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == promised
    assert PROJECT["project"]["requires-python"] == f">={promised[0]}"
    assert workflow["jobs"]["torch"]["strategy"]["matrix"]["torch"] == [TRIED[0], TRIED[-1]]


def test_what_a_public_repository_has_can_be_read() -> None:
    """Forms and hooks are YAML, and a form asks for what doctor prints."""
    forms = {path.stem: YAML(typ="safe").load(path) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    assert "opfuse doctor --json" in str(forms["bug"])
    assert "opfuse doctor --json" in (ROOT / ".github" / "pull_request_template.md").read_text(encoding="utf-8")
    hooks = [hook for repo in YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["entry"].split()[0].rpartition("/")[2] for hook in hooks] == ["ruff", "ruff", "mypy"]


def test_torch_begins_at_the_oldest_release_that_was_tried() -> None:
    """It has no end: a newer one is warned of (tests/runtime/test_machine.py). The pages name the newest that was tried."""
    (torch,) = [each for each in PROJECT["project"]["dependencies"] if each.startswith("torch")]
    assert torch == f"torch>={TRIED[0]}"
    for page in ("README.md", "docs/install.md"):
        assert f"PyTorch {TRIED[0]} to {TRIED[-1]}" in (ROOT / page).read_text(encoding="utf-8")


READ_BY_TRANSFORMERS = """
stock = LlamaForCausalLM.from_pretrained("trained")
assert not any("forward" in vars(module) for module in stock.modules())
assert torch.equal(stock.eval()(words).logits, opfuse.unfuse_(model).eval()(words).logits)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution, made from a copy, since building leaves files behind."""
    folder = tmp_path_factory.mktemp("distributions")
    copy, made = folder / "copy", folder / "built"
    if not (ROOT / ".git").exists():  # of a source distribution, which may be on a machine without git
        pytest.skip("not a checkout")
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    build = "import sys, setuptools.build_meta as b; to = sys.argv[1]; b.build_sdist(to); b.build_wheel(to)"
    subprocess.run([sys.executable, "-c", build, str(made)], cwd=copy, check=True, capture_output=True)
    return made


def test_the_wheel_fits_every_machine(built: Path) -> None:
    """Its tag names no Python, ABI or platform, and nothing in it is compiled: aarch64 gets the same files."""
    (wheel,) = built.glob("*.whl")
    assert wheel.stem.endswith("-py3-none-any")
    magic = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"!<arch>")
    with zipfile.ZipFile(wheel) as files:
        assert "Root-Is-Purelib: true" in next(files.read(n).decode() for n in files.namelist() if n.endswith("/WHEEL"))
        assert [name for name in files.namelist() if files.read(name).startswith(magic)] == []


ON_ARM = """
import platform
platform.machine, platform.processor = lambda: "aarch64", lambda: "aarch64"
import torch, opfuse
from opfuse.cli import main
assert opfuse.__file__.startswith(SITE), opfuse.__file__
model = opfuse.ops.Sequential(opfuse.ops.Linear(64, 96), opfuse.ops.GELU(), opfuse.ops.Linear(96, 32))
with opfuse.autocast(recipe=opfuse.recipes.MXFP8BlockScaling()):
    model(torch.randn(32, 64)).sum().backward()
assert main(["doctor", "--only", "machine"]) == 0
"""


def test_the_wheel_takes_a_step_where_python_says_aarch64(built: Path, tmp_path: Path) -> None:
    """No such machine was tried: what is shown is that nothing asks for x86-64."""
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(tmp_path)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    command = [sys.executable, "-P", "-c", ON_ARM.replace("SITE", repr(str(tmp_path)))]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Linux aarch64" in done.stdout


@pytest.mark.slow
def test_the_wheel_runs_an_example_and_the_script_of_the_readme(built: Path, tmp_path: Path) -> None:
    """The script converts and trains a Llama; what it saves, transformers reads with the same bits."""
    site = tmp_path / "site"
    zipfile.ZipFile(next(built.glob("*.whl"))).extractall(site)
    files = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "opfuse").rglob("*") if path.is_file() and path.suffix != ".pyc"
    }
    assert files <= {path.relative_to(site).as_posix() for path in site.rglob("*")}
    scripts = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (script,) = [each for each in scripts if "LlamaConfig" in each]
    for command in (
        ["-m", "opfuse", "run", "quickstart", "--steps", "2", "--out", str(tmp_path / "out")],
        ["-c", script + READ_BY_TRANSFORMERS],
    ):
        environment = {"PYTHONPATH": str(site), "PATH": ""}
        subprocess.run([sys.executable, "-P", *command], cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "out" / "report.json").is_file()


@pytest.mark.slow
def test_the_source_distribution_tests_itself(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    few = ["tests/test_readme.py", "tests/test_performance.py", "tests/test_acceptance.py", "tests/test_package.py", "tests/cli"]
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *few]
    subprocess.run(test, cwd=root, env={"PYTHONPATH": str(root), "PATH": ""}, check=True)
