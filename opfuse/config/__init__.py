"""Configurations: YAML in, core objects or findings out. The only package that reads YAML."""

from opfuse.config.findings import Finding, Span
from opfuse.config.load import Config, load, load_policy, loads
from opfuse.config.models import OwnFile, PydocTopics, Text, TextFile, TokenFile, Train, Watching
from opfuse.config.operations import PipelineEntry

__all__ = [
    "Config",
    "Finding",
    "OwnFile",
    "PipelineEntry",
    "PydocTopics",
    "Span",
    "Text",
    "TextFile",
    "TokenFile",
    "Train",
    "Watching",
    "load",
    "load_policy",
    "loads",
]
