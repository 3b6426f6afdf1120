// out = x / rms(x) * (weight + offset), one CTA per token: the norm before linear.cu where that has none of
// its own. It is written here, and not taken from Triton, for programmatic dependent launch: linear.cu behind
// it may read weights meanwhile.

#include "../../cuda/machine.cuh"
#include "norm_config.cuh"

struct Params {
  const char *x, *weight;
  char *out;
  i64 x_token, out_token;  // strides, in numbers
  float eps, offset;
};
static_assert(sizeof(Params) == 48, "as custom_ops/layers/cuda/linear.py packs it");

// of 8 numbers, per row and per thread
constexpr int VECTORS = IN_FEATURES / 8, EACH = (VECTORS + THREADS - 1) / THREADS;

__device__ __forceinline__ void unpack8(float (&to)[8], uint4 x) {
  const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i * 2] = to_float<HALF>((u16)words[i]);
    to[i * 2 + 1] = to_float<HALF>((u16)(words[i] >> 16));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ Params p) {
  __shared__ float sums[THREADS / 32];
  // what starts waits for this kernel, and so for those that it waits for
  if constexpr (PDL) griddepcontrol_launch_dependents();
  uint4 weight[EACH][WEIGHT_BYTES / 2];  // a constant, so it may come early
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int j = 0; j < WEIGHT_BYTES / 2; ++j) {
      const int at = i * THREADS + threadIdx.x;
      weight[i][j] = make_uint4(0, 0, 0, 0);
      if (at < VECTORS)
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(weight[i][j].x), "=r"(weight[i][j].y), "=r"(weight[i][j].z), "=r"(weight[i][j].w)
                     : "l"((const uint4 *)p.weight + at * (WEIGHT_BYTES / 2) + j));
    }
  if constexpr (PDL) griddepcontrol_wait();
  const uint4 *x = (const uint4 *)(p.x + blockIdx.x * p.x_token * 2);
  float numbers[EACH][8], total = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = i * THREADS + threadIdx.x;
    uint4 packed = make_uint4(0, 0, 0, 0);
    if (at < VECTORS)
      asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(packed.x), "=r"(packed.y), "=r"(packed.z), "=r"(packed.w) : "l"(x + at) : "memory");
    unpack8(numbers[i], packed);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) total += numbers[i][j] * numbers[i][j];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(ALL, total, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = total;
  __syncthreads();
  total = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) total += sums[w];
  const float factor = rsqrtf(total / IN_FEATURES + p.eps);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= VECTORS) break;
    float w[8], *y = numbers[i];
    if constexpr (WEIGHT_BYTES == 4) {
      const uint4 low = weight[i][0], high = weight[i][WEIGHT_BYTES / 2 - 1];
      w[0] = __uint_as_float(low.x); w[1] = __uint_as_float(low.y);
      w[2] = __uint_as_float(low.z); w[3] = __uint_as_float(low.w);
      w[4] = __uint_as_float(high.x); w[5] = __uint_as_float(high.y);
      w[6] = __uint_as_float(high.z); w[7] = __uint_as_float(high.w);
    } else {
      unpack8(w, weight[i][0]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] *= factor * (w[j] + p.offset);
    ((uint4 *)(p.out + blockIdx.x * p.out_token * 2))[at] = make_uint4(
        pack<HALF>(y[0], y[1]), pack<HALF>(y[2], y[3]), pack<HALF>(y[4], y[5]), pack<HALF>(y[6], y[7]));
  }
}
