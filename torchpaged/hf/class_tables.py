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

import importlib
from collections.abc import Callable
from typing import Any

from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.families import CLASS_TABLES


def _refusal(model: str, name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedModelError(
            f"{model} cannot be built with attn_implementation={name!r}: it has attention classes of its own "
            "by name, and none for it; build it with 'eager', and of a model of several parts call "
            "set_attn_implementation on its language model"
        )

    return refuse


def fill_class_tables(name: str) -> None:
    """Enter ``name`` into every table; a model that this transformers lacks, or a table that went, is left
    alone."""
    for path, takes_eager in CLASS_TABLES.items():
        module, table = path.rsplit(".", 1)
        try:
            classes = getattr(importlib.import_module(f"transformers.models.{module}"), table, None)
        except ImportError:
            continue
        if classes is not None and name not in classes:
            classes[name] = classes["eager"] if takes_eager else _refusal(module.split(".")[0], name)
