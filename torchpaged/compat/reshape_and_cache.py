"""vLLM's op that stores keys and values, on the kernels of torchpaged."""

import torch
from torch import Tensor

from torchpaged.compat.arguments import by_their_names, is_eager
from torchpaged.custom_ops.checks import check_dims, check_tensors
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import FP8
from torchpaged.functional import write_kv

#: vLLM's names of cache dtypes -> torch's. "auto" and the 16-bit names leave the pools as they are.
FP8_NAMES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PLAIN_NAMES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.float16}

_NAMES = {"k": "key", "v": "value", "k_cache": "key_cache", "v_cache": "value_cache"}


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Store keys and values in the pools, in place.

    Args:
        key: ``[at least num_tokens, num_kv_heads, head_dim]``; tokens behind ``num_tokens`` are padding.
        value: ``[at least num_tokens, num_kv_heads, head_dim_v]``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``: the dtype of ``key``, fp8, or uint8
            that holds fp8.
        value_cache: ``[num_blocks, block_size, num_kv_heads, head_dim_v]``.
        slot_mapping: ``[num_tokens]`` int64, ``block * block_size + offset``; -1 skips the token. Block 0 is
            a block like any other.
        kv_cache_dtype: "auto" for a cache of ``key``'s dtype; "fp8" or "fp8_e4m3", "fp8_e5m2"; "bfloat16" and
            "float16" name that dtype.
        k_scale, v_scale: float32 of one number or one per kv head: what is stored is ``x / scale``. Taken
            into account for fp8 alone, as in vLLM, which passes ones with other caches; None is 1.

    Raises:
        ArgumentError: an argument does not fit, or another ``kv_cache_dtype``. In a traced call dynamo's own
            error; a trace takes pools of a float dtype only, since a view of a pool as another dtype makes a
            compiler copy the pool.
    """
    if is_eager():
        check_tensors(
            key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping
        )
        check_dims("slot_mapping", slot_mapping, None)
        _check(key, value, key_cache, slot_mapping.shape[0], kv_cache_dtype)
    is_fp8 = kv_cache_dtype in FP8_NAMES
    if key_cache.dtype == torch.uint8:
        if not is_eager():
            raise ArgumentError(
                "key_cache", "a float dtype in a traced call (view it as one before)", "torch.uint8"
            )
        key_cache, value_cache = (cache.view(FP8_NAMES[kv_cache_dtype]) for cache in (key_cache, value_cache))
    num_tokens = slot_mapping.shape[0]
    scales = (_flat(k_scale), _flat(v_scale)) if is_fp8 else (None, None)
    by_their_names(
        _NAMES,
        lambda: write_kv(key[:num_tokens], value[:num_tokens], key_cache, value_cache, slot_mapping, *scales),
    )


def _flat(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.reshape(-1)


def _check(key: Tensor, value: Tensor, key_cache: Tensor, num_tokens: int, kv_cache_dtype: str) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() != 3 or tensor.shape[0] < num_tokens:
            raise ArgumentError(
                name, f"shape [at least {num_tokens}, num_kv_heads, head_dim]", str(list(tensor.shape))
            )
    names = [*PLAIN_NAMES, *FP8_NAMES]
    if kv_cache_dtype not in names:
        raise ArgumentError("kv_cache_dtype", f"one of {', '.join(names)}", repr(kv_cache_dtype))
    if kv_cache_dtype in FP8_NAMES:
        wanted = FP8_NAMES[kv_cache_dtype]
        if key_cache.dtype not in (wanted, torch.uint8):
            raise ArgumentError(
                "key_cache",
                f"{wanted} or torch.uint8 for kv_cache_dtype={kv_cache_dtype!r}",
                str(key_cache.dtype),
            )
    else:
        wanted = PLAIN_NAMES[kv_cache_dtype] or key.dtype
        if key_cache.dtype in (*FP8, torch.uint8) or key_cache.dtype != wanted:
            raise ArgumentError(
                "key_cache", f"{wanted} for kv_cache_dtype={kv_cache_dtype!r}", str(key_cache.dtype)
            )
