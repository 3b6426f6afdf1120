"""HuggingFace models: two lines around unmodified ``generate()``.

    model.set_attn_implementation("torchpaged")
    cache = torchpaged.hf.PagedCache(model.config, max_batch_size=4, max_seq_len=512)
    out = model.generate(**inputs, past_key_values=cache)

`paged`, a context manager, and `attach` also switch models that ignore the attention interface, and back.
Importing registers the attention and mask functions under the name "torchpaged". Needs transformers >= 5.17.
"""

from typing import TYPE_CHECKING, Any

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("torchpaged.hf needs transformers >= 5.17; pip install 'torchpaged[hf]'") from error

import torchpaged.hf.models  # noqa: F401  registers what is known of models
from torchpaged.hf.attention import NAME, register
from torchpaged.hf.cache import PagedCache
from torchpaged.hf.compile_layers import compile_layers, uncompile_layers
from torchpaged.hf.continuous_batching import register_continuous_batching
from torchpaged.hf.encoder_decoder import PagedEncoderDecoderCache
from torchpaged.hf.paged_model import PagedModel
from torchpaged.hf.support import fusion_of
from torchpaged.hf.switch import attach, detach, paged

if TYPE_CHECKING:
    from torchpaged.engine import accelerate, unaccelerate
    from torchpaged.fuse import fuse, unfuse


def _batches() -> Any:
    # generate_batch of models with states leads to the engine, which stands on this package, too.
    from torchpaged import engine

    return engine.generate_batch


register()
register_continuous_batching(_batches)

__all__ = [
    "NAME",
    "PagedCache",
    "PagedEncoderDecoderCache",
    "PagedModel",
    "accelerate",
    "attach",
    "compile_layers",
    "detach",
    "fuse",
    "fusion_of",
    "paged",
    "unaccelerate",
    "uncompile_layers",
    "unfuse",
]


def __getattr__(name: str) -> Any:
    # The passes stand on this package, and are imported when they are asked for.
    if name in ("fuse", "unfuse"):
        from torchpaged import fuse

        return getattr(fuse, name)
    if name in ("accelerate", "unaccelerate"):
        from torchpaged import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
