"""Whole training steps of a Llama of 1.1 B and of 8 B parameters, time and peak memory: ``python -m benchmarks.steps``.

A step is that of :mod:`benchmarks.pretrain`: the model by ``fuse_(pack=True)``, compiled layer by layer, its head and loss, the
gradient's norm, and the optimizer. Its tokens are random, as neither time nor memory depends on them. Beside each recipe stands
bf16, compiled in the same way; both are compared with bf16 under torch's AdamW over fp32 masters, or, of 8 B parameters, where
those would not fit, with bf16 under the optimizer that fits.

"graph": passes and clipping are one CUDA graph (``opfuse.graphed_step``), and so is the step of torchao's optimizer. Memory that
torch has from the GPU grows as it needs it (``PYTORCH_ALLOC_CONF=expandable_segments:True``): without that, a graph of the steps
below took 13 % more, since it holds pieces that no tensor fits in.

Each case runs by itself, since most of them take the greater part of a GPU: one after another in a process, from an empty GPU.
What the cases of a size are compared with runs before them and again behind them, since a GPU slows down as it warms up.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.converted import COMPILED, show
from benchmarks.corpus import PARTS, Corpus
from benchmarks.pretrain import DEFAULT, FUSED, GIB, PLAIN, QUANTIZED, WARM, Data, Run, Settings

Record = dict[str, Any]

WORDS = 32_768
"""What random tokens are below: they are kept in 16 bits."""

SMALL = Settings(tokens=2**24, step_tokens=32_768, validation_tokens=32_768)
LARGE = replace(SMALL, layers=32, hidden=4096, inner=14_336, groups=8, vocabulary=128_256, micro=4, step_tokens=8192)
SIZES: Mapping[str, Settings] = {
    "1.1 B and 32 768 words": SMALL,
    "1.1 B and 128 256 words": replace(SMALL, vocabulary=128_256),
    "8 B and 128 256 words": replace(LARGE, validation_tokens=8192),
}


class Case(NamedTuple):
    """What differs between steps that are compared: names are those of :class:`~benchmarks.pretrain.Settings`."""

    size: str
    recipe: str
    optimizer: str = "adamw"
    loss: str = "compiled"
    graph: bool = False
    keep: str = DEFAULT

    @property
    def settings(self) -> Settings:
        """Of a run."""
        return replace(SIZES[self.size], **{name: value for name, value in self._asdict().items() if name != "size"})

    def __str__(self) -> str:
        kept = "" if self.keep == DEFAULT else f" keep={self.keep}"
        graph = " + graph" if self.graph else ""
        return f"steps, Llama of {self.size}, {self.recipe}{kept} + {self.optimizer} + {self.loss} loss{graph}"


ONE, MANY, EIGHT = SIZES
BASES: Mapping[str, Case] = {ONE: Case(ONE, PLAIN), MANY: Case(MANY, PLAIN), EIGHT: Case(EIGHT, PLAIN, "adamw8bit")}
"""What cases of a size are compared with."""

CASES: Sequence[Case] = (
    Case(ONE, "fp8_current"),
    *(Case(ONE, kind, graph=True) for kind in ("fp8_current", "fp8_block", "delayed")),
    Case(ONE, PLAIN, graph=True),
    *(Case(ONE, PLAIN, "adamw8bit", graph=graph) for graph in (False, True)),
    *(Case(ONE, "fp8_current", "adamw8bit", FUSED, graph) for graph in (False, True)),
    *(Case(ONE, "delayed", "adamw8bit", loss, graph=True) for loss in (FUSED, QUANTIZED)),
    Case(ONE, "delayed", "adamw8bit", QUANTIZED, graph=True, keep="recompute"),
    *(Case(MANY, PLAIN, "adamw8bit", graph=graph) for graph in (False, True)),
    Case(MANY, "fp8_current", "adamw8bit", graph=True),
    Case(MANY, "fp8_current", "adamw8bit", FUSED, graph=True),
    *(Case(MANY, "delayed", "adamw8bit", loss, graph=True) for loss in (FUSED, QUANTIZED)),
    Case(MANY, "delayed", "adamw8bit", QUANTIZED, graph=True, keep="all"),
    Case(EIGHT, PLAIN, "adamw8bit", graph=True),
    *(Case(EIGHT, kind, "adamw8bit") for kind in ("fp8_current", "delayed")),
    *(Case(EIGHT, kind, "adamw8bit", graph=True) for kind in ("fp8_current", "fp8_block")),
)
LEAST: Mapping[tuple[str, str], float] = {
    (ONE, "fp8_current"): 1.30,
    (ONE, "fp8_block"): 1.26,
    (ONE, "delayed"): 1.36,
    (MANY, "fp8_current"): 1.30,
    (EIGHT, "fp8_current"): 1.35,
    (EIGHT, "delayed"): 1.35,
}
"""Times the speed of what it is compared with: at least."""

LEAST_SMALL, MOST = 1.30, 65
"""With the loss fused and moments in 8 bits: at least times the speed of bf16 with fp32 masters, at most percent of its peak."""


def data_of(settings: Settings) -> Data:
    """Random tokens."""
    random = np.random.default_rng(settings.seed)
    train, held_out = (random.integers(0, WORDS, size, dtype=np.uint16) for size in (2**21, settings.validation_tokens))
    about = {"words": WORDS, **{part: {"sha256": "random"} for part in PARTS}}
    return Data(Corpus(train, held_out, np.ones(WORDS, np.int64), about), settings)


def measured(case: Case, rounds: int, device: str) -> tuple[float, int]:
    """Seconds of a step, and the bytes of its peak, from an empty GPU."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    run = Run(case.settings, data_of(case.settings), device)
    run.begin()
    for _ in range(WARM + rounds):
        run.train()
    return statistics.median(run.steady), run.most()


