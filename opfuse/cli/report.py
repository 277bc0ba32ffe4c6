"""``opfuse report``: one HTML file of a configuration, a run or a trace; or a trace as trace events for Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import opfuse
from opfuse.cli.doctor import environment, machine
from opfuse.cli.explain import explained
from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import written
from opfuse.config import Config, Train, load
from opfuse.errors import OutputError, TraceError, describe, number_of
from opfuse.inspect.alike import alike, counted, starred
from opfuse.inspect.charts import PageChart, PageEvents, Points
from opfuse.inspect.page import STATUSES, Cell, Page, PageBytes, PageSection, PageTable
from opfuse.inspect.page_graphs import pipeline_folds
from opfuse.inspect.page_training import (
    LINES,
    PageCharts,
    TrainedRun,
    trained_runs,
    training_charts,
    training_facts,
    values_section,
)
from opfuse.inspect.perfetto import trace_events
from opfuse.inspect.trace import SUFFIX, PlanLine, StepLine, Trace, read
from opfuse.runtime.plans.written import unsealed
from opfuse.train.checkpoints import CONFIGURATION
from opfuse.train.files import REPORT, VALUES
from opfuse.train.loop import rate
from opfuse.train.runs import configuration_of

Row = tuple[Cell, ...]


def report(subject: Path, *, out: Path | None, format: str, as_json: bool) -> None:
    """Write the page to ``out``, by default beside where the command runs, under the name of what it tells of."""
    suffix, made = FORMATS[format]
    path = out or Path(f"{subject.resolve().stem}{suffix}")
    written(path, made(subject).encode(), "name another with --out")
    echo_json({"wrote": str(path)}) if as_json else echo(f"wrote {path}")


def page_of(subject: Path) -> Page:
    """The report on a directory of ``opfuse run``, a trace or a directory of traces, or a configuration."""
    if subject.is_dir() and (subject / REPORT).exists():
        return _of_config(configuration_of(subject), subject)
    if subject.is_dir() and ((subject / CONFIGURATION).exists() or not any(subject.glob(f"*{SUFFIX}"))):
        raise _no_subject(subject)
    if subject.suffix == SUFFIX or subject.is_dir():
        return _of_traces(subject, read(subject))
    return _of_config(load(subject), None)


FORMATS: Mapping[str, tuple[str, Callable[[Path], str]]] = {
    "html": (".html", lambda subject: page_of(subject).html()),
    "perfetto": (".perfetto.json", lambda subject: json.dumps(trace_events(read(subject)))),
}
"""Suffixes of files, and what makes their text."""


def _no_subject(directory: Path) -> OutputError:
    """What a directory lacks that is neither one of a run that has ended nor one of traces."""
    wanted = "a directory of opfuse run, one of traces, a trace or a configuration"
    got, cure = f"a directory without {REPORT} and *{SUFFIX}", "name what opfuse run or OPFUSE_TRACE wrote to, or a configuration"
    if (directory / CONFIGURATION).exists():
        got, cure = f"a run without {REPORT}, which has not ended", "let it end; --resume has opfuse run go on with it"
    elif files := sorted(directory.glob("*.yaml")):
        cure = f"name a file in it: opfuse report {files[0]}"
    return OutputError(describe(str(directory), wanted=wanted, got=got, cure=cure))


# -- what every subject has --------------------------------------------------------------------------------------------------


def _fusions(outcomes: Sequence[Mapping[str, Any]]) -> PageSection:
    """Which rules fused how often, and what became of each at its places."""
    numbers = Counter((each["direction"], each["rule"], each["status"]) for each in outcomes)
    fused: list[Row] = [(side, rule, number) for (side, rule, status), number in numbers.items() if status == "fused"]
    first = sorted(outcomes, key=lambda each: STATUSES.index(each["status"]))
    rows = [(each["direction"], each["rule"], each["status"], " ".join(each["ops"]), _why(each)) for each in first]
    places = _numbered("Rules, place by place", ("pass", "rule", "outcome", "nodes", "why"), rows, by="outcome")
    return PageSection("Fusions", [PageTable("What fused", ("pass", "rule", "places"), fused), places])


def _why(outcome: Mapping[str, Any]) -> str:
    if by := outcome.get("by"):
        return f"by {by}"
    return f"{outcome['guard']}: wants {outcome['wanted']}, got {outcome['got']}" if "guard" in outcome else ""


def _numbered(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]], by: str) -> PageTable:
    """A table of distinct rows, with how often there is each, where one is there more than once."""
    found = Counter(rows)
    if all(number == 1 for number in found.values()):
        return PageTable(title, head, [*found], by)
    counted_rows: list[Row] = [(*row[:-1], number, row[-1]) for row, number in found.items()]
    return PageTable(title, (*head[:-1], "places", head[-1]), counted_rows, by)


def _products(pipelines: Sequence[Mapping[str, Any]]) -> PageSection:
    rows = [
        (product["op"], product["product"], product["left"] or "", product["right"] or "", product["status"], product["reason"])
        for pipeline in pipelines
        for product in pipeline["products"]
    ]
    table = _numbered("", ("op", "product", "left", "right", "runs", "why"), rows, by="runs")
    return PageSection("Products", [table], "Which matrix products run natively on this device.")


def _pipelines(pipelines: Sequence[Mapping[str, Any]]) -> PageSection:
    note = "Nodes in the order in which they run. A rule runs the nodes below its name as one. Alike pipelines share a line."
    return PageSection("Pipelines", pipeline_folds(pipelines), note)


def _environment(rows: Iterable[tuple[str, Any]]) -> PageSection:
    return PageSection("Environment", [PageTable("", ("what", "value"), [(name, str(value)) for name, value in rows])])


# -- of a configuration, or of its run ---------------------------------------------------------------------------------------


def _of_config(config: Config, run: Path | None) -> Page:
    explanation = explained(config).to_dict()
    outcomes = [*explanation["forward"], *(outcome for outcome in explanation["backward"] if outcome["direction"] != "joint")]
    found, runs, values = ({}, [], []) if run is None else _of_run(run)
    facts: dict[str, Cell] = {
        "configuration": config.path,
        "recipe": explanation["recipe"],
        "runs": f"{explanation['backend']}: {explanation['reason']}",
        "saved for backward": PageBytes(explanation["saved_bytes"]),
        **training_facts(runs),
    }
    sections = [
        *([_run_section(found, runs)] if found else ()),
        *values_section(values),
        _fusions(outcomes),
        _pipelines(explanation["pipelines"]),
        _products(explanation["pipelines"]),
        _memory(explanation["saved_bytes_by_override"], explanation["saved"]),
        _environment([*machine().items(), *environment().items()]),
    ]
    name = config.name if run is None else run.resolve().name
    return Page(f"opfuse {opfuse.__version__}: {name}", facts, sections)


def _memory(by_override: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> PageSection:
    """What is saved for the backward pass, in all and tensor by tensor."""
    bytes_of: list[Row] = [
        (name, PageBytes(cell) if isinstance(cell, int) else None, "" if isinstance(cell, int) else f"refused: {cell['refused']}")
        for name, cell in by_override.items()
    ]
    rows = [tuple(cell(row) for cell in _SAVED.values()) for row in saved]
    return PageSection(
        "Memory",
        [
            PageTable("Bytes saved, by backward override", ("override", "bytes", ""), bytes_of),
            PageTable("Saved for the backward pass", tuple(_SAVED), rows, by=""),
        ],
    )


_SAVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "op": itemgetter("op"),
    "name": itemgetter("name"),
    "format": itemgetter("format"),
    "planes": lambda each: "+".join(each["usages"]),
    "shape": lambda each: "x".join(map(str, each["shape"])),
    "bytes": lambda each: PageBytes(each["bytes"]),
    "memory": itemgetter("memory"),
}
"""Columns of the table of saved tensors, and what stands in them."""


def _of_run(run: Path) -> tuple[dict[str, Any], list[TrainedRun], list[dict[str, Any]]]:
    """What ``opfuse run`` found, its steps, and what casts did meanwhile. TraceError if the files are others."""
    try:
        found = unsealed((run / REPORT).read_text(encoding="utf-8"))
        lines = (run / VALUES).read_text(encoding="utf-8").splitlines() if (run / VALUES).exists() else []
        values = [unsealed(line) for line in lines]
        runs = [*_runs(found, sorted({value["step"] for value in values}))]
        _run_section(found, runs), values_section(values)
        return found, runs, values
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        cure = "write it anew: opfuse run CONFIG"
        raise TraceError(describe(str(run), wanted="a run of opfuse run", got=str(error), cure=cure)) from None


def _runs(found: Mapping[str, Any], looked_at: Sequence[int]) -> Iterator[TrainedRun]:
    """The steps of both runs, the first of which may have been looked at."""
    settings = Train.model_validate(found["settings"])
    every = looked_at[1] - looked_at[0] if len(looked_at) > 1 else settings.steps if looked_at else 0
    for curve, measured in zip(found["curves"], found.get("measured", ((), ()))):
        known = {step: (ms, memory, peak) for step, ms, memory, peak in measured}
        steps = {}
        for step, loss in enumerate(curve["losses"], 1):
            ms, memory, peak = known.get(step, (None, 0, 0))
            figures = {"loss": loss, "learning_rate": settings.learning_rate * rate(step - 1, settings)}
            own = {"step": step, "seconds": 0.0, "ms": ms, "memory": memory, "peak": peak, "figures": figures}
            steps[step] = StepLine(record="step", **own)
        yield TrainedRun(curve["label"], steps, every)
        every = 0


_FOUND = {
    "loss_last": "training loss, mean of the last steps",
    "baseline_loss_last": "the same without a recipe",
    "validation_loss": "validation loss",
    "baseline_validation_loss": "the same without a recipe",
    "run_seconds": "seconds, evaluations included",
    "device": "device",
    "seed": "seed",
}
"""Figures of a run, and what they are."""


def _run_section(found: Mapping[str, Any], runs: Sequence[TrainedRun]) -> PageSection:
    """Figures over steps, beside those without a recipe."""
    validation: dict[str, Points] = {each["label"]: [(at, loss) for at, loss in each["validation"]] for each in found["curves"]}
    charts = training_charts(runs)
    charts.insert(1, PageChart("Validation loss", validation))
    figures = [(told, found.get(name)) for name, told in _FOUND.items()]
    cache = [(f"plan cache: {name.replace('_', ' ')}", value) for name, value in found["plan_cache"].items()]
    note = "Losses are in nats; the run without a recipe starts from the same weights and has the same batches."
    return PageSection("Training", [PageCharts(charts), PageTable("", ("figure", "value"), [*figures, *cache])], note)


# -- of traces ---------------------------------------------------------------------------------------------------------------


def _of_traces(subject: Path, traces: tuple[Trace, ...]) -> Page:
    first, runs = traces[0].process, trained_runs(traces)
    plans = [(trace, plan) for trace in traces for plan in trace.plans]
    by_key = {(plan.pipeline, plan.key): plan for _, plan in plans if plan.plan is not None}
    pipelines = [{**(plan.plan or {}), "name": plan.pipeline} for plan in by_key.values()]
    facts: dict[str, Cell] = {
        "trace": str(subject),
        "command": " ".join(first.command),
        "ranks": f"{len({trace.process.rank for trace in traces})} of {first.ranks}",
        "device": first.device,
        **training_facts(runs),
    }
    casts = [line.model_dump() for trace in traces for line in trace.casts if trace.process.rank == first.rank]
    note = "As the training script logged it. Steps whose casts are looked at run op by op, so they are slower."
    if len(runs) > LINES:
        note += f" Of {len(runs)} ranks the first {LINES} are drawn."
    sections = [
        *([PageSection("Training", [PageCharts(training_charts(runs))], note)] if runs else ()),
        *values_section(casts),
        *_modules(traces),
        _fusions([outcome for plan in by_key.values() for outcome in plan.outcomes]),
        _pipelines(pipelines),
        _products(pipelines),
        _timeline(traces, plans),
        _environment([*first.versions.items(), *first.environment.items(), *first.settings.items()]),
    ]
    return Page(f"opfuse {first.versions.get('opfuse', '')}: {subject.resolve().name}", facts, sections)


def _modules(traces: Sequence[Trace]) -> Iterator[PageSection]:
    """What ``fuse_`` made of the model that was watched."""
    rows = dict.fromkeys(row for trace in traces for model in trace.models for row in model.modules)
    if rows:
        shown = [(*row[:3], row[4], row[3].removeprefix(f"{row[4]}: ")) for row in rows]
        table = PageTable("", ("module", "class", "recipe", "is", "becomes, or why not"), shown, by="is")
        yield PageSection("Modules", [table], "What fuse_ made of each module; layers that are alike share a line.")


def _timeline(traces: Sequence[Trace], plans: Sequence[tuple[Trace, PlanLine]]) -> PageSection:
    """When plans were made, what that took, and why."""
    ends = [plan.seconds for _, plan in plans] + [
        line.seconds for trace in traces for line in (*trace.steps, trace.counts) if line
    ]
    total = max(ends, default=0.0) or 1.0
    rows: list[Row] = []
    for same in alike(plans, lambda pair: (starred(pair[1].pipeline), pair[0].process.rank)):
        times = [(plan.seconds - plan.ms / 1e3, plan.ms / 1e3) for _, plan in same]
        name = counted([*dict.fromkeys(plan.pipeline for _, plan in same)])
        label = f"{number_of(len(same), 'plan')} of {name} between {times[0][0]:.1f} and {times[-1][0]:.1f} s of {total:.1f} s"
        ms = sum(plan.ms for _, plan in same)
        rows.append((name, same[0][0].process.rank, PageEvents(times, total, label), len(same), f"{ms:.1f} ms"))
    each: list[Row] = [
        (f"{plan.seconds:.2f}", trace.process.rank, plan.pipeline, plan.call, f"{plan.ms:.1f}", plan.key, plan.why)
        for trace, plan in plans
    ]
    counts: list[Row] = [
        (trace.process.rank, row.pipeline, row.plans, row.hits, row.misses)
        for trace in traces
        for row in (trace.counts.pipelines if trace.counts is not None else ())
    ]
    return PageSection(
        "Plans over time",
        [
            PageTable("Timeline", ("pipeline", "rank", f"0 to {total:.1f} s", "plans", "took"), rows),
            PageTable("Plans, one by one", ("s", "rank", "pipeline", "call", "ms", "key", "why"), each, by=""),
            PageTable("Cache", ("rank", "pipeline", "plans", "hits", "misses"), counts),
        ],
        "A plan is made at a call whose key is new; a run that is warm makes none.",
    )
