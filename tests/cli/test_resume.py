"""Runs that end early go on with the same bits, and a trained model writes text."""

from __future__ import annotations

import errno
import json
import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch

from opfuse.cli import main
from opfuse.cli import run as command
from opfuse.errors import OpfuseWarning, OutputError
from opfuse.train import comparison
from opfuse.train.checkpoints import read
from opfuse.train.files import sole_writer
from tests.processes import FORKSERVER

pytestmark = pytest.mark.usefixtures("few_samples", "undrawn", "own_pipelines")

CONFIG = """
version: 1
recipe: {kind: %s}
pipeline:
  dtype: bfloat16
  ops:
    - {op: linear, in_features: 32, out_features: 64}
    - {op: gelu}
    - {op: dropout, p: 0.1}
    - {op: linear, in_features: 64, out_features: 256}
data: {kind: text, path: own.txt, context: 4, embedding: 8}
train: {batch_size: 32, steps: 6, eval_every: 3, checkpoint_every: 2, learning_rate: 1.0e-2}
"""


def configured(folder: Path, recipe: str) -> list[str]:
    """The command line of a run."""
    (folder / "own.txt").write_bytes(b"to be or not to be, " * 50)
    (folder / "own.yaml").write_text(CONFIG % recipe)
    return command_of(folder)


def command_of(folder: Path) -> list[str]:
    return ["run", str(folder / "own.yaml"), "--json", "--device", "cpu", "--out"]


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run of a recipe that never stopped, made once. more: lines of the configuration."""

    @cache
    def made(recipe: str, more: str = "") -> Path:
        folder = tmp_path_factory.mktemp("whole")
        run = configured(folder, recipe)
        with (folder / "own.yaml").open("a") as file:
            file.write(more)
        assert main([*run, str(folder / "whole")]) == 0
        return folder / "whole"

    return made


def losses(directory: Path) -> list[dict[str, object]]:
    """All that a report says of its curves."""
    return json.loads((directory / "report.json").read_text())["curves"]


def _killed(arguments: list[str], at: int) -> None:
    """Run a command that is killed when the file of number ``at`` is about to be put in its place."""
    numbers, put = count(1), os.replace

    def replace(*paths: str) -> None:
        if next(numbers) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        put(*paths)

    os.replace = replace  # type: ignore[assignment]
    comparison.EVALUATION_SAMPLES = 64
    main(arguments)


@pytest.mark.parametrize(("at", "step"), [(4, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 2), (5, 4)))])
def test_a_run_that_was_killed_loses_one_interval_at_most_and_goes_on_bit_for_bit(
    at: int, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], wholes: Callable[..., Path]
) -> None:
    """Delayed scaling, whose states are saved; a dropout, whose generator is.

    Files are put in place for the configuration, step 2, then two for each step: the last checkpoint beside, the new one.
    """
    run, out = configured(tmp_path, "delayed"), tmp_path / "out"
    child = FORKSERVER.Process(target=_killed, args=([*run, str(out)], at))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    last = next(path for name in ("delayed.pt", "delayed.before.pt") if (path := out / "checkpoints" / name).exists())
    assert read(last)["step"] == step
    assert not (out / "report.json").exists()
    assert main([*run, str(out), "--resume"]) == 0
    told = capsys.readouterr().err
    assert f"delayed: goes on after step {step}" in told
    assert "bfloat16: no checkpoint to go on from, so it begins anew" in told
    assert losses(out) == losses(wholes("delayed"))
    report, whole = (json.loads((each / "report.json").read_text()) for each in (out, wholes("delayed")))
    assert report["fusion_counts"] == whole["fusion_counts"]
    assert not [path for path in out.rglob("*") if path.name.endswith(".tmp")]


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bit of a weight, which torch.load reads without a word; only when both are damaged is there nothing to go on from."""
    run, out = configured(tmp_path, "none"), tmp_path / "out"
    assert main([*run, str(out)]) == 0
    whole, places = losses(out), [out / "checkpoints" / name for name in ("bfloat16.pt", "bfloat16.before.pt")]
    assert [read(path)["step"] for path in places] == [6, 4]
    damage(places[0])
    assert torch.load(places[0], weights_only=True)["step"] == 6
    with pytest.raises(OutputError, match=r"bfloat16\.pt: wants a checkpoint of opfuse run, got damaged data: the CRC-32 of "):
        read(places[0])
    assert main([*run, str(out), "--resume"]) == 0
    told = capsys.readouterr().err
    assert "bfloat16.pt: wants a checkpoint of opfuse run, got damaged data" in told
    assert "; the checkpoint before it takes its place\nbfloat16: goes on after step 4" in told
    assert losses(out) == whole
    for path in places:
        damage(path)
    assert main([*run, str(out), "--resume"]) == 1
    assert "bfloat16.before.pt: wants a checkpoint of opfuse run, got damaged data" in capsys.readouterr().err


