// Binds the CPU kernels to the default and the .cpu overload of every op. Schemas, tags and fakes live in
// Python (custom_ops/*/schema.py): with a 2.11 target the stable ABI can set neither.
#include "ops.h"

// How many arguments each kernel takes, which custom_ops/native.py looks for in the file before it loads it:
// a library built from other sources would fail at every call.
extern "C" __attribute__((visibility("default"), used)) const char torchpaged_native_ops[] =
    "torchpaged native ops: accept_tokens 15, advance_step 7, causal_conv 12, copy_blocks 3, delta_gates 10, "
    "finish_step 21, gated_rms_norm 9, linear_attention 14, merge_attn_states 7, paged_attention 23, "
    "rg_lru 13, sample_tokens 10, selective_scan 14, write_kv 8;";
// Digest of the sources that it was built from: a checkout whose sources are others gives a warning.
extern "C" __attribute__((visibility("default"), used)) const char torchpaged_native_sources[] =
    "torchpaged native sources: " TORCHPAGED_DIGEST ";";

STABLE_TORCH_LIBRARY_IMPL(torchpaged, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&torchpaged::write_kv));
  m.impl("write_kv.cpu", TORCH_BOX(&torchpaged::write_kv));
  m.impl("paged_attention", TORCH_BOX(&torchpaged::paged_attention));
  m.impl("paged_attention.cpu", TORCH_BOX(&torchpaged::paged_attention));
  m.impl("merge_attn_states", TORCH_BOX(&torchpaged::merge_attn_states));
  m.impl("merge_attn_states.cpu", TORCH_BOX(&torchpaged::merge_attn_states));
  m.impl("copy_blocks", TORCH_BOX(&torchpaged::copy_blocks));
  m.impl("copy_blocks.cpu", TORCH_BOX(&torchpaged::copy_blocks));
  m.impl("causal_conv", TORCH_BOX(&torchpaged::causal_conv));
  m.impl("causal_conv.cpu", TORCH_BOX(&torchpaged::causal_conv));
  m.impl("linear_attention", TORCH_BOX(&torchpaged::linear_attention));
  m.impl("linear_attention.cpu", TORCH_BOX(&torchpaged::linear_attention));
  m.impl("selective_scan", TORCH_BOX(&torchpaged::selective_scan));
  m.impl("selective_scan.cpu", TORCH_BOX(&torchpaged::selective_scan));
  m.impl("rg_lru", TORCH_BOX(&torchpaged::rg_lru));
  m.impl("rg_lru.cpu", TORCH_BOX(&torchpaged::rg_lru));
  m.impl("delta_gates", TORCH_BOX(&torchpaged::delta_gates));
  m.impl("delta_gates.cpu", TORCH_BOX(&torchpaged::delta_gates));
  m.impl("gated_rms_norm", TORCH_BOX(&torchpaged::gated_rms_norm));
  m.impl("gated_rms_norm.cpu", TORCH_BOX(&torchpaged::gated_rms_norm));
  m.impl("advance_step", TORCH_BOX(&torchpaged::advance_step));
  m.impl("advance_step.cpu", TORCH_BOX(&torchpaged::advance_step));
  m.impl("sample_tokens", TORCH_BOX(&torchpaged::sample_tokens));
  m.impl("sample_tokens.cpu", TORCH_BOX(&torchpaged::sample_tokens));
  m.impl("accept_tokens", TORCH_BOX(&torchpaged::accept_tokens));
  m.impl("accept_tokens.cpu", TORCH_BOX(&torchpaged::accept_tokens));
  m.impl("finish_step", TORCH_BOX(&torchpaged::finish_step));
  m.impl("finish_step.cpu", TORCH_BOX(&torchpaged::finish_step));
}
