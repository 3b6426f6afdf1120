"""cascade_attention of the ``cuda`` backend. On Hopper three launches: the prefixes' tiles on most
multiprocessors, the suffixes' decode on the others from the beginning and on all at the end, and one merge of
both (cascade_scheduler.cuh, cascade_epilogue.cuh). Everything they can't take: two calls of its attention,
and Triton's merge.
"""

from collections.abc import Callable

import torch

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.call import Specialisation
from torchpaged.custom_ops.attention.cascade_call import CascadeCall
from torchpaged.custom_ops.attention.check import check_cascade_attention
from torchpaged.custom_ops.attention.cuda import decode, prefill
from torchpaged.custom_ops.attention.cuda.paged_attention import route
from torchpaged.custom_ops.attention.cuda.prefill_shape import MAX_CTA_SPLITS, most_tiles, shape_for
from torchpaged.custom_ops.attention.cuda.tensor_maps import square_width
from torchpaged.custom_ops.attention.triton.cascade_attention import compose
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.routes import require_gpu

#: Tiles for each CTA of the prefixes at most, by shapes: so many splits of one have room.
MOST_TILES_PER_CTA = MAX_CTA_SPLITS - 2


def cascade_attention(call: CascadeCall) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``. Every choice here depends on shapes, never
    on lengths."""
    require_gpu(call.own.q.device)
    check_cascade_attention(call)
    if refuse(call) is None:
        attend(call)
        return
    ops = torch.ops.torchpaged
    compose(ops.paged_attention.cuda, ops.merge_attn_states.triton, call)


def refuse(call: CascadeCall) -> str | None:
    """Why the three launches can't take a call with these tensors, or None. Shapes, dtypes, strides and
    addresses only."""
    own = call.own.for_launch()
    spec = Specialisation.of(own)
    if spec.fp8_results:
        return "output_scale: what is merged would be rounded to 8 bits first"
    num_tokens, (num_groups, prefix_blocks) = own.q.shape[0], call.prefix_block_table.shape
    if not (num_tokens and own.num_reqs and num_groups and prefix_blocks):
        return "no tokens, requests, groups or blocks"
    suffixes = route(own, spec)
    if suffixes.kernel != "decode":
        return f"suffixes: {suffixes.reason or suffixes.kernel}"
    if not variables.get("TORCHPAGED_CUDA_PREFILL"):
        return "prefixes: TORCHPAGED_CUDA_PREFILL=0"
    reason = prefill.why_not(own._replace(sinks=None), spec)
    if reason is not None:
        return f"prefixes: {reason}"
    if spec.group * square_width(spec.dim) % 64:
        return f"prefixes: {spec.group} query heads per kv head of width {spec.dim}"
    # as cut with a soft cap: tiles of at most as many rows
    rows = shape_for(spec._replace(soft_cap=True)).rows
    tiles = most_tiles(num_tokens, num_groups, rows // spec.group) * spec.num_kv_heads
    most = MOST_TILES_PER_CTA * prefix_ctas(gpu.num_sms(own.q.device.index or 0))
    return None if tiles <= most else f"prefixes: at most {tiles} tiles by shapes, {most} have room"


def prefix_ctas(num_sms: int) -> int:
    """CTAs of the prefixes' launch, a multiprocessor each: 108 of 132. While they run the others are the
    decode launch's alone. Any number is right (docs/log/shared_prefixes.md)."""
    return max(num_sms * 9 // 11, 1)


def attend(call: CascadeCall) -> None:
    """The three launches, on checked arguments that `refuse` lets pass."""
    own = call.own.for_launch().with_semaphore()
    own_lse = torch.empty(own.q.shape[:2], dtype=torch.float32, device=own.q.device)

    def decodes() -> tuple[Callable[[], None], int]:
        suffixes = own._replace(lse=own_lse)
        return decode.prepare(suffixes, Specialisation.of(suffixes), own.max_query_len, own.max_query_len)

    prefixes = call._replace(own=own).prefixes(own.q, own.out, own.lse)._replace(semaphore=own.semaphore)
    ctas = prefix_ctas(gpu.num_sms(own.q.device.index or 0))
    suffixes = prefill.Suffixes(call.order, own_lse, ctas)
    prefill.prefill(prefixes, Specialisation.of(prefixes), behind=decodes, suffixes=suffixes)
