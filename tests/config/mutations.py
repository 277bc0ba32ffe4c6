"""Seeded mutations of configuration texts: what a slip of the hand, a merge conflict, or malice would make of one."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"

SEEDS = (
    """version: 1
recipe: {kind: mxfp8, backward_override: dequantized}
pipeline:
  dtype: bfloat16
  ops:
    - {op: rms_norm, size: 256}
    - {op: linear, in_features: 256, out_features: 256, bias: false}
    - {op: gelu}
fusions:
  level: O1
  rules:
    - {use: epilogue, when: {env.arch: ">= 9.0"}}
    - {disable: backward_activation_bias}
    - {name: mine, pattern: [p=basic_linear, gelu, quantize], when: {recipe.kind: [mxfp8, nvfp4], p.in_features: multiple of 32}}
data: {kind: pydoc_topics, context: 16, embedding: 16}
train: {steps: 3, batch_size: 32, learning_rate: 1e-3}
""",
    """version: 1
recipe:
  kind: nvfp4
  disable_rht: true
  nvfp4_4over6: all
pipeline:
  ops:
    - op: make_extra_output
      extra_output: skip
    - op: linear
      in_features: 0x20
      out_features: 32
    - op: add_extra_input
      extra_input: [skip]
    - op: reshape
      shape: [-1, 64]
""",
    CONFIGS.joinpath("custom_fusion.yaml").read_text(),
    """version: 1
recipe: {kind: mxfp8}
parameters: {hidden: 64, times: 2}
fragments:
  mlp:
    - residual: [{op: rms_norm, size: "${hidden}"}, {op: linear, in_features: "${hidden}", out_features: "${out}"}]
pipeline:
  ops:
    - {repeat: "${times}", ops: [{use: mlp, with: {out: 64}}]}
    - {op: linear, in_features: "${hidden}", out_features: 256}
