"""Values that carry quantized data: records of planes, the quantizers that make them, the tensor that wraps them."""

import torch

from opfuse.formats import Element, NumberFormat
from opfuse.numerics.row_groups import RowGroups
from opfuse.tensors import quantizers
from opfuse.tensors.groups import GroupedPlane
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.ragged import RaggedPlane
from opfuse.tensors.raw import post_all_gather_processing, quantize_master_weights, replace_raw_data
from opfuse.tensors.storage import Plane, QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor, quantize, rebuild

__all__ = [
    "Plane",
    "QuantizedStorage",
    "QuantizedTensor",
    "Quantizer",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]

Quantizer.wrap = staticmethod(quantize)
torch.serialization.add_safe_globals(
    [
        QuantizedTensor,
        rebuild,
        QuantizedStorage,
        Plane,
        GroupedPlane,
        RaggedPlane,
        RowGroups,
        NumberFormat,
        Element,
        *(getattr(quantizers, name) for name in quantizers.__all__),
    ]
)
