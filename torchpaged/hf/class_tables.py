"""Models that look their attention class up by the implementation's name, in a table of their modelling file.

transformers accepts a registered name for any model, and these would raise a bare KeyError. Decoders whose
own attention only needs a mask get their eager class, as models without a table do; the rest says what to do.

The tables are filled when `torchpaged.hf` is imported, which imports their modelling files: a tenth of what
importing transformers takes. There is no later place. A table is read in a layer's constructor, before any
attention or mask function runs; until then transformers only looks whether the name is a key of
``AttentionInterface``, which calls nothing of ours, in 5.17 and in 5.23. What is left, wrapping
``PreTrainedModel``'s own methods or Python's import, would change models that never ask for this name.

The tables are not public; ``tests/hf/test_class_tables.py`` notices one that changes, goes or comes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torchpaged.custom_ops.errors import UnsupportedModelError

#: modelling file under transformers.models -> (its table, whether the eager class may stand in)
TABLES: dict[str, tuple[str, bool]] = {
    "falcon.modeling_falcon": ("FALCON_ATTENTION_CLASSES", True),
    "gpt_neo.modeling_gpt_neo": ("GPT_NEO_ATTENTION_CLASSES", True),
    "gptj.modeling_gptj": ("GPTJ_ATTENTION_CLASSES", True),
    "bark.modeling_bark": ("BARK_ATTENTION_CLASSES", False),
    "git.modeling_git": ("GIT_SELF_ATTENTION_CLASSES", False),
    "data2vec.modeling_data2vec_vision": ("DATA2VEC_VISION_SELF_ATTENTION_CLASSES", False),
    "deepseek_ocr2.modeling_deepseek_ocr2": ("DEEPSEEK_OCR2_SAM_VISION_ATTENTION_CLASSES", False),
    "sam.modeling_sam": ("SAM_VISION_ATTENTION_CLASSES", False),
    "sam_hq.modeling_sam_hq": ("SAM_HQ_VISION_ATTENTION_CLASSES", False),
    "superglue.modeling_superglue": ("SUPERGLUE_SELF_ATTENTION_CLASSES", False),
    "unlimited_ocr.modeling_unlimited_ocr": ("UNLIMITED_OCR_SAM_VISION_ATTENTION_CLASSES", False),
}


def _refusal(module: str, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedModelError(
            f"{module.split('.')[0]} cannot be built with attn_implementation={name!r}: it has attention "
            "classes of its own by name, and none for it; build it with 'eager', and of a model of several "
            "parts call set_attn_implementation on its language model"
        )

    return refuse


def fill_class_tables(name: str) -> None:
    """Enter ``name`` into every table; a model that this transformers lacks, or a table that went, is left
    alone."""
    for module, (table, takes_eager) in TABLES.items():
        try:
            classes = getattr(importlib.import_module(f"transformers.models.{module}"), table, None)
        except ImportError:
            continue
        if classes is not None and name not in classes:
            classes[name] = classes["eager"] if takes_eager else _refusal(module, name)
