"""Casts as other libraries make them, on the CPU: what rules of the same name must equal, byte for byte.

compressed-tensors and torchao are called as they are installed. DeepGEMM cannot be installed without a GPU: its formulas, as
published in deep_gemm/utils/math.py, are written out in numpy, by another path than the package's.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

import ml_dtypes

Planes = tuple[torch.Tensor, torch.Tensor]
"""Codes (M, K), uint8, and decode scales: fp32, or E8M0 codes of MXFP8."""

FP8 = torch.float8_e4m3fn


def deepgemm(x: torch.Tensor, block: tuple[int, int], *, ue8m0: bool) -> Planes:
    """``per_token_cast_to_fp8`` for blocks of (1, 128), ``per_block_cast_to_fp8`` for (128, 128)."""
    wide = x.float().numpy()
    (m, k), (rows, columns) = wide.shape, block
    codes = np.zeros((m, k), np.uint8)
    scales = np.zeros((-(-m // rows), -(-k // columns)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scale = max(np.abs(wide[part]).max(), np.float32(1e-4)) / np.float32(448)
            if ue8m0:
                mantissa, exponent = np.frexp(scale)
                scale = np.ldexp(np.float32(1), int(exponent) - (mantissa == 0.5))
            scales[i, j] = scale
            codes[part] = (wide[part] * (np.float32(1) / np.float32(scale))).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def compressed_tensors(x: torch.Tensor, scheme: str) -> Planes:
    """A weight under the preset ``scheme``, its scales observed from itself, as the library's compressor quantizes it."""
    args: QuantizationArgs = preset_name_to_scheme(scheme, ["Linear"]).weights
    if scheme == "FP8_BLOCK":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
        blocks = padded.reshape(-1, rows, padded.shape[1] // columns, columns).transpose(1, 2).flatten(2)
    else:
        blocks = x if args.group_size is None else x.unflatten(-1, (-1, args.group_size))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    scale = scale[:, None] if scheme == "FP8_DYNAMIC" else scale
    codes = quantize(x, scale, None, args, dtype=FP8).view(torch.uint8)
    if scheme == "MXFP8":
        return codes, (127 + torch.floor(torch.log2(scale.float()))).to(torch.uint8)
    return codes, scale.float()


def compressed_tensors_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight under the preset NVFP4: packed codes, E4M3 scales as bytes, and the global encode scale."""
    args = preset_name_to_scheme("NVFP4", ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, args.group_size))
    overall = generate_gparam(x.amin(), x.amax())
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=overall)
    packed = quantize_and_pack_fp4(x, scale, global_scale=overall, group_size=args.group_size)
    return packed, scale.to(FP8).view(torch.uint8), overall


def compressed_tensors_mxfp4(x: torch.Tensor) -> Planes:
    """A weight under the preset MXFP4: packed codes, and E8M0 codes."""
    args = preset_name_to_scheme("MXFP4", ["Linear"]).weights
    blocks = x.unflatten(-1, (-1, args.group_size))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    return quantize_and_pack_fp4(x, scale, group_size=args.group_size), compress_mx_scale(scale, torch.uint8)


def torchao_pow2(x: torch.Tensor, *, by_row: bool) -> Planes:
    """Its float8 training cast with power-of-two scales: of the tensor, or of each row."""
    how: dict[str, Any] = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1} if by_row else {}
    scale = tensor_to_scale(x, FP8, round_scales_to_power_of_2=True, **how)
    return to_fp8_saturated(x.float() * scale, FP8).view(torch.uint8), (1 / scale).flatten()


def torchao_mx(x: torch.Tensor, mode: str, element: torch.dtype = FP8) -> Planes:
    """Its MX cast, with a scale calculation mode of its own naming."""
    scale, codes = to_mx(x.contiguous(), element, 32, getattr(ScaleCalculationMode, mode))
    return codes.view(torch.uint8), scale.view(torch.uint8)
