"""Schemas of ``write_kv`` and ``rope_write_kv``. The rules that every op keeps: registry.py."""

from torchpaged.custom_ops.pools import SCALES

SCHEMAS = {
    # k [T, num_kv_heads, head_dim], v [T, num_kv_heads, head_dim_v], caches [num_blocks, block_size,
    # num_kv_heads, .], slot_mapping [T] int64 = block * block_size + offset, -1 = skip; SCALES: float32
    # scalars of fp8 caches. are_query_tokens: promises that a paged_attention follows of which these are the
    # query tokens, and in which no request reads them as context; it may then be launched early, and reads
    # slots and positions early (docs/stream_order.md). Changes no result.
    "write_kv": f"""(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,
        {SCALES}, *, bool are_query_tokens=False) -> ()""",
    # q [T, num_heads, head_dim], k, v, caches, slot_mapping and scales as in write_kv, positions [T] int64,
    # cos_sin [max_position, rotary_dim] float32 or q's dtype (cosines in the first half, sines in the
    # second), q_out like q: also written where the slot is -1. q_norm, k_norm [head_dim]: RMSNorm of each
    # head, before the rotation.
    "rope_write_kv": f"""(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin,
        Tensor slot_mapping, Tensor(a!) q_out, Tensor(b!) k_cache, Tensor(c!) v_cache, *,
        Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps=1e-6, float norm_offset=0.0,
        bool interleaved=False, {SCALES}, bool are_query_tokens=False) -> ()""",
}
