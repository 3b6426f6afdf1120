// write_kv and copy_blocks: rows of bytes moved between tokens and pools, into pools of fp8 rounded.
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e5m2.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#define VEC_WIDTH 4
#include "parallel.h"
#include "pool_writes.h"
#include "vec.h"

namespace torchpaged {
namespace {

// store(to, from, head): one row of numbers.
template <typename Store>
void scatter(const TokenRows& x, const Tensor& cache, const Tensor& slot_mapping, const Store& store) {
  const int64_t size = cache.element_size(), block_size = cache.size(1), heads = cache.size(2),
                row = cache.size(3) * size;
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t c_block = cache.stride(0) * size, c_slot = cache.stride(1) * size,
                c_head = cache.stride(2) * size;
  const int64_t* slots = data<int64_t>(slot_mapping);
  const int64_t slot_stride = slot_mapping.stride(0);
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = slots[i * slot_stride];
      if (slot < 0) continue;
      char* target = to + slot / block_size * c_block + slot % block_size * c_slot;
      for (int64_t h = 0; h < heads; ++h) store(target + h * c_head, x.data + i * x.token + h * x.head, h);
    }
  };
  for_each_range(slot_mapping.size(0), (row * heads + 1) / 2, body);
}

bool is_fp8(const Tensor& cache) {
  return cache.scalar_type() == ScalarType::Float8_e4m3fn || cache.scalar_type() == ScalarType::Float8_e5m2;
}

// Into a pool of fp8: divided by the head's scale, numbers beyond the range as its largest, NaN as NaN.
template <typename T>
void scatter_fp8(const TokenRows& x, const Tensor& cache, const Tensor& slot_mapping,
                 const std::optional<Tensor>& scale) {
  const bool e4m3 = cache.scalar_type() == ScalarType::Float8_e4m3fn;
  const float limit = e4m3 ? 448.0f : 57344.0f;
  const float* scales = scale ? data<float>(*scale) : nullptr;
  const int64_t step = scale && scale->numel() > 1 ? scale->stride(0) : 0, width = cache.size(3);
  scatter(x, cache, slot_mapping, [=](char* to, const char* from, int64_t head) {
    const float divisor = scales ? scales[head * step] : 1.0f;
    for (int64_t d = 0; d < width; ++d) {
      float y = to_float(reinterpret_cast<const T*>(from)[d]) / divisor;
      if (std::fabs(y) > limit) y = std::copysign(limit, y);
      to[d] = char(e4m3 ? torch::headeronly::Float8_e4m3fn(y).x : torch::headeronly::Float8_e5m2(y).x);
    }
  });
}

template <typename T>
void scatter_rounded(const TokenRows& x, const Tensor& cache, const Tensor& slot_mapping) {
  scatter(x, cache, slot_mapping, [width = cache.size(3)](char* to, const char* from, int64_t) {
    for (int64_t d = 0; d < width; ++d)
      from_float(reinterpret_cast<const float*>(from)[d], reinterpret_cast<T*>(to) + d);
  });
}

void check_scale(const char* name, const std::optional<Tensor>& scale, bool fp8, int64_t num_kv_heads) {
  if (!scale) return;
  STD_TORCH_CHECK(fp8, name, ": expected None for a cache that is not fp8, got a tensor");
  check_dtype(name, *scale, ScalarType::Float, "torch.float32");
  check_cpu(name, *scale);
  const int64_t count = scale->numel(), step = scale->dim() ? scale->stride(0) : 0;
  STD_TORCH_CHECK(scale->dim() < 2 && (count == 1 || count == num_kv_heads), name,
                  ": expected one scale or one per kv head (", num_kv_heads, "), got ", shape_of(*scale));
  for (int64_t i = 0; i < count; ++i) {
    const float one = data<float>(*scale)[i * step];
    STD_TORCH_CHECK(one > 0 && std::isfinite(one), name, ": expected positive finite numbers, got ", one);
  }
}

// No two tokens have one slot, but for -1 and the slots of block 0, which hold no request's tokens.
void check_distinct(const int64_t* slots, int64_t stride, int64_t count, int64_t block_size) {
  std::vector<int64_t> sorted;
  for (int64_t i = 0; i < count; ++i)
    if (slots[i * stride] >= block_size) sorted.push_back(slots[i * stride]);
  if (!std::is_sorted(sorted.begin(), sorted.end())) std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  STD_TORCH_CHECK(twice == sorted.end(), "slot_mapping: expected one token per slot, got slot ", *twice,
                  " (block ", *twice / block_size,
                  ") several times; two requests share a block that is still written: give each its own");
}

}  // namespace

void store_tokens(const TokenRows& x, const Tensor& cache, const Tensor& slot_mapping,
                  const std::optional<Tensor>& scale) {
  if (x.dtype == cache.scalar_type()) {
    const size_t row = size_t(cache.size(3) * cache.element_size());
    return scatter(x, cache, slot_mapping,
                   [=](char* to, const char* from, int64_t) { std::memcpy(to, from, row); });
  }
  if (!is_fp8(cache))
    return cache.scalar_type() == ScalarType::BFloat16 ? scatter_rounded<bf16>(x, cache, slot_mapping)
                                                       : scatter_rounded<fp16>(x, cache, slot_mapping);
  switch (x.dtype) {
    case ScalarType::BFloat16: return scatter_fp8<bf16>(x, cache, slot_mapping, scale);
    case ScalarType::Half: return scatter_fp8<fp16>(x, cache, slot_mapping, scale);
    default: return scatter_fp8<float>(x, cache, slot_mapping, scale);
  }
}

