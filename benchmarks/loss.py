"""A head and its loss, forward and backward, without the logits of all tokens and with them: ``python -m benchmarks.loss``.

``LinearCrossEntropy`` beside ``cross_entropy(linear(x, weight))`` under torch.compile, bf16, 8192 tokens, 4096 features, on
random data, in turns. Prints milliseconds of both, the ratio, and the most memory that a pass takes above what was there before,
with the bytes that the logits alone have in bf16. Needs a GPU; it has no figure in the record.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.timing import wall_time
from opfuse import ops

TOKENS, FEATURES, WORDS = 8192, 4096, (32768, 128256)
GIB = 2**30

Pass = Callable[[], tuple[torch.Tensor, ...]]


@torch.compile
def usual(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of logits in fp32, as models of transformers compute it."""
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def passes(words: int, chunk: int | None, device: str = "cuda") -> tuple[Pass, Pass]:
    """A forward and backward pass of the op, and of the usual functions."""
    head = ops.LinearCrossEntropy(FEATURES, words, chunk=chunk, device=device, dtype=torch.bfloat16)
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(words, (TOKENS,), device=device)
    leaves = x, head.weight
    return (
        lambda: torch.autograd.grad(head(x, targets), leaves),
        lambda: torch.autograd.grad(usual(x, head.weight, targets), leaves),
    )


def peak(run: Pass) -> int:
    """The most bytes that are allocated in a pass, above what is there before; its result among them."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, nargs="+", default=[None], help="rows; without it, what the op chooses")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for words in WORDS:
        for chunk in arguments.chunk:
            own, other = passes(words, chunk)
            memory = peak(own), peak(other)
            rounds = [(wall_time(own), wall_time(other)) for _ in range(5)]
            one, another = (statistics.median(each) / 1e3 for each in zip(*rounds))
            ratio = statistics.median(theirs / mine for mine, theirs in rounds)
            times = f"{one:7.2f} ms, usual {another:7.2f} ms, x {ratio:.2f}"
            sizes = f"{memory[0] / GIB:5.2f} GiB, usual {memory[1] / GIB:5.2f} GiB, logits {2 * TOKENS * words / GIB:.2f} GiB"
            print(f"{words:7d} words, chunk {chunk or 'default'}: {times}; peak {sizes}")


if __name__ == "__main__":
    main()
