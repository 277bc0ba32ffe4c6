"""Processes of several ranks, forked from one that has imported torch and the package once: each import takes seconds.

Optimizers and FSDP2 import torch._dynamo at their first step, in every process anew if it is not there. And processes that run
a program by itself, which have imported torch alone.
"""

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch._dynamo", "opfuse.ops", "opfuse.recipes", "opfuse.convert", "opfuse.cli.commands"]
)
FORKSERVER = torch.multiprocessing.get_context("forkserver")


def run_ranks(worker: Callable[..., None], *args: Any, ranks: int = 2, grace: float | None = None) -> None:
    """``worker(rank, *args)`` in a process for each rank; what one raises is raised here. grace: seconds for others to end."""
    context = torch.multiprocessing.start_processes(worker, args, nprocs=ranks, start_method="forkserver", join=False)
    while not context.join(grace_period=grace):
        pass


def _run_program(rank: int, program: str, folder: Path) -> None:
    sys.argv = ["program", str(rank), str(folder / "store")]
    with (folder / str(rank)).open("w") as out, contextlib.redirect_stdout(out):
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})


def printed(program: str, folder: Path, *, ranks: int = 2) -> list[str]:
    """What a program prints on each rank; its arguments are the rank and a file in ``folder`` for the group to meet at."""
    run_ranks(_run_program, program, folder, ranks=ranks)
    return [(folder / str(rank)).read_text() for rank in range(ranks)]


SERVER = """
import json, os, sys
import pydantic, ruamel.yaml, torch

for line in sys.stdin:
    program, arguments, folder, environment, files = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, name in enumerate((os.devnull, *files)):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
sys.path[1:1] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
sys.argv = ["-c", *arguments]
exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def ran(
    program: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """``python -c PROGRAM ARGUMENTS`` in a process that has torch and nothing of this package, forked: to import it takes long.

    What Python and torch read of the environment when they begin is that of the tests. check: whether it must end well.
    """
    server = _server()
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("out", "err")]
        asked = (
            program,
            [*map(str, arguments)],
            str(cwd or Path.cwd()),
            dict(os.environ if env is None else env),
            [*map(str, files)],
        )
        print(json.dumps(asked), file=server.stdin, flush=True)
        code = int(server.stdout.readline())  # type: ignore[union-attr]
        done = subprocess.CompletedProcess([program, *asked[1]], code, *(file.read_text() for file in files))
    if check and code:
        raise AssertionError(f"ended with {code}: {done.stderr}")
    return done
