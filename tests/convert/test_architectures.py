"""Models of Hugging Face transformers: what of each is converted, and that it stays the model it was. Tiny, with random
weights.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import opfuse
from opfuse.recipes import CustomRecipe, Float8CurrentScaling
from tests.convert.test_fuse import nothing_quantized
from tests.turns import in_turn

transformers = pytest.importorskip("transformers", reason="of the extra `test`")

FP8, EXACT = Float8CurrentScaling(), CustomRecipe(qfactory=nothing_quantized)
LAYERS, WORDS = 2, 96
ROOT = Path(__file__).resolve().parents[2]

SIZES = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
QKV = {"Linear×3": 1, "Linear": 1}
GATED = {**QKV, "Linear×2 → SwiGLU → Linear": 1}


@dataclass(frozen=True)
class Architecture:
    """name: of the configuration and, with ``model`` behind it, of the class. became: how many modules of each layer became
    what; once: of the model.
    """

    name: str
    model: str
    sizes: dict[str, Any]
    became: dict[str, int]
    once: dict[str, int] = field(default_factory=dict)

    def make(self):
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**self.sizes, **TOKENS, attn_implementation="eager")
        return getattr(transformers, f"{self.name}{self.model}")(config).eval()

    @property
    def counts(self):
        return {name: LAYERS * count for name, count in self.became.items()} | self.once


EXPERTS = "TokenPermute → GroupedLinear → ScaledSwiGLU → GroupedLinear → TokenCombine"
MIXTURE = {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
BERT = {"Linear×3": 1, "Linear → AddExtraInput → LayerNorm": 2, "Linear → GELUErf": 1}
GPT2 = {"vocab_size": WORDS, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
ARCHITECTURES = [
    Architecture("Llama", "ForCausalLM", HEADS, GATED),
    Architecture("Qwen3", "ForCausalLM", HEADS, GATED),
    Architecture("Mistral", "ForCausalLM", HEADS, GATED),
    Architecture("Gemma", "ForCausalLM", HEADS, {**QKV, "Linear×2 → GEGLU → Linear": 1}),
    Architecture("Phi", "ForCausalLM", GROUPED, {**QKV, "Linear → GELU → Linear": 1}),
    Architecture("Phi3", "ForCausalLM", GROUPED, {"Linear": 2, "Linear → SwiGLU → Linear": 1}),
    Architecture("GPT2", "LMHeadModel", GPT2, {"Linear": 2, "Linear → GELU → Linear": 1}),
    Architecture("Bert", "ForMaskedLM", SIZES, BERT, {"Linear → GELUErf → LayerNorm": 1}),
    Architecture("Mixtral", "ForCausalLM", {**HEADS, "num_local_experts": 4}, {**QKV, EXPERTS: 1}),
    Architecture("Qwen3Moe", "ForCausalLM", MIXTURE, {**QKV, EXPERTS: 1}),
]


def without_dropout(model):
    """Masks of opfuse are others than those of torch."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def step(model, words):
    """Logits and gradients of one call in training; dropouts draw the same masks each time."""
    torch.manual_seed(1)
    model.train()
    output = model(input_ids=words, labels=words)
    output.loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.eval()
    return [output.logits.detach(), *grads]


def close(some, others):
    return max(((a - b).norm() / b.norm().clamp(min=1e-3)).item() for a, b in zip(some, others, strict=True))


def same(some, others):
    return all(map(torch.equal, some, others))


def check_converted(architecture, model, words, plain):
    assert opfuse.fuse_(model).counts == architecture.counts
    assert same(step(model, words), plain)
    with opfuse.autocast(recipe=EXACT):
        assert close(step(model, words), plain) < 2e-5


@pytest.mark.parametrize("architecture", [each for i, each in enumerate(ARCHITECTURES) if i % 5], ids=lambda each: each.name)
def test_a_model_is_converted(architecture):
    model, words = without_dropout(architecture.make()), torch.randint(3, WORDS, (2, 16))
    check_converted(architecture, model, words, step(model, words))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("architecture", in_turn(ARCHITECTURES, of=5))
def test_a_model_is_converted_and_stays_the_model_it_was(architecture, tmp_path):
    """Each fifth; of every other no more than that it is converted."""
    model = without_dropout(architecture.make())
    words = torch.randint(3, WORDS, (2, 16))
    names, plain = [*model.state_dict()], step(model, words)
    signatures = [inspect.signature(module.forward) for module in model.modules()]

    check_converted(architecture, model, words, plain)
    assert [inspect.signature(module.forward) for module in model.modules()] == signatures

    opfuse.fuse_(model, FP8, pack=True)
    quantized = step(model, words)
    assert 1e-4 < close(quantized[:1], plain[:1]) < 0.2
    model.gradient_checkpointing_enable()
    assert same(step(model, words), quantized)
    model.gradient_checkpointing_disable()
    twin = copy.deepcopy(model)
    assert same(step(twin, words), quantized)

    assert [*model.state_dict()] == names
    model.save_pretrained(tmp_path)
    stock = without_dropout(type(model).from_pretrained(tmp_path, attn_implementation="eager"))
    assert same(step(stock, words), plain)
    assert same(step(opfuse.unfuse_(model), words), plain)
    assert not any("forward" in vars(module) for module in model.modules())


