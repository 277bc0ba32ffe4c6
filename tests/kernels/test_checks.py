"""What kernels refuse before they write."""

import pytest
import torch

from opfuse.errors import QuantizerError
from opfuse.formats import COLUMNWISE, E4M3, E5M2, ROWWISE, USAGES, mxfp8
from opfuse.numerics.layouts import Layout, check_number, check_planes

MX = mxfp8(E4M3)


def planes(shape, fmt=MX, usages=USAGES, **options):
    return [Layout(fmt, usage, shape, **options) for usage in usages]


@pytest.mark.parametrize(
    ("shape", "matrix"), [((64, 32), (64, 32)), ((2, 32, 32), (64, 32)), ((32,), (1, 32)), ((0, 32), (0, 32))]
)
def test_planes_of_the_matrix_that_a_tensor_is_are_taken(shape, matrix):
    for usages in (USAGES, (ROWWISE,), (COLUMNWISE,)):
        check_planes(shape, planes(matrix, usages=usages), where="a cast")


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ([], "wants one plane or two, got none"),
        (planes((32, 32)), r"wants planes of \(64, 32\), got a layout of \(32, 32\)"),
        (planes((32, 64)), r"got a layout of \(32, 64\)"),
        ([*planes((64, 32), usages=(ROWWISE,)), *planes((64, 64), usages=(COLUMNWISE,))], r"got a layout of \(64, 64\)"),
        ([*planes((64, 32), usages=(ROWWISE,)), *planes((64, 32), mxfp8(E5M2), (COLUMNWISE,))], "one format and one order"),
        ([*planes((64, 32), usages=(ROWWISE,)), *planes((64, 32), usages=(COLUMNWISE,), swizzled=True)], "swizzled"),
        (planes((64, 32), usages=(ROWWISE, ROWWISE)), "one plane for each usage"),
    ],
)
def test_other_planes_are_refused(layouts, words):
    with pytest.raises(QuantizerError, match=f"^a cast: .*{words}"):
        check_planes((64, 32), layouts, where="a cast")


def test_a_tensor_without_columns_has_no_planes():
    with pytest.raises(QuantizerError, match=r"wants planes of \(\)"):
        check_planes((), planes((1, 1)), where="a cast")


def test_a_number_is_one_of_fp32_where_it_is_read():
    device = torch.device("cpu")
    number = torch.ones(1)
    assert check_number(number, device, where="a scale") == number.data_ptr()
    for bad in (torch.ones(2), torch.ones(1, dtype=torch.float64), torch.ones(1, device="meta")):
        with pytest.raises(QuantizerError, match=r"^a scale: wants fp32 \(1,\) on cpu"):
            check_number(bad, device, where="a scale")
