// paged_attention: checks, splitting into work items by keys (not by request), and the merge of split items.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "attention_kernel.h"
#include "../../cpu/check.h"
#include "../../cpu/instruction_set.h"
#include "../../cpu/parallel.h"

namespace torchpaged {
namespace {

// A split costs a merge of its rows; below this many keys it costs more than it balances.
constexpr int64_t MIN_SPLIT_KEYS = 256;
constexpr int64_t MAX_TREE_TOKENS = 64;  // bits of a word of a tree mask
constexpr int64_t MAX_BLOCK_SPARSE = 1 << 20;

Kernels choose(Dtype dtype) {
#if defined(__x86_64__)
  const int level = instruction_level();
#if defined(TORCHPAGED_AMX)
  if (may_use_amx()) return kernels_amx(dtype);
#endif
#if defined(TORCHPAGED_AVX512_BF16)
  if (has_bf16_products()) return kernels_avx512_bf16(dtype);
#endif
  if (level == 2) return kernels_avx512(dtype);
  if (level == 1) return kernels_avx2(dtype);
#endif
  return kernels_generic(dtype);
}

// Items of one query tile: `splits` of them, their partial states one after the other.
struct Tile { int64_t first_item, splits; };

// The last request in which each block was met, counted over all calls of the thread: no memory to clear
// between them.
struct Met {
  std::vector<uint64_t> when;
  uint64_t now = 0;
};
thread_local Met met;

void check_values(const Problem& p, int64_t max_query_len, int64_t width, int64_t num_blocks) {
  if (int64_t(met.when.size()) < num_blocks) met.when.resize(num_blocks, 0);
  STD_TORCH_CHECK(p.query_start_loc[0] == 0, "query_start_loc: expected 0 first, got ", p.query_start_loc[0]);
  for (int64_t r = 0; r < p.num_reqs; ++r) {
    const int64_t query_len = int64_t(p.query_start_loc[r + 1]) - p.query_start_loc[r],
                  seq_len = p.seq_lens[r];
    STD_TORCH_CHECK(query_len >= 0 && p.query_start_loc[r + 1] <= p.num_tokens,
                    "query_start_loc: expected not decreasing, at most ", p.num_tokens, " tokens, got ",
                    p.query_start_loc[r + 1], " in row ", r + 1);
    STD_TORCH_CHECK(query_len <= max_query_len, "max_query_len: expected at least the longest query (",
                    query_len, "), got ", max_query_len);
    STD_TORCH_CHECK(seq_len <= width * p.block_size, "seq_lens: expected at most ", width * p.block_size,
                    " tokens, got ", seq_len, "; give block_table more columns");
    if (p.tree_mask) {
      STD_TORCH_CHECK(seq_len <= 0 || seq_len >= query_len,
                      "seq_lens: expected at least the query length (", query_len,
                      ") with a tree_mask, or 0 for a padding row, got ", seq_len, " in row ", r);
      for (int64_t t = 0; t < query_len; ++t) {
        const uint64_t word = p.tree_mask[p.query_start_loc[r] + t];
        STD_TORCH_CHECK(!(word >> t >> 1),
                        "tree_mask: expected bits of the token itself and of tokens before it in its "
                        "request, got a bit of a later one in row ",
                        p.query_start_loc[r] + t, ", its request's query token ", t,
                        "; give parents smaller numbers than their children");
      }
    }
    ++met.now;
    // A ring of blocks repeats them behind what the first query sees.
    const int64_t first = std::max<int64_t>(seq_len - query_len, 0);
    int64_t oldest = p.window_left >= 0 ? std::max<int64_t>(first - p.window_left, 0) : 0;
    if (p.chunk_size > 0) oldest = std::max(oldest, first / p.chunk_size * p.chunk_size);
    for (int64_t b = 0; b * p.block_size < seq_len; ++b) {
      const int64_t block = p.block_table[r * p.table_row + b];
      STD_TORCH_CHECK(block >= 0 && block < num_blocks, "block_table: expected block ids in [0, ", num_blocks,
                      "), got ", block, " in row ", r, ", column ", b);
      if (b < oldest / p.block_size) continue;
      STD_TORCH_CHECK(block == 0 || met.when[block] != met.now,
                      "block_table: expected every block once per request (block 0, the null block, "
                      "excepted), got block ",
                      block, " several times in row ", r);
      met.when[block] = met.now;
    }
  }
}

// The keys that any query of the tile sees.
void tile_range(const Problem& p, const WorkItem& w, int64_t* low, int64_t* end) {
  const int64_t start = p.query_start_loc[w.request], seq_len = p.seq_lens[w.request],
                query_len = p.query_start_loc[w.request + 1] - start;
  *low = std::max<int64_t>(seq_len, 0);  // negative: left padding longer than what was seen so far
  *end = 0;
  for (int64_t t = 0; t < w.num_query_tokens; ++t) {
    int64_t lo, hi;
    query_range(p, start, w.first_token + t, query_len, seq_len, &lo, &hi);
    if (lo >= hi) continue;
    *low = std::min(*low, lo);
    *end = std::max(*end, hi);
  }
  if (*end < *low) *low = *end = 0;
}

void merge_splits(const Problem& p, const Kernels& kernels, const std::vector<WorkItem>& items,
                  const Tile& tile) {
  const WorkItem& w = items[tile.first_item];
  const int64_t width = p.head_dim_v + 2;
  const int64_t start = p.query_start_loc[w.request], seq_len = p.seq_lens[w.request],
                query_len = p.query_start_loc[w.request + 1] - start;
  std::vector<float> acc(p.head_dim_v);
  for (int64_t r = 0; r < w.rows(); ++r) {
    float top = FLOOR, total = 0;
    for (int64_t s = 0; s < tile.splits; ++s)
      top = std::max(top, items[tile.first_item + s].partial[r * width + p.head_dim_v]);
    std::fill(acc.begin(), acc.end(), 0.0f);
    for (int64_t s = 0; s < tile.splits; ++s) {
      const float* state = items[tile.first_item + s].partial + r * width;
      const float factor = std::exp(state[p.head_dim_v] - top);
      total += state[p.head_dim_v + 1] * factor;
      for (int64_t d = 0; d < p.head_dim_v; ++d) acc[d] += state[d] * factor;
    }
    int64_t low, end;
    query_range(p, start, w.token(r), query_len, seq_len, &low, &end);
    kernels.finish(p, start + w.token(r), w.head(r), low < end, acc.data(), top, total);
  }
}

void run(const Problem& p) {
  const Kernels kernels = choose(p.dtype);
  const int64_t group = p.num_heads / p.num_kv_heads;
  // Query tiles, each with its range of keys. A group of more than MAX_ROWS heads is cut into parts, which
  // read the same keys.
  const int64_t parts = (group + MAX_ROWS - 1) / MAX_ROWS;
  const int64_t tile_tokens = std::max<int64_t>(1, std::min<int64_t>(MAX_ROWS, 32) / group);
  std::vector<WorkItem> whole;
  int64_t total_keys = 0, work = 0;
  for (int64_t r = 0; r < p.num_reqs; ++r)
    for (int64_t h = 0; h < p.num_kv_heads * parts; ++h)
      for (int64_t t = 0, n = p.query_start_loc[r + 1] - p.query_start_loc[r]; t < n; t += tile_tokens) {
        const int64_t first = group * h / parts, end = group * (h + 1) / parts;
        WorkItem w{r, first, end - first, t, std::min(tile_tokens, n - t), 0, 0, nullptr};
        tile_range(p, w, &w.first_key, &w.end_key);
        total_keys += w.end_key - w.first_key;
        work += (w.end_key - w.first_key) * w.rows() * (p.head_dim + p.head_dim_v);
        whole.push_back(w);
      }
  const int64_t threads = workers_for(work, torch::stable::get_num_threads());
  // Split long ranges so that every thread gets about four items' worth of keys.
  const int64_t chunk =
      threads == 1 ? total_keys + 1 : std::max(MIN_SPLIT_KEYS, total_keys / (4 * threads) + 1);
  std::vector<WorkItem> items;
  std::vector<Tile> split;
  std::vector<int64_t> offsets;
  int64_t partial_floats = 0;
  for (const WorkItem& w : whole) {
    const int64_t keys = w.end_key - w.first_key, splits = std::max<int64_t>(1, (keys + chunk - 1) / chunk);
    if (splits > 1) split.push_back({int64_t(items.size()), splits});
    for (int64_t s = 0; s < splits; ++s) {
      WorkItem part = w;
      part.first_key = w.first_key + keys * s / splits;
      part.end_key = w.first_key + keys * (s + 1) / splits;
      items.push_back(part);
      offsets.push_back(splits > 1 ? partial_floats : -1);
      if (splits > 1) partial_floats += w.rows() * (p.head_dim_v + 2);
    }
  }
  std::vector<float> partials(partial_floats);
  for (size_t i = 0; i < items.size(); ++i)
    if (offsets[i] >= 0) items[i].partial = partials.data() + offsets[i];
  auto all = [&](int64_t count, auto&& body) {  // dynamic: items differ in length
    if (threads == 1 || count <= 1) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    ++parallel_regions;
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot)
        for (int64_t i; (i = next.fetch_add(1)) < count;) body(i);
    });
  };
  all(int64_t(items.size()), [&](int64_t i) { kernels.run(p, items[i]); });
  // Merging is a small part of the work: never a region of its own.
  for (const Tile& tile : split) merge_splits(p, kernels, items, tile);
  // Token rows after the last request: padding, but defined.
  const std::vector<float> zeros(p.head_dim_v, 0.0f);
  for (int64_t t = p.query_start_loc[p.num_reqs]; t < p.num_tokens; ++t)
    for (int64_t h = 0; h < p.num_heads; ++h) kernels.finish(p, t, h, false, zeros.data(), FLOOR, 0.0f);
}

