"""What opfuse writes has no secret of the process that wrote it, and is its owner's alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.cli import main
from opfuse.inspect.trace import read
from opfuse.runtime.plans import trace

SECRET = "hf_0123456789"
NAMES = ("NVIDIA_API_KEY", "TORCH_HUB_TOKEN", "CUDA_LICENSE", "PYTORCH_PASSWORD", "NVTE_TOKEN", "CUBLAS_X", "OMP_X")
CONFIG = """version: 1
recipe: {kind: mxfp8}
pipeline: {ops: [{op: linear, in_features: 64, out_features: 256}]}
data: {kind: pydoc_topics, context: 4, embedding: 16}
train: {steps: 2, batch_size: 32}
watch: {every: 1}
"""


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_samples: None, own_pipelines: None, undrawn: None
) -> Iterator[Path]:
    """A process with secrets in its command line and in its environment, which writes everything that there is to write."""
    for name in NAMES:
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf-token", SECRET, f"--key={SECRET}"])
    trace._writer.cache_clear()
    yield tmp_path
    trace._writer.cache_clear()


def test_no_file_has_a_secret_or_is_for_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "own.yaml").write_text(CONFIG)
    made = place / "made"
    made.mkdir()
    (made / "dump.jsonl").touch(mode=0o644)
    monkeypatch.setenv("OPFUSE_TRACE", str(made / "trace"))
    assert main(["run", str(place / "own.yaml"), "--json", "--out", str(made / "run")]) == 0
    monkeypatch.delenv("OPFUSE_TRACE")
    opfuse.dump(made / "dump.jsonl")
    for name in ("run", "dump.jsonl"):
        assert main(["report", str(made / name), "--out", str(made / f"{name}.html")]) == 0
    assert main(["study", "keep", str(place / "own.yaml"), "--points", "1", "--json", "--out", str(made / "study")]) == 0
    files = [path for path in made.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".jsonl", ".json", ".html", ".yaml", ".pt", ".md"}
    assert [path.name for path in files if SECRET.encode() in path.read_bytes()] == []
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files if path.stat().st_mode & 0o077} == {}
    for found in (read(made / "dump.jsonl")[0], read(made / "trace")[0]):
        assert found.process.command == ["train.py", "***", "***", "***"]
        assert found.process.environment["OMP_NUM_THREADS"] == "3"
        assert found.process.environment["NVTE_BACKWARD_OVERRIDE"] == "dequantized"


def test_arguments_are_written_where_they_are_asked_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPFUSE_TRACE_ARGUMENTS", "1")
    ops.Sequential(ops.Linear(32, 32))(torch.randn(32, 32))
    (found,) = read(opfuse.dump(place / "dump.jsonl"))
    assert found.process.command == ["train.py", "--hf-token", SECRET, f"--key={SECRET}"]


def test_a_configuration_to_begin_with_is_for_whoever_the_umask_says(place: Path) -> None:
    assert main(["init", str(place / "mine.yaml")]) == 0
    (place / "another.yaml").touch()
    assert len({(place / name).stat().st_mode for name in ("mine.yaml", "another.yaml")}) == 1
