"""Schema of ``cascade_attention``. The rules that every op keeps: registry.py."""

from __future__ import annotations

SCHEMAS = {
    # Causal paged_attention of requests whose first blocks groups of them share, with these read once for a
    # group. block_table, seq_lens: what each request has behind its group's blocks; together they are its
    # whole context. prefix_block_table [G, max_blocks_per_group] int32; prefix_lens [G] int32, multiples of
    # the block size, 0 = no group; prefix_query_start_loc [G + 1] int32 counts the tokens of groups in the
    # order in which they stand in order [T] int64: the batch's token rows, those of each group together, a
    # request's all in one, the others last; inverse [T] int64: the place of each row in it. A group has at
    # most as many tokens as its prefix. semaphore and all else: as in paged_attention.
    "cascade_attention": """(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
        Tensor query_start_loc, Tensor prefix_block_table, Tensor prefix_lens, Tensor prefix_query_start_loc,
        Tensor order, Tensor inverse, Tensor(a!) out, Tensor(b!)? lse=None, *, SymInt max_query_len,
        float scale, float logits_soft_cap=0.0, Tensor? sinks=None, Tensor? k_scale=None,
        Tensor? v_scale=None, Tensor(c!)? semaphore=None) -> ()""",
}
