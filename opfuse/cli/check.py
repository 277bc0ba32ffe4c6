"""``opfuse check``: everything wrong in configurations, at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from opfuse.cli.output import counted, echo, echo_json
from opfuse.config.findings import FORMATS
from opfuse.config.load import check as check_file
from opfuse.config.values import SettingValue, values_in
from opfuse.keys import plain


def check(configs: Sequence[Path], *, format: str, values: bool = False) -> None:
    """Print the findings of all files, in one of :data:`FORMATS`; end with 1 if there are any. values: also what files mean."""
    findings = {path: check_file(path) for path in configs}
    reported = [finding for found in findings.values() for finding in found]
    meant = {path: values_in(path) for path, found in findings.items() if values and not found}
    if format == "json" and values:
        echo_json(
            {
                "findings": [finding.record() for finding in reported],
                "values": {str(path): _plain(found) for path, found in meant.items()},
            }
        )
    elif reported or format == "json":
        echo(FORMATS[format](reported))
    if format == "text":
        for found in meant.values():
            width = max(len(value.path) for value in found)
            echo("\n".join(f"{value.path:<{width}}  {value.value!s:<24} {value.source}" for value in found))
        echo(f"{counted(reported, 'finding')} in {counted(configs, 'file')}")
    raise typer.Exit(1 if reported else 0)


def _plain(found: Sequence[SettingValue]) -> list[dict[str, Any]]:
    return [{**value._asdict(), "value": plain(value.value)} for value in found]
