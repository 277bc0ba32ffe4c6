"""The section of docs/performance.md on pre-training, from what ``python -m benchmarks.pretrain --table`` wrote."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.pretrain import FILE, LAST, PLAIN, WARM
from docs.tables import table

Run = Mapping[str, Any]

HEADING = "A 1.1 B Llama"
OWN = frozenset({"recipe", "seed", "tokens", "every", "validation_tokens"})
"""Settings in which runs may differ whose speeds are compared."""

LATER = {"optimizer": "adamw"}
"""Settings that records may be older than, as these runs had them."""

WIDTH = 125
"""Characters of a line of text."""

ROWS = 8
"""Of the table of validation losses."""

TEXT = """\
By `{script}` on {versions}. A Llama of transformers, {layers} layers {hidden} wide, is trained from random
weights. The text is what the machine had: sources and pages of Python packages, {train_files} files without copies,
{train_bytes} MB, {train_tokens} M tokens of a vocabulary of {words} that was trained on them. {held_out_files} more files
are held out for validation. Weights are bf16, and AdamW updates fp32 masters. A step has {step_tokens} tokens, in sequences of
{sequence} and in micro-batches. Converted by `fuse_(pack=True)`, or left in bf16, layers are compiled one by one.

Runs with one seed begin with the same weights and read the same tokens in the same order. Losses are nats per token; training:
the mean over the last {last:.0f} % of the steps; validation: after the last step. Speed is that of the median step, without
validations and without the first {warm} steps of a process; *× bf16* is that over bf16 with the same vocabulary, loss and
micro-batch. The peak is that of memory on the GPU, with weights, masters and states of AdamW. Loss *plain* is that of
transformers, *compiled* the same under torch.compile, *fused* that of `fuse_(loss="fused")`.

"""

IN_8_BITS = """\
In rows with *adamw8bit*, torchao's AdamW with moments in 8 bits updates the bf16 weights themselves, rounded at random; they have
no masters.

"""

LIMITS = """\
What this does not show: a run reads {ratio} tokens for each parameter of the model, where models that people use have read
20 and more, so that losses which agree here may part later. It is one model with one choice of hyper-parameters and
{seeds}. The text is source code and documentation; near copies of files that are held out may be among those that
were trained on, for all recipes alike. No downstream task was tried.
"""


def record() -> Mapping[str, Any] | None:
    """The file of results, if there is one."""
    found: Mapping[str, Any] | None = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else None
    return found


def spaced(number: float) -> str:
    """32 768 for 32768."""
    return f"{number:,.0f}".replace(",", " ")


def setup(run: Run) -> tuple[tuple[str, Any], ...]:
    """What runs share whose speeds are compared."""
    return tuple((name, value) for name, value in {**LATER, **run["settings"]}.items() if name not in OWN)


def wrapped(text: str) -> str:
    """Paragraphs in lines that are no longer than others."""
    parts = text.strip().split("\n\n")
    return "\n\n".join(textwrap.fill(part, WIDTH, break_long_words=False, break_on_hyphens=False) for part in parts)


def beside(run: Run, runs: Sequence[Run], figure: str) -> float | None:
    """A figure over the median of that in bf16; None where one of both is missing."""
    same = [each for each in runs if setup(each) == setup(run) and each["settings"]["recipe"] == PLAIN]
    plain = [each["figures"][figure] for each in same if each["figures"][figure]]
    own = run["figures"][figure]
    return own / statistics.median(plain) if own and plain else None


def shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plain_adamw(run: Run) -> bool:
    """Whether its optimizer is the one that the text tells of first."""
    return {**LATER, **run["settings"]}["optimizer"] == LATER["optimizer"]


def recipe_of(run: Run) -> str:
    """With a word for products that are emulated."""
    return f"{run['settings']['recipe']}{' (emulated)' if run['products'] == 'emulated' else ''}"


def rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """A row for each run."""
    for run in runs:
        settings, figures = run["settings"], run["figures"]
        tokens = f"{figures['tokens'] / 1e6:.1f}" + ("" if run["finished"] else f" of {settings['tokens'] / 1e6:.1f}")
        peak = beside(run, runs, "peak GiB")
        yield (
            f"{run['parameters'] / 1e9:.2f}",
            f"{spaced(settings['vocabulary'])}, {settings['loss']}, {spaced(settings['micro'] * settings['sequence'])}"
            + ("" if plain_adamw(run) else f", {settings['optimizer']}"),
            recipe_of(run),
            str(settings["seed"]),
            tokens,
            shown(run["epochs"], 2),
            shown(figures["training loss"], 3),
            shown(figures["validation loss"], 3),
            shown(figures["bits per byte"], 3),
            "" if figures["tokens per second"] is None else spaced(figures["tokens per second"]),
            shown(beside(run, runs, "tokens per second"), 2),
            shown(figures["peak GiB"], 1) + ("" if peak is None else f", {100 * peak:.0f} % of bf16"),
        )


HEAD = (
    "B parameters",
    "vocabulary, loss, tokens of a micro-batch",
    "recipe",
    "seed",
    "M tokens",
    "epochs",
    "training loss",
    "validation loss",
    "bits per byte",
    "tokens/s",
    "× bf16",
    "peak, GiB",
)


def longest(runs: Sequence[Run]) -> list[Run]:
    """The finished runs over as many tokens as any, whose losses are compared: of one setup, that with the most runs."""
    done = [run for run in runs if run["finished"] and run["validation"]["step"]]
    most = max((run["settings"]["tokens"] for run in done), default=0)
    groups: dict[Any, list[Run]] = {}
    for run in done:
        if run["settings"]["tokens"] == most:
            groups.setdefault((setup(run), tuple(run["validation"]["step"])), []).append(run)
    return max(groups.values(), key=len, default=[])


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """In the order of seeds."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["settings"]["seed"]):
        found.setdefault(recipe_of(run), []).append(run)
    return found if PLAIN not in found else {PLAIN: found.pop(PLAIN), **found}


