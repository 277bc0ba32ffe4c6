"""New tensors between guard bytes, filled with poison: what a kernel leaves unwritten, or writes outside, shows."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BAND = 512  # bytes on each side, so that alignment stays what the allocator gives
GUARD, POISON = 0xA5, 0xFF


class Guards(TorchDispatchMode):
    """While active, ``torch.empty`` on a CUDA device allocates between guards; ``torch.zeros`` does too, filled with zeros."""

    FILLS = {torch.ops.aten.empty.memory_format: POISON, torch.ops.aten.zeros.default: 0}

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.FILLS or torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        shape, dtype = tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype()
        size = torch.empty(shape, dtype=dtype, device="meta").nbytes
        buffer = torch.full((BAND + size + BAND,), GUARD, dtype=torch.uint8, device=kwargs["device"])
        buffer[BAND : BAND + size] = self.FILLS[func]
        self.buffers.append(buffer)
        return buffer[BAND : BAND + size].view(dtype).view(shape)

    def check(self):
        assert self.buffers, "the kernel allocated nothing"
        for buffer in self.buffers:
            assert (buffer[:BAND] == GUARD).all(), "written before the start"
            assert (buffer[-BAND:] == GUARD).all(), "written past the end"
