"""Kernels are CuPy's RawKernels on the device, which users may launch by their contract."""

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.kernels.engine import launch
from opfuse.kernels.engine.compiling import architecture, cubin
from opfuse.kernels.engine.cubins import CubinCache, cubin_cache, location
from opfuse.numerics.layouts import transposed


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("aligned", [0, 1])
def test_a_user_launches_a_kernel_on_torchs_stream(device, cupy, aligned):
    x = torch.randint(0, 256, (272, 136), dtype=torch.uint8, device=device)
    turn = opfuse.kernels.raw("transpose", ALIGNED=aligned)
    assert isinstance(turn.kernel, cupy.RawKernel)
    turned = torch.zeros(136, 272, dtype=torch.uint8, device=device)
    struct = turn.argument(x=x.data_ptr(), turned=turned.data_ptr(), rows=272, columns=136)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
        turn.kernel((2 * 3,), (512,), (struct,), stream=stream)
        assert torch.equal(turned, transposed(x))


def test_every_kernel_that_is_loaded_is_a_raw_kernel(device, cupy):
    model = ops.Sequential(ops.RMSNorm(256), ops.Linear(256, 256), ops.GELU(), ops.Linear(256, 256)).to(device, torch.bfloat16)
    x = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(4):
        with opfuse.autocast(recipe=opfuse.recipes.MXFP8BlockScaling()):
            y = model(x)
        y.sum().backward()
    assert launch._loaded
    assert all(isinstance(each.kernel, cupy.RawKernel) for each in launch._loaded.values())
    assert all(each.kernel.kernel.ptr == each.pointer for each in launch._loaded.values())


def test_a_cubin_that_is_nowhere_on_disk_is_loaded_from_memory(device, monkeypatch, tmp_path):
    """As where the cache may not be used; the bits are the same."""
    turn = opfuse.kernels.raw("transpose", ALIGNED=0)
    ((variant, entry, _),) = [key for key, each in launch._loaded.items() if each.kernel is turn.kernel]
    arch = architecture(device.index)
    memory = CubinCache(tmp_path)
    monkeypatch.setattr(CubinCache, "find", lambda self, key, kind="cubin": self.memory.get(f"{key}.{kind}"))
    monkeypatch.setattr(CubinCache, "_publish", lambda *_: False)
    monkeypatch.setattr(launch, "cubin_cache", lambda directory: memory)
    monkeypatch.setattr(launch, "_loaded", {})
    again = launch.load(variant, entry, device.index)
    assert again.kernel.file_path.startswith("/proc/self/fd/")
    x = torch.randint(0, 256, (272, 136), dtype=torch.uint8, device=device)
    turned = torch.zeros(136, 272, dtype=torch.uint8, device=device)
    struct = turn.argument(x=x.data_ptr(), turned=turned.data_ptr(), rows=272, columns=136)
    torch.cuda.synchronize()
    again.kernel((2 * 3,), (512,), (struct,))
    torch.cuda.synchronize()
    assert torch.equal(turned, transposed(x))
    assert cubin(variant, arch, cubin_cache(location())) == cubin(variant, arch, memory)