data: {kind: pydoc_topics, context: 4, embedding: 16}
fusions: {rules: [{use: epilogue, expect: {fused: 5}}]}
watch: {every: 10, alarms: {sqnr: 8, saturated: 0.02}}
""",
)

WORDS = (
    *(
        "null",
        "~",
        "true",
        "no",
        "1",
        "-1",
        "0",
        "1e400",
        ".nan",
        "-.inf",
        "9" * 700,
        "0x" + "f" * 600,
        "1_000",
        "2026-01-01",
        '""',
    ),
    *(
        "kind",
        "op",
        "ops",
        "use",
        "name",
        "disable",
        "when",
        "pattern",
        "linear",
        "basic_linear",
        "gelu",
        "mxfp8",
        "custom",
        "none",
        "epilogue",
        "quantize",
    ),
    *(
        "*a",
        "&a 1",
        "!!python/object/apply:os.system [ls]",
        "!!int x",
        "<<: *a",
        "? ",
        ": ",
        "- ",
        "{",
        "}",
        "[",
        "]",
        "{}",
        "[]",
        ",",
        "#",
    ),
    *(
        "|",
        ">",
        "'",
        '"',
        "\\",
        "${hidden}",
        "${",
        "%YAML 1.1",
        "---",
        "...",
        "\t",
        "\r",
        "\x00",
        "\x85",
        "\u2028",
        "\ufeff",
        "\ud800",
        "é",
        "😀",
        "\x1b[31m",
    ),
    *(
        '"\\UFFFFFFFF"',
        '"\\x"',
        '"\\',
        "[" * 40,
        "{a: " * 40,
        "- " * 40,
        "env.recipe",
        "env..arch",
        ".",
        ">= x",
        "multiple of 0",
        "not ",
    ),
)
"""Tokens that mean something to YAML, to a terminal, or to the models."""


VALUES = (
    *(
        "null",
        "true",
        "0",
        "-1",
        "1",
        "3",
        "64",
        "4294967296",
        "1" * 30,
        "0.5",
        "1e-5",
        ".inf",
        ".nan",
        "9.0",
        "'9.0'",
        "text",
        "[]",
        "{}",
    ),
    *(
        "[null]",
        "[1, 2]",
        "[[1]]",
        "{a: 1}",
        "linear",
        "bias",
        "gelu",
        "swiglu",
        "quantize",
        "gated",
        "mxfp8",
        "delayed",
        "nvfp4",
        "custom",
    ),
    *(
        "none",
        "epilogue",
        "linear_add",
        "skip",
        "'>= 3'",
        "'>= x'",
        "multiple of 3",
        "not 3",
        "not null",
        "bfloat16",
        "O0",
    ),
)
"""Values that are well-formed, and right somewhere."""

KEYS = (
    *(
        "kind",
        "op",
        "ops",
        "use",
        "name",
        "disable",
        "when",
        "pattern",
        "emit",
        "priority",
        "size",
        "in_features",
        "bias",
        "shape",
        "scale",
    ),
    *(
        "extra_input",
        "extra_output",
        "env.arch",
        "env.level",
        "env.recipe",
        "recipe.kind",
        "recipe.margin",
        "p.weight.dtype",
        "1",
    ),
    *(
        "p.in_features",
        "quantize.role",
        "chain.p",
        "env.autocast",
        "env.rows_class",
        "fp8_format",
        "backward_override",
        "null",
        "é",
    ),
)
"""Keys that are right somewhere."""


def mutated(rng: random.Random) -> bytes:
    """A text of :data:`SEEDS` after one to four mutations."""
    text = rng.choice(SEEDS)
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(MUTATIONS)(text, rng)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05 and data:
        place = rng.randrange(len(data))
        data = data[:place] + bytes((rng.randrange(256),)) + data[place + 1 :]
    return data


def _place(text: str, rng: random.Random) -> int:
    return rng.randint(0, len(text))


def _insert(text: str, rng: random.Random) -> str:
    place = _place(text, rng)
    return text[:place] + rng.choice(WORDS) + text[place:]


def _delete(text: str, rng: random.Random) -> str:
    place = _place(text, rng)
    return text[:place] + text[place + rng.randint(1, 8) :]


def _replace_word(text: str, rng: random.Random) -> str:
    words = text.split(" ")
    words[rng.randrange(len(words))] = rng.choice((rng.choice(WORDS), rng.choice(words)))
    return " ".join(words)


def _misspell(text: str, rng: random.Random) -> str:
    letters = [i for i, char in enumerate(text) if char.isalpha()] or [0]
    place = rng.choice(letters)
    return text[:place] + rng.choice("abcdefgh") + text[place + 1 :]


def _lines(change: Callable[[list[str], random.Random], object]) -> Callable[[str, random.Random], str]:
    def mutate(text: str, rng: random.Random) -> str:
        lines = text.split("\n")
        change(lines, rng)
        return "\n".join(lines)

    return mutate


def _drop(lines: list[str], rng: random.Random) -> None:
    lines.pop(rng.randrange(len(lines)))


def _double(lines: list[str], rng: random.Random) -> None:
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))


def _indent(lines: list[str], rng: random.Random) -> None:
    place = rng.randrange(len(lines))
    lines[place] = " " * rng.randint(0, 6) + lines[place].lstrip()


def _truncate(text: str, rng: random.Random) -> str:
    return text[: _place(text, rng)]


def _revalue(text: str, rng: random.Random) -> str:
    values = list(re.finditer(r"(?<=: )[^,{}\[\]\n]+|(?<=[\[,] )[^,{}\[\]\n:]+", text))
    if not values:
        return text
    value = rng.choice(values)
    return text[: value.start()] + rng.choice((rng.choice(VALUES), rng.choice(values)[0])) + text[value.end() :]


def _rekey(text: str, rng: random.Random) -> str:
    keys = list(re.finditer(r"[\w.]+(?=:)", text))
    if not keys:
        return text
    key = rng.choice(keys)
    return text[: key.start()] + rng.choice((rng.choice(KEYS), rng.choice(keys)[0])) + text[key.end() :]


MUTATIONS = (
    *(_revalue, _rekey) * 6,
    _insert,
    _delete,
    _replace_word,
    _misspell,
    _lines(_drop),
    _lines(_double),
    _lines(_indent),
    _truncate,
)
