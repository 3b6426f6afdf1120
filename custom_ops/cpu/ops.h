// The CPU kernels, one function per op of custom_ops/*/schema.py (schemas there).
#pragma once
#include <vector>

#include "check.h"

namespace torchpaged {

void write_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
              std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, bool are_query_tokens);
void rope_write_kv(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor slot_mapping,
                   Tensor q_out, Tensor k_cache, Tensor v_cache, std::optional<Tensor> q_norm,
                   std::optional<Tensor> k_norm, double norm_eps, double norm_offset, bool interleaved,
                   std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, bool are_query_tokens);
void paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
                     Tensor query_start_loc, Tensor out, std::optional<Tensor> lse, int64_t max_query_len,
                     double scale, bool causal, int64_t window_left, int64_t window_right,
                     double logits_soft_cap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                     std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, int64_t chunk_size,
                     std::optional<Tensor> tree_mask, std::optional<Tensor> output_scale,
                     std::optional<std::vector<int64_t>> block_sparse,
                     std::optional<Tensor> /*semaphore: for kernels that merge on a device*/);
void merge_attn_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor out,
                       std::optional<Tensor> lse, std::optional<Tensor> output_scale);
void causal_conv(Tensor x, Tensor weight, Tensor conv_state, Tensor state_slots, Tensor seq_lens,
                 Tensor query_start_loc, Tensor out, std::optional<Tensor> bias, int64_t max_query_len,
                 std::string activation, std::optional<Tensor> in_gate, std::optional<Tensor> out_gate);
void linear_attention(Tensor q, Tensor k, Tensor v, Tensor g, Tensor state, Tensor state_slots,
                      Tensor seq_lens, Tensor query_start_loc, Tensor out, std::optional<Tensor> beta,
                      int64_t max_query_len, double scale, bool delta_rule, bool normalize);
void selective_scan(Tensor x, Tensor dt, Tensor a_log, Tensor dt_bias, Tensor b, Tensor c,
                    Tensor skip_weight, Tensor state, Tensor state_slots, Tensor seq_lens,
                    Tensor query_start_loc, Tensor out, std::optional<Tensor> gate, int64_t max_query_len);
void rg_lru(Tensor x, Tensor input_weight, Tensor input_bias, Tensor recurrent_weight, Tensor recurrent_bias,
            Tensor recurrent_param, Tensor state, Tensor state_slots, Tensor seq_lens, Tensor query_start_loc,
            Tensor out, std::optional<Tensor> gate, int64_t max_query_len);
void delta_gates(Tensor a, std::optional<Tensor> b, Tensor a_log, Tensor dt_bias, Tensor g, Tensor beta,
                 double beta_scale, double min_step, std::optional<double> max_step,
                 std::optional<double> bound);
void gated_rms_norm(Tensor x, Tensor gate, Tensor weight, Tensor out, double eps, bool gate_first,
                    std::optional<Tensor> skip, std::optional<Tensor> skip_weight, std::string activation);
void linear(Tensor x, Tensor weight, Tensor out, std::optional<Tensor> bias, std::optional<Tensor> scale,
            std::optional<Tensor> residual, std::optional<Tensor> norm_weight, double norm_eps,
            double norm_offset, std::string activation);
void embedding(Tensor input_ids, Tensor weight, Tensor out, std::optional<Tensor> scale);
void rms_norm(Tensor x, Tensor weight, Tensor out, double eps, double offset, std::optional<Tensor> residual,
              std::optional<Tensor> post_residual);
void apply_experts(Tensor x, Tensor gate_up, Tensor down, Tensor ids, Tensor weights, Tensor out,
                   std::string activation, std::optional<Tensor> shared_gate_up,
                   std::optional<Tensor> shared_down, std::optional<Tensor> shared_gate,
                   std::optional<Tensor> residual);
void copy_blocks(Tensor k_cache, Tensor v_cache, Tensor block_mapping);
void advance_step(Tensor sampled_token_ids, Tensor block_table, Tensor input_ids, Tensor positions,
                  Tensor seq_lens, Tensor slot_mapping, int64_t block_size);
void sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
                   Tensor repetition_penalty, Tensor seen, Tensor seeds, Tensor counters, Tensor out);
void accept_tokens(Tensor sampled_token_ids, Tensor block_table, Tensor stop_token_ids, Tensor input_ids,
                   Tensor positions, Tensor seq_lens, Tensor slot_mapping, Tensor counters, Tensor remaining,
                   Tensor seen, Tensor tokens_out, int64_t block_size, std::optional<Tensor> ring,
                   std::optional<Tensor> launches, int64_t step);
void finish_step(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
                 Tensor repetition_penalty, Tensor seeds, Tensor block_table, Tensor stop_token_ids,
                 Tensor input_ids, Tensor positions, Tensor seq_lens, Tensor slot_mapping, Tensor counters,
                 Tensor remaining, Tensor seen, Tensor tokens_out, int64_t block_size,
                 std::optional<Tensor> ring, std::optional<Tensor> launches, int64_t step);

}  // namespace torchpaged
