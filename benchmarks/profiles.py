"""Where the device's time of a step goes, kernel by kernel, by torch.profiler: ``python -m benchmarks.profiles``.

The steps are those whose limits are hard to reach: pipeline B under each native recipe, and experts under blocks beside torch's
products in bf16. A trace makes short kernels a little longer. Between the time of all kernels and the time from the first one's
start to the last one's end, the device waits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks import grouped, pipelines
from benchmarks.models import LARGE, PIPELINES, settings
from benchmarks.pytorch import traced
from benchmarks.timing import Call

ALL, SPAN = "all kernels", "from the first to the last"
SHOWN = 0.005
"""The least share of a step that a kernel needs for a figure of its own; the rest is one."""


def steps() -> Iterator[tuple[str, Call]]:
    """What is traced, by name, made when it is asked for."""
    model = PIPELINES[pipelines.LIMITED].fused(LARGE).to("cuda").bfloat16()
    for kind, override, recipe in settings():
        if override is None and kind in pipelines.MOST:
            for what, call in pipelines.module_calls(model, recipe).items():
                yield f"{pipelines.LIMITED}, {what}, {kind}", call
    del model
    variants = [variant for variant in grouped.variants() if variant.name in (grouped.TORCH, grouped.GROUPED, grouped.BLOCKS)]
    for problem, *_ in grouped.USED:
        for variant in variants:
            what = "forward + backward"
            yield (
                f"{problem.label}, {what}, {variant.name.replace(', ', ' with ')}",
                grouped.calls(variant, problem, "cuda")[what],
            )


def kernel_of(name: str) -> str:
    """The name of a kernel without arguments, namespaces and template parameters; of a mangled one, its first names."""
    if name.startswith("_ZN"):
        parts, rest = [], name.removeprefix("_ZN")
        while length := re.match(r"\d+", rest):
            end = length.end() + int(length[0])
            parts.append(rest[length.end() : end])
            rest = rest[end:]
        return "::".join(parts)
    bare = re.sub(r"\(anonymous namespace\)::", "", name).removeprefix("void ").strip()
    return re.split(r"[<(]", bare)[0].rsplit("::", 1)[-1]


def figures(name: str, events: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Milliseconds and launches of each kernel of a step, of all, and how long they took from beginning to end."""
    took, launches = Counter[str](), Counter[str]()
    spans = []
    for event in events:
        kernel = kernel_of(event["name"])
        took[kernel] += event["dur"]
        launches[kernel] += 1
        spans.append((event["ts"], event["ts"] + event["dur"]))
    total = took.total()
    small = {kernel for kernel in took if took[kernel] < SHOWN * total}
    rows = [(kernel, took[kernel], launches[kernel]) for kernel, _ in took.most_common() if kernel not in small]
    rows += [("others", sum(took[kernel] for kernel in small), sum(launches[kernel] for kernel in small))] if small else []
    for kernel, us, count in (*rows, (ALL, total, launches.total())):
        yield _record(f"{name}, {kernel}", us / 1e3, "ms")
        yield _record(f"{name}, {kernel}", count, "launches")
    starts, ends = zip(*spans)
    yield _record(f"{name}, {SPAN}", (max(ends) - min(starts)) / 1e3, "ms")


def records() -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    for name, call in steps():
        for _ in range(grouped.WARM):
            call()
        yield from figures(name, traced(call))


def _record(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "limit": None, "met": None}


def main() -> None:
    for record in records():
        print(f"{record['name']:100s} {record['value']:8.3f} {record['unit']}")


if __name__ == "__main__":
    main()
