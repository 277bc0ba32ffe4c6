"""Products of stored FP8 matrices by opfuse, without vLLM: what the plug-in does with a layer's bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

import opfuse

RECIPE = opfuse.recipes.Float8BlockScaling(scale_rule="deepgemm", use_f32_scales=True, batch_invariant=True)


def product_of(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> nn.Linear:
    """x (rows, columns) times the transpose of a stored matrix, over the same bytes.

    codes: E4M3 (out, columns). scales: fp32 (out / 128, columns / 128), rounded up. dtype: of x and of the result.
    """
    stored = opfuse.import_weights({"layer.weight": codes, "layer.weight_scale_inv": scales})["layer.weight"]
    linear = nn.Linear(codes.shape[1], codes.shape[0], bias=False, device="meta", dtype=dtype)
    linear.weight = nn.Parameter(stored.to(dtype), requires_grad=False)
    opfuse.fuse_(linear, RECIPE)
    return linear


def is_plain(prefix: str, ignored: Collection[str], packed: Mapping[str, Sequence[str]]) -> bool:
    """Whether the checkpoint holds a layer plain. packed: the modules of the checkpoint that a layer of vLLM is made of.

    ValueError if some of them are plain and some are not.
    """
    path, _, name = prefix.rpartition(".")
    parts = [f"{path}.{part}".lstrip(".") for part in packed.get(name, (name,))]
    plain = {any(part == each or part.startswith(f"{each}.") for each in ignored) for part in parts}
    if len(plain) > 1:
        raise ValueError(f"{prefix}: wants parts that are all quantized or all plain, got both. Cure: ignore all of {parts}.")
    return plain.pop()
