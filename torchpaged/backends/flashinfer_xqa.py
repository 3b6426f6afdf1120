"""The ``flashinfer_xqa`` backend: FlashInfer's XQA kernel for decode steps, which needs no plan.

    PagedAttention(32, 128, 8, backend=Route(decode="flashinfer_xqa", prefill="flash_attn"))

The kernel takes the block table and the lengths on the device, and how it splits keys follows from shapes:
one graph serves all lengths, and nothing runs on the host between replays. It takes one query token per
request and gives no log-sum-exp. Pools of fp8 are refused: over them the library rounds queries to fp8, too.

Its kernels are compiled at first use, one per width, group of heads, block size, and with or without window.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, further_reasons, unable
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.library_op import attention_op
from torchpaged.backends.package import DECODE
from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import ArgumentError

PACKAGE = DECODE._replace(backend="flashinfer_xqa")
#: Semaphores, 8 MiB that start as zeros and are left as zeros, and partial results behind them.
WORKSPACE_BYTES = 128 << 20
_FLOATS = (torch.bfloat16, torch.float16)
_MOST_GROUP = 32  # query heads of one kv head


class XqaSession(Session):
    """Keeps the kernel's workspace: calls on different streams need sessions of their own."""

    def _open(self, specs: Sequence[AttentionSpec]) -> None:
        PACKAGE.load()
        self._buffer = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        return {"workspace": self._buffer}

    def tensors(self) -> dict[str, Tensor]:
        """The workspace."""
        return {"workspace": self._buffer}

    def reset(self) -> None:
        """Set the semaphores to zero."""
        self._buffer.zero_()


def _attend(call: AttentionCall, workspace: Tensor | None) -> None:
    _refuse(call)
    if workspace is None:
        raise unable("flashinfer_xqa", "it needs a workspace; pass **session.workspace(spec)")
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out = call[:7]
    num_tokens, starts = q.shape[0], query_start_loc[:-1]
    # A request of no keys gets one of block 0, so that no row is without any; its result is not taken.
    is_empty = seq_lens <= 0
    has_query = (query_start_loc.diff() > 0) & ~is_empty
    library = PACKAGE.loaded()
    y = library.xqa_batch_decode_with_kv_cache(
        q[starts.clamp_max(num_tokens - 1)],
        (k_cache, v_cache),
        workspace,
        block_table.masked_fill(is_empty[:, None], 0),
        seq_lens.clamp_min(1),
        block_table.shape[1] * k_cache.shape[1],
        bmm1_scale=call.scale,
        bmm2_scale=1.0,
        window_left=call.window_left,
        sinks=None if call.sinks is None else call.sinks.float(),
        kv_layout="NHD",
        enable_pdl=False,
    )
    # by token: a request without one writes into a row behind the last
    packed = y.new_zeros(num_tokens + 1, *y.shape[1:])
    packed.index_copy_(0, torch.where(has_query, starts.long(), num_tokens), y)
    out.copy_(packed[:num_tokens])


def _refuse(call: AttentionCall) -> None:
    reasons = []
    if call.max_query_len > 1:
        reasons.append(f"queries of up to {call.max_query_len} tokens are not supported")
    if call.k_cache.dtype != call.q.dtype:
        reasons.append("an fp8 pool is not supported")
    if reasons:
        raise unable("flashinfer_xqa", *reasons)
    if call.k_cache.stride() != call.v_cache.stride():  # the kernel gets one of them
        raise ArgumentError(
            "v_cache", f"the strides of k_cache, {call.k_cache.stride()}", str(call.v_cache.stride())
        )


def _further(spec: AttentionSpec) -> list[str]:
    majors, made_for = (9, 10, 12), "none of 9, 10 and 12, which XQA is made for"
    reasons = further_reasons(spec, majors=majors, gpus=made_for)
    if spec.num_heads // spec.num_kv_heads > _MOST_GROUP:
        group = spec.num_heads // spec.num_kv_heads
        reasons.append(f"{group} query heads per kv head are over {_MOST_GROUP}")
    return reasons


CAPABILITIES = Capabilities(
    device_types=("cuda",),
    dtypes=_FLOATS,
    kv_dtypes=_FLOATS,
    graph_support=GraphSupport.SINGLE_TOKEN_DECODE,
    min_compute_capability=(9, 0),
    head_dims=(64, 128, 256),
    block_sizes=(16, 32, 64, 128),
    different_head_dim_v=False,
    features=COMMON_FEATURES - {"logits_soft_cap", "alibi", "chunked", "lse"},
    finite_pools=True,
    max_query_len=1,
    further=_further,
)
BACKEND = Backend(
    name="flashinfer_xqa",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_xqa", _attend, CAPABILITIES, "flashinfer_xqa", workspace="Tensor(c!)?"),
    unavailable=PACKAGE.unavailable,
    session=XqaSession,
)
