"""Runs beside each other: what differs of two reports, traces or configurations, and from which step on their losses do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from opfuse.config import Config, Train, load
from opfuse.config.values import values_of
from opfuse.errors import OutputError, TraceError, describe
from opfuse.inspect.trace import SUFFIX, Trace, read
from opfuse.keys import plain
from opfuse.runtime.plans.written import unsealed
from opfuse.train.checkpoints import CONFIGURATION, FOLDER
from opfuse.train.comparison import data_of
from opfuse.train.data import corpus
from opfuse.train.files import REPORT
from opfuse.train.report import recipe_fields


@dataclass(frozen=True)
class Fact:
    """A value of a run, and where it came from, if that is known."""

    value: Any
    source: str | None = None


@dataclass(frozen=True)
class KnownRun:
    """What is known of a run. facts: by dotted name, in order. losses: by step, of the run under its recipe."""

    path: Path
    facts: dict[str, Fact]
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FactDifference:
    """A fact that two runs do not share."""

    name: str
    old: Fact
    new: Fact

    def __str__(self) -> str:
        sources = [f"{fact.source}" for fact in (self.old, self.new) if fact.source]
        same = self.old.source == self.new.source
        return f"{self.name}: {self.old.value!r} -> {self.new.value!r}" + (
            "" if same or not sources else f" ({' -> '.join(sources)})"
        )


@dataclass(frozen=True)
class Divergence:
    """The first step, counted from 1, in which the losses of two runs are not equal bit for bit."""

    step: int
    old: float
    new: float

    @property
    def relative(self) -> float:
        """The new loss over the old one, minus 1."""
        return self.new / self.old - 1

    def __str__(self) -> str:
        return f"losses differ from step {self.step} on: {self.old!r} and {self.new!r}, {self.relative:+.2e}"


NOTHING = Fact("nothing")


def known_run(path: str | Path) -> KnownRun:
    """What ``opfuse run`` left in a directory, a report, a trace or a directory of them, or a configuration. TraceError for
    anything else.
    """
    place = Path(path)
    report = place / REPORT if place.is_dir() else place
    if report.name == REPORT and report.exists():
        return _of_report(report)
    if place.suffix == SUFFIX or (place.is_dir() and any(place.glob(f"*{SUFFIX}"))):
        traces = read(place)
        return KnownRun(place, dict(_of_trace(traces[0])), dict(_losses(traces)))
    if place.suffix in (".yaml", ".yml") or not place.exists():
        config = load(path)
        return KnownRun(Path(config.path), {each.path: Fact(plain(each.value), each.source) for each in values_of(config)})
    cure = "name a directory of `opfuse run`, a trace of OPFUSE_TRACE, or a configuration"
    raise TraceError(describe(str(path), wanted="a run", got="something else", cure=cure))


def configuration_of(directory: Path) -> Config:
    """The configuration of a run that has ended. TraceError if the report is of another one; ConfigError if it is none."""
    config = load(directory / CONFIGURATION)
    try:
        of = unsealed((directory / REPORT).read_text(encoding="utf-8")).get("config_sha256")  # earlier reports have none
    except (OSError, ValueError, AttributeError) as error:
        raise _no_report(directory / REPORT, error) from None
    if of not in (None, config.sha256):
        wanted, cure = "the configuration that the run had", "put it back, or write the run anew: opfuse run CONFIG"
        raise TraceError(describe(config.path, wanted=wanted, got="another text", cure=cure))
    return config


def _no_report(path: Path, error: Exception) -> TraceError:
    got, cure = f"{type(error).__name__}: {error}", "write it anew: opfuse run CONFIG"
    return TraceError(describe(str(path), wanted="a report of opfuse run", got=got, cure=cure))


def repeats(directory: Path, config: Config, settings: Train, device: torch.device) -> bool:
    """Whether a run of ``config`` would repeat the one in ``directory``: it has ended, and each of its values is had again.

    False where there is none. OutputError if there is another one, whose results would be lost.
    """
    text, fields = corpus(data_of(config), config.folder), recipe_fields(config.recipe)
    asked = {"config_sha256": config.sha256, "data": {"sha256": text.sha256}, "recipe_fields": fields, "device": device.type}
    decided = _decisive({**asked, "steps": settings.steps, "seed": settings.seed})
    try:
        report = unsealed((directory / REPORT).read_text(encoding="utf-8"))
        found = next((f"another {name}" for name, value in _decisive(report).items() if decided[name] != value), None)
        if found is None:
            return True
    except FileNotFoundError:
        if not any((directory / FOLDER).glob("*.pt")):
            return False
        found = "one that has not ended"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        found = f"a {REPORT} that is none"
    wanted, got = "a directory without an earlier run, or with the same", found
    goes_on = "go on with the run there with --resume, " if found.startswith("one") else ""
    cure = f"name another with --out, {goes_on}or replace it with --force"
    raise OutputError(describe(str(directory), wanted=wanted, got=got, cure=cure))


def _decisive(report: Mapping[str, Any]) -> dict[str, Any]:
    """Of a report what decides the values of its run. The fields of a recipe may come from variables."""
    return {
        "configuration": report["config_sha256"],
        "text": report["data"]["sha256"],
        "recipe": report["recipe_fields"],
        "number of steps": report["steps"],
        "seed": report["seed"],
        "device": report["device"].partition(":")[0],
    }


def _of_report(path: Path) -> KnownRun:
    try:
        report = unsealed(path.read_text(encoding="utf-8"))
        facts = dict(_report_facts(report))
        return KnownRun(path.parent, facts, dict(enumerate(report["curves"][0]["losses"], 1)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _no_report(path, error) from None


def _report_facts(report: dict[str, Any]) -> Iterator[tuple[str, Fact]]:
    for name in ("recipe", "dtype", "device", "backend", "steps", "seed"):
        yield name, Fact(report[name])
    for section, name in (("recipe", "recipe_fields"), ("train", "settings"), ("data", "data"), ("versions", "versions")):
        yield from ((f"{section}.{key}", Fact(value)) for key, value in report[name].items())
    for section in ("environment", "settings"):
        values = report.get("process", {}).get(section, {})
        # Of torch's own generator a run takes nothing: its seed is the one above, and that one another in each process.
        yield from ((f"{section}.{key}", Fact(value)) for key, value in values.items() if (section, key) != ("settings", "seed"))
    for row in report["fusion_counts"]:
        yield f"fusions.{row['direction']}.{row['rule']}", Fact(row["count"])
    for number, plan in enumerate(report.get("plans", ()), 1):
        yield from ((f"plan {number}.{leaf['path']}", Fact(leaf["value"], leaf["source"])) for leaf in plan["leaves"])


def _of_trace(trace: Trace) -> Iterator[tuple[str, Fact]]:
    process = trace.process
    yield "device", Fact(process.device)
    for section in ("versions", "environment", "settings"):
        yield from ((f"{section}.{key}", Fact(value)) for key, value in getattr(process, section).items())
    for number, plan in enumerate(trace.plans, 1):
        fused = [outcome["rule"] for outcome in plan.outcomes if outcome["status"] == "fused"]
        yield f"plan {number}.fusions", Fact(fused)
        yield from ((f"plan {number}.{leaf.path}", Fact(leaf.value, leaf.source)) for leaf in plan.leaves)


def _losses(traces: Sequence[Trace]) -> Iterator[tuple[int, float]]:
    """What the first rank logged as ``loss``; of a step that two processes made, that of the later one comes last."""
    lines = (line for trace in traces if trace.process.rank == traces[0].process.rank for line in trace.steps)
    yield from ((line.step, line.figures["loss"]) for line in lines if "loss" in line.figures)


def differences(old: KnownRun, new: KnownRun) -> list[FactDifference]:
    """The facts that two runs do not share, in order; where one value is in several plans, in the first of them alone."""
    found: list[FactDifference] = []
    seen: set[str] = set()
    for name in {**old.facts, **new.facts}:
        left, right = old.facts.get(name, NOTHING), new.facts.get(name, NOTHING)
        what = name.partition(".")[2] if name.startswith("plan ") else name
        if left.value != right.value and what not in seen:
            seen.add(what)
            found.append(FactDifference(name, left, right))
    return found


def divergence(old: KnownRun, new: KnownRun) -> Divergence | None:
    """Where losses part; None if they are equal in all steps that both have."""
    pairs = ((step, old.losses[step], new.losses[step]) for step in sorted(old.losses.keys() & new.losses.keys()))
    return next((Divergence(*each) for each in pairs if each[1] != each[2]), None)
