"""The families whose decoder layers `fuse` knows: one `Architecture` each, that says what their layers do and
how they call their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn


class Names(NamedTuple):
    """What a family calls the parts of its layers; Llama's names by default.

    ``norms``: before what mixes the tokens and before the MLP. ``post_norms``: behind them, before the
    residual adds. ``attention``: what mixes the tokens, where attention does; ``output``: of it, the last
    projection. ``mlp``: the MLP; under the name of attention in layers that do not mix. ``linears``: its
    gate, up and down projection, the first two in one or apart; ``activation``: the part of it that is one.
    ``head_norms``: of queries and keys. ``final_norm``,
    ``rotary``: of the decoder, the norm behind all layers and the rotation of all, empty: it has none.
    """

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, ...] = ()
    mlp: str = "mlp"
    linears: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    activation: str = "act_fn"
    attention: str = "self_attn"
    output: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    final_norm: str = "norm"
    rotary: str = "rotary_emb"


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


class StateMixer(NamedTuple):
    """What mixes tokens by a state per request, in some of a family's layers, in attention's place.

    ``name``: of the part of the layer; ``kind``: its class, behind the family's name. ``inputs``: its
    projections of the layer's input. ``others``: its other parts, by name, with their classes; one that
    begins with "*" has the family's name there, an empty one is any, "|" stands between several.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    others: Mapping[str, str]
    output: str = "out_proj"


_SHORT_CONV = StateMixer("conv", "ShortConv", ("in_proj",), {"conv": "Conv1d"})
_DELTA_NET = StateMixer(
    "linear_attn",
    "GatedDeltaNet",
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    {"conv1d": "Conv1d", "norm": "*RMSNormGated"},
)
_MAMBA2 = StateMixer("mamba", "Mixer", ("in_proj",), {"conv1d": "Conv1d", "norm": "*RMSNormGated", "act": ""})