def curves(runs: Sequence[Run]) -> str:
    """Validation losses as training goes on, recipes across, seeds beside each other."""
    recipes = by_recipe(runs)
    tokens = runs[0]["validation"]["tokens"]
    length = min(ROWS, len(tokens))
    at = dict.fromkeys(round(i * (len(tokens) - 1) / max(1, length - 1)) for i in range(length))
    body = (
        (
            f"{tokens[i] / 1e6:.1f}",
            *(" / ".join(shown(run["validation"]["loss"][i], 3) for run in each) for each in recipes.values()),
        )
        for i in at
    )
    seeds = " / ".join(str(seed) for seed in sorted({run["settings"]["seed"] for run in runs}))
    return f"Validation loss after so many M tokens, by seed ({seeds}):\n\n" + table(("M tokens", *recipes), body)


def apart(runs: Sequence[Run]) -> str:
    """By how much losses at the end differ from bf16 with the same seed, and bf16 between seeds; empty without bf16."""
    recipes = by_recipe(runs)
    plain = {run["settings"]["seed"]: run["figures"]["validation loss"] for run in recipes.pop(PLAIN, [])}
    told = []
    for recipe, each in recipes.items():
        pairs = [(run["figures"]["validation loss"], plain.get(run["settings"]["seed"])) for run in each]
        found = [100 * (own / other - 1) for own, other in pairs if other is not None]
        mean = f" (mean {statistics.mean(found):+.2f} %)" if len(found) > 1 else ""
        told += [f"{recipe} {', '.join(f'{each:+.2f} %' for each in found)}{mean}"] if found else []
    if not told:
        return ""
    spread = 100 * (max(plain.values()) / min(plain.values()) - 1)
    seeds = f" Between seeds bf16 itself differs by {spread:.2f} %." if len(plain) > 1 else ""
    return f"Validation loss at the end beside bf16 with the same seed: {'; '.join(told)}.{seeds}"


def section(record: Mapping[str, Any]) -> str:
    """The text and tables of a file of results."""
    runs, about, versions = record["runs"], record["corpus"], dict(record["versions"])
    compared = longest(runs)
    main = (compared or runs)[0]
    settings, number = main["settings"], len({run["settings"]["seed"] for run in compared or runs})
    device = versions.pop("device")
    head = TEXT.format(
        script=record["script"],
        versions=f"one {device}, with {', '.join(f'{name} {version}' for name, version in versions.items())}",
        layers=settings["layers"],
        hidden=settings["hidden"],
        **{f"{part}_files": spaced(about[part]["files"]) for part in ("train", "held_out")},
        train_bytes=spaced(about["train"]["bytes"] / 1e6),
        train_tokens=spaced(about["train"]["tokens"] / 1e6),
        words=spaced(about["words"]),
        step_tokens=spaced(settings["step_tokens"]),
        sequence=settings["sequence"],
        last=100 * LAST,
        warm=WARM,
    )
    ratio = f"{main['figures']['tokens'] / main['parameters']:.2g}"
    limits = LIMITS.format(ratio=ratio, seeds=f"{number} seed{'s' if number > 1 else ''}")
    losses = [curves(compared), wrapped(apart(compared))] if compared else []
    head += "" if all(map(plain_adamw, runs)) else IN_8_BITS
    return "\n\n".join(filter(None, (wrapped(head), table(HEAD, rows(runs)), *losses, wrapped(limits))))
