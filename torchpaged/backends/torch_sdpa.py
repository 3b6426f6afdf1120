"""The ``torch_sdpa`` backend: ``scaled_dot_product_attention`` over keys and values gathered from the pool.
Everywhere; never the fastest.

Queries are cut into tiles of one request each (query_tiles.py); each tile's blocks are copied out of the
pool, as many as the block table is wide or as a window can show. Shapes follow from the batch's shapes, so
that one graph serves all lengths, and what is gathered at a time stays below a quarter of a GiB. Soft cap,
ALiBi and log-sum-exp, which torch's function lacks or rounds, run as two plain products around a softmax in
float32. A sink is one more key of zeros, whose score is the bias.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.library_op import attention_op
from torchpaged.backends.query_tiles import listed_blocks, most_keys, query_tiles, visible_blocks
from torchpaged.backends.spec import GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall

_TILE_Q = 64  # of queries of more than one token
_MOST_BYTES = 1 << 28  # gathered at a time
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _attend(call: AttentionCall) -> None:
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, out, lse = call[:8]
    alibi_slopes, sinks, max_query_len = call.alibi_slopes, call.sinks, call.max_query_len
    num_tokens, block_size = q.shape[0], k_cache.shape[1]
    mask = call.mask
    tile_q = min(1 << (max_query_len - 1).bit_length(), _TILE_Q)
    most = most_keys(mask, tile_q)
    width = block_table.shape[1] if most is None else min(block_table.shape[1], (most - 1) // block_size + 2)
    tiles = query_tiles(seq_lens, query_start_loc, num_tokens, tile_q)
    first, count = visible_blocks(tiles, mask, block_size)
    blocks = listed_blocks(block_table, tiles, first, count, width)
    column = torch.arange(width * block_size, device=q.device)
    key = (first[:, None] * block_size + column)[:, None]  # [N, 1, L], positions
    exists = key < (torch.minimum((first + count) * block_size, tiles.seq_lens))[:, None, None]
    scores = _Scores(call.scale, call.logits_soft_cap, alibi_slopes, sinks)
    bytes_of_tile = (
        width * block_size * k_cache.shape[2] * (k_cache.shape[3] + v_cache.shape[3]) * q.element_size()
    )
    step = max(_MOST_BYTES // max(bytes_of_tile, 1), 1)
    # torch's function takes a bias in the queries' dtype alone, which would round distances
    of_other_dtype = sinks is not None and sinks.dtype != q.dtype
    by_hand = lse is not None or bool(call.logits_soft_cap) or alibi_slopes is not None or of_other_dtype
    parts = []
    for begin in range(0, len(blocks), step):
        part = slice(begin, begin + step)
        query = tiles.position[part, :, None]
        seen = exists[part] & (query >= 0) & mask.sees(query, key[part])
        # slots that may hold NaN, which neither a bias of -inf nor a weight of 0 hides
        unused = ~exists[part, 0, :, None, None]
        k, v = (
            _gathered(cache, blocks[part], q.dtype, of_fp8).masked_fill(unused, 0.0).transpose(1, 2)
            for cache, of_fp8 in ((k_cache, call.scales.k_scale), (v_cache, call.scales.v_scale))
        )
        rows = q[tiles.token[part]].transpose(1, 2)
        parts.append(
            _by_hand(scores, rows, k, v, seen[:, None], key[part] - query)
            if by_hand
            else _by_torch(scores, rows, k, v, seen[:, None])
        )
    _scatter(torch.cat([y for y, _ in parts]), tiles.row_of_token, tiles.is_query, 0.0, out)
    if lse is not None:
        totals = [total for _, total in parts if total is not None]
        _scatter(
            torch.cat(totals)[..., None], tiles.row_of_token, tiles.is_query, float("-inf"), lse[..., None]
        )


def _gathered(cache: Tensor, blocks: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Keys or values of each tile, ``[N, L, num_kv_heads, width]``."""
    x = cache[blocks].flatten(1, 2)
    if cache.dtype == dtype:
        return x
    x = x.float()
    return (x if scale is None else x * scale.view(1, 1, -1, 1)).to(dtype)


class _Scores(NamedTuple):
    """How scores become logits."""

    scale: float
    soft_cap: float
    alibi_slopes: Tensor | None
    sinks: Tensor | None


def _by_torch(scores: _Scores, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor | None]:
    """``[N, H, TILE_Q, head_dim_v]``, by torch's function.

    ``q [N, H, TILE_Q, D]``; ``k, v [N, num_kv_heads, L, *]``.
    """
    bias = seen
    if scores.sinks is not None:
        bias = torch.where(seen, 0.0, float("-inf")).to(q.dtype)
        of_head = scores.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], -1)
        bias = torch.cat([bias.expand(-1, q.shape[1], -1, -1), of_head], -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, scale=scores.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.masked_fill(~seen.any(-1, keepdim=True), 0.0), None


def _by_hand(
    scores: _Scores, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, distance: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The same with all options, and the log-sum-exp ``[N, H, TILE_Q]``, as two products in float32.
    ``distance [N, TILE_Q, L]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scores.scale
    if scores.soft_cap:
        s = scores.soft_cap * torch.tanh(s / scores.soft_cap)
    if scores.alibi_slopes is not None:
        s = s + scores.alibi_slopes.view(-1, 1, 1) * distance[:, None]
    s = s.masked_fill(~seen, float("-inf"))
    total = torch.logsumexp(s, -1, keepdim=True)
    if scores.sinks is not None:
        total = torch.logaddexp(total, scores.sinks.float().view(-1, 1, 1))
    total = total.masked_fill(total == float("inf"), float("nan"))  # as everywhere: docs/ops.md
    sees = seen.any(-1, keepdim=True)
    y = torch.matmul(torch.exp(s - total).masked_fill(~sees, 0.0), v.float()).to(q.dtype)
    return y, total.masked_fill(~sees, float("-inf"))[..., 0]


def _scatter(rows: Tensor, row_of_token: Tensor, is_query: Tensor, padding: float, out: Tensor) -> None:
    """Rows of tiles, ``[N, H, TILE_Q, width]``, as tokens: into ``out [T, H, width]``."""
    packed = rows.transpose(1, 2).flatten(0, 1)[row_of_token]
    out.copy_(torch.where(is_query[:, None, None], packed, padding))


CAPABILITIES = Capabilities(
    device_types=("cpu", "cuda"),
    dtypes=_FLOATS,
    kv_dtypes=(*_FLOATS, torch.float8_e4m3fn, torch.float8_e5m2),
    graph_support=GraphSupport.ALWAYS,
)
BACKEND = Backend(
    name="torch_sdpa",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_sdpa", _attend, CAPABILITIES, "torch_sdpa"),
    unavailable=lambda: None,
)
