"""The frame: the commands and the exit codes.

0: all is well. 1: findings, or an error of opfuse. 2: the command line itself was wrong. 3: this machine cannot do it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import typer

import opfuse
from opfuse.cli.commands import COMMANDS, GROUPS
from opfuse.cli.output import error
from opfuse.environment import variable
from opfuse.errors import OpfuseError, UnsupportedError

OK, FINDINGS, USAGE, UNSUPPORTED = 0, 1, 2, 3

EXIT_CODES: tuple[tuple[type[OpfuseError], int], ...] = ((UnsupportedError, UNSUPPORTED), (OpfuseError, FINDINGS))
"""What an error that reaches the frame ends with, first match."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"opfuse {opfuse.__version__}")
        raise typer.Exit


HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(name="opfuse", no_args_is_help=True, add_completion=False, rich_markup_mode=None, context_settings=HELP)


@app.callback()
def frame(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train in FP8, MXFP8 and NVFP4, and see what ran, what fused, and why."""


for command in COMMANDS:
    app.command()(command)
for group, (about, members) in GROUPS.items():
    inner = typer.Typer(no_args_is_help=True, help=about, rich_markup_mode=None)
    for name, member in members.items():
        inner.command(name)(member)
    app.add_typer(inner, name=group)


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
