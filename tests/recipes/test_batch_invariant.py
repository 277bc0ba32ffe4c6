"""A recipe's batch_invariant: a row of a forward pass has the bits that it has alone, whatever other rows are in the batch."""

import pytest
import torch

import opfuse
from opfuse import ops
from opfuse.compiler.graph import ProductFormats
from opfuse.compiler.plain import how
from opfuse.core.signature import Env
from opfuse.errors import RecipeError
from opfuse.formats import E4M3, fp8_block, fp8_row, mxfp8
from opfuse.kernels.products import native
from opfuse.kernels.products.emulated import multiply, multiply_tiles, operand
from opfuse.kernels.products.stored import Stored
from opfuse.kernels.products.tiles import in_tiles
from opfuse.recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from opfuse.tensors.gemm import gemm
from opfuse.tensors.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8RowQuantizer,
    GroupedQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from tests.invariance import RECIPES, WIDTH, bits_of_rows, model_of, pieces

FP8 = torch.float8_e4m3fn
LISTED = {**RECIPES, "high precision": CustomRecipe(qfactory=lambda role: IdentityQuantizer(), batch_invariant=True)}


@pytest.mark.few
@pytest.mark.row("X07")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", LISTED)
def test_a_row_has_the_bits_that_it_has_in_any_batch(kind, training):
    model, x = model_of(torch.float32), torch.randn(160, WIDTH)
    whole = bits_of_rows(model, x, LISTED[kind], training=training)
    for rows in (32,) if training else (1, 3, 65):  # in training formats want whole blocks of rows
        for part in pieces(160, rows):
            assert torch.equal(bits_of_rows(model, x[part], LISTED[kind], training=training), whole[part])


@pytest.mark.slow
@pytest.mark.row("X07")
@pytest.mark.parametrize("kind", LISTED)
def test_a_row_has_the_bits_that_it_has_in_any_batch_of_up_to_8192(kind):
    model, x = model_of(torch.float32), torch.randn(8192, WIDTH)
    whole = bits_of_rows(model, x, LISTED[kind])
    for rows in (*range(1, 18), 31, 64, 100, 127, 129, 500, 1024, 1025, 4096, 8191):
        for part in pieces(8192, rows):
            assert torch.equal(bits_of_rows(model, x[part], LISTED[kind]), whole[part])


def test_a_row_has_its_bits_in_tiles_and_in_groups_of_any_size():
    x, w, sizes = torch.randn(256, WIDTH), torch.randn(WIDTH, WIDTH), torch.tensor([3, 60, 1])
    assert torch.equal(in_tiles(1, "cpu", lambda cut: cut(x[:1]) @ w.t()), in_tiles(256, "cpu", lambda cut: cut(x) @ w.t())[:1])
    for recipe in (LISTED["block"], LISTED["high precision"]):
        experts = ops.GroupedLinear(3, WIDTH, WIDTH)
        with torch.no_grad(), opfuse.autocast(recipe=recipe):
            whole = experts(x[:64], sizes)
            assert torch.equal(experts(x[:1], torch.tensor([1, 0, 0])), whole[:1])
            assert torch.equal(experts(x[63:64], torch.tensor([0, 0, 1])), whole[63:])


def test_a_gate_chooses_alone_what_it_chooses_in_a_batch():
    gate, x = ops.TokenDispatch(4, 96, top_k=2), torch.randn(72, 96)

    def chosen(x):
        _, _, probabilities, places = gate(x)
        return probabilities[places]  # by token

    with torch.no_grad(), opfuse.autocast(recipe=LISTED["block"]):
        assert all(torch.equal(chosen(x[i : i + 1])[0], chosen(x)[i]) for i in (0, 31, 64, 71))


REFUSED = (
    (Float8CurrentScaling, {}),
    (Float8BlockScaling, {"x_block_scaling_dim": 2, "w_block_scaling_dim": 1}),
    (NVFP4BlockScaling, {}),
)


@pytest.mark.row("X07")
@pytest.mark.parametrize(("recipe", "fields"), REFUSED)
def test_rows_that_share_a_scale_of_the_batch_are_refused_at_construction(recipe, fields):
    with pytest.raises(RecipeError, match=rf"^{recipe.__name__}: wants inputs cast row by row.*in the batch"):
        recipe(batch_invariant=True, **fields)
    with pytest.raises(RecipeError, match="wants inputs cast row by row"):
        recipe(**fields).replace(batch_invariant=True)


@pytest.mark.row("X07")
def test_what_a_factory_answers_is_refused_when_the_plan_is_made():
    recipe = CustomRecipe(qfactory=lambda role: Float8CurrentScalingQuantizer(FP8), batch_invariant=True)
    refused = pytest.raises(RecipeError, match=r"Linear\(.*\) input under CustomRecipe: wants inputs cast row by row")
    with refused, opfuse.autocast(recipe=recipe):
        ops.Linear(WIDTH, WIDTH)(torch.randn(16, WIDTH))


def test_what_the_refusal_of_a_rotated_format_asks_for_is_taken():
    with pytest.raises(RecipeError, match="NVFP4BlockScaling with row_scaled_activation=True and disable_rht=True"):
        NVFP4BlockScaling(batch_invariant=True)
    recipe = NVFP4BlockScaling(batch_invariant=True, row_scaled_activation=True, disable_rht=True)
    assert recipe.known_quantizer().row_local


