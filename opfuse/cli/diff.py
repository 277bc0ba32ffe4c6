"""``opfuse diff``: what changed between two runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from opfuse.cli.output import counted, echo, echo_json
from opfuse.errors import number_of
from opfuse.train.localize import first_difference
from opfuse.train.runs import differences, divergence, known_run


def diff(old: Path, new: Path, *, localize: bool, bound: float, as_json: bool) -> None:
    """Print what differs; localize: also the first op whose values do, by more than ``bound``. Ends with 1 if anything does."""
    runs = [known_run(path) for path in (old, new)]
    changed, parted = differences(*runs), divergence(*runs)
    place = first_difference(old, new, 1 if parted is None else parted.step, bound) if localize else None
    compared = len(runs[0].losses.keys() & runs[1].losses.keys())
    if as_json:
        found: dict[str, Any] = {"differences": [asdict(difference) for difference in changed], "steps_compared": compared}
        found["divergence"] = None if parted is None else asdict(parted)
        found["first_value"] = None if place is None else asdict(place)
        echo_json(found)
    else:
        for difference in changed:
            echo(str(difference))
        if parted is not None:
            echo(str(parted))
        elif compared:
            echo(f"{number_of(compared, 'loss')} {'is' if compared == 1 else 'are'} equal bit for bit")
        if localize:
            echo("no value differs in the step that was run again" if place is None else str(place))
        echo(counted(changed, "difference"))
    raise typer.Exit(1 if changed or parted or place else 0)
