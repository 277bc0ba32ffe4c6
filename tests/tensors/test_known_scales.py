"""What a plane knows of its scales: that they are powers of two, which the library's products of Blackwell want to know."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

import opfuse
from opfuse.errors import QuantizerError
from opfuse.formats import USAGES
from opfuse.numerics.scales import are_pow2
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.gemm import gemm
from opfuse.tensors.planes import with_formats
from opfuse.tensors.quantizers import Float8BlockQuantizer, GroupedQuantizer

POWERS = Float8BlockQuantizer(torch.float8_e4m3fn, block_scaling_dim=1)
ANY = replace(POWERS, force_pow_2_scales=False)
MARK = "power-of-two scales"


class OfTheUser(Float8BlockQuantizer):
    """A cast whose scales nobody knows."""

    def quantize(self, x: torch.Tensor):
        return ANY.quantize(x)


def made(quantizer: Float8BlockQuantizer, seed: int = 0) -> QuantizedTensor:
    return quantizer(torch.randn(256, 128, generator=torch.Generator().manual_seed(seed)))


def claims(tensor: QuantizedTensor) -> bool:
    """Whether the planes claim powers of two; what they claim must be so."""
    planes = [tensor.plane(usage) for usage in USAGES]
    claimed = {plane.format.pow2 for plane in planes}
    assert claimed == {False} or all(are_pow2(plane.scale) for plane in planes)
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


def test_bytes_that_are_written_bring_what_is_known_of_them() -> None:
    """Copied byte for byte as ever, in both directions."""
    target, unknown, known = made(POWERS), made(ANY, 1), made(POWERS, 2)
    for source, claimed in ((unknown, False), (known, True)):
        target.copy_(source)
        assert claims(target) is claimed
        assert all(map(torch.equal, target.record.tensors(), source.record.tensors()))
    rows = made(POWERS)
    rows[:128].copy_(unknown[:128])
    assert not claims(rows)


def test_a_cast_by_another_quantizer_brings_what_it_knows() -> None:
    target, x = made(POWERS), torch.randn(256, 128)
    target.quantizer = ANY
    target.copy_(x)
    assert not claims(target)
    target.quantizer = POWERS
    target.quantize_(x, noop_flag=torch.ones(1))
    assert not claims(target)
    target.quantize_(x)
    assert claims(target)
    target.quantizer = ANY
    target.quantize_(x, noop_flag=torch.zeros(1))
    assert not claims(target)


def test_a_record_that_claims_powers_takes_no_other_scales() -> None:
    with pytest.raises(QuantizerError, match=rf"wants fp8_block_1d_e4m3, got fp8_block_1d_e4m3 \({MARK}\)"):
        ANY.update_quantized(torch.ones(256, 128), made(POWERS).record)
    unknown = made(ANY).record
    assert POWERS.update_quantized(torch.ones(256, 128), unknown) is unknown


@pytest.mark.parametrize("quantizer", [POWERS, ANY, GroupedQuantizer((POWERS, POWERS))], ids=["powers", "any", "groups"])
def test_files_say_nothing_of_it_and_loading_finds_it_in_the_scales(quantizer: Float8BlockQuantizer) -> None:
    saved = opfuse.to_planes({"w": made(quantizer)})
    text = json.loads(bytes(saved["w.planes"].tolist()))
    assert "pow2" not in json.dumps(text["record"])
    assert claims_of(opfuse.from_planes(saved)["w"]) == {quantizer is not ANY}
    spoiled = made(POWERS)
    spoiled.copy_(made(ANY))  # and its quantizer still makes powers of two
    assert not claims(opfuse.from_planes(opfuse.to_planes({"w": spoiled}))["w"])


def claims_of(tensor: QuantizedTensor) -> set[bool]:
    return {tensor.plane(usage).format.pow2 for usage in USAGES}
