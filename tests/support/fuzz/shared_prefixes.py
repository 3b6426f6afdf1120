"""Fuzzed batches of requests that share prefixes: what `cascade_attention` takes besides a batch."""

import random
from dataclasses import replace

from torchpaged.prefixes import PrefixGroup, SharedPrefixes
from torchpaged.testing.batches import Batch

#: Arguments of ``cascade_attention`` behind ``query_start_loc``, in its order, under these names in
#: `Batch.extras`; behind them the batch's own blocks and lengths without the groups'.
PREFIX_TENSORS = ("prefix_block_table", "prefix_lens", "prefix_query_start_loc", "order", "inverse")
OWN_TENSORS = ("own_block_table", "own_seq_lens")


def share_prefixes(batch: Batch, max_num_groups: int, r: random.Random) -> Batch:
    """The batch with some rows' first blocks replaced by those of another: groups of one request or more,
    each of them before its queries. `PREFIX_TENSORS` and `OWN_TENSORS` are added to ``extras``."""
    block_size, table = batch.k_cache.shape[1], batch.block_table.clone()
    query_lens = list(batch.spec.query_lens)
    shareable = [
        max(n - q, 0) // block_size if q > 0 else 0
        for n, q in zip(batch.spec.seq_lens, query_lens, strict=True)
    ]
    left = r.sample(rows := [row for row, n in enumerate(shareable) if n], len(rows))
    groups = []
    for _ in range(max_num_groups):
        members, left = left[: (count := r.choice((1, 2, 3, len(rows))))], left[count:]
        if not members or r.random() < 0.1:
            continue
        most = min(shareable[row] for row in members)
        num_blocks = r.choice((1, most, most, r.randint(1, most)))
        room, kept = num_blocks * block_size, []
        for row in members:  # a group has at most as many tokens as its prefix
            if query_lens[row] <= room:
                kept.append(row)
                room -= query_lens[row]
        if kept:
            table[kept, :num_blocks] = table[kept[0], :num_blocks].clone()
            groups.append(PrefixGroup(tuple(sorted(kept)), num_blocks))
    prefixes = SharedPrefixes.allocate(
        max_num_groups=max_num_groups,
        num_reqs=table.shape[0],
        num_tokens=batch.q.shape[0],
        max_blocks_per_req=table.shape[1],
        block_size=block_size,
    )
    requests = len(query_lens)  # rows behind them are padding
    lens = batch.seq_lens[:requests].tolist()
    prefixes.set(groups, table[:requests].tolist(), query_lens, lens)
    tensors = prefixes.block_table, prefixes.lens, prefixes.query_start_loc, prefixes.order, prefixes.inverse
    extras = dict(zip(PREFIX_TENSORS, tensors, strict=True))
    extras |= zip(OWN_TENSORS, prefixes.suffix(table, batch.seq_lens), strict=True)
    return replace(batch, block_table=table, extras=batch.extras | extras)
