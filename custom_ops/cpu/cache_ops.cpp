// write_kv and copy_blocks: rows of bytes moved between tokens and pools.
#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "ops.h"
#include "parallel.h"

namespace torchpaged {
namespace {

void scatter(const Tensor& x, const Tensor& cache, const int64_t* slots, int64_t slot_stride) {
  const int64_t size = cache.element_size(), block_size = cache.size(1), heads = cache.size(2),
                row = cache.size(3) * size;
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t token = x.stride(0) * size, head = x.stride(1) * size;
  const int64_t c_block = cache.stride(0) * size, c_slot = cache.stride(1) * size,
                c_head = cache.stride(2) * size;
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t slot = slots[i * slot_stride];
      if (slot < 0) continue;
      char* target = to + slot / block_size * c_block + slot % block_size * c_slot;
      for (int64_t h = 0; h < heads; ++h) std::memcpy(target + h * c_head, from + i * token + h * head, row);
    }
  };
  for_each_range(x.size(0), (row * heads + 1) / 2, body);
}

// No two tokens have one slot, but for -1 and the slots of block 0, which hold nobody's tokens.
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

void write_kv(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping,
              std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, bool /*are_query_tokens*/) {
  check_pools(k_cache, v_cache, true);
  check_float("k_cache", k_cache);
  STD_TORCH_CHECK(!k_scale && !v_scale,
                  "k_scale, v_scale: expected None (the cpu backend has no fp8 pools), got a tensor");
  check_dims("slot_mapping", slot_mapping, {-1});
  check_dims("k", k, {slot_mapping.size(0), k_cache.size(2), k_cache.size(3)});
  check_dims("v", v, {slot_mapping.size(0), v_cache.size(2), v_cache.size(3)});
  check_dtype("slot_mapping", slot_mapping, ScalarType::Long, "torch.int64");
  STD_TORCH_CHECK(k.scalar_type() == k_cache.scalar_type() && v.scalar_type() == k_cache.scalar_type(),
                  "k, v: expected the pools' dtype, got another");
  check_cpu("k", k); check_cpu("v", v); check_cpu("slot_mapping", slot_mapping);
  check_last_dim("k", k); check_last_dim("v", v);
  const int64_t* slots = data<int64_t>(slot_mapping);
  const int64_t stride = slot_mapping.stride(0), num_slots = k_cache.size(0) * k_cache.size(1);
  for (int64_t i = 0; i < slot_mapping.size(0); ++i)
    STD_TORCH_CHECK(slots[i * stride] >= -1 && slots[i * stride] < num_slots,
                    "slot_mapping: expected slots in [-1, ", num_slots, "), got ", slots[i * stride],
                    "; the pool is too small or the block table wrong");
  check_apart("k", k, "k_cache", k_cache); check_apart("k", k, "v_cache", v_cache);
  check_apart("v", v, "k_cache", k_cache); check_apart("v", v, "v_cache", v_cache);
  check_distinct(slots, stride, slot_mapping.size(0), k_cache.size(1));
  scatter(k, k_cache, slots, stride);
  scatter(v, v_cache, slots, stride);
}

void copy_blocks(Tensor k_cache, Tensor v_cache, Tensor block_mapping) {
  check_pools(k_cache, v_cache);
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

}  // namespace torchpaged
