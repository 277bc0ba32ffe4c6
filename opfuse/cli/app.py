"""The frame: a table of commands, imported when they run, and the exit codes.

0: all is well. 1: findings, or an error of opfuse. 2: the command line itself was wrong. 3: this machine cannot do it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import opfuse
from opfuse.cli.output import error
from opfuse.environment import variable
from opfuse.errors import OpfuseError, UnsupportedError

OK, FINDINGS, USAGE, UNSUPPORTED = 0, 1, 2, 3

EXIT_CODES: tuple[tuple[type[OpfuseError], int], ...] = ((UnsupportedError, UNSUPPORTED), (OpfuseError, FINDINGS))
"""What an error that reaches the frame ends with, first match."""


class Entry(NamedTuple):
    """Where a command's function is, and what the list of commands says of it."""

    function: str
    summary: str


COMMANDS = {
    "run": Entry("opfuse.cli.run:run", "Train the pipeline of a configuration, and report what fused."),
    "study": Entry("opfuse.cli.study:study", "Compare gradients along a training run with the exact ones."),
    "explain": Entry("opfuse.cli.explain:explain", "Show what fuses, what does not, and why."),
    "check": Entry("opfuse.cli.check:check", "Find what is wrong in configurations."),
    "schema": Entry("opfuse.cli.schema:schema", "Print the JSON schema of configurations."),
    "kernels": Entry("opfuse.cli.kernels:kernels", "List the CUDA kernels, with registers and tolerances."),
    "doctor": Entry("opfuse.cli.doctor:doctor", "Tell what this machine runs natively, and what it emulates."),
}
"""Commands in the order in which they are listed."""


class LazyCommand(TyperCommand):
    """A name and a summary, until it is called."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.summary)
        self.entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Context of the real command, which is imported now."""
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name)(resolve_name(self.entry.function))
        return typer.main.get_command(app).make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """The commands of :data:`COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return LazyCommand(cmd_name, COMMANDS[cmd_name]) if cmd_name in COMMANDS else None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"opfuse {opfuse.__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, name="opfuse", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def frame(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Compile sequences of operations for low-precision training, and explain what became of them."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line (None: that of the process) and return its exit code.

    An error of opfuse is one message on stderr; ``OPFUSE_DEBUG=1`` shows where it came from.
    """
    # OpenMP reads it when torch is loaded. Threads that spin while they wait cost tenfold where others use the cores too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = variable("OPFUSE_DEBUG") == "1"  # the first read, which warns of mistyped ones
    try:
        typer.main.get_command(app).main(args=args if args is None else list(args), prog_name="opfuse")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK
    except OpfuseError as raised:
        if debug:
            raise
        error(str(raised))
        return next(code for kind, code in EXIT_CODES if isinstance(raised, kind))
    return OK
