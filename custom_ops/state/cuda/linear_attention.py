"""linear_attention of the ``cuda`` backend: single tokens by the Hopper kernel; all others, and everything
that it can't take, by the Triton kernels. Over long rows kernels for Hopper stand in the place of two of them
for gated delta nets and Kimi delta attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.routes import require_gpu
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.check import check_linear_attention
from torchpaged.custom_ops.state.cuda import decode, delta_chunks, delta_pass, key_chunks

if TYPE_CHECKING:
    from torchpaged.custom_ops.state.triton.chunks import Kernels
    from torchpaged.custom_ops.state.triton.records import Chunks


def linear_attention(call: LinearAttentionCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``. Every choice here depends on shapes, never on
    lengths."""
    require_gpu(call.v.device)
    if route(call) is None:
        check_linear_attention(call)
        decode.launch(call, decode.StateSpec.of(call))
        return
    from torchpaged.custom_ops.state.triton import linear_attention  # only now: Triton loads slowly

    linear_attention.linear_attention(call, kernels_of)


def kernels_of(call: LinearAttentionCall) -> Kernels | None:
    """What takes the place of Triton's kernels for long rows, of a checked call."""
    from torchpaged.custom_ops.state.triton.chunks import Kernels

    capability = gpu.capability(call.v.device.index or 0)
    passes = delta_pass.why_not(call, capability) is None
    if call.g.dim() == 2:
        return Kernels(delta_chunks.launch, delta_pass.launch, delta_pass.CUT) if passes else None
    if key_chunks.why_not(call, capability) is not None:
        return None
    if not passes:
        return Kernels(_relate_by_key)
    return Kernels(_relate_by_key, delta_pass.launch, segments=delta_pass.SEGMENTS)


def _relate_by_key(call: LinearAttentionCall, short: int) -> Chunks:
    """Of long rows whose keys' columns decay one by one."""
    from torchpaged.custom_ops.state.triton.chunks import workspace

    chunks = workspace(call, key_chunks.CHUNK)
    key_chunks.launch(call, chunks, short)
    return chunks


def route(call: LinearAttentionCall) -> str | None:
    """Why a call goes to Triton, or None: from shapes, dtypes, strides and addresses alone."""
    if any(x.dim() != 3 for x in (call.q, call.k, call.v, call.out)) or call.state.dim() != 4:
        return "shapes that the check refuses"
    if not call.state_slots.numel() or not call.v.numel():
        return "no requests or no tokens"
    return decode.why_not(call, gpu.capability(call.v.device.index or 0))
