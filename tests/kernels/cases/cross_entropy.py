"""Cases of losses of rows: options, dtypes of the gradient, and vocabularies that fill tiles, eights, or neither."""

from __future__ import annotations

import functools
import zlib
from typing import NamedTuple

import torch

from opfuse.kernels.cross_entropy import row_losses
from opfuse.kernels.engine.registry import Arguments, CaseTable
from opfuse.numerics.cross_entropy import TILE, CrossEntropy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = CrossEntropy()
ALL = CrossEntropy(ignore_index=5, label_smoothing=0.1, z_loss=1e-3, softcap=3.0)


class Rows(NamedTuple):
    """Logits of ``words`` in each of a few rows, of which one is ignored.

    scaled: by a number for each row. misaligned: on 4 bytes. wild: some rows have a NaN, an infinity, minus infinity in one place
    or in most, or a target that is no word. wide: logits up to 300, so that most exponentials are 0.
    """

    words: int
    gradient: torch.dtype | None = BF16
    how: CrossEntropy = PLAIN
    rows: int = 5
    scaled: bool = False
    misaligned: bool = False
    wild: bool = False
    wide: bool = False


def case(rows: Rows, device: torch.device) -> Arguments:
    random = torch.Generator().manual_seed(zlib.crc32(repr(rows).encode()))
    first = int(rows.misaligned)
    values = torch.randn(rows.rows * rows.words + first, generator=random) * (100 if rows.wide else 3)
    targets = torch.randint(rows.words, (rows.rows,), generator=random)
    targets[0], targets[-1] = rows.how.ignore_index, rows.words - 1
    logits = values[first:].view(rows.rows, rows.words)
    if rows.wild:
        logits[1, rows.words // 2], logits[2, 0], logits[3, -1] = torch.nan, torch.inf, -torch.inf
        logits[4, : rows.words - 1] = -torch.inf
        logits[5] = -torch.inf
        targets[6:9] = torch.tensor([-1, rows.words, 2**40])
        logits[9, 0] = torch.nan
        targets[9] = rows.how.ignore_index
    scales = torch.randn(rows.rows, generator=random).to(device) if rows.scaled else None
    logits = values.to(device)[first:].view_as(logits)
    return Arguments((logits, targets.to(device), rows.how), {"gradient": rows.gradient, "scales": scales})


_ALL = (
    *(Rows(words, how=how) for words in (1, 7, 8, 1000, TILE, TILE + 1) for how in (PLAIN, ALL)),
    *(
        Rows(words, dtype, how, rows=2)
        for words, dtype in ((32768, FP32), (128256, BF16), (151936, FP16))
        for how in (PLAIN, ALL)
    ),
    *(Rows(words, None, how, scaled=True) for words in (TILE + 8, 999) for how in (PLAIN, ALL)),
    *(Rows(words, dtype, ALL, scaled=True) for words in (2 * TILE + 72, 2 * TILE + 71) for dtype in (BF16, FP16, FP32)),
    *(Rows(words, dtype, PLAIN) for words in (4096, 4095) for dtype in (FP16, FP32)),
    *(Rows(words, how=how, rows=12, wild=True) for words in (TILE + 264, 77) for how in (PLAIN, ALL)),
    Rows(1032, FP32, CrossEntropy(z_loss=0.1), rows=12, wild=True),
    Rows(1032, None, CrossEntropy(label_smoothing=0.3), rows=12, wild=True),
    Rows(33000, how=CrossEntropy(z_loss=1e-4), wide=True),
    Rows(33000, how=CrossEntropy(label_smoothing=1.0), wide=True),
    Rows(33000, FP32, CrossEntropy(softcap=30.0), wide=True),
    Rows(33001, FP16, CrossEntropy(softcap=30.0), wide=True),
    Rows(50257, how=CrossEntropy(label_smoothing=0.1)),
    Rows(TILE, misaligned=True),
    Rows(2 * TILE, FP32, misaligned=True),
    Rows(264, rows=3000),
)
CASES: CaseTable = {row_losses: {str(rows): functools.partial(case, rows) for rows in _ALL}}
