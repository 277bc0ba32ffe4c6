"""The certificate of native products: it passes a right product of every family, and finds each planted fault.

Mocks of ``scaled_mm`` and ``scaled_grouped_mm`` multiply what the library is handed by the library's own rules: scales in tiles,
the second operand transposed, two codes in a byte, tiles of each group behind those of another. They know nothing of opfuse's
layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from opfuse.formats import E4M3, ROWWISE, dtype_name, fp8_tensor
from opfuse.kernels.products import native
from opfuse.kernels.products.backends import BACKENDS, MX_GROUPS, Backend
from opfuse.kernels.products.certificate import Exact, examine, random_plane, trials

ROWS = [(family, row) for family, rows in BACKENDS.items() for row in rows]
CPU = torch.device("cpu")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCKS = {ScalingType.BlockWise1x16: 16, ScalingType.BlockWise1x32: 32}


def values_of(codes: torch.Tensor) -> torch.Tensor:
    """(lines, length) in fp64."""
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.double()
    pairs = codes.view(torch.uint8)
    return torch.stack((E2M1[(pairs & 15).long()], E2M1[(pairs >> 4).long()]), -1).flatten(1).double()


def entry(row: torch.Tensor, column: torch.Tensor, tiles: int) -> torch.Tensor:
    """Where the scale of a line's block lies: cuBLAS, "1D block scaling factors layout"."""
    tile = (row // 128) * tiles + column // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


def scales_of(scale: torch.Tensor, kind: ScalingType, shape: Sequence[int]) -> torch.Tensor:
    """One scale for each value, (lines, length)."""
    lines, length = shape
    if kind in BLOCKS:
        blocks = -(-length // BLOCKS[kind])
        row, column = torch.meshgrid(torch.arange(lines), torch.arange(blocks), indexing="ij")
        assert scale.is_contiguous()
        assert scale.numel() == -(-lines // 128) * 128 * -(-blocks // 4) * 4
        found = scale.double()[entry(row, column, -(-blocks // 4))]
        return found.repeat_interleave(BLOCKS[kind], 1)[:, :length]
    if kind is ScalingType.BlockWise1x128:
        assert scale.shape[0] == lines
        assert scale.stride(0) == 1
        return scale.double().repeat_interleave(128, 1)[:, :length]
    if kind is ScalingType.BlockWise128x128:
        return scale.t().double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:lines, :length]
    return scale.double().reshape(-1, 1).expand(-1 if scale.numel() > 1 else lines, length)


def mock(  # noqa: PLR0917 - as scaled_mm
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    kinds_a: list[ScalingType],
    scale_b: list[torch.Tensor],
    kinds_b: list[ScalingType],
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    *,
    output_dtype: torch.dtype,
    use_fast_accum: bool,
    spoil: Callable[[dict[str, Any]], None] = lambda given: None,
) -> torch.Tensor:
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    given = {"a": a, "b": b.t(), "scales": (scale_a, scale_b), "kinds": (kinds_a, kinds_b), "levels": 2}
    spoil(given)
    operands = []
    for codes, scales, kinds in zip((given["a"], given["b"]), given["scales"], given["kinds"], strict=True):
        values = values_of(codes)
        for scale, kind in [*zip(scales, kinds, strict=True)][: given["levels"]]:
            values = values * scales_of(scale, kind, values.shape)
        operands.append(values)
    return (operands[0] @ operands[1].t()).to(output_dtype)


MX = ([ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4])


def grouped_mock(  # noqa: PLR0917 - as scaled_grouped_mm
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    kinds_a: list[ScalingType],
    scale_b: list[torch.Tensor],
    kinds_b: list[ScalingType],
    swizzle_a: list[SwizzleType],
    swizzle_b: list[SwizzleType],
    *,
    offs: torch.Tensor,
    output_dtype: torch.dtype,
    spoil: Callable[[dict[str, Any]], None] = lambda given: None,
) -> torch.Tensor:
    """Checks what torch checks. Nothing is written for a group over no rows: NaN stands for what was there."""
    assert (kinds_a, swizzle_a) == (kinds_b, swizzle_b) == MX
    assert output_dtype == torch.bfloat16
    assert (offs.dtype, offs.ndim) == (torch.int32, 1)
    assert a.is_contiguous()
    assert b.transpose(-2, -1).is_contiguous()
    assert not [size for size in (a.shape[-1], *b.shape[-2:]) if size % 16]
    of_rows = b.ndim == 3
    lines = b.shape[-1]
    tiles = [-(-n // 128) * 128 for n in (a.shape[0], lines)]
    assert scale_a[0].ndim == 2
    assert len(scale_a[0]) >= len(a)
    if of_rows:
        assert scale_b[0].shape == (len(b), tiles[1] * -(-a.shape[1] // 128) * 4)
    else:
        assert scale_b[0].ndim == 2
        assert len(scale_b[0]) >= lines
    starts = [0, *offs.tolist()]
    room = 128 if of_rows else 4
    given = {"spans": [*itertools.pairwise(starts)], "room": room, "right": lambda group: group, "rows": lambda rows: rows}
    spoil(given)
    results, behind = [], 0
    for group, (start, end) in enumerate(given["spans"]):
        scales = [each[0].reshape(-1) for each in (scale_a, scale_b)]
        if of_rows:
            left, right = given["rows"](a[start:end]), b[given["right"](group)].t()
            blocks = -(-a.shape[1] // 128) * 4
            scales = [scales[0][behind * blocks :][: -(-len(left) // 128) * 128 * blocks], scale_b[0][given["right"](group)]]
            behind += -(-(end - start) // given["room"]) * given["room"]
        else:
            left, right = given["rows"](a[:, start:end]), b.t()[:, start:end]
            blocks = -(-(end - start) // 32)
            scales = [scale[behind * n :][: blocks * n] for scale, n in zip(scales, tiles, strict=True)]
            behind += -(-blocks // given["room"]) * given["room"]
        pairs = zip((left, right), scales, strict=True)
        operands = [values_of(codes) * scales_of(scale, kinds_a[0], codes.shape) for codes, scale in pairs]
        results.append((operands[0] @ operands[1].t()).to(output_dtype))
        if not of_rows and start == end:
            results[-1].fill_(torch.nan)
    return torch.cat(results) if of_rows else torch.stack(results)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., native.F]:
    """Puts mocks in the place of the library's products."""

    def put(row: Backend, spoil: Callable[[dict[str, Any]], None] = lambda given: None) -> None:
        monkeypatch.setattr(native.F, "scaled_mm", partial(mock, spoil=spoil))
        monkeypatch.setattr(native.F, "scaled_grouped_mm", partial(grouped_mock, spoil=spoil))

    return put


def names(pairs: Sequence[tuple[str, Backend]]) -> list[str]:
    return [f"{family} {row.since[0]}.{row.since[1]}" for family, row in pairs]


@pytest.mark.parametrize(("family", "row"), ROWS, ids=names(ROWS))
def test_a_right_product_passes(family: str, row: Backend, library: Callable[..., None]) -> None:
    library(row)
    assert examine(family, row, native.library_product, CPU).fault == ""


ONE_E5M2 = {("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")}
RIGHT_E4M3, ALL_E4M3, E2M1_TWICE = ONE_E5M2 - {("e4m3", "e5m2")}, {("e4m3", "e4m3")}, {("e2m1", "e2m1")}
ELEMENTS = {
    "tensor": (ONE_E5M2, ONE_E5M2, ONE_E5M2),
    "row": (RIGHT_E4M3, ONE_E5M2, RIGHT_E4M3),
    "block": (ALL_E4M3, ONE_E5M2),
    "mx": (ONE_E5M2,),
    "nv": (E2M1_TWICE,),
    MX_GROUPS: (ALL_E4M3,),
}
"""Those of the left and of the right that each row takes."""


@pytest.mark.parametrize(("family", "row"), ROWS, ids=names(ROWS))
def test_all_that_a_row_takes_is_tried(family: str, row: Backend) -> None:
    """The planes of each pass, every pair of elements, and what is hard for sums and scales."""
    tried = [*trials(family, row)]
    usages = {tuple(layout.usage for layout in trial.layouts) for trial in tried}
    assert usages == {("rowwise", "rowwise"), ("rowwise", "columnwise"), ("columnwise", "columnwise")}
    elements = {tuple(layout.element.name for layout in trial.layouts) for trial in tried}
    assert elements == ELEMENTS[family][BACKENDS[family].index(row)]
    assert family != "nv" or {trial.layouts[0].format.encode_max for trial in tried} == {448, 256}  # 4over6 may have the latter
    hard = {trial.name.removeprefix("groups: ") for trial in tried}
    assert {"zeros", "outliers"} <= hard
    assert family == "nv" or "NaN" in hard
    assert family == MX_GROUPS or "largest codes" in hard
    assert family not in ("block", "mx") or {f"smallest scales on the {side}" for side in ("left", "right")} <= hard


@pytest.mark.parametrize("row", BACKENDS["row"], ids=lambda row: str(row.since))
def test_each_dtype_and_each_way_to_sum_is_tried(row: Backend, library: Callable[..., None]) -> None:
    library(row)
    for dtype, fast in itertools.product(row.outputs, (False, True)[: 1 + row.fast]):

        def wrong(row: Backend, operands: Any, *how: Any, fault: tuple[Any, ...] = (dtype, fast)) -> torch.Tensor:
            right = native.library_product(row, operands, *how)
            return torch.zeros_like(right) if how == fault else right

        found = examine("row", row, wrong, CPU).fault
        assert f", {dtype_name(dtype)}{', fast sums' * fast}: element (" in found


# -- what is right ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rounded", "off"),
    [
        (torch.bfloat16, 1 + 2.0**-8, 1 + 2.0**-7),
        (torch.float16, 1 + 2.0**-11, 1 + 2.0**-10),
        (torch.float32, 1 + 2.0**-20, 1 + 2.0**-19),
    ],
    ids=str,
)
def test_one_rounding_is_right_and_two_are_not(dtype: torch.dtype, rounded: float, off: float) -> None:
    none = torch.zeros(1, 1, dtype=torch.float64)
    assert Exact(none + rounded, none).fault(torch.ones(1, 1, dtype=dtype)) == ""
    assert "element (0, 0) is 1, wants 1" in Exact(none + off, none).fault(torch.ones(1, 1, dtype=dtype))


def test_only_what_overflows_is_infinite_and_only_nan_is_nan() -> None:
    exact = Exact(torch.tensor([[1.0, 1e5, torch.nan]], dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))

    def fault(*values: float) -> str:
        return exact.fault(torch.tensor([values], dtype=torch.float16))

    assert fault(1, torch.inf, torch.nan) == ""
    assert "element (0, 0) is inf" in fault(torch.inf, torch.inf, torch.nan)
    assert "element (0, 0) is nan" in fault(torch.nan, torch.inf, torch.nan)
    assert "element (0, 2) is 1" in fault(1, torch.inf, 1)
    assert "wants the shape (1, 3), got (1, 2)" in fault(1, torch.inf)


def test_sums_may_be_off_by_what_a_unit_of_13_bits_cuts_off() -> None:
    """Of 64 products of ones: each by 2^-13 of the largest, and the sum, of 64, in three steps as many."""
    random = torch.Generator().manual_seed(0)
    ones = random_plane(fp8_tensor(E4M3), ROWWISE, 16, 64, random)
    ones = ones._replace(data=torch.full_like(ones.data, 0x38), scale=torch.ones(1))
    exact = Exact.of_planes(ones, ones)
    assert exact.product.unique().tolist() == [64]
    assert exact.bound.unique().tolist() == [2.0**-13 * (64 + 3 * 64)]


# -- what is wrong ---------------------------------------------------------------------------------------------------------------


def unswizzled(given: dict[str, Any]) -> None:
    """Scales read as if they lay line by line."""
    for scales, codes in zip(given["scales"], (given["a"], given["b"]), strict=True):
        blocks = scales[0].numel() // (-(-len(codes) // 128) * 128)
        row, column = torch.meshgrid(torch.arange(scales[0].numel() // blocks), torch.arange(blocks), indexing="ij")
        line_by_line = torch.empty(scales[0].numel(), dtype=torch.uint8)
        line_by_line[entry(row, column, blocks // 4).flatten()] = scales[0].view(torch.uint8)
        scales[0] = line_by_line.view(scales[0].dtype)


def transposed(given: dict[str, Any]) -> None:
    """The right operand read in the other order of memory."""
    codes = given["b"].view(torch.uint8)
    given["b"] = codes.flatten().view(codes.shape[::-1]).t().contiguous().view(given["b"].dtype)


def swapped(given: dict[str, Any]) -> None:
    """Scales in the places of others: both operands under one tensor's, each under the other's, or lines from last to first."""
    one, other = given["scales"]
    if one[0].numel() == 1:
        one[0] = other[0] if other[0].numel() == 1 else one[0]
    elif one[0].shape == other[0].shape:
        one[0], other[0] = other[0].clone(), one[0].clone()
    else:
        stored = torch.uint8 if one[0].element_size() == 1 else one[0].dtype
        one[0] = one[0].flatten().view(stored).flip(0).view(one[0].dtype).view(one[0].shape)


def no_tail(given: dict[str, Any]) -> None:
    """What is beyond the last whole step of 64 is left out of the sum."""
    codes = given["a"].view(torch.uint8).clone()
    steps = 64 if given["a"].dtype != torch.float4_e2m1fn_x2 else 32
    codes[:, codes.shape[1] // steps * steps :] = 0
    given["a"] = codes.view(given["a"].dtype)


def no_short_tail(given: dict[str, Any]) -> None:
    """What is beyond the last whole step of 32 is left out, where the length is no multiple of it."""
    codes = given["a"].view(torch.uint8).clone()
    codes[:, codes.shape[1] // 32 * 32 :] = 0
    given["a"] = codes.view(given["a"].dtype)


def no_long_sum(given: dict[str, Any]) -> None:
    """What is beyond the first 512 is left out of the sum."""
    codes = given["a"].view(torch.uint8).clone()
    codes[:, 512 if given["a"].dtype != torch.float4_e2m1fn_x2 else 256 :] = 0
    given["a"] = codes.view(given["a"].dtype)


def no_single_line(given: dict[str, Any]) -> None:
    """A left of one line is left out."""
    if len(given["a"]) == 1:
        given["a"] = torch.zeros_like(given["a"].view(torch.uint8)).view(given["a"].dtype)


def one_level(given: dict[str, Any]) -> None:
    """The global scales are left out."""
    given["levels"] = 1


def refusing(given: dict[str, Any]) -> None:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def packed(given: dict[str, Any]) -> None:
    """Scales of a group begin behind those of the last one, and not on a tile."""
    given["room"] = 1


def shifted(given: dict[str, Any]) -> None:
    """Each group ends a row late, and the next one begins there."""
    *ends, last = [end for _, end in given["spans"]]
    given["spans"] = [*itertools.pairwise((0, *(min(end + 1, last) for end in ends), last))]


def next_right(given: dict[str, Any]) -> None:
    """Groups meet the right of another one."""
    given["right"] = lambda group: group // 2


def no_single_row(given: dict[str, Any]) -> None:
    """A group of one row is left out."""
    given["rows"] = lambda rows: torch.zeros_like(rows) if len(rows) == 1 else rows


def no_last_line(given: dict[str, Any]) -> None:
    """The last line of the left of each group is left out."""
    given["rows"] = lambda rows: torch.cat([rows[:-1], torch.zeros_like(rows[-1:])])


ALL = {row.operand: (family, row) for family, row in ROWS if family != MX_GROUPS}.values()
"""The last row of each way to hand over operands."""
FAULTS: list[tuple[Callable[[dict[str, Any]], None], Sequence[str]]] = [
    (unswizzled, ("FP8 blocks as MXFP8", "MXFP8", "NVFP4")),
    (transposed, ("",)),
    (swapped, ("",)),
    (no_tail, ("",)),
    (no_short_tail, ("per tensor", "per row", "blocks of E4M3")),
    (no_long_sum, ("",)),
    (no_single_line, ("",)),
    (one_level, ("NVFP4",)),
    (refusing, ("",)),
]
PLANTED = [(fault, *each) for fault, ends in FAULTS for each in ALL if each[1].name.endswith(tuple(ends))]
PLANTED += [
    (fault, MX_GROUPS, BACKENDS[MX_GROUPS][0]) for fault in (packed, shifted, next_right, no_single_row, no_last_line, refusing)
]


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("fault", "family", "row"), PLANTED, ids=[f"{fault.__name__} {row.name}" for fault, _, row in PLANTED])
def test_each_planted_fault_is_found(fault: Callable[..., None], family: str, row: Backend, library: Callable[..., None]) -> None:
    library(row, fault)
    found = examine(family, row, native.library_product, CPU).fault
    assert ("CUBLAS_STATUS_NOT_SUPPORTED" if fault is refusing else "element (") in found


def test_memory_that_runs_out_is_no_verdict(library: Callable[..., None]) -> None:
    """It would be kept for good, although the product is right."""

    def full(given: dict[str, Any]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    row = BACKENDS["tensor"][0]
    library(row, full)
    with pytest.raises(torch.OutOfMemoryError):
        examine("tensor", row, native.library_product, CPU)
