"""Casts of groups of rows whose sizes the device knows: through an index, of one group, of a group without rows."""

from __future__ import annotations

import io

import pytest
import torch

import opfuse
from opfuse.errors import QuantizedTensorError, QuantizerError
from opfuse.formats import E4M3, USAGES, fp8_tensor
from opfuse.kernels.casts.groups import row_groups
from opfuse.numerics.group_casts import cast_current_groups, cast_row_groups
from opfuse.numerics.layouts import Layout
from opfuse.numerics.row_groups import RowGroups
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.quantizers import Float8RowQuantizer
from opfuse.tensors.ragged import cast_in_groups
from tests.compiler.harness import randn, same
from tests.ops.test_ragged_groups import QUANTIZERS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("sizes", [(100, 0, 28, 1), (129,)], ids=str)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_cast_through_an_index_is_that_of_the_rows(kind, sizes):
    """Of every kind; of a group alone as well."""
    x, splits = randn(50, 144).to(BF16), torch.tensor(sizes)
    index = torch.randint(50, (129,), generator=torch.Generator().manual_seed(1), device="cpu").to(x.device)
    each, other = ([QUANTIZERS[kind](i) for i in range(len(sizes))] for _ in range(2))
    found, wanted = cast_in_groups(each[0], x, splits, index, each=each), cast_in_groups(other[0], x[index], splits, each=other)
    assert found.shape == wanted.shape == (129, 144)
    assert all(map(same, found.tensors(), wanted.tensors()))
    assert same(found.dequantize(BF16), wanted.dequantize(BF16))


ROWS = {
    "a slice": lambda x: [x[64:200]],
    "pieces": lambda x: x.split(100),
    "pieces of the groups": lambda x: x.split([100, 1, 155]),
    "halves": lambda x: x.tensor_split(2),
    "a row": lambda x: [x[3]],
    "chunks": lambda x: x.chunk(3),
    "matrices": lambda x: x.view(2, 128, 144).unbind(),
}


@pytest.mark.parametrize("cut", ROWS)
@pytest.mark.parametrize("kind", QUANTIZERS)
def test_rows_of_a_tensor_whose_groups_were_cast_apart_have_their_values(kind, cut):
    """Its planes have no such rows, so these are plain."""
    each = [QUANTIZERS[kind](i) for i in range(3)]
    made = QuantizedTensor(cast_in_groups(each[0], randn(256, 144).to(BF16), torch.tensor((100, 1, 155)), each=each))
    found, wanted = ROWS[cut](made), ROWS[cut](made.dequantize())
    assert all(same(one + 0, two + 0) for one, two in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_a_tensor_whose_groups_were_cast_apart_in_files(kind):
    """torch saves it; a text for other programs cannot tell how its planes lie."""
    made = QuantizedTensor(cast_in_groups(QUANTIZERS[kind](0), randn(129, 144).to(BF16), torch.tensor((129,))))
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert same(torch.load(file).dequantize(), made.dequantize())
    with pytest.raises(QuantizedTensorError, match=r"sizes that only the device knows. Cure: dequantize\(\) it first"):
        opfuse.to_planes({"x": made})


def test_columns_of_a_group_without_rows_have_the_scale_zero():
    """As the kernel leaves them, which has no tile there; a column of zeros in a group with rows has the scale of its amax."""
    x = randn(129, 144).to(BF16)
    x[:, 3] = 0
    made = cast_in_groups(Float8RowQuantizer(FP8), x, torch.tensor((100, 0, 28, 1)))
    scale = made.columnwise.scale
    assert scale.shape == (4, 144)
    assert not scale[1].any()
    assert scale[[0, 2, 3]].all()
    assert scale[0, 3] == Float8RowQuantizer(FP8).quantize(x[:100]).columnwise.scale[3]


def test_planes_of_another_matrix_are_refused():
    x, groups = randn(129, 144), RowGroups(row_groups(torch.tensor((100, 0, 28, 1)), 129), 129, 4)
    wide = Layout(fp8_tensor(E4M3), USAGES[1], (129, 144))  # as if the groups had no tiles of their own
    with pytest.raises(QuantizerError, match=r"cast_current_groups"):
        cast_current_groups(x, groups, torch.ones(4), [wide])
    with pytest.raises(QuantizerError, match=r"cast_row_groups|cast_lines_groups"):
        cast_row_groups(x, groups, [Layout(fp8_tensor(E4M3), USAGES[0], (129, 144))])
