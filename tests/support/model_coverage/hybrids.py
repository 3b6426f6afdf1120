"""Hybrids whose mixers have a forward over pools of states, and what tests do to these."""

from collections.abc import Iterable

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from model_coverage.architectures import config_of, with_random_weights
from torchpaged.hf.packed_state import PackedState

#: Gated delta nets, Mamba 2 (one with layers of experts alone, two with attention in the same layer), short
#: convolutions, Kimi delta attention with latents, lightning attention, Mamba 1, models of states alone,
#: RG-LRU.
HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "bamba", "granitemoehybrid"),
    *("nemotron_h", "falcon_h1", "zamba2", "lfm2", "lfm2_moe", "kimi_linear", "minimax", "jamba"),
    *("mamba", "mamba2", "falcon_mamba", "recurrent_gemma"),
    # not in transformers 5.17
    *(name for name in ("bailing_hybrid", "lara_mini", "lfm3") if name in CONFIG_MAPPING),
)
#: Those that no engine takes: why.
OTHER_HYBRIDS = {
    "zamba": "its Mamba 1 has products for each head",
    "zaya": "its convolutions make keys",
    **dict.fromkeys(("inkling_text", "inkling2_text"), "a bias by positions: keys are gathered"),
    "inkling2_loop_text": "keeps the keys of each pass through its loop",
    "qwen4_exp_text": "caches an indexer beside keys",
}
#: Changes of configs by which the op does not take a mixer's convolution: too wide, another activation.
UNSERVED = {"lfm2": {"conv_L_cache": 9}, "bamba": {"hidden_act": "gelu"}}


def unserved(name: str, implementation: str = "eager") -> PreTrainedModel:
    """A tiny hybrid of `UNSERVED`."""
    config = config_of(name)
    config.update(UNSERVED[name])
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, attn_implementation=implementation)
    return with_random_weights(model)


def poison(layers: Iterable[PackedState], but: Iterable[int] = ()) -> None:
    """NaN in every state, as of requests that went wrong; ``but``: slots that are left as they are."""
    for layer in layers:
        for pool in layer.stored.block_tensors(layer.pools).values():
            kept = {slot: pool[slot].clone() for slot in but}
            pool.fill_(float("nan"))
            for slot, state in kept.items():
                pool[slot] = state
