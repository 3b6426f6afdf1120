"""A tiny model of every family that `fuse` knows, what its fused decode step launches, and runs of it."""

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from model_coverage.architectures import config_of, model_types, with_random_weights
from models import COMMON, padded_prompts
from tiny_models import CONFIGS
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from torchpaged.hf import PagedCache, attach, fuse, unfuse

MIXED = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_HEADS = {"head_dim": 16, "sliding_window": 8}
_GEMMA = {**_HEADS, "query_pre_attn_scalar": 16, "tie_word_embeddings": False, **MIXED}
_GROUP = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
_ROUTED = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 2,
    "topk_group": 1,
}
ATTENTION = ["linear", "rope_write_kv", "paged_attention", "linear"]
NO_ROTATION = ["linear", "write_kv", "paged_attention", "linear"]
LATENTS = ["linear", "linear", "rope_write_latent", "mla_attention", "up_project_values", "linear"]
SHORT_CONV = ["linear", "causal_conv", "linear"]
DELTA_NET = ["linear", "delta_step", "linear"]
MAMBA2 = ["linear", "mamba2_step", "linear"]
MAMBA2_GROUPS = ["linear", "mamba2_step", "gated_rms_norm", "linear"]
KIMI_DELTA = ["linear", "linear", *DELTA_NET]
MLP = ["linear", "linear"]
EXPERTS = ("rms_norm", "route_experts", "apply_experts")


class Known(NamedTuple):
    """A family's model and the launches of its fused step.

    ``family``: of transformers' classes, with `COMMON` and ``options``; empty: of the model type, attached.
    ``mixers``: our ops of a layer that mix its tokens, by layer, repeated; ``mlp``: of one with a gated MLP;
    ``behind``: behind a block. ``others``: launches of each that are no op of ours; ``experts``: layers with
    a mixture of experts, and ``mixture``: their ops; none where it keeps its own forward, whose launches are
    not counted, or is an MLP that has no gate. ``rest``: outside the layers.
    """

    family: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    mixers: tuple[list[str], ...] = (ATTENTION,)
    others: tuple[int, ...] = (0,)
    mlp: list[str] = MLP
    behind: tuple[str, ...] = ()
    experts: int = 0
    mixture: tuple[str, ...] = ()
    rest: int = 2


_LATENT = Known(mixers=(LATENTS,))
_LATENT_EXPERTS = _LATENT._replace(experts=1, mixture=EXPERTS)
_SHORT = Known(mixers=(SHORT_CONV, ATTENTION), others=(0, 0))
_STATE = Known(mixers=(MAMBA2, ATTENTION), others=(0, 0))
_GRANITE = Known(
    options={"residual_multiplier": 0.22, "num_local_experts": 0},
    mixers=(MAMBA2, NO_ROTATION),
    others=(0, 0),
    rest=4,
)
_NEMOTRON = Known(mixers=(MAMBA2, NO_ROTATION, [], NO_ROTATION), others=(0,) * 4, mlp=[], experts=1)
_DELTA = Known(mixers=(*[DELTA_NET] * 3, [*ATTENTION[:-1], "gate_heads", "linear"]), others=(0, 0, 0, 0))
FAMILIES = {
    "Llama": Known("Llama", {"num_key_value_heads": 1}),
    "LlamaBiases": Known("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "SmolLM": Known("Llama", {**_GROUP, "tie_word_embeddings": True}),
    "Qwen2": Known("Qwen2"),
    "Qwen3": Known("Qwen3", {"head_dim": 32}),
    "Mistral": Known("Mistral", {"sliding_window": 8}),
    "Mixtral": Known("Mixtral", {"num_local_experts": 4, "sliding_window": 8}, experts=3, mixture=EXPERTS),
    "Qwen2Moe": Known(
        "Qwen2Moe", _ROUTED | {"shared_expert_intermediate_size": 48}, experts=3, mixture=EXPERTS
    ),
    "Qwen3Moe": Known(
        "Qwen3Moe",
        _ROUTED | {"head_dim": 32, "num_experts_per_tok": 2, "num_experts": 10},
        experts=3,
        mixture=EXPERTS,
    ),
    "Glm4Moe": Known("Glm4Moe", _GLM | {"use_qk_norm": True}, experts=2, mixture=EXPERTS),
    "Glm4MoeAir": Known("Glm4Moe", _GLM, experts=2, mixture=EXPERTS),
    "SmolLM3": Known(
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]},
        mixers=(ATTENTION, NO_ROTATION),
        others=(0, 0),
    ),
    "Gemma2": Known(
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        behind=("rms_norm",),
        rest=5,  # and the cap
    ),
    "Gemma3": Known("Gemma3", _GEMMA, behind=("rms_norm",)),
    "GptOss": Known(
        "GptOss", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED}, experts=4
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT_EXPERTS),
    "axk1": _LATENT_EXPERTS._replace(mixture=(*EXPERTS, "rms_norm")),
    "deepseek_v2_lite": _LATENT_EXPERTS._replace(
        options={"q_lora_rank": None}, mixers=(LATENTS[1:],)
    ),  # queries without a rank of their own
    "youtu": _LATENT._replace(options={"tie_word_embeddings": False}),
    "minicpm3": _LATENT._replace(options={"tie_word_embeddings": False}, others=(0,), rest=11),
    "lfm2": _SHORT,
    "lfm2_moe": _SHORT._replace(experts=3, mixture=EXPERTS),
    "qwen3_next": _DELTA._replace(options={"num_experts": 0}, others=(1, 1, 1, 0)),
    "qwen3_next_moe": _DELTA._replace(others=(1, 1, 1, 0), experts=4, mixture=EXPERTS),
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA._replace(experts=4, mixture=EXPERTS),
    "kimi_linear": Known(
        options={"mlp_layer_types": ["dense"] * 4}, mixers=(KIMI_DELTA, LATENTS[1:]), others=(0, 0)
    ),
    "bailing_hybrid": Known(
        options={"mlp_layer_types": ["dense"] * 2},
        mixers=(DELTA_NET, [*LATENTS[:-1], "gate_heads", "linear"]),
        others=(0, 0),
    ),
    "falcon_h1": Known(  # without a norm of the state's output
        mixers=([*ATTENTION[:3], *MAMBA2[1:], "linear"],), others=(0,), rest=4
    ),
    "falcon_multiplied": Known(
        options={
            **dict.fromkeys(("attention_in_multiplier", "ssm_in_multiplier"), 1.3),
            **dict.fromkeys(("attention_out_multiplier", "key_multiplier"), 0.6),
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
            "ssm_out_multiplier": 0.7,
            "mlp_multipliers": [0.7, 1.3],
            "intermediate_size": 90,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
        },
        mixers=([*ATTENTION[:3], *MAMBA2_GROUPS[1:], "linear"],),
        others=(0,),
        rest=4,
    ),
    "bamba": _STATE._replace(options={"mamba_n_groups": 2}, mixers=(MAMBA2_GROUPS, ATTENTION)),
    "granitemoehybrid": _GRANITE._replace(options={"residual_multiplier": 0.22}, others=(1, 1), experts=4),
    "granite_dense": _GRANITE,
    "granite_rope": _GRANITE._replace(
        options={**_GRANITE.options, "position_embedding_type": "rope"}, others=(0, 10), rest=11
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_dense": _NEMOTRON._replace(
        options={
            "layer_types": ["linear_attention", "full_attention", "mlp", "full_attention"],
            "n_groups": 2,
        },
        mixers=(MAMBA2_GROUPS, *_NEMOTRON.mixers[1:]),
    ),
}
#: Model types of names above that are none.
_TYPES = {
    "deepseek_v2_lite": "deepseek_v2",
    "qwen3_next_moe": "qwen3_next",
    "falcon_multiplied": "falcon_h1",
    "granite_dense": "granitemoehybrid",
    "granite_rope": "granitemoehybrid",
    "nemotron_dense": "nemotron_h",
}


