"""Shared prefixes: the groups found, attention equal to the plain path's, one graph for all, and refusals."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torchpaged
from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.prefixes import PrefixGroup, SharedPrefixes, cascade_attention, find_prefix_groups

BLOCK = 4


def find(tables: list[list[int]], lens: list[int], queries: list[int] | None = None) -> Any:
    return find_prefix_groups(tables, queries or [1] * len(lens), lens, block_size=BLOCK)


def test_groups_by_hand() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 8, 7, 6], [1, 2, 3, 10]]
    assert find(tables, [14, 15, 16, 13]) == [PrefixGroup((0, 1, 3), 3)]
    # the block with the first query token is not shared, even where all have it
    assert find(tables, [14, 15, 16, 12]) == [PrefixGroup((0, 1, 3), 2)]
    assert find([[1, 2]] * 2, [8, 8], [4, 4]) == []  # more query tokens than the prefix has
    assert find([[1], [1]], [1, 1]) == []
    assert find([], []) == []


def test_a_longer_prefix_of_some() -> None:
    """One group of all, or the longer prefix of some of them: whichever saves more."""
    base = [1, 2]
    long = [base + list(range(10, 20)) + [50 + i] for i in range(3)]
    short = [[*base, 70 + i] for i in range(2)]
    lens = [4 * 12 + 2] * 3 + [10, 11]
    assert find(long + short, lens) == [PrefixGroup((0, 1, 2), 12), PrefixGroup((3, 4), 2)]
    many = [[*base, 70 + i] for i in range(30)]
    # one block more for two of them saves less than it costs; 32 query tokens are 4 parts over 8 tokens
    two = [[*base, 10, 50 + i] for i in range(2)]
    groups = find(two + many, [14] * 2 + [10] * 30)
    assert [row for group in groups for row in group.rows] == list(range(32))
    assert [(len(group.rows), group.num_blocks) for group in groups] == [(8, 2)] * 4


def test_more_queries_than_a_prefix_has_tokens() -> None:
    """A group is cut into parts of at most as many; a request of more of its own is left out."""
    tables = [[1, 2, 10 + i, 20 + i, 30 + i] for i in range(6)]
    groups = find(tables, [8 + q for q in (3, 3, 2, 1, 9, 7)], [3, 3, 2, 1, 9, 7])
    assert groups == [PrefixGroup((0, 1, 2), 2), PrefixGroup((3, 5), 2)]


def batch(
    rng: random.Random, *, num_reqs: int, width: int, blocks: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Requests whose tables start with one of some prefixes, or with none."""
    ids = list(range(1, blocks))
    rng.shuffle(ids)
    common = [[ids.pop() for _ in range(n)] for n in (6, 3)]
    common.append([*common[0][:4], ids.pop(), ids.pop()])
    tables, queries, lens = [], [], []
    for _ in range(num_reqs):
        start = rng.choice([*common, []])
        start = start[: rng.randint(0, len(start))]
        query = rng.choice([1, 1, 1, 5])
        own = rng.randint(1, width - len(start))
        table = start + [ids.pop() for _ in range(own)]
        low = len(start) * BLOCK + query
        tables.append(table)
        queries.append(query)
        lens.append(rng.randint(min(low, len(table) * BLOCK), len(table) * BLOCK))
    return tables, queries, lens


