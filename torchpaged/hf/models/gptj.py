"""Decoders whose attention modules compute their scores in a method by the name `_attn`: codegen, gpt_neo,
gpt_neox_japanese, gptj."""

from typing import Any

from torchpaged.hf.cache_argument import CACHE
from torchpaged.hf.families import Family, register_family
from torchpaged.hf.models.own_attention import in_attn, root

#: Model type -> attention, up to transformers 5.23; from 5.24 on they call the attention interface.
_WITHOUT_INTERFACE = {"codegen": "CodeGenAttention", "gptj": "GPTJAttention"} if CACHE != "cache" else {}


def _window_of_gpt_neo(module: Any) -> int | None:
    """Of a local layer: its causal mask has so many keys in the last row."""
    return int(module.bias[0, 0, -1].sum()) if module.attention_type == "local" else None


register_family(
    Family(
        (*_WITHOUT_INTERFACE, "gpt_neo", "gpt_neox_japanese"),
        own_attention=True,
        class_tables=(
            "gpt_neo.modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES",
            *(["gptj.modeling_gptj.GPTJ_ATTENTION_CLASSES"] if _WITHOUT_INTERFACE else []),
        ),
        attention=dict.fromkeys(_WITHOUT_INTERFACE.values(), in_attn(root("head_dim")))
        | {
            "GPTNeoSelfAttention": in_attn(lambda module: 1.0, _window_of_gpt_neo),
            "GPTNeoXJapaneseAttention": in_attn(root("head_size")),
        },
    )
)