def build(name: str, attached: bool = True, **options: Any) -> Any:
    """A tiny model of `FAMILIES`, or of a model type, in which every norm, bias and sink matters:
    transformers starts them at 0 or 1."""
    known = FAMILIES.get(name, Known())
    options = {**known.options, **options}
    torch.manual_seed(3)
    if known.family:
        made = getattr(transformers, CONFIGS.get(known.family, f"{known.family}Config"))
        config = made(**{**COMMON, **options})
        model = getattr(transformers, f"{known.family}ForCausalLM")(config).eval()
    else:
        model_type = _TYPES.get(name, name)
        if model_type not in model_types():
            pytest.skip(f"not in transformers {transformers.__version__}")
        if name == "falcon_multiplied" and transformers.__version__.startswith("5.17."):
            pytest.skip("its gated norm drops a dimension of single tokens there")
        config = config_of(model_type)
        config.update(options)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = with_random_weights(kind._from_config(config, attn_implementation="eager")).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif known.family:
                parameter.mul_(4.0 if "embed" in key else 8.0)
            elif "embed" not in key:  # or each token is followed by itself
                parameter.mul_(3.0)
    if not attached:
        model.set_attn_implementation("eager")
    elif known.family:
        model.set_attn_implementation("torchpaged")
    else:
        attach(model)
    return model


def fused(name: str, passes: Any = None, **options: Any) -> Any:
    """`build`, fused."""
    model = build(name, **options)
    fuse(model, passes, count=False)
    return model


def generate(model: Any, paged: bool = True, **options: Any) -> Tensor:
    """Ten tokens behind each of two prompts, the shorter one padded on its left."""
    cache = {"past_key_values": PagedCache(model.config, 2, 64, block_size=4)} if paged else {}
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **cache, **options}
    tokens: Tensor = model.generate(**padded_prompts(), max_new_tokens=10, **options)
    return tokens


def eager_tokens(model: Any) -> Tensor:
    """HuggingFace's own: eager attention, its own cache; of a model that is not attached."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    tokens = generate(model, paged=False, disable_compile=True)
    model.set_attn_implementation(before)
    return tokens


def logits(model: Any, cache: Any = None) -> Tensor:
    """A prefill of 20 tokens and three decode steps, teacher forced: ``[2, 23, vocab]``; default: over a
    paged cache."""
    ids = torch.randint(3, 99, (2, 23), generator=torch.Generator().manual_seed(2))
    cache = PagedCache(model.config, 2, 32, block_size=4) if cache is None else cache
    with torch.inference_mode():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([20, 1, 1, 1], dim=1)]
    return torch.cat(parts, dim=1)


def dense_logits(model: Any) -> Tensor:
    """`logits` over transformers' own cache."""
    return logits(model, transformers.DynamicCache(config=model.config))


def fused_again(model: Any, want_of: Any = logits, tolerance: float = 1e-4) -> tuple[Any, Tensor]:
    """Unfused and fused anew a model gives the same, which is given, behind the report."""
    unfuse(model)
    want = want_of(model)
    report = fuse(model, count=False)
    torch.testing.assert_close(logits(model), want, rtol=tolerance, atol=tolerance)
    return report, want


def pools(cache: PagedCache) -> list[Tensor]:
    """Of every layer: its states, keys and values, or latents."""
    found: list[Tensor] = []
    for part in cache.keeping:
        found += part.stored.block_tensors(part.pools).values()
    return found
