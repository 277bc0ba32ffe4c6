"""One bit that changed in a file that is read: a typed error or the right result, never another value.

What opfuse writes has a checksum, or the digest that a file is called by. A policy and a configuration are written by people and
have none: there a bit may make another valid text, and what is read is what the file says now.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import save_file

import opfuse
from opfuse import ops, recipes
from opfuse.cli import main
from opfuse.cli.report import page_of
from opfuse.errors import OpfuseError
from opfuse.inspect import trace
from opfuse.interchange import parity
from opfuse.kernels.engine.cubins import CUBIN, FACTS, CubinCache
from opfuse.runtime.plans import trace as writing
from opfuse.tensors import QuantizedTensor
from opfuse.train.checkpoints import read
from opfuse.train.localize import values_at
from opfuse.train.runs import configuration_of, known_run
from tests.tensors.quantized_samples import make, planes

pytestmark = pytest.mark.cpu

CONFIG = """version: 1
recipe: {kind: mxfp8}
pipeline: {ops: [{op: linear, in_features: 64, out_features: 256}]}
data: {kind: pydoc_topics, context: 4, embedding: 16}
train: {steps: 2, batch_size: 32, eval_every: 1}
watch: {every: 1}
"""

POLICY = """# Which recipe a model is converted with.
version: 1
recipe: {kind: fp8_current, backward_override: dequantized}
policy:
  model.layers.0: {kind: none}
  "*.mlp": {kind: mxfp8, scale_rule: ocp_floor}
  lm_head: {kind: default}
"""


@dataclass(frozen=True)
class Artefact:
    """A file, what reads it, and what should come of its bytes; ``wanted`` gets the damaged ones."""

    path: Path
    read: Callable[[], Any]
    wanted: Callable[[bytes], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is damaged, once: a run with its files, planes, a trace, a cache of kernels, a policy."""
    place = tmp_path_factory.mktemp("damage")
    (place / "own.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opfuse.train.comparison.EVALUATION_SAMPLES", 64)
        assert main(["run", str(place / "own.yaml"), "--json", "--out", str(place / "run")]) == 0
    torch.save({f"{i}.weight": torch.randn(8, 8) for i in range(3)}, place / "state.pt")
    save_file(opfuse.to_planes({kind: make(kind) for kind in ("current", "mxfp8", "nvfp4")}), place / "planes.safetensors")
    model = ops.Sequential(ops.Linear(32, 32), ops.GELU())
    for rounding in ("per_op", "single"):
        with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(rounding=rounding)):
            model(torch.randn(32, 32))
    writing.write(place / "trace.jsonl", [each for each in writing.traced() if each.handle == model.runs()[0].handle])
    cache = CubinCache(place / "kernels")
    for kind in (CUBIN, FACTS):
        cache.store("key", random.Random(kind).randbytes(500), kind)
    (place / "policy.yaml").write_text(POLICY)
    return place


def plain(value: Any) -> Any:
    """Tensors as their bytes, in whatever holds them, to be compared."""
    if isinstance(value, QuantizedTensor):
        return plain(planes(value)), value.signature, value.quantizer
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, bytes(value.contiguous().reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def said(text: bytes) -> Any:
    """What a policy says, by another reader: the recipes by pattern, each with the fields that are given."""
    found = YAML(typ="safe", pure=True).load(text.decode())
    return found["recipe"], found.get("policy", {})


def understood(path: Path) -> Any:
    """The same of what opfuse made of it."""
    choices = opfuse.load_policy(path)
    recipe, policy = said(path.read_bytes())
    chosen = {pattern: {"kind": "none" if made is None else made} for pattern, made in choices["policy"].items()}
    return _given(choices["recipe"], recipe), {pattern: _given(each["kind"], policy[pattern]) for pattern, each in chosen.items()}


def _given(made: Any, section: dict[str, Any]) -> dict[str, Any]:
    """A recipe by its kind and those of its fields that a file gives; whatever else it holds is the default."""
    if made is None or isinstance(made, str):
        return {"kind": made or "none"}
    default = recipes.recipe_of(made.kind, {})
    changed = {each.name for each in fields(made) if getattr(made, each.name) != getattr(default, each.name)}
    return {"kind": made.kind} | {name: getattr(made, name) for name in changed | {*section} - {"kind"}}


def found_in_cache(place: Path, kind: str) -> bytes | None:
    """What a process that begins now finds in the cache; None: it compiles the kernel."""
    return CubinCache(place / "kernels").find("key", kind)


def artefact(kind: str, place: Path) -> Artefact:
    """One of :data:`READERS`, whole."""
    name, reader = READERS[kind]
    (path,) = place.glob(name)
    read = partial(reader, path)
    whole = plain(read())
    if kind == "policy":
        return Artefact(path, read, lambda content: plain(said(content)))
    return Artefact(path, read, lambda content: whole)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "checkpoint": ("run/checkpoints/mxfp8.pt", read),
    "state dict": ("state.pt", parity.load),
    "planes": ("planes.safetensors", lambda path: opfuse.from_planes(parity.load(path))),
    "trace": ("trace.jsonl", trace.read),
    "cubin": ("kernels/*.cubin", lambda path: found_in_cache(path.parents[1], CUBIN)),
    "facts": ("kernels/*.json", lambda path: found_in_cache(path.parents[1], FACTS)),
    "policy": ("policy.yaml", understood),
    "report": ("run/report.json", known_run),
    "configuration of a report": ("run/config.yaml", lambda path: configuration_of(path.parent)),
}
"""The files that are read, and what reads them."""

