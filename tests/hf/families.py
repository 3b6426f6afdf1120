"""Tiny random models of many families, by class name: decoders alone, and encoders with decoders. Two layers
each, float32."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from greedy import greedy
from transformers import PreTrainedModel

IDS: dict[str, Any] = {"vocab_size": 99, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
BASE: dict[str, Any] = {
    **IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HALF: dict[str, Any] = {
    **IDS,
    "d_model": 32,
    "max_position_embeddings": 64,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "dropout": 0.0,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    **IDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
MLA: dict[str, Any] = {
    **BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
DSA: dict[str, Any] = {**MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
GEMMA: dict[str, Any] = {**BASE, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}

#: stem of the class names -> options of the config; windows and chunks are shorter than the prompts
CONFIGS: dict[str, dict[str, Any]] = {
    "OPT": {
        **IDS,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
    "BioGpt": {**BASE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "Bart": HALF,
    "Marian": {**HALF, "decoder_vocab_size": 99},
    "Pegasus": HALF,
    "GPT2": {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": BASE,
    "StableLm": BASE,
    "Qwen2Moe": {**BASE, **MOE, "use_sliding_window": False},
    "Gemma3": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {**BASE, "head_dim": 8, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Cohere2": {**BASE, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Llama4": {
        **BASE,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "RecurrentGemma": {
        **BASE,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "attention_window_size": 8,
        "lru_width": 32,
    },
    "Lfm2": {**BASE, "layer_types": ["conv", "full_attention"], "block_ff_dim": 48},
    "DeepseekV3": MLA,
    "DeepseekV2": MLA,
    "MiniCPM3": MLA,
    "Youtu": MLA,
    "Glm4MoeLite": MLA,
    "DiffLlama": BASE,
    "Doge": {**BASE, "num_experts": 4, "keep_window_size": 16},
    "JetMoe": {
        **IDS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "kv_channels": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "DeepseekV32": DSA,
    "Mamba": {**IDS, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 1},
    "MiniMax": {
        **BASE,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
        "num_local_experts": 2,
    },
    "Bloom": {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "CodeGen": {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "GPTNeoXJapanese": BASE,
    "XGLM": {**IDS, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "dropout": 0.0},
    "TrOCR": {
        **IDS,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "dropout": 0.0,
    },
    "Mvp": HALF,
    "BigBirdPegasus": {**HALF, "attention_type": "original_full"},
    "LED": {
        **HALF,
        "attention_window": 8,
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "FSMT": {**HALF, "langs": ["en", "de"], "src_vocab_size": 99, "tgt_vocab_size": 99},
    "T5": T5,
    "UMT5": T5,
}
CAUSAL_CLASS = {"GPT2": "GPT2LMHeadModel"}
CONFIG_CLASS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


def build(
    stem: str, head: str = "ForCausalLM", implementation: str = "eager", **options: Any
) -> PreTrainedModel:
    """A model in eval mode, the same weights every time; wide enough weights that every token matters."""
    fields = {**CONFIGS[stem], **options}
    config = getattr(transformers, CONFIG_CLASS.get(stem, f"{stem}Config"))(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, CAUSAL_CLASS.get(stem, f"{stem}{head}"))._from_config(
        config, attn_implementation=implementation
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if "embed" in name or "shared" in name else 0.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif not parameter.any():  # biases, and Doge's weights of keys, which must not tie
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    result: PreTrainedModel = model.eval()
    return result


def logits_of(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any = None, **options: Any
) -> torch.Tensor:
    """Logits of every new token of a greedy generate(), ``[tokens, rows, vocab]``."""
    return greedy(model, inputs, cache, max_new_tokens=5, **options)[0]


def same(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], make_cache: Callable[[], Any], **options: Any
) -> None:
    """generate() gives the eager path's logits through the cache that ``make_cache`` makes."""
    model.set_attn_implementation("eager")
    want = logits_of(model, inputs, **options)
    model.set_attn_implementation("torchpaged")
    torch.testing.assert_close(
        logits_of(model, inputs, make_cache(), **options),
        want,
        rtol=1e-4,
        atol=1e-4 * float(want.abs().max()),
    )
