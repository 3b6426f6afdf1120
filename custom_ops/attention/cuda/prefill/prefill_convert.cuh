// Keys and values of an fp8 cache on their way to the tensor cores: the other warps of the producer's
// warpgroup make 16-bit numbers of them, swizzled as the copy engine would have left them. Every number of
// either fp8 format is one of bf16 and of fp16, so that nothing is rounded; NaN and inf stay what they are.
#pragma once

#include "prefill_fp8.cuh"

// The same number in all lanes, known as such to the compiler.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(ALL, x, 0); }

enum Kind { KEYS_COME, VALUES_COME, NOTHING_COMES };

// Two numbers as the tensor cores read them, of two in fp16.
template <bool FP16> __device__ __forceinline__ u32 from_halves(u32 x) {
  if constexpr (FP16) return x;
  u32 y;
  asm("{.reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, %1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
      "cvt.rn.bf16x2.f32 %0, b, a;}"
      : "=r"(y)
      : "r"(x));
  return y;
}

// A step's keys or values of WIDTH_ALL columns, in squares of WIDTH. They lie in the order of their 16-bit
// stage, but for its swizzle: the 16 bytes at `at` become the 32 at 2 * at, of which both halves are swizzled
// alike. `thread`: of CONVERTERS * 32.
template <int WIDTH_ALL, int WIDTH>
__device__ __forceinline__ void convert_step(u32 from, u32 to, int thread) {
  constexpr u32 SWIZZLE = WIDTH == 64 ? 0x70 : WIDTH == 32 ? 0x30 : 0x10;
#pragma unroll 2
  for (u32 at = thread * 16; at < TILE_KV * WIDTH_ALL; at += CONVERTERS * 512) {
    u32 x[4], y[8];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from + at)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack_fp8<E5M2>(x[i], y[i * 2], y[i * 2 + 1]);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = from_halves<HALF>(y[i]);
    const u32 place = to + (at * 2 ^ (at * 2 >> 3 & SWIZZLE));
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(y[0]), "r"(y[1]), "r"(y[2]),
                 "r"(y[3])
                 : "memory");
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(place ^ 16), "r"(y[4]), "r"(y[5]),
                 "r"(y[6]), "r"(y[7])
                 : "memory");
  }
}

struct Converter {
  const SharedLayout &smem;
  PipelineState<K_STAGES> k;
  PipelineState<V_STAGES> v;
  PipelineState<RAW_STAGES> raw;
  int thread;

  template <int WIDTH_ALL, int WIDTH, class Ring>
  __device__ __forceinline__ void convert(Ring &place, u32 stages, int stage, u32 full, u32 empty) {
    // arrive: Consumer::release of every consumer warp, a round ago
    mbarrier_wait(empty + place.slot * 8, place.phase ^ 1);
    const u32 from = smem.raw + raw.slot * RAW_STAGE_BYTES, to = stages + place.slot * stage;
    if constexpr (Q_FP8) turn_values(from, to, uniform(thread / 32), thread % 32);
    else convert_step<WIDTH_ALL, WIDTH>(from, to, thread);
    // the tensor cores read what ordinary stores wrote
    fence_async();
    __syncwarp();
    if (EVERY_LANE || thread % 32 == 0) {
      mbarrier_arrive(full + place.slot * 8);
      mbarrier_arrive(smem.raw_empty + raw.slot * 8);
    }
    place.advance();
    raw.advance();
  }

  // What comes, in the order in which it comes: the producer says of each stage what is in it.
  __device__ __forceinline__ void run(const int *kinds) {
    for (;;) {
      // arrive: Producer::load's expect and the bytes of its copies, or Producer::run at its end
      mbarrier_wait(smem.raw_full + raw.slot * 8, raw.phase);
      const int kind = kinds[raw.slot];
      if (kind == NOTHING_COMES) return;
      if (!Q_FP8 && kind == KEYS_COME)
        convert<DIM, K_WIDTH>(k, smem.k, K_STAGE_BYTES, smem.k_full, smem.k_empty);
      else convert<DIM_V, V_WIDTH>(v, smem.v, V_STAGE_BYTES, smem.v_full, smem.v_empty);
    }
  }
};