def test_which_quantizers_cast_row_by_row():
    by_row = [Float8RowQuantizer(FP8), Float8BlockQuantizer(FP8, block_scaling_dim=1), MXFP8Quantizer(), IdentityQuantizer()]
    assert all(each.row_local for each in (*by_row, NVFP4Quantizer(row_scaled_nvfp4=True)))
    shared = [Float8CurrentScalingQuantizer(FP8), Float8BlockQuantizer(FP8), NVFP4Quantizer()]
    assert not any(each.row_local for each in (*shared, MXFP8Quantizer(with_2d_quantization=True)))
    assert HybridQuantizer(by_row[0], shared[0]).row_local  # the product of the forward pass reads the rowwise plane
    assert not HybridQuantizer(shared[0], by_row[0]).row_local
    assert not GroupedQuantizer((shared[0],) * 2, (1, 1), padded=True).row_local
    assert not GroupedQuantizer((MXFP8Quantizer(), MXFP8Quantizer(with_2d_quantization=True))).row_local  # of one format


def test_sums_in_high_precision_are_in_the_type_that_was_asked_for():
    x, w = torch.randn(3, WIDTH).bfloat16(), torch.randn(5, WIDTH).bfloat16()
    y = gemm("fprop", x, w, dtype=torch.bfloat16, out_dtype=torch.float32, invariant=True)
    torch.testing.assert_close(y, x.float() @ w.float().t())


def test_no_rows_are_a_product_of_no_rows():
    assert in_tiles(0, "cpu", lambda cut: cut(torch.randn(0, WIDTH)) @ torch.randn(WIDTH, 5)).shape == (0, 5)


@pytest.mark.parametrize("quantizer", [Float8RowQuantizer(FP8), Float8BlockQuantizer(FP8, block_scaling_dim=1), MXFP8Quantizer()])
def test_a_tile_is_what_its_lines_are_in_the_whole(quantizer):
    """Also as the arrays that a library is given, whose scales lie across for 1x128 blocks."""
    left, right = (
        quantizer.wanting(columnwise=False).quantize(torch.randn(lines, 256).bfloat16()).plane("rowwise") for lines in (70, 48)
    )
    planes = [Stored(each.data, each.scale, each.amax, each.layout) for each in (left, right)]
    lines = [operand(plane) for plane in planes]
    assert torch.equal(multiply_tiles(*lines), multiply_tiles(*lines)[:70])
    assert torch.allclose(multiply_tiles(*lines), multiply(*lines), rtol=1e-5, atol=1e-4)
    if quantizer.formats[0].family != "mx":
        wanted = multiply_tiles(*lines)
        tiles = [native._tile(planes[0], start, 64) for start in (0, 64)]
        assert all(tile.in_place for tile in tiles)
        assert tiles[0].data.data_ptr() == planes[0].data.data_ptr()
        sums = [multiply(operand(tile), lines[1]) for tile in tiles]
        assert torch.equal(torch.cat(sums)[:70], wanted)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch, as 2.11, has no such product on a CPU; tests/gpu has it on a GPU",
)
@pytest.mark.parametrize("quantizer", [Float8CurrentScalingQuantizer(FP8), Float8RowQuantizer(FP8)])
def test_tiles_are_written_where_the_result_lies(quantizer, monkeypatch):
    """By torch's own product on a CPU, in the place that is given or in a new one."""
    monkeypatch.setattr("opfuse.kernels.products.tiles.ROWS", {"cuda": 64})
    monkeypatch.setattr(native, "TILE_START", 64)  # on which memory of a CPU starts
    monkeypatch.setattr(native, "machine_of", lambda device: native.Machine((9, 0), (13, 0)))
    made = (quantizer.wanting(columnwise=False).quantize(torch.randn(lines, 256).bfloat16()) for lines in (150, 48))
    planes = [Stored(each.data, each.scale, each.amax, each.layout) for each in (storage.plane("rowwise") for storage in made)]
    options = {"out_dtype": torch.bfloat16, "fast": False}
    wanted, out = native._scaled_mm(*planes, **options), torch.zeros(150, 48, dtype=torch.bfloat16)
    assert torch.allclose(native._in_tiles(*planes, **options, out=None), wanted, rtol=2**-7, atol=1e-3)
    assert native._in_tiles(*planes, **options, out=out) is out
    assert torch.allclose(out, wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.row("X07")
def test_what_explain_says_does_not_depend_on_the_rows():
    formats = {"block": (fp8_block(E4M3, 1), fp8_block(E4M3, 2)), "row": (fp8_row(E4M3),) * 2, "mx": (mxfp8(E4M3),) * 2}
    texts = {}
    for name, (left, right) in formats.items():
        said = {
            how(
                ProductFormats(0, "fprop", left, right),
                ops.BasicLinear(256, 256, device="meta").spec,
                Env(LISTED["block"], None, False, torch.bfloat16, "cuda", (9, 0), rows, True, 2),
            )
            for rows in (1, 2, 128)
        }
        assert len(said) == 1
        texts[name] = said.pop()
    assert texts["mx"].status == "emulated"
    assert "in tiles of 1024 rows" in texts["mx"].reason
    assert all("batch-invariant" in text.reason for text in texts.values())


def test_delayed_scaling_keeps_its_scale_through_the_batch():
    """Its scale was there before the batch: rows share it, but none of them decides it."""
    assert DelayedScaling(batch_invariant=True).batch_invariant
    assert MXFP8BlockScaling(batch_invariant=True) != MXFP8BlockScaling()
