"""A quantized tensor that is written piece by piece, with quantized rows of its layout."""

from __future__ import annotations

import pytest
import torch

from opfuse.errors import QuantizedTensorError
from opfuse.tensors import QuantizedTensor, partial_writes
from tests.tensors.quantized_samples import QUANTIZERS, make, planes, same_bytes

SHAPE, CUT = (256, 96), 128
SHARING = ("current", "delayed", "row", "nvfp4", "nvfp4_rows", "nvfp4_rotated")
every_kind = pytest.mark.parametrize("kind", list(QUANTIZERS))


def halves(tensor: QuantizedTensor) -> list[torch.Tensor]:
    return [tensor[:CUT], tensor[CUT:]]


@every_kind
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_pieces_of_one_tensor_make_it_bit_for_bit(kind, order):
    source, target = make(kind, SHAPE, seed=1), make(kind, SHAPE, seed=2)
    if kind == "delayed":  # whose scale is not that of its values
        target.record.rowwise.scale.fill_(7.0)
    version = target._version
    for i in order:
        halves(target)[i].copy_(halves(source)[i].clone())
    assert same_bytes(planes(target), planes(source))
    assert target._version > version


@every_kind
def test_pieces_from_another_device_are_compared_and_written_on_that_of_the_whole(kind, monkeypatch):
    """Here the device of the whole is meta, where nothing can be compared; tests/gpu has the values."""
    met = []

    def alike(*records):
        met.append({plane.device.type for record in records for plane in record.tensors()})
        return len(met) > 1

    monkeypatch.setattr(partial_writes, "_alike", alike)
    source, target = make(kind, SHAPE, seed=1), make(kind, SHAPE, seed=2).to("meta")
    for piece, rows in zip(halves(target), halves(source)):
        piece.copy_(rows)
        assert {plane.device.type for plane in piece.held.tensors()} == {"meta"}
    assert met
    assert all(devices == {"meta"} for devices in met)
    assert not target.partial_rows


@pytest.mark.parametrize("kind", SHARING)
def test_a_tensor_of_which_rows_are_missing_cannot_be_read(kind):
    source, target = make(kind, SHAPE, seed=1), make(kind, SHAPE, seed=2)
    if kind == "delayed":
        target.record.rowwise.scale.fill_(7.0)
    first = halves(source)[0].clone()
    target[:CUT].copy_(first)
    for read in (target.dequantize, target.clone, lambda: target + 1, lambda: target.held):
        with pytest.raises(QuantizedTensorError, match=r"wants all rows, got rows 0 to 128 only"):
            read()
    target[:CUT].copy_(first)
    target[CUT:].copy_(halves(source)[1].clone())
    assert same_bytes(planes(target), planes(source))


@pytest.mark.parametrize("kind", ["current", "nvfp4"])
def test_pieces_of_several_scales_are_refused_and_nothing_is_written(kind):
    one, other, target = (make(kind, SHAPE, seed=seed) for seed in (1, 2, 3))
    before = planes(target)
    target[:CUT].copy_(halves(one)[0].clone())
    with pytest.raises(QuantizedTensorError, match="pieces whose rows share different scales"):
        target[CUT:].copy_(halves(other)[1].clone())
    assert same_bytes(planes(target), before)


def test_a_piece_of_a_piece_is_one_of_the_whole_and_values_are_refused():
    source, target = make("mxfp8", SHAPE, seed=1), make("mxfp8", SHAPE, seed=2)
    target[CUT:][32:96].copy_(source[160:224].clone())
    assert torch.equal(target[160:224] + 0, source[160:224] + 0)
    before = planes(target)
    with pytest.raises(QuantizedTensorError, match="rows cut from a larger tensor"):
        target[CUT:].copy_(torch.zeros(CUT, 96))
    assert same_bytes(planes(target), before)


@every_kind
def test_what_torch_stages_for_a_checkpoint_holds_the_planes(kind):
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    source = make(kind, SHAPE)
    staged = StateDictStager().stage({"weight": source})["weight"]
    before = planes(source)
    with torch.no_grad():
        source.mul_(-2)
    assert isinstance(staged, QuantizedTensor)
    assert same_bytes(planes(staged), [plane.cpu() for plane in before])
    assert type(source.new_empty((3, 3), device="cpu")) is torch.Tensor
