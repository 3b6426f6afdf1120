"""Attention of requests that share a prefix: the prefix's keys are read once for all of them.

    groups = find_prefix_groups(block_tables, query_lens, seq_lens, block_size=16)  # on the host
    prefixes = SharedPrefixes.allocate(**sizes, device="cuda")  # once
    prefixes.set(groups, block_tables, query_lens, seq_lens)  # when they change
    batch = block_table, seq_lens, query_start_loc
    out = cascade_attention(q, k_cache, v_cache, *batch, prefixes, max_query_len=1)

`AutomaticPrefixes` does the host's part where it pays (rule.py), for `torchpaged.PagedAttention` through
``metadata.prefixes`` and for `torchpaged.graphs.DecodeGraphRunner`.

Two passes of ``paged_attention``, the prefixes' without sinks, and ``merge_attn_states`` (arXiv:2402.05099).
Every launch depends on sizes alone, so that one graph serves all lengths and all groups that fit the buffers.
"""

from torchpaged.cascade.attention import attend_in_groups, cascade_attention
from torchpaged.cascade.automatic import AutomaticPrefixes
from torchpaged.cascade.grouping import PrefixGroup, find_prefix_groups
from torchpaged.cascade.prefixes import CascadeBatch, SharedPrefixes
from torchpaged.cascade.rule import COSTS, CascadeCosts, LayerShape, costs_of, groups_that_pay

__all__ = [
    "COSTS",
    "AutomaticPrefixes",
    "CascadeBatch",
    "CascadeCosts",
    "LayerShape",
    "PrefixGroup",
    "SharedPrefixes",
    "attend_in_groups",
    "cascade_attention",
    "costs_of",
    "find_prefix_groups",
    "groups_that_pay",
]
