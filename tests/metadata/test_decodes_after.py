"""The decode step behind a mixed batch, and bounds of batches."""

import pytest
import torch

import torchpaged
from torchpaged import ArgumentError, AttentionMetadata

BLOCK = 4
TABLES = [[1, 2], [3, 4, 5], [6, 7], [8, 9, 10]]


def batch(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    return AttentionMetadata.from_lists(query_lens, seq_lens, TABLES[: len(seq_lens)], block_size=BLOCK)


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