SPARSE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
OPT = {"ffn_dim": 128, "word_embed_proj_dim": 64}
DISTILBERT = {"vocab_size": WORDS, "dim": 64, "hidden_dim": 128, "n_layers": LAYERS, "n_heads": 4}
T5 = {
    "vocab_size": WORDS,
    "d_model": 64,
    "d_ff": 128,
    "d_kv": 16,
    "num_layers": LAYERS,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
MORE = [
    Architecture("Qwen2", "ForCausalLM", GROUPED, {"Linear×2 → SwiGLU → Linear": 1}),
    Architecture("Gemma2", "ForCausalLM", HEADS, {"Linear×2 → GEGLU → Linear": 1}),
    Architecture("OPT", "ForCausalLM", {**SIZES, **OPT}, {"Linear": 3}),
    Architecture("GPTNeoX", "ForCausalLM", SIZES, {"Linear → GELUErf → Linear": 1}),
    Architecture("Olmo2", "ForCausalLM", GROUPED, {**QKV, "Linear×2 → SwiGLU → Linear": 1}),
    Architecture("Cohere", "ForCausalLM", GROUPED, {**QKV, "Linear×2 → SwiGLU → Linear": 1}),
    Architecture("Granite", "ForCausalLM", GROUPED, GATED),
    Architecture("DistilBert", "ForMaskedLM", DISTILBERT, {"Linear×3": 1}),
    Architecture("Electra", "ForMaskedLM", SIZES, {"Linear×3": 1, "Linear → GELUErf": 1}),
    Architecture("T5", "ForConditionalGeneration", T5, {"Linear×2": 3, "Linear": 6}),
    Architecture("DeepseekV3", "ForCausalLM", {**SIZES, **SPARSE, **LATENT, "first_k_dense_replace": 1}, {}, {EXPERTS: 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MORE, ids=lambda each: each.name)
def test_more_models_compute_what_they_did(architecture):
    model = without_dropout(architecture.make())
    words = torch.randint(3, WORDS, (2, 16))
    with torch.no_grad():  # biases that count, and norms that do
        for parameter in model.parameters():
            parameter += 0.2 * torch.rand_like(parameter) if parameter.dim() == 1 else 0.0
    plain = step(model, words)
    counts = opfuse.fuse_(model, EXACT).counts
    assert {name: counts[name] for name in architecture.counts} == architecture.counts
    for one, other in zip(step(model, words), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6 * other.abs().max().clamp(min=1).item())


def test_a_model_with_dropouts_trains():
    """Where dropouts draw, their modules run, between products that are converted."""
    architecture = ARCHITECTURES[-3]
    model, words = architecture.make(), torch.randint(3, WORDS, (4, 16))
    assert opfuse.fuse_(model, FP8).counts == architecture.counts
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses = []
    for _ in range(12):
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    ("name", "path", "got"),
    [
        (
            "GPT2",
            "transformer.h.0.ln_2",
            "a norm of 64 columns; norms run as ops from 1024 on",
        ),
        ("Llama", "model.layers.1.input_layernorm", "a norm of 64 columns"),
        ("Qwen3Moe", "model.layers.0.mlp.gate", "a router stays in high precision by default"),
    ],
)
def test_why_a_module_stays(name, path, got):
    (architecture,) = [each for each in ARCHITECTURES if each.name == name]
    assert got in opfuse.fuse_(architecture.make(), FP8)[path].got


def test_a_head_that_is_named_is_converted():
    (architecture,) = [each for each in ARCHITECTURES if each.name == "Bert"]
    model = architecture.make()
    report = opfuse.fuse_(model, FP8)
    policy = ast.literal_eval(report["cls.predictions.decoder"].cure.partition("policy=")[2])
    assert "Linear → GELUErf → LayerNorm → Linear" in opfuse.fuse_(model, FP8, policy=policy).counts


def test_generation_runs_one_row_at_a_time():
    model = ARCHITECTURES[0].make()
    opfuse.fuse_(model, FP8)
    words = torch.randint(3, WORDS, (1, 5))
    made = model.generate(
        input_ids=words, attention_mask=torch.ones_like(words), max_new_tokens=4, min_new_tokens=4, do_sample=False
    )
    assert made.shape == (1, 9)


@pytest.mark.parametrize("page", ["README.md", "docs/fuse.md"])
def test_the_example_of_a_page_runs(page, tmp_path, monkeypatch):
    """The blocks that call fuse_, word for word; those behind the first go on with its model."""
    text = (ROOT / page).read_text(encoding="utf-8")
    block, *more = [each for each in re.findall(r"```py\n(.*?)```", text, re.DOTALL) if "opfuse.fuse_(" in each]
    monkeypatch.chdir(tmp_path)
    space = {}
    exec(compile(block, page, "exec"), space)
    if page == "README.md":
        stock = transformers.LlamaForCausalLM.from_pretrained("trained")
        words = space["words"]
        assert torch.equal(stock(words).logits, opfuse.unfuse_(space["model"])(words).logits)
    else:
        assert space["report"].counts == {"Linear×3": 2, "Linear": 2, "Linear×2 → SwiGLU → Linear": 2}
        (table,) = re.findall(r"```\n(module .*?)```", text, re.DOTALL)
        assert set(table.splitlines()) <= set(str(space["report"]).splitlines())
        (shown,) = re.findall(r"```\n(\(q_proj\).*?)```", text, re.DOTALL)
        assert {*shown.splitlines()} <= {line.strip() for line in repr(space["model"]).splitlines()}
        assert str(opfuse.report(space["model"])) == str(space["report"])
    for each in more:
        exec(compile(each, page, "exec"), space)


@pytest.mark.parametrize("name", ["Llama", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_layers_compile_whole_and_share_a_graph(name):
    """Attention, norms and residuals in the graph, converted modules as its ops; the bits of eager calls."""
    (architecture,) = [each for each in ARCHITECTURES if each.name == name]
    model = without_dropout(architecture.make())
    model.config.use_cache = False  # as in training: a cache of keys and values knows which layer asks
    opfuse.fuse_(model, FP8)
    other, words = copy.deepcopy(model), torch.randint(3, WORDS, (2, 16))
    torch._dynamo.reset()
    counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert same(step(model, words), step(other, words))
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
