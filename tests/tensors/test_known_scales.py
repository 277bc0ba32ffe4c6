"""What a plane knows of its scales: that they are powers of two, which the library's products of Blackwell want to know."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import opfuse
from opfuse.errors import QuantizedTensorError, QuantizerError, ShapeError
from opfuse.formats import USAGES
from opfuse.numerics.scales import are_pow2
from opfuse.tensors import QuantizedTensor, exchange
from opfuse.tensors.gemm import gemm
from opfuse.tensors.one_plane_fsdp import one_plane
from opfuse.tensors.planes import with_formats
from opfuse.tensors.quantizers import Float8BlockQuantizer, GroupedQuantizer
from opfuse.tensors.rows import row_parts
from tests.compiler.harness import generator_of

POWERS = Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1)
ANY = replace(POWERS, force_pow_2_scales=False)
MARK = "power-of-two scales"


class OfTheUser(Float8BlockQuantizer):
    """A cast whose scales nobody knows."""

    def quantize(self, x: torch.Tensor):
        return ANY.quantize(x)


def made(quantizer: Float8BlockQuantizer, seed: int = 0) -> QuantizedTensor:
    return quantizer(torch.randn(256, 128, generator=generator_of(seed)))


def claims(tensor: QuantizedTensor) -> bool:
    """Whether the planes claim powers of two; what they claim must be so."""
    planes = [tensor.plane(usage) for usage in USAGES]
    claimed = {plane.format.pow2 for plane in planes}
    parts = [part for plane in planes for part in getattr(plane, "members", (plane,))]
    assert all(are_pow2(part.scale) for part in parts if part.format.pow2)
    return claimed == {True}


def test_the_quantizer_says_it_and_nothing_else_of_a_format_changes() -> None:
    assert claims(made(POWERS))
    assert not claims(made(ANY))
    assert not OfTheUser(torch.float8_e4m3fn).formats[0].pow2
    known, other = POWERS.formats[0], ANY.formats[0]
    assert (known.as_stored, known.name) == (other, other.name)
    assert str(known) == f"{other} ({MARK})"
    product = gemm("fprop", made(POWERS).record, made(ANY, 1).record, dtype=torch.float32)
    unknown = with_formats(made(POWERS).record, {})
    assert torch.equal(product, gemm("fprop", unknown, made(ANY, 1).record, dtype=torch.float32))
    assert claims(pickle.loads(pickle.dumps(made(POWERS))))


WRITES = {
    "copy_": lambda t: t,
    "an alias": lambda t: t.detach(),
    "data": lambda t: t.data,
    "a view": lambda t: t.view(-1, 128),
    "a parameter of it": nn.Parameter,
}
"""Ways to reach the memory of a tensor, of which the tensor itself gets to know nothing."""


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    return all(map(torch.equal, one.record.tensors(), other.record.tensors()))


@pytest.mark.parametrize("way", WRITES)
def test_other_scales_are_cast_anew_wherever_they_are_written(way: str) -> None:
    """As values of any other format are. Powers of two are copied byte for byte, whether their tensor says so or not."""
    target, other, known = made(POWERS), made(ANY, 1), made(POWERS, 2)
    unknown = QuantizedTensor(with_formats(known.record, {}))
    for source in (known, other, unknown):
        with torch.no_grad():
            WRITES[way](target).copy_(source)
        assert claims(target)
        assert same(target, POWERS(other.dequantize()) if source is other else known)
    plain = made(ANY)
    plain.copy_(known)
    assert same(plain, known)
    assert not claims(plain), "its quantizer may write any scales next"


def test_bytes_alone_are_taken_where_scales_are_as_the_tensor_says() -> None:
    target, other, known = QuantizedTensor(made(POWERS).record), made(ANY, 1), made(POWERS, 2)
    with pytest.raises(QuantizedTensorError, match="a quantizer to cast with"):
        target.copy_(other)
    target.copy_(QuantizedTensor(with_formats(known.record, {})))
    assert claims(target)
    assert same(target, known)
    whole = made(POWERS)
    with pytest.raises(QuantizedTensorError, match="rows cut from a larger tensor"):
        whole[:128].copy_(other[:128])
    whole[:128].copy_(QuantizedTensor(with_formats(known.record, {}))[:128])
    assert claims(whole)
    assert torch.equal(whole[:128].dequantize(), known[:128].dequantize())


def test_a_matrix_of_a_stack_takes_what_the_stack_says() -> None:
    """Written by itself, where the record of the stack is none of its own."""
    stack = GroupedQuantizer((POWERS, POWERS))(torch.randn(2, 128, 128))
    other = ANY(torch.randn(128, 128))
    stack[1].copy_(other)
    assert claims(stack)
    assert all(are_pow2(member.scale) for usage in USAGES for member in stack.plane(usage).members)
    assert torch.equal(stack[1].dequantize(), POWERS(other.dequantize()).dequantize())
    mixed = GroupedQuantizer((POWERS, ANY))(torch.randn(2, 128, 128))
    assert not claims(mixed), "what one of its groups says the stack does not"
    assert claims(mixed[0])
    mixed.copy_(torch.randn(2, 128, 128))
    before = mixed[0].dequantize()
    with pytest.raises(QuantizerError, match=re.escape(f"({MARK})")):
        GroupedQuantizer((ANY, ANY)).update_quantized(torch.randn(2, 128, 128), mixed.record)
    assert torch.equal(mixed[0].dequantize(), before)
    with pytest.raises(ShapeError, match=r"groups of \(128, 128\) rows"):
        GroupedQuantizer((POWERS, ANY), sizes=(64, 192)).update_quantized(torch.randn(2, 128, 128), mixed.record)


@pytest.mark.parametrize("noop_flag", [None, torch.zeros(1)], ids=["cast", "cast by a flag"])
def test_a_quantizer_of_other_scales_is_refused_and_nothing_is_written(noop_flag: torch.Tensor | None) -> None:
    target, x = made(POWERS), torch.randn(256, 128)
    before = target.dequantize()
    target.quantizer = ANY
    with pytest.raises(QuantizerError, match=re.escape(f"({MARK})")):
        target.quantize_(x, noop_flag=noop_flag)
    assert torch.equal(target.dequantize(), before)
    target.data = ANY(x)
    assert not claims(target), "it is another tensor now"
    target.quantize_(x)
    unsaid = made(ANY)
    unsaid.quantizer = POWERS
    unsaid.copy_(x)
    assert same(unsaid, POWERS(x))
    assert not claims(unsaid)


def test_a_state_dict_and_a_checkpoint_in_pieces_bring_no_other_scales(tmp_path: Path) -> None:
    model, saved = nn.Module(), made(ANY, 1)
    model.weight = nn.Parameter(made(POWERS))
    seen = model.weight.detach()
    model.load_state_dict({"weight": saved})
    assert claims(seen)
    assert same(model.weight, POWERS(saved.dequantize()))
    for source, told in ((made(ANY, 2), False), (made(POWERS, 2), True)):
        target = made(POWERS)
        dcp.save({"w": source}, checkpoint_id=tmp_path / str(told), no_dist=True)
        dcp.load({"w": target}, checkpoint_id=tmp_path / str(told), no_dist=True)
        assert claims(target)
        assert same(target, source if told else POWERS(source.dequantize()))
        assert claims(pickle.loads(pickle.dumps(target)))


@pytest.mark.parametrize("alternates", [False, True], ids=["both planes", "one plane at a time"])
def test_what_fsdp_gathers_again_into_its_buffers_says_what_the_shard_does(alternates: bool) -> None:
    """The parameter of an earlier gather, of whose shard the data was replaced since."""
    shard, mesh = made(POWERS), SimpleNamespace(size=lambda: 1)
    shard.alternates = False

    def gathered(out: QuantizedTensor | None) -> QuantizedTensor | None:
        sent, known = shard.fsdp_pre_all_gather(mesh, shard.shape, (128, 1), None, SimpleNamespace(param_dtype=None))
        if alternates:
            known = known._replace(alone="rowwise", sent=one_plane(known.sent, "rowwise"))
            sent = row_parts(known.sent)
        found = shard.fsdp_post_all_gather(sent, known, torch.float32, out=out)
        return None if found is None else found[0]

    whole = gathered(None)
    assert whole.plane("rowwise").format.pow2
    for source, told in ((made(ANY, 1), False), (made(POWERS, 2), True)):
        shard.data = source
        gathered(whole)
        assert whole.held.plane("rowwise").format.pow2 is told
        assert torch.equal(whole.held.plane("rowwise").scale, source.plane("rowwise").scale)


def test_a_record_that_claims_powers_takes_no_other_scales() -> None:
    with pytest.raises(QuantizerError, match=rf"wants fp8_block_1d_e4m3, got fp8_block_1d_e4m3 \({MARK}\)"):
        ANY.update_quantized(torch.ones(256, 128), made(POWERS).record)
    unknown = made(ANY).record
    assert POWERS.update_quantized(torch.ones(256, 128), unknown) is unknown


def test_a_broadcast_brings_what_came_and_not_what_is_said_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of another rank, whose tensor has other scales."""
    there, here = made(ANY, 1), made(POWERS)
    coming = iter(there.record.tensors())
    monkeypatch.setattr(torch.distributed, "Work", SimpleNamespace(unbox=lambda work: SimpleNamespace(wait=lambda: None)))

    def received(parts: list[torch.Tensor]) -> tuple[None, None]:
        parts[0].copy_(next(coming).contiguous().reshape(-1).view(torch.uint8))
        return None, None

    exchange.broadcast(received, [here])
    assert claims(here)
    assert same(here, POWERS(there.dequantize()))


@pytest.mark.parametrize("quantizer", [POWERS, ANY, GroupedQuantizer((POWERS, POWERS))], ids=["powers", "any", "groups"])
def test_files_say_nothing_of_it_and_loading_finds_it_in_the_scales(quantizer: Float8BlockQuantizer) -> None:
    saved = opfuse.to_planes({"w": made(quantizer)})
    text = json.loads(bytes(saved["w.planes"].tolist()))
    assert "pow2" not in json.dumps(text["record"])
    assert claims_of(opfuse.from_planes(saved)["w"]) == {quantizer is not ANY}
    spoiled = QuantizedTensor(made(ANY).record, quantizer=POWERS)
    assert not claims(opfuse.from_planes(opfuse.to_planes({"w": spoiled}))["w"])
    zeros = opfuse.from_planes(opfuse.to_planes({"w": ANY(torch.zeros(256, 128)), "b": QuantizedTensor(made(POWERS).record)}))
    assert not claims(zeros["w"]), "its quantizer may write any scales next"
    assert claims(zeros["b"])


def claims_of(tensor: QuantizedTensor) -> set[bool]:
    return {tensor.plane(usage).format.pow2 for usage in USAGES}
