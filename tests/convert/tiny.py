"""Tiny models of Hugging Face transformers with random weights, of any class: fields of a configuration are made small by their
names. ``MODELS`` are the classes that are built so and take less than a second for a step on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

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
        *("shape_embed_dim", "shape_vocab_size", "decoder_intermediate_size", "position_bias_max_distance", "laurel_rank", "dff"),
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
        *("top_k", "moe_topk"),
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
    0: ("num_kv_shared_layers",),
}
"""Values and the fields that get them; lists of widths and depths get as many of WIDTH and 1."""
LISTS = {WIDTH: ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "embedding_sizes"), 1: ("depths", "num_encoder_blocks")}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
MORE: dict[str, dict[str, Any]] = {
    "GPTNeo": {"attention_types": [[["global", "local"], 1]]},
    "Mamba2": {"num_heads": 8, "head_dim": 8},
    **{name: {"decoder_start_token_id": 0} for name in ("T5", "LongT5", "SwitchTransformers")},
    "Zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_headdim": 8, "attention_head_dim": 16},
}
"""What single configurations want beside."""


def small(kind: type) -> Any:
    """A configuration of this class with the fields of SMALL, and of configurations inside of it."""
    usual = kind()
    sizes: dict[str, Any] = {name: value for value, names in SMALL.items() for name in names if _is_number(usual, name)}
    for value, names in LISTS.items():
        found = {name: getattr(usual, name, None) for name in names}
        sizes |= {name: [value] * len(each) for name, each in found.items() if isinstance(each, (list, tuple))}
    sizes |= {name: small(type(each)) for name, each in vars(usual).items() if hasattr(each, "to_diff_dict")}
    sizes |= {name: value for name, value in TOKENS.items() if hasattr(usual, name)}
    sizes |= {"use_cache": False} if hasattr(usual, "use_cache") else {}  # as in training
    return kind(**sizes | MORE.get(kind.__name__.removesuffix("Config"), {}))


def _is_number(config: Any, name: str) -> bool:
    """Whether a field is a number that can be given."""
    made = getattr(type(config), name, None)
    if isinstance(made, property) and made.fset is None:
        return False
    try:
        return type(getattr(config, name, None)) is int
    except Exception:  # of fields that differ between layers
        return False


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


LISTED = """
AfmoeForCausalLM AlbertForMaskedLM ApertusForCausalLM ArceeForCausalLM AriaTextForCausalLM
AudioFlamingo3ForConditionalGeneration AXK1ForCausalLM AXK2ForCausalLM BailingHybridForCausalLM BartForCausalLM
BartForConditionalGeneration BeamForCausalLM BeitForImageClassification BertForMaskedLM BertGenerationDecoder BertLMHeadModel
BigBirdForCausalLM BigBirdForMaskedLM BigBirdPegasusForCausalLM BigBirdPegasusForConditionalGeneration BioGptForCausalLM
BitNetForCausalLM BlenderbotForCausalLM BlenderbotForConditionalGeneration BlenderbotSmallForCausalLM
BlenderbotSmallForConditionalGeneration BloomForCausalLM CamembertForCausalLM CamembertForMaskedLM CLIPForImageClassification
CodeGenForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM ConvBertForMaskedLM
ConvNextForImageClassification ConvNextV2ForImageClassification CpmAntForCausalLM CTRLLMHeadModel CwmForCausalLM
Data2VecTextForCausalLM Data2VecTextForMaskedLM Data2VecVisionForImageClassification DebertaForMaskedLM DebertaV2ForMaskedLM
DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM DeiTForImageClassification DiffLlamaForCausalLM
Dinov2ForImageClassification Dinov2WithRegistersForImageClassification DistilBertForMaskedLM DogeForCausalLM
ElectraForCausalLM ElectraForMaskedLM Emu3ForCausalLM EncoderDecoderModel Ernie4_5_MoeForCausalLM Ernie4_5ForCausalLM
ErnieForCausalLM ErnieForMaskedLM EsmcForMaskedLM EuroBertForMaskedLM Exaone4ForCausalLM ExaoneMoeForCausalLM
FalconForCausalLM FalconMambaForCausalLM FlaubertWithLMHeadModel FlexOlmoForCausalLM FlintForCausalLM FNetForMaskedLM
FuyuForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma4ForCausalLM
Gemma4ForConditionalGeneration Gemma4UnifiedForCausalLM Gemma4UnifiedForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM
Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmAsrForConditionalGeneration GlmForCausalLM GlmMoeDsaForCausalLM GPT2LMHeadModel
GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM GptOssForCausalLM
GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM
GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration GraniteSWAForCausalLM GteForMaskedLM
HeliumForCausalLM HrmTextForCausalLM HyperCLOVAXForCausalLM HYV3ForCausalLM HYV4ForCausalLM IBertForMaskedLM
IJepaForImageClassification Inkling2ForCausalLM InklingForCausalLM Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM
JinaEmbeddingsV3ForMaskedLM KimiLinearForCausalLM Kolibri1ForCausalLM LagunaForCausalLM LayoutLMForMaskedLM Lfm2ForCausalLM
Lfm3ForCausalLM Llama4ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM LongT5ForConditionalGeneration LukeForMaskedLM
M2M100ForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM MarianForCausalLM MarianMTModel MBartForCausalLM
MBartForConditionalGeneration MegatronBertForCausalLM MegatronBertForMaskedLM MellumForCausalLM
MetaClip2ForImageClassification MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM
Ministral3ForCausalLM MistralForCausalLM MixtralForCausalLM MllamaForCausalLM MobileBertForMaskedLM
ModernBertDecoderForCausalLM ModernBertForMaskedLM ModernVBertForMaskedLM MoshiForCausalLM
MossTranscribeDiarizeForConditionalGeneration MPNetForMaskedLM MptForCausalLM MraForMaskedLM MT5ForConditionalGeneration
MusicFlamingoForConditionalGeneration MvpForCausalLM MvpForConditionalGeneration NanoChatForCausalLM NemotronHForCausalLM
NllbMoeForConditionalGeneration NomicBertForMaskedLM NystromformerForMaskedLM Olmo2ForCausalLM Olmo3ForCausalLM
OlmoeForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OpenAIGPTLMHeadModel OPTForCausalLM PegasusForCausalLM
PegasusForConditionalGeneration PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM PLBartForCausalLM
PLBartForConditionalGeneration PoolFormerForImageClassification Qwen2AudioForConditionalGeneration Qwen2ForCausalLM
Qwen2MoeForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
Qwen4ExpForCausalLM RecurrentGemmaForCausalLM RegNetForImageClassification RemBertForCausalLM
RemBertForMaskedLM ResNetForImageClassification RobertaForCausalLM RobertaForMaskedLM RobertaPreLayerNormForCausalLM
RobertaPreLayerNormForMaskedLM RoCBertForCausalLM RoCBertForMaskedLM RoFormerForCausalLM RoFormerForMaskedLM RwkvForCausalLM
SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText SeedOssForCausalLM SegformerForImageClassification
SiglipForImageClassification SmolLM3ForCausalLM SolarOpenForCausalLM SqueezeBertForMaskedLM StableLmForCausalLM
Starcoder2ForCausalLM SwiftFormerForImageClassification SwitchTransformersForConditionalGeneration T5ForConditionalGeneration
T5Gemma2ForConditionalGeneration T5GemmaForConditionalGeneration TapasForMaskedLM TrOCRForCausalLM UltrabertForMaskedLM
UltraVBertForMaskedLM UMT5ForConditionalGeneration VaultGemmaForCausalLM ViTForImageClassification
ViTMSNForImageClassification VoxtralForConditionalGeneration WhisperForCausalLM XGLMForCausalLM XLMRobertaForCausalLM
XLMRobertaForMaskedLM XLMRobertaXLForCausalLM XLMRobertaXLForMaskedLM XLMWithLMHeadModel xLSTMForCausalLM YosoForMaskedLM
YoutuForCausalLM
"""
MODELS = LISTED.split()
