// sample_tokens, accept_tokens, finish_step and advance_step: checks in the words of check.py, and what is
// done to the rows.
#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

#include "sampler.h"
#include "../../cpu/check.h"
#include "../../cpu/instruction_set.h"
#include "../../cpu/parallel.h"

namespace torchpaged {
namespace {

// One number for each row.
template <typename T>
void check_rows(const char* name, const Tensor& t, int64_t rows) {
  check_dims(name, t, {rows});
  if constexpr (sizeof(T) == 8) check_dtype(name, t, ScalarType::Long, "torch.int64");
  else if constexpr (std::is_same_v<T, float>) check_dtype(name, t, ScalarType::Float, "torch.float32");
  else check_dtype(name, t, ScalarType::Int, "torch.int32");
  check_last_dim(name, t);
  check_cpu(name, t);
}

// Rows of int32 or int64, each contiguous.
void check_table(const char* name, const Tensor& t, int64_t rows, int64_t columns, bool is_long = false) {
  check_dims(name, t, {rows, columns});
  check_dtype(name, t, is_long ? ScalarType::Long : ScalarType::Int, is_long ? "torch.int64" : "torch.int32");
  check_last_dim(name, t);
  check_cpu(name, t);
}

template <typename T, typename F>
void check_values(const char* name, const Tensor& t, const char* expected, const F& is_good) {
  const T* values = data<T>(t);
  for (int64_t i = 0; i < t.size(0); ++i)
    STD_TORCH_CHECK(is_good(values[i]), name, ": expected ", expected, ", got ", values[i], " in row ", i);
}

struct Drawing {
  const Tensor &logits, &temperature, &top_k, &top_p, &min_p, &penalty, &seen, &seeds, &counters;
};

void check_drawing(const Drawing& p) {
  check_dims("logits", p.logits, {-1, -1});
  const int64_t rows = p.logits.size(0), vocab_size = p.logits.size(1);
  STD_TORCH_CHECK(vocab_size >= 1 && vocab_size <= 1 << 24,
                  "logits: expected a vocabulary of 1 to 2**24 tokens, got shape ", shape_of(p.logits));
  check_float("logits", p.logits);
  check_last_dim("logits", p.logits);
  check_cpu("logits", p.logits);
  check_rows<float>("temperature", p.temperature, rows);
  check_rows<int32_t>("top_k", p.top_k, rows);
  check_rows<float>("top_p", p.top_p, rows);
  check_rows<float>("min_p", p.min_p, rows);
  check_rows<float>("repetition_penalty", p.penalty, rows);
  check_table("seen", p.seen, rows, (vocab_size + 31) / 32);
  check_rows<int64_t>("seeds", p.seeds, rows);
  check_rows<int64_t>("counters", p.counters, rows);
  check_values<float>("temperature", p.temperature, "0 (greedy) or positive numbers",
                      [](float x) { return x >= 0 && std::isfinite(x); });
  check_values<int32_t>("top_k", p.top_k, "0 (all) or at least 1", [](int32_t x) { return x >= 0; });
  check_values<float>("top_p", p.top_p, "numbers in (0, 1]", [](float x) { return x > 0 && x <= 1; });
  check_values<float>("min_p", p.min_p, "numbers in [0, 1]", [](float x) { return x >= 0 && x <= 1; });
  check_values<float>("repetition_penalty", p.penalty, "positive numbers (1 = off)",
                      [](float x) { return x > 0 && std::isfinite(x); });
}

// Tokens of all rows; rows whose seq_len is given as 0 are left out.
void draw_rows(const Drawing& p, const int32_t* seq_lens, int64_t* out) {
  const int64_t size = p.logits.size(1), rows = p.logits.size(0);
  const float* temperature = data<float>(p.temperature);
  const ScalarType dtype = p.logits.scalar_type();
  const LogitDtype kind = dtype == ScalarType::BFloat16 ? LogitDtype::BFloat16
                          : dtype == ScalarType::Half   ? LogitDtype::Half
                                                        : LogitDtype::Float;
  bool draws = false;
  for (int64_t i = 0; i < rows; ++i) draws = draws || temperature[i] > 0;
  const Sampler sample = TORCHPAGED_BEST(sample_row);
  for_each_range(rows, draws ? 4 * size : size, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (seq_lens && seq_lens[i] <= 0) continue;
      const char* logits = static_cast<const char*>(p.logits.const_data_ptr());
      out[i] = sample({logits + i * p.logits.stride(0) * int64_t(p.logits.element_size()), kind, size,
                       temperature[i], data<float>(p.top_p)[i], data<float>(p.min_p)[i],
                       data<float>(p.penalty)[i], data<int32_t>(p.top_k)[i],
                       data<int32_t>(p.seen) + i * p.seen.stride(0), data<int64_t>(p.seeds)[i],
                       data<int64_t>(p.counters)[i]});
    }
  });
}

