// selective_scan and rg_lru: checks, and their pieces for threads.
#include "rows.h"
#include "../../cpu/parallel.h"

namespace torchpaged {
namespace {

// What selective_scan and rg_lru share: channels are heads of one value column, `keys` numbers each.
Recurrence of_channels(const Tensor& x, const Tensor& state, const Tensor& out,
                       const std::optional<Tensor>& gate, int64_t keys) {
  Recurrence r{};
  const int64_t tokens = x.size(0), channels = x.size(1);
  const ScalarType own = x.scalar_type();
  r.v = operand("x", x, {-1, -1});
  r.num_heads = r.group = channels;
  r.key_dim = keys; r.value_dim = 1; r.scale = 1;
  r.state = operand("state", state, {-1, channels, keys, 1});
  r.state_key = state.stride(2);
  for (int i = 0; i < 3; ++i)
    STD_TORCH_CHECK(state.size(i) > 0, "state: expected at least one slot, channel and number, got ",
                    shape_of(state));
  check_as("state", state, own, own == ScalarType::Double ? own : ScalarType::Float);
  r.out = operand("out", out, {tokens, channels});
  check_as("out", out, own, own);
  if (gate) check_as("gate", *gate, own, own);
  return r;
}

void check_channels(const Tensor& x, const Tensor& state, const Tensor& out,
                    std::initializer_list<Named> read, std::initializer_list<Named> parameters) {
  for (const Named& each : parameters)
    check_as(each.name, *each.tensor, x.scalar_type(), ScalarType::Float);
  check_written("state", state, {{"x", &x}, {"out", &out}});
  check_written("out", out, {{"x", &x}});
  for (const auto& some : {read, parameters}) {
    check_written("state", state, some);
    check_written("out", out, some);
  }
}

}  // namespace

void selective_scan(Tensor x, Tensor dt, Tensor a_log, Tensor dt_bias, Tensor b, Tensor c,
                    Tensor skip_weight, Tensor state, Tensor state_slots, Tensor seq_lens,
                    Tensor query_start_loc, Tensor out, std::optional<Tensor> gate, int64_t max_query_len) {
  check_dims("x", x, {-1, -1});
  check_dims("a_log", a_log, {x.size(1), -1});
  SelectiveScan p{};
  const int64_t tokens = x.size(0), channels = x.size(1), keys = a_log.size(1);
  Recurrence& r = p.recurrence = of_channels(x, state, out, gate, keys);
  r.decays_by_key = true;
  p.dt = operand("dt", dt, {tokens, channels});
  p.a_log = operand("a_log", a_log, {channels, keys});
  p.dt_bias = operand("dt_bias", dt_bias, {channels});
  r.k = operand("b", b, {tokens, keys});
  r.q = operand("c", c, {tokens, keys});
  p.skip_weight = operand("skip_weight", skip_weight, {channels});
  if (gate) p.gate = operand("gate", *gate, {tokens, channels});
  const Named read[] = {{"dt", &dt}, {"b", &b}, {"c", &c}};
  for (const Named& each : read) check_as(each.name, *each.tensor, x.scalar_type(), x.scalar_type());
  check_channels(x, state, out, {read[0], read[1], read[2], {"gate", pointer(gate)}},
                 {{"a_log", &a_log}, {"dt_bias", &dt_bias}, {"skip_weight", &skip_weight}});
  const std::vector<Row> rows =
      rows_of(state_slots, seq_lens, query_start_loc, max_query_len, state.size(0), out);
  zero_elsewhere(out, rows);
  if (rows.empty()) return;
  const StateKernels kernels = TORCHPAGED_BEST(state_kernels)(r.v.dtype == Number::Double);
  for_each_range((channels + COLUMNS - 1) / COLUMNS, COLUMNS * keys * 12 * tokens_of(rows),
                 [&](int64_t begin, int64_t end) {
                   kernels.scan(p, rows.data(), int64_t(rows.size()), begin * COLUMNS,
                                std::min(end * COLUMNS, channels));
                 });
}
REGISTER_OP(selective_scan)

void rg_lru(Tensor x, Tensor input_weight, Tensor input_bias, Tensor recurrent_weight, Tensor recurrent_bias,
            Tensor recurrent_param, Tensor state, Tensor state_slots, Tensor seq_lens, Tensor query_start_loc,
            Tensor out, std::optional<Tensor> gate, int64_t max_query_len) {
  static const double one = 1;
  static const float single_one = 1;
  RgLru p{};
  check_dims("x", x, {-1, -1});
  check_dims("input_weight", input_weight, {-1, -1, -1});
  const int64_t tokens = x.size(0), channels = x.size(1), blocks = input_weight.size(0);
  const int64_t width = p.width = input_weight.size(1);
  STD_TORCH_CHECK(blocks * width == channels, "input_weight: expected blocks of x's ", channels,
                  " channels in all, got ", shape_of(input_weight));
  Recurrence& r = p.recurrence = of_channels(x, state, out, gate, 1);
  const bool is_double = r.v.dtype == Number::Double;
  r.q = r.k = is_double ? Operand{Number::Double, const_cast<double*>(&one), 0, 0}
                        : Operand{Number::Float, const_cast<float*>(&single_one), 0, 0};
  p.input_weight = operand("input_weight", input_weight, {blocks, width, width});
  p.input_bias = operand("input_bias", input_bias, {blocks, width});
  p.recurrent_weight = operand("recurrent_weight", recurrent_weight, {blocks, width, width});
  p.recurrent_bias = operand("recurrent_bias", recurrent_bias, {blocks, width});
  p.recurrent_param = operand("recurrent_param", recurrent_param, {channels});
  if (gate) p.gate = operand("gate", *gate, {tokens, channels});
  check_channels(x, state, out, {{"gate", pointer(gate)}},
                 {{"input_weight", &input_weight}, {"input_bias", &input_bias},
                  {"recurrent_weight", &recurrent_weight}, {"recurrent_bias", &recurrent_bias},
                  {"recurrent_param", &recurrent_param}});
  const std::vector<Row> rows =
      rows_of(state_slots, seq_lens, query_start_loc, max_query_len, state.size(0), out);
  zero_elsewhere(out, rows);
  if (rows.empty()) return;
  p.ahead = reads_side_by_side();
  const StateKernels kernels = TORCHPAGED_BEST(state_kernels)(is_double);
  for_each_range(blocks, 2 * width * width * (1 + tokens_of(rows)), [&](int64_t begin, int64_t end) {
    kernels.rg_lru(p, rows.data(), int64_t(rows.size()), begin, end);
  });
}
REGISTER_OP(rg_lru)

}  // namespace torchpaged
