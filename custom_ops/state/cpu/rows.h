// The rows of a batch as the state ops have them: which write, and zeros elsewhere.
#pragma once
#include <vector>

#include "state_kernel.h"
#include "../../cpu/operands.h"

namespace torchpaged {

// The rows that write, and zeros in `out [tokens, ...]` wherever none of them does.
inline std::vector<Row> rows_of(const Tensor& state_slots, const Tensor& seq_lens,
                                const Tensor& query_start_loc, int64_t max_query_len,
                                int64_t num_slots, const Tensor& out) {
  check_dims("state_slots", state_slots, {-1});
  const int64_t num_reqs = state_slots.size(0), num_tokens = out.size(0);
  check_dims("seq_lens", seq_lens, {num_reqs});
  check_dims("query_start_loc", query_start_loc, {num_reqs + 1});
  const Named batch[] = {{"state_slots", &state_slots}, {"seq_lens", &seq_lens},
                         {"query_start_loc", &query_start_loc}};
  for (const Named& each : batch) {
    check_dtype(each.name, *each.tensor, ScalarType::Int, "torch.int32");
    check_cpu(each.name, *each.tensor);
    check_last_dim(each.name, *each.tensor);
  }
  STD_TORCH_CHECK(max_query_len >= 1, "max_query_len: expected at least 1, got ", max_query_len);
  const int32_t *slots = data<int32_t>(state_slots), *lens = data<int32_t>(seq_lens),
                *starts = data<int32_t>(query_start_loc);
  STD_TORCH_CHECK(starts[0] == 0, "query_start_loc: expected 0 first, got ", starts[0]);
  std::vector<Row> rows;
  std::vector<int32_t> taken;
  for (int64_t r = 0; r < num_reqs; ++r) {
    const int64_t begin = starts[r], end = starts[r + 1], len = end - begin;
    STD_TORCH_CHECK(len >= 0 && end <= num_tokens, "query_start_loc: expected not decreasing, at most ",
                    num_tokens, " tokens, got ", end, " in row ", r + 1);
    STD_TORCH_CHECK(len <= max_query_len, "max_query_len: expected at least the longest query (", len,
                    "), got ", max_query_len);
    STD_TORCH_CHECK(slots[r] >= 0 && slots[r] < num_slots, "state_slots: expected slots in [0, ", num_slots,
                    "), got ", slots[r]);
    const int64_t first = std::min(std::max<int64_t>(len - lens[r], 0), len);
    if (!slots[r] || first == len) continue;
    rows.push_back({slots[r], begin + first, end, lens[r] <= len});
    taken.push_back(slots[r]);
  }
  std::sort(taken.begin(), taken.end());
  const auto twice = std::adjacent_find(taken.begin(), taken.end());
  STD_TORCH_CHECK(twice == taken.end(), "state_slots: expected one request per slot (slot 0 excepted), got ",
                  "slot ", twice == taken.end() ? 0 : *twice, " several times");
  return rows;
}

// All zeros are zero bytes. `out` has contiguous numbers in its last dimension alone.
inline void zero_elsewhere(const Tensor& out, const std::vector<Row>& rows) {
  char* base = static_cast<char*>(out.mutable_data_ptr());
  const int64_t size = out.element_size(), heads = out.dim() == 3 ? out.size(1) : 1,
                bytes = out.size(out.dim() - 1) * size, head = out.dim() == 3 ? out.stride(1) * size : 0;
  const auto zero = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) std::memset(base + t * out.stride(0) * size + h * head, 0, bytes);
  };
  int64_t done = 0;
  for (const Row& row : rows) {
    zero(done, row.begin);
    done = row.end;
  }
  zero(done, out.size(0));
}

inline int64_t tokens_of(const std::vector<Row>& rows) {
  int64_t tokens = 0;
  for (const Row& row : rows) tokens += row.end - row.begin;
  return tokens;
}

}  // namespace torchpaged
