"""opfuse.invariant: a token's log-probability has the same bits in prefill, decode, any batch, and training."""

import copy

import pytest
import torch
from torch import nn

import opfuse
from opfuse import recipes
from opfuse.convert.invariant_attention import TILE, InvariantAttention, sequences
from opfuse.convert.row_tiles import row_tiles
from opfuse.errors import ConversionError, DtypeError, RecipeError, ShapeError

transformers = pytest.importorskip("transformers", reason="of the extra `test`")
from tests.rollouts import decoded, log_probs, model_of, ways  # noqa: E402
from tests.turns import in_turn  # noqa: E402

RECIPES = {
    "none": None,
    "mxfp8": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "block": recipes.Float8BlockScaling(),
    "row": recipes.CustomRecipe(qfactory="fp8_row_scaled"),
}
CASES = [
    *[("dense", name, torch.float32) for name in ("none", "mxfp8", "block")],
    ("dense", "block", torch.bfloat16),
    ("mixture", "block", torch.bfloat16),
    *[("mixture", name, torch.float32) for name in ("none", "mxfp8", "row")],
]
"""The first and the fifth run every time: tests below call mixtures under MXFP8 as well."""

LENGTH = TILE + 8


@pytest.mark.row("X16")
@pytest.mark.parametrize(("kind", "name", "dtype"), in_turn(CASES, of=4))
def test_a_token_has_one_log_probability_however_the_model_is_called(kind, name, dtype):
    model = model_of(kind, dtype)
    if RECIPES[name] is not None:
        opfuse.fuse_(model, RECIPES[name])
    opfuse.invariant(model)
    tokens = torch.randint(130, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    for how, got, wanted in ways(model, tokens, 3):
        assert torch.equal(got, wanted), how


ALIKE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
GROUPED = {"moe_intermediate_size": 64, **GROUPS}
OTHERS = {
    "DeepseekV3Config": {**GROUPED, **LATENT},
    "GPT2Config": {"n_embd": 64, "n_head": 4, "n_layer": 1, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "MixtralConfig": {"num_local_experts": 4},
    **{f"{name}Config": {} for name in ("Cohere", "Gemma", "GPTNeoX", "Granite", "Nemotron", "Olmo2", "Phi", "Qwen2", "Qwen3")},
    "Ernie4_5Config": {"head_dim": 16},
    "Glm4MoeConfig": {"head_dim": 16, **GROUPED},
    "GraniteMoeConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "HunYuanDenseV1Config": {"head_dim": 16},
    "MistralConfig": {"sliding_window": None},
    "OlmoeConfig": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phi3Config": {"pad_token_id": 0},
    "SmolLM3Config": {"pad_token_id": 0},
}
QUICK = 2


@pytest.mark.row("X16")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (i >= QUICK)) for i, name in enumerate(OTHERS)])
def test_other_models_are_invariant_too(name):
    config = getattr(transformers, name)(**{**({} if name == "GPT2Config" else ALIKE), **OTHERS[name]})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    opfuse.invariant(model)
    for how, got, wanted in ways(model, torch.randint(128, (3, LENGTH), generator=torch.Generator().manual_seed(1)), 3):
        assert torch.equal(got, wanted), how


def test_without_it_bits_differ():
    """So the test above can fail: of a plain model, and of one whose products alone are invariant."""
    tokens = torch.randint(130, (5, LENGTH), generator=torch.Generator().manual_seed(1))
    for kind in ("dense", "mixture"):
        for recipe in (None, recipes.MXFP8BlockScaling(batch_invariant=True)):
            model = model_of(kind, torch.float32)
            if recipe is not None:
                opfuse.fuse_(model, recipe)
            assert not all(torch.equal(got, wanted) for _, got, wanted in ways(model, tokens))


