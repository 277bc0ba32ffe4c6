"""Cases of the update of delayed scaling."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch

from opfuse.kernels.casts.delayed import MOST, delayed_update
from opfuse.kernels.engine.registry import Arguments, Case, CaseTable
from opfuse.numerics.delayed import ALGORITHMS, Algorithm, UpdateRule
from opfuse.numerics.scalars import FLT_MAX


def _cases() -> Iterator[tuple[str, Case]]:
    for length, algorithm in itertools.product((1, 2, 9, 1024, 1025, 5000), ALGORITHMS):
        yield f"{length} slots, {algorithm}", functools.partial(_case, (length,) * 40, algorithm)
    yield "more states than a launch has room for", functools.partial(_case, tuple(range(1, 2 * MOST + 2)), "max")


def _case(lengths: Sequence[int], algorithm: Algorithm, device: torch.device) -> Arguments:
    """Histories with a hard value in the first slot, in all slots or in the middle one; in memory one follows another."""
    generator = torch.Generator().manual_seed(len(lengths) + lengths[0])
    hard = (0.0, torch.inf, torch.nan, 1e-45, 1e-38, FLT_MAX, 448.0, -1.0)
    histories = torch.exp2(torch.rand(sum(lengths), generator=generator) * 240 - 120)
    for i, history in enumerate(histories.split(lengths)):
        middle = len(history) // 2
        history[(slice(1), slice(None), slice(middle, middle + 1))[i // len(hard) % 3]] = hard[i % len(hard)]
    scales = torch.exp2(torch.rand(len(lengths), generator=generator) * 20 - 10)
    rules = [UpdateRule((448.0, 57344.0)[i % 2], (0, 1, -2, 100, -100)[i % 5], algorithm) for i in range(len(lengths))]
    counts = torch.arange(len(lengths), dtype=torch.int32)
    states = (list(x.to(device).split(parts)) for x, parts in ((histories, lengths), (scales, 1), (counts, 1)))
    return Arguments((*states, rules))


CASES: CaseTable = {delayed_update: dict(_cases())}
