"""Random bits for stochastic rounding: a function of seed and element index, so of no launch shape and no call order.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Element ``i`` of a plane, counted
over the logical elements in the order in which that plane stores them, takes byte ``i % 16`` (little endian) of the 128-bit
block with counter (low word of ``i // 16``, high word of it, the plane's stream, 0) and the 64-bit seed as key.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
BLOCK = 16

STREAMS = {"rowwise": 0, "columnwise": 1}
"""Third counter word: the two planes of one cast share a seed and never a random byte."""


def draw_seed(device: torch.device) -> torch.Tensor:
    """A 64-bit seed, int64 (1,), from torch's default generator of ``device``; nothing is read back to the host."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Four 32-bit words per counter; counter (4) and key (2) are words held in int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The low 64 bits of an int64 product are those of the unsigned product; shift and mask read its two words.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def random_bytes(seed: torch.Tensor, count: int, stream: int) -> torch.Tensor:
    """int32 values 0…255 for elements 0…count - 1 of a plane; ``seed`` is int64 (1,), ``stream`` the plane's word."""
    block = torch.arange((count + BLOCK - 1) // BLOCK, dtype=torch.int64, device=seed.device)
    counter = (block & _WORD, block >> 32, torch.full_like(block, stream), torch.zeros_like(block))
    words = torch.stack(philox(counter, (seed & _WORD, (seed >> 32) & _WORD)), dim=-1)
    octets = torch.stack([(words >> shift) & 0xFF for shift in (0, 8, 16, 24)], dim=-1)
    return octets.flatten()[:count].to(torch.int32)