def compared(case: Case, took: float, peak: int, base: tuple[float, int]) -> Iterator[Record]:
    """Figures of a case beside those of what it is compared with."""
    step, most = f"{case}, step", f"{case}, peak"
    speed, share = base[0] / took, 100 * peak / base[1]
    small = case.loss in (FUSED, QUANTIZED) and case.size != EIGHT
    least = LEAST_SMALL if small else LEAST.get((case.size, case.recipe))
    yield {"name": step, "value": 1e3 * took, "unit": "ms", "limit": None, "met": None}
    if case != BASES[case.size]:
        met = None if least is None else speed >= least
        yield {"name": step, "value": speed, "unit": f"x {COMPILED}", "limit": least, "met": met}
    yield {"name": most, "value": peak / GIB, "unit": "GiB", "limit": None, "met": None}
    if case != BASES[case.size]:
        limit, met = (MOST, share <= MOST) if small else (None, None)
        yield {"name": most, "value": share, "unit": f"% of {COMPILED}", "limit": limit, "met": met}


@contextmanager
def expandable(device: str) -> Iterator[None]:
    """What torch gets from the GPU meanwhile may grow, as ``PYTORCH_ALLOC_CONF`` would have it for the whole process."""
    if device != "cuda":
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def records(rounds: int = 7, *, cases: Sequence[Case] = CASES, device: str = "cuda") -> Iterator[Record]:
    """Figures for the record."""
    for size, base in BASES.items():
        some = [case for case in cases if case.size == size]
        if some:
            with expandable(device):
                (before, peak), *found, (behind, _) = (measured(case, rounds, device) for case in (base, *some, base))
            compared_with = (before + behind) / 2, peak
            for case, (took, most) in zip((base, *some), (compared_with, *found)):
                yield from compared(case, took, most, compared_with)


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    arguments = parser.parse_args()
    show(records(arguments.rounds, cases=[case for case in CASES if case.size in arguments.sizes]))


if __name__ == "__main__":
    main()
