"""The table of formats in docs/recipes.md says what the formats do."""

from __future__ import annotations

import pytest
import torch

from docs import tables
from opfuse.errors import MissingPlaneError, QuantizedTensorError
from opfuse.formats import COLUMNWISE
from opfuse.tensors.quantizers import HybridQuantizer, IdentityQuantizer, Quantizer
from opfuse.tensors.rows import slice_rows
from opfuse.tensors.tensor import QuantizedTensor
from tests.tensors.quantized_samples import QUANTIZERS, planes, same_bytes, values

WORDS = {True: "yes", False: "no: cast both"}
EVERY = pytest.mark.parametrize("quantizer", tables.FORMATS, ids=lambda quantizer: str(quantizer.formats[0]))


def cells(quantizer: Quantizer) -> list[str]:
    """The line of a format."""
    name = str(quantizer.formats[0].as_stored).replace("_e4m3", "")
    (line,) = [line for line in tables.formats().splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.row("H35")
def test_h35_every_format_is_listed():
    made = {quantizer().formats[0].family for quantizer in QUANTIZERS.values()} - {"identity"}
    assert {quantizer.formats[0].family for quantizer in tables.FORMATS} == made


@pytest.mark.row("H35")
@EVERY
def test_h35_columnwise_data_comes_from_rowwise_bytes_where_the_table_says_so(quantizer):
    x = values((256, 128))
    half, whole = quantizer.wanting(columnwise=False)(x), quantizer(x)
    derives = cells(quantizer)[5] == "yes"
    assert cells(quantizer)[5] == WORDS[derives]
    if derives:
        assert torch.equal(half.record.derived(COLUMNWISE).data, whole.columnwise.data)
    else:
        with pytest.raises(MissingPlaneError):
            half.record.derived(COLUMNWISE)


@pytest.mark.row("H35")
@EVERY
def test_h35_rows_come_apart_at_the_multiples_of_the_table(quantizer):
    storage = quantizer.quantize(values((512, 128)))
    unit = 1 if cells(quantizer)[6] == "any" else int(cells(quantizer)[6].rpartition(" ")[2])
    piece = slice_rows(storage, unit, 3 * unit)
    assert torch.equal(piece.dequantize(), storage.dequantize()[unit : 3 * unit])
    if unit > 1:
        assert slice_rows(storage, unit // 2, 2 * unit) is None


@pytest.mark.row("H35")
@EVERY
def test_h35_every_format_stands_in_a_hybrid_and_takes_writes(quantizer):
    """As either direction beside high precision; in place, both planes."""
    x, y = values((256, 128)), values((256, 128), seed=1)
    for hybrid in (HybridQuantizer(quantizer, IdentityQuantizer()), HybridQuantizer(IdentityQuantizer(), quantizer)):
        made = hybrid(x.clone())
        made.copy_(y)
        assert same_bytes(planes(made), planes(hybrid(y)))
        with pytest.raises(QuantizedTensorError):
            QuantizedTensor(made.record).mul_(2)
