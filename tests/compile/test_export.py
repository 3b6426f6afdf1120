"""`torch.export` of what takes a batch: it is an input as its tensors, whose lengths may be others later."""

import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from torchpaged import AttentionMetadata, PagedAttention, PagedKVCache


class Step(nn.Module):
    """Attention over pools that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_kv_heads": 2, "head_dim": 16, "block_size": 16, "num_blocks": 8}
        pools = PagedKVCache.uniform(num_layers=1, **sizes, dtype=torch.float32)
        self.attention = PagedAttention(num_heads=4, head_dim=16, num_kv_heads=2)
        self.keys, self.values = map(nn.Buffer, (pools[0].k_cache, pools[0].v_cache))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: AttentionMetadata) -> Tensor:
        return self.attention(query, key, value, (self.keys, self.values), batch)


def _batch(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    tables = [[2 * row + 1, 2 * row + 2] for row in range(len(seq_lens))]
    return AttentionMetadata.from_lists(query_lens, seq_lens, tables, block_size=16)


def _tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(count, 4, 16), torch.randn(count, 2, 16), torch.randn(count, 2, 16)


@torch.no_grad()
def test_a_batch_is_an_input() -> None:
    step, file = Step().eval(), io.BytesIO()
    torch.export.save(torch.export.export(step, (*_tokens(6), _batch([5, 1], [5, 20]))), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for seq_lens in ([9, 30], [5, 1]):
        call = *_tokens(6), _batch([5, 1], seq_lens)
        assert torch.equal(loaded(*call), step(*call))
    with pytest.raises(AssertionError, match="max_query_len"):  # a number, which the trace used
        loaded(*_tokens(6), _batch([3, 3], [3, 3]))


@torch.no_grad()
def test_a_batch_of_any_size() -> None:
    step = Step().eval()
    call = *_tokens(6), replace(_batch([5, 1], [5, 20]), query_lens=None)
    sizes = torch.export.ShapesCollection()
    for tensor in (*call[:3], *call[3].tensors().values()):
        sizes[tensor] = dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO)
    exported = torch.export.export(step, call, dynamic_shapes=sizes).module()
    other = *_tokens(9), replace(_batch([5, 3, 1], [9, 30, 4]), query_lens=None)
    assert torch.equal(exported(*other), step(*other))
