"""The casts of every format, element by element, over anything that offers the functions of an oracle.

A rule takes an implementation, values ``x`` and, for each of them, an amax, both as fp32 bits, and gives the tuple of the
arrays it makes: scales, decode scales, codes. The same rules run on the oracles and on what is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.oracles.inputs import LARGEST

MAX = {"e4m3": 0x43E00000, "e5m2": 0x47600000, "e2m1": 0x40C00000}  # 448, 57344, 6
MAGNITUDE = np.uint32(0x7FFFFFFF)
Arrays = tuple[np.ndarray, ...]


def scaled(by: Any, x: np.ndarray, amax: np.ndarray, element: str, **options: Any) -> Arrays:
    """fp32 scale, its inverse, codes: per-tensor current scaling and fp32-scaled blocks."""
    scale = by.scale_from_amax(amax, MAX[element], **options)
    return scale, by.decode_scale(scale, amax), by.encode(by.multiply(x, scale), element)


def mx(by: Any, x: np.ndarray, amax: np.ndarray, element: str, **options: Any) -> Arrays:
    """E8M0 code, its value, its multiplier, codes."""
    code = by.e8m0_from_amax(amax, element, **options)
    multiplier = by.e8m0_multiplier(code)
    return code, by.decode_e8m0(code), multiplier, by.encode(by.multiply(x, multiplier), element)


def nvfp4(by: Any, x: np.ndarray, amax: np.ndarray, element: str, **options: Any) -> Arrays:
    """Global scale from ``amax`` for ``encode_max``, block byte from ``block_amax`` (or the value alone), multiplier, codes."""
    global_scale = by.nvfp4_global_scale(amax, options["encode_max"])
    block_scale = by.nvfp4_block_scale(options.get("block_amax", x & MAGNITUDE), global_scale)
    multiplier = by.nvfp4_multiplier(block_scale, global_scale)
    return global_scale, block_scale, multiplier, by.encode(by.multiply(x, multiplier), element)


@dataclass(frozen=True)
class Case:
    """One rule with its element and options, and the input types that it concerns."""

    rule: Callable[..., Arrays]
    element: str
    options: MappingProxyType[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    sources: tuple[str, ...] = ("bf16", "fp16")

    def run(self, by: Any, x: np.ndarray, amax: np.ndarray) -> Arrays:
        """The arrays that ``by`` makes."""
        return self.rule(by, x, amax, self.element, **self.options)


def _cases() -> Iterator[tuple[str, Case]]:
    def case(rule: Callable[..., Arrays], element: str, sources: tuple[str, ...] = ("bf16", "fp16"), **options: Any) -> Case:
        return Case(rule, element, MappingProxyType(options), sources)

    tiny = 0x2B8CBCCC  # 1e-12
    for element in MAX:
        yield f"tensor_{element}", case(scaled, element)
        yield f"tensor_{element}_pow2", case(scaled, element, pow2=True)
        yield f"tensor_{element}_eps", case(scaled, element, eps=tiny)
        yield f"mx_{element}_ceil", case(mx, element)
        yield f"mx_{element}_floor", case(mx, element, rounding="floor")
        for source in ("bf16", "fp16"):
            yield f"block_{element}_{source}", case(scaled, element, (source,), inf_value=LARGEST[source])
            yield f"block_{element}_{source}_pow2", case(scaled, element, (source,), inf_value=LARGEST[source], pow2=True)
    for encode_max in (448, 256):
        yield f"nvfp4_{encode_max}", case(nvfp4, "e2m1", encode_max=encode_max)


CASES = dict(_cases())
SOURCED = [(name, source) for name, case in CASES.items() for source in case.sources]


def amax_arrangements(values: np.ndarray) -> Iterator[np.ndarray]:
    """For each value an amax: its own magnitude, then the magnitudes of all values in four shuffles."""
    magnitudes = values & MAGNITUDE
    yield magnitudes
    for seed in range(4):
        yield np.random.default_rng(seed).permutation(magnitudes)


def mismatches(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Flat indices where the bits differ; every NaN of fp32 (uint32 arrays) counts as the same."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wrong = got != want
    if got.dtype == np.uint32:
        wrong &= ((got & MAGNITUDE) <= 0x7F800000) | ((want & MAGNITUDE) <= 0x7F800000)
    return np.flatnonzero(wrong)


def check_equal(got: Arrays | np.ndarray, want: Arrays | np.ndarray, *inputs: np.ndarray) -> None:
    """Fail with the first differing element of each array, and its inputs."""
    got, want = (arrays if isinstance(arrays, tuple) else (arrays,) for arrays in (got, want))
    assert len(got) == len(want)
    for position, (g, w) in enumerate(zip(got, want)):
        wrong = mismatches(g, w)
        if wrong.size:
            i = wrong[0]
            given = ", ".join(f"{x.flat[i]:#x}" for x in inputs if x.shape == g.shape)
            found = f"{wrong.size} of {g.size} differ, first [{i}], given ({given}): {g.flat[i]:#x}, wants {w.flat[i]:#x}"
            raise AssertionError(f"array {position}: {found}")