// Small per-head tensors come in any float dtype; the kernels read floats.
const float* as_floats(const char* name, const std::optional<Tensor>& t, int64_t count,
                       std::optional<Tensor>* keep) {
  if (!t) return nullptr;
  check_dims(name, *t, {count});
  check_cpu(name, *t);
  check_float(name, *t);
  *keep = torch::stable::contiguous(torch::stable::to(*t, ScalarType::Float));
  return data<float>(**keep);
}

}  // namespace

void paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
                     Tensor query_start_loc, Tensor out, std::optional<Tensor> lse, int64_t max_query_len,
                     double scale, bool causal, int64_t window_left, int64_t window_right,
                     double logits_soft_cap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                     std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, int64_t chunk_size,
                     std::optional<Tensor> tree_mask, std::optional<Tensor> output_scale,
                     std::optional<std::vector<int64_t>> block_sparse,
                     std::optional<Tensor> /*semaphore: for kernels that merge on a device*/) {
  check_pools(k_cache, v_cache);
  STD_TORCH_CHECK(!k_scale && !v_scale,
                  "k_scale, v_scale: expected None (the cpu backend has no fp8 pools), got a tensor");
  check_dims("q", q, {-1, -1, k_cache.size(3)});
  check_float("q", q);
  const int64_t num_kv_heads = k_cache.size(2);
  STD_TORCH_CHECK(q.size(1) > 0 && q.size(1) % num_kv_heads == 0,
                  "q: expected num_heads a multiple of num_kv_heads (", num_kv_heads, "), got ", q.size(1),
                  " heads");
  STD_TORCH_CHECK(k_cache.scalar_type() == q.scalar_type(),
                  "k_cache: expected the dtype of q (the cpu backend has no fp8 pools), got another");
  check_dims("out", out, {q.size(0), q.size(1), v_cache.size(3)});
  check_results_dtype("q", q, out, output_scale);
  check_dims("block_table", block_table, {-1, -1});
  check_dims("seq_lens", seq_lens, {block_table.size(0)});
  check_dims("query_start_loc", query_start_loc, {block_table.size(0) + 1});
  const Tensor* ints[] = {&block_table, &seq_lens, &query_start_loc};
  const char* int_names[] = {"block_table", "seq_lens", "query_start_loc"};
  for (int i = 0; i < 3; ++i) {
    check_dtype(int_names[i], *ints[i], ScalarType::Int, "torch.int32");
    check_cpu(int_names[i], *ints[i]);
    check_last_dim(int_names[i], *ints[i]);
  }
  check_cpu("q", q); check_cpu("out", out);
  check_last_dim("q", q); check_last_dim("out", out);
  if (lse) {
    check_dims("lse", *lse, {q.size(0), q.size(1)});
    check_dtype("lse", *lse, ScalarType::Float, "torch.float32");
    check_cpu("lse", *lse);
    check_own_elements("lse", *lse);
    const Tensor* read[] = {&q, &k_cache, &v_cache, &out};
    const char* names[] = {"q", "k_cache", "v_cache", "out"};
    for (int i = 0; i < 4; ++i) check_apart(names[i], *read[i], "lse", *lse);
    if (output_scale) check_apart("output_scale", *output_scale, "lse", *lse);
  }
  check_own_elements("out", out);
  STD_TORCH_CHECK(max_query_len >= 1, "max_query_len: expected at least 1, got ", max_query_len);
  check_apart("q", q, "out", out);
  check_apart("k_cache", k_cache, "out", out);
  check_apart("v_cache", v_cache, "out", out);
  STD_TORCH_CHECK(scale > 0 && std::isfinite(float(scale)),
                  "scale: expected a positive number that float32 holds, got ", scale);
  STD_TORCH_CHECK(window_left >= -1, "window_left: expected -1 (open) or a number of keys >= 0, got ",
                  window_left);
  STD_TORCH_CHECK(window_right >= -1, "window_right: expected -1 (open) or a number of keys >= 0, got ",
                  window_right);
  STD_TORCH_CHECK(logits_soft_cap == 0 || (logits_soft_cap >= 1e-30 && logits_soft_cap <= 1e30),
                  "logits_soft_cap: expected 0 (off) or a number in [1e-30, 1e30], got ", logits_soft_cap);
  STD_TORCH_CHECK(chunk_size >= 0, "chunk_size: expected 0 (off) or a positive number of tokens, got ",
                  chunk_size);
  if (tree_mask) {
    check_dims("tree_mask", *tree_mask, {q.size(0)});
    check_dtype("tree_mask", *tree_mask, ScalarType::Long, "torch.int64");
    check_cpu("tree_mask", *tree_mask);
    check_last_dim("tree_mask", *tree_mask);
    STD_TORCH_CHECK(causal, "causal: expected True with a tree_mask: no query token sees a later one of its "
                            "request, got False");
    STD_TORCH_CHECK(max_query_len <= MAX_TREE_TOKENS, "max_query_len: expected at most ", MAX_TREE_TOKENS,
                    " with a tree_mask, which has a bit for each query token of a request, got ",
                    max_query_len, "; attend to longer queries in a call of their own");
  }
  std::optional<Tensor> slopes, sink_values;
  Problem p{};
  if (block_sparse) {
    const std::vector<int64_t>& x = *block_sparse;
    STD_TORCH_CHECK(x.size() == 6, "block_sparse: expected six numbers, got ", x.size());
    for (int64_t i = 0; i < 6; ++i)
      STD_TORCH_CHECK(x[i] >= (i < 3 || i == 5) && x[i] <= MAX_BLOCK_SPARSE,
                      "block_sparse: expected numbers in [1, ", MAX_BLOCK_SPARSE,
                      "], the fourth and fifth from 0 on, got ", x[i], " in place ", i);
    STD_TORCH_CHECK(causal, "causal: expected True with block_sparse, got False");
    STD_TORCH_CHECK(!tree_mask, "tree_mask: expected none with block_sparse, got one");
    p.block_sparse = {x[0], x[1], x[2], x[3], x[4], x[5]};
  }
  p.dtype = q.scalar_type() == ScalarType::BFloat16 ? Dtype::BFloat16
            : q.scalar_type() == ScalarType::Half   ? Dtype::Half
                                                    : Dtype::Float;
  p.alibi_slopes = as_floats("alibi_slopes", alibi_slopes, q.size(1), &slopes);
  p.sinks = as_floats("sinks", sinks, q.size(1), &sink_values);
  p.q = q.const_data_ptr(); p.k_cache = k_cache.const_data_ptr(); p.v_cache = v_cache.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.output_scale = output_scale ? data<float>(*output_scale) : nullptr;
  p.lse = lse ? mutable_data<float>(*lse) : nullptr;
  p.block_table = data<int32_t>(block_table);
  p.seq_lens = data<int32_t>(seq_lens);
  p.query_start_loc = data<int32_t>(query_start_loc);
  p.num_reqs = block_table.size(0);
  p.num_tokens = q.size(0);
  p.num_heads = q.size(1);
  p.num_kv_heads = num_kv_heads;
  p.head_dim = q.size(2); p.head_dim_v = v_cache.size(3); p.block_size = k_cache.size(1);
  p.q_token = q.stride(0); p.q_head = q.stride(1);
  p.k_block = k_cache.stride(0); p.k_slot = k_cache.stride(1); p.k_head = k_cache.stride(2);
  p.v_block = v_cache.stride(0); p.v_slot = v_cache.stride(1); p.v_head = v_cache.stride(2);
  p.o_token = out.stride(0); p.o_head = out.stride(1);
  p.lse_token = lse ? lse->stride(0) : 0; p.lse_head = lse ? lse->stride(1) : 0;
  p.table_row = block_table.stride(0);
  p.scale = float(scale); p.soft_cap = float(logits_soft_cap); p.causal = causal;
  p.window_left = window_left; p.window_right = window_right; p.chunk_size = chunk_size;
  p.tree_mask = tree_mask ? data<int64_t>(*tree_mask) : nullptr;
  check_values(p, max_query_len, block_table.size(1), k_cache.size(0));
  run(p);
}
REGISTER_OP(paged_attention)

}  // namespace torchpaged
