"""A call of a kernel that is packed once: it launches what the kernel launches, for what memory holds by then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from opfuse.kernels.engine import packed_launch as module
from opfuse.kernels.engine.compiling import Variant
from opfuse.kernels.engine.launch import Grid, Loaded
from opfuse.kernels.engine.packed_launch import prepared
from tests.program.fake import LAYOUT, STREAM, VARIANT, FakeCuda

pytestmark = pytest.mark.cpu


LARGER = Variant("none.cu", ("PARAMETER_BYTES=4000",))
"""A kernel whose parameter has more room than a launch fills."""


def reference(x, out):
    out.copy_(2 * x)


def run(launcher, x, out):
    """Two launches: what the first one writes the second one reads."""
    for source in (x, out):
        fields = source.data_ptr(), out.data_ptr(), x.numel()
        launcher(LARGER, "double", Grid(1, 32), LAYOUT, *fields, device=0)


def test_elsewhere_it_runs_the_definition():
    x, out = torch.randn(8), torch.empty(8)
    call = prepared(SimpleNamespace(reference=reference, run=run), x, out)
    for _ in range(2):
        x += 1
        call()
        assert torch.equal(out, 2 * x)


def once(launcher, x, out):
    launcher(LARGER, "double", Grid(1, 32), LAYOUT, x.data_ptr(), out.data_ptr(), x.numel(), device=0)


@pytest.mark.parametrize(("launches", "factor"), [(once, 2), (run, 4)])
def test_on_the_device_it_launches_what_was_packed(launches, factor, monkeypatch):
    monkeypatch.setattr(module, "leading", lambda args: SimpleNamespace(is_cuda=True, numel=lambda: 8))
    monkeypatch.setattr(module, "runs_kernels", lambda x: True)
    monkeypatch.setattr(module, "loaded", lambda variant, entry, device: Loaded(None, (VARIANT, entry)))
    monkeypatch.setattr(module, "is_current", lambda device: True)
    monkeypatch.setattr(module, "driver", FakeCuda)
    monkeypatch.setattr(module, "raw_stream", lambda device: STREAM)
    x, out = torch.randn(8), torch.empty(8)
    call = prepared(SimpleNamespace(reference=reference, run=launches), x, out)
    for _ in range(2):
        x += 1
        call()
        assert torch.equal(out, factor * x)


def test_the_driver_finds_all_bytes_of_a_parameter_that_is_filled_in_part(monkeypatch):
    sizes = []
    monkeypatch.setattr(module, "leading", lambda args: SimpleNamespace(is_cuda=True, numel=lambda: 8))
    monkeypatch.setattr(module, "runs_kernels", lambda x: True)
    monkeypatch.setattr(module, "loaded", lambda variant, entry, device: Loaded(None, 0))
    monkeypatch.setattr(module, "_launch", lambda kernel, grid, parameter, device: sizes.append(len(parameter._buffer)))
    prepared(SimpleNamespace(reference=reference, run=run), torch.ones(8), torch.empty(8))()
    assert sizes == [4000, 4000]
