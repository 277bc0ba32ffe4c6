"""Tiny models of Hugging Face transformers with random weights, of any class: fields of a configuration are made small by their
names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="of the extra `test`")

WORDS, WIDTH = 96, 32
SMALL: dict[int, tuple[str, ...]] = {
    WORDS: ("vocab_size", "text_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "entity_vocab_size"),
    64: ("max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "n_ctx", "pronunciation_vocab_size"),
    WIDTH: (
        *("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim", "model_dim", "n_embed"),
        *("embed_dim", "lru_width", "attention_hidden_size", "width", "decoder_hidden_size", "entity_emb_size", "image_size"),
        *(
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "n_inner",
            "hidden_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "dff",
            "d_inner",
        ),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp", "shared_intermediate_size"),
        *("ffn_hidden_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "mlp_dim", "feed_forward_size"),
        *("kv_lora_rank", "q_lora_rank", "o_lora_rank", "router_hidden_size", "block_ff_dim", "attention_hidden_dim", "dim_ff"),
        *("rel_extent", "sliding_window", "sliding_window_size", "index_topk", "moe_ffn_hidden_size", "pronunciation_embed_dim"),
        *("shape_embed_dim", "shape_vocab_size", "decoder_intermediate_size", "position_bias_max_distance", "laurel_rank"),
        *("position_bias_num_buckets", "original_max_position_embeddings", "expert_hidden_size"),
    ),
    8: (
        *("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim", "linear_key_head_dim"),
        *("linear_value_head_dim", "attention_head_size", "global_head_dim", "kv_channels", "dim_head", "index_head_dim"),
        *("mamba_d_state", "state_size", "ssm_state_size", "hidden_size_per_layer_input", "linear_head_dim", "swa_head_dim"),
    ),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        *("num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "patch_size"),
        *("num_encoder_attention_heads", "num_decoder_attention_heads", "linear_num_key_heads", "linear_num_value_heads"),
        *("n_mamba_heads", "num_global_key_value_heads", "zero_expert_num", "linear_num_heads", "index_n_heads"),
    ),
    2: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"),
        *("num_encoder_layers", "num_hidden_groups", "num_blocks", "num_experts_per_tok", "moe_k", "num_experts_per_token"),
        *("top_k", "moe_topk", "num_kv_shared_layers"),
    ),
    1: (
        "n_group",
        "topk_group",
        "n_shared_experts",
        "n_groups",
        "mamba_n_groups",
        "first_k_dense_replace",
        "moe_num_shared_experts",
    ),
}
"""Values and the fields that get them; lists of widths and depths get as many of WIDTH and 1."""
LISTS = {WIDTH: ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "embedding_sizes"), 1: ("depths", "num_encoder_blocks")}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
MORE: dict[str, dict[str, Any]] = {
    "Falcon": {"head_dim": None},
    "Mamba2": {"num_heads": 8, "head_dim": 8},
    "Zamba2": {"attention_head_dim": 16, "n_mamba_heads": 8, "mamba_headdim": 8},
    "Zamba": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "Reformer": {"is_decoder": True, "axial_pos_embds": False},
}
"""What single configurations want beside."""


def small(kind: type) -> Any:
    """A configuration of this class with the fields of SMALL, and of configurations inside of it."""
    usual = kind()
    sizes: dict[str, Any] = {name: value for value, names in SMALL.items() for name in names if _is_number(usual, name)}
    for value, names in LISTS.items():
        sizes |= {
            name: [value] * len(getattr(usual, name)) for name in names if isinstance(getattr(usual, name, None), (list, tuple))
        }
    sizes |= {name: small(type(each)) for name, each in vars(usual).items() if hasattr(each, "to_diff_dict")}
    sizes |= {name: value for name, value in TOKENS.items() if hasattr(usual, name)}
    return kind(**sizes | MORE.get(kind.__name__.removesuffix("Config"), {}))


def _is_number(config: Any, name: str) -> bool:
    try:
        value = getattr(config, name, None)
    except Exception:  # of fields that differ between layers
        return False
    return type(value) is int


def tiny(name: str) -> nn.Module:
    """The model of a class of transformers, with the same weights each time."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(small(kind.config_class))


def arguments(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model is trained on: two texts, or two images."""
    torch.manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, WIDTH, WIDTH), "labels": torch.tensor([0, 1])}
    words = torch.randint(3, WORDS, (2, 12))
    return {"input_ids": words, "labels": words}
