"""Processes that share a cache of kernels: cold, warm, killed while they compile, with damaged files. All give the same bits."""

import os
import signal
import subprocess
import sys
import time

import pytest

from opfuse.kernels.engine import cubins

SCRIPT = """
import hashlib, torch
from opfuse.formats import E4M3, USAGES, fp8_tensor, mxfp8
from opfuse.kernels.casts import tensor as cast
from opfuse.numerics.layouts import Layout

x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).cuda()
layouts = lambda fmt: [Layout(fmt(E4M3), usage, (256, 256)) for usage in USAGES]
data, scale = cast.cast_current(x, cast.tensor_amax(x.nan_to_num(0, 1, 1)), layouts(fp8_tensor))
tensors = [*data, scale, *(t for plane in cast.cast_mx(x, layouts(mxfp8)) for t in plane)]
print(hashlib.sha256(b"".join(t.cpu().view(torch.uint8).numpy().tobytes() for t in tensors)).hexdigest())
"""


def start(directory, script=SCRIPT):
    environment = {**os.environ, cubins.ENVIRONMENT: str(directory)}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process):
    """What it printed; nothing on stderr but what others warn of."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "opfuse" not in err, err
    return out.strip()


@pytest.mark.slow
def test_r11_r14_sixteen_processes_some_killed_and_a_damaged_cache(tmp_path):
    racing = [start(tmp_path) for _ in range(16)]
    time.sleep(4)
    for process in racing[::4]:
        process.send_signal(signal.SIGKILL)
    digests = {finish(process) for i, process in enumerate(racing) if i % 4}
    for process in racing[::4]:
        process.communicate()
    assert len(digests) == 1

    stored = sorted((tmp_path / cubins.location().name).glob("*.cubin"))
    assert len(stored) == 3
    stored[0].write_bytes(stored[0].read_bytes()[:100])
    stored[1].write_bytes(stored[1].read_bytes() + b"\0")
    stored[2].unlink()
    stored[2].symlink_to(stored[0])
    assert {finish(start(tmp_path))} == digests
    assert {finish(start(tmp_path))} == digests
    assert [path.name for path in stored] == sorted(path.name for path in stored[0].parent.glob("*.cubin"))
