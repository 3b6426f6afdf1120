"""paged_attention of the ``cuda`` backend: decode and prefill by the CUDA C++ kernels, everything they can't
take by the Triton kernels.

Batches that may hold short and long queries take two launches: prefill of the long ones, and behind it,
without waiting for it, decode of the others.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops import variables
from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.cuda import prefill, specialise
from torchpaged.custom_ops.attention.triton.config import (
    MAX_DECODE_QUERY_LEN,
    bounded_masks,
    decode_len_in_mixed,
)
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.custom_ops.pools import FP8

_PARAMS = struct.Struct("15Q7q2f4iQ")  # struct Params of shapes.cuh


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    chunk_size: int = 0,
    tree_mask: Tensor | None = None,
    semaphore: Tensor | None = None,
) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``. Every choice here depends on shapes, never
    on lengths."""
    if q.device.type != "cuda":
        raise BackendUnavailableError(
            f"backend 'cuda': its kernels run on an NVIDIA GPU, got tensors on {q.device.type}"
        )
    check_paged_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        max_query_len=max_query_len,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        chunk_size=chunk_size,
        tree_mask=tree_mask,
        semaphore=semaphore,
        fp8_queries=True,
    )
    if max_query_len == 1:  # a query token that is alone in its request sees itself, whatever its word says
        tree_mask = None
    num_reqs = block_table.shape[0]
    capacity = block_table.shape[1] * k_cache.shape[1]
    window_left, window_right, chunk_size = bounded_masks(window_left, window_right, chunk_size, capacity)
    kernel, short, reason = route(q, k_cache, v_cache, out, num_reqs, max_query_len, scale, sinks, capacity)
    if q.dtype in FP8:
        _refuse_fp8_queries(kernel, reason, tree_mask)
    if kernel == "triton":
        _triton()(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            query_start_loc,
            out,
            lse,
            max_query_len=max_query_len,
            scale=scale,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            chunk_size=chunk_size,
            tree_mask=tree_mask,
            semaphore=semaphore,
        )
        return
    if kernel != "prefill" and semaphore is None:
        semaphore = torch.zeros(num_reqs * k_cache.shape[2], dtype=torch.int32, device=q.device)

    # all that the launch needs is made here: beside prefill's it has to follow that one at once
    def decodes() -> tuple[Callable[[], None], int]:
        assert semaphore is not None
        return prepare_decode(
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            query_start_loc,
            out,
            lse,
            short or max_query_len,
            scale,
            causal,
            window_left,
            window_right,
            logits_soft_cap,
            alibi_slopes,
            sinks,
            k_scale,
            v_scale,
            chunk_size,
            semaphore,
            longest=short,
            tree_mask=tree_mask,
        )

    if kernel == "decode":
        decodes()[0]()
        return
    prefill.attend(
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        chunk_size=chunk_size,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        semaphore=semaphore,
        short=short,
        behind=None if kernel == "prefill" else decodes,
    )


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


def route(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    num_reqs: int,
    max_query_len: int,
    scale: float,
    sinks: Tensor | None,
    capacity: int,
) -> Route:
    """The route of a call, from shapes, dtypes, strides and addresses alone. ``capacity``: tokens that a row
    of the block table holds."""
    num_tokens = q.shape[0]
    if q.dtype in FP8:  # one kernel takes them, however short they are
        reason = (
            prefill.why_not(q, k_cache, v_cache, out, scale=scale, sinks=sinks)
            if _prefill_is_on()
            else "TORCHPAGED_CUDA_PREFILL=0"
        )
        return Route("prefill") if reason is None else Route("triton", reason=f"prefill: {reason}")
    if not num_reqs or not num_tokens:
        return Route("triton", reason="no requests or no tokens")
    if max_query_len <= MAX_DECODE_QUERY_LEN:
        reason = specialise.unsupported(q, k_cache, v_cache, out, sinks, max_query_len, num_reqs)
        return Route("decode") if reason is None else Route("triton", reason=f"decode: {reason}")
    reason = (
        prefill.why_not(q, k_cache, v_cache, out, scale=scale, sinks=sinks)
        if _prefill_is_on()
        else "TORCHPAGED_CUDA_PREFILL=0"
    )
    group, num_kv_heads, dim = q.shape[1] // k_cache.shape[2], k_cache.shape[2], k_cache.shape[3]
    if reason is None:
        sms = gpu.num_sms(q.device.index or 0)
        reason = prefill.is_slower(
            num_tokens, num_reqs, num_kv_heads, group, dim, v_cache.shape[3], capacity, sms
        )
    if reason is not None:
        return Route("triton", reason=f"prefill: {reason}")
    short = decode_len_in_mixed(group, num_reqs, num_tokens, max_query_len)
    if not short:
        return Route("prefill")
    reason = specialise.unsupported(q, k_cache, v_cache, out, sinks, short, num_reqs)
    return (
        Route("prefill and decode", short)
        if reason is None
        else Route("triton", reason=f"decode beside prefill: {reason}")
    )


