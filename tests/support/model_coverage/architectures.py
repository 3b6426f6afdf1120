"""Tiny random models of every decoder architecture that transformers maps to a CausalLM, and of `UNMAPPED`,
by model type: float32, no downloads.

A config takes of `SIZES` what it has fields for, and `OPTIONS` on top; windows and chunks are shorter than
the prompts.
"""

import dataclasses
import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

#: Not built here: what they need beyond tokens, or under which other name they are.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        ("gemma3", "gemma3n", "gemma4", "gemma4_unified", "llama4", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
        "its text part is listed",
    ),
    "dots3_note": "its text part is listed",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "attends to the cache of the model that it assists"
    ),
    **dict.fromkeys(
        ("blt", "emu3", "git", "got_ocr2", "mllama", "beam"), "images, bytes or a tower of its own"
    ),
    **dict.fromkeys(("moshi", "musicgen", "musicgen_melody", "moss_transcribe_diarize"), "audio codes"),
    "gpt-sw3": "GPT-2 under another name",
}
#: Decoders by themselves that transformers maps to no CausalLM.
UNMAPPED: dict[str, str] = {"mistral4": "Mistral4ForCausalLM"}
_NAMES_OF_ONE_SIZE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size d_model n_embd n_embed dim embed_dim emb_dim hidden_dim lru_width": 64,
    (
        "intermediate_size ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff d_inner "
        "expert_ffn_size dense_intermediate_size"
    ): 96,
    (
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers"
    ): 2,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": 4,
    "num_decoder_attention_heads num_encoder_attention_heads": 4,
    "num_key_value_heads type_vocab_size num_experts_per_tok moe_k moe_topk index_n_heads n_mamba_heads": 2,
    (
        "num_experts n_routed_experts num_local_experts moe_num_experts mamba_dt_rank time_step_rank "
        "index_block_size index_topk_blocks"
    ): 4,
    (
        "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim mamba_d_state mamba_d_head "
        "mamba_head_dim mamba_headdim"
    ): 16,
    "ssm_state_size state_size linear_key_head_dim linear_value_head_dim linear_head_dim": 16,
    (
        "sliding_window attention_chunk_size sliding_window_size window_size local_attention "
        "attention_window_size"
    ): 16,
    "chunk_size mamba_chunk_size": 16,
    "max_position_embeddings n_positions n_ctx max_seq_len": 256,
    (
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
        "moe_shared_expert_intermediate_size"
    ): 32,
    "shared_intermediate_size router_hidden_size kv_lora_rank": 32,
    (
        "n_shared_experts n_group topk_group first_k_dense_replace mamba_n_groups n_groups mamba_ngroups "
        "index_local_blocks"
    ): 1,
    "q_lora_rank": 24,
    "mamba_n_heads mamba_num_heads index_topk rotary_dim": 8,
    "mamba_d_ssm": 128,
    "mamba_expand linear_num_key_heads": 2,
    "linear_num_value_heads linear_num_heads": 4,
    "context_length": 64,
    "pad_token_id": 0,
    "bos_token_id decoder_start_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "hidden_dropout_prob attention_probs_dropout_prob dropout": 0.0,
}
SIZES: dict[str, Any] = {name: size for names, size in _NAMES_OF_ONE_SIZE.items() for name in names.split()}


def sizes(*names: str) -> dict[str, Any]:
    """These of `SIZES`, of a config within another one."""
    return {name: SIZES[name] for name in names}


OF_BERT = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_DECODER: dict[str, Any] = {"is_decoder": True}
_MLA: dict[str, Any] = {"num_key_value_heads": 4}
#: So many heads that no two keys score the same: with two, ReLU leaves a quarter of all scores at zero, and
#: which of those are selected depends on the cache's size.
_INDEXER: dict[str, Any] = {**_MLA, "index_n_heads": 16}
_FOUR: dict[str, Any] = {"num_hidden_layers": 4}
_SLIDING_FULL: dict[str, Any] = {**_FOUR, "layer_types": ["sliding_attention", "full_attention"] * 2}
_TWO_SLIDING: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
_SHARING: dict[str, Any] = {
    **_TWO_SLIDING,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}
