"""``opfuse check --rule``: a fusion rule beside the ops that it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from opfuse.cli.output import echo, echo_json
from opfuse.cli.results import show_rows
from opfuse.config.rule_trial import RuleReport, rule_at, try_rule
from opfuse.train import usable


def check_rule(path: str, *, device: str, as_json: bool) -> None:
    """Print what became of a fusion rule under every recipe; end with 1 if it was wrong, raised, or never fired."""
    if (here := str(Path.cwd())) not in sys.path:  # as python -m has it
        sys.path.insert(0, here)
    report = try_rule(rule_at(path), usable(device))
    if as_json:
        echo_json(report.to_dict())
    else:
        _show_rule(report)
    raise typer.Exit(0 if report.ok else 1)


def _show_rule(report: RuleReport) -> None:
    """A table of recipes, then each fault once, with the recipes that it appears under."""
    echo(f"rule {report.rule} ({report.source}), {report.direction}: {report.pattern}\n")
    rows = [(result.recipe, result.backward_override or "", result.summary) for result in report.results]
    show_rows(("recipe", "backward_override", "result"), rows)
    for results in report.faults():
        first = results[0]
        echo(f"\n{first.call}\n  under {first.name}: {first.fault}")
        if len(results) > 1:
            named = "; ".join(result.name for result in results[1:])
            echo(f"  the same under {named if len(results) < len(report.results) else 'every other recipe'}")
    for reason in report.left_out:
        echo(f"\nnot tried: {reason}")
    echo(f"\n{report.verdict}")
