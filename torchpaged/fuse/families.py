"""The families whose decoder layers `fuse` knows, one entry each."""

from torchpaged.fuse.architectures import Architecture, Mixer, Names

_POST_NORMS = Names(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)


_LFM2 = Names(
    norms=("operator_norm", "ffn_norm"),
    mlp="feed_forward",
    linears=("w1", "w3", "w2"),
    output="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    final_norm="embedding_norm",
)
_BAMBA = Names(
    norms=("input_layernorm", "pre_ff_layernorm"), mlp="feed_forward", final_norm="final_layernorm"
)


_SHORT_CONV = Mixer("conv", "ShortConv", ("in_proj",), {"conv": "Conv1d"})
_DELTA_NET = Mixer(
    "linear_attn",
    "GatedDeltaNet",
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    {"conv1d": "Conv1d", "norm": "*RMSNormGated"},
)
_KIMI_DELTA = Mixer(
    "self_attn",
    "DeltaAttention",
    ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "b_proj", "g_a_proj"),
    {"conv1d": "Conv1d", "forget_gate": "*ForgetGate", "o_norm": "*RMSNormGated"},
    "o_proj",
    ("forget_gate.f_b_proj", "g_b_proj"),
)
_MAMBA2 = Mixer("mamba", "Mixer", ("in_proj",), {"conv1d": "Conv1d", "norm": "*RMSNormGated", "act": ""})

_QWEN3_5 = Architecture("Qwen3_5", norm_offset=1.0, qk_norm=True, output_gate=True, state=_DELTA_NET)
_FAMILIES = (
    Architecture("Llama"),
    Architecture("Mistral"),
    Architecture("Qwen2"),
    Architecture("Qwen3", qk_norm=True),
    Architecture("SmolLM3"),
    Architecture("Mixtral", experts="MixtralSparseMoeBlock"),
    Architecture("Qwen2Moe", experts="Qwen2MoeSparseMoeBlock"),
    Architecture("Qwen3Moe", qk_norm=True, experts="Qwen3MoeSparseMoeBlock"),
    Architecture("Glm4Moe", qk_norm=True, experts="Glm4MoeMoE"),
    Architecture("Gemma2", _POST_NORMS, norm_offset=1.0, soft_cap=True),
    Architecture("Gemma3", _POST_NORMS, norm_offset=1.0, qk_norm=True),
    Architecture("GptOss", sinks=True, experts="GptOssMLP", half_table=True),
    Architecture("DeepseekV2", rotation="pairs", half_table=True, experts="DeepseekV2Moe"),
    Architecture("DeepseekV3", rotation="pairs_to_halves", experts="DeepseekV3MoE"),
    Architecture("Glm4MoeLite", rotation="pairs_to_halves", experts="Glm4MoeLiteMoE"),
    Architecture("AXK1", rotation="pairs_to_halves", experts="AXK1MoE"),
    Architecture("Youtu", rotation="pairs_to_halves"),
    Architecture(
        "KimiLinear", Names(rotary=""), rotation="halves", experts="KimiLinearMoE", state=_KIMI_DELTA
    ),
    _QWEN3_5._replace(
        family="Qwen3Next",
        state=_DELTA_NET._replace(inputs=("in_proj_qkvz", "in_proj_ba")),
        experts="Qwen3NextSparseMoeBlock",
    ),
    _QWEN3_5,
    _QWEN3_5._replace(family="Qwen3_5Moe", experts="Qwen3_5MoeSparseMoeBlock"),
    Architecture(
        "OlmoHybrid",
        state=Mixer(
            "linear_attn",
            "GatedDeltaNet",
            ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
            {"conv1d": "Conv1d", "o_norm": "*RMSNormGated"},
            output="o_proj",
        ),
        layer="LinearAttentionDecoderLayer",
    ),
    Architecture("Lfm2", _LFM2, qk_norm=True, state=_SHORT_CONV, activation="silu"),
    Architecture(
        "Lfm2Moe",
        _LFM2._replace(rotary="pos_emb"),
        qk_norm=True,
        state=_SHORT_CONV,
        activation="silu",
        experts="Lfm2MoeSparseMoeBlock",
    ),
    Architecture("MiniCPM3", rotation="halves", residual_scale="residual_scale", scales_head=True),
    Architecture(
        "BailingHybrid",
        rotation="pairs_to_halves",
        experts="BailingHybridMoE",
        state=_KIMI_DELTA._replace(
            inputs=("q_proj", "k_proj", "v_proj", "forget_gate.f_proj", "b_proj", "g_proj"), inner=()
        ),
        head_gate="g_proj",
    ),
    Architecture("Bamba", _BAMBA, state=_MAMBA2, gives_weights=True),
    Architecture(
        "FalconH1",
        _BAMBA,
        state=_MAMBA2._replace(others={**_MAMBA2.others, "norm": "*RMSNormGated|Identity"}),
        gives_weights=True,
        multiplied=True,
    ),
    Architecture(
        "Zamba2",
        Names(norms=("input_layernorm",), mlp="", final_norm="final_layernorm", rotary=""),
        state=_MAMBA2._replace(kind="MambaMixer"),
        positional=("original_hidden_states", "layer_idx", "attention_mask", "causal_mask"),
        layer="MambaDecoderLayer",
    ),
    Architecture(
        "GraniteMoeHybrid",
        Names(mlp="shared_mlp", linears=("input_linear", "output_linear"), activation="activation"),
        state=_MAMBA2._replace(kind="MambaLayer"),
        beside=("block_sparse_moe", "MoE"),
        residual_scale="residual_multiplier",
        has_positions=False,
    ),
    Architecture(
        "NemotronH",
        Names(norms=("norm",), mlp="mixer", attention="mixer", final_norm="norm_f", rotary=""),
        state=_MAMBA2._replace(
            name="mixer",
            kind="Mamba2Mixer",
            others={**_MAMBA2.others, "norm": "*RMSNormGated|Zamba2RMSNormGated"},  # the latter in 5.17
        ),
        gated_mlp=False,
        experts="NemotronHMoE",
        layer="Block",
    ),
)
#: Class name of a decoder layer -> its architecture.
ARCHITECTURES = {architecture.family + architecture.layer: architecture for architecture in _FAMILIES}
#: Class name of a layer of which one part is of the above -> that part, the rest, and why this is left.
WITHIN = {
    "Zamba2HybridLayer": (
        "mamba_decoder",
        "shared_transformer",
        "its weights are those of other layers, too, and each layer adds adapters of its own to them",
    )
}
