"""The package's own FP8 product beside cuBLASLt's, same process, operands and bits: ``python -m benchmarks.products``.

Needs compute capability 9.0. Operands are random codes; scales differ from line to line, as those of activations do.

A product is limited by the chip's power, so its speed depends on what ran before. Kernels that take turns back to back share
that power; some products are also timed cool, after a pause, and alone.

Experts are groups whose sizes the device alone knows, which cuBLASLt does not take: they are beside torch's grouped product in
bf16, both as CUDA graphs, since the host takes longer to queue products of 128 experts than the device to make them.

DeepGEMM, where it is installed, multiplies the same blocks: 1x128 by 128x128 to the same bits, and 1x128 by 1x128, added to fp32.
Experts have room for as many rows as the largest may have, in tiles of up to 128; here all have as many rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.timing import Call, alone, compared, cool
from opfuse.formats import E4M3, ROWWISE, NumberFormat, fp8_block, fp8_row, fp8_tensor
from opfuse.kernels.products.hopper import grouped_product
from opfuse.kernels.products.native import _scaled_mm
from opfuse.kernels.products.runs import product_of_rows
from opfuse.kernels.products.stored import Stored
from opfuse.numerics.layouts import Layout, ceil_div
from opfuse.numerics.row_groups import RowGroups, row_groups

BF16 = torch.bfloat16


class Kind(NamedTuple):
    """Formats of both operands, whether sums are fast, and the least speed, in that of the library."""

    left: NumberFormat
    right: NumberFormat
    fast: bool = False
    least: float = 0.98


KINDS = {
    "per tensor, fast": Kind(fp8_tensor(E4M3), fp8_tensor(E4M3), fast=True),
    "per tensor, split": Kind(fp8_tensor(E4M3), fp8_tensor(E4M3)),
    "per row, fast": Kind(fp8_row(E4M3), fp8_row(E4M3), fast=True),
    "per row, split": Kind(fp8_row(E4M3), fp8_row(E4M3)),
    "1x128 by 128x128": Kind(fp8_block(E4M3, 1), fp8_block(E4M3, 2)),
    "1x128 by 1x128": Kind(fp8_block(E4M3, 1), fp8_block(E4M3, 1), least=0.95),
}
SIZES = ((8192, 2048, 8192), (8192, 4096, 14336), (4096, 7168, 4096), (16384, 7168, 2048))
"""Lines of the left, length of the sums, lines of the right."""

WEIGHT_GRADIENT, FORWARD, LEAST_OF_FORWARD = "1x128 by 1x128", "1x128 by 128x128", 0.92
"""The own product of a weight's gradient under blocks beside the library's forward product of the same work, at least."""

STATES = {"cool": cool, "alone": alone}
STATED = tuple(name for name in KINDS if not name.startswith("per row"))
"""What is timed in these states as well."""

GROUPS = ((8, 2048), (64, 256))
"""Groups and lines of each."""

FEATURES = 7168, 2048
"""Of groups: in and out."""

EXPERTS, ROWS = 128, (16, 64, 128, 192)
"""Experts, and how many rows each may have."""

PEER, LEAST_OF_PEER, PEER_TILE = "DeepGEMM", 0.97, 128
"""A library with products of blocks, and the least speed in that of its own."""

OF_EXPERTS = "per tensor, fast", FORWARD
FEW = {(FORWARD, 16): 100.0}
"""TFLOP/s at least: DeepGEMM's with so few rows, by the project's first comparison."""


def operand(fmt: NumberFormat, lines: int, length: int, device: str) -> Stored:
    layout = Layout(fmt, ROWWISE, (lines, length))
    codes = torch.randn(lines, length, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
    return Stored(codes, torch.rand(layout.scale_shape, device=device) + 0.5, None, layout)


def calls(kind: Kind, count: int, sizes: tuple[int, int, int], device: str) -> tuple[Call, Call]:
    """The library's products one after another, and one launch for all."""
    lines, length, columns = sizes
    sides = (kind.left, lines), (kind.right, columns)
    lefts, rights = ([operand(fmt, n, length, device) for _ in range(count)] for fmt, n in sides)
    options = {"out_dtype": BF16, "fast": kind.fast}
    return (
        lambda: [_scaled_mm(left, right, **options) for left, right in zip(lefts, rights)],
        lambda: grouped_product(lefts, rights, [lines] * count, **options),
    )


