"""The JSON schema of a configuration, for editors: what a file may say, derived from the same models that read it."""

from __future__ import annotations

import json
from typing import Any

from opfuse.config.root import Root

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """The schema as plain values."""
    return {"$schema": DIALECT, **Root.model_json_schema(mode="validation")}


def schema_text() -> str:
    """The schema as text; ``opfuse/config/schema.json`` holds the same."""
    return json.dumps(schema(), indent=2) + "\n"
