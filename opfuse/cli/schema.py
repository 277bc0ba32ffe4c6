"""``opfuse schema``: the JSON schema of configurations."""

from __future__ import annotations

from opfuse.cli.output import Json, echo
from opfuse.config.schema import schema_text


def schema(as_json: Json = True) -> None:
    """Print the JSON schema of configurations."""
    echo(schema_text().rstrip("\n"))
