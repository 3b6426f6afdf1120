"""paged_attention of the ``cuda`` backend: decode and prefill by the CUDA C++ kernels, everything they can't
take by the Triton kernels.

Batches that may hold short and long queries take two launches: prefill of the long ones, and behind it,
without waiting for it, decode of the others.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.cuda import decode, prefill, specialise
from torchpaged.custom_ops.attention.cuda.prefill_shape import is_even, is_slower
from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN
from torchpaged.custom_ops.attention.triton.config import decode_len_in_mixed
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.routes import require_gpu
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError


def paged_attention(call: AttentionCall) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``. Every choice here depends on shapes, never
    on lengths."""
    require_gpu(call.q.device)
    check_paged_attention(call, fp8_queries=True)
    call = call.for_launch()
    spec = Specialisation.of(call)
    kernel, short, reason = route(call, spec)
    if spec.fp8_queries:
        _refuse_fp8_queries(kernel, reason, call)
    if kernel == "triton":
        _triton()(call)
        return
    if kernel == "prefill":
        prefill.prefill(call, spec)
        return
    call = call.with_semaphore()
    behind = functools.partial(decode.prepare, call, spec, short or call.max_query_len, short)
    if kernel == "decode":
        behind()[0]()
    else:
        prefill.prefill(call, spec, short=short, behind=behind)


class Route(NamedTuple):
    """Which kernels serve a call.

    Attributes:
        kernel: "decode", "prefill", both as "prefill and decode", or "triton".
        short: of both: the longest query that the decode launch takes.
        reason: why "triton".
    """

    kernel: str
    short: int = 0
    reason: str = ""


def route(call: AttentionCall, spec: Specialisation) -> Route:
    """The route of a call, from shapes, dtypes, strides and addresses alone."""
    num_tokens, num_reqs = call.q.shape[0], call.num_reqs
    if spec.block_sparse is not None:
        return Route("triton", reason="block_sparse")
    if spec.fp8_queries:  # one kernel takes them, however short they are
        reason = _prefill_why_not(call, spec)
        return Route("prefill") if reason is None else Route("triton", reason=f"prefill: {reason}")
    if not num_reqs or not num_tokens:
        return Route("triton", reason="no requests or no tokens")
    sms = gpu.num_sms(call.q.device.index or 0)
    if call.max_query_len <= MAX_DECODE_QUERY_LEN:
        reason = specialise.unsupported(call, spec, call.max_query_len, num_reqs)
        if reason is None:
            better = specialise.many_rows(spec, call.max_query_len) and is_even(call, spec, sms)
        else:
            better = specialise.too_many_rows(spec, call.max_query_len)
        if better and _prefill_why_not(call, spec) is None:
            return Route("prefill")
        return Route("decode") if reason is None else Route("triton", reason=f"decode: {reason}")
    reason = _prefill_why_not(call, spec)
    if reason is None:
        reason = is_slower(call, spec, sms)
    if reason is not None:
        return Route("triton", reason=f"prefill: {reason}")
    short = decode_len_in_mixed(spec.group, num_reqs, num_tokens, call.max_query_len)
    if not short or (is_mostly_prompts(call) and is_even(call, spec, sms)):
        return Route("prefill")
    reason = specialise.unsupported(call, spec, short, num_reqs)
    if reason is None:
        return Route("prefill and decode", short)
    return Route("triton", reason=f"decode with prefill: {reason}")


def is_mostly_prompts(call: AttentionCall) -> bool:
    """Whether decodes are so few among long queries, and have so few keys, that they are not worth a launch
    of their own: 32 query tokens of a request in the mean, room for 2,048 keys."""
    return call.q.shape[0] >= 32 * call.num_reqs and call.capacity <= 2048


def _prefill_why_not(call: AttentionCall, spec: Specialisation) -> str | None:
    if not variables.get("TORCHPAGED_CUDA_PREFILL"):
        return "TORCHPAGED_CUDA_PREFILL=0"
    return prefill.why_not(call, spec)


def _refuse_fp8_queries(kernel: str, reason: str, call: AttentionCall) -> None:
    """Triton's kernels take no queries of fp8: what prefill's can't take, nothing here can. An output_scale
    it could, by its source; that has not run on a GPU."""
    for name, tensor in (("tree_mask", call.tree_mask), ("output_scale", call.output_scale)):
        if tensor is not None:
            raise ArgumentError(name, "None with fp8 queries", "a tensor", "give queries of 16 bits")
    if kernel != "prefill":
        raise BackendUnavailableError(f"backend 'cuda': fp8 queries need the prefill kernel: {reason}")


@functools.cache
def _triton() -> Callable[[AttentionCall], None]:
    """Triton's launches, imported when they are needed: importing Triton takes longer than loading a decode
    kernel from the disk."""
    from torchpaged.custom_ops.attention.triton.paged_attention import attend

    return attend
