"""mla_attention: lays tiles and parts out by shapes, and launches."""

from __future__ import annotations

import torch

from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.check import check_mla_attention
from torchpaged.custom_ops.mla.triton import config
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.compile_together import Launch
from torchpaged.custom_ops.triton.kernel_store import KernelRef

_ATTEND = KernelRef("mla.triton.attend", "mla_kernel", unspecialised=frozenset({10, 11, 12, 13, 14, 23}))
_MERGE = KernelRef("mla.triton.merge", "merge_kernel", unspecialised=frozenset({5, 6}))


def mla_attention(call: LatentCall) -> None:
    """Launch; arguments as in ``custom_ops/mla/schema.py``. Every choice here depends on shapes, never on
    lengths.

    Raises:
        ArgumentError: also for latents over 512 columns and rotated keys over 128.
    """
    launching.require_launchable(call.q)
    check_mla_attention(call)
    q, kv_cache, block_table, seq_lens, query_start_loc, out, lse, max_query_len, scale, causal = call
    (num_tokens, num_heads, width), rank = q.shape, out.shape[2]
    rope, num_reqs, block_size = width - rank, block_table.shape[0], kv_cache.shape[1]
    if q.dtype == torch.float64 or rank > config.MAX_RANK or rope > config.MAX_ROPE:
        raise ArgumentError(
            "kv_cache",
            f"at most {config.MAX_RANK} + {config.MAX_ROPE} columns of 16 or 32 bits for the triton backend",
            f"{rank} + {rope} of {q.dtype}",
            "use the reference backend",
        )
    if not num_reqs:
        call.as_attention().empty()
        return
    if not num_tokens:
        return
    rows = launching.next_power_of_2(num_heads) * launching.next_power_of_2(min(max_query_len, num_tokens))
    rank_pad, rope_pad = (max(16, launching.next_power_of_2(size)) for size in (rank, rope))
    chosen = config.tiles(rank_pad + rope_pad, rows, q.element_size(), _is_hopper(q.device))
    tile_heads = min(chosen.rows, launching.next_power_of_2(num_heads))
    tokens, head_tiles = chosen.rows // tile_heads, -(-num_heads // tile_heads)
    per_req = -(-max_query_len // tokens)
    num_tiles = num_tokens // tokens + num_reqs
    if num_reqs * per_req <= num_tiles:
        num_tiles = num_reqs * per_req
    else:
        per_req = 0
    programs, capacity = num_tiles * head_tiles, block_table.shape[1] * block_size
    parts = config.num_parts(programs, capacity, q.device, chosen)
    scratch = num_tokens * num_heads * parts if parts > 1 else 0
    part_acc = torch.empty(scratch * rank, dtype=torch.float32, device=q.device)
    part_state = torch.empty(scratch * 2, dtype=torch.float32, device=q.device)
    out_strides = (*out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)))
    sizes = {
        "NUM_HEADS": num_heads,
        "RANK": rank,
        "RANK_PAD": rank_pad,
    }
    arguments = (
        q,
        kv_cache,
        block_table,
        seq_lens,
        query_start_loc,
        out,
        lse,
        part_acc,
        part_state,
        scale,
        num_reqs,
        num_tokens,
        num_tiles,
        per_req,
        parts,
        *q.stride()[:2],
        *kv_cache.stride()[:2],
        *out_strides,
        block_table.stride(0),
    )
    Launch(
        _ATTEND,
        (programs * parts,),
        arguments,
        {
            **sizes,
            "ROPE": rope,
            "ROPE_PAD": rope_pad,
            "BLOCK_SIZE": block_size,
            "CAUSAL": causal,
            "SPLIT": parts > 1,
            "TILE_M": chosen.rows,
            "TILE_HEADS": tile_heads,
            "TILE_KV": chosen.keys,
            "INTERPRET": launching.INTERPRET,
            "num_warps": chosen.num_warps,
            "num_stages": chosen.num_stages,
        },
    )()
    if parts > 1:
        merged = (part_acc, part_state, query_start_loc, out, lse, num_reqs, parts, *out_strides)
        Launch(
            _MERGE,
            (num_tokens * num_heads,),
            merged,
            {**sizes, "MAX_PARTS": config.MAX_PARTS, "num_warps": 4},
        )()


def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return launching.INTERPRET
    return launching.capability(device.index or 0)[0] == 9
