"""Families of which facts are known, and whose modules run as they are."""

from torchpaged.hf.families import Family, register_family

_ENCODER_ONLY = """
    albert bert bert-generation camembert clip_text_model data2vec-text distilbert electra ernie esm
    eurobert gte jina_embeddings_v3 mobilebert modernbert nomic_bert roberta roberta-prelayernorm
    roc_bert splinter t5_gemma_module xlm-roberta xlm-roberta-xl xmod
"""
_WITH_DECODER = """
    bart bigbird_pegasus blenderbot blenderbot-small hubert m2m_100 marian mbart pegasus pegasus_x
    plbart speech_to_text unispeech whisper
"""
# Not among these: nllb-moe, where padding takes part in the experts' capacity; siglip_text_model, whose
# pooled state is that of the last position, padding or not; wav2vec2, unispeech-sat and data2vec-audio, whose
# XVector heads read a few states of padding.
register_family(Family(tuple(_ENCODER_ONLY.split()), attends_to_others=False))
register_family(Family(tuple(_WITH_DECODER.split()), attends_to_others=True, hides_positions=True))

register_family(
    Family(
        ("inkling2_text", "inkling_text", "longt5", "mt5", "switch_transformers", "t5", "umt5"),
        needs_dense="adds a bias by positions to its scores",
        adds_bias=True,
        hides_positions=True,
    )
)
register_family(Family(("diffllama",), needs_dense="regroups its cached values before it attends"))
register_family(Family(("doge",), needs_dense="makes a mask of its cached values"))
register_family(Family(("jetmoe",), needs_dense="repeats its cached keys and values before it attends"))
register_family(Family(("biogpt", "opt"), makes_ones=True))
register_family(
    Family(
        ("cohere_compass_text", "ctrl", "gpt_bigcode", "llama4_text", "persimmon", "zamba", "zaya"),
        hides_positions=True,
    )
)
# A whole model, which drops the positions that generate() prepared; its text model is another one's, too.
register_family(Family(("hyperclovax_vision_v2",), hides_positions=True))

register_family(
    Family(
        ("mllama_text_model",),
        caches_others="keeps the keys of its images in layers of cross attention, besides those of its text, "
        "in rows of other lengths",
    )
)
register_family(
    Family(
        ("dory", "inkling2_loop_text"),
        caches_others="keeps the keys of each pass through its loop in layers that it adds to its cache",
    )
)
register_family(Family(("xlstm",), caches_others="keeps a cache of its own kind"))
# Other attention classes than theirs are no stand-in for one of ours.
register_family(
    Family(
        class_tables=(
            "bark.modeling_bark.BARK_ATTENTION_CLASSES",
            "git.modeling_git.GIT_SELF_ATTENTION_CLASSES",
            "data2vec.modeling_data2vec_vision.DATA2VEC_VISION_SELF_ATTENTION_CLASSES",
            "deepseek_ocr2.modeling_deepseek_ocr2.DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES",
            "sam.modeling_sam.SAM_VISION_ATTENTION_CLASSES",
            "sam_hq.modeling_sam_hq.SAM_HQ_VISION_ATTENTION_CLASSES",
            "superglue.modeling_superglue.SUPERGLUE_SELF_ATTENTION_CLASSES",
            "unlimited_ocr.modeling_unlimited_ocr.UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES",
        )
    )
)
