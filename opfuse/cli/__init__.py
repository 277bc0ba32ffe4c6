"""The command line. Nothing here imports torch before a command that needs it runs."""

from opfuse.cli.app import main

__all__ = ["main"]
