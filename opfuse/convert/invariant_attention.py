"""Causal attention in which a query has the same bits alone and in any batch, with a KV cache and without one.

Registered with transformers' attention interface. On a GPU, 16-bit queries run torch's ``varlen_attn``, which splits keys for
single queries alone (torch 2.13 and newer are told not to); anything else runs products of fixed sizes over tiles of keys,
counted from the first key of each sequence. What a query may not see adds exact zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn.functional import pad

from opfuse.core.context import versions
from opfuse.errors import ConversionError, describe

NAME = "opfuse_invariant"
TILE = 64
"""Queries and keys of a tile."""

HARMLESS = {
    *("cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "past_key_values", "position_ids", "use_cache"),
}
"""What models hand on that changes no attention beside what is read here."""


class Sequences(NamedTuple):
    """Which queries see which keys: those of their own sequence, of which both end at the same token.

    queries, keys: rows of those that are no padding, among (batch x length); None: all. query_starts, key_starts: int32, where
    each sequence begins among these, and their number. counts: of queries and keys of each sequence.
    """

    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    counts: list[tuple[int, int]]


def sequences(positions: torch.Tensor, mask: torch.Tensor | None, keys: int, where: str = "attention") -> Sequences:
    """The sequences of a call. positions: (batch, queries). mask: bool (batch, keys), False at padding.

    Where there are as many keys as queries, a row of the batch may hold several sequences, one behind the other. ConversionError
    if positions do not count the tokens of each sequence from 0 on.
    """
    batch, count = positions.shape
    if mask is None and bool((positions == torch.arange(keys - count, keys, device=positions.device)).all()):
        # As in every decoded token: the host knows all numbers, and waits for the device once.
        starts = torch.arange(batch + 1, dtype=torch.int32, device=positions.device)
        return Sequences(None, None, starts * count, starts * keys, [(count, keys)] * batch)
    real = positions.new_ones(batch, keys, dtype=torch.bool) if mask is None else mask
    asked = real[:, keys - count :]
    if keys == count:
        follows = asked[:, :-1] & (positions[:, 1:] == positions[:, :-1] + 1)
        first = asked & ~pad(follows, (1, 0))
        wrong = first & (positions != 0)
        key_starts = query_starts = pad(first[asked].nonzero().flatten(), (0, 1), value=int(asked.sum())).int()
    else:
        wrong = asked & (positions != real.cumsum(1)[:, keys - count :] - 1)
        real = real & asked.any(1, keepdim=True)
        query_starts, key_starts = (pad(each.sum(1)[asked.any(1)].cumsum(0), (1, 0)).int() for each in (asked, real))
    if bool(wrong.any()):
        got = f"others, first at {wrong.nonzero()[0].tolist()} of (batch, token)"
        cure = "pass position_ids that begin at 0 in each sequence, as attention_mask.cumsum(-1) - 1, and a DynamicCache"
        raise ConversionError(describe(where, wanted="positions that count the tokens of each sequence", got=got, cure=cure))
    counts = list(zip(query_starts.diff().tolist(), key_starts.diff().tolist()))
    rows, columns = (each.flatten().nonzero().flatten() for each in (asked, real))
    return Sequences(rows, columns, query_starts, key_starts, counts)


class InvariantAttention:
    """What transformers calls as attention. It remembers the sequences of a forward pass, which all layers share."""

    def __init__(self) -> None:
        self.last: tuple[Any, Sequences, torch.Tensor] | None = None

    def __call__(  # noqa: PLR0917 — as transformers calls it
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """query (batch, heads, queries, width), key and value (batch, key heads, keys, width): (batch, queries, heads, width)."""
        where = f"attention of an invariant model, {type(module).__name__} {getattr(module, 'layer_idx', '')}".rstrip()
        unknown = next((name for name, told in kwargs.items() if name not in HARMLESS and not _is_nothing(told)), "")
        positions = kwargs.get("position_ids")
        if unknown or dropout or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            got = unknown or (f"a dropout of {dropout}" if dropout else "attention in both directions")
            _refuse(where, got, "set it to None in the model's config, or use a model without it")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2:
            _refuse(where, "no position_ids (batch, queries)", "use a model whose layers hand them on, as Llama's do")
        if attention_mask is not None and attention_mask.shape != (len(key), key.shape[2]):
            _refuse(where, f"a mask of shape {tuple(attention_mask.shape)}", "pass a 2-D attention_mask, and a DynamicCache")
        found = self._sequences(len(query), positions, attention_mask, key.shape[2], where)
        batch, heads, length, width = query.shape
        if not found.counts:  # nothing but padding
            return query.new_zeros(batch, length, heads, value.shape[-1]), None
        q = query.transpose(1, 2).reshape(-1, heads, width)
        k, v = (each.transpose(1, 2).reshape(-1, each.shape[1], each.shape[3]) for each in (key, value))
        q, k, v = _taken(q, found.queries), _taken(k, found.keys), _taken(v, found.keys)
        scale = width**-0.5 if scaling is None else scaling
        with torch.autocast(query.device.type, enabled=False):
            y = (_by_flash if _has_flash(q, k, v) else _by_tiles)(q, k, v, found, scale)
        if found.queries is not None and len(y) < batch * length:
            y = y.new_zeros(batch * length, *y.shape[1:]).index_copy(0, found.queries, y)
        return y.view(batch, length, heads, -1), None

    def _sequences(self, batch: int, positions: torch.Tensor, mask: torch.Tensor | None, keys: int, where: str) -> Sequences:
        now, last = (positions, mask, (batch, keys, *versions(positions))), self.last
        same = last is not None and last[0][0] is positions and last[0][1] is mask and last[0][2] == now[2]
        if (
            last is None or not same or (positions.is_inference() and not torch.equal(positions, last[2]))
        ):  # which counts no writes
            kept = positions.clone() if positions.is_inference() else positions
            self.last = last = now, sequences(positions.expand(batch, -1), mask, keys, where), kept
        return last[1]


def _is_nothing(told: Any) -> bool:
    return told is None or told is False


def _refuse(where: str, got: str, cure: str) -> NoReturn:
    raise ConversionError(describe(where, wanted="causal attention over whole sequences", got=got, cure=cure))


def _taken(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None or len(rows) == len(x) else x.index_select(0, rows)


def _has_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's own kernel takes such heads, by what no batch changes."""
    if {query.dtype} != {key.dtype, value.dtype}:
        return False
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or torch.cuda.get_device_capability()[0] < 8:
        return False
    width = query.shape[-1]
    return not (width < value.shape[-1] or width % 8 or width > 256)


