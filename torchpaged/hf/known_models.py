"""What is known of models by their type, where neither their config nor their class says it."""

from __future__ import annotations

from typing import Any

import transformers

from torchpaged.custom_ops.errors import UnsupportedModelError

#: Models whose attention modules ignore transformers' attention interface, and are given functions of ours by
#: `torchpaged.hf.attach`.
OWN_ATTENTION = frozenset(
    {
        "big_bird",
        "bloom",
        "codegen",
        "falcon",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "led",
        "megatron-bert",
        "mpt",
        "mvp",
        "rembert",
        "roformer",
        "trocr",
        "xglm",
    }
)
#: Of them, those whose cross attention is paged, too.
PAGES_CROSS_ATTENTION = frozenset({"led", "mvp"})
#: Of them, those whose modelling file makes no causal mask in transformers 5.17, and gets one from us.
MAY_LACK_CAUSAL_MASK = frozenset({"big_bird", "megatron-bert", "rembert", "roformer"})
#: Models of multi-head latent attention, whose layers a `PagedCache` keeps as latents once the model is
#: attached: their modules expand cached latents in a method of their own.
CACHES_LATENTS = frozenset(
    {
        "axk1",
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "kimi_linear",
        "longcat_flash",
        "minicpm3",
        "youtu",
    }
)
#: Models that select the keys of each query by an indexer that caches keys of its own.
SELECTS_KEYS = frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"})
_LATENT = (
    "expands its cached latents to keys and values before it attends; torchpaged.hf.attach(model) makes it "
    "attend over the latents"
)
_BIAS = "adds a bias by positions to its scores"
#: Models that do with their cached keys or values what pools don't allow, and what that is: a `PagedCache`
#: gathers for them unless it is told otherwise.
NEEDS_DENSE: dict[str, str] = {
    **dict.fromkeys(sorted(CACHES_LATENTS), _LATENT),
    **dict.fromkeys(sorted(SELECTS_KEYS), "selects the keys of each query by an indexer"),
    "diffllama": "regroups its cached values before it attends",
    "doge": "makes a mask of its cached values",
    "jetmoe": "repeats its cached keys and values before it attends",
    "inkling2_text": _BIAS,
    "inkling_text": _BIAS,
    "longt5": _BIAS,
    "mt5": _BIAS,
    "switch_transformers": _BIAS,
    "t5": _BIAS,
    "umt5": _BIAS,
}
_ENCODER_ONLY = (
    "albert",
    "bert",
    "bert-generation",
    "camembert",
    "clip_text_model",
    "data2vec-text",
    "distilbert",
    "electra",
    "ernie",
    "esm",
    "eurobert",
    "gte",
    "jina_embeddings_v3",
    "mobilebert",
    "modernbert",
    "nomic_bert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "splinter",
    "t5_gemma_module",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
_WITH_DECODER = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "hubert",
    "m2m_100",
    "marian",
    "mbart",
    "pegasus",
    "pegasus_x",
    "plbart",
    "speech_to_text",
    "unispeech",
    "whisper",
)
#: Models with encoders whose attention modules tell by ``is_decoder`` whether they attend to their own tokens
#: -> whether one without that attribute may attend to others: `torchpaged.hf.uncached` leaves out padding
#: queries where they attend to their own. Not nllb-moe, where padding takes part in the experts' capacity.
#: Not siglip_text_model either, whose pooled state is that of the last position, padding or not, nor
#: wav2vec2, unispeech-sat and data2vec-audio, whose XVector heads read a few states of padding.
ENCODERS: dict[str, bool] = {**dict.fromkeys(_ENCODER_ONLY, False), **dict.fromkeys(_WITH_DECODER, True)}
#: Models that add a bias by positions to their scores.
ADDS_BIAS = frozenset(model_type for model_type, why in NEEDS_DENSE.items() if why == _BIAS)
#: Models that do arithmetic on what their cache returns, as long as nothing keeps them from it.
COMPUTES_WITH_KEYS = OWN_ATTENTION | NEEDS_DENSE.keys()
#: Models that take a mask for granted where transformers' mask function may return None; theirs is a
#: placeholder that nothing looks at.
TAKES_NO_NONE = frozenset({"mpt"})
#: Decoders that make a mask of ones where they are given none, and place tokens by the positions given.
MAKES_ONES = frozenset({"biogpt", "opt"})
#: Text models that write to their cache what is no token of theirs, and what that is.
CACHES_OTHERS = {
    "mllama_text_model": "keeps the keys of its images in layers of cross attention, beside those of its text"
}
#: The transformers from which on generate() gives Gemma4's token types to the masks that it makes ahead.
_TYPES_OF_GEMMA4 = (5, 23)


def loses_masks_made_ahead(config: Any) -> bool:
    """Whether masks that generate() makes ahead of a forward are wrong for a model, so that it must make them
    itself: its cache is then not compileable.

    PaliGemma with windows can't take masks for layers of two kinds; generate() of an older transformers makes
    Gemma4's without its token types.
    """
    text = config.get_text_config(decoder=True)
    if config.model_type == "paligemma":
        return getattr(text, "sliding_window", None) is not None
    by_types = getattr(text, "use_bidirectional_attention", None) == "vision"
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    return by_types and config.model_type.startswith("gemma4") and version < _TYPES_OF_GEMMA4


def require_expressible(config: Any) -> None:
    """Refuse what a model of `OWN_ATTENTION` may ask for and paged attention does not express.

    Raises:
        UnsupportedModelError: with the option and the reason.
    """
    if config.model_type == "falcon" and config.alibi:
        raise UnsupportedModelError(
            "falcon with alibi=True cannot run through torchpaged: transformers rounds each product of slope "
            "and position to bfloat16, in any dtype, which no slope per head expresses; call generate() "
            "without past_key_values"
        )
    if config.model_type == "big_bird" and config.attention_type != "original_full":
        raise UnsupportedModelError(
            f"big_bird with attention_type={config.attention_type!r} selects blocks of keys at random; load "
            "it with attention_type='original_full'"
        )
