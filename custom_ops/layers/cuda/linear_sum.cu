// The sum of what the CTAs of linear_large.cu that share out k have left in `parts`, with all that follows a
// product. A warp has 16 weight rows and OWN groups of 8 tokens; parts are added in their order.
//
// Compiled by NVRTC for sm_90a; its constants: linear_config.cuh, CLUSTER such that OWN is 2.

#include "linear_config.cuh"

constexpr int ROWS = 16, WARPS = 4;
#include "linear_fragments.cuh"

struct SumParams {
  Params p;
  float *parts;
};

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    linear_sum(const __grid_constant__ SumParams all) {
  const int lane = threadIdx.x % 32, id = blockIdx.x * WARPS + threadIdx.x / 32;
  const int rows16 = id / (NT / OWN), group = id % (NT / OWN) * OWN;
  const i64 apart = (i64)gridDim.x * WARPS * OWN * 32;  // from a part to the next one
  if constexpr (PDL) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  const OutPlace place(all.p, 0, group, rows16, lane);
  Addends addends;
  const float4 *from = (const float4 *)all.parts + ((i64)rows16 * NT + group) * 32 + lane;
  float4 got[K_PARTS][OWN];
#pragma unroll
  for (int part = 0; part < K_PARTS; ++part)
#pragma unroll
    for (int g = 0; g < OWN; ++g) got[part][g] = load_l2(from + part * apart + g * 32);
  addends.load(place, 0, rows16, lane);
  float sums[OWN][4] = {};
#pragma unroll
  for (int part = 0; part < K_PARTS; ++part)
#pragma unroll
    for (int g = 0; g < OWN; ++g) {
      const float4 x = got[part][g];
      sums[g][0] += x.x; sums[g][1] += x.y; sums[g][2] += x.z; sums[g][3] += x.w;
    }
  store_output(sums, place, addends, lane);
}