def _refuse_fp8_queries(kernel: str, reason: str, tree_mask: Tensor | None) -> None:
    """Triton's kernels take no queries of fp8: what prefill's can't take, nothing here can."""
    if tree_mask is not None:
        raise ArgumentError("tree_mask", "None with fp8 queries", "a tensor", "give queries of 16 bits")
    if kernel != "prefill":
        raise BackendUnavailableError(f"backend 'cuda': fp8 queries need the prefill kernel: {reason}")


def _prefill_is_on() -> bool:
    return bool(variables.get("TORCHPAGED_CUDA_PREFILL"))


@functools.cache
def _triton() -> Callable[..., None]:
    """Triton's op, imported when it is needed: importing Triton takes longer than loading a decode kernel
    from the disk."""
    from torchpaged.custom_ops.attention.triton.paged_attention import paged_attention

    return paged_attention


def prepare_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None,
    max_query_len: int,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    soft_cap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    chunk: int,
    semaphore: Tensor,
    *,
    longest: int = 0,
    tree_mask: Tensor | None = None,
) -> tuple[Callable[[], None], int]:
    """What launches the decode kernel on checked arguments, and how many numbers of the semaphore a
    request has.

    ``longest``: as in `specialise.decode_config`; then nothing may be launched between the prefill kernel
    and this.
    """
    num_reqs, num_kv_heads, dim_v, index = (
        block_table.shape[0],
        k_cache.shape[2],
        v_cache.shape[3],
        q.device.index or 0,
    )
    if (k_scale is None) != (v_scale is None):  # one flag serves both
        one = torch.ones(1, dtype=torch.float32, device=q.device)
        k_scale, v_scale = one if k_scale is None else k_scale, one if v_scale is None else v_scale
    kernel, shape, rows = _specialised(
        index,
        q.dtype,
        k_cache.dtype,
        q.shape[1] // num_kv_heads,
        max_query_len,
        k_cache.shape[1:],
        dim_v,
        k_cache.stride(),
        v_cache.stride(),
        causal,
        window_left,
        window_right,
        chunk,
        soft_cap > 0,
        alibi_slopes is not None,
        sinks is not None,
        k_scale is not None,
        lse is not None,
        num_reqs * num_kv_heads,
        longest,
        tree_mask is not None,
    )
    programs = kernel.resident(shape.warps * 32, shape.cluster, shape.ctas_per_sm * gpu.num_sms(index))
    scratch = torch.empty(programs * 2 * rows * (dim_v + 2), dtype=torch.float32, device=q.device)
    parts = scratch.data_ptr()
    pointers = (
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
    )
    arguments = _PARAMS.pack(
        *(0 if t is None else t.data_ptr() for t in pointers),
        parts,
        parts + programs * 2 * rows * dim_v * 4,
        semaphore.data_ptr(),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        *((0, 0) if lse is None else lse.stride()),
        block_table.stride(0),
        scale,
        soft_cap,
        num_reqs,
        q.shape[0],
        _head_stride(k_scale),
        _head_stride(v_scale),
        0 if tree_mask is None else tree_mask.data_ptr(),
    )
    early = gpu.launches_early(index)

    def launch(_held: Tensor = scratch) -> None:
        kernel.launch(programs, shape.warps * 32, arguments, early=early)

    return launch, num_kv_heads // shape.pair_heads


def _head_stride(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(-1)


@functools.cache
def _specialised(
    index: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    group: int,
    max_query_len: int,
    cache_shape: tuple[int, int, int],
    dim_v: int,
    k_stride: tuple[int, ...],
    v_stride: tuple[int, ...],
    causal: bool,
    window_left: int,
    window_right: int,
    chunk: int,
    soft_cap: bool,
    alibi: bool,
    sinks: bool,
    scales: bool,
    lse: bool,
    pairs: int,
    longest: int,
    tree: bool,
) -> tuple[jit.Kernel, specialise.DecodeShape, int]:
    """The kernel of these shapes and features, its launch shape and its query rows per pair."""
    block_size, num_kv_heads, dim = cache_shape
    config, shape = specialise.decode_config(
        dtype,
        kv_dtype,
        group,
        max_query_len,
        block_size,
        num_kv_heads,
        dim,
        dim_v,
        k_stride,
        v_stride,
        causal,
        window_left,
        window_right,
        chunk,
        soft_cap,
        alibi,
        sinks,
        scales,
        lse,
        gpu.launches_early(index),
        pairs,
        gpu.num_sms(index),
        gpu.shared_per_sm(index),
        longest,
        tree,
    )
    rows = config["PAIR_HEADS"] * config["GROUP"] * config["QUERY_LEN"]
    shared = shape.shared_bytes(dim, dim_v, kv_dtype.itemsize, rows)
    kernel = jit.kernel("decode.cu", "paged_decode", config, torch.device("cuda", index), shared_bytes=shared)
    return kernel, shape, rows
