// causal_conv and linear_attention: checks, and their pieces for threads.
#include "rows.h"
#include "../../cpu/parallel.h"

namespace torchpaged {
namespace {

constexpr int64_t PIECE_CHANNELS = 256;

}  // namespace

void causal_conv(Tensor x, Tensor weight, Tensor conv_state, Tensor state_slots, Tensor seq_lens,
                 Tensor query_start_loc, Tensor out, std::optional<Tensor> bias, int64_t max_query_len,
                 std::string activation, std::optional<Tensor> in_gate, std::optional<Tensor> out_gate) {
  Convolution p{};
  p.x = operand("x", x, {-1, -1});
  const int64_t tokens = x.size(0), channels = x.size(1);
  p.weight = operand("weight", weight, {channels, -1});
  p.width = weight.size(1);
  STD_TORCH_CHECK(p.width >= 2 && p.width <= MAX_WIDTH, "weight: expected a width of 2 to ", MAX_WIDTH,
                  ", got ", shape_of(weight));
  p.state = operand("conv_state", conv_state, {-1, p.width - 1, channels});
  p.out = operand("out", out, {tokens, channels});
  if (bias) p.bias = operand("bias", *bias, {channels});
  if (in_gate) p.in_gate = operand("in_gate", *in_gate, {tokens, channels});
  if (out_gate) p.out_gate = operand("out_gate", *out_gate, {tokens, channels});
  const Named same[] = {{"weight", &weight}, {"conv_state", &conv_state}, {"out", &out},
                        {"bias", pointer(bias)}, {"in_gate", pointer(in_gate)},
                        {"out_gate", pointer(out_gate)}};
  for (const Named& each : same)
    STD_TORCH_CHECK(!each.tensor || each.tensor->scalar_type() == x.scalar_type(), each.name,
                    ": expected the dtype of x, got another");
  p.silu = activation == "silu";
  STD_TORCH_CHECK(p.silu || activation == "none", "activation: expected one of none, silu, got '", activation,
                  "'");
  check_written("conv_state", conv_state, {{"x", &x}, {"weight", &weight}, {"out", &out},
                {"bias", pointer(bias)}, {"in_gate", pointer(in_gate)}, {"out_gate", pointer(out_gate)}});
  check_written("out", out, {{"x", &x}, {"weight", &weight}, {"bias", pointer(bias)},
                {"in_gate", pointer(in_gate)}, {"out_gate", pointer(out_gate)}});
  const std::vector<Row> rows =
      rows_of(state_slots, seq_lens, query_start_loc, max_query_len, conv_state.size(0), out);
  zero_elsewhere(out, rows);
  if (rows.empty()) return;
  const StateKernels kernels = TORCHPAGED_BEST(state_kernels)(p.x.dtype == Number::Double);
  const int64_t work = tokens_of(rows) * (p.width + 8) + int64_t(rows.size()) * 2 * p.width;
  for_each_range((channels + PIECE_CHANNELS - 1) / PIECE_CHANNELS, PIECE_CHANNELS * work,
                 [&](int64_t begin, int64_t end) {
                   kernels.convolve(p, rows.data(), int64_t(rows.size()), begin * PIECE_CHANNELS,
                                    std::min(end * PIECE_CHANNELS, channels));
                 });
}
REGISTER_OP(causal_conv)

void linear_attention(Tensor q, Tensor k, Tensor v, Tensor g, Tensor state, Tensor state_slots,
                      Tensor seq_lens, Tensor query_start_loc, Tensor out, std::optional<Tensor> beta,
                      int64_t max_query_len, double scale, bool delta_rule, bool normalize) {
  Recurrence p{};
  p.v = operand("v", v, {-1, -1, -1});
  const int64_t tokens = v.size(0);
  p.num_heads = v.size(1); p.value_dim = v.size(2);
  p.q = operand("q", q, {tokens, -1, -1});
  const int64_t key_heads = q.size(1);
  p.key_dim = q.size(2);
  STD_TORCH_CHECK(key_heads > 0 && p.num_heads % key_heads == 0,
                  "q: expected a number of heads that divides v's ", p.num_heads, ", got ", shape_of(q));
  p.group = p.num_heads / key_heads;
  p.k = operand("k", k, {tokens, key_heads, p.key_dim});
  p.state = operand("state", state, {-1, p.num_heads, p.key_dim, p.value_dim});
  p.state_key = state.stride(2);
  for (int i = 0; i < 4; ++i)
    STD_TORCH_CHECK(state.size(i) > 0, "state: expected at least one slot, head, row and column, got ",
                    shape_of(state));
  p.out = operand("out", out, {tokens, p.num_heads, p.value_dim});
  p.decays_by_key = g.dim() == 3;
  p.g = p.decays_by_key ? operand("g", g, {tokens, p.num_heads, p.key_dim})
                        : operand("g", g, {tokens, p.num_heads});
  if (beta) p.beta = operand("beta", *beta, {tokens, p.num_heads});
  const ScalarType own = v.scalar_type(),
                   sums = own == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const Named keys[] = {{"q", &q}, {"k", &k}};
  for (const Named& each : keys) check_as(each.name, *each.tensor, own, own);
  check_as("g", g, sums, sums);
  check_as("out", out, own, sums);
  check_as("state", state, own, sums);
  if (beta) check_as("beta", *beta, own, sums);
  STD_TORCH_CHECK(scale > 0 && scale <= 3.4028234663852886e38,
                  "scale: expected a positive number that float32 holds, got ", scale);
  check_written("state", state,
                {{"q", &q}, {"k", &k}, {"v", &v}, {"g", &g}, {"beta", pointer(beta)}, {"out", &out}});
  check_written("out", out, {{"q", &q}, {"k", &k}, {"v", &v}, {"g", &g}, {"beta", pointer(beta)}});
  p.scale = scale; p.delta_rule = delta_rule; p.normalize = normalize;
  const std::vector<Row> rows =
      rows_of(state_slots, seq_lens, query_start_loc, max_query_len, state.size(0), out);
  zero_elsewhere(out, rows);
  if (rows.empty()) return;
  const StateKernels kernels = TORCHPAGED_BEST(state_kernels)(own == ScalarType::Double);
  const int64_t count = int64_t(rows.size()), piece = p.value_dim == 1 ? COLUMNS : 1,
                pieces = (p.num_heads + piece - 1) / piece,
                numbers = piece * p.key_dim * p.value_dim;
  // of each token three multiply-adds, of each row a state read and written
  const int64_t work = numbers * (3 * tokens_of(rows) / count + int64_t(state.element_size()));
  for_each_range(count * pieces, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % pieces * piece;
      kernels.recur(p, rows[i / pieces], first, std::min(first + piece, p.num_heads));
    }
  });
}
REGISTER_OP(linear_attention)

}  // namespace torchpaged
