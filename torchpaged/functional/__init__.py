"""The ops as functions: arguments checked with typed errors, outputs allocated and returned.

    write_kv(k, v, k_cache, v_cache, slot_mapping)
    out = paged_attention(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_query_len=1)

They run the backend that every other entry point would choose: `torchpaged.use_backend`, TORCHPAGED_BACKEND,
then the automatic choice; one that was asked for and can't serve a call raises with its reasons.
``ops=BACKEND_OPS[name]`` runs one backend's kernels whatever was asked for.

Under ``torch.compile`` they trace to one op call (and one allocation). The backend is chosen when the call is
traced, by the same rules, and the compiled code keeps it; heads, widths and block size are constants of it.
``ops`` are held to what their backend declares there, too; a backend that plans needs a workspace. The checks
of tensors run in eager mode only. Inference only: they refuse inputs that require grad or carry a tangent.

One file per family of ops, as in `torchpaged.custom_ops`.
"""

from torchpaged.functional.attention import merge_attn_states, paged_attention
from torchpaged.functional.block_ops import copy_blocks
from torchpaged.functional.cache_write import rope_write_kv, write_kv
from torchpaged.functional.step_end import advance_step

__all__ = ["advance_step", "copy_blocks", "merge_attn_states", "paged_attention", "rope_write_kv", "write_kv"]
