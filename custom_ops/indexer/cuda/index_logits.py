"""index_logits of the ``cuda`` backend: few query tokens by the Hopper kernel, everything that it can't take
by the Triton kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda import gpu, specialised
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import hopper_or_triton, not_hopper, unaligned
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.check import check_index_logits

TILE, WIDTH = 64, 128
MAX_HEADS, MAX_TOKENS = 64, 512
_WARPGROUPS, _STAGES = 3, 3
#: With one token and at most so many keys the Triton kernel is taken: it is faster over 8,192 and as fast
#: over 32,768, and nothing between was timed (docs/log/indexer.md).
_FEW_KEYS = 16384
_DTYPES = (torch.bfloat16, torch.float16)


class LogitsSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    num_heads: int
    block_size: int
    half: bool
    fp8: bool
    causal: bool

    @classmethod
    def of(cls, call: IndexCall) -> LogitsSpec:
        """Of a call that `why_not` lets pass."""
        is_half = call.q.dtype == torch.float16
        return cls(call.q.shape[1], call.k_cache.shape[1], is_half, call.k_scale is not None, call.causal)

    def config(self) -> Config:
        """The constants."""
        return LOGITS.of(self, exact=True, WARPGROUPS=_WARPGROUPS, STAGES=_STAGES)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as logits_params.cuh counts it."""
        heads = next(n for n in (16, 32, 64) if self.num_heads <= n)
        tile = TILE * WIDTH * (1 if self.fp8 else 2)
        stages = _WARPGROUPS * _STAGES
        return stages * (tile + TILE * 4) + heads * WIDTH * 2 + (3 * MAX_TOKENS + 1 + 2 * heads) * 4


LOGITS = Table.of_file("indexer/cuda/logits_config.cuh")


def index_logits(call: IndexCall) -> None:
    """Launch; arguments as in ``custom_ops/indexer/schema.py``. Every choice here depends on shapes."""
    hopper_or_triton(
        call,
        call.q.device,
        route=lambda call: why_not(call, gpu.capability(call.q.device.index or 0)) or why_slower(call),
        check=check_index_logits,
        launch=launch,
        triton="torchpaged.custom_ops.indexer.triton.index_logits",
    )


def why_not(call: IndexCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take a call, or None. Shapes, dtypes, strides and addresses only."""
    q, keys, scales, block_size = call.q, call.k_cache, call.k_scale, call.k_cache.shape[1]
    if reason := not_hopper(capability):
        return reason
    if q.dim() != 3 or keys.dim() != 4 or not call.block_table.shape[0]:
        return "no requests, or shapes that the check refuses"
    if q.dtype not in (_DTYPES if scales is None else _DTYPES[:1]):
        return f"{q.dtype}, not bfloat16 or, without scales, float16"
    if q.shape[2] != WIDTH or not 0 < q.shape[1] <= MAX_HEADS or q.shape[0] > MAX_TOKENS:
        return f"{q.shape[0]} tokens x {q.shape[1]} heads of {q.shape[2]}"
    if block_size not in (16, 32) and block_size % TILE:
        return f"blocks of {block_size} tokens, not 16, 32 or a multiple of 64"
    if reason := unaligned(("q", q, 2), ("k_cache", keys, 2)):
        return reason
    if keys.stride(1) != WIDTH:
        return f"k_cache with strides {tuple(keys.stride())}: tokens of a block must be contiguous"
    if scales is not None and (scales.data_ptr() % 16 or scales.stride(0) % 4 or scales.stride(1) != 1):
        return f"k_scale with strides {scales.stride()}: blocks that begin at multiples of 16 bytes"
    return None


def why_slower(call: IndexCall) -> str | None:
    """Why the Triton kernel is faster for a call that `why_not` lets pass, or None."""
    tokens, columns = call.logits.shape
    return f"one token over {columns} keys" if tokens == 1 and columns <= _FEW_KEYS else None


def launch(call: IndexCall) -> None:
    """Launch a checked call that `why_not` lets pass."""
    if not call.logits.numel():
        return
    index = call.q.device.index or 0
    scale_block = 0 if call.k_scale is None else call.k_scale.stride(0)
    params = struct_of("index_logits.cu")(
        q=call.q.data_ptr(),
        keys=call.k_cache.data_ptr(),
        weights=call.weights.data_ptr(),
        scales=address(call.k_scale),
        logits=call.logits.data_ptr(),
        table=call.block_table.data_ptr(),
        seq_lens=call.seq_lens.data_ptr(),
        starts=call.query_start_loc.data_ptr(),
        q_token=call.q.stride(0),
        q_head=call.q.stride(1),
        w_token=call.weights.stride(0),
        key_block=call.k_cache.stride(0),
        key_slot=call.k_cache.stride(1),
        scale_block=scale_block,
        table_row=call.block_table.stride(0),
        logits_row=call.logits.stride(0),
        num_reqs=call.block_table.shape[0],
        num_tokens=call.q.shape[0],
        columns=call.logits.shape[1],
    )
    most = call.q.shape[0] * -(-call.logits.shape[1] // TILE)
    spec, grid = LogitsSpec.of(call), min(gpu.num_sms(index), most)
    specialised.launch("index_logits.cu", "index_logits", spec, index, grid, _WARPGROUPS * 128, params)
