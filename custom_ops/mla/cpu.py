"""Latent attention on a CPU, by the native kernels: those of ``paged_attention`` and ``write_kv`` take a pool
that serves keys and values, and pools that are columns of one, at any width."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_dtype
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.check import as_keys_and_values, check_mla_attention, check_write_latent
from torchpaged.custom_ops.mla.fp8_rows import store
from torchpaged.custom_ops.mla.selection import attend_densely

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mla_attention(call: LatentCall) -> None:
    """Arguments: ``custom_ops/mla/schema.py``."""
    attend = torch.ops.torchpaged.paged_attention.cpu
    if not _is_one_call(call):
        _check(call)
        attend_densely(call, attend)
        return

    def run() -> None:
        q, pool, *batch = call[:5]
        options = {"max_query_len": call.max_query_len, "scale": call.scale, "causal": call.causal}
        attend(q, pool, pool[..., : call.rank], *batch, call.out, call.lse, **options)

    _checked_by_kernel(run, lambda: _check(call))


def _checked_by_kernel(kernel: Callable[[], None], check: Callable[[], None]) -> None:
    """Run a kernel that checks before it writes, in a fraction of the time that ``check`` takes. What it
    refuses, ``check`` says of this op's arguments."""
    try:
        kernel()
        return
    except (IndexError, RuntimeError) as error:
        refused = error
    check()
    raise refused


def _is_one_call(call: LatentCall) -> bool:
    """Whether it is one of ``paged_attention`` over the same pool, if nothing is wrong with it; a pool of
    several heads is, of which that op would not know."""
    pool = call.kv_cache
    return call.is_plain and pool.dtype in _DTYPES and pool.dim() == 4 and pool.shape[2] == 1


def _check(call: LatentCall) -> None:
    check_mla_attention(call)
    check_dtype("q", call.q, *_DTYPES)


def write_latent(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Arguments: ``custom_ops/mla/schema.py``."""
    tokens = kv_c, k_pe, kv_cache, slot_mapping
    if kv_cache.dtype not in _DTYPES:
        _check_write(*tokens)
        store(*tokens)
        return

    def run() -> None:
        torch.ops.torchpaged.write_kv.cpu(*as_keys_and_values(kv_c, k_pe, kv_cache), slot_mapping)

    _checked_by_kernel(run, lambda: _check_write(*tokens))


def _check_write(kv_c: Tensor, *others: Tensor) -> None:
    check_write_latent(kv_c, *others)
    check_dtype("kv_c", kv_c, *_DTYPES)
