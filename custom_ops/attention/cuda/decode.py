"""Decode attention of the ``cuda`` backend: launches of ``decode.cu``."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda import specialise
from torchpaged.custom_ops.attention.cuda.call_params import call_params
from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.params import struct_of


def prepare(
    call: AttentionCall, spec: Specialisation, max_query_len: int, longest: int = 0
) -> tuple[Callable[[], None], int]:
    """What launches the decode kernel, and how many numbers of the semaphore a request has. Every allocation
    is made here: behind a prefill launch it has to follow that one at once.

    Args:
        call: checked, as `AttentionCall.for_launch` gives it, with a semaphore.
        spec: of the call.
        max_query_len: of the requests that the launch takes.
        longest: as in `specialise.decode_config`; then nothing may be launched between the prefill kernel
            and this.
    """
    index, pairs = call.q.device.index or 0, call.num_reqs * spec.num_kv_heads
    kernel, shape, rows = _specialised(index, spec, max_query_len, pairs, longest)
    programs = kernel.resident(shape.warps * 32, shape.cluster, shape.ctas_per_sm * gpu.num_sms(index))
    count = programs * 2 * rows
    scratch = torch.empty(count * (spec.dim_v + 2), dtype=torch.float32, device=call.q.device)
    params, early = _params(call, scratch, count * spec.dim_v), gpu.launches_early(index)

    def launch(_held: Tensor = scratch) -> None:
        kernel.launch(programs, shape.warps * 32, params, early=early)

    return launch, spec.num_kv_heads // shape.pair_heads


def _params(call: AttentionCall, scratch: Tensor, part_numbers: int) -> ctypes.Structure:
    assert call.semaphore is not None
    return struct_of("decode.cu")(
        **call_params(call),
        q=call.q.data_ptr(),
        k=call.k_cache.data_ptr(),
        v=call.v_cache.data_ptr(),
        part_acc=scratch.data_ptr(),
        part_state=scratch.data_ptr() + part_numbers * 4,
        semaphore=call.semaphore.data_ptr(),
        q_token=call.q.stride(0),
        q_head=call.q.stride(1),
    )


@functools.cache
def _specialised(
    index: int, spec: Specialisation, max_query_len: int, pairs: int, longest: int
) -> tuple[jit.Kernel, specialise.DecodeShape, int]:
    """The kernel of these shapes and features, its launch shape and its query rows per pair."""
    config, shape = specialise.decode_config(
        spec,
        max_query_len,
        pairs,
        early=gpu.launches_early(index),
        sms=gpu.num_sms(index),
        shared_per_sm=gpu.shared_per_sm(index),
        longest=longest,
    )
    rows = config["PAIR_HEADS"] * config["GROUP"] * config["QUERY_LEN"]
    shared = shape.shared_bytes(spec.dim, spec.dim_v, spec.kv_dtype.itemsize, rows)
    kernel = jit.kernel("decode.cu", "paged_decode", config, torch.device("cuda", index), shared_bytes=shared)
    return kernel, shape, rows
