"""``opfuse schema``: the JSON schema of configurations."""

from __future__ import annotations

from opfuse.cli.output import echo
from opfuse.config.schema import schema_text


def schema() -> None:
    """Print the JSON schema of configurations."""
    echo(schema_text().rstrip("\n"))
