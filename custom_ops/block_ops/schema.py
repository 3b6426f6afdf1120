"""Schema of ``copy_blocks``. The rules that every op keeps: registry.py."""

SCHEMAS = {
    # block_mapping [N, 2] int64: (source, destination) block ids; a negative id skips the pair; no block may
    # be both
    "copy_blocks": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_mapping) -> ()"
}