def measure(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """One row for each kind and problem: TFLOP/s of both, which take turns, and the own product's speed in the library's."""
    problems = {"x".join(map(str, sizes)): (1, sizes) for sizes in SIZES}
    problems |= {
        f"{count} groups of {lines}, {FEATURES[0]} to {FEATURES[1]}": (count, (lines, *FEATURES)) for count, lines in GROUPS
    }
    for name, kind in KINDS.items():
        for problem, (count, sizes) in problems.items():
            both = calls(kind, count, sizes, device)
            library, own, ratio = compared(*both)
            work = 2e-6 * count * sizes[0] * sizes[1] * sizes[2]
            speeds = {"library": work / library, "own": work / own, "ratio": ratio}
            yield {"kind": name, "problem": problem, **speeds, "least": kind.least}


def graph_of(call: Call) -> Call:
    """The call as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def of_experts(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """One row for each kind and number of rows: TFLOP/s, and the own product's speed in that of torch's in bf16."""
    length, columns = FEATURES
    weights = torch.randn(EXPERTS, columns, length, device=device, dtype=BF16).transpose(1, 2)
    for name in OF_EXPERTS:
        rights = [operand(KINDS[name].right, columns, length, device) for _ in range(EXPERTS)]
        for each in ROWS:
            rows, sizes = EXPERTS * each, torch.full((EXPERTS,), each, device=device)
            groups, ends = RowGroups(row_groups(sizes, rows), rows, EXPERTS), sizes.cumsum(0, dtype=torch.int32)
            left, x = operand(KINDS[name].left, rows, length, device), torch.randn(rows, length, device=device, dtype=BF16)
            options = {"out_dtype": BF16, "fast": KINDS[name].fast}
            own_graph = graph_of(partial(product_of_rows, left, rights, groups, **options))
            _, own, ratio = compared(graph_of(partial(F.grouped_mm, x, weights, offs=ends)), own_graph)
            problem = f"{EXPERTS} experts of {each}, {length} to {columns}"
            found = {"kind": name, "problem": problem, "own": 2e-6 * rows * length * columns / own, "ratio": ratio, "rows": each}
            if name == FORWARD and has_peer():
                found["peer"] = compared(graph_of(peer_of_experts(left, rights)), own_graph).ratio
            yield found


def has_peer() -> bool:
    return importlib.util.find_spec("deep_gemm") is not None


def peer_of(left: Stored, right: Stored) -> Call:
    """DeepGEMM's product of these blocks, in bf16; where each line of the right has scales, added to a gradient in fp32."""
    import deep_gemm

    lines, columns = left.layout.lines[0], right.layout.lines[0]
    added = right.layout.format.block == (1, 128)
    out = torch.zeros(lines, columns, device=left.data.device, dtype=torch.float32 if added else BF16)
    of_right = right.scale[:, :columns].t() if added else right.scale
    sides = (codes_of(left), left.scale[:, :lines].t()), (codes_of(right), of_right)
    return partial(deep_gemm.fp8_gemm_nt, *sides, out, **({"c": out, "recipe": (1, 1, 128)} if added else {}))


def peer_of_experts(left: Stored, rights: Sequence[Stored]) -> Call:
    """DeepGEMM's products of experts with equal numbers of rows.

    Each has room for whole tiles, since a tile is stored whole: what lies behind an expert's last row is not the next one's.
    """
    import deep_gemm

    (rows, length), columns, experts = left.layout.lines, rights[0].layout.lines[0], len(rights)
    each, device = rows // experts, left.data.device
    room = ceil_div(each, PEER_TILE) * PEER_TILE
    codes = torch.zeros(experts, room, length, device=device, dtype=torch.uint8)
    codes[:, :each] = left.data.view(torch.uint8).view(experts, each, length)
    scale = torch.zeros(experts, left.scale.shape[0], room, device=device)
    scale[..., :each] = left.scale[:, :rows].unflatten(1, (experts, each)).transpose(0, 1)
    out = torch.empty(experts, room, columns, device=device, dtype=BF16)
    weights = torch.stack([codes_of(right) for right in rights]), torch.stack([right.scale for right in rights])
    filled = torch.full((experts,), each, device=device, dtype=torch.int32)
    sides = (codes.view(torch.float8_e4m3fn), scale.transpose(1, 2)), weights
    return partial(deep_gemm.m_grouped_fp8_gemm_nt_masked, *sides, out, filled, each)


def codes_of(plane: Stored) -> torch.Tensor:
    return plane.data.view(torch.float8_e4m3fn)


def beside_peer(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Products of each size in DeepGEMM's speed, in turns and alone; nothing where it is not installed.

    Those of a weight's gradient are added to it, in fp32.
    """
    for name in (FORWARD, WEIGHT_GRADIENT) if has_peer() else ():
        kind, added = KINDS[name], name == WEIGHT_GRADIENT
        for lines, length, columns in SIZES:
            left, right = operand(kind.left, lines, length, device), operand(kind.right, columns, length, device)
            own = partial(grouped_product, [left], [right], [lines], out_dtype=torch.float32 if added else BF16)
            if added:
                own = partial(own, out=torch.zeros(lines, columns, device=device), accumulate=True)
            calls: tuple[Call, Call] = peer_of(left, right), own
            theirs, mine = map(alone, calls)
            row = {"kind": f"{name}, added to fp32" if added else name, "problem": f"{lines}x{length}x{columns}"}
            yield {**row, "state": "", "ratio": compared(*calls).ratio}
            yield {**row, "state": " alone", "ratio": theirs / mine}


def in_states(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Some products, cool and alone: TFLOP/s of the own product, and its speed in the library's."""
    for name in STATED:
        for sizes in SIZES:
            library, own = calls(KINDS[name], 1, sizes, device)
            for state, timed in STATES.items():
                took = timed(own)
                speeds = {"own": 2e-6 * sizes[0] * sizes[1] * sizes[2] / took, "ratio": timed(library) / took}
                yield {"kind": name, "problem": "x".join(map(str, sizes)), "state": state, **speeds, "least": KINDS[name].least}


def records(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """Figures for the record."""
    forward = {}
    for row in measure(device):
        name = f"{row['kind']}: {row['problem']}"
        yield figure(name, row["own"], "TFLOP/s")
        yield figure(name, row["ratio"], "x cuBLASLt", row["least"])
        if row["kind"] == FORWARD:
            forward[row["problem"]] = row["library"]
        if row["kind"] == WEIGHT_GRADIENT and "groups" not in row["problem"]:
            yield figure(name, row["own"] / forward[row["problem"]], "x cuBLASLt 1x128 by 128x128", LEAST_OF_FORWARD)
    for row in of_experts(device):
        name = f"{row['kind']}: {row['problem']}"
        yield figure(name, row["own"], "TFLOP/s", FEW.get((row["kind"], row["rows"])))
        yield figure(name, row["ratio"], "x torch bf16")
        if "peer" in row:
            yield figure(name, row["peer"], f"x {PEER}", LEAST_OF_PEER)
    for row in beside_peer(device):
        yield figure(f"{row['kind']}: {row['problem']}", row["ratio"], f"x {PEER}{row['state']}", LEAST_OF_PEER)
    for row in in_states(device):
        name = f"{row['kind']}: {row['problem']}"
        yield figure(name, row["own"], f"TFLOP/s {row['state']}")
        yield figure(name, row["ratio"], f"x cuBLASLt {row['state']}", row["least"])


def figure(name: str, value: float, unit: str, least: float | None = None) -> dict[str, Any]:
    """A figure for the record, which should be ``least`` at least."""
    return {"name": name, "value": value, "unit": unit, "limit": least, "met": None if least is None else value >= least}


def main() -> None:
    """Print a table."""
    for beside, rows in (("cuBLASLt", measure()), ("torch bf16", of_experts())):
        for row in rows:
            print(f"{row['kind']:20s}{row['problem']:34s}", end="")
            print(f"{row['own']:6.0f} TFLOP/s {row['ratio']:6.3f} x {beside}", flush=True)
    for row in in_states():
        print(f"{row['kind']:20s}{row['problem']:32s}", end="")
        print(f"{row['own']:6.0f} TFLOP/s {row['ratio']:6.3f} x cuBLASLt {row['state']}", flush=True)


if __name__ == "__main__":
    main()
