// What tests see of parallel.h, by ctypes: plain C functions.
#include "parallel.h"

namespace torchpaged {
std::atomic<int64_t> parallel_regions{0};
}

extern "C" {
__attribute__((visibility("default"))) int64_t torchpaged_workers_for(int64_t work, int64_t threads) {
  return torchpaged::workers_for(work, threads);
}
__attribute__((visibility("default"))) int64_t torchpaged_parallel_regions() {
  return torchpaged::parallel_regions.load();
}
}
