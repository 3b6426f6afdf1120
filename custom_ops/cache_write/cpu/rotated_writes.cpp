// rope_write_kv: checks in the words of custom_ops/cache_write/check.py; heads are normed and rotated in
// float, and rounded once.
#include <cmath>
#include <vector>

#define VEC_WIDTH 4
#include "../../cpu/numbers.h"
#include "../../cpu/operands.h"
#include "../../cpu/parallel.h"
#include "../../cpu/pool_writes.h"

namespace torchpaged {
namespace {

struct Rotation {
  Operand cos_sin;
  const int64_t* positions;
  int64_t position_stride, head_dim, rotary_dim;
  float eps;
  bool interleaved;
};

void check_like(const char* name, const Tensor& t, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == q.scalar_type(), name, ": expected the dtype of q, got another");
}

// The factors of a norm, which may be null; empty: there is none.
std::vector<float> factors_of(const char* name, const std::optional<Tensor>& weight, const Tensor& q,
                              double offset) {
  if (!weight) return {};
  std::vector<float> factors(q.size(2));
  const Operand own = operand(name, *weight, {q.size(2)});
  check_as(name, *weight, q.scalar_type(), ScalarType::Float);
  read(own, 0, q.size(2), factors.data());
  for (float& each : factors) each += float(offset);
  return factors;
}

// Of pairs `distance` apart, `step` between one and the next.
void rotate(float* x, const float* cos, const float* sin, int64_t pairs, int64_t distance, int64_t step) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = x[i * step], b = x[i * step + distance];
    x[i * step] = a * cos[i] - b * sin[i];
    x[i * step + distance] = b * cos[i] + a * sin[i];
  }
}

// place(token, head, numbers) of each head of the tokens, normed and rotated.
template <typename Place>
void turn(const Rotation& p, const Operand& x, int64_t tokens, int64_t heads, const std::vector<float>& norm,
          const Place& place) {
  const int64_t half = p.rotary_dim / 2;
  for_each_range(tokens, 8 * heads * p.head_dim, [&](int64_t begin, int64_t end) {
    std::vector<float> own(p.rotary_dim + p.head_dim);
    float *const angles = own.data(), *const y = angles + p.rotary_dim;
    for (int64_t t = begin; t < end; ++t) {
      read(p.cos_sin, p.positions[t * p.position_stride] * p.cos_sin.token, p.rotary_dim, angles);
      for (int64_t h = 0; h < heads; ++h) {
        read(x, t * x.token + h * x.head, p.head_dim, y);
        if (!norm.empty()) {
          const float root = std::sqrt(sum_of_squares(y, p.head_dim) / float(p.head_dim) + p.eps);
          for (int64_t d = 0; d < p.head_dim; ++d) y[d] *= norm[d] / root;
        }
        if (p.interleaved) rotate(y, angles, angles + half, half, 1, 2);
        else rotate(y, angles, angles + half, half, half, 1);
        place(t, h, y);
      }
    }
  });
}

}  // namespace

void rope_write_kv(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor slot_mapping,
                   Tensor q_out, Tensor k_cache, Tensor v_cache, std::optional<Tensor> q_norm,
                   std::optional<Tensor> k_norm, double norm_eps, double norm_offset, bool interleaved,
                   std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, bool /*are_query_tokens*/) {
  check_token_writes(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  const int64_t tokens = k.size(0), kv_heads = k.size(1), head_dim = k.size(2);
  check_dims("q", q, {tokens, -1, head_dim});
  check_dims("q_out", q_out, {tokens, q.size(1), head_dim});
  check_dims("positions", positions, {tokens});
  check_dims("cos_sin", cos_sin, {-1, -1});
  const int64_t rotary_dim = cos_sin.size(1);
  STD_TORCH_CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                  "cos_sin: expected shape [max_position, rotary_dim] with an even rotary_dim in [2, ",
                  head_dim, "], got ", shape_of(cos_sin),
                  "; it holds rotary_dim / 2 cosines, then as many sines");
  check_float("q", q);
  check_like("k", k, q);
  STD_TORCH_CHECK(q.size(1) > 0, "q: expected at least one head, got ", shape_of(q));
  check_like("q_out", q_out, q);
  check_dtype("positions", positions, ScalarType::Long, "torch.int64");
  check_cpu("positions", positions);
  Rotation p{};
  p.cos_sin = operand("cos_sin", cos_sin, {-1, rotary_dim});
  check_as("cos_sin", cos_sin, q.scalar_type(), ScalarType::Float);
  const Operand from = operand("q", q, {tokens, -1, head_dim}),
                to = operand("q_out", q_out, {tokens, -1, head_dim}),
                keys = operand("k", k, {tokens, -1, -1});
  const std::vector<float> of_q = factors_of("q_norm", q_norm, q, norm_offset),
                           of_k = factors_of("k_norm", k_norm, q, norm_offset);
  STD_TORCH_CHECK(norm_eps > 0 && std::isfinite(norm_eps),
                  "norm_eps: expected a positive finite number, got ", norm_eps);
  STD_TORCH_CHECK(std::isfinite(norm_offset), "norm_offset: expected a finite number, got ", norm_offset);
  STD_TORCH_CHECK(q_norm || k_norm || norm_offset == 0,
                  "norm_offset: expected 0 without q_norm and k_norm, got ", norm_offset,
                  "; give the weights of the norms");
  for (const Named& pool : {Named{"k_cache", &k_cache}, Named{"v_cache", &v_cache}})
    for (const Named& each : {Named{"q", &q}, Named{"q_out", &q_out}})
      check_apart(each.name, *each.tensor, pool.name, *pool.tensor);
  for (const Named& each : {Named{"q", &q}, Named{"k", &k}, Named{"v", &v}})
    STD_TORCH_CHECK(!Span(q_out).meets(Span(*each.tensor)), "q_out: expected memory apart from ", each.name,
                    "'s, got overlapping tensors; allocate it with torch.empty_like(q)");
  check_own_elements("q_out", q_out);
  p.positions = data<int64_t>(positions);
  p.position_stride = positions.stride(0);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t position = p.positions[t * p.position_stride];
    STD_TORCH_CHECK(position >= 0 && position < cos_sin.size(0), "positions: expected positions in [0, ",
                    cos_sin.size(0), "), those of padding included, got ", position,
                    "; give cos_sin more rows");
  }
  p.head_dim = head_dim; p.rotary_dim = rotary_dim;
  p.eps = float(norm_eps); p.interleaved = interleaved;
  turn(p, from, tokens, q.size(1), of_q, [&](int64_t t, int64_t h, const float* y) {
    write(to, t * to.token + h * to.head, head_dim, y);
  });
  std::vector<float> turned(tokens * kv_heads * head_dim);
  turn(p, keys, tokens, kv_heads, of_k, [&](int64_t t, int64_t h, const float* y) {
    std::copy_n(y, head_dim, turned.data() + (t * kv_heads + h) * head_dim);
  });
  const int64_t row = head_dim * int64_t(sizeof(float));
  const TokenRows rotated = {ScalarType::Float, reinterpret_cast<const char*>(turned.data()), kv_heads * row,
                             row};
  store_tokens(rotated, k_cache, slot_mapping, k_scale);
  store_tokens(rows_of(v), v_cache, slot_mapping, v_scale);
}
REGISTER_OP(rope_write_kv)

}  // namespace torchpaged
