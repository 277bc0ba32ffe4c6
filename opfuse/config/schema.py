"""The JSON schemas of configurations and of policies, for editors: what files may say, derived from the models that read them."""

from __future__ import annotations

from typing import Any

from opfuse.config.policies import PolicyFile
from opfuse.config.root import Root

DIALECT = "https://json-schema.org/draft/2020-12/schema"


PARAMETER = {"type": "string", "pattern": r"^\$\{\w+\}$"}
"""The name of a parameter, which may stand for any value."""


def configuration_schema() -> dict[str, Any]:
    """The schema as plain values: of the models, and of what is written out before they read."""
    found = Root.model_json_schema(mode="validation")
    for definition in found["$defs"].values():
        for name, value in definition.get("properties", {}).items():
            if "const" not in value and name not in ("ops", "rules"):
                definition["properties"][name] = {"anyOf": [_without(value), PARAMETER], **_annotations(value)}
    items = found["$defs"]["Pipeline"]["properties"]["ops"]["items"]
    entry = {"anyOf": [items, *({"$ref": f"#/$defs/{name}"} for name in _BLOCKS)]}
    found["$defs"] |= {**_BLOCKS, "Entries": {"type": "array", "items": entry, "minItems": 1}}
    found["$defs"]["Pipeline"]["properties"]["ops"]["items"] = entry
    scalar = {"type": ["string", "number", "boolean", "null", "array"]}
    found["properties"] |= {
        "parameters": {"type": "object", "additionalProperties": scalar},
        "fragments": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Entries"}},
    }
    return {"$schema": DIALECT, **found}


def policy_schema() -> dict[str, Any]:
    """That of a file for :func:`opfuse.load_policy`."""
    return {"$schema": DIALECT, **PolicyFile.model_json_schema(mode="validation")}


def _without(value: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key not in _NOTES}


def _annotations(value: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key in _NOTES}


_NOTES = ("default", "title", "description")
_ENTRIES = {"$ref": "#/$defs/Entries"}


def _block(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_BLOCKS = {
    "UsedFragment": _block(["use"], use={"type": "string"}, **{"with": {"type": "object"}}),
    "RepeatedBlock": _block(["repeat", "ops"], repeat={"anyOf": [{"type": "integer", "minimum": 1}, PARAMETER]}, ops=_ENTRIES),
    "ResidualBranch": _block(["residual"], residual=_ENTRIES),
}
"""Entries of a pipeline that stand for several ops; ``expand.py`` reads them."""
