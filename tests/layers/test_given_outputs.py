"""``out=`` of the module and of the checked function: written, returned, traced without a copy, and refused
where it can't be written into."""

import pytest
import torch
from torch import Tensor

import torchpaged
from torchpaged import ArgumentError, AttentionMetadata, PagedAttention

HEADS, KV_HEADS, DIM, DIM_V, BLOCK = 4, 2, 16, 24, 4


def batch() -> AttentionMetadata:
    return AttentionMetadata.from_lists([2, 1, 3], [5, 9, 3], [[1, 2], [3, 4, 5], [6]], block_size=BLOCK)


def inputs() -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    pools = torch.randn(7, BLOCK, KV_HEADS, DIM), torch.randn(7, BLOCK, KV_HEADS, DIM_V)
    return torch.randn(6, HEADS, DIM), torch.randn(6, KV_HEADS, DIM), torch.randn(6, KV_HEADS, DIM_V), pools


@pytest.mark.parametrize("compiled", [False, True])
def test_module(compiled: bool) -> None:
    """Of any leading dimensions; a slice of a larger tensor too. NaN in it does no harm."""
    q, k, v, pools = inputs()
    module = PagedAttention(HEADS, DIM, KV_HEADS, head_dim_v=DIM_V)
    call = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    want = module(q, k, v, pools, batch())
    room = torch.full((6, HEADS, 2 * DIM_V), float("nan"))
    assert call(q, k, v, pools, batch(), out=room[..., DIM_V:]).data_ptr() == room[..., DIM_V:].data_ptr()
    assert torch.equal(room[..., DIM_V:], want)
    assert bool(room[..., :DIM_V].isnan().all())
    out = torch.full((2, 3, HEADS, DIM_V), float("nan"))
    got = call(q.view(2, 3, HEADS, DIM), k, v, pools, batch(), out=out)
    assert got is out
    assert torch.equal(out.flatten(0, 1), want)


@pytest.mark.parametrize("compiled", [False, True])
def test_function(compiled: bool) -> None:
    q, _, _, pools = inputs()
    meta = batch()

    def call(q: Tensor, out: Tensor | None = None) -> Tensor:
        tables = (meta.block_table, meta.seq_lens, meta.query_start_loc)
        return torchpaged.paged_attention(q, *pools, *tables, max_query_len=3, out=out)

    want = call(q)
    out = torch.full_like(want, float("nan"))
    got = (torch.compile(call, backend="eager", fullgraph=True) if compiled else call)(q, out)
    assert got is out
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("argument", "out"),
    [
        ("out", torch.zeros(6, HEADS, DIM)),
        ("out", torch.zeros(6, HEADS, DIM_V, dtype=torch.bfloat16)),
        ("out", torch.zeros(6, DIM_V, HEADS).transpose(1, 2)),
        ("out", torch.zeros(1, HEADS, DIM_V).expand(6, -1, -1)),
        ("out", torch.zeros(7 * DIM_V).as_strided((6, HEADS, DIM_V), (DIM_V, 4, 1))),
        ("out", torch.zeros(3, 2, HEADS, DIM_V).transpose(0, 1)),
        ("value", None),
        ("out", "no tensor"),
    ],
)
def test_what_cannot_be_written_into(argument: str, out: Tensor | None) -> None:
    """Before anything is written."""
    q, k, v, pools = inputs()
    before = [pool.clone() for pool in pools]
    if out is None:  # the values' own memory
        room = torch.randn(6, HEADS + KV_HEADS, DIM_V)
        v, out = room[:, :KV_HEADS], room[:, KV_HEADS - 1 : -1]
    module = PagedAttention(HEADS, DIM, KV_HEADS, head_dim_v=DIM_V)
    if isinstance(out, Tensor) and out.dim() == 4:
        q = q.view(2, 3, HEADS, DIM)
    with pytest.raises(ArgumentError) as error:
        module(q, k, v, pools, batch(), out=out)
    assert error.value.argument == argument, error.value
    assert all(map(torch.equal, pools, before))
