"""A small GPT of `PagedAttention` layers that share a session, two sequences to feed it in uneven pieces, and
what they give without a cache."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache
from torchpaged.backends import Session
from torchpaged.graphs import DecodeGraphRunner, PackedGraphRunner, TapeCapture

LAYERS, HEADS, KV_HEADS, DIM, BLOCK, BLOCKS, WIDTH, VOCAB = 2, 4, 2, 16, 4, 60, 12, 50
HIDDEN = HEADS * DIM


class Decoder(nn.Module):
    def __init__(self, session: Session | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.attention = PagedAttention(HEADS, DIM, KV_HEADS, block_size=BLOCK, session=session)

    def forward(self, x: Tensor, pools: Any, metadata: AttentionMetadata | None) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(len(x), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
        if metadata is None:  # one whole sequence, without a cache
            heads = (t.transpose(0, 1)[None] for t in (q, k, v))
            y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        else:
            y = self.attention(q, k, v, pools, metadata)
        x = x + self.out(y.reshape(len(x), HIDDEN))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.session = session
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(Decoder(session) for _ in range(LAYERS))
        self.cache = PagedKVCache.uniform(
            LAYERS, KV_HEADS, DIM, block_size=BLOCK, num_blocks=BLOCKS, dtype=torch.float32
        )

    def forward(self, input_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        x = self.tokens(input_ids) + self.places(metadata.positions)
        for layer, pools in zip(self.layers, self.cache, strict=True):
            x = layer(x, pools, metadata)
        return x @ self.tokens.weight.T

    def dense(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(len(input_ids)))
        for layer in self.layers:
            x = layer(x, None, None)
        return x @ self.tokens.weight.T


TABLES = [list(range(1 + WIDTH * i, 1 + WIDTH * (i + 1))) for i in range(4)]
TOKENS = torch.arange(4 * 24).view(4, 24) * 7 % VOCAB


def batch(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    tables = TABLES[: len(seq_lens)]
    return AttentionMetadata.from_lists(
        query_lens, seq_lens, tables, block_size=BLOCK, num_blocks=BLOCKS, max_blocks_per_req=WIDTH
    )


def fed(query_lens: list[int], seq_lens: list[int]) -> Tensor:
    return torch.cat(
        [TOKENS[i, end - n : end] for i, (n, end) in enumerate(zip(query_lens, seq_lens, strict=True))]
    )


def close_to_dense(gpt: GPT, logits: Tensor, query_lens: list[int], seq_lens: list[int]) -> None:
    whole = [
        gpt.dense(TOKENS[i, :end])[end - n :]
        for i, (n, end) in enumerate(zip(query_lens, seq_lens, strict=True))
    ]
    torch.testing.assert_close(logits, torch.cat(whole), rtol=1e-4, atol=1e-4)


#: Two sequences in uneven pieces: query and sequence lengths of each step.
STEPS = [([5, 4], [5, 4]), ([1, 4], [6, 8]), ([1, 1], [7, 9]), ([9, 1], [16, 10]), ([1, 1], [17, 11])]


def decode_runner(gpt: GPT, **options: Any) -> DecodeGraphRunner:
    settings = {"max_batch_size": 4, "max_blocks_per_req": WIDTH, "block_size": BLOCK, "compile": False}
    return DecodeGraphRunner(gpt, session=gpt.session, **{**settings, **options})


def check_packed_steps(gpt: GPT) -> None:
    """Captured steps of all lengths, one graph per number of tokens."""

    def step(input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor) -> Tensor:
        return gpt(input_ids, metadata)[logits_indices]

    sizes = {"max_num_reqs": 3, "max_blocks_per_req": WIDTH, "block_size": BLOCK}
    runner = PackedGraphRunner(
        step, buckets=[8, 16], capture=TapeCapture(), session=gpt.session, debug=True, **sizes
    )
    for query_lens, seq_lens in STEPS:
        ends = [sum(query_lens[: i + 1]) - 1 for i in range(2)]
        logits = runner.run(fed(query_lens, seq_lens).tolist(), query_lens, seq_lens, TABLES[:2], ends)
        close_to_dense(gpt, logits, [1, 1], seq_lens)
