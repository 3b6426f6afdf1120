"""Schemas of ``write_index_keys``, ``index_logits`` and ``top_k_indices``. The rules that every op keeps:
registry.py."""

SCHEMAS = {
    # k [T, index_dim], one key per token, rotated; k_cache [num_blocks, block_size, 1, index_dim] of its
    # dtype, or of float8_e4m3fn with k_scale [num_blocks, block_size] float32: each key is divided by its
    # largest number over 448, which goes into its slot there. slot_mapping [T] int64 = block * block_size +
    # offset, -1 = skip.
    "write_index_keys": """(Tensor k, Tensor(a!) k_cache, Tensor slot_mapping,
        Tensor(b!)? k_scale=None) -> ()""",
    # logits[t, n] = sum over heads h of weights[t, h] * relu(q[t, h] . k[n]), of position n of t's request;
    # -inf where t does not see it. q [T, index_heads, index_dim]; weights [T, index_heads] float32, with
    # whatever scales there are; k_cache and k_scale as above; logits [T, max_blocks_per_req * block_size]
    # float32. block_table, seq_lens, query_start_loc, max_query_len and causal as in paged_attention.
    "index_logits": """(Tensor q, Tensor weights, Tensor k_cache, Tensor block_table, Tensor seq_lens,
        Tensor query_start_loc, Tensor(a!) logits, *, SymInt max_query_len, bool causal=True,
        Tensor? k_scale=None) -> ()""",
    # The positions of each row's top_k largest logits, in any order, exactly: no one that is left out is
    # larger; which of equal ones are taken is not defined. -inf is never taken, NaN counts as largest.
    # logits [T, L] float32, indices [T, top_k] int32, -1 where fewer are taken.
    "top_k_indices": "(Tensor logits, Tensor(a!) indices) -> ()",
}