def _by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, found: Sequences, scale: float) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # A longest query of 1 would have the kernel swap heads and queries, and split keys.
    longest = [max(2, *each) for each in zip(*found.counts)]
    known = _parameters_of(varlen_attn)
    newer = {"enable_gqa": q.shape[1] != k.shape[1], "num_splits": 1}  # torch 2.11 shares heads unasked
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)} | {name: newer[name] for name in newer if name in known}
    filled = pad(v, (0, q.shape[-1] - v.shape[-1])) if v.shape[-1] < q.shape[-1] else v
    y: Any = varlen_attn(q, k, filled, found.query_starts, found.key_starts, *longest, **options)
    return y[..., : v.shape[-1]]  # type: ignore[no-any-return]


@cache
def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """By name. To read a signature takes the host 60 us, and each layer asks for each token."""
    return frozenset(inspect.signature(function).parameters)


def _by_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, found: Sequences, scale: float) -> torch.Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    pieces, heads = [], q.shape[1] // k.shape[1]
    for (queries, keys), own_q, own_k, own_v in zip(found.counts, *_split(found.counts, q, k, v)):
        tiles = [_tiles(each.to(dtype).transpose(0, 1).repeat_interleave(heads, 0), keys) for each in (own_k, _with_ones(own_v))]
        for start, rows in _tiles_of(own_q.to(dtype).transpose(0, 1) * scale, queries):
            last = (keys - queries + start + torch.arange(TILE, device=q.device)).clamp(max=keys - 1)  # that each row sees
            made = _tile(rows, tiles[0], tiles[1], last, min(keys, keys - queries + start + TILE))
            pieces.append(made[:, : queries - start].transpose(0, 1).to(q.dtype))
    return torch.cat(pieces)


def _split(counts: list[tuple[int, int]], q: torch.Tensor, *others: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    queries, keys = zip(*counts)
    return [q.split(list(queries)), *(each.split(list(keys)) for each in others)]


def _with_ones(v: torch.Tensor) -> torch.Tensor:
    """A column of ones, whose product is the sum of a row's weights, in the order of the other columns."""
    return pad(v, (0, 1), value=1.0)


def _tiles_of(x: torch.Tensor, count: int) -> list[tuple[int, torch.Tensor]]:
    return [(number * TILE, tile) for number, tile in enumerate(_tiles(x, count))]


def _tiles(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """``x`` (heads, count, width) in tiles of TILE, each in memory of its own; zeros fill the last one."""
    return [part.clone(memory_format=torch.contiguous_format) for part in pad(x, (0, 0, 0, -count % TILE)).split(TILE, 1)]


def _tile(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], last: torch.Tensor, reach: int) -> torch.Tensor:
    """The result for a tile of queries (heads, TILE, width), over the tiles of keys up to ``reach``."""
    count = -(-reach // TILE)
    scores = []
    for number, tile in enumerate(keys[:count]):
        hidden = number * TILE + torch.arange(TILE, device=q.device) > last.unsqueeze(-1)
        scores.append(torch.bmm(q, tile.mT).masked_fill(hidden, float("-inf")))
    largest = torch.stack([each.detach().amax(-1, keepdim=True) for each in scores]).amax(0)
    total = q.new_zeros(*q.shape[:2], values[0].shape[-1])
    for each, tile in zip(scores, values):
        total = total + torch.bmm((each - largest).exp(), tile)
    return total[..., :-1] / total[..., -1:]


def register_attention() -> None:
    """Register the attention, and the 2-D mask that it reads, with transformers. ConversionError without transformers 5."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        cure = "pip install 'transformers>=5'"
        raise ConversionError(describe("invariant", wanted="transformers 5", got=str(error), cure=cure)) from error
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(NAME, InvariantAttention())
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, padding_mask)


def padding_mask(*_: Any, kv_length: int, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **__: Any) -> Any:
    """The mask of padding alone, bool (batch, keys) or None: which sequences there are follows from positions."""
    if use_vmap:
        _refuse("attention of an invariant model", "a mask function of the model's own", "use a model without it")
    return None if attention_mask is None else attention_mask[:, -kv_length:].bool()