class Architecture(NamedTuple):
    """What one family's decoder layers do, beyond what they are made of.

    ``names``: of their parts; ``layer``: of their class, behind the family's name.
    ``norm_offset``: added to the norms' weights.
    ``soft_cap``: attention caps its logits. ``half_table``: rotary_emb gives each cosine once instead
        of twice.
    ``rotation``: of latent attention, as ``rope_write_latent`` has it; "pairs_to_halves" where the config's
        ``rope_interleave`` says so, else "halves". Empty: attention over keys and values.
    ``experts``: the class of MLPs that are mixtures of experts, in some of its layers.
    ``state``: what mixes tokens in layers without attention.
    ``output_gate``: attention's q_proj gives a gate for each head's output, too.
    ``activation``: of its MLPs, where it is no module of them.
    ``beside``: name and class, behind the family's, of a mixture of experts whose output is added to the
        MLP's, in some of its layers.
    ``residual_scale``: the layer's attribute that multiplies what a block gives; empty: nothing does.
    ``scales_head``: so is what lm_head gets of the final norm.
    ``has_positions``: its layers are given the positions of their tokens.
    ``gives_weights``: they give attention's weights, too: None.
    """

    family: str
    names: Names = Names()
    norm_offset: float = 0.0
    qk_norm: bool = False
    soft_cap: bool = False
    sinks: bool = False
    gated_mlp: bool = True
    half_table: bool = False
    rotation: str = ""
    experts: str = ""
    state: StateMixer | None = None
    output_gate: bool = False
    activation: str = ""
    beside: tuple[str, str] = ("", "")
    residual_scale: str = ""
    scales_head: bool = False
    has_positions: bool = True
    gives_weights: bool = False
    layer: str = "DecoderLayer"

    def mlp_of(self, layer: Any) -> Any:
        """The MLP of ``layer``, or its mixture of experts; None in one that only mixes."""
        part = getattr(layer, self.names.mlp, None)
        return part if self.mixes_and_feeds or not self.mixes(layer) else None

    @property
    def mixes_and_feeds(self) -> bool:
        """Whether each layer mixes tokens and has an MLP, in parts of their own."""
        return self.names.mlp != self.names.attention

    def mixes(self, layer: Any) -> bool:
        """Whether ``layer`` mixes tokens."""
        kind = type(getattr(layer, self.names.mlp, None)).__name__
        return self.mixes_and_feeds or kind not in (f"{self.family}MLP", self.experts)

    def beside_of(self, layer: Any) -> Any:
        """The mixture of experts beside the MLP of ``layer``, or None."""
        return getattr(layer, self.beside[0], None)

    def has_gated_mlp(self, layer: Any) -> bool:
        """Whether the MLP of ``layer`` is one of a gate, up and down projection, and alone."""
        return self.gated_mlp and self.mlp_of(layer) is not None and not self.has_experts(layer)

    def has_experts(self, layer: Any) -> bool:
        """Whether the MLP of ``layer`` is a mixture of experts, or has one beside it."""
        kind = type(self.mlp_of(layer)).__name__
        return kind == self.experts or self.beside_of(layer) is not None

    def state_of(self, layer: Any) -> StateMixer | None:
        """``state``, if it is in the place of attention in ``layer``."""
        part = None if self.state is None else getattr(layer, self.state.name, None)
        if self.state is None or not isinstance(part, nn.Module):
            return None
        if self.state.name != self.names.attention:
            return self.state
        return self.state if type(part).__name__ == self.family + self.state.kind else None

    def mixer_of(self, layer: Any) -> tuple[str, str]:
        """Name and class of what mixes the tokens in ``layer``."""
        state = self.state_of(layer)
        kind = (self.names.attention, "Attention") if state is None else (state.name, state.kind)
        return kind[0], self.family + kind[1]

    def projections(self, layer: Any) -> tuple[str, ...]:
        """Those that take the layer's input, by their names in the mixer."""
        state = self.state_of(layer)
        if state is not None:
            return state.inputs
        if not self.rotation:
            return "q_proj", "k_proj", "v_proj"
        return "q_proj" if layer.self_attn.q_lora_rank is None else "q_a_proj", "kv_a_proj_with_mqa"

    def mixer_linears(self, layer: Any) -> list[str]:
        """Linear layers of what mixes the tokens, by their names in it."""
        if not self.mixes(layer):
            return []
        state, first = self.state_of(layer), self.projections(layer)
        inner = (["q_b_proj"] if "q_a_proj" in first else []) + (["kv_b_proj"] if self.rotation else [])
        return [*first, *inner, self.names.output if state is None else state.output]

    def mixer_parts(self, layer: Any) -> dict[str, str]:
        """All parts of what mixes the tokens, by their names in it, with their classes; "": any."""
        state, linears = self.state_of(layer), self.mixer_linears(layer)
        if state is not None:
            others = {name: kind.replace("*", self.family) for name, kind in state.others.items()}
        elif self.rotation:
            others = dict.fromkeys(
                (["q_a_layernorm"] if "q_a_proj" in linears else []) + ["kv_a_layernorm"], ""
            )
        else:
            others = dict.fromkeys(self.names.head_norms if self.qk_norm else (), "")
        return dict.fromkeys(linears, "") | others


_QWEN3_5 = Architecture("Qwen3_5", norm_offset=1.0, qk_norm=True, output_gate=True, state=_DELTA_NET)
_FAMILIES = (
    Architecture("Llama"),
    Architecture("Mistral"),
    Architecture("Qwen2"),
    Architecture("Qwen3", qk_norm=True),
    Architecture("SmolLM3"),
    Architecture("Gemma2", _POST_NORMS, norm_offset=1.0, soft_cap=True),
    Architecture("Gemma3", _POST_NORMS, norm_offset=1.0, qk_norm=True),
    Architecture("GptOss", sinks=True, experts="GptOssMLP", half_table=True),
    Architecture("DeepseekV2", rotation="pairs", half_table=True, experts="DeepseekV2Moe"),
    Architecture("DeepseekV3", rotation="pairs_to_halves", experts="DeepseekV3MoE"),
    Architecture("Glm4MoeLite", rotation="pairs_to_halves", experts="Glm4MoeLiteMoE"),
    Architecture("AXK1", rotation="pairs_to_halves", experts="AXK1MoE"),
    Architecture("Youtu", rotation="pairs_to_halves"),
    _QWEN3_5._replace(
        family="Qwen3Next",
        state=_DELTA_NET._replace(inputs=("in_proj_qkvz", "in_proj_ba")),
        experts="Qwen3NextSparseMoeBlock",
    ),
    _QWEN3_5,
    _QWEN3_5._replace(family="Qwen3_5Moe", experts="Qwen3_5MoeSparseMoeBlock"),
    Architecture(
        "OlmoHybrid",
        state=StateMixer(
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
        "Bamba",
        Names(
            norms=("input_layernorm", "pre_ff_layernorm"), mlp="feed_forward", final_norm="final_layernorm"
        ),
        state=_MAMBA2,
        gives_weights=True,
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