SHORT, LONG = 10, 100


@pytest.mark.parametrize("flips", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", READERS)
def test_a_bit_that_changed_is_an_error_or_changes_nothing(kind: str, flips: int, folder: Path) -> None:
    """Bits are drawn from all over the file, as many from each part of it."""
    it, draw = artefact(kind, folder), random.Random(f"{kind} {flips}")
    content, others = it.path.read_bytes(), []
    size = 8 * len(content)
    for i in range(flips):
        bit = draw.randrange(size * i // flips, size * (i + 1) // flips)
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        it.path.write_bytes(damaged)
        try:
            found = plain(it.read())
        except OpfuseError:
            continue
        finally:
            it.path.write_bytes(content)
        if found is not None and found != it.wanted(bytes(damaged)):
            others.append(bit)
    assert others == []
    assert plain(it.read()) == it.wanted(content)


def test_a_newline_that_changed_does_not_hide_the_end_of_a_trace(folder: Path) -> None:
    """A process that is killed while it writes leaves a part of a line, and nothing after a whole one."""
    whole, path = trace.read(folder / "trace.jsonl")[0], folder / "other.jsonl"
    content = (folder / "trace.jsonl").read_bytes()
    path.write_bytes(content[:-1] + b"*")
    with pytest.raises(opfuse.errors.TraceError, match="Extra data"):
        trace.read(path)
    path.write_bytes(content[:-1])
    assert trace.read(path)[0].counts == whole.counts
    path.write_bytes(content[:-2])
    assert trace.read(path)[0].counts is None
    path.unlink()


def test_values_that_changed_are_no_page_of_a_run(folder: Path) -> None:
    path = folder / "run" / "values.jsonl"
    content = path.read_bytes()
    at = content.index(b'"amax": ') + len(b'"amax": ')
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    try:
        with pytest.raises(opfuse.errors.TraceError, match="damaged data"):
            page_of(folder / "run")
    finally:
        path.write_bytes(content)
    page_of(folder / "run")


def _deep(levels: int) -> str:
    return f'{{"facts": {"[" * levels}{"]" * levels}}}'


@pytest.mark.parametrize("levels", [60, 930, 100_000])
def test_what_is_nested_too_deeply_is_an_error_of_its_reader(levels: int, folder: Path) -> None:
    """Also where Python could just read it, and would reach its limit in what is done with it."""
    run = folder / "run"
    for name, readers in {
        "report.json": (known_run, configuration_of, page_of, partial(values_at, step=1)),
        "values.jsonl": (page_of,),
    }.items():
        content = (run / name).read_text()
        (run / name).write_text(_deep(levels))
        try:
            for reader in readers:
                with pytest.raises(opfuse.errors.TraceError, match="nested too deeply"):
                    reader(run)
        finally:
            (run / name).write_text(content)
    assert known_run(run).losses


def test_a_digit_that_changed_in_the_configuration_of_a_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another valid file, which only what lies beside it knows not to be the one of the run."""
    path = folder / "run" / "config.yaml"
    content = path.read_text()
    path.write_text(content.replace("steps: 2", "steps: 6"))
    try:
        for command, told in (
            (["report", str(folder / "run"), "--out", str(folder / "page.html")], "wants the configuration that the run had"),
            (["diff", str(folder / "run"), str(folder / "run"), "--localize"], "wants the configuration that the run had"),
        ):
            assert main(command) == 1
            assert f"{path}: {told}" in capsys.readouterr().err
    finally:
        path.write_text(content)
