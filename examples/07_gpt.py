"""A GPT of your own on a paged cache: `allocate` gives rows that grow, `append` the batch of a step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 128, 64, 4, 2, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = PagedAttention(HEADS, WIDTH // HEADS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, pools: tuple[Tensor, ...], batch: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + self.out(self.attention(q, k, v, pools, batch).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, cache: PagedKVCache, batch: AttentionMetadata) -> Tensor:
        """Logits ``[num_tokens, VOCAB]`` of packed tokens ``ids [num_tokens]``."""
        x = self.tokens(ids) + self.positions(batch.positions)
        for block, pools in zip(self.blocks, cache, strict=True):
            x = block(x, pools, batch)
        return self.head(self.norm(x))


@torch.inference_mode()
def generate(model: GPT, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    cache = PagedKVCache.uniform(LAYERS, HEADS, WIDTH // HEADS, num_blocks=64, dtype=torch.float32)
    rows, texts = cache.allocate(len(prompts), max_seq_len=CONTEXT), [list(prompt) for prompt in prompts]
    step = texts
    for _ in range(new_tokens):
        batch = rows.append([len(tokens) for tokens in step])
        logits = model(torch.tensor([token for tokens in step for token in tokens]), cache, batch)
        last = logits[batch.query_start_loc[1:].long() - 1].argmax(-1).tolist()
        step = [[token] for token in last]
        texts = [text + new for text, new in zip(texts, step, strict=True)]
    return texts


if __name__ == "__main__":
    torch.manual_seed(0)
    gpt, prompts = GPT().eval(), [[5, 17, 3], [99, 4, 21, 8, 60, 2, 33], [7]]
    together = generate(gpt, prompts, 12)
    assert together == [generate(gpt, [prompt], 12)[0] for prompt in prompts]
    print(*together, sep="\n")
