"""Mutated configuration files end in findings with a place, never in anything else."""

import random
from collections import Counter

import pytest

from opfuse.config import Finding
from opfuse.config.load import checked
from opfuse.errors import ConfigError
from tests.config.mutations import SEEDS, mutated


def findings(data: bytes) -> tuple[Finding, ...]:
    try:
        return checked(data, "mutant.yaml")
    except ConfigError as error:
        return error.findings or pytest.fail("an error without findings")


def outcome(data: bytes) -> str:
    """``ok``, or the code of the first finding, all of which have a line and a column inside the file and a message."""
    lines = data.decode("utf-8", "replace").splitlines() or [""]
    found = findings(data)
    for finding in found:
        assert 1 <= finding.span.line <= len(lines) + 1
        assert finding.span.column >= 1
        assert finding.message
        assert str(finding).startswith(f"mutant.yaml:{finding.span.line}:{finding.span.column}: error[{finding.code}]: ")
        str(finding).encode()
    return found[0].code if found else "ok"


def outcomes(seeds: range) -> Counter[str]:
    return Counter(outcome(mutated(random.Random(seed))) for seed in seeds)


@pytest.mark.parametrize("text", SEEDS)
def test_r15_the_seeds_are_valid(text):
    assert outcome(text.encode()) == "ok"


def test_r15_mutated_files_300():
    seen = outcomes(range(300))
    assert len(seen) >= 8, seen
    assert 0 < seen["ok"] < 100, "some mutants should stay valid, most should not"


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(10))
def test_r15_mutated_files_10000(tens):
    outcomes(range(1000 + tens * 1000, 2000 + tens * 1000))


OPS = "version: 1\nrecipe: {kind: none}\npipeline: {ops: "


def nested(inside: str, around: str, times: int) -> str:
    """The entries of a pipeline, and its end: blocks in blocks."""
    for _ in range(times):
        inside = f"[{around.format(inside)}]"
    return inside + "}"


def fragments(first: str, later: str, number: int) -> str:
    """A file whose fragments use the one before them."""
    names = [f"f{i}" for i in range(number)]
    made = [first, *(later.replace("%s", name) for name in names)]
    return "".join(["fragments:\n", *(f"  {name}: {ops}\n" for name, ops in zip(names, made)), OPS, f"[{{use: {names[-1]}}}]}}"])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "{a: " * 50_000,
        "- " * 100_000,
        "&a " * 60_000,
        '"\\UFFFFFFFF": 1',
        '"\\uD800": 1',
        "version: 1\n" + "".join(f"key{i}: 1\n" for i in range(1_500)),
        "a: 1\n" * 4_000,
        pytest.param("version: 1\n" + "".join(f"many{i}: 1\n" for i in range(15_000)), marks=pytest.mark.slow),
        pytest.param("many: 1\n" * 40_000, marks=pytest.mark.slow),
        "x" * 300_000,
        "version: " + "9" * 100_000,
        "recipe: {kind: " + "x" * 200_000 + "}",
        "a: &a [x, x, x, x]\n" + "".join(f"b{i}: &b{i} [*a, *a, *a]\n" for i in range(2_000)),
        OPS + nested("[]", "{{repeat: 200, ops: {}}}", 20),
        OPS + nested("[{residual: []}]", "{{repeat: 200, ops: {}}}", 20),
        OPS + "[{repeat: 1000000000000, ops: []}]}",
        fragments("[]", "[{use: %s}, {use: %s}]", 40),
        "parameters: {a: 4}\n" + fragments("[{op: gelu}]", "[{use: %s, with: {a: [" + "'${a}', " * 10 + "]}}]", 10),
        "train: {seed: 0o" + "7" * 6_000 + "}",
        OPS + "[{op: linear, in_features: 0x" + "f" * 5_000 + ", out_features: 4}]}",
        "",
        "\n\n",
        "# nothing\n",
        "null",
        "5",
        "[]",
        "\ufeffversion: 1",
    ],
    ids=lambda text: repr(text[:12]),
)
def test_r15_hostile_files(text):
    assert outcome(text.encode("utf-8", "surrogatepass")) != "ok"
