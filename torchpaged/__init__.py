"""torchpaged: paged-KV attention for plain PyTorch, as custom ops, an nn.Module and a HuggingFace attention.

Entry points: ``torchpaged.PagedAttention`` (a module), ``torchpaged.hf`` (HuggingFace models, unmodified
``generate()``), and the ops ``torch.ops.torchpaged.*`` with `write_kv`, `paged_attention`, ... as their
checked functions. ``torchpaged.hf``, ``torchpaged.engine`` and the other packages are imported when they are
first asked for: importing this one imports torch and nothing optional. Errors derive from
`TorchpagedError`; an `ArgumentError` names the argument, what was expected, what came and what to do.
"""

import importlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if (sys.argv[:1] == ["-m"] and "torchpaged" in sys.orig_argv) or Path(sys.argv[0]).name == "torchpaged":
    # The command, by `python -m` or its script: an interrupt ends the imports without a traceback. cli.main
    # takes it from there.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from torchpaged.attention import PagedAttention
from torchpaged.backends import AttentionSpec, Limits, Session, open_session, select_backend, use_backend
from torchpaged.cache import BlockPool, PagedKVCache
from torchpaged.compile.compile_cache import load_compile_cache, save_compile_cache
from torchpaged.custom_ops.attention.mask import BlockSparse
from torchpaged.custom_ops.errors import (
    ArgumentError,
    BackendUnavailableError,
    BlockPoolExhaustedError,
    CaptureError,
    ClosedError,
    NotCopyableError,
    PlanError,
    RequestError,
    SemaphoreError,
    TorchpagedError,
    UnsupportedModelError,
)
from torchpaged.functional import (
    advance_step,
    copy_blocks,
    merge_attn_states,
    paged_attention,
    rope_write_kv,
    write_kv,
)
from torchpaged.metadata import AttentionMetadata
from torchpaged.metadata.tree import tree_mask_from_parents, tree_token_positions
from torchpaged.version import __version__ as __version__

if TYPE_CHECKING:
    from torchpaged import compat as compat
    from torchpaged import engine as engine
    from torchpaged import fuse as fuse
    from torchpaged import graphs as graphs
    from torchpaged import hf as hf
    from torchpaged import layers as layers
    from torchpaged import profiling as profiling
    from torchpaged import testing as testing
else:
    _PACKAGES = ("compat", "engine", "fuse", "graphs", "hf", "layers", "profiling", "testing")
    _ELSEWHERE = {
        "Generator": "engine",
        "SamplingParams": "engine",
        "DecodeGraphRunner": "graphs",
        "PagedCache": "hf",
        "PagedModel": "hf",
        "paged": "hf",
    }

    def __getattr__(name: str) -> Any:
        """The packages of `_PACKAGES`, imported when they are asked for."""
        if name in _PACKAGES:
            return importlib.import_module(f"{__name__}.{name}")
        hint = f"; it is {__name__}.{_ELSEWHERE[name]}.{name}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


__all__ = [
    "ArgumentError",
    "AttentionMetadata",
    "AttentionSpec",
    "BackendUnavailableError",
    "BlockPool",
    "BlockPoolExhaustedError",
    "BlockSparse",
    "CaptureError",
    "ClosedError",
    "Limits",
    "NotCopyableError",
    "PagedAttention",
    "PagedKVCache",
    "PlanError",
    "RequestError",
    "SemaphoreError",
    "Session",
    "TorchpagedError",
    "UnsupportedModelError",
    "advance_step",
    "copy_blocks",
    "load_compile_cache",
    "merge_attn_states",
    "open_session",
    "paged_attention",
    "rope_write_kv",
    "save_compile_cache",
    "select_backend",
    "tree_mask_from_parents",
    "tree_token_positions",
    "use_backend",
    "write_kv",
]
