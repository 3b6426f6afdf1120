"""``paged_attention`` and ``merge_attn_states``: contract, checks, fakes, reference and kernels."""
