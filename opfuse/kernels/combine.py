"""Rows of tokens put together behind experts: kernels with the bits of numerics/combine.py."""

from __future__ import annotations

import torch

from opfuse.kernels.engine.launch import Grid
from opfuse.kernels.engine.parameters import parameter_of
from opfuse.kernels.engine.registry import BITWISE, Launcher, kernel
from opfuse.kernels.engine.variants import C_TYPES, PACK, VECTOR, addresses, on_bytes, variant_of
from opfuse.numerics import combine as definition

_PARAMETERS = parameter_of("combine.cu")
_THREADS = 256


@kernel("combine.cu", reference=definition.combine_rows, tolerance=BITWISE)
def combine_rows(
    launch: Launcher,
    rows: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Reads the rows once. What no kernel takes (fp64, places that are not int64) takes the torch definition."""
    dtype = dtype or rows.dtype
    if not _takes(places, rows.shape[1], (rows.dtype, dtype, None if weights is None else weights.dtype)):
        return definition.combine_rows(rows, places, weights, dtype=dtype)
    y = torch.empty(places.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    _queue(launch, "combine_rows", places, weights, of_rows={"rows": rows.contiguous()}, of_tokens={"y": y})
    return y


@kernel("combine.cu", reference=definition.combine_rows_backward, tolerance=BITWISE)
def combine_rows_backward(
    launch: Launcher,
    dy: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reads ``dy`` once for every few rows of a token, and the rows once where the gradient of the weights is wanted."""
    dtype = dtype or dy.dtype
    taken = _takes(places, dy.shape[1], (dy.dtype, dtype, None if weights is None else weights.dtype))
    if not taken or (rows is not None and rows.dtype != dtype):
        return definition.combine_rows_backward(dy, places, weights, rows, dtype=dtype)
    d_rows = torch.empty(places.numel(), dy.shape[1], dtype=dtype, device=dy.device)
    d_weights = None if rows is None or weights is None else torch.empty(places.shape, dtype=weights.dtype, device=dy.device)
    of_rows = {"d_rows": d_rows} if rows is None or d_weights is None else {"d_rows": d_rows, "rows": rows.contiguous()}
    of_tokens = {"dy": dy.contiguous()}
    _queue(launch, "combine_rows_backward", places, weights, of_rows=of_rows, of_tokens=of_tokens, d_weights=d_weights)
    return d_rows, d_weights


def _takes(places: torch.Tensor, columns: int, dtypes: tuple[torch.dtype | None, ...]) -> bool:
    known = all(dtype is None or dtype in C_TYPES for dtype in dtypes)
    return known and places.dtype == torch.int64 and places.numel() > 0 and columns > 0


def _queue(
    launch: Launcher,
    entry: str,
    places: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    of_rows: dict[str, torch.Tensor],
    of_tokens: dict[str, torch.Tensor],
    d_weights: torch.Tensor | None = None,
) -> None:
    """A block for each token. of_rows, of_tokens: the arrays with a row for each place, and with one for each token."""
    (tokens, top_k), row, token = places.shape, next(iter(of_rows.values())), next(iter(of_tokens.values()))
    given = {"places": places.contiguous(), "weights": None if weights is None else weights.contiguous()}
    variant = variant_of(
        "combine.cu",
        _PARAMETERS.layout,
        entry=entry,
        IO=C_TYPES[row.dtype],
        OUT=C_TYPES[token.dtype],
        WEIGHT=C_TYPES[torch.float32 if weights is None else weights.dtype],
        WEIGHTED=weights is not None,
        SCORED=d_weights is not None,
        ALIGNED=row.shape[1] % PACK == 0 and all(on_bytes(array, VECTOR) for array in (*of_rows.values(), token)),
    )
    arrays = addresses({**of_rows, **of_tokens, **given, "d_weights": d_weights}, _ARRAYS)
    fields = _PARAMETERS(**arrays, columns=row.shape[1], top_k=top_k)
    launch(variant, entry, Grid(tokens, _THREADS), _PARAMETERS.layout, *fields, device=row.get_device())


_ARRAYS = ("rows", "dy", "places", "weights", "y", "d_rows", "d_weights")
