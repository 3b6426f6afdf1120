"""The families whose decoder layers `fuse` knows: one `Architecture` each, that says what their layers do and
how they call their parts."""

from __future__ import annotations

from typing import Any, NamedTuple


class Names(NamedTuple):
    """What a family calls the parts of its layers; Llama's names by default.

    ``norms``: before attention and before the MLP. ``post_norms``: behind them, before the residual adds.
    ``mlp``: the MLP; ``linears``: its gate, up and down projection. ``output``: of attention, the last
    projection. ``head_norms``: of queries and keys. ``final_norm``: of the decoder, behind all layers.
    """

    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    post_norms: tuple[str, ...] = ()
    mlp: str = "mlp"
    linears: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    output: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    final_norm: str = "norm"


_POST_NORMS = Names(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)


class Architecture(NamedTuple):
    """What one family's decoder layers do, beyond what they are made of.

    ``names``: of their parts.
    ``norm_offset``: added to the norms' weights.
    ``soft_cap``: attention caps its logits. ``half_table``: rotary_emb gives each cosine once instead
        of twice.
    ``rotation``: of latent attention, as ``rope_write_latent`` has it; "pairs_to_halves" where the config's
        ``rope_interleave`` says so, else "halves". Empty: attention over keys and values.
    ``experts``: the class of MLPs that are mixtures of experts, in some of its layers.
    ``scales_residuals``: what a block gives is multiplied by the layer's ``residual_scale``.
    ``scales_head``: so is what lm_head gets of the final norm.
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
    scales_residuals: bool = False
    scales_head: bool = False

    def mlp_of(self, layer: Any) -> Any:
        """The MLP of ``layer``, or its mixture of experts."""
        return getattr(layer, self.names.mlp)

    def has_gated_mlp(self, layer: Any) -> bool:
        """Whether the MLP of ``layer`` is one of a gate, up and down projection."""
        return self.gated_mlp and type(self.mlp_of(layer)).__name__ != self.experts

    def mixer_linears(self, mixer: Any) -> list[str]:
        """Linear layers of what mixes tokens, by name."""
        if not self.rotation:
            return ["q_proj", "k_proj", "v_proj", self.names.output]
        q = ["q_proj"] if getattr(mixer, "q_lora_rank", None) is None else ["q_a_proj", "q_b_proj"]
        return [*q, "kv_a_proj_with_mqa", "kv_b_proj", self.names.output]

    def mixer_parts(self, mixer: Any) -> list[str]:
        """All parts of what mixes tokens, by name."""
        linears = self.mixer_linears(mixer)
        if not self.rotation:
            return [*linears, *(self.names.head_norms if self.qk_norm else ())]
        return [*linears, *(["q_a_layernorm"] if "q_a_proj" in linears else []), "kv_a_layernorm"]


_FAMILIES = (
    Architecture("Llama"),
    Architecture("Mistral"),
    Architecture("Qwen2"),
    Architecture("Qwen3", qk_norm=True),
    Architecture("SmolLM3"),
    Architecture("Gemma2", _POST_NORMS, norm_offset=1.0, soft_cap=True),
    Architecture("Gemma3", _POST_NORMS, norm_offset=1.0, qk_norm=True),
    Architecture("GptOss", sinks=True, gated_mlp=False, half_table=True),
    Architecture("DeepseekV2", rotation="pairs", half_table=True, experts="DeepseekV2Moe"),
    Architecture("DeepseekV3", rotation="pairs_to_halves", experts="DeepseekV3MoE"),
    Architecture("Glm4MoeLite", rotation="pairs_to_halves", experts="Glm4MoeLiteMoE"),
    Architecture("AXK1", rotation="pairs_to_halves", experts="AXK1MoE"),
    Architecture("Youtu", rotation="pairs_to_halves"),
    Architecture("MiniCPM3", rotation="halves", scales_residuals=True, scales_head=True),
)
#: Class name of a decoder layer -> its architecture.
ARCHITECTURES = {f"{architecture.family}DecoderLayer": architecture for architecture in _FAMILIES}
