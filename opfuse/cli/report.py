"""``opfuse report``: one HTML file of a configuration, a run or a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import opfuse
from opfuse.cli.doctor import environment, machine
from opfuse.cli.explain import explained
from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import written
from opfuse.config import Config, load
from opfuse.errors import OutputError, TraceError, describe
from opfuse.inspect.page import Page, PageTable, outcome_table, product_table, value_table
from opfuse.inspect.trace import SUFFIX, Trace, read
from opfuse.runtime.plans.written import unsealed
from opfuse.train.checkpoints import CONFIGURATION
from opfuse.train.files import REPORT, VALUES
from opfuse.train.runs import configuration_of


def report(subject: Path, *, out: Path | None, as_json: bool) -> None:
    """Write the page to ``out``, by default beside where the command runs, under the name of what it tells of."""
    made = page_of(subject)
    path = out or Path(f"{subject.resolve().stem}.html")
    written(path, made.html().encode(), "name another with --out")
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


def _no_subject(directory: Path) -> OutputError:
    """What a directory lacks that is neither one of a run that has ended nor one of traces."""
    wanted = "a directory of opfuse run, one of traces, a trace or a configuration"
    got, cure = f"a directory without {REPORT} and *{SUFFIX}", "name what opfuse run or OPFUSE_TRACE wrote to, or a configuration"
    if (directory / CONFIGURATION).exists():
        got, cure = f"a run without {REPORT}, which has not ended", "let it end; --resume has opfuse run go on with it"
    elif files := sorted(directory.glob("*.yaml")):
        cure = f"name a file in it: opfuse report {files[0]}"
    return OutputError(describe(str(directory), wanted=wanted, got=got, cure=cure))


def _of_config(config: Config, run: Path | None) -> Page:
    explanation = explained(config).to_dict()
    facts: dict[str, Any] = {
        "configuration": config.path,
        "recipe": explanation["recipe"],
        "runs": f"{explanation['backend']}: {explanation['reason']}",
    }
    facts["saved for backward"] = f"{explanation['saved_bytes']} bytes"
    outcomes = [*explanation["forward"], *(outcome for outcome in explanation["backward"] if outcome["direction"] != "joint")]
    tables = [
        outcome_table(outcomes),
        product_table(explanation["pipelines"]),
        _override_table(explanation["saved_bytes_by_override"]),
        _saved_table(explanation["saved"]),
        *(_run_tables(run) if run is not None else ()),
        _environment(),
    ]
    name = config.name if run is None else run.resolve().name
    return Page(f"opfuse {opfuse.__version__}: {name}", facts, explanation["pipelines"], tables)


def _override_table(by_override: Mapping[str, Any]) -> PageTable:
    """Bytes, or why an override was refused, by its name."""
    rows = [(name, cell if isinstance(cell, int) else f"refused: {cell['refused']}") for name, cell in by_override.items()]
    return PageTable("Bytes saved, by backward override", ("override", "bytes"), rows)


_SAVED: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "op": itemgetter("op"),
    "name": itemgetter("name"),
    "format": itemgetter("format"),
    "planes": lambda each: "+".join(each["usages"]),
    "shape": lambda each: "x".join(map(str, each["shape"])),
    "bytes": itemgetter("bytes"),
    "memory": itemgetter("memory"),
}
"""Columns of the table of saved tensors, and what stands in them."""


def _saved_table(found: Sequence[Mapping[str, Any]]) -> PageTable:
    rows = [tuple(cell(row) for cell in _SAVED.values()) for row in found]
    return PageTable("Saved for the backward pass", tuple(_SAVED), rows, filters=True)


def _run_tables(run: Path) -> list[PageTable]:
    try:
        report = unsealed((run / REPORT).read_text(encoding="utf-8"))
        lines = (run / VALUES).read_text(encoding="utf-8").splitlines() if (run / VALUES).exists() else []
        records = [unsealed(line) for line in lines]
        names = ("loss_first", "loss_last", "validation_loss", "baseline_loss_last", "run_seconds", "plan_cache")
        figures = [(name, report.get(name)) for name in names]
        return [PageTable("The run", ("figure", "value"), figures), value_table(records)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cure = "write it anew: opfuse run CONFIG"
        raise TraceError(describe(str(run), wanted="a run of opfuse run", got=str(error), cure=cure)) from None


def _environment() -> PageTable:
    rows = [*machine().items(), *environment().items()]
    return PageTable("Environment", ("what", "value"), rows)


def _of_traces(subject: Path, traces: tuple[Trace, ...]) -> Page:
    first = traces[0].process
    plans = [(trace, plan) for trace in traces for plan in trace.plans]
    by_key = {plan.key: plan for _, plan in plans if plan.plan is not None}
    pipelines = [{**(plan.plan or {}), "name": f"{plan.pipeline}, plan {key}"} for key, plan in by_key.items()]
    timeline = [
        (f"{plan.seconds:.2f}", trace.process.rank, plan.pipeline, plan.call, f"{plan.ms:.1f}", plan.key, plan.why)
        for trace, plan in plans
    ]
    counts = [
        (trace.process.rank, row.pipeline, row.plans, row.hits, row.misses)
        for trace in traces
        for row in (trace.counts.pipelines if trace.counts is not None else ())
    ]
    facts = {
        "trace": subject,
        "command": " ".join(first.command),
        "ranks": f"{len(traces)} of {first.ranks}",
        "device": first.device,
    }
    settings = [*first.versions.items(), *first.environment.items(), *first.settings.items()]
    tables = [
        outcome_table(outcome for plan in by_key.values() for outcome in plan.outcomes),
        product_table(pipelines),
        PageTable("Plans over time", ("s", "rank", "pipeline", "call", "ms", "key", "why"), timeline, filters=True),
        PageTable("Cache", ("rank", "pipeline", "plans", "hits", "misses"), counts),
        PageTable("Environment", ("what", "value"), settings),
    ]
    return Page(f"opfuse {first.versions.get('opfuse', '')}: {subject.resolve().name}", facts, pipelines, tables)
