// apply_experts of at most 8 tokens, in two launches: gate, up and their activation; then down and the sums.
//
// Products are transposed: rows of weights are the 16 rows of mma.m16n8k16, tokens its 8 columns, so that all
// tokens are multiplied by each expert that one of them chose, and its weights are read once. A warp has a
// ring of STAGES pieces of 16 rows by 128 columns of its own (cp.async); no barrier stands between a piece
// and the copy of another one to its place.
//
// Columns of k have the order that makes 16 bytes of a line one thread's share of two products, of weights as
// of tokens. So both come by whole 16 bytes.
//
// experts_gate_up: a CTA goes through groups of 8 rows of gate and the same 8 of up, those of the shared
// expert first: these are constants and fill the ring before the wait (docs/stream_order.md).
// experts_down: a CTA has 16 rows of the output and adds up all experts. It begins when each CTA of the
// kernel ahead has waited, so the ids are there, and it asks for weights while that one still runs.

#include "few_experts_config.cuh"

#include "../../cuda/activation.cuh"
#include "../../cuda/machine.cuh"

struct Params {
  const char *x, *gate_up, *shared_gate_up, *down, *shared_down, *shared_gate, *residual;
  const int *ids;
  const float *weights;
  char *inner, *out;
  i64 x_token, gate_up_expert, gate_up_row, shared_gate_up_row, down_expert, down_row, shared_down_row;
  i64 residual_token, out_token;  // strides, in numbers
  int tokens, num_experts;
};
static_assert(sizeof(Params) == 168, "as custom_ops/experts/cuda/few_experts.py packs it");

constexpr int WARPS = 8, THREADS = WARPS * 32, TOKENS = 8, MAX_PAIRS = TOKENS * TOP_K, MAX_EXPERTS = 512;
constexpr int PIECE = 128, LINE = PIECE * 2, STAGE_BYTES = 16 * LINE;  // columns, bytes of a row, of a piece
constexpr int STAGES = 4;  // pieces of a warp on their way or in use (docs/log/experts_few.md)
constexpr int SHARED_PIECES = SHARED / PIECE, INNER_PIECES = INNER / PIECE, TURNS = HIDDEN / (PIECE * WARPS);
constexpr int SHARED_UNITS = SHARED / 8, INNER_UNITS = INNER / 8, TILES = HIDDEN / 16;
static_assert(HIDDEN % (PIECE * WARPS) == 0 && INNER % PIECE == 0 && SHARED % PIECE == 0, "whole pieces");

// read_once() as the number that it is: ptxas 13 may lose a createpolicy, but not what reads its register
// (docs/log/experts_few.md).
constexpr u64 READ_ONCE = 0x12f0000000000000;

// The experts that a token chose, each once, in ascending order: what a token gets does not depend on what
// others chose.
struct Chosen {
  u32 mask[MAX_EXPERTS / 32];
  int experts[MAX_PAIRS];
};
__device__ __forceinline__ void clear(Chosen &chosen) {
  if (threadIdx.x < MAX_EXPERTS / 32) chosen.mask[threadIdx.x] = 0;
  __syncthreads();
}
__device__ __forceinline__ bool is_expert(const Params &p, int id) { return id >= 0 && id < p.num_experts; }
// How many are chosen before `id`.
__device__ __forceinline__ int slot_of(const Chosen &chosen, int id) {
  int slot = __popc(chosen.mask[id / 32] & ((1u << id % 32) - 1));
  for (int word = 0; word < id / 32; ++word) slot += __popc(chosen.mask[word]);
  return slot;
}
// By all threads of a CTA, each with the id of a pair or -1, behind `clear`; their number. The list is there
// behind the next barrier.
static_assert(MAX_PAIRS <= THREADS, "a thread for each pair");
__device__ __forceinline__ int find_experts(const Params &p, Chosen &chosen, int id) {
  if (is_expert(p, id)) atomicOr(&chosen.mask[id / 32], 1u << id % 32);
  __syncthreads();
  int count = 0;
#pragma unroll
  for (int word = 0; word < MAX_EXPERTS / 32; ++word) count += __popc(chosen.mask[word]);
  for (int expert = threadIdx.x; expert < p.num_experts; expert += THREADS)
    if (chosen.mask[expert / 32] >> expert % 32 & 1) chosen.experts[slot_of(chosen, expert)] = expert;
  return count;
}