void check_token_writes(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& slot_mapping, const std::optional<Tensor>& k_scale,
                        const std::optional<Tensor>& v_scale) {
  check_pools(k_cache, v_cache, true);
  const bool fp8 = is_fp8(k_cache);
  if (!fp8) check_float("k_cache", k_cache);
  check_float("k", k);
  check_scale("k_scale", k_scale, fp8, k_cache.size(2));
  check_scale("v_scale", v_scale, fp8, k_cache.size(2));
  check_dims("slot_mapping", slot_mapping, {-1});
  check_dims("k", k, {slot_mapping.size(0), k_cache.size(2), k_cache.size(3)});
  check_dims("v", v, {slot_mapping.size(0), v_cache.size(2), v_cache.size(3)});
  check_dtype("slot_mapping", slot_mapping, ScalarType::Long, "torch.int64");
  STD_TORCH_CHECK(v.scalar_type() == k.scalar_type() && (fp8 || k.scalar_type() == k_cache.scalar_type()),
                  "k, v: expected the pools' dtype, or one for pools of fp8, got another");
  check_cpu("k", k); check_cpu("v", v); check_cpu("slot_mapping", slot_mapping);
  check_last_dim("k", k); check_last_dim("v", v);
  const int64_t* slots = data<int64_t>(slot_mapping);
  const int64_t stride = slot_mapping.stride(0), num_slots = k_cache.size(0) * k_cache.size(1);
  for (int64_t i = 0; i < slot_mapping.size(0); ++i)
    STD_TORCH_CHECK(slots[i * stride] >= -1 && slots[i * stride] < num_slots,
                    "slot_mapping: expected slots in [-1, ", num_slots, "), got ", slots[i * stride],
                    "; the pool is too small or the block table wrong");
  check_own_elements("k_cache", k_cache); check_own_elements("v_cache", v_cache);
  check_apart("k", k, "k_cache", k_cache); check_apart("k", k, "v_cache", v_cache);
  check_apart("v", v, "k_cache", k_cache); check_apart("v", v, "v_cache", v_cache);
  check_distinct(slots, stride, slot_mapping.size(0), k_cache.size(1));
}

void write_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
              std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, bool /*are_query_tokens*/) {
  check_token_writes(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale);
  store_tokens(rows_of(k), k_cache, slot_mapping, k_scale);
  store_tokens(rows_of(v), v_cache, slot_mapping, v_scale);
}
REGISTER_OP(write_kv)

void copy_blocks(Tensor k_cache, Tensor v_cache, Tensor block_mapping) {
  check_pools(k_cache, v_cache);
  check_own_elements("k_cache", k_cache); check_own_elements("v_cache", v_cache);
  check_dims("block_mapping", block_mapping, {-1, 2});
  check_dtype("block_mapping", block_mapping, ScalarType::Long, "torch.int64");
  check_cpu("block_mapping", block_mapping);
  const int64_t* pairs = data<int64_t>(block_mapping);
  const int64_t s0 = block_mapping.stride(0), s1 = block_mapping.stride(1), num_blocks = k_cache.size(0);
  std::set<int64_t> sources, destinations;
  for (int64_t i = 0; i < block_mapping.size(0); ++i) {
    const int64_t from = pairs[i * s0], to = pairs[i * s0 + s1];
    if (from < 0 || to < 0) continue;
    STD_TORCH_CHECK(from < num_blocks && to < num_blocks, "block_mapping: expected block ids below ",
                    num_blocks, ", got (", from, ", ", to, ")");
    STD_TORCH_CHECK(
        to != 0 && destinations.insert(to).second,
        "block_mapping: expected distinct destinations, none of them a source or the null block 0, got ", to);
    sources.insert(from);
  }
  for (int64_t to : destinations)
    STD_TORCH_CHECK(
        !sources.count(to),
        "block_mapping: expected distinct destinations, none of them a source or the null block 0, got ", to);
  for (const Tensor* cache : {&k_cache, &v_cache}) {
    const int64_t size = cache->element_size(), row = cache->size(3) * size;
    char* base = static_cast<char*>(cache->mutable_data_ptr());
    for (int64_t i = 0; i < block_mapping.size(0); ++i) {
      const int64_t from = pairs[i * s0], to = pairs[i * s0 + s1];
      if (from < 0 || to < 0) continue;
      for (int64_t slot = 0; slot < cache->size(1); ++slot)
        for (int64_t head = 0; head < cache->size(2); ++head) {
          const int64_t inner = (slot * cache->stride(1) + head * cache->stride(2)) * size;
          std::memcpy(base + to * cache->stride(0) * size + inner,
                      base + from * cache->stride(0) * size + inner, row);
        }
    }
  }
}
REGISTER_OP(copy_blocks)

}  // namespace torchpaged
