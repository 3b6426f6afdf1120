"""What `fuse` needs to know of a family of decoder layers, in one `Architecture`: what they do, and how they
call their parts. families.py has them all."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn


class Names(NamedTuple):
    """What a family calls the parts of its layers; Llama's names by default.

    ``norms``: before what mixes the tokens and before the MLP. ``post_norms``: behind them, before the
    residual adds. ``attention``: what mixes the tokens, where attention does; ``output``: of it, the last
    projection. ``mlp``: the MLP; under the name of attention in layers that do not mix; empty: they have
    none. ``linears``: its gate, up and down projection, the first two in one or apart; ``activation``: the
    part of it that is one. ``head_norms``: of queries and keys. ``final_norm``, ``rotary``: of the decoder,
    the norm behind all layers and the rotation of all, empty: it has none.
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


class Mixer(NamedTuple):
    """What mixes tokens in a layer: attention, or a state per request.

    ``name``: of the part of the layer; ``kind``: its class, behind the family's name. ``inputs``: its
    projections of the layer's input, by their paths in it; ``output``: its last one; ``inner``: those
    between. ``others``: its other parts, by name, with their classes; one that begins with "*" has the
    family's name there, an empty one is any, "|" stands between several.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    others: Mapping[str, str]
    output: str = "out_proj"
    inner: tuple[str, ...] = ()

    @property
    def linears(self) -> list[str]:
        """All linear layers, by their paths in it; the last one gives what it mixed."""
        return [*self.inputs, *self.inner, self.output]

    def parts(self, family: str) -> dict[str, str]:
        """All parts by their names, with their classes; "": any."""
        others = {name: kind.replace("*", family) for name, kind in self.others.items()}
        return dict.fromkeys((path.split(".")[0] for path in self.linears), "") | others


class Architecture(NamedTuple):
    """What one family's decoder layers do, beyond what they are made of.

    ``names``: of their parts; ``layer``: of their class, behind the family's name.
    ``norm_offset``: added to the norms' weights.
    ``soft_cap``: attention caps its logits. ``half_table``: rotary_emb gives each cosine once instead
        of twice.
    ``rotation``: of latent attention, as ``rope_write_latent`` has it; "pairs_to_halves" where the config's
        ``rope_interleave`` says so, else "halves", which stands for none in a family without
        `Names.rotary`, too. Empty: attention over keys and values.
    ``experts``: the class of MLPs that are mixtures of experts, in some of its layers.
    ``state``: what mixes tokens by a state, in some layers, in attention's place or beside it.
    ``output_gate``: attention's q_proj gives a gate for each head's output, too.
    ``head_gate``: the projection, of latent attention, that gives one number for each head's output.
    ``activation``: of its MLPs, where it is no module of them.
    ``beside``: name and class, behind the family's, of a mixture of experts whose output is added to the
        MLP's, in some of its layers.
    ``residual_scale``: the layer's attribute that multiplies what a block gives; empty: nothing does.
    ``scales_head``: so is what lm_head gets of the final norm.
    ``has_positions``: its layers are given the positions of their tokens.
    ``gives_weights``: they give attention's weights, too: None.
    ``multiplied``: their parts have multipliers, see `torchpaged.fuse.multipliers`.
    ``positional``: arguments that follow the hidden states without their names.
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
    state: Mixer | None = None
    output_gate: bool = False
    head_gate: str = ""
    activation: str = ""
    beside: tuple[str, str] = ("", "")
    residual_scale: str = ""
    scales_head: bool = False
    has_positions: bool = True
    gives_weights: bool = False
    multiplied: bool = False
    positional: tuple[str, ...] = ()
    layer: str = "DecoderLayer"

    def mlp_of(self, layer: Any) -> Any:
        """The MLP of ``layer``, or its mixture of experts; None in one that only mixes."""
        part = getattr(layer, self.names.mlp, None)
        return part if self.mixes_and_feeds or not self.mixes(layer) else None

    @property
    def mixes_and_feeds(self) -> bool:
        """Whether each layer mixes tokens and has an MLP, in parts of their own."""
        return bool(self.names.mlp) and self.names.mlp != self.names.attention

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

    def mixers_of(self, layer: Any) -> list[Mixer]:
        """What mixes the tokens of ``layer``, in the order in which it does; nothing in one that only
        feeds."""
        if not self.mixes(layer):
            return []
        state = self.state
        part = None if state is None else getattr(layer, state.name, None)
        keeps = isinstance(part, nn.Module)
        if state is not None and state.name == self.names.attention:
            keeps = type(part).__name__ == self.family + state.kind
        found = [state] if state is not None and keeps else []
        # Granite's layers with a state have a None there
        attends = isinstance(getattr(layer, self.names.attention, None), nn.Module)
        if not found or (attends and found[0].name != self.names.attention):
            found.append(self._attention_of(layer))
        return found

    def head_norms_of(self, attention: Any) -> tuple[str, ...]:
        """The norms of its queries and keys; GLM-4-MoE's config can leave them out."""
        return self.names.head_norms if self.qk_norm and getattr(attention, "use_qk_norm", True) else ()

    def _attention_of(self, layer: Any) -> Mixer:
        names = self.names
        norms = dict.fromkeys(self.head_norms_of(getattr(layer, names.attention, None)), "")
        inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
        inner: tuple[str, ...] = ()
        if self.rotation:
            inputs, inner, norms = ("q_proj", "kv_a_proj_with_mqa"), ("kv_b_proj",), {"kv_a_layernorm": ""}
            if getattr(getattr(layer, names.attention, None), "q_lora_rank", None) is not None:
                inputs, inner = ("q_a_proj", inputs[1]), ("q_b_proj", *inner)
                norms["q_a_layernorm"] = ""
            inputs += (self.head_gate,) if self.head_gate else ()
        return Mixer(names.attention, "Attention", inputs, norms, names.output, inner)
