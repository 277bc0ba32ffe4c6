"""The quantization that vLLM is told of. It was not run: see the README."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter

from opfuse_vllm import NAME
from opfuse_vllm.product import is_plain, product_of

BLOCK = 128


@register_quantization_config(NAME)
class OpfuseConfig(QuantizationConfig):
    """Of a checkpoint in blocks of 128 x 128."""

    def __init__(self, ignored: list[str]) -> None:
        super().__init__()
        self.ignored = ignored

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 90

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> str | None:
        """Checkpoints say ``fp8``; who asks for this quantization gets it."""
        return NAME if user_quant == NAME else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OpfuseConfig:
        blocks = config.get("weight_block_size")
        if blocks != [BLOCK, BLOCK]:
            raise ValueError(
                f"opfuse: wants weight_block_size [{BLOCK}, {BLOCK}], got {blocks}. Cure: export_weights 'deepseek'."
            )
        return cls([*config.get("modules_to_not_convert", ()), *config.get("ignored_layers", ())])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, FusedMoE):
            raise ValueError(f"{prefix}: wants linear layers, got experts. Cure: serve mixtures by --quantization fp8.")
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if is_plain(prefix, self.ignored, self.packed_modules_mapping) else OpfuseLinearMethod()


class OpfuseLinearMethod(LinearMethodBase):
    """Holds codes and scales as vLLM's own FP8 layers do, and multiplies them by opfuse."""

    def create_weights(  # noqa: PLR0917 — as vLLM calls it
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if any(size % BLOCK for size in (input_size_per_partition, *output_partition_sizes)):
            got = f"{output_partition_sizes} x {input_size_per_partition}"
            raise ValueError(f"opfuse: wants parts of whole blocks of {BLOCK}, got {got}. Cure: fewer tensor-parallel ranks.")
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        places = {"input_dim": 1, "output_dim": 0, "weight_loader": extra_weight_attrs.get("weight_loader")}
        layer.weight_block_size = [BLOCK, BLOCK]  # by which vLLM's loader finds the scales of a part
        codes, scales = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows // BLOCK, columns // BLOCK)
        layer.register_parameter("weight", ModelWeightParameter(data=codes, **places))
        layer.register_parameter("weight_scale_inv", BlockQuantScaleParameter(data=scales.float(), **places))
        self.dtype = params_dtype

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.product = product_of(layer.weight.data, layer.weight_scale_inv.data, self.dtype)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.product(x)
        return y if bias is None else y + bias
