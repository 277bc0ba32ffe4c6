"""Biases of groups of rows are one op for all groups, with the bits of each group alone."""

from __future__ import annotations

import pytest
import torch

from opfuse import ops
from opfuse.kernels.products import grouped as torch_grouped
from opfuse.numerics.pointwise import compute_dtype
from opfuse.ops import grouped_linear
from opfuse.ops.grouped_bias import add_biases, scale_gradient
from opfuse.tensors.gemm_grouped import Groups
from tests.compiler.harness import randn, same
from tests.ops.test_routing import made_by

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
N, SIZES = 24, (5, 0, 1, 70, 0)
ROWS = sum(SIZES)
KNOWN = {"host": Groups(SIZES), "device": Groups(None, torch.tensor(SIZES))}
"""Who knows how many rows groups have."""

every_knower = pytest.mark.parametrize("groups", KNOWN.values(), ids=KNOWN)


def biases(dtype: torch.dtype, *, single: bool) -> torch.Tensor | list[torch.Tensor]:
    table = randn(len(SIZES), N, seed=3).to(dtype)
    return table if single else list(table)


@every_knower
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(
    ("dtype", "of_bias"), [(BF16, BF16), (F16, F16), (F32, F32), (F64, F64), (BF16, F32), (F16, BF16), (F32, F64)]
)
def test_rows_have_the_biases_of_their_groups(groups, single, scaled, dtype, of_bias):
    """Added in fp32, rounded once; and the gradient of the scales, a sum in fp32 over each row."""
    y, dy, held, wide = (
        randn(ROWS, N).to(dtype),
        randn(ROWS, N, seed=2).to(dtype),
        biases(of_bias, single=single),
        compute_dtype(dtype),
    )
    scales = randn(ROWS, seed=1).to(dtype) if scaled else None
    wanted, sums = [], []
    for i, (piece, of_piece) in enumerate(zip(y.split(SIZES), dy.split(SIZES))):
        term = held[i].to(wide)
        if scales is not None:
            term = scales.split(SIZES)[i].to(wide).unsqueeze(1) * term
        wanted.append((piece.to(wide) + term).to(dtype))
        sums.append((of_piece.to(wide) * held[i].to(wide)).sum(1))
    got = y.clone()
    add_biases(got, held, scales, groups)
    assert same(got, torch.cat(wanted))
    assert same(scale_gradient(dy, held, groups), torch.cat(sums))


@every_knower
def test_more_groups_are_no_more_launches(groups):
    """Of nine groups as many as of these."""
    more = Groups(groups.sizes and (8,) * 9, None if groups.sizes else torch.full((9,), 8))
    few = made_by(lambda: add_biases(randn(ROWS, N).to(BF16), biases(BF16, single=True), None, groups))
    many = made_by(lambda: add_biases(randn(72, N).to(BF16), randn(9, N).to(BF16), None, more))
    assert few.names == many.names


@pytest.mark.parametrize("trains", [True, False])
def test_the_host_reads_sizes_for_biases_that_train_alone(trains, monkeypatch):
    """In bf16, where torch's grouped product finds them on the device."""
    op, x, asked = ops.GroupedLinear(3, 32, N, dtype=BF16, single_grouped_weight=True), randn(64, 32), []
    splits = torch.tensor([20, 0, 44])
    wanted = op(x, splits).detach()
    for name in op.bias_names:
        op.get_parameter(name).requires_grad_(trains)

    def read(*_, **__):
        asked.append("sizes")
        return 20, 0, 44

    for module in ("opfuse.ops.grouped_linear", "opfuse.runtime.replay.dispatch"):
        monkeypatch.setattr(f"{module}.known_sizes", lambda *_: None)
        monkeypatch.setattr(f"{module}.read_sizes", read)
    monkeypatch.setattr(grouped_linear, "takes_device_splits", lambda *_: True)
    monkeypatch.setattr(torch_grouped, "_arch", lambda _: (9, 0))
    y = op(x.requires_grad_(), splits)
    y.backward(y.detach())
    assert bool(asked) == trains
    torch.testing.assert_close(y, wanted)
    assert op.weight.grad is not None
    assert (op.bias0.grad is not None) == trains


@pytest.mark.parametrize("captured", [True, False])
def test_sizes_of_the_host_that_a_graph_keeps_are_written_by_kernels(captured, monkeypatch):
    """A copy from the host would be repeated from memory that is gone."""
    monkeypatch.setattr("opfuse.tensors.gemm_grouped.is_capturing", lambda: captured)
    groups, device = KNOWN["host"], torch.device("meta")
    assert ("_to_copy" in made_by(lambda: groups.ends(device, ROWS)).names) != captured
    found = groups.ends(torch.device("cpu"), ROWS)
    assert found.dtype == torch.int32
    assert found.tolist() == [5, 5, 6, 76, 76]
