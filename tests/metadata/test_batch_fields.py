"""The table of a batch's fields, and the slot arithmetic: every place that builds a batch agrees
with both; the decode step behind a mixed one."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchpaged import ArgumentError, AttentionMetadata, PagedAttention
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.engine.device import DecodeRows
from torchpaged.graphs import PackedBuffers
from torchpaged.graphs.buffers import DecodeBatch, DecodeBuffers
from torchpaged.graphs.packed_buffers import PackedBatch
from torchpaged.metadata.fields import (
    FIELDS,
    METADATA_FIELDS,
    BatchSizes,
    make_batch_tensors,
    pad_batch_tensors,
)
from torchpaged.metadata.host import slot_of, slots_at, slots_between

BLOCK = 4
BUILDERS: dict[str, tuple[Callable[[], AttentionMetadata], BatchSizes]] = {
    "lists": (
        lambda: AttentionMetadata.from_lists([2, 1], [5, 1], [[3, 7], [2]], block_size=BLOCK),
        BatchSizes(2, 3, 2),
    ),
    "decode": (lambda: DecodeBuffers(4, 3, BLOCK, "cpu").view(2)[1], BatchSizes(2, 2, 3)),
    "packed": (lambda: PackedBuffers([8, 16], 2, 3, BLOCK, "cpu").view(8)[1], BatchSizes(2, 8, 3)),
    "rows": (
        lambda: DecodeRows(4, 3, BLOCK, 50, "cpu", BACKEND_OPS["reference"]).view(2)[1],
        BatchSizes(2, 2, 3),
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_keeps_to_the_table(name: str) -> None:
    build, sizes = BUILDERS[name]
    metadata = build()
    for field in METADATA_FIELDS:
        tensor = getattr(metadata, field)
        assert (tensor.dtype, tuple(tensor.shape)) == (FIELDS[field].dtype, FIELDS[field].shape(sizes)), field
        assert not tensor.is_inference()


def test_padding_is_what_the_table_says() -> None:
    sizes = BatchSizes(3, 5, 2)
    tensors = make_batch_tensors(FIELDS, sizes, "cpu")
    fresh = {name: tensor.clone() for name, tensor in tensors.items()}
    assert {name: int(tensor.flatten()[0]) for name, tensor in tensors.items()} == {
        name: -1 if name == "slot_mapping" else 0 for name in FIELDS
    }
    for tensor in tensors.values():
        tensor.fill_(9)
    part = BatchSizes(2, 4, 2)
    pad_batch_tensors(tensors, part)
    for name, tensor in tensors.items():
        view = FIELDS[name].view(tensor, part)
        assert torch.equal(view, FIELDS[name].view(fresh[name], part)), name
        assert int((tensor == 9).sum()) == tensor.numel() - view.numel(), name
    assert FIELDS["query_start_loc"].pad([0, 2, 5], 5).tolist() == [0, 2, 5, 5, 5]
    assert FIELDS["slot_mapping"].pad([7], 3).tolist() == [7, -1, -1]


@pytest.mark.parametrize(
    "start, end", [(0, 0), (0, 1), (3, 4), (3, 9), (4, 8), (5, 6), (-3, 2), (-2, 0), (0, 12), (-70, 10)]
)
def test_slots_are_the_same_on_the_host_and_on_the_device(start: int, end: int) -> None:
    blocks = [6, 2, 9]
    want = [blocks[p // BLOCK] * BLOCK + p % BLOCK if p >= 0 else -1 for p in range(start, end)]
    assert slots_between(start, end, blocks, BLOCK).tolist() == want
    assert [slot_of(p, blocks, BLOCK) for p in range(max(start, 0), end)] == want[max(-start, 0) :]
    table, positions = torch.tensor([blocks, blocks], dtype=torch.int32), torch.arange(start, end)
    assert slots_at(positions.expand(2, -1), table, BLOCK).tolist() == [want, want]


def test_a_batch_without_slots_writes_nothing_silently() -> None:
    full = AttentionMetadata.from_lists([1], [1], [[1]], block_size=BLOCK)
    bare = AttentionMetadata(full.block_table, full.seq_lens, full.query_start_loc, None, None, 1)
    assert bare.num_reqs == 1
    assert bare.to("cpu").positions is None
    with pytest.raises(ArgumentError, match="slot_mapping: expected"):
        bare.num_tokens
    x, pools = torch.ones(1, 2, 8), tuple(torch.zeros(2, BLOCK, 2, 8) for _ in range(2))
    attention: Any = PagedAttention(2, 8, backend="reference")
    with pytest.raises(ArgumentError, match="metadata: expected a slot_mapping"):
        attention(x, x, x, pools, bare)
    assert not pools[0].any()
    assert torch.equal(attention(x, None, None, pools, bare), torch.zeros(1, 2, 8))


@pytest.mark.parametrize("kind", ["array", torch.int16, torch.uint8])
def test_integers_of_any_kind_make_the_same_batch(kind: Any) -> None:
    """Of few bits they would wrap around: block 2,000 of 32 tokens has slots that 16 bits can't hold."""
    block, size = (3, 128) if kind is torch.uint8 else (2000, 32)
    blocks = [[7, block], [block + 1, 5], [9, 10, 11, 12]]
    lists = [1, 2 * size - 10, 100], [size + 9, 2 * size - 10, 100], blocks

    def of(numbers: list[int]) -> Any:
        return array("q", numbers) if kind == "array" else torch.tensor(numbers, dtype=kind)

    expected = AttentionMetadata.from_lists(*lists, block_size=size)
    given = (of(lists[0]), of(lists[1]), [of(blocks) for blocks in lists[2]])
    batch = AttentionMetadata.from_lists(*given, block_size=size)
    assert (batch.query_lens, batch.max_query_len) == (expected.query_lens, expected.max_query_len)
    packed, decodes = PackedBuffers([512], 3, 4, size, "cpu"), DecodeBuffers(3, 4, size, "cpu")
    tokens = sum(lists[0])
    packed.put(PackedBatch(range(tokens), *given, [0]), 512)
    decodes.put(DecodeBatch(of([1, 2, 3]).tolist(), given[1], given[2]), 3)
    views = packed.view(512)[1], AttentionMetadata.from_lists([1, 1, 1], *lists[1:], block_size=size)
    for name, tensor in expected.tensors().items():
        assert torch.equal(getattr(batch, name), tensor), name
    for name in ("slot_mapping", "positions"):
        assert torch.equal(getattr(views[0], name)[:tokens], getattr(expected, name)), name
        assert torch.equal(getattr(decodes, name), getattr(views[1], name)), name


