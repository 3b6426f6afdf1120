"""What every op that attends over blocks asks of its batch: tensors, lengths and block ids; of real tensors,
and of the fake ones of a trace."""

import itertools

import torch
from torch import Tensor

from torchpaged.custom_ops import pools
from torchpaged.custom_ops.checks import check_dims, check_dtype, check_last_dim
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype
from torchpaged.custom_ops.memory import check_apart


def check_batch(
    block_table: Tensor, seq_lens: Tensor, query_start_loc: Tensor, max_query_len: int
) -> dict[str, Tensor]:
    """Shapes, dtypes and strides of a batch's tensors; raises `ArgumentError`. Returns them by name."""
    if max_query_len < 1:
        raise ArgumentError("max_query_len", "at least 1", str(max_query_len))
    check_dims("block_table", block_table, None, None)
    check_dims("seq_lens", seq_lens, block_table.shape[0])
    check_dims("query_start_loc", query_start_loc, block_table.shape[0] + 1)
    batch = {"block_table": block_table, "seq_lens": seq_lens, "query_start_loc": query_start_loc}
    for name, tensor in batch.items():
        check_dtype(name, tensor, torch.int32)
    check_last_dim(**batch)
    return batch


def check_results(q: Tensor, out: Tensor, lse: Tensor | None, **read: Tensor) -> None:
    """``out`` and ``lse`` of an attention are apart from each other and from what it reads."""
    read["q"] = q
    check_apart({"out": out}, read, "allocate out with torch.empty")
    if lse is not None:
        check_dims("lse", lse, q.shape[0], q.shape[1])
        check_dtype("lse", lse, torch.float32)
        check_apart({"lse": lse}, read | {"out": out}, "allocate lse with torch.empty")


def expect_batch(q: Tensor, out: Tensor, block_table: Tensor, seq_lens: Tensor, starts: Tensor) -> None:
    """What a fake kernel states of queries, results and batch."""
    expect(q.dim() == out.dim() == 3, f"q, out: expected 3 dimensions, got {q.dim()}, {out.dim()}")
    expect_dims(2, block_table=block_table)
    expect_dtype(torch.int32, block_table=block_table, seq_lens=seq_lens, query_start_loc=starts)
    expect(out.shape[0] == q.shape[0], "out: expected as many rows as q")
    expect(block_table.shape[0] == seq_lens.shape[0], "seq_lens: expected one length per table row")


def check_starts(name: str, starts: Tensor, num_tokens: int) -> None:
    """``starts [count + 1]`` are where packed rows of at most ``num_tokens`` tokens begin and end; raises
    `ArgumentError`. Reads the values."""
    falls = bool((starts[1:] < starts[:-1]).any())  # no differences, which int32 may not hold
    if falls or (len(starts) and (int(starts[0]) != 0 or int(starts[-1]) > num_tokens)):
        raise ArgumentError(
            name, f"0 first, not decreasing, at most {num_tokens} tokens", str(starts.tolist()[:64])
        )


def check_batch_values(
    num_tokens: int,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    window_left: int = -1,
    chunk_size: int = 0,
) -> None:
    """Lengths and block ids of one call of attention over pools shaped like ``cache [num_blocks, block_size,
    ...]``; raises `ArgumentError`. Reads the values.

    A request has a block once among those that a query sees. Columns behind the window or the chunk of its
    first query may repeat them: a ring of blocks takes the place of what no query sees any more.
    """
    num_blocks, block_size = cache.shape[:2]
    if block_table.numel() <= pools.FEW and block_table.shape[0] and block_table.device.type == "cpu":
        batch = block_table.tolist(), seq_lens.tolist(), query_start_loc.tolist()
        reach = window_left, chunk_size
        if _is_good_batch(*batch, num_tokens, num_blocks, block_size, max_query_len, *reach):
            return
    check_starts("query_start_loc", query_start_loc, num_tokens)
    if not block_table.shape[0]:
        return
    query_lens = query_start_loc.diff()
    if int(query_lens.max()) > max_query_len:
        raise ArgumentError(
            "max_query_len", f"at least the longest query ({int(query_lens.max())})", str(max_query_len)
        )
    capacity = block_table.shape[1] * block_size
    if int(seq_lens.max()) > capacity:
        raise ArgumentError(
            "seq_lens",
            f"at most {capacity} tokens ({block_table.shape[1]} blocks of {block_size} per request)",
            str(int(seq_lens.max())),
            "give block_table more columns",
        )
    columns = torch.arange(block_table.shape[1], device=seq_lens.device)
    used = (seq_lens.clamp_min(0)[:, None] + block_size - 1) // block_size > columns
    bad = used & ((block_table < 0) | (block_table >= num_blocks))
    if bool(bad.any()):
        row, column = (int(x) for x in bad.nonzero()[0])
        raise ArgumentError(
            "block_table",
            f"block ids in [0, {num_blocks})",
            f"{int(block_table[row, column])} in row {row}, column {column}",
        )
    first = (seq_lens - query_lens).clamp_min(0)
    oldest = _oldest_seen(first, window_left, chunk_size)
    seen = used & (columns >= oldest[:, None] // block_size)
    shown = torch.where(seen, block_table, 0).sort(-1).values
    twice = (shown[:, 1:] == shown[:, :-1]) & (shown[:, 1:] > 0)
    if bool(twice.any()):
        row, column = (int(x) for x in twice.nonzero()[0])
        raise ArgumentError(
            "block_table",
            "every block once per request (block 0, the null block, excepted)",
            f"block {int(shown[row, column])} several times in row {row}",
        )


def _oldest_seen(first: Tensor, window_left: int, chunk_size: int) -> Tensor:
    """The first key that each request's first query, at position ``first``, sees."""
    oldest = (first - window_left).clamp_min(0) if window_left >= 0 else torch.zeros_like(first)
    return torch.maximum(oldest, first // chunk_size * chunk_size) if chunk_size > 0 else oldest


def _is_good_batch(
    block_table: list[list[int]],
    seq_lens: list[int],
    query_start_loc: list[int],
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    max_query_len: int,
    window_left: int,
    chunk_size: int,
) -> bool:
    """Whether all is right; if not, the ops of torch in `check_batch_values` say what is wrong."""
    if query_start_loc[0] != 0 or query_start_loc[-1] > num_tokens:
        return False
    for begin, end in itertools.pairwise(query_start_loc):
        if not 0 <= end - begin <= max_query_len:
            return False
    query_lens = [end - begin for begin, end in itertools.pairwise(query_start_loc)]
    for row, seq_len, query_len in zip(block_table, seq_lens, query_lens, strict=True):
        if seq_len <= 0:
            continue
        used = row[: -(-seq_len // block_size)]
        if seq_len > len(row) * block_size or (used and (min(used) < 0 or max(used) >= num_blocks)):
            return False
        first = max(seq_len - query_len, 0)
        oldest = max(first - window_left, 0) if window_left >= 0 else 0
        oldest = max(oldest, first // chunk_size * chunk_size) if chunk_size > 0 else oldest
        seen = used[oldest // block_size :]
        # block 0 may stand there several times
        if len(set(seen)) != len(seen) and len(set(seen)) - 1 + seen.count(0) != len(seen):
            return False
    return True
