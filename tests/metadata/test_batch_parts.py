"""Counts and parts of a batch, and the decode step behind a mixed one."""

from __future__ import annotations

import pytest
import torch

import torchpaged
from torchpaged import ArgumentError, AttentionMetadata, PagedAttention

BLOCK = 4
TABLES = [[1, 2], [3, 4, 5], [6, 7], [8, 9, 10]]


def batch(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    return AttentionMetadata.from_lists(query_lens, seq_lens, TABLES[: len(seq_lens)], block_size=BLOCK)


def test_counts() -> None:
    mixed = batch([1, 1, 3, 6], [5, 9, 3, 8])
    assert (mixed.num_decodes, mixed.num_decode_tokens, mixed.num_prefills, mixed.num_prefill_tokens) == (
        2,
        2,
        2,
        9,
    )
    padded = batch([1, 0, 3], [5, 0, 3])
    assert (padded.num_decodes, padded.num_prefills, padded.num_prefill_tokens) == (1, 1, 3)
    assert mixed.to("cpu").num_prefills == 2
    bare = AttentionMetadata(mixed.block_table, mixed.seq_lens, mixed.query_start_loc, None, None, 6)
    with pytest.raises(ValueError, match="query_lens: .*from_lists"):
        _ = bare.num_prefills


@pytest.mark.parametrize(
    "lens", [([1, 1, 3, 6], [5, 9, 3, 8]), ([1, 0, 2, 5], [5, 0, 3, 8]), ([1, 5, 0, 2], [8, 9, 0, 4])]
)
def test_the_parts_are_the_whole(lens: tuple[list[int], list[int]]) -> None:
    """Attention of both parts, each written and computed by itself into its slice, is attention of the
    batch."""
    torch.manual_seed(0)
    whole = batch(*lens)
    module = PagedAttention(4, 16, 2)
    pools = torch.randn(11, BLOCK, 2, 16), torch.randn(11, BLOCK, 2, 16)
    again = tuple(pool.clone() for pool in pools)
    q, k, v = (torch.randn(whole.num_tokens, heads, 16) for heads in (4, 2, 2))
    want = module(q, k, v, pools, whole)
    out = torch.full_like(want, float("nan"))
    decodes, prefills = whole.split_decodes_and_prefills()
    assert decodes is not None
    assert prefills is not None
    cut = whole.num_decode_tokens
    assert decodes.max_query_len == 1
    assert decodes.num_tokens == cut
    assert prefills.num_decodes == 0
    for part, tokens in ((decodes, slice(cut)), (prefills, slice(cut, None))):
        module(q[tokens], k[tokens], v[tokens], again, part, out=out[tokens])
    torch.testing.assert_close(out, want)
    assert all(map(torch.equal, again, pools))
    assert decodes.block_table.data_ptr() == whole.block_table.data_ptr()


def test_one_part_alone() -> None:
    only = batch([1, 1], [5, 9])
    assert only.split_decodes_and_prefills() == (only, None)
    only = batch([2, 3], [5, 9])
    assert only.split_decodes_and_prefills() == (None, only)
    with pytest.raises(ArgumentError, match="query_lens: .*one in row 1, behind row 0 with 3"):
        batch([3, 1], [5, 9]).split_decodes_and_prefills()


def test_the_step_behind_a_mixed_one() -> None:
    """A decode, a prefill that has just ended, one that goes on, and a padding row."""
    mixed = batch([1, 5, 3, 0], [5, 9, 7, 0])
    after = mixed.decodes_after(unfinished=[2])
    ids = torch.zeros(4, dtype=torch.int64)
    torchpaged.advance_step(
        torch.tensor([50, 60, 70, 80]),
        after.block_table,
        ids,
        after.positions,
        after.seq_lens,
        after.slot_mapping,
        block_size=BLOCK,
    )
    assert ids.tolist() == [50, 60, 0, 0]
    want = AttentionMetadata.from_lists([1, 1, 0, 0], [6, 10, 0, 0], TABLES, block_size=BLOCK)
    assert after.seq_lens.tolist() == [6, 10, 0, 0]
    assert after.slot_mapping is not None
    assert after.positions is not None
    assert want.slot_mapping is not None
    assert after.slot_mapping.tolist() == [*want.slot_mapping.tolist(), -1, -1]
    assert after.positions.tolist() == [5, 9, 0, 0]
    assert after.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert mixed.seq_lens.tolist() == [5, 9, 7, 0]
    assert after.max_query_len == 1
    with pytest.raises(ArgumentError, match="unfinished"):
        mixed.decodes_after(unfinished=[4])


def test_trees_go_with_their_tokens() -> None:
    batch = AttentionMetadata.from_lists(
        [1, 3], [9, 20], [[1, 2], [3, 4]], block_size=16, tree_parents=[None, [-1, 0, 0]]
    )
    decodes, prefills = batch.split_decodes_and_prefills()
    assert decodes is not None
    assert prefills is not None
    assert decodes.tree_mask.tolist() == [1]
    assert prefills.tree_mask.tolist() == [1, 0b11, 0b101]
    assert prefills.positions.tolist() == [17, 18, 18]
    assert batch.to("meta").tree_mask.is_meta


def test_a_bound_below_the_longest_query_is_refused() -> None:
    """Kernels are chosen by it, and on a GPU the lengths are not looked at."""
    with pytest.raises(
        ArgumentError, match=r"max_query_len: expected at least the longest query \(3\), got 1"
    ):
        AttentionMetadata.from_lists([1, 3], [4, 7], [[1], [2, 3]], block_size=4, max_query_len=1)


def test_no_decodes_behind_trees() -> None:
    trees = AttentionMetadata.from_lists([3], [7], [[1, 2]], block_size=4, tree_parents=[[-1, -1, 0]])
    with pytest.raises(
        ArgumentError, match="tree_mask: expected None: the next step would read the keys of every"
    ):
        trees.decodes_after()
