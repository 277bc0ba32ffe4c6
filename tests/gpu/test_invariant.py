"""opfuse.invariant on the device: one log-probability of a token in prefill, decode, any batch, and training."""

import pytest
import torch

import opfuse
from opfuse import recipes

pytest.importorskip("transformers", reason="of the extra `test`")
from tests.rollouts import log_probs, model_of, ways

RECIPES = {
    "none": None,
    "block": recipes.Float8BlockScaling(),
    "row": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "mxfp8": recipes.MXFP8BlockScaling(backward_override="dequantized"),
}
WIDE = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 128, "vocab_size": 1003}


@pytest.mark.row("X16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_token_has_one_log_probability_however_the_model_is_called(kind, name, dtype, device):
    for sizes, length in (({}, 150), (WIDE, 300)):
        model = model_of(kind, dtype, device, **sizes)
        if RECIPES[name] is not None:
            opfuse.fuse_(model, RECIPES[name])
        opfuse.invariant(model)
        draw = torch.Generator().manual_seed(1)
        tokens = torch.randint(model.config.vocab_size, (5, length), generator=draw).to(device)
        for how, got, wanted in ways(model, tokens):
            assert torch.equal(got, wanted), f"{how}: {(got - wanted).abs().max()}"


@pytest.mark.row("X16")
def test_many_rows_beside_a_token_change_nothing(device):
    """More than a tile of rows, and heads of a kernel that would split its keys for a few queries."""
    model = model_of("dense", torch.bfloat16, device, **{**WIDE, "num_key_value_heads": 1, "max_position_embeddings": 4096})
    opfuse.fuse_(model, RECIPES["block"])
    opfuse.invariant(model)
    tokens = torch.randint(1003, (4, 2500), generator=torch.Generator().manual_seed(1)).to(device)
    for how, got, wanted in ways(model, tokens):
        assert torch.equal(got, wanted), f"{how}: {(got - wanted).abs().max()}"


def test_it_computes_what_the_model_does(device):
    tokens = torch.randint(130, (2, 150), generator=torch.Generator().manual_seed(1)).to(device)
    for kind in ("dense", "mixture"):
        with torch.no_grad():
            plain = model_of(kind, torch.float32, device)
            wanted = log_probs(plain, tokens)
            for dtype, close in ((torch.float32, 1e-3), (torch.bfloat16, 0.3)):
                model = model_of(kind, dtype, device)
                opfuse.invariant(model)
                assert (log_probs(model, tokens) - wanted).abs().quantile(0.9) < close