// Sums of a piece: `from` is its place in shared memory, `b` the same columns of the lane's token.
__device__ __forceinline__ void multiply(float (&sums)[4], const char *from, const uint4 (&b)[4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = g * LINE + (((i * 4 + q) ^ (g % 2 * 4)) * 16);
    const uint4 low = *(const uint4 *)(from + at), high = *(const uint4 *)(from + at + 8 * LINE);
    const u32 a[4] = {low.x, high.x, low.y, high.y}, c[4] = {low.z, high.z, low.w, high.w};
    mma<HALF>(sums, a, b[i].x, b[i].y);
    mma<HALF>(sums, c, b[i].z, b[i].w);
  }
}

// Asks for 128 columns of 16 rows: 8 from `from` on, 8 that begin `apart` bytes behind.
__device__ __forceinline__ void load_piece(u32 to, const char *from, i64 row_bytes, i64 apart) {
  const int lane = threadIdx.x % 32, half = lane / 16, column = lane % 16;
  const char *at = from + half * row_bytes + column * 16;
  to += half * LINE + ((column ^ (half * 4)) * 16);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    cp_async_once(to + i * 2 * LINE, at + i % 4 * 2 * row_bytes + (i < 4 ? 0 : apart), READ_ONCE);
}

// Columns `k` to `k + 128` of a token's row, as `multiply` takes them; zeros if not `real`.
__device__ __forceinline__ void load_columns(uint4 (&b)[4], const char *row, int k, bool real) {
  const char *at = row + (k + threadIdx.x % 4 * 8) * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i] = real ? load_l2((const uint4 *)(at + i * 64)) : make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_gate_up(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ Chosen chosen;
  __shared__ float4 parts[2][WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  char *const ring = memory + warp * STAGES * STAGE_BYTES;
  clear(chosen);
  int units = SHARED_UNITS;
  auto load = [&](int i, int stage) {  // the i-th piece of this warp
    const int unit = blockIdx.x + i / TURNS * gridDim.x, k = (warp + i % TURNS * WARPS) * PIECE;
    if (unit >= units) return;
    const bool is_shared = unit < SHARED_UNITS;
    const int routed = unit - SHARED_UNITS, n = is_shared ? unit * 8 : routed % INNER_UNITS * 8;
    const i64 row = (is_shared ? p.shared_gate_up_row : p.gate_up_row) * 2;
    const char *from = p.shared_gate_up;
    if (!is_shared) from = p.gate_up + (i64)chosen.experts[routed / INNER_UNITS] * p.gate_up_expert * 2;
    load_piece(shared_address(ring) + stage * STAGE_BYTES, from + n * row + k * 2, row,
               (is_shared ? SHARED : INNER) * row);
  };
  int asked = 0;  // pieces; those of the shared expert alone are known ahead of the wait
  for (; asked < STAGES && (int)blockIdx.x + asked / TURNS * (int)gridDim.x < SHARED_UNITS; ++asked) {
    load(asked, asked);
    cp_async_commit();
    if (PDL) cp_async_wait<0>();  // one at a time: a flood would hold up what the kernels ahead read
  }
  if (PDL) {
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
  }
  const int id = threadIdx.x < p.tokens * TOP_K ? load_l2(p.ids + threadIdx.x) : -1;
  uint4 b[TURNS][4];
#pragma unroll
  for (int i = 0; i < TURNS; ++i)
    load_columns(b[i], p.x + g * p.x_token * 2, (warp + i * WARPS) * PIECE, g < p.tokens);
  units += find_experts(p, chosen, id) * INNER_UNITS;
  __syncthreads();
  for (; asked < STAGES; ++asked) {
    load(asked, asked);
    cp_async_commit();
  }
  int stage = 0, turn = 0, piece = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, turn ^= 1) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < TURNS; ++i, ++piece) {
      cp_async_wait<STAGES - 1>();
      __syncwarp();
      multiply(sums, ring + stage * STAGE_BYTES, b[i]);
      __syncwarp();
      load(piece + STAGES, stage);
      cp_async_commit();
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    parts[turn][warp][lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
    // Ends once all warps are here; parts of the unit before last were read ahead of the last barrier.
    __syncthreads();
    if (warp == unit / gridDim.x % WARPS) {
      float4 sum = parts[turn][0][lane];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        const float4 part = parts[turn][w][lane];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      const u32 y = pack<HALF>(activate<ACTIVATION>(sum.x) * sum.z, activate<ACTIVATION>(sum.y) * sum.w);
      const int routed = unit - SHARED_UNITS, token = q * 2;
      u16 *to = (u16 *)p.inner;
      int width = SHARED;
      if (routed < 0) {
        to += unit * 8 + g;
      } else {
        width = INNER;
        to += TOKENS * SHARED + (i64)(routed / INNER_UNITS) * TOKENS * INNER + routed % INNER_UNITS * 8 + g;
      }
      if (token < p.tokens) to[token * width] = (u16)y;
      if (token + 1 < p.tokens) to[(token + 1) * width] = (u16)(y >> 16);
    }
  }
  cp_async_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) experts_down(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ Chosen chosen;
  // by which an expert counts for a token, and bits of those who chose it; the shared one's behind the others
  __shared__ float shares[MAX_PAIRS + 1][TOKENS];
  __shared__ u32 tokens_of[MAX_PAIRS + 1];
  __shared__ int pair_slot[MAX_PAIRS];
  __shared__ float pair_weight[MAX_PAIRS];
  __shared__ float4 parts[WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  char *const ring = memory + warp * STAGES * STAGE_BYTES;
  if (PDL) griddepcontrol_launch_dependents();
  const bool is_pair = threadIdx.x < p.tokens * TOP_K;
  const int id = is_pair ? load_l2(p.ids + threadIdx.x) : -1;
  const float weight = is_pair ? load_l2(p.weights + threadIdx.x) : 0.f;
  clear(chosen);
  const int experts = find_experts(p, chosen, id);
  if (threadIdx.x < MAX_PAIRS) tokens_of[threadIdx.x] = 0;
  __syncthreads();

  // A piece of an expert's columns, or of the shared one's (slot -1). Which warp has it follows from the
  // expert alone, and so does the order of a token's sums; of one token's pieces all warps have as many.
  struct Piece {
    int slot, i;
  };
  auto settle = [&](Piece &x) {
    while (x.slot < experts && x.i >= (x.slot < 0 ? SHARED_PIECES : INNER_PIECES)) {
      ++x.slot;
      const int turn = p.tokens > 1 ? chosen.experts[x.slot < experts ? x.slot : 0] * 3
                                    : (WARPS - 1) * (SHARED_PIECES + x.slot * INNER_PIECES);
      x.i = (warp + turn) % WARPS;
    }
  };
  auto first = [&] {
    Piece x = {-1, warp};
    settle(x);
    return x;
  };
  auto next = [&](Piece &x) {
    x.i += WARPS;
    settle(x);
  };
  int load_tile = blockIdx.x;  // what is asked for next
  Piece asked = first();
  auto load = [&](int stage) {
    if (asked.slot >= experts) {
      asked = first();
      load_tile += gridDim.x;
    }
    if (load_tile >= TILES || asked.slot >= experts) return;
    const bool is_shared = asked.slot < 0;
    const i64 row = (is_shared ? p.shared_down_row : p.down_row) * 2;
    const char *from = p.shared_down;
    if (!is_shared) from = p.down + (i64)chosen.experts[asked.slot] * p.down_expert * 2;
    from += load_tile * 16 * row + asked.i * LINE;
    load_piece(shared_address(ring) + stage * STAGE_BYTES, from, row, 8 * row);
    next(asked);
  };
#pragma unroll
  for (int s = 0; s < STAGES; ++s) {
    load(s);
    cp_async_commit();
  }
  // While they come: by what an expert counts for a token, which may have it twice.
  if (is_pair) {
    pair_slot[threadIdx.x] = is_expert(p, id) ? slot_of(chosen, id) : -1;
    pair_weight[threadIdx.x] = weight;
    if (is_expert(p, id)) atomicOr(&tokens_of[slot_of(chosen, id)], 1u << threadIdx.x / TOP_K);
  }
  for (int i = threadIdx.x; i < MAX_PAIRS * TOKENS; i += THREADS) shares[i / TOKENS][i % TOKENS] = 0;
  if (threadIdx.x == 0) tokens_of[MAX_PAIRS] = (1u << p.tokens) - 1;
  if (threadIdx.x < TOKENS) shares[MAX_PAIRS][threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x < p.tokens)
    for (int j = threadIdx.x * TOP_K; j < (threadIdx.x + 1) * TOP_K; ++j)
      if (pair_slot[j] >= 0) shares[pair_slot[j]][threadIdx.x] += pair_weight[j];
  if (PDL) griddepcontrol_wait();
  if (p.shared_gate && warp < p.tokens) {  // a warp for each token
    float sum = 0;
    const char *x = p.x + warp * p.x_token * 2;
    for (int k = lane * 8; k < HIDDEN; k += 256) {
      const uint4 a = load_l2((const uint4 *)(x + k * 2)),
                  b = load_l2((const uint4 *)(p.shared_gate + k * 2));
      const u32 as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum += to_float<HALF>((u16)as[i]) * to_float<HALF>((u16)bs[i]) +
               to_float<HALF>((u16)(as[i] >> 16)) * to_float<HALF>((u16)(bs[i] >> 16));
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(ALL, sum, i);
    if (lane == 0) shares[MAX_PAIRS][warp] = 1.f / (1.f + exp2_(-sum * LOG2E));
  }
  __syncthreads();

  auto columns = [&](uint4 (&b)[4], Piece &x) {  // what a piece is multiplied by
    if (x.slot >= experts) return;
    if (x.slot < 0)
      load_columns(b, p.inner + g * SHARED * 2, x.i * PIECE, g < p.tokens);
    else
      load_columns(b, p.inner + (TOKENS * SHARED + ((i64)x.slot * TOKENS + g) * INNER) * 2, x.i * PIECE,
                   tokens_of[x.slot] >> g & 1);
    next(x);
  };
  int stage = 0;
  for (int tile = blockIdx.x; tile < TILES; tile += gridDim.x) {
    const int row = tile * 16 + threadIdx.x % 16, token = threadIdx.x / 16;  // of the output, at the end
    const bool stores = token < p.tokens;
    float total[4] = {};
    u16 residual = 0;
    if (stores && p.residual) residual = *(const u16 *)(p.residual + (token * p.residual_token + row) * 2);
    uint4 b[2][4];
    Piece now = first(), ahead = now;
    columns(b[0], ahead);
    columns(b[1], ahead);
    auto add = [&](uint4 (&of_piece)[4]) {
      if (now.slot >= experts) return;
      cp_async_wait<STAGES - 1>();
      __syncwarp();
      float sums[4] = {};
      multiply(sums, ring + stage * STAGE_BYTES, of_piece);
      __syncwarp();
      load(stage);
      cp_async_commit();
      stage = stage == STAGES - 1 ? 0 : stage + 1;
      columns(of_piece, ahead);
      const int slot = now.slot < 0 ? MAX_PAIRS : now.slot;
      const u32 chose = tokens_of[slot] >> q * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (chose >> e % 2 & 1) total[e] += shares[slot][q * 2 + e % 2] * sums[e];
      next(now);
    };
    while (now.slot < experts) {
      add(b[0]);
      add(b[1]);
    }
    parts[warp][lane] = make_float4(total[0], total[1], total[2], total[3]);
    __syncthreads();
    if (stores) {
      const int from = threadIdx.x % 8 * 4 + token / 2, component = threadIdx.x / 8 % 2 * 2 + token % 2;
      float sum = to_float<HALF>(residual);
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += ((const float *)&parts[w][from])[component];
      *(u16 *)(p.out + (token * p.out_token + row) * 2) = (u16)pack<HALF>(sum, 0.f);
    }
    __syncthreads();  // the parts' place is free again
  }
  cp_async_wait<0>();
}
