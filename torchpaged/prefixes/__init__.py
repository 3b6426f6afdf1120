"""What requests share, and attention that reads it once for all of them.

    groups = find_prefix_groups(block_tables, query_lens, seq_lens, block_size=16)  # on the host
    prefixes = SharedPrefixes.allocate(**sizes, device="cuda")  # once
    prefixes.set(groups, block_tables, query_lens, seq_lens)  # when they change
    batch = block_table, seq_lens, query_start_loc
    out = cascade_attention(q, k_cache, v_cache, *batch, prefixes, max_query_len=1)

`AutomaticPrefixes` does the host's part where it pays (costs.py), for `torchpaged.graphs.DecodeGraphRunner`
and the engine; `RowPrefixes` does it for a cache whose rows keep their places. Both, and `SharedPrefixes`,
give a batch its prefixes by ``prepare(metadata)``; a group is a `PrefixGroup`; layers then call
`attend_with_prefixes`. Which blocks texts can share is found by `torchpaged.cache.PrefixCache`.

Two passes of ``paged_attention``, the prefixes' without sinks, and ``merge_attn_states`` (arXiv:2402.05099).
Every launch depends on sizes alone, so that one graph serves all lengths and all groups that fit the buffers.
"""

from torchpaged.prefixes.attention import cascade_attention
from torchpaged.prefixes.automatic import AutomaticPrefixes
from torchpaged.prefixes.buffers import SharedPrefixes
from torchpaged.prefixes.costs import CascadeCosts
from torchpaged.prefixes.groups import PrefixGroup, find_prefix_groups

__all__ = [
    "AutomaticPrefixes",
    "CascadeCosts",
    "PrefixGroup",
    "SharedPrefixes",
    "cascade_attention",
    "find_prefix_groups",
]
