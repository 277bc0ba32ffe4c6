"""Configurations: YAML in, core objects or findings out. The only package that reads YAML."""

from opfuse.config.findings import Finding, Span
from opfuse.config.load import Config, load, load_policy, loads
from opfuse.config.models import PydocTopics, Text, TextFile, TokenFile, Train, UserFile, Watching
from opfuse.config.operations import PipelineEntry

__all__ = [
    "Config",
    "Finding",
    "PipelineEntry",
    "PydocTopics",
    "Span",
    "Text",
    "TextFile",
    "TokenFile",
    "Train",
    "UserFile",
    "Watching",
    "load",
    "load_policy",
    "loads",
]