def test_a_batch_keeps_nothing_of_what_it_was_made_from() -> None:
    seq_lens = array("i", [40, 50])
    metadata = AttentionMetadata.from_lists([1, 1], seq_lens, [[1, 2, 3], [4, 5, 6, 7]], block_size=16)
    seq_lens[0] = 7
    seq_lens.extend(range(10_000))
    assert metadata.seq_lens.tolist() == [40, 50]


@pytest.mark.parametrize("name", ["query_lens", "seq_lens"])
def test_lengths_that_can_be_read_once_are_refused(name: str) -> None:
    lens: dict[str, Any] = {"query_lens": [3, 4], "seq_lens": [3, 4]} | {name: iter([3, 4])}
    with pytest.raises(ArgumentError, match=f"{name}: expected a list of integers, got <list_iterator"):
        AttentionMetadata.from_lists(**lens, block_tables=[[1], [2]], block_size=16, num_blocks=8)


@pytest.mark.parametrize("kind", [bytes, bytearray, set, dict.fromkeys])
def test_blocks_as_bytes_are_refused(kind: Callable[[list[int]], Any]) -> None:
    with pytest.raises(ArgumentError, match="block_tables: expected a list of blocks for each request"):
        AttentionMetadata.from_lists([1], [4], [kind([1, 2, 3, 4])], block_size=1)


def test_a_bound_below_the_longest_query_is_refused() -> None:
    """Kernels are chosen by it, and on a GPU the lengths are not looked at."""
    with pytest.raises(
        ArgumentError, match=r"max_query_len: expected at least the longest query \(3\), got 1"
    ):
        AttentionMetadata.from_lists([1, 3], [4, 7], [[1], [2, 3]], block_size=4, max_query_len=1)
