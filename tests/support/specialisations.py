"""Specialisations of attention kernels for tests: layers of Llama 3 8B unless said otherwise."""

from typing import Any

import torch

from torchpaged.custom_ops.attention.call import Specialisation

#: Compute capability -> bytes of shared memory of a multiprocessor and, at most, of a CTA (CUDA C++
#: programming guide, compute capabilities).
SHARED_MEMORY = {
    capability: (kib << 10, (kib - 1) << 10)
    for capability, kib in {
        (8, 0): 164,
        (8, 6): 100,
        (8, 9): 100,
        (9, 0): 228,
        (10, 0): 228,
        (12, 0): 100,
    }.items()
}


def specialisation(
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 128,
    group: int = 4,
    num_kv_heads: int = 8,
    block_size: int = 16,
    *,
    dim_v: int = 0,
    kv_dtype: torch.dtype | None = None,
    fp8_queries: bool = False,
    **features: Any,
) -> Specialisation:
    """Pools with heads next to each other in a slot; ``features``: the fields from ``causal`` on."""
    dim_v = dim_v or dim
    strides = tuple((block_size * num_kv_heads * d, num_kv_heads * d, d) for d in (dim, dim_v))
    sizes = (group, num_kv_heads, dim, dim_v, block_size)
    return Specialisation(dtype, kv_dtype or dtype, fp8_queries, *sizes, *strides, **features)
