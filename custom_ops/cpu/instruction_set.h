// Which kernels this processor runs. Only for units that are compiled for every processor.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(TORCHPAGED_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace torchpaged {

// 2: AVX-512 F, BW, VL and DQ; 1: AVX2 with FMA; 0: neither.
inline int instruction_level() {
#if defined(__x86_64__)
  static const int level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      return 2;
    // GCC before 11 can't be asked for F16C; a processor with AVX2 has it
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
  }();
  return level;
#else
  return 0;
#endif
}

#if defined(__x86_64__)
// Whether AVX-512 multiplies pairs of bf16.
inline bool has_bf16_products() {
  static const bool has = instruction_level() == 2 && __builtin_cpu_supports("avx512bf16");
  return has;
}
#endif

#if defined(TORCHPAGED_AMX)
// Whether the processor multiplies tiles of bf16, and Linux keeps them for this process, which must ask.
inline bool may_use_amx() {
  static const bool may = [] {
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, d;
    return instruction_level() == 2 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) &&
           (d & AMX_TILE) && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  }();
  return may;
}
#endif

// Whether products of several tokens keep memory waiting unless it is asked ahead: with AVX-512, on Intel's
// processors, a Zen 4 and a Zen 5.
inline bool asks_ahead() { return instruction_level() == 2; }

// Whether memory gives more where several rows are read side by side than one after another: Intel's cores
// fetch ahead for each page apart.
inline bool reads_side_by_side() {
#if defined(__x86_64__)
  static const bool reads = instruction_level() == 2 && __builtin_cpu_is("intel");
  return reads;
#else
  return false;
#endif
}

}  // namespace torchpaged

// Of a function that has a copy for each instruction set: the best one that this processor runs.
#if defined(__x86_64__)
#define TORCHPAGED_BEST(function)                           \
  (instruction_level() == 2   ? function##_avx512           \
   : instruction_level() == 1 ? function##_avx2             \
                              : function##_generic)
#else
#define TORCHPAGED_BEST(function) function##_generic
#endif
