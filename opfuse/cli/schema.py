"""``opfuse schema``: the JSON schema of configurations, or of policies."""

from __future__ import annotations

import json

from opfuse.cli.output import echo
from opfuse.config.schema import configuration_schema, policy_schema


def schema(*, policy: bool = False) -> None:
    """Print the JSON schema of configurations. policy: of files that choose for a model, which fuse_ takes."""
    echo(json.dumps(policy_schema() if policy else configuration_schema(), indent=2))
