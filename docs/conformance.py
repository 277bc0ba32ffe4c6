"""Writes docs/conformance.md: ``python -m docs.conformance`` rewrites it, ``--check`` only compares.

Every scale rule casts the same values as the library that it is named after, on the CPU, and the bytes are counted that differ.
Where some do, the page says which blocks they are in and what the library does there; that they are in no others is checked.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from docs.tables import table
from opfuse.formats import ROWWISE
from opfuse.numerics.layouts import lines_of, load_scale, to_tiles
from opfuse.numerics.rules import RULES
from opfuse.numerics.scales import amax
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from opfuse.tensors.storage import Plane
from tests.oracles import libraries

DOCUMENT = Path(__file__).resolve().parent / "conformance.md"
E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
E2M1 = torch.float4_e2m1fn_x2

_HEAD = """# Bytes compared with other libraries

A format defines how a value is stored, but not how its scale is computed. Libraries compute scales differently, so their bytes
differ. The field `scale_rule` of quantizers and recipes chooses the library whose rule a cast follows:

```python
from opfuse import recipes

recipes.MXFP8BlockScaling(scale_rule="ocp_floor")
recipes.Float8BlockScaling(scale_rule="deepgemm")  # scales are powers of two: its use_ue8m0
recipes.Float8BlockScaling(scale_rule="compressed_tensors", use_f32_scales=True)
```

"""

_KERNELS = """
The last column says how a rule runs on a GPU: in kernels, fused ones included, or by its torch definition, as on a CPU, with the
same bytes. A block with an infinity or a NaN decodes as NaN under every rule, whatever the library does.

## Bytes that differ

How many bytes of codes and scales differ between opfuse's cast and the library's ({libraries}; DeepGEMM needs a GPU, so its
published formulas are reimplemented in numpy). Inputs are normally distributed values growing from 1e-6 to 1e6 (*ordinary*), and
blocks whose largest values go through every exponent of bf16 (*every exponent*). The last column says in which blocks bytes
differ, and why.

