"""R11 without a GPU: the same bits from run to run and from process to process, whether plans are there already or not."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import copy, hashlib
import torch
import opfuse
from tests.compiler.harness import bits, mlp, randn, recipe_for, to, train, Step

torch.set_num_threads(1)
torch.manual_seed(0)
model, x = to(mlp(), torch.bfloat16), randn(32, 64)
for name, override in (("none", None), ("fp8_block", None), ("mxfp8", "dequantized"), ("nvfp4", None)):
    step, digests = Step(recipe_for(name, override)), set()
    warm, cold = copy.deepcopy(model), copy.deepcopy(model)
    for number in range(RUNS):
        for run in cold.runs():
            run.cache.clear()
        for each in (warm, cold):
            each.zero_grad(set_to_none=True)
            tensors = train(each, x, step=step).tensors
            digest = hashlib.sha256()
            for key in sorted(tensors):
                digest.update(key.encode() + b"".join(bytes(bits(t).tolist()) for t in (tensors[key],) if t is not None))
            digests.add(digest.hexdigest())
    assert warm.cache_info().hits == RUNS - 1 and warm.cache_info().misses == 1, warm.cache_info()
    assert cold.cache_info().hits == 0, cold.cache_info()
    print(name, *digests)
"""


def outputs(runs: int) -> list[str]:
    """What two processes with other hashes of strings print, this one and a fresh one: the digests of each recipe."""
    script = f"RUNS = {runs}\n{SCRIPT}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    environment["PYTHONHASHSEED"] = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    with (
        subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE) as fresh,
        contextlib.redirect_stdout(io.StringIO()) as here,
    ):
        exec(script, {})
        told = fresh.communicate()[0]
    assert fresh.returncode == 0
    return [here.getvalue(), told]


@pytest.mark.row("R11")
@pytest.mark.cpu
@pytest.mark.parametrize("runs", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_r11_two_processes_with_cold_and_warm_plans_give_the_same_bits(runs):
    first, second = outputs(runs)
    assert first == second
    lines = [line.split() for line in first.splitlines()]
    assert [len(line) for line in lines] == [2, 2, 2, 2]
    assert len({line[1] for line in lines}) == 4
