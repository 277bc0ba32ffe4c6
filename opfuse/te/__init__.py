"""Names and signatures of TransformerEngine's PyTorch interface, for scripts that were written for te.ops.

``import opfuse.te as te`` in place of ``import transformer_engine.pytorch as te``. What a script asks for beyond what opfuse has
is refused, by name and with what to write instead; nothing is ignored. New code writes ``opfuse.ops`` and ``opfuse.autocast``.
"""

from opfuse.recipes import quantized_model_init
from opfuse.te import factories, ops, recipe
from opfuse.te.quantizer import PlainQuantizer as Quantizer
from opfuse.te.quantizer import QuantizedTensorStorage
from opfuse.te.regions import autocast, fp8_autocast, fp8_model_init

__all__ = [
    "QuantizedTensorStorage",
    "Quantizer",
    "autocast",
    "factories",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "quantized_model_init",
    "recipe",
]
