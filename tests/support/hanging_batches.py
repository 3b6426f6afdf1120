"""Batches on which attention kernels once never ended, and their relatives by width, stride, dtype
and length.

What they have in common: keys that do not arrive by 16-byte asynchronous copies, since they are converted
from fp8, padded to a power of two or unaligned. There the compiler moves keys through registers and shared
memory, with barriers of its own.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.testing import Batch, BatchSpec, make_batch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """``slot_padding``: numbers behind the heads of each slot of the pools; ``shift``: numbers in front of
    the first head.

    ``more_queries``: by how much max_query_len exceeds the longest query.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    block_size: int = 16
    slot_padding: int = 0
    shift: int = 0
    sinks: bool = False
    more_queries: int = 0


def _in_wider_slots(pool: Tensor, padding: int, shift: int) -> Tensor:
    """The same pool as a view of slots that are wider by ``padding`` numbers, ``shift`` of them in front;
    those hold NaN."""
    blocks, slots, heads, width = pool.shape
    wide = torch.full((blocks, slots, shift + heads * width + padding), float("nan"), device=pool.device).to(
        pool.dtype
    )
    inner = wide[:, :, shift : shift + heads * width].unflatten(2, (heads, width))
    inner.copy_(pool)
    return inner


def make_hanging_batch(case: Case, device: torch.device | str = "cpu") -> Batch:
    """The case's batch, with fp8 pools, wider slots and a larger max_query_len where it asks for them;
    unwritten slots hold NaN."""
    batch = make_batch(
        BatchSpec("hanging", case.seq_lens, case.query_lens),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        dtype=case.dtype,
        sinks=case.sinks,
    )
    pools = [
        pool if case.kv_dtype is None else pool.to(case.kv_dtype) for pool in (batch.k_cache, batch.v_cache)
    ]
    k_cache, v_cache = (pool.to(device) for pool in pools)
    batch = batch.to(device)
    if case.slot_padding or case.shift:
        k_cache, v_cache = (
            _in_wider_slots(pool, case.slot_padding, case.shift) for pool in (k_cache, v_cache)
        )
    return replace(
        batch, k_cache=k_cache, v_cache=v_cache, max_query_len=batch.max_query_len + case.more_queries
    )


_MIXED = (1328, 400, 33, 1, 700, 90), (129, 1, 1, 1, 1, 5)
_DECODES = (16, 1, 900, 33, 17, 64, 250, 1000), (16, 1, 1, 1, 1, 1, 1, 1)
_CHUNKS = (1100, 20, 64, 300, 1), (200, 20, 1, 16, 1)
_FP8_MIXED = Case(6, 3, 48, *_MIXED, kv_dtype=FP8)
_NO_WINDOW = Case(
    12, 12, 59, (300, 256, 16, 16, 1, 1), (300, 256, 16, 16, 1, 1), {"window_left": 0}, sinks=True
)
_PADDED = Case(32, 4, 64, *_DECODES, slot_padding=4)
_CHUNKED = Case(10, 2, 72, *_CHUNKS, {"chunk_size": 16, "logits_soft_cap": 8.0}, kv_dtype=FP8)

#: The four that were seen to hang.
SEEN: dict[str, Case] = {
    "fp8_of_48": _FP8_MIXED,
    "window_0_of_59": _NO_WINDOW,
    "padded_slots": _PADDED,
    "fp8_chunks_of_72": _CHUNKED,
}
#: Those, and their relatives.
CASES: dict[str, Case] = {
    **SEEN,
    "bf16_of_48": replace(_FP8_MIXED, kv_dtype=None),
    "fp16_of_48": replace(_FP8_MIXED, dtype=torch.float16),
    "fp8_of_64": replace(_FP8_MIXED, head_dim=64),
    "fp8_of_128": replace(_FP8_MIXED, head_dim=128),
    "fp8_of_256": replace(_FP8_MIXED, head_dim=256),
    "e5m2_of_48": replace(_FP8_MIXED, kv_dtype=torch.float8_e5m2),
    "fp8_padded": replace(_FP8_MIXED, head_dim=64, slot_padding=4),
    "fp8_blocks_of_1": replace(_FP8_MIXED, block_size=1),
    "fp8_more_queries": replace(_FP8_MIXED, more_queries=400),
    "window_0_of_64": replace(_NO_WINDOW, head_dim=64),
    "window_0_padded": replace(_NO_WINDOW, head_dim=64, slot_padding=2),
    "window_0_fp8": replace(_NO_WINDOW, kv_dtype=FP8),
    "shifted_by_1": replace(_PADDED, shift=1, slot_padding=7),
    "padded_long": replace(_PADDED, seq_lens=(1400, *_DECODES[0][1:]), query_lens=(600, *_DECODES[1][1:])),
    "padded_of_128": replace(
        _PADDED, head_dim=128, seq_lens=(1400, *_DECODES[0][1:]), query_lens=(600, *_DECODES[1][1:])
    ),
    "chunks_bf16": replace(_CHUNKED, kv_dtype=None),
    "chunks_padded": replace(_CHUNKED, slot_padding=8),
    "chunks_of_128": replace(_CHUNKED, head_dim=128),
    "fp8_prompt_2k": Case(4, 2, 128, (2048,), (2048,), kv_dtype=FP8),
    "fp8_prompt_2k_of_64": Case(4, 2, 64, (2048, 2000), (2048, 2000), kv_dtype=FP8),
    "fp8_prompt_2k_of_80": Case(4, 2, 80, (2048, 3000), (2048, 64), kv_dtype=FP8),
    "fp8_prompt_16k": Case(2, 1, 128, (16384,), (16384,), kv_dtype=FP8),
    "bf16_prompt_2k": Case(4, 2, 128, (2048, 2000), (2048, 2000)),
    "padded_prompt_2k": Case(4, 2, 128, (2048, 2000), (2048, 2000), slot_padding=4),
}
