"""Which products are made with the chain behind them, and which sums are added in place: the same questions on any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from opfuse import formats
from opfuse.kernels.casts.encoding import RowScaled
from opfuse.kernels.chains import call
from opfuse.kernels.products import chained, native
from opfuse.kernels.products.chained import slower, why_apart
from opfuse.kernels.products.hopper import form_of
from tests.kernels.cases.chain_casts import encoding_of
from tests.kernels.cases.chained import BOTH, ChainedCase
from tests.kernels.cases.chains import ChainCase
from tests.kernels.test_products import BF16, HOPPER, shifted, stored


@pytest.mark.parametrize(
    ("kinds", "sizes", "cast", "why"),
    [
        (("tensor", "tensor"), (1024, 1792, 8192), "delayed", ""),
        (("tensor", "tensor"), (1024, 1792, 8208), "delayed", "slower: wants 1 to 8192 length of the sum, got 8208"),
        (("tensor", "tensor"), (1024, 1792, 8208), "", ""),
        (("tensor", "tensor"), (128, 8192, 64), "", "slower: wants 256 to inf lines, got 128"),
        (("tensor", "tensor"), (256, 1024, 64), "current", "slower: wants 112 to inf tiles, got 16"),
        (("tensor", "tensor"), (256, 2048, 64), "MX", "not measured for this product with this cast"),
        (("1x128", "128x128"), (1800, 1792, 128), "1x128", ""),  # 8 by 14 tiles of 256 by 128
        (
            ("1x128", "128x128"),
            (16384, 8192, 128),
            "1x128",
            "slower: wants 1 to 67108864 elements of the result, got 134217728",
        ),
        (("1x128", "128x128"), (512, 4096, 128), "1x128", "slower: wants 112 to inf tiles, got 64"),
        (("1x128", "1x128"), (1024, 4096, 128), "1x128", "not measured for this product with this cast"),
    ],
)
def test_when_a_chain_is_made_with_its_product(kinds, sizes, cast, why):
    m, n, k = sizes
    encode = encoding_of(cast, formats.E4M3, ("rowwise",), (m, n), torch.device("cpu")) if cast else None
    form = form_of(stored(kinds[0], 16, k), stored(kinds[1], 16, k), BF16, fast=True)
    assert slower(form, encode, (m, k), n) == why
    split = form_of(stored("tensor", 16, 64), stored("tensor", 16, 64), BF16, fast=False)
    assert slower(split, encode, (m, k), n) == "not measured for this product with this cast"
    left, right = stored(kinds[0], 16, k), stored(kinds[1], 16, k)
    assert (
        why_apart(left, right, [], encode, shape=torch.Size((16, 16)), dtype=BF16, fast=True) == "no GPU whose kernels are used"
    )


class OnDevice:
    """The data of a plane, as if a device had it."""

    is_cuda = True

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __getattr__(self, name: str):
        return getattr(self.data, name)


@pytest.fixture
def on_hopper(monkeypatch):
    """Makes planes as if a device of compute capability 9.0 had them."""
    for module in (chained, native):
        monkeypatch.setattr(module, "on_kernels", lambda data: True)
    monkeypatch.setattr(native, "machine_of", lambda device: HOPPER)
    return lambda kind, lines, length: (plane := stored(kind, lines, length))._replace(data=OnDevice(plane.data))


def test_why_a_device_does_not_make_a_chain_with_its_product(on_hopper):
    def why(kinds, columns, cast="", ops=("bias",), *, encode=None, mine=False):
        left, right = on_hopper(kinds[0], 16, 128), on_hopper(kinds[1], columns, 128)
        encode = encoding_of(cast, formats.E4M3, ("rowwise",), (16, columns), torch.device("cpu")) if cast else encode
        _, stages = ChainCase(ops, (16, columns)).stages(torch.device("cpu"), torch.Generator())
        stages = [replace(stage, math=replace(stage.math, name="mine")) for stage in stages] if mine else stages
        return why_apart(left, right, stages, encode, shape=torch.Size((16, columns)), dtype=BF16, fast=True)

    assert why(("row", "row"), 32) == "not measured for this product with this cast"
    assert why(("tensor", "tensor"), 24) == "right lines: wants a positive multiple of 16, got 24"
    assert why(("tensor", "tensor"), 32, "MX").startswith("no product whose result is cast to it")
    assert why(("tensor", "tensor"), 32, "128x128").startswith("blocks of columns: ")
    assert why(("tensor", "tensor"), 32, encode=RowScaled(())).startswith("scales of whole rows: ")
    assert why(("tensor", "tensor"), 32, ops=("swiglu",)).startswith("gated activations: slower")
    assert why(("tensor", "tensor"), 32, mine=True).startswith("an op of one's own")
    assert why(("tensor", "tensor"), 32) == "slower: wants 256 to inf lines, got 16"


def test_what_only_the_call_knows_is_told_before_it(on_hopper, monkeypatch):
    """It said "one launch", and the call then made two: operands off their boundary, and two inputs that are kept."""
    monkeypatch.setattr(call, "is_dense", lambda x: True)
    left, right = on_hopper("tensor", 1024, 128), on_hopper("tensor", 3584, 128)
    shape = torch.Size((1024, 3584))
    _, stages = ChainCase(("bias", "gelu"), shape).stages(torch.device("cpu"), torch.Generator())
    bias = stages[0].operands["bias"]

    def why(bias, keep=()):
        given = [replace(stages[0], operands={"bias": bias}), stages[1]]
        return why_apart(left, right, given, None, shape=shape, dtype=BF16, fast=True, keep=keep)

    assert why(bias) == why(bias, (1,)) == why(bias.repeat_interleave(2)[::2]) == ""
    assert why(shifted(bias, 1)) == "operands: wants addresses that are multiples of 8 bytes"
    assert why(bias.expand(2, -1)).startswith("operands: wants dense tensors of the result's device and shape")
    assert why(bias, (0, 1)) == "registers: wants fewer than 2 inputs of ops that are kept, got 2"


def test_sums_are_added_to_what_can_hold_them_and_autograd_notices(on_hopper, monkeypatch):
    made = []
    monkeypatch.setattr(native, "grouped_product", lambda *given, **options: made.append(options))
    left, right = on_hopper("1x128", 2048, 64), on_hopper("1x128", 1792, 64)
    out = torch.zeros(2048, 1792)
    for wrong in (out[:, :-16], out.t(), out[1:], out.bfloat16(), shifted(out, 1), torch.zeros(1792, 2048).t()):
        assert not native.accumulate([left], [right], wrong)
    assert not made
    version = out._version
    assert native.accumulate([left], [right], out)
    assert out._version > version
    assert made[0]["out"] is out
    assert made[0]["accumulate"]


ONE, CAST = {"product_chain"}, {"product_chain", "chain_tile"}
GELU = ("bias", "gelu")


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (ChainedCase(GELU, (32, 48, 64)), ONE),
        (ChainedCase(GELU, (32, 48, 64), io=torch.float32), set()),
        (ChainedCase(GELU, (32, 40, 64)), set()),
        (ChainedCase(("swiglu",), (32, 48, 64)), set()),
        (ChainedCase(("softsign",), (32, 48, 64)), set()),  # of a user's own
        (ChainedCase(GELU, (24, 48, 64), "delayed"), ONE),
        (ChainedCase(GELU, (24, 48, 64), "delayed", BOTH), set()),
        (ChainedCase(GELU, (32, 48, 64), "delayed", keep=(0, 1)), set()),
        (ChainedCase(GELU, (32, 48, 64), "current", keep=(1,)), CAST),
        (ChainedCase((*GELU, "add"), (32, 48, 64), "current", keep=(1,)), ONE),
        (ChainedCase(GELU, (32, 64, 64), "MX"), set()),
        (ChainedCase(GELU, (32, 144, 128), "1x128", kind="1x128, 128x128", fast=False), ONE),
        (ChainedCase(GELU, (32, 144, 128), "1x128", BOTH, kind="1x128, 128x128", fast=False), set()),
        (ChainedCase(GELU, (32, 144, 128), "128x128", kind="1x128, 128x128", fast=False), set()),
    ],
    ids=lambda value: value.name if isinstance(value, ChainedCase) else None,
)
def test_which_chains_are_made_with_their_product(case, wanted):
    assert {entry for _, entry in chained.product_chain.launches({case.name: case.arguments})} == wanted
