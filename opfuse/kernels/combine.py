"""Rows of tokens put together behind experts: kernels with the bits of numerics/combine.py."""

from __future__ import annotations

import torch

from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, on_bytes, variant_of
from opfuse.numerics import combine as definition

_PARAMETERS = parameter_of("combine.cu")
_THREADS = 256


@kernel("combine.cu", reference=definition.combine_rows, tolerance=BITWISE)
def combine_rows(launch: Launcher, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Reads the rows once. What no kernel takes (fp64, places that are not int64) takes the torch definition."""
    if not _takes(rows, places, weights):
        return definition.combine_rows(rows, places, weights)
    y = torch.empty(places.shape[0], rows.shape[1], dtype=rows.dtype, device=rows.device)
    _queue(launch, "combine_rows", places, weights, {"rows": rows.contiguous(), "y": y})
    return y


@kernel("combine.cu", reference=definition.combine_rows_backward, tolerance=BITWISE)
def combine_rows_backward(
    launch: Launcher,
    dy: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reads ``dy`` once for every few rows of a token, and the rows once where the gradient of the weights is wanted."""
    if not _takes(dy, places, weights) or (rows is not None and rows.dtype != dy.dtype):
        return definition.combine_rows_backward(dy, places, weights, rows)
    d_rows = torch.empty(places.numel(), dy.shape[1], dtype=dy.dtype, device=dy.device)
    arrays, d_weights = {"dy": dy.contiguous(), "d_rows": d_rows}, None
    if rows is not None and weights is not None:
        d_weights = torch.empty(places.shape, dtype=weights.dtype, device=dy.device)
        arrays |= {"rows": rows.contiguous(), "d_weights": d_weights}
    _queue(launch, "combine_rows_backward", places, weights, arrays)
    return d_rows, d_weights


def _takes(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> bool:
    known = rows.dtype in C_TYPES and (weights is None or weights.dtype in C_TYPES)
    return known and places.dtype == torch.int64 and places.numel() > 0 and rows.shape[1] > 0


def _queue(
    launch: Launcher, entry: str, places: torch.Tensor, weights: torch.Tensor | None, arrays: dict[str, torch.Tensor]
) -> None:
    """A block for each token. arrays: those of tokens and of rows, all of one dtype, and the gradient of the weights."""
    (tokens, top_k), first = places.shape, next(iter(arrays.values()))
    places, weights = places.contiguous(), None if weights is None else weights.contiguous()
    aligned = first.shape[1] % PACK == 0 and all(on_bytes(array, VECTOR) for name, array in arrays.items() if name != "d_weights")
    variant = variant_of(
        "combine.cu",
        _PARAMETERS.layout,
        entry=entry,
        IO=C_TYPES[first.dtype],
        WEIGHT=C_TYPES[torch.float32 if weights is None else weights.dtype],
        WEIGHTED=weights is not None,
        SCORED="d_weights" in arrays,
        ALIGNED=aligned,
    )
    addresses = {name: array.data_ptr() for name, array in arrays.items()}
    fields = _PARAMETERS(
        **{name: addresses.get(name, 0) for name in ("rows", "dy", "y", "d_rows", "d_weights")},
        places=places.data_ptr(),
        weights=0 if weights is None else weights.data_ptr(),
        columns=first.shape[1],
        top_k=top_k,
    )
    launch(variant, entry, Grid(tokens, _THREADS), _PARAMETERS.layout, *fields, device=first.get_device())
