"""Results reach their user: told before training where they cannot, whole or not at all on disk, and never lost."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest
from rich.table import Table

from opfuse.cli import main, run
from opfuse.cli.results import show
from opfuse.errors import OutputError
from opfuse.train import files
from tests.processes import ran

TINY = """
version: 1
recipe: {kind: fp8_current}
pipeline: {dtype: float32, ops: [{op: linear, in_features: 32, out_features: 256}]}
data: {kind: pydoc_topics, context: 2, embedding: 16}
train: {batch_size: 32, steps: 2}
"""


@pytest.fixture
def tiny(tmp_path: Path, few_samples: None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("opfuse.train.files.find_spec", lambda name: None)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return str(tmp_path / "tiny.yaml")


@pytest.mark.parametrize("command", [["run"], ["study", "overrides"]])
@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--out", "/dev/null/x"], 1, "/dev/null/x: wants a directory to write in, got NotADirectoryError"),
        (["--device", "cuda:99"], 3, "device: wants a device that torch can use here, got 'cuda:99'"),
        (["--device", "meta"], 3, "got 'meta', which has no data. Cure: choose one of auto, cpu"),
    ],
)
def test_what_cannot_be_done_is_told_before_training(  # noqa: PLR0917
    command: list[str],
    options: list[str],
    code: int,
    told: str,
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("opfuse.cli.run.compare", None)
    monkeypatch.setattr("opfuse.cli.study.study_overrides", None, raising=False)
    assert main([*command, tiny, *options]) == code
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def fill(monkeypatch: pytest.MonkeyPatch, full: Path) -> None:
    """A disk without room for results: those that are written below ``full`` fail when they are to reach the disk."""
    sync = os.fsync

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_relative_to(full) and path.name.startswith(".report.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)


def test_a_full_disk_leaves_the_last_report_and_the_new_one_goes_elsewhere(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", tiny, "--out", str(tmp_path / "out")]) == 0
    last = (tmp_path / "out" / "report.json").read_text()
    capsys.readouterr()
    fill(monkeypatch, tmp_path / "out")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["run", tiny, "--json", "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert (tmp_path / "out" / "report.json").read_text() == last
    (elsewhere,) = tmp_path.glob("opfuse-*")
    assert f"No space left on device. Cure: make room; what was computed is in {elsewhere}." in printed.err
    report = json.loads((elsewhere / "report.json").read_text())
    assert report["loss_last"] == json.loads(printed.out)["loss_last"]
    assert len(report["curves"][0]["losses"]) == 2


def test_without_any_room_the_report_is_on_stdout(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(monkeypatch, Path("/"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["run", tiny, "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr()
    assert "what was computed is on stdout" in printed.err
    assert len(json.loads(printed.out[printed.out.index("{\n") :])["curves"][0]["losses"]) == 2
    assert not list(tmp_path.rglob("report*"))


def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    path = files.write(tmp_path / "new" / "report.json", b"one")
    before = path.open("rb")
    files.write(path, b"another")
    assert (before.read(), path.read_bytes()) == (b"one", b"another")
    assert [each.name for each in path.parent.iterdir()] == ["report.json"]


def test_a_directory_that_takes_no_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"wants a directory to write in, got \w+: .* Cure: name another directory with --out"):
        files.writable(tmp_path / "file")
    assert isinstance(OutputError("x"), OSError)


def test_tables_in_a_pipe_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "reason", box=None)
    table.add_row("n" * 150, "r" * 150)
    show(table)
    assert capsys.readouterr().out.splitlines()[1].split() == ["n" * 150, "r" * 150]


def test_an_example_runs_by_its_name_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    monkeypatch.setattr(run, "compare", lambda config, **options: asked.append(config.path) or sys.exit(7))
    assert main(["run", "quickstart"]) == 7
    assert Path(asked[0]).parts[-2:] == ("configs", "quickstart.yaml")
    assert main(["check", "quickstrat"]) == 1
    assert "error[no-file]" in (out := capsys.readouterr().out)
    assert "did you mean 'quickstart'?" in out


def test_explain_on_a_device_that_is_not_here_is_unsupported(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", tiny, "--device", "cuda:99"]) == 3
    assert "device: wants a device that torch can use here" in capsys.readouterr().err


def test_overrides_from_the_environment_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.setenv("OPFUSE_BACKWARD_OVERRIDE", "dequantized")
    assert main(["explain", str(tmp_path / "tiny.yaml")]) == 0
    assert "backward_override was taken from the environment, OPFUSE_BACKWARD_OVERRIDE\n" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "tiny.yaml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["from_environment"]
    assert told == {"backward_override": "OPFUSE_BACKWARD_OVERRIDE"}
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["environment"]) >= {"OPFUSE_BACKWARD_OVERRIDE", "NVTE_NVFP4_DISABLE_RHT"}
    assert "the disable_rht of recipes" in found["environment"]["NVTE_NVFP4_DISABLE_RHT"]


def test_doctor_tells_mistyped_variables_and_the_kernel_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from opfuse.cli.doctor import environment, machine

    monkeypatch.setenv("OPFUSE_CACHEDIR", "/x")
    assert "did you mean 'OPFUSE_CACHE_DIR'" in environment()["OPFUSE_CACHEDIR"]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(tmp_path / "open"))
    assert "left alone" in machine()["kernel cache"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_doctor_works_for_a_user_whom_nobody_knows() -> None:
    """As in a container: a uid without a name, no HOME, and no variable at all but where Python finds its modules."""
    script = """
import os, sys
from opfuse.cli import doctor, main
os.setuid(54321)
sys.exit(main(["doctor"]))
"""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    done = ran(script, env=environment, cwd=Path("/"))
    assert "kernel cache  ~/.cache/opfuse/kernels-v2: left alone, a home directory that is not known" in done.stdout


def test_without_a_home_the_kernel_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without being root: the package of paths knows no home."""
    from opfuse.cli.doctor import machine

    def homeless(name: str) -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("OPFUSE_CACHE_DIR", raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", homeless)
    assert "left alone, a home directory that is not known" in machine()["kernel cache"]
