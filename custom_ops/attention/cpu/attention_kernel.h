// One work item of paged attention: some query rows of one kv head against a range of keys, softmax online.
// Compiled once per instruction set by kernel_*.cpp, chosen at run time by paged_attention.cpp.
#pragma once
#include <cstdint>

namespace torchpaged {

enum class Dtype { Float, BFloat16, Half };

// A mask that hides blocks of keys, as custom_ops/attention/mask.py has it; block_size 0: there is none.
struct BlockSparse {
  int64_t block_size, local_blocks, vertical_stride, offset, head_step, heads_per_step;

  bool sees(int64_t query_block, int64_t block, int64_t head) const {
    return query_block - block < local_blocks ||
           (block + offset + head / heads_per_step * head_step) % vertical_stride == 0;
  }
};

// Everything about the call; strides in elements. Layouts: custom_ops/attention/schema.py.
struct Problem {
  Dtype dtype;
  const void *q, *k_cache, *v_cache;
  void* out;
  const float* output_scale;  // may be null; else out is e4m3, over this number
  float* lse;  // may be null
  const int32_t *block_table, *seq_lens, *query_start_loc;
  const float *alibi_slopes, *sinks;  // may be null
  int64_t num_reqs, num_tokens, num_heads, num_kv_heads, head_dim, head_dim_v, block_size;
  int64_t q_token, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, o_token, o_head, lse_token,
      lse_head, table_row;
  float scale, soft_cap;
  bool causal;
  int64_t window_left, window_right, chunk_size;
  const int64_t* tree_mask;  // may be null
  BlockSparse block_sparse;
};

// Rows are (query token, head) pairs: row r is token first_token + r / num_heads, head first_head + r %
// num_heads. The heads are of one kv head.
struct WorkItem {
  // first_token counts from the request's first query
  int64_t request, first_head, num_heads, first_token, num_query_tokens;
  int64_t first_key, end_key;
  // null: write the result; else [rows, head_dim_v + 2] floats: accumulator, running maximum, running sum
  float* partial;

  int64_t rows() const { return num_query_tokens * num_heads; }
  int64_t token(int64_t row) const { return first_token + row / num_heads; }
  int64_t head(int64_t row) const { return first_head + row % num_heads; }
};

constexpr int64_t MAX_ROWS = 128;  // rows of a work item
constexpr int64_t TILE_KV = 64;   // keys per softmax step: the bits of a word
// where a row's maximum begins: finite, so that a row that has seen nothing makes no inf - inf
constexpr float FLOOR = -1e30f;

// The keys between the first and the last that the query at `position` sees.
inline void visible_range(const Problem& p, int64_t position, int64_t seq_len, int64_t* low, int64_t* end) {
  int64_t lo = 0, hi = seq_len;
  if (position < 0) { *low = *end = 0; return; }
  if (p.causal && position + 1 < hi) hi = position + 1;
  if (p.window_left >= 0 && position - p.window_left > lo) lo = position - p.window_left;
  if (p.window_right >= 0 && position + p.window_right + 1 < hi) hi = position + p.window_right + 1;
  if (p.chunk_size > 0) {
    const int64_t chunk = position / p.chunk_size * p.chunk_size;
    if (chunk > lo) lo = chunk;
    if (chunk + p.chunk_size < hi) hi = chunk + p.chunk_size;
  }
  *low = lo;
  *end = hi > lo ? hi : lo;
}

// What a query token sees under a tree mask: the context, whose keys are those before `context`, and of the
// request's query tokens those of `word`, its own among them. It counts positions over what it sees.
struct Branch {
  int64_t context;
  uint64_t word;