"""


class Case(NamedTuple):
    """One cast of ours beside a library's.

    library, function: what is called, told in the page. made: its codes and decode scales. blocks: rows and columns that share a
    scale in the values of ``every exponent``. beyond: amaxes of blocks that may differ, and why they do.
    """

    library: str
    function: str
    rule: str
    quantizer: Quantizer
    made: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    width: int = 128
    beyond: tuple[str, Callable[[torch.Tensor], torch.Tensor]] | None = None


def _cases() -> Iterator[Case]:
    for dims, rows, function in ((1, 1, "per_token_cast_to_fp8"), (2, 128, "per_block_cast_to_fp8")):
        for pow2 in (False, True):
            quantizer = Float8BlockQuantizer(E4M3, block_scaling_dim=dims, force_pow_2_scales=pow2, scale_rule="deepgemm")
            name = f"{function}(use_ue8m0={pow2})"
            yield Case("DeepGEMM", name, "deepgemm", quantizer, _deepgemm(rows, ue8m0=pow2))
    exact = {"scale_rule": "compressed_tensors", "force_pow_2_scales": False}
    schemes = {"FP8_DYNAMIC": Float8RowQuantizer(E4M3, **exact), "FP8_BLOCK": Float8BlockQuantizer(E4M3, **exact)}
    for scheme, quantizer in schemes.items():
        yield Case("compressed-tensors", scheme, "compressed_tensors", quantizer, _compressed(scheme))
    largest = "amax of 1.75 * 2^127 or more: its scale is infinite", lambda a: a >= 1.75 * 2.0**127
    mx = MXFP8Quantizer(scale_rule="compressed_tensors")
    yield Case("compressed-tensors", "MXFP8", "compressed_tensors", mx, _compressed("MXFP8"), 32, largest)
    four = MXFP4Quantizer(scale_rule="compressed_tensors")
    yield Case("compressed-tensors", "MXFP4", "compressed_tensors", four, libraries.compressed_tensors_mxfp4, 32, largest)
    for quantizer, by_row, function in (
        (Float8CurrentScalingQuantizer, False, "tensor_to_scale"),
        (Float8RowQuantizer, True, "tensor_to_scale, AXISWISE"),
    ):
        made = quantizer(E4M3, force_pow_2_scales=True, scale_rule="torchao_pow2")
        yield Case("torchao", function, "torchao_pow2", made, _pow2(by_row=by_row))
    for element, low in ((E4M3, 2.0**-118), (E5M2, 2.0**-111), (E2M1, 2.0**-124)):
        name = {E4M3: "E4M3", E5M2: "E5M2", E2M1: "E2M1"}[element]
        smallest = f"amax below {low:.3g}, under the scale 2^-127: it divides by 2^-126", lambda a, low=low: a < low
        yield Case(
            "torchao", f"to_mx, FLOOR, {name}", "ocp_floor", _mx("ocp_floor", element), _ao("FLOOR", element), 32, smallest
        )
        low = _mx("rceil", element).formats[0].element.max * 2.0**-127
        smallest = f"amax of {low:.3g} or less, under the scale 2^-127: it multiplies by 1", lambda a, low=low: a <= low
        yield Case("torchao", f"to_mx, RCEIL, {name}", "rceil", _mx("rceil", element), _ao("RCEIL", element), 32, smallest)
    unlike = "any: no rule of that name; it rounds the global scale to the dtype, has no block scale 0, and divides"
    every = unlike, lambda a: torch.ones_like(a, dtype=torch.bool)
    yield Case("compressed-tensors", "NVFP4", "te", NVFP4Quantizer(), libraries.compressed_tensors_nvfp4, 16, every)


def _deepgemm(rows: int, *, ue8m0: bool) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    return lambda x: libraries.deepgemm(x, (rows, 128), ue8m0=ue8m0)


def _compressed(scheme: str) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    return lambda x: libraries.compressed_tensors(x, scheme)


def _pow2(*, by_row: bool) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    return lambda x: libraries.torchao_pow2(x, by_row=by_row)


def _ao(mode: str, element: torch.dtype) -> Callable[[torch.Tensor], Sequence[torch.Tensor]]:
    return lambda x: libraries.torchao_mx(x, mode, element)


def _mx(rule: str, element: torch.dtype) -> Quantizer:
    return MXFP4Quantizer(scale_rule=rule) if element == E2M1 else MXFP8Quantizer(element, scale_rule=rule)


def _ordinary(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(256, 3 * 128, generator=generator) * torch.logspace(-6, 6, 256)[:, None]


def _every_exponent(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    mantissas = torch.tensor([1, 1 + 2**-7, 1.5, 1.75, 1.75 + 2**-7, 2 - 2**-7], dtype=torch.float64)
    largest = (torch.exp2(torch.arange(-133, 128).double())[:, None] * mantissas).flatten()
    values = (2 * torch.rand(len(largest), width, generator=generator, dtype=torch.float64) - 1).abs()
    values[:, 0] = 1
    return (values * largest[:, None]).to(BF16).float()


INPUTS = {"ordinary": _ordinary, "every exponent": _every_exponent}
CASES = [*_cases()]


def differing(case: Case, x: torch.Tensor) -> tuple[int, int]:
    """Bytes of codes and scales that differ, and how many there are. AssertionError for one in a block that should not."""
    plane = case.quantizer.wanting(columnwise=False).quantize(x).plane(ROWWISE)
    codes, scales = case.made(x)[:2]
    wrong, wrong_scales = plane.data != codes, _scales(plane).flatten() != scales.flatten()
    amaxes = amax(to_tiles(lines_of(x.float(), ROWWISE), plane.layout.block), (1, 3))
    allowed = torch.zeros_like(amaxes, dtype=torch.bool) if case.beyond is None else case.beyond[1](amaxes)
    each = to_tiles(wrong.float(), (plane.layout.block[0], plane.data.shape[1] // allowed.shape[1]))
    found = amaxes[(each.amax((1, 3)).bool() | wrong_scales.reshape(allowed.shape)) & ~allowed]
    if len(found):
        told = f"{case.function}: {len(found)} blocks differ, of amaxes {found.min():.3g} to {found.max():.3g}"
        raise AssertionError(f"{told}: mend the rule, or say in `beyond` of its Case which blocks differ, and why")
    return int(wrong.sum() + wrong_scales.sum()), wrong.numel() + wrong_scales.numel()


def _scales(plane: Plane) -> torch.Tensor:
    """The decode scales of a rowwise plane, without padding."""
    assert plane.scale is not None
    return plane.scale if plane.format.family == "tensor" else load_scale(plane.scale, plane.layout)


def _rules() -> str:
    def kernels(name: str) -> str:
        def told(family: str) -> str:
            way = RULES[name].ways[family]
            kinds = {pow2: pow2 in way.carried for pow2 in way.powers}
            if len(set(kinds.values())) == 1:
                return f"{family}: {'kernels' if all(kinds.values()) else 'torch'}"
            return f"{family}: kernels with power-of-two scales, else torch"

        return "; ".join(told(family) for family in RULES[name].ways)

    return table(["rule", "published in", "kernels"], ([f"`{name}`", rule.source, kernels(name)] for name, rule in RULES.items()))


def _compared() -> str:
    rows = []
    for case in CASES:
        for name, make in INPUTS.items():
            wide = make(case.width)
            for dtype, told in ((BF16, "bf16"), (FP32, "fp32")):
                wrong, of = differing(case, wide.to(dtype))
                where = case.beyond[0] if case.beyond and wrong else ""
                fmt = str(case.quantizer.formats[0])
                rows.append(
                    [case.library, f"`{case.function}`", f"`{case.rule}`", f"`{fmt}`", f"{name}, {told}", of, wrong, where]
                )
    head = ["library", "function or scheme", "rule", "format", "values", "bytes", "differ", "in blocks with"]
    return table(head, rows)


def rendered() -> str:
    """The page."""
    names = " and ".join(f"{name} {importlib.metadata.version(name)}" for name in ("compressed-tensors", "torchao"))
    return f"{_HEAD}{_rules()}\n{_KERNELS.format(libraries=names)}{_compared()}\n"


def main(arguments: Sequence[str]) -> int:
    text = rendered()
    if "--check" in arguments:
        return int(DOCUMENT.read_text(encoding="utf-8") != text)
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