def test_it_computes_what_the_model_does():
    tokens = torch.randint(130, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    for kind, dtype, close in (("dense", torch.float64, 1e-10), ("mixture", torch.float32, 1e-3)):
        plain = model_of(kind, dtype)
        model = copy.deepcopy(plain)
        opfuse.invariant(model)
        wanted, got = (log_probs(each, tokens) for each in (plain, model))
        assert torch.allclose(wanted, got, rtol=close, atol=close)
        for each in (wanted, got):
            each.sum().backward()
        for (path, p), other in zip(plain.named_parameters(), model.parameters()):
            assert torch.allclose(p.grad, other.grad, rtol=close, atol=close * p.grad.abs().max()), path


def test_the_report_names_what_runs_in_tiles_and_unfuse_gives_it_back():
    model = model_of("mixture", torch.float32, num_hidden_layers=2)
    opfuse.fuse_(model, RECIPES["block"], policy={"model.layers.1": None})
    report = opfuse.invariant(model)
    assert report["model.layers.0.self_attn.q_proj"].recipe == "Float8BlockScaling"
    assert report["model.layers.1.self_attn.q_proj"].recipe == report["lm_head"].recipe == "CustomRecipe"
    for path, rows in (("model.layers.0.mlp.gate", 64), ("model.norm", 64), ("model.layers.0.self_attn.q_norm", 256)):
        assert report[path].became == f"its own forward, in tiles of {rows} rows"
    assert not report.of("refused")
    assert opfuse.report(model)["model.norm"].became == report["model.norm"].became
    opfuse.unfuse_(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_checkpoints_autocast_and_adapters_keep_the_bits():
    tokens = torch.randint(130, (3, 20), generator=torch.Generator().manual_seed(1))
    model = model_of("mixture", torch.float32)
    opfuse.fuse_(model, RECIPES["mxfp8"])
    opfuse.invariant(model)
    with torch.no_grad():
        wanted = log_probs(model, tokens)
    model.gradient_checkpointing_enable()
    got = log_probs(model.train(), tokens, use_cache=False)
    got.sum().backward()
    assert torch.equal(got, wanted)
    model.gradient_checkpointing_disable()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(*pair) for _, *pair in ways(model, tokens, 2))

    peft = pytest.importorskip("peft", reason="of no extra: `pip install peft`")
    adapted = peft.get_peft_model(model_of("dense", torch.float32), peft.LoraConfig(init_lora_weights=False))
    opfuse.invariant(adapted)
    assert all(torch.equal(*pair) for _, *pair in ways(adapted, tokens, 2))


def test_a_copy_is_invariant_by_itself():
    model = model_of("dense", torch.float32)
    opfuse.invariant(model)
    copied = copy.deepcopy(model)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before = log_probs(model, tokens)
        copied.model.norm.weight.mul_(2)
        assert torch.equal(log_probs(model, tokens), before)
        assert not torch.equal(log_probs(copied, tokens), before)


# -- what is refused -------------------------------------------------------------------------------------------------------------


class _Summing(nn.Module):
    """Adds what depends on all rows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + x.mean()


class _Curved(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).sin().sigmoid()


@pytest.mark.row("X16")
@pytest.mark.parametrize(
    ("around", "wanted"),
    [(_Summing, "mean"), (_Curved, "sigmoid")],
    ids=["sums", "sigmoid on a CPU"],
)
def test_what_computes_outside_of_known_parts_is_refused_by_name(around, wanted):
    model = model_of("dense", torch.float32)
    model.model.layers[0].self_attn.o_proj = around(model.model.layers[0].self_attn.o_proj)
    with pytest.raises(
        ConversionError, match=rf"invariant model\.layers\.0\.self_attn\.o_proj: wants values moved .*got {wanted}\(\)"
    ):
        opfuse.invariant(model)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ConversionError, match="none in a LlamaForCausalLM"):
        opfuse.report(model)


def test_a_module_whose_rows_depend_on_each_other_is_refused():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return (x - x.reshape(-1, 64).mean(0)) * self.weight

    model = model_of("dense", torch.float32)
    model.model.norm = Centred()
    with pytest.raises(ConversionError, match=r"invariant model\.norm: wants a function of single rows, got a Centred"):
        opfuse.invariant(model)
    assert row_tiles(Centred(), "") is None


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: nn.Linear(4, 4), ConversionError, "wants a causal language model of transformers, got a Linear"),
        (
            lambda: transformers.AutoModelForCausalLM.from_config(
                transformers.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=64)
            ),
            ConversionError,
            r"transformer\.drop: wants no dropout, which draws in training, got p=0\.1",
        ),
        (
            lambda: model_of("mixture", torch.float32, use_sliding_window=True, sliding_window=8, max_window_layers=0),
            ConversionError,
            "sliding_window",
        ),
        *[
            (
                lambda kind=kind, more=more: model_of(
                    "dense", torch.float32, rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}
                ),
                ConversionError,
                rf"model\.rotary_emb: wants angles that follow from a token's position alone, got rope_type '{kind}'",
            )
            for kind, more in (("dynamic", {}), ("longrope", {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}))
        ],
        (
            lambda: transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**ALIKE, num_local_experts=4, router_jitter_noise=0.1)
            ).eval(),
            ConversionError,
            r"model\.layers\.0\.mlp: wants values moved or computed one by one, .* got (empty_like|uniform_)\(\)",
        ),
        (
            lambda: transformers.BertForMaskedLM(
                transformers.BertConfig(
                    hidden_size=32,
                    num_attention_heads=2,
                    num_hidden_layers=1,
                    intermediate_size=64,
                    vocab_size=64,
                    hidden_dropout_prob=0,
                    attention_probs_dropout_prob=0,
                )
            ),
            ConversionError,
            "invariant",
        ),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16, vocab_size=64, dropout_rate=0)
            ),
            ConversionError,
            "invariant",
        ),
    ],
)
def test_models_that_cannot_be_invariant_are_refused(make, error, text):
    with pytest.raises(error, match=text):
        opfuse.invariant(make())


def test_a_recipe_whose_rows_depend_on_each_other_is_refused_and_the_model_stays_as_it_was():
    model = model_of("dense", torch.float32)
    opfuse.fuse_(model, recipes.Float8CurrentScaling())
    with pytest.raises(RecipeError, match="wants inputs cast row by row"):
        opfuse.invariant(model)
    assert opfuse.report(model)["model.layers.0.self_attn.q_proj"].recipe == "Float8CurrentScaling"


def test_calls_that_it_is_not_invariant_in_are_refused():
    model = model_of("dense", torch.float32)
    opfuse.fuse_(model, RECIPES["mxfp8"])
    opfuse.invariant(model)
    tokens = torch.arange(8)[None]
    with pytest.raises(ConversionError, match="got a region of MXFP8BlockScaling"), opfuse.autocast(recipe=RECIPES["mxfp8"]):
        model(input_ids=tokens)
    with pytest.raises(ConversionError, match="got a region of None"), opfuse.autocast(enabled=False):
        model(input_ids=tokens)
    with pytest.raises(ConversionError, match="positions that count the tokens of each sequence"):
        model(input_ids=tokens, position_ids=torch.arange(3, 11)[None])
    with pytest.raises(ConversionError, match="positions that count"):  # of left padding that positions do not know
        model(input_ids=tokens, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]))
    with pytest.raises(ConversionError, match="attention of an invariant model"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    model.config.attention_dropout = 0.1
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ConversionError, match=r"got a dropout of 0\.1"):
        model.train()(input_ids=tokens)


def test_compiled_code_is_refused():
    """It would order sums anew between the products."""
    model = model_of("dense", torch.float32)
    opfuse.invariant(model)
    with pytest.raises(ConversionError, match=r"of an invariant model: .*got torch\.compile, which orders sums anew"):
        torch.compile(model, backend="eager")(input_ids=torch.arange(8)[None])
    torch.compiler.reset()


def test_attention_refuses_what_it_does_not_know():
    attend, x = InvariantAttention(), torch.randn(1, 2, 4, 8)
    positions = torch.arange(4)[None]
    for more, text in (
        ({"softcap": 30.0}, "got softcap"),
        ({"sliding_window": 4}, "got sliding_window"),
        ({"is_causal": False}, "attention in both directions"),
        ({"position_ids": None}, "no position_ids"),
        ({"attention_mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, r"a mask of shape \(1, 1, 4, 4\)"),
    ):
        with pytest.raises(ConversionError, match=text):
            attend(nn.Identity(), x, x, x, **{"position_ids": positions, **more})


def test_sequences_follow_from_positions_and_padding():
    packed = sequences(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]), None, 5)
    assert packed.counts == [(3, 3), (2, 2), (1, 1), (4, 4)]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    padded = sequences((mask.cumsum(1) - 1).clamp(min=0), mask, 4)
    assert (padded.counts, padded.keys.tolist()) == ([(2, 2), (4, 4), (3, 3)], [2, 3, 4, 5, 6, 7, 8, 9, 10])
    cached = sequences(torch.tensor([[0, 1], [2, 3], [2, 2]]), mask, 4)
    assert cached.counts == [(2, 2), (2, 4), (1, 3)]
    assert cached.queries.tolist() == [0, 1, 2, 3, 4]
    everything = torch.ones(3, 4, dtype=torch.bool)
    for count in (4, 1):  # without padding, as with a mask of ones
        positions = torch.arange(4 - count, 4).expand(3, -1)
        whole, masked = sequences(positions, None, 4), sequences(positions, everything, 4)
        assert (whole.queries, whole.keys, whole.counts) == (None, None, masked.counts)
        assert torch.equal(whole.query_starts, masked.query_starts)
        assert torch.equal(whole.key_starts, masked.key_starts)
    for positions in (torch.tensor([[1, 2]]), torch.tensor([[3, 4]])):
        with pytest.raises(ConversionError, match="positions that count"):
            sequences(positions, None, 4)


def test_positions_written_in_inference_mode_are_read_again():
    """Where nothing counts writes to a buffer that one call after the other is given."""
    model, tokens = model_of("dense", torch.float32), torch.arange(12)[None]
    opfuse.invariant(model)
    with torch.inference_mode():
        positions = torch.arange(12)[None].clone()
        before = log_probs(model, tokens, position_ids=positions)
        positions[:, 6:] -= 6
        packed = log_probs(model, tokens, position_ids=positions)
        assert torch.equal(packed, log_probs(model, tokens, position_ids=positions.clone()))
        assert not torch.equal(packed, before)


def test_modes_stay_as_they_were():
    model = model_of("mixture", torch.float32, num_hidden_layers=2).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    opfuse.invariant(model)
    assert [module.training for module in model.modules()] == modes


def test_a_generated_batch_scores_as_it_does_in_training():
    """transformers' own generate, with left padding and a cache."""
    model = model_of("dense", torch.float32)
    opfuse.invariant(model)
    tokens, mask = torch.arange(1, 13).view(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[0, :3] = 0
    out = model.generate(
        tokens, attention_mask=mask, max_new_tokens=8, do_sample=True, output_logits=True, return_dict_in_generate=True,
        pad_token_id=0, top_k=0,
    )  # fmt: skip
    for row, begin in ((0, 3), (1, 0)):
        sequence = out.sequences[row, begin:]
        acted = torch.cat([opfuse.log_probs(logits[row], sequence[6 - begin + i]).view(1) for i, logits in enumerate(out.logits)])
        assert torch.equal(acted, log_probs(model, sequence[None])[0, 5 - begin :].detach())


@pytest.mark.row("X16")
def test_log_probs_are_those_of_torch_and_their_arguments_are_checked():
    logits, tokens = torch.randn(3, 5, 130, dtype=torch.bfloat16), torch.randint(130, (3, 5))
    wanted = (logits.float() / 0.5).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert torch.equal(opfuse.log_probs(logits, tokens, temperature=0.5), wanted)
    with pytest.raises(ShapeError, match=r"logits \(\.\.\., words\) and tokens"):
        opfuse.log_probs(logits, tokens[:, 1:])
    with pytest.raises(DtypeError, match="int64"):
        opfuse.log_probs(logits, tokens.int())


def test_a_decoded_token_is_scored_beside_others():
    model = model_of("mixture", torch.bfloat16)
    opfuse.fuse_(model, RECIPES["mxfp8"])
    opfuse.invariant(model)
    tokens = torch.randint(130, (3, 12), generator=torch.Generator().manual_seed(2))
    assert torch.equal(decoded(model, tokens, 1)[:1], decoded(model, tokens[:1], 8))
