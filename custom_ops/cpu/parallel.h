// When a kernel opens a parallel region, and with how many threads.
//
// Threads that wait for a region spin for a while first; where others want the cores, the region then ends
// with a scheduler's time slice (milliseconds) instead of microseconds. So a region must be worth it: every
// thread of it gets at least MIN_WORK.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace torchpaged {

// Multiply-adds, or bytes moved divided by two: some 50 microseconds of one core.
constexpr int64_t MIN_WORK = int64_t(1) << 19;

// Threads for `work` when `threads` may be had; 1 = no region.
inline int64_t workers_for(int64_t work, int64_t threads) {
  return std::max<int64_t>(1, std::min(threads, work / MIN_WORK));
}

// Regions opened by these kernels since the library was loaded; tests read it.
extern std::atomic<int64_t> parallel_regions;

// body(begin, end) over [0, count), each item `item_work` heavy: in one go, or cut into as many equal pieces
// as there are workers.
template <typename Body>
void for_each_range(int64_t count, int64_t item_work, const Body& body) {
  const int64_t workers = std::min(count, workers_for(count * item_work, torch::stable::get_num_threads()));
  if (workers <= 1) {
    if (count > 0) body(int64_t(0), count);
    return;
  }
  ++parallel_regions;
  torch::stable::parallel_for(0, count, (count + workers - 1) / workers, body);
}

}  // namespace torchpaged
