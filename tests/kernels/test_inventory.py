"""The cache of compiled kernels is told, checked and pruned."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from opfuse.cli.app import main
from opfuse.kernels.casts.tensor import tensor_amax
from opfuse.kernels.engine.compiling import Variant, assemble, cubin
from opfuse.kernels.engine.cubins import FACTS, CubinCache
from opfuse.kernels.engine.inventory import inventory
from tests.kernels.catalogue import CASES

AMAX = next(iter(tensor_amax.launches({"one": next(iter(CASES[tensor_amax].values()))})))[0].defines
FACT = {"amax": {"registers": 12, "spills": 0, "shared": 0}}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an intact entry of other comments, one of other code, a damaged one, one with two cubins; a temporary file."""
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(tmp_path))
    place = tmp_path / "kernels-v2"
    cache = CubinCache(place)
    text = assemble(Variant("amax.cu", ("IN=float",)))
    told = text.replace("\n", "\n// in other words\n", 3)
    for key, source in (("a" * 64, told), ("b" * 64, text.replace("larger", "smaller", 1)), ("c" * 64, text), ("d" * 64, text)):
        cache.store(key, key.encode())
        cache.store(key, json.dumps(FACT).encode(), FACTS)
        cache.store_source(key, source)
    (damaged,) = place.glob("c*.cubin")
    damaged.write_bytes(b"something else")
    cache.store("d" * 64, b"another")
    (place / ".x.tmp").write_bytes(b"")
    os.utime(next(place.glob("a*.cu")), (0, 0))
    return place


def test_the_inventory_tells_what_is_there(directory: Path) -> None:
    kept = {each.key[0]: each for each in inventory(directory)}
    assert {key: each.current for key, each in kept.items()} == {"a": True, "b": False, "c": True, "d": True, ".": False}
    assert kept["a"].faults == kept["b"].faults == ()
    assert "is not what was stored" in kept["c"].faults[0]
    assert "2 cubins under one key" in kept["d"].faults[0]
    assert "died while it wrote" in kept["."].faults[0]
    assert (kept["a"].source, kept["a"].entries) == ("amax.cu", FACT)


def test_commands_verify_show_and_prune(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify"]) == 1
    assert "5 keys: 3 not intact, 1 made from other sources" in capsys.readouterr().out
    assert main(["cache", "ls"]) == 0
    assert "of other sources" in capsys.readouterr().out
    assert main(["cache", "show", "aaaa", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"] == FACT
    assert main(["cache", "show", "e"]) == 1
    assert main(["cache", "prune", "--json"]) == 0
    assert sorted(key[0] for key in json.loads(capsys.readouterr().out)["removed"]) == [".", "b", "c", "d"]
    assert {path.name[0] for path in directory.iterdir()} == {"a"}
    assert main(["cache", "verify"]) == 0
    capsys.readouterr()
    assert main(["cache", "prune", "--all"]) == 0
    assert not list(directory.iterdir())


def test_facts_that_nobody_can_read_are_told_as_damage(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (facts,) = directory.glob("a*.json")
    for damage in ("{", "[" * 100_000 + "]" * 100_000):
        facts.write_text(damage)
        assert main(["cache", "show", "aaaa", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["entries"], found["faults"]) == ({}, [f"{facts.name} is not what was stored"])


def test_a_cubin_that_its_source_does_not_compile_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Digests see what changed on disk; another cubin under its own digest, only a compilation does."""
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("opfuse.kernels.engine.inventory.ARCHITECTURES", ("sm_90a",))
    cache, variant = CubinCache(tmp_path / "kernels-v2"), Variant("amax.cu", AMAX)
    cubin(variant, "sm_90a", cache)
    (kept,) = inventory(cache.directory)
    assert main(["cache", "verify", "--recompile"]) == 0
    assert "1 key: 0 not intact, 0 made from other sources, which nothing asks for; 1 compiled anew" in capsys.readouterr().out
    for path in cache.directory.glob("*.cubin"):
        path.unlink()
    cache.store(kept.key, b"another")
    assert main(["cache", "verify"]) == 0
    assert main(["cache", "verify", "--recompile", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.rpartition("stale.")[2])
    assert "compiles to something else" in found["faults"][kept.key][0]


@pytest.mark.parametrize("command", [["prune", "--all"], ["prune"], ["ls"], ["verify"], ["show", "a"]], ids=" ".join)
@pytest.mark.parametrize("planted", ["a link", "a link above", "for all to write"])
def test_what_may_not_be_read_is_not_removed_either(
    planted: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody else's directory in place of the cache, with files that are none of opfuse's."""
    foreign, place = tmp_path / "foreign", tmp_path / "cache" / "kernels-v2"
    (foreign / "kernels-v2").mkdir(parents=True)
    place.parent.mkdir()
    if planted == "a link":
        place.symlink_to(foreign)
        kept = foreign / "thesis.txt"
    elif planted == "a link above":
        place.parent.rmdir()
        place.parent.symlink_to(foreign)
        (foreign / "kernels-v2").chmod(0o755)
        kept = foreign / "kernels-v2" / "thesis.txt"
    else:
        place.mkdir()
        place.chmod(0o777)
        kept = place / "thesis.txt"
    kept.write_text("years of work")
    monkeypatch.setenv("OPFUSE_CACHE_DIR", str(place.parent))
    assert main(["cache", *command]) == 3
    assert f"kernel cache {place}: wants a directory of mode 0700 that only you can write or replace" in capsys.readouterr().err
    assert kept.read_text() == "years of work"


def test_what_could_not_be_removed_is_not_told_as_removed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link goes and not what it leads to; a directory that holds something stays."""
    (directory / "z").symlink_to(directory.parent)
    (directory / "y" / "more").mkdir(parents=True)
    (directory / "x").mkdir()
    assert main(["cache", "prune", "--json"]) == 0
    assert {key[0] for key in json.loads(capsys.readouterr().out)["removed"]} == {".", "b", "c", "d", "x", "z"}
    assert {path.name[0] for path in directory.iterdir()} == {"a", "y"}
