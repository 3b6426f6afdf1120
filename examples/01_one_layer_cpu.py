"""One attention layer over a paged cache: allocate blocks, prefill, decode, compare with dense attention.

No engine, no model library: pools, a block table and `PagedAttention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import torchpaged
from torchpaged import AttentionMetadata, BlockPool, PagedAttention, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16


def main() -> None:
    torch.manual_seed(0)
    attention = PagedAttention(HEADS, DIM, KV_HEADS)
    cache = PagedKVCache.uniform(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        block_size=BLOCK,
        num_blocks=32,
        dtype=torch.float32,
    )
    pool = BlockPool(cache.num_blocks)
    print(attention, "because", attention.choice.reason)
    print(cache.describe())

    # Two requests of 40 and 7 tokens: prefill all but the last 4 tokens, then decode those one by one.
    lengths = [40, 7]
    q, k, v = ([torch.randn(n, heads, DIM) for n in lengths] for heads in (HEADS, KV_HEADS, KV_HEADS))
    blocks = [pool.allocate(-(-n // BLOCK)) for n in lengths]
    print("blocks:", blocks, "free:", pool.num_free)
    outputs: list[list[torch.Tensor]] = [[], []]

    def step(counts: list[int], seen: list[int]) -> None:
        metadata = AttentionMetadata.from_lists(
            query_lens=counts,
            seq_lens=[s + c for s, c in zip(seen, counts, strict=True)],
            block_tables=blocks,
            block_size=BLOCK,
            num_blocks=cache.num_blocks,
        )
        query, key, value = (
            torch.cat([x[i][seen[i] : seen[i] + counts[i]] for i in range(2)]) for x in (q, k, v)
        )
        for i, out in enumerate(attention(query, key, value, cache[0], metadata).split(counts)):
            outputs[i].append(out)

    with torch.inference_mode():
        step([n - 4 for n in lengths], [0, 0])
        for i in range(4):
            step([1, 1], [n - 4 + i for n in lengths])

    for i in range(2):
        dense = [x[i].transpose(0, 1)[None] for x in (q, k, v)]
        want = F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(torch.cat(outputs[i]), want, rtol=1e-4, atol=1e-5)
    print("paged prefill + decode equal dense attention")

    try:
        pool.allocate(1000)
    except torchpaged.BlockPoolExhaustedError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
