"""Schemas of ``paged_attention``, ``merge_attn_states`` and ``cascade_attention``. The rules that every
op keeps: registry.py."""

from torchpaged.custom_ops.pools import SCALES

SCHEMAS = {
    # q [T, num_heads, head_dim], block_table [B, max_blocks_per_req] int32, seq_lens [B] int32 (this step's
    # tokens included), query_start_loc [B + 1] int32, out [T, num_heads, head_dim_v], lse [T, num_heads]
    # float32. max_query_len: upper bound of query_len, known to the host (1 selects the decode kernels).
    # window_left/right: keys visible besides the own one, -1 = open. chunk_size: keys of the own chunk only,
    # 0 = off. Metadata and the context's keys and values may be read before the kernels ahead on the stream
    # have ended; docs/stream_order.md says by which, and what that asks of the kernels that write them.
    # tree_mask [T] int64: bit j of a token's word says that it sees query token j of its request, one before
    # it; itself it always sees. A query then counts positions from the context on over what it sees alone.
    # Needs causal and at most 64 query tokens per request.
    # block_sparse: the numbers of mask.py's BlockSparse, which hides blocks of keys; needs causal, no
    # tree_mask.
    # fp8 queries: q may be float8_e4m3fn where the pools are; out then has 16 bits or more, the keys'
    # scale is that of the products: the queries' times the keys'. Backends say whether they take them.
    # output_scale: float32, one number; out is then e4m3: the result over the scale, rounded and saturated.
    # semaphore: int32 zeros, at least B * num_kv_heads, zeros again afterwards; calls that may overlap need
    # one each. Without it a kernel that needs one makes its own, which costs a memset.
    "paged_attention": f"""(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
        Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? lse=None, *, SymInt max_query_len, float scale,
        bool causal=True, int window_left=-1, int window_right=-1, float logits_soft_cap=0.0,
        Tensor? alibi_slopes=None, Tensor? sinks=None, {SCALES}, int chunk_size=0,
        Tensor? tree_mask=None, Tensor? output_scale=None,
        int[]? block_sparse=None, Tensor(c!)? semaphore=None) -> ()""",
    # out_a, out_b, out [T, num_heads, head_dim_v]; lse_a, lse_b, lse [T, num_heads] float32. LSE -inf: that
    # side saw nothing, its out is not read. NaN or +inf on either side: NaN. output_scale: as in
    # paged_attention.
    "merge_attn_states": """(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out,
        Tensor(b!)? lse=None, *, Tensor? output_scale=None) -> ()""",
    # Causal paged_attention of requests whose first blocks groups of them share, with these read once for a
    # group. block_table, seq_lens: what each request has behind its group's blocks; together they are its
    # whole context. prefix_block_table [G, max_blocks_per_group] int32; prefix_lens [G] int32, multiples of
    # the block size, 0 = no group; prefix_query_start_loc [G + 1] int32 counts the tokens of groups in the
    # order in which they stand in order [T] int64: the batch's token rows, those of each group together, a
    # request's all in one, the others last; inverse [T] int64: the place of each row in it. A group has at
    # most as many tokens as its prefix. semaphore and all else: as in paged_attention.
    "cascade_attention": f"""(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
        Tensor query_start_loc, Tensor prefix_block_table, Tensor prefix_lens, Tensor prefix_query_start_loc,
        Tensor order, Tensor inverse, Tensor(a!) out, Tensor(b!)? lse=None, *, SymInt max_query_len,
        float scale, float logits_soft_cap=0.0, Tensor? sinks=None, {SCALES}, Tensor? output_scale=None,
        Tensor(c!)? semaphore=None) -> ()""",
}
