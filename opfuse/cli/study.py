"""``opfuse study``: measurements along a training run that answer one question."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.table import Table

from opfuse.cli.output import echo, echo_json
from opfuse.cli.progress import reporter
from opfuse.cli.results import device_for, directory_for, print_files, show, write_or_salvage
from opfuse.config import load
from opfuse.train.files import sole_writer
from opfuse.train.study import Study, study_overrides
from opfuse.train.study_report import NAMES, dtype_of, reasons, refused, rows, study_text, summary, to_dict, write_study


def study(
    config: Path, *, subject: str, steps: int | None, points: int, seed: int | None, device: str, out: Path | None, as_json: bool
) -> None:
    """Measure under every value of the field that ``subject`` names, and write the table.

    None: what the configuration says, or ``runs/NAME``.
    """
    chosen, field = load(config), next(field for field, name in NAMES.items() if name == subject)
    place, directory = device_for(device), directory_for(chosen, out)
    with sole_writer(directory / f"{subject}.json"):
        with reporter() as on_step:
            found = study_overrides(chosen, steps=steps, seed=seed, points=points, field=field, device=place, on_step=on_step)
        if as_json:
            echo_json(to_dict(found))
        else:
            print_study(found, points)
        print_files(write_or_salvage(partial(write_study, found), directory, partial(study_text, found)), as_json=as_json)


def print_study(found: Study, points: int) -> None:
    """The table, and what could not be measured."""
    took = f"{found.settings.steps} steps on {found.device} in {found.seconds:.0f} s"
    echo(f"{found.name}: {took}; SQNR in dB, means over {points} points")
    show(table(found))
    for reason in reasons(refused(found), found.field):
        echo(f"refused  {reason}")


def table(found: Study) -> Table:
    """The means over the steps."""
    head, *body = rows(dtype_of(found), summary(found), found.field)
    drawn = Table(*head, box=None, pad_edge=False)
    for row in body:
        drawn.add_row(*(cell.strip("`") for cell in row))
    return drawn
