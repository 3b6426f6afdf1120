"""An encoder-decoder of your own: the encoder on packed rows without padding, the decoder's keys and the
encoder's in paged caches. Each step of the decoder reads what cross attention wrote once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchpaged import PagedAttention, PagedKVCache
from torchpaged.layers import CrossAttention, EncoderAttention, encoder_metadata

VOCAB, WIDTH, HEADS, LAYERS, START, LIMIT = 128, 64, 4, 2, 1, 32


class Projections(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")})

    def heads(self, name: str, x: Tensor) -> Tensor:
        return self[name](x).unflatten(-1, (HEADS, -1))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = (HEADS, WIDTH // HEADS)
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.encoder = nn.ModuleList(Projections() for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Projections() for _ in range(LAYERS))
        self.crosses = nn.ModuleList(Projections() for _ in range(LAYERS))
        self.inside, self.own, self.cross = (
            EncoderAttention(*size),
            PagedAttention(*size),
            CrossAttention(*size),
        )

    def encode(self, sources: list[list[int]]) -> Tensor:
        """``[num_tokens, WIDTH]`` of all rows, one behind the other."""
        lens = [len(source) for source in sources]
        batch = encoder_metadata(lens)
        where = torch.cat([torch.arange(n) for n in lens])
        x = self.tokens(torch.tensor([token for source in sources for token in source])) + self.positions(
            where
        )
        for layer in self.encoder:
            q, k, v = (layer.heads(name, x) for name in "qkv")
            x = x + layer["out"](self.inside(q, k, v, batch).flatten(-2))
        return x

    def decode(self, ids: Tensor, encoded: Tensor | None, own: tuple, cross: tuple) -> Tensor:
        """Logits of packed tokens; ``own`` and ``cross``: a cache and its batch each."""
        x = self.tokens(ids) + self.positions(own[1].positions)
        for i, (layer, other) in enumerate(zip(self.decoder, self.crosses, strict=True)):
            q, k, v = (layer.heads(name, x) for name in "qkv")
            x = x + layer["out"](self.own(q, k, v, own[0][i], own[1]).flatten(-2))
            k, v = (None if encoded is None else other.heads(name, encoded) for name in "kv")
            x = x + other["out"](self.cross(other.heads("q", x), k, v, cross[0][i], cross[1]).flatten(-2))
        return self.head(x)

    @torch.inference_mode()
    def translate(self, sources: list[list[int]], new_tokens: int) -> list[list[int]]:
        make = {"num_blocks": 64, "block_size": 4, "dtype": torch.float32}
        own, cross = (PagedKVCache.uniform(LAYERS, HEADS, WIDTH // HEADS, **make) for _ in range(2))
        rows, sides = (cache.allocate(len(sources), max_seq_len=LIMIT) for cache in (own, cross))
        encoded: Tensor | None = self.encode(sources)
        written = sides.append([len(source) for source in sources])
        one, texts = [1] * len(sources), [[START] for _ in sources]
        for _ in range(new_tokens):
            ids, batch = torch.tensor([text[-1] for text in texts]), sides.cross(one, written)
            last = self.decode(ids, encoded, (own, rows.append(one)), (cross, batch)).argmax(-1).tolist()
            texts = [[*text, token] for text, token in zip(texts, last, strict=True)]
            encoded = written = None  # its keys lie in the cache
        return texts


if __name__ == "__main__":
    torch.manual_seed(0)
    model, sources = Translator().eval(), [[5, 17, 3], [99, 4, 21, 8, 60, 2, 33], [7]]
    together = model.translate(sources, 12)
    assert together == [model.translate([source], 12)[0] for source in sources]
    print(*together, sep="\n")
