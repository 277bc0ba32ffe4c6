"""Names and signatures of TransformerEngine's PyTorch interface, for scripts that were written for te.ops.

``import opfuse.te as te`` in place of ``import transformer_engine.pytorch as te``. What opfuse lacks is refused by
name, with what to write instead; nothing is ignored. New code writes ``opfuse.ops`` and ``opfuse.autocast``.
"""

from collections.abc import Mapping
from typing import Any

from opfuse.errors import NotHereError, describe, no_name
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

_ATTENTION = "use torch's attention, or a model of transformers: opfuse.fuse_(model, recipe) converts projections and MLPs"
_CONVERTED = "and convert the model: opfuse.fuse_(model, recipe)"

INSTEAD: Mapping[str, str] = {
    "Linear": f"use nn.Linear, {_CONVERTED}; or te.ops.Linear",
    "LayerNormLinear": f"use a norm and nn.Linear, {_CONVERTED}",
    "LayerNormMLP": f"use a norm, two nn.Linear and the activation between them, {_CONVERTED}",
    "GroupedLinear": "use te.ops.GroupedLinear, or convert the experts of a model: opfuse.fuse_(model, recipe)",
    "LayerNorm": "use nn.LayerNorm or te.ops.LayerNorm",
    "RMSNorm": "use nn.RMSNorm or te.ops.RMSNorm",
    "DotProductAttention": _ATTENTION,
    "MultiheadAttention": _ATTENTION,
    "TransformerLayer": _ATTENTION,
    "checkpoint": "use torch.utils.checkpoint, which recomputes under the recipe of the forward pass",
    "make_graphed_callables": "use opfuse.graphed",
    "onnx_export": "export the model before it is converted, or after opfuse.unfuse_(model)",
}
"""Names of TransformerEngine that are not here, each with what to do instead; docs/migrate.md has them as well."""


def __getattr__(name: str) -> Any:
    """NotHereError, an AttributeError, for a name of TransformerEngine with what to use in its place."""
    if name not in INSTEAD:
        raise no_name(__name__, name, (*__all__, *INSTEAD))
    raise NotHereError(describe("opfuse.te", wanted="a name that it has", got=f"{name}, which it has not", cure=INSTEAD[name]))
