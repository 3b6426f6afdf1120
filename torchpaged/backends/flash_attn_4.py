"""The ``flash_attn_4`` backend: FlashAttention-4, by the package of ``flash_attn.cute``.

Prompts, decode steps and mixed batches are one call, ``flash_attn_varlen_func`` with packed queries, a page
table and the lengths on the device; it makes its own schedule there, and bounds come from shapes. There is
nothing to plan. The op has sinks of its own (``learnable_sink``).

**Written from the package's signatures (4.0.0b36) and tested with a stand-in: no GPU has run it here.** So
its graph support is declared as NEVER, and it runs where it is named. Kernels are compiled at first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.library_op import attention_op
from torchpaged.backends.planned_batch import blocks_in_use, finish, hidden_queries
from torchpaged.backends.spec import COMMON_FEATURES, AttentionSpec, GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import BackendUnavailableError

PACKAGE, MODULE = "flash_attn", "flash_attn.cute"
INSTALL = (
    "pip install --pre 'flash-attn-4[cu13]' (about 100 MB with its compiler; not verified on a GPU here)"
)
#: Parameters of ``flash_attn_varlen_func`` without which the package is another one, or too old.
NEEDED = (
    "cu_seqlens_q",
    "max_seqlen_q",
    "max_seqlen_k",
    "seqused_k",
    "page_table",
    "softmax_scale",
    "window_size",
    "learnable_sink",
    "softcap",
    "num_splits",
    "return_lse",
)
_DTYPES = (torch.bfloat16, torch.float16)


def _attend(call: AttentionCall) -> None:
    if call.alibi_slopes is not None or call.chunk_size:
        raise _unable("alibi and chunked are not supported")
    if call.q.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise _unable("graph support is NEVER")
    library = sys.modules.get(MODULE) or load()
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse = call[:8]
    block_size, right = k_cache.shape[1], None if call.window_right < 0 else call.window_right
    y, y_lse = library.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=call.max_query_len,
        max_seqlen_k=block_table.shape[1] * block_size,
        seqused_k=seq_lens.clamp_min(0),
        page_table=blocks_in_use(block_table, seq_lens, block_size),
        softmax_scale=call.scale,
        causal=call.causal,
        # a causal query sees nothing to its right, whatever the window says
        window_size=(
            None if call.window_left < 0 else call.window_left,
            None if call.causal else right,
        ),
        learnable_sink=call.sinks,
        softcap=call.logits_soft_cap,
        num_splits=1,
        return_lse=True,
    )[:2]
    hidden = hidden_queries(seq_lens, query_start_loc, len(q))
    finish(hidden, out, lse, y, None if lse is None else y_lse.transpose(0, 1))  # its own is [H, T]


def _unable(reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(f"backend 'flash_attn_4' cannot run this attention: {reason}")


# ----------------------------------------------------------------------------------------------- the package
def load() -> Any:
    """The package, whose compiler this loads.

    Raises:
        BackendUnavailableError: it is not here, or not of the interface that is needed; with the reason.
    """
    why = missing()
    if why:
        raise BackendUnavailableError(f"backend 'flash_attn_4' is not usable here: {why}")
    try:
        library = importlib.import_module(MODULE)
    except Exception as error:  # what it needs besides may be missing, or be of another version
        raise BackendUnavailableError(
            f"backend 'flash_attn_4' is not usable here: {MODULE} does not load: {error}; {INSTALL}"
        ) from error
    call = getattr(library, "flash_attn_varlen_func", None)
    known = inspect.signature(call).parameters if call is not None else ()
    lacking = [name for name in NEEDED if name not in known]
    if lacking:
        raise BackendUnavailableError(
            f"backend 'flash_attn_4' is not usable here: flash_attn_varlen_func of {MODULE} lacks "
            f"{', '.join(lacking)}; {INSTALL}"
        )
    return library


def unavailable() -> str | None:
    """Why the backend can't run here, or None. Does not load the package."""
    return missing() or (None if torch.cuda.is_available() else "no CUDA device is visible")


def missing() -> str | None:
    """What keeps the package from being used, or None. Imports nothing: the folder may be FlashAttention-2's,
    whose import loads its kernels."""
    found = importlib.util.find_spec(PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    if not any((Path(folder) / "cute" / "__init__.py").exists() for folder in folders):
        return f"the package of {MODULE} (FlashAttention-4) is not installed; {INSTALL}"
    return None


class FlashAttn4Capabilities(Capabilities):
    """What depends on more than one thing at once."""

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason why ``spec`` can't run; empty if it can."""
        reasons = super().reject(spec)
        if spec.kv_dtype not in (None, spec.dtype):
            reasons.append(f"kv dtype {spec.kv_dtype} is not the queries' {spec.dtype}")
        if spec.head_dim % 8:
            reasons.append(f"head_dim {spec.head_dim} is no multiple of 8")
        if spec.device.type == "cuda" and torch.cuda.is_available():
            have = torch.cuda.get_device_capability(spec.device)
            if have[0] not in (9, 10, 11):
                reasons.append(
                    f"compute capability {have} is none of 9, 10 and 11, where it reads page tables"
                )
            if have[0] in (10, 11) and spec.head_dim > 128 and spec.head_dim != 256:
                reasons.append(f"head_dim {spec.head_dim} is neither up to 128 nor 256")
        return reasons


BACKEND = Backend(
    name="flash_attn_4",
    capabilities=FlashAttn4Capabilities(
        device_types=("cuda",),
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES,
        graph_support=GraphSupport.NEVER,
        min_compute_capability=(9, 0),
        max_head_dim=256,
        different_head_dim_v=False,
        features=COMMON_FEATURES - {"alibi", "chunked"},
        finite_pools=True,
    ),
    ops=attention_op("torchpaged_flash_attn_4", _attend),
    unavailable=unavailable,
)
