"""Families of which facts are known, and whose modules run as they are."""

from __future__ import annotations

from torchpaged.hf.families import Family, register_family

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
# Not among these: nllb-moe, where padding takes part in the experts' capacity; siglip_text_model, whose
# pooled state is that of the last position, padding or not; wav2vec2, unispeech-sat and data2vec-audio, whose
# XVector heads read a few states of padding.
register_family(Family(_ENCODER_ONLY, attends_to_others=False))
register_family(Family(_WITH_DECODER, attends_to_others=True))

register_family(
    Family(
        ("inkling2_text", "inkling_text", "longt5", "mt5", "switch_transformers", "t5", "umt5"),
        needs_dense="adds a bias by positions to its scores",
        adds_bias=True,
    )
)
register_family(Family(("diffllama",), needs_dense="regroups its cached values before it attends"))
register_family(Family(("doge",), needs_dense="makes a mask of its cached values"))
register_family(Family(("jetmoe",), needs_dense="repeats its cached keys and values before it attends"))
register_family(Family(("biogpt", "opt"), makes_ones=True))
register_family(
    Family(
        ("mllama_text_model",),
        caches_others="keeps the keys of its images in layers of cross attention, beside those of its text",
    )
)
