"""What calling a quantizer does: a cast with a gradient."""

from __future__ import annotations

import torch

from opfuse.tensors.planes import map_tensors
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.straight import straight_through
from opfuse.tensors.tensor import QuantizedTensor


def cast(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    """``x`` (..., K) as ``quantizer`` casts it, in memory of its own. The gradient passes straight through."""

    def owning(x: torch.Tensor) -> QuantizedTensor:
        storage = quantizer.quantize(x.record.dequantize() if isinstance(x, QuantizedTensor) else x)
        # An identity plane is the caller's own tensor, which a later write must not reach.
        kept = {id(plane.data) for plane in map(storage.plane, storage.usages) if plane.format.family == "identity"}
        storage = map_tensors(storage, lambda tensor: tensor.clone() if id(tensor) in kept else tensor)
        return QuantizedTensor(storage, quantizer=quantizer)

    made: QuantizedTensor = straight_through(owning, x)
    return made