def tensors(
    tables: list[list[int]], queries: list[int], lens: list[int], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    table = torch.full((len(lens), width), -7, dtype=torch.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    return table, torch.tensor(lens, dtype=torch.int32), starts


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft_cap": {"logits_soft_cap": 2.0, "scale": 0.9},
    "sinks": {"sinks": torch.tensor([3.0, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equal_to_the_plain_path(name: str) -> None:
    """Decodes and chunks, groups scattered over the batch, padding rows and tokens; LSE too."""
    torch.manual_seed(0)
    rng = random.Random(0)
    saved = 0
    for _ in range(4):
        tables, queries, lens = batch(rng, num_reqs=9, width=10, blocks=120)
        tables, queries, lens = [*tables, []], [*queries, 0], [*lens, 0]
        groups = find_prefix_groups(tables, queries, lens, block_size=BLOCK)
        saved += sum(group.saved_blocks for group in groups)
        table, seq_lens, starts = tensors(tables, queries, lens, 11)
        pools = torch.randn(120, BLOCK, 2, 16), torch.randn(120, BLOCK, 2, 24)
        q = torch.randn(sum(queries) + 2, 4, 16)
        prefixes = SharedPrefixes.allocate(
            max_num_groups=4, num_reqs=10, num_tokens=q.shape[0], max_blocks_per_req=11, block_size=BLOCK
        )
        prefixes.set(groups, tables, queries, lens)
        common = dict(max_query_len=5, return_lse=True, **OPTIONS[name])
        got = cascade_attention(q, *pools, table, seq_lens, starts, prefixes, **common)
        want = torchpaged.paged_attention(q, *pools, table, seq_lens, starts, **common)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
        suffix = prefixes.suffix(table, seq_lens)
        again = cascade_attention(q, *pools, table, seq_lens, starts, prefixes, suffix=suffix, **common)
        assert all(map(torch.equal, again, got))
        op = cascade_attention(
            q, *pools, table, seq_lens, starts, prefixes, ops=BACKEND_OPS["reference"], **common
        )
        torch.testing.assert_close(op, want, rtol=2e-5, atol=2e-5)
        scaled = {**common, "output_scale": torch.tensor(0.02)}
        rounded, _ = torchpaged.paged_attention(q, *pools, table, seq_lens, starts, **scaled)
        for ops in (None, BACKEND_OPS["reference"]):  # at most one step of e4m3 apart
            out, lse = cascade_attention(q, *pools, table, seq_lens, starts, prefixes, ops=ops, **scaled)
            torch.testing.assert_close(out.float(), rounded.float(), rtol=1 / 7, atol=2**-9)
            torch.testing.assert_close(lse, want[1], rtol=2e-5, atol=2e-5)
        read = int(suffix[1].sum()) + int(prefixes.lens.sum())
        assert int(seq_lens.sum()) - read == sum(group.saved_blocks for group in groups) * BLOCK
    assert saved > 20


def test_one_graph_for_all_groups_and_lengths() -> None:
    """fullgraph; other groups, none, and lengths that advance need no other graph."""
    torch.compiler.reset()
    graphs = CompileCounter()

    prefixes = SharedPrefixes.allocate(
        max_num_groups=3, num_reqs=6, num_tokens=6, max_blocks_per_req=11, block_size=BLOCK
    )

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
        return cascade_attention(q, k, v, table, lens, starts, prefixes, max_query_len=1)

    compiled = torch.compile(call, backend=graphs, fullgraph=True)
    rng = random.Random(3)
    found = []
    for step in range(4):
        tables, _, lens = batch(rng, num_reqs=6, width=10, blocks=120)
        groups = find(tables, lens)[: 3 if step else 0]
        found.append(len(groups))
        prefixes.set(groups, tables, [1] * 6, lens)
        table, seq_lens, starts = tensors(tables, [1] * 6, lens, 11)
        pools = torch.randn(120, BLOCK, 2, 16), torch.randn(120, BLOCK, 2, 16)
        q = torch.randn(6, 4, 16)
        want = torchpaged.paged_attention(q, *pools, table, seq_lens, starts, max_query_len=1)
        torch.testing.assert_close(compiled(q, *pools, table, seq_lens, starts), want, rtol=2e-5, atol=2e-5)
    assert graphs.frame_count == 1
    assert max(found) > 0 == found[0]


def test_groups_that_do_not_fit() -> None:
    """Refused before anything is written."""
    tables, queries, lens = [[1, 2, 3], [1, 2, 4], [5, 6, 7]], [1, 1, 5], [12, 12, 12]
    prefixes = SharedPrefixes.allocate(
        max_num_groups=1, num_reqs=3, num_tokens=7, max_blocks_per_req=3, block_size=BLOCK
    )
    good = PrefixGroup((0, 1), 2)
    prefixes.set([good], tables, queries, lens)
    before = [tensor.clone() for tensor in vars(prefixes).values() if isinstance(tensor, Tensor)]
    for groups, words in (
        ([good, PrefixGroup((2,), 1)], "groups: expected at most 1"),
        ([PrefixGroup((0, 2), 1)], "same first 1 blocks"),
        ([PrefixGroup((0, 0), 1)], "at most once"),
        ([PrefixGroup((0, 9), 1)], "at most once"),
        ([PrefixGroup((2,), 1)], "as many query tokens"),
        ([PrefixGroup((0, 1), 4)], "at most 3"),
    ):
        with pytest.raises(ArgumentError, match=words):
            prefixes.set(groups, tables, queries, lens)
    with pytest.raises(ArgumentError, match="query_lens: expected at most 7"):
        prefixes.set([], tables, [1, 1, 6], lens)
    for name, given in (
        ("groups: expected prefixes before the queries.*row 1 has 7", (tables, queries, [9, 8, 12])),
        ("seq_lens: expected one for each of 3", (tables, queries, [12, 12])),
        ("block_tables: expected one for each of 3", (tables[:2], queries, lens)),
    ):
        with pytest.raises(ArgumentError, match=name):
            prefixes.set([good], *given)
    after = [tensor for tensor in vars(prefixes).values() if isinstance(tensor, Tensor)]
    assert all(map(torch.equal, before, after))


def test_groups_of_another_batch() -> None:
    """Where values are checked, a batch that has moved on without its groups is refused."""
    tables, queries, lens = [[1, 2, 3], [1, 2, 4]], [1, 1], [9, 12]
    prefixes = SharedPrefixes.allocate(
        max_num_groups=1, num_reqs=2, num_tokens=2, max_blocks_per_req=3, block_size=BLOCK
    )
    prefixes.set(find(tables, lens), tables, queries, lens)
    q, pools = torch.randn(2, 4, 16), (torch.randn(9, BLOCK, 2, 16), torch.randn(9, BLOCK, 2, 16))
    table, seq_lens, starts = tensors(tables, queries, lens, 3)
    cascade_attention(q, *pools, table, seq_lens, starts, prefixes, max_query_len=1)
    other = table.clone()
    other[1, 1] = 7
    with pytest.raises(ArgumentError, match="prefixes: .*row 1"):
        cascade_attention(q, *pools, other, seq_lens, starts, prefixes, max_query_len=1)
    with pytest.raises(ArgumentError, match="prefixes: .*row 0"):
        cascade_attention(q, *pools, table, seq_lens - 1, starts, prefixes, max_query_len=1)
    with pytest.raises(ArgumentError, match="prefixes: expected blocks of 8"):
        cascade_attention(
            q,
            torch.randn(4, 8, 2, 16),
            torch.randn(4, 8, 2, 16),
            table,
            seq_lens,
            starts,
            prefixes,
            max_query_len=1,
        )
