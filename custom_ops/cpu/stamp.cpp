// How many arguments each kernel takes, which custom_ops/native.py looks for in the file before it loads it:
// a library built from other sources would fail at every call.
extern "C" __attribute__((visibility("default"), used)) const char torchpaged_native_ops[] =
    "torchpaged native ops: accept_tokens 15, advance_step 7, apply_experts 11, causal_conv 12, "
    "copy_blocks 3, delta_gates 10, embedding 4, finish_step 21, gated_rms_norm 9, linear 10, "
    "linear_attention 14, merge_attn_states 7, paged_attention 23, rg_lru 13, rms_norm 7, "
    "rope_write_kv 17, sample_tokens 10, selective_scan 14, write_kv 8;";
// Digest of the sources that it was built from: a checkout whose sources are others gives a warning.
extern "C" __attribute__((visibility("default"), used)) const char torchpaged_native_sources[] =
    "torchpaged native sources: " TORCHPAGED_DIGEST ";";