def damage(path: Path) -> None:
    """Change a bit of the first weight in a file of torch."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        inside = archive.getinfo(next(name for name in archive.namelist() if name.endswith("data/0")))
    content[inside.header_offset + 200] ^= 64
    path.write_bytes(content)


def test_a_second_run_in_one_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = configured(tmp_path, "none"), tmp_path / "out"
    out.mkdir()
    with sole_writer(out / "report.json"):
        assert main([*run, str(out)]) == 1
    told = capsys.readouterr().err
    assert f"{out}: wants a directory in which no other run writes, got one in which a run is going on. Cure: wait" in told
    assert [path.name for path in out.iterdir()] == [".report.json.lock"]
    assert main([*run, str(out)]) == 0


def test_without_locks_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.warns(OpfuseWarning, match="wants a file system with locks, got OSError: No locks"), sole_writer(tmp_path / "x"):
        pass


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, wholes: Callable[..., Path]
) -> None:
    run, out = configured(tmp_path, "fp8_current"), tmp_path / "out"
    whole = losses(wholes("fp8_current"))
    numbers, sync = count(1), os.fsync

    def fsync(handle: int) -> None:
        if next(numbers) == 4:  # configuration, step 2, step 4, step 6
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        assert main([*run, str(out)]) == 1
    told = capsys.readouterr().err
    assert "fp8_current.pt: wants room for what a run can go on from, got OSError: No space left on device. Cure: make" in told
    assert [read(out / "checkpoints" / f"fp8_current{name}.pt")["step"] for name in ("", ".before")] == [4, 2]
    assert main([*run, str(out), "--resume"]) == 0
    assert losses(out) == whole


@contextmanager
def interrupting(at: int) -> Iterator[object]:
    """A reporter that presses Ctrl-C during step ``at`` of all steps."""
    numbers = count(1)

    def on_step(label: str, step: object) -> None:
        if next(numbers) == at:
            signal.raise_signal(signal.SIGINT)

    yield on_step


@pytest.mark.parametrize(("recipe", "at"), [("nvfp4, backward_override: dequantized", 3), ("fp8_current", 7)])
def test_ctrl_c_keeps_what_there_is(
    recipe: str,
    at: int,
    *,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wholes: Callable[..., Path],
) -> None:
    """Stochastic rounding draws from the generator; the seventh step is the first of the baseline."""
    run, out = configured(tmp_path, recipe), tmp_path / "out"
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(command, "reporter", lambda: interrupting(at))
        capsys.readouterr()
        assert main([*run, str(out)]) == 130
    told = capsys.readouterr().err
    assert f"stopped after step {(at - 1) % 6 + 1} of 6; what there is lies in {out}" in told
    assert signal.getsignal(signal.SIGINT) is before
    assert main([*run, str(out), "--resume"]) == 0
    assert losses(out) == losses(wholes(recipe))


WATCH = "watch: {every: 2, alarms: {}}\n"


@pytest.mark.parametrize("at", [4, 7, *(pytest.param(at, marks=pytest.mark.slow) for at in (2, 6, 8))])
def test_the_record_of_a_resumed_run_is_that_of_one_that_never_stopped(
    at: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wholes: Callable[..., Path],
) -> None:
    """Before and after the first evaluation, at the end of the run, and in the baseline, when the run itself has ended."""
    never_stopped, out = wholes("fp8_current", WATCH), tmp_path / "out"
    run = command_of(never_stopped.parent)  # of one file, whose lines plans name
    with monkeypatch.context() as patch:
        patch.setattr(command, "reporter", lambda: interrupting(at))
        assert main([*run, str(out)]) == 130
    assert main([*run, str(out), "--resume"]) == 0
    capsys.readouterr()
    assert main(["diff", str(never_stopped), str(out)]) == 0, capsys.readouterr().out
    report, whole = (json.loads((each / "report.json").read_text()) for each in (out, never_stopped))
    assert report["plans"] == whole["plans"]
    steps = [[step for step, *_ in curve] for curve in report["measured"]]
    assert steps == [[1, 2, 3, 4, 5, 6]] * 2
    assert (out / "values.jsonl").read_text() == (never_stopped / "values.jsonl").read_text()


def test_a_file_without_data_is_refused_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = configured(tmp_path, "none")
    own = tmp_path / "own.yaml"
    own.write_text("".join(line for line in own.read_text().splitlines(True) if not line.startswith("data:")))
    assert main([*run, str(tmp_path / "out")]) == 1
    assert "wants data to train on" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_run_is_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = configured(tmp_path, "none"), tmp_path / "out"
    assert main([*run, str(out)]) == 0
    path = out / "checkpoints" / "bfloat16.pt"
    for changed, wanted in (
        (["--seed", "3"], "bfloat16.pt seed: wants 0, got 3"),
        (["--steps", "7"], "bfloat16.pt steps: wants 6, got 7"),
    ):
        assert main([*run, str(out), "--resume", *changed]) == 1
        assert wanted in capsys.readouterr().err
    own = tmp_path / "own.yaml"
    own.write_text(own.read_text().replace("1.0e-2", "2.0e-2"))
    assert main([*run, str(out), "--resume"]) == 1
    assert "bfloat16.pt configuration: wants line 12 to be 'train: {batch_size: 32," in capsys.readouterr().err
    own.write_text(own.read_text().replace("2.0e-2", "1.0e-2"))
    (tmp_path / "own.txt").write_bytes(b"that is the question, " * 50)
    assert main([*run, str(out), "--resume"]) == 1
    assert "bfloat16.pt text: wants" in capsys.readouterr().err
    path.write_bytes(b"what is this?")
    path.with_name("bfloat16.before.pt").unlink()
    assert main([*run, str(out), "--resume"]) == 1
    assert "wants a checkpoint of opfuse run" in capsys.readouterr().err


def test_another_run_is_replaced_by_force_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run is repeated, so that a command of a page can be; nothing of another one is lost."""
    run, out = configured(tmp_path, "fp8_current"), tmp_path / "out"

    def held() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def refused(got: str, *options: str) -> None:
        before = held()
        assert main([*run, str(out), *options]) == 1
        told = capsys.readouterr().err
        assert f"{out}: wants a directory without an earlier run, or with the same, got {got}. Cure: name another" in told
        assert held() == before

    assert main([*run, str(out)]) == 0
    capsys.readouterr()
    assert main([*run, str(out)]) == 0
    assert f"{out} holds this run already; it is repeated, and replaced" in capsys.readouterr().err
    refused("another seed", "--seed", "3")
    refused("another number of steps", "--steps", "3")
    own, text = tmp_path / "own.yaml", tmp_path / "own.txt"
    for path, changed, got in ((own, b"# a comment\n", "another configuration"), (text, b"that is the question", "another text")):
        content = path.read_bytes()
        path.write_bytes(content + changed)
        refused(got)
        path.write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setenv("OPFUSE_BACKWARD_OVERRIDE", "dequantized")
        refused("another recipe")
    with monkeypatch.context() as patch:
        patch.setattr(command, "reporter", lambda: interrupting(3))
        assert main([*run, str(out), "--force", "--seed", "3"]) == 130
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["fp8_current.pt", "fp8_current.before.pt"]
    refused("one that has not ended", "--seed", "3")
    refused("one that has not ended")
    assert main([*run, str(out), "--seed", "3", "--resume"]) == 0
    (out / "report.json").write_text("{}")
    refused("a report.json that is none")
    assert main([*run, str(out), "--resume", "--force"]) == 2


@pytest.mark.parametrize("found", [[1], {"step": 3}, {"run": {}, "other": 1}], ids=["a list", "a part", "another"])
def test_a_file_of_something_else_is_no_checkpoint(found: object, tmp_path: Path) -> None:
    path = tmp_path / "found.pt"
    torch.save(found, path)
    with pytest.raises(OutputError, match="wants a checkpoint of opfuse run, got a file of something else"):
        read(path)


def test_a_loss_that_rose_is_called_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = configured(tmp_path, "none")
    own = tmp_path / "own.yaml"
    own.write_text(own.read_text().replace("1.0e-2", "30.0"))
    assert main([*run[:2], "--out", str(tmp_path / "out")]) == 0
    assert "diverged bfloat16: its loss rose from 5." in capsys.readouterr().out