  // of query token `t` of a request that begins at token row `start`
  Branch(const Problem& p, int64_t start, int64_t context, int64_t t) : context(context) {
    word = (uint64_t(p.tree_mask[start + t]) & before(t)) | (uint64_t(1) << t);
  }
  static uint64_t before(int64_t t) { return (uint64_t(1) << t) - 1; }
  bool sees(int64_t key) const { return key < context || (word >> (key - context) & 1); }
  int64_t position(int64_t key) const {
    return key < context ? key : context + __builtin_popcountll(word & before(key - context));
  }
};

// The keys between the first and the last that query token `t` sees, whose request begins at token row
// `start`; under a tree mask some in between are not seen (struct Branch).
inline void query_range(const Problem& p, int64_t start, int64_t t, int64_t query_len, int64_t seq_len,
                        int64_t* low, int64_t* end) {
  const int64_t context = seq_len - query_len, position = context + t;
  if (!p.tree_mask || position < 0) return visible_range(p, position, seq_len, low, end);
  visible_range(p, Branch(p, start, context, t).position(position), seq_len, low, end);
  *end = position + 1;
}

// Bits [from, to) of a word, both clamped to its size.
inline uint64_t bits(int64_t from, int64_t to) {
  from = from < 0 ? 0 : from;
  to = to > 64 ? 64 : to;
  return from < to ? ~uint64_t(0) >> (64 - (to - from)) << from : 0;
}

// The keys that one row of a work item sees.
struct RowMask {
  int64_t low, end;            // the first of them, and behind the last
  int64_t context = INT64_MAX; // from here on a tree mask may hide keys in between
  int64_t low_position = 0;    // of keys as the row counts them under a tree mask
  uint64_t word = 0;
  BlockSparse pattern{};
  int64_t query_block = 0, head = 0;

  RowMask() = default;
  RowMask(const Problem& p, const WorkItem& w, int64_t row, int64_t start, int64_t query_len,
          int64_t seq_len) {
    const int64_t token = w.token(row);
    query_range(p, start, token, query_len, seq_len, &low, &end);
    if (p.tree_mask && end > low) {
      const Branch branch(p, start, seq_len - query_len, token);
      context = branch.context, word = branch.word, low_position = low;
    }
    pattern = p.block_sparse, head = w.head(row);
    if (pattern.block_size && end > low) query_block = (end - 1) / pattern.block_size;  // the own key is last
    low = low > w.first_key ? low : w.first_key;
    end = end < w.end_key ? end : w.end_key;
  }
  // Of the keys `tile` and the 63 behind it, a bit each.
  uint64_t of(int64_t tile) const {
    uint64_t seen = bits(low - tile, end - tile);
    for (int64_t key = tile < context ? context : tile; key < end && key < tile + 64; ++key)
      if (!sees(key)) seen &= ~(uint64_t(1) << (key - tile));
    if (const int64_t size = pattern.block_size)
      for (int64_t block = tile / size; block * size < tile + 64 && seen; ++block)
        if (!pattern.sees(query_block, block, head))
          seen &= ~bits(block * size - tile, (block + 1) * size - tile);
    return seen;
  }

 private:
  bool sees(int64_t key) const {
    const uint64_t before = (uint64_t(1) << (key - context)) - 1;
    return (word >> (key - context) & 1) && context + __builtin_popcountll(word & before) >= low_position;
  }
};

// Divide an accumulator by its sum, add the sink's term, write out and lse of one row; zeros and -inf unless
// it `sees` any key. The sum does not tell: it is NaN where a score was NaN or +inf, and 0 where all were
// -inf, which makes 0 / 0.
using FinishRow = void (*)(const Problem&, int64_t token, int64_t head, bool sees, const float* acc,
                           float maximum, float sum);
using RunItem = void (*)(const Problem&, const WorkItem&);
struct Kernels { RunItem run; FinishRow finish; };

Kernels kernels_generic(Dtype dtype);
#if defined(__x86_64__)
Kernels kernels_avx2(Dtype dtype);
Kernels kernels_avx512(Dtype dtype);
Kernels kernels_avx512_bf16(Dtype dtype);
Kernels kernels_amx(Dtype dtype);
#endif

}  // namespace torchpaged
