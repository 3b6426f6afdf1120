"""Schemas of latent attention's ops. The rules that every op keeps: registry.py."""

SCHEMAS = {
    # Attention whose heads share one key of rank + rope numbers per token, the first rank of which are its
    # value too: multi-head latent attention with the key's up-projection absorbed into the query, and the
    # value's left to up_project_values. q [T, num_heads, rank + rope], kv_cache [num_blocks, block_size, 1,
    # rank + rope], out [T, num_heads, rank]; scale: of the scores, never guessed from a width. indices
    # [T, top_k] int32: the positions in its request that each query token attends to, in any order (sparse
    # attention); a negative one is none, and so is one that the token would not see without them. One that
    # stands there twice counts twice. Everything else as in paged_attention. kv_cache may be of
    # float8_e4m3fn instead, rows of rank + 4 * ceil(rank / 128) + 2 * rope bytes, as fp8_rows.py has them:
    # each number counts as its e4m3 times its scale, rounded to q's dtype. output_scale: float32, one number;
    # out is of float8_e4m3fn then, and what it holds times the scale is the result, saturated.
    "mla_attention": """(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens,
        Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? lse=None, *, SymInt max_query_len, float scale,
        bool causal=True, Tensor? indices=None, Tensor? output_scale=None) -> ()""",
    # kv_c [T, rank], the normalised latents; k_pe [T, rope], the rotated keys that all heads share; they
    # stand behind each other in a row of kv_cache [num_blocks, block_size, 1, rank + rope], or in a row of
    # fp8 as above. slot_mapping [T] int64 = block * block_size + offset, -1 = skip.
    "write_latent": "(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()",
    # What stands between the projections of a step and mla_attention: q [T, num_heads, nope + rope] of which
    # up_keys [num_heads, nope, rank], the key's up-projections, are multiplied into the first columns and the
    # others rotated: q_out [T, num_heads, rank + rope], also written where the slot is -1. kv_c [T, rank],
    # normed by kv_norm [rank] (RMSNorm) if given, and k_pe [T, rope], rotated, as write_latent stores them.
    # positions [T] int64, cos_sin [max_position, rope] float32 or q's dtype, cosines in the first half, sines
    # in the second. rotation: which numbers turn together, and where they go: "halves": i and i + rope / 2;
    # "pairs": 2 i and 2 i + 1; "pairs_to_halves": read as pairs, stored as halves. are_query_tokens: promises
    # that a mla_attention follows of which these are the query tokens, as write_kv has it.
    "rope_write_latent": """(Tensor q, Tensor kv_c, Tensor k_pe, Tensor positions, Tensor cos_sin,
        Tensor slot_mapping, Tensor up_keys, Tensor(a!) q_out, Tensor(b!) kv_cache, *, Tensor? kv_norm=None,
        float norm_eps=1e-6, str rotation="halves", bool are_query_tokens=False) -> ()""",
    # What stands behind mla_attention: latents [T, num_heads, rank] that each head has summed, multiplied by
    # the value's up-projections up_values [num_heads, v_head_dim, rank]: out [T, num_heads, v_head_dim].
    "up_project_values": "(Tensor latents, Tensor up_values, Tensor(a!) out) -> ()",
}