_ROPES: dict[str, Any] = {
    kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
}
_MAMBA: dict[str, Any] = {
    "use_mamba_kernels": False,
    "n_mamba_heads": 2,
    "mamba_dt_rank": 4,
    "mamba_d_state": 16,
}
#: model type -> what `SIZES` does not say; None takes a field out, so that the config derives it
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("bart", "bert", "bert-generation", "camembert", "data2vec-text", "ernie", "megatron-bert"),
            *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
        ),
        _DECODER,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1", "youtu", "minicpm3"), _MLA),
    # a scale of queries that a short text meets
    "mistral4": {
        **_MLA,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), _INDEXER),
    **dict.fromkeys(("exaone4", "exaone_moe", "cohere2", "cohere2_moe", "olmo3", "gpt_oss"), _SLIDING_FULL),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _FOUR),
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "head_dim": None},
    "bamba": {**_FOUR, "attn_layer_indices": [1, 3]},
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "electra": {**_DECODER, "embedding_size": 64},
    "rembert": {**_DECODER, "input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        **_DECODER,
        "pronunciation_vocab_size": 32,
        "shape_vocab_size": 32,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "roformer": {**_DECODER, "embedding_size": 64},
    "xmod": {**_DECODER, "languages": ["en"], "default_language": "en"},
    "reformer": {
        **_DECODER,
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "local_attn_chunk_length": 4,
        "chunk_size_lm_head": 0,
        "hash_seed": 0,
    },
    "prophetnet": {**_DECODER, "ngram": 2},
    "mamba2": {"num_heads": 8, "expand": 2},
    "fuyu": {
        "image_size": 32,
        "patch_size": 16,
        "text_config": {
            "model_type": "persimmon",
            **sizes(*OF_BERT, "max_position_embeddings", "pad_token_id"),
        },
    },
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "cohere_compass_text": {
        **_SLIDING_FULL,
        "rope_parameters": {kind: {**rope, "mrope_section": [3, 3, 2]} for kind, rope in _ROPES.items()},
    },
    "bailing_hybrid": {"layer_group_size": 2, "num_key_value_heads": 4},
    "lfm3": _FOUR,
    "gemma3n_text": {**_SHARING, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 6},
    "gemma4_text": {**_SHARING, "global_head_dim": 32},
    "gemma4_unified_text": {**_SHARING, "global_head_dim": 32},
    "gemma2": {**_FOUR, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},  # as small as the scores
    "vaultgemma": {**_FOUR, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
    "gemma3_text": {**_TWO_SLIDING, "query_pre_attn_scalar": 16},
    "jamba": {
        **_FOUR,
        **_MAMBA,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": {
        **_FOUR,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "q_lora_rank": None,
        "num_key_value_heads": 4,
    },
    "lfm2": {**_FOUR, "layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96},
    "lfm2_moe": {**_FOUR, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "zamba": {
        **_FOUR,
        **_MAMBA,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_conv": 4,
    },
    "zamba2": {
        **_FOUR,
        **_MAMBA,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
        "attention_head_dim": 32,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "attention"],
        "num_hidden_layers": None,
        "use_mamba_kernels": False,
    },
    "granitemoehybrid": {**_FOUR, "layer_types": ["mamba", "attention"] * 2},
    "recurrent_gemma": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    # A window would be lost where transformers decodes: its masks go by the keys of the first layer, which
    # has none.
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
        "sliding_window": None,
    },
    "sarvam_mla": {"num_key_value_heads": 4},
    "dory": {**_FOUR, "n_input_layers": 1, "n_output_layers": 1},
    "inkling2_text": {"unpadded_vocab_size": 128},
    "inkling2_loop_text": {
        **_FOUR,
        "unpadded_vocab_size": 128,
        "swa_head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
    },
    "longcat_flash": {
        "num_layers": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "zero_expert_num": 2,
    },
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 16, "num_hidden_layers": 3},
    "llama4_text": {
        **_FOUR,
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    "dbrx": {
        "rope_parameters": _ROPES["full_attention"],
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "doge": {"num_experts": 4, "keep_window_size": 16},
    "mpt": {"use_cache": True},  # off by default
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "opt": {"word_embed_proj_dim": 64},
    "xlm": {"causal": True, "asm": False},
    "xlnet": {"d_inner": 96},
    "whisper": {"max_target_positions": 256, "num_mel_bins": 16},
    "cpmant": {
        "dim_head": 16,
        "prompt_types": 8,
        "prompt_length": 8,
        "segment_types": 8,
        "position_bias_num_buckets": 32,
        "position_bias_max_distance": 64,
    },
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"num_heads": 2, "qk_dim_factor": 1.0, "autocast_kernel_dtype": "float32"},
    "modernbert-decoder": {**_FOUR, "global_attn_every_n_layers": 2},
    "phi3": {"original_max_position_embeddings": 256},
    "phi4_multimodal": {
        "original_max_position_embeddings": 256,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "crop_size": 28,
            "patch_size": 14,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "jetmoe": {"kv_channels": 16, "num_attention_heads": None},
    "zaya": {**_FOUR, "num_experts_per_tok": 1},
    "qwen4_exp_text": {
        **_FOUR,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 1,
        "ngram_vocab_size_base": 64,
        "hc_lowrank": 8,
        "hc_count": 2,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
    },
}


def model_types() -> list[str]:
    """Every architecture that this transformers has and that is built here, sorted."""
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *UNMAPPED]
    return sorted(name for name in names if name not in LEFT_OUT and name in CONFIG_MAPPING)


def config_of(model_type: str, options: dict[str, Any] | None = None) -> PretrainedConfig:
    """The tiny config of an architecture; ``options`` in the place of its `OPTIONS`."""
    found = OPTIONS.get(model_type, {}) if options is None else options
    return config_of_class(CONFIG_MAPPING[model_type], found)


def config_of_class(config_class: Any, options: dict[str, Any]) -> PretrainedConfig:
    """The tiny config of a class; ``options`` over `SIZES`."""
    fields = (
        {field.name for field in dataclasses.fields(config_class)}
        if dataclasses.is_dataclass(config_class)
        else set(inspect.signature(config_class.__init__).parameters)
    )
    aliases = getattr(config_class, "attribute_map", {})
    given: dict[str, Any] = {}
    for name, size in SIZES.items():
        own = name if name in fields else aliases.get(name)
        if own in fields and (own == name or own not in given):
            given[own] = size
    for name, value in options.items():
        given.pop(name, None)
        if value is not None:
            given[name] = value
    config: PretrainedConfig = config_class(**given)
    return config


def model_of(model_type: str, implementation: str | None = None) -> PreTrainedModel:
    """A model in eval mode, the same weights every time, wide enough that greedy tokens differ.
    ``implementation`` None: the model's own choice."""
    config = config_of(model_type)
    if model_type in UNMAPPED:
        found = getattr(transformers, UNMAPPED[model_type])
    else:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class = found[0] if isinstance(found, (tuple, list)) else found
    torch.manual_seed(0)
    options = {} if implementation is None else {"attn_implementation": implementation}
    return with_random_weights(model_class._from_config(config, dtype=torch.float32, **options))


def with_random_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model in eval mode with the same weights every time, wide enough that outputs differ."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                scale = 1.0 if "embed" in name else 0.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model
