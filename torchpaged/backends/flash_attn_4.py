"""The ``flash_attn_4`` backend: FlashAttention-4, by the package of ``flash_attn.cute``.

Prompts, decode steps and mixed batches are one call, ``flash_attn_varlen_func`` with packed queries, a page
table and the lengths on the device; it makes its own schedule there, and bounds come from shapes. There is
nothing to plan. The op has sinks of its own (``learnable_sink``).

**Written from the package's signatures (4.0.0b36) and tested with a stand-in: no GPU has run it here.** So
its graph support is declared as NEVER, and it runs where it is named. Kernels are compiled at first use.
"""

import importlib.util
from pathlib import Path

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, further_reasons
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.library_op import attention_op
from torchpaged.backends.package import Package
from torchpaged.backends.planned_batch import blocks_in_use, finish, hidden_queries
from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall

MODULE = "flash_attn.cute"
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
    library = PACKAGE.loaded()
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
        window_size=(None if call.window_left < 0 else call.window_left, None if call.causal else right),
        learnable_sink=call.sinks,
        softcap=call.logits_soft_cap,
        num_splits=1,
        return_lse=True,
    )[:2]
    hidden = hidden_queries(seq_lens, query_start_loc, len(q))
    finish(hidden, out, lse, y, None if lse is None else y_lse.transpose(0, 1))  # its own is [H, T]


# ----------------------------------------------------------------------------------------------- the package
def _missing() -> str | None:
    """Imports nothing: the folder may be FlashAttention-2's, whose import loads its kernels."""
    found = importlib.util.find_spec(MODULE.split(".")[0])
    folders = [] if found is None else list(found.submodule_search_locations or ())
    if not any((Path(folder) / "cute" / "__init__.py").exists() for folder in folders):
        return f"the package of {MODULE} (FlashAttention-4) is not installed; {INSTALL}"
    return None


PACKAGE = Package("flash_attn_4", MODULE, INSTALL, _missing, {"flash_attn_varlen_func": NEEDED})


# ----------------------------------------------------------------------------------------------- the backend
def _further(spec: AttentionSpec) -> list[str]:
    majors, where = (9, 10, 11), "none of 9, 10 and 11, where it reads page tables"
    reasons = further_reasons(spec, width=8, majors=majors, gpus=where)
    here = spec.device.type == "cuda" and torch.cuda.is_available()
    blackwell = here and torch.cuda.get_device_capability(spec.device)[0] in (10, 11)
    if blackwell and spec.head_dim > 128 and spec.head_dim != 256:
        reasons.append(f"head_dim {spec.head_dim} is neither up to 128 nor 256")
    return reasons


CAPABILITIES = Capabilities(
    device_types=("cuda",),
    dtypes=_DTYPES,
    kv_dtypes=_DTYPES,
    graph_support=GraphSupport.NEVER,
    min_compute_capability=(9, 0),
    max_head_dim=256,
    different_head_dim_v=False,
    features=COMMON_FEATURES - {"alibi", "chunked"},
    finite_pools=True,
    further=_further,
)
BACKEND = Backend(
    name="flash_attn_4",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_flash_attn_4", _attend, CAPABILITIES, "flash_attn_4"),
    unavailable=PACKAGE.unavailable,
)