struct Accepting {
  const Tensor &table, &stops, &input_ids, &positions, &seq_lens, &slots, &counters, &remaining, &seen, &out;
  int64_t block_size;
  const std::optional<Tensor>&ring, &launches;
  int64_t step;
  int64_t capacity() const { return table.size(1) * block_size; }
};

void check_accepting(const Accepting& p) {
  check_dims("block_table", p.table, {-1, -1});
  const int64_t rows = p.table.size(0);
  STD_TORCH_CHECK(p.table.size(1) > 0, "block_table: expected at least one column, got shape ",
                  shape_of(p.table));
  check_table("block_table", p.table, rows, -1);
  check_table("stop_token_ids", p.stops, rows, -1, true);
  check_rows<int64_t>("input_ids", p.input_ids, rows);
  check_rows<int64_t>("positions", p.positions, rows);
  check_rows<int32_t>("seq_lens", p.seq_lens, rows);
  check_rows<int64_t>("slot_mapping", p.slots, rows);
  check_rows<int64_t>("counters", p.counters, rows);
  check_rows<int32_t>("remaining", p.remaining, rows);
  check_table("seen", p.seen, rows, -1);
  check_own_elements("seen", p.seen);
  check_rows<int64_t>("tokens_out", p.out, rows);
  STD_TORCH_CHECK(p.block_size >= 1, "block_size: expected at least 1 token, got ", p.block_size);
  STD_TORCH_CHECK(p.ring.has_value() == p.launches.has_value(),
                  "ring, launches: expected both or neither, got one of them");
  if (p.ring) {
    STD_TORCH_CHECK(rows, "ring: expected rows whose tokens it takes, got no rows; leave ring and launches ",
                    "out");
    check_dims("ring", *p.ring, {-1, -1, -1});
    check_dtype("ring", *p.ring, ScalarType::Long, "torch.int64");
    check_last_dim("ring", *p.ring);
    check_cpu("ring", *p.ring);
    check_rows<int64_t>("launches", *p.launches, 2);
    STD_TORCH_CHECK(p.ring->size(0) >= 2 && p.ring->size(1) >= 2 && p.ring->size(2) >= rows,
                    "ring: expected [slots + 1, steps + 1, at least ", rows, "], got shape ",
                    shape_of(*p.ring));
    STD_TORCH_CHECK(p.step >= 0 && p.step < p.ring->size(1) - 1, "step: expected in [0, ",
                    p.ring->size(1) - 1, "), the steps of ring, got ", p.step);
  }
  const std::string most = "at most " + std::to_string(p.capacity()) + ", what a row of block_table holds";
  check_values<int32_t>("seq_lens", p.seq_lens, most.c_str(), [&](int32_t x) { return x <= p.capacity(); });
}

// A row's next token at position `length`, and its slot.
int64_t slot_of(const Tensor& table, int64_t row, int64_t length, int64_t block_size) {
  const int32_t* blocks = data<int32_t>(table) + row * table.stride(0);
  return int64_t(blocks[length / block_size]) * block_size + length % block_size;
}

void accept_rows(const Accepting& p, const int64_t* sampled) {
  const int64_t rows = p.table.size(0), num_words = p.seen.size(1);
  int64_t *out = mutable_data<int64_t>(p.out), *slots = mutable_data<int64_t>(p.slots),
          *launches = p.launches ? mutable_data<int64_t>(*p.launches) : nullptr, *ring = nullptr;
  int32_t *lens = mutable_data<int32_t>(p.seq_lens), *remaining = mutable_data<int32_t>(p.remaining);
  if (p.ring) {
    const int64_t num_slots = p.ring->size(0) - 1, launch = launches[0];
    ring = mutable_data<int64_t>(*p.ring) + (launch < 0 ? num_slots : launch % num_slots) * p.ring->stride(0);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t length = lens[i], token = length > 0 ? sampled[i] : -1;
    out[i] = token;
    slots[i] = -1;
    if (ring) ring[p.step * p.ring->stride(1) + i] = token;
    if (length <= 0) continue;
    mutable_data<int64_t>(p.counters)[i] += 1;
    remaining[i] -= 1;
    if (token >= 0 && token / 32 < num_words) {
      int32_t& word = mutable_data<int32_t>(p.seen)[i * p.seen.stride(0) + token / 32];
      word = int32_t(uint32_t(word) | uint32_t(1) << token % 32);
    }
    const int64_t* stops = data<int64_t>(p.stops) + i * p.stops.stride(0);
    const bool stopped = std::find(stops, stops + p.stops.size(1), token) != stops + p.stops.size(1);
    if (token < 0 || stopped || remaining[i] <= 0 || length >= p.capacity()) { lens[i] = 0; continue; }
    slots[i] = slot_of(p.table, i, length, p.block_size);
    mutable_data<int64_t>(p.input_ids)[i] = token;
    mutable_data<int64_t>(p.positions)[i] = length;
    lens[i] = int32_t(length + 1);
  }
  if (ring && p.step == p.ring->size(1) - 2) {
    ring[(p.step + 1) * p.ring->stride(1)] = launches[0];
    launches[0] += launches[0] >= 0;
  }
}

}  // namespace

void sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
                   Tensor repetition_penalty, Tensor seen, Tensor seeds, Tensor counters, Tensor out) {
  const Drawing p{logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters};
  check_drawing(p);
  check_rows<int64_t>("out", out, logits.size(0));
  draw_rows(p, nullptr, mutable_data<int64_t>(out));
}
REGISTER_OP(sample_tokens)

void accept_tokens(Tensor sampled_token_ids, Tensor block_table, Tensor stop_token_ids, Tensor input_ids,
                   Tensor positions, Tensor seq_lens, Tensor slot_mapping, Tensor counters, Tensor remaining,
                   Tensor seen, Tensor tokens_out, int64_t block_size, std::optional<Tensor> ring,
                   std::optional<Tensor> launches, int64_t step) {
  const Accepting p{block_table, stop_token_ids, input_ids, positions, seq_lens, slot_mapping, counters,
                    remaining, seen, tokens_out, block_size, ring, launches, step};
  check_accepting(p);
  check_rows<int64_t>("sampled_token_ids", sampled_token_ids, block_table.size(0));
  const int64_t tokens = 32 * seen.size(1), *sampled = data<int64_t>(sampled_token_ids);
  for (int64_t i = 0; i < block_table.size(0); ++i)
    STD_TORCH_CHECK((sampled[i] >= 0 && sampled[i] < tokens) || sampled[i] == NO_TOKEN ||
                        data<int32_t>(seq_lens)[i] <= 0,
                    "sampled_token_ids: expected tokens in [0, ", tokens, "), as seen has, or ", NO_TOKEN,
                    " (none could be drawn), got ", sampled[i], " in row ", i);
  accept_rows(p, sampled);
}
REGISTER_OP(accept_tokens)

void finish_step(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
                 Tensor repetition_penalty, Tensor seeds, Tensor block_table, Tensor stop_token_ids,
                 Tensor input_ids, Tensor positions, Tensor seq_lens, Tensor slot_mapping, Tensor counters,
                 Tensor remaining, Tensor seen, Tensor tokens_out, int64_t block_size,
                 std::optional<Tensor> ring, std::optional<Tensor> launches, int64_t step) {
  const Drawing drawing{logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters};
  const Accepting accepting{block_table, stop_token_ids, input_ids, positions, seq_lens, slot_mapping,
                            counters, remaining, seen, tokens_out, block_size, ring, launches, step};
  check_dims("logits", logits, {-1, -1});
  check_dims("block_table", block_table, {logits.size(0), -1});
  check_accepting(accepting);
  check_drawing(drawing);
  draw_rows(drawing, data<int32_t>(seq_lens), mutable_data<int64_t>(tokens_out));
  accept_rows(accepting, data<int64_t>(tokens_out));
}
REGISTER_OP(finish_step)

void advance_step(Tensor sampled_token_ids, Tensor block_table, Tensor input_ids, Tensor positions,
                  Tensor seq_lens, Tensor slot_mapping, int64_t block_size) {
  check_table("block_table", block_table, -1, -1);
  const int64_t rows = block_table.size(0), capacity = block_table.size(1) * block_size;
  check_rows<int64_t>("sampled_token_ids", sampled_token_ids, rows);
  check_rows<int64_t>("input_ids", input_ids, rows);
  check_rows<int64_t>("positions", positions, rows);
  check_rows<int32_t>("seq_lens", seq_lens, rows);
  check_rows<int64_t>("slot_mapping", slot_mapping, rows);
  STD_TORCH_CHECK(block_size >= 1, "block_size: expected at least 1 token, got ", block_size);
  int64_t* slots = mutable_data<int64_t>(slot_mapping);
  int32_t* lens = mutable_data<int32_t>(seq_lens);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t length = lens[i];
    if (length <= 0 || length >= capacity) { slots[i] = -1; continue; }
    slots[i] = slot_of(block_table, i, length, block_size);
    mutable_data<int64_t>(input_ids)[i] = data<int64_t>(sampled_token_ids)[i];
    mutable_data<int64_t>(positions)[i] = length;
    lens[i] = int32_t(length + 1);
  }
}
REGISTER_OP(advance_step)

}  // namespace torchpaged
