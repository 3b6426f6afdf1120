// The producers of latent_selected.cu: four warps copy the queries of a token and gather the keys that it
// selected, each warp 16 of a tile, by 16 bytes; zeros for keys that are not seen, since 0 * NaN is NaN.
#pragma once

#include "latent_pairs_load.cuh"
#include "selected_token.cuh"

constexpr int GATHER_WARPS = 4, GATHER_THREADS = GATHER_WARPS * 32, WARP_KEYS = TILE_KV / GATHER_WARPS;
// Of a half of a tile: the copies of all threads, and of each warp that its bits are there.
constexpr int HALF_ARRIVALS = GATHER_THREADS + GATHER_WARPS;
constexpr int ROW_BYTES = RANK + RANK / 128 * 4 + ROPE * 2;  // of fp8: numbers, scales, the rotated key
constexpr int LASTS_AT = SEEN_AT + 2 * TILE_KV / 8;  // [warps of the CTA]
static_assert(THREADS == CONSUMER_THREADS + GATHER_THREADS && WARP_KEYS == 16, "16 bits of each warp");
static_assert(!FP8 || !HALF, "the rotated keys of rows of fp8 are bfloat16");
static_assert(LASTS_AT + THREADS / 32 * 4 <= SHARED_BYTES, "room for the numbers of opening");

// A token's tiles of positions as one segment, in which a row of queries sees all or nothing.
struct Selection {
  Token token;
  Segment segment;
  int row_tile;
  bool left;

  __device__ __forceinline__ bool next(Segment &s) {
    const bool had = left;
    s = segment;
    left = false;
    return had;
  }
};

// By all threads, behind the wait for the kernels ahead: counts the tiles up to the last position that is
// seen. The barriers in shared memory can be used afterwards.
__device__ __forceinline__ Selection open_selection(const Params &p, char *memory, int token, Token t) {
  const int thread = threadIdx.x, *indices = p.indices + token * p.indices_row;
  int last = 0, *lasts = (int *)(memory + LASTS_AT);
#pragma unroll 6
  for (int i = thread; i < p.top_k; i += THREADS)
    if ((u32)load_l2(indices + i) < (u32)t.end) last = i + 1;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) last = max(last, __shfl_xor_sync(ALL, last, step));
  if (thread % 32 == 0) lasts[thread / 32] = last;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) last = max(last, lasts[warp]);
  const int tiles = __shfl_sync(ALL, (last + TILE_KV - 1) / TILE_KV, 0);
  return {t, {t.request, token, 1, tiles * TILE_KV, 0, tiles, 0, true},
          (int)blockIdx.x - token * p.row_tiles, true};
}

// A row of the pool, in bytes; of -1 some.
__device__ __forceinline__ const char *row_from(const Params &p, int row) {
  return p.rows + (row < 0 ? 0 : row / BLOCK_SIZE * p.rows_block + row % BLOCK_SIZE * p.rows_slot);
}

// A warp's keys of a tile: which rows of the pool, each lane with one, which lane + 16 has, too.
struct Gather {
  const Params &p;
  char *memory;
  const u32 shared;
  const int warp, lane;

  __device__ __forceinline__ int line(int slot, int key) const {
    return slot * TILE_BYTES + (warp * WARP_KEYS + key) * 128;
  }
  // COUNT squares of 16-bit numbers, from the row's byte `at` on; eight lanes copy a line.
  template <int COUNT> __device__ __forceinline__ void copy(int rows, int slot, int square, int at) const {
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 4; ++n) {
      const int key = n * 4 + lane / 8, row = __shfl_sync(ALL, rows, key);
      const char *from = row_from(p, row) + at + lane % 8 * 16;
      const u32 to = shared + line(slot, key) + square * SQUARE_BYTES + (lane ^ key) % 8 * 16;
#pragma unroll
      for (int m = 0; m < COUNT; ++m) cp_async_or_zero(to + m * SQUARE_BYTES, from + m * 128, row >= 0);
    }
  }

  // Rows of fp8: half of a row's numbers by 16 lanes, 16 of each. Eight lanes have two keys of one square, so
  // that they store to other banks.
  static constexpr int AT_ONCE = 2;  // of 8 pairs of keys
  struct Numbers {
    uint4 x[AT_ONCE];
  };
  // Of the lane's row those scales that lanes of its half of the warp need.
  __device__ __forceinline__ float2 scales_of(int row) const {
    if (row < 0) return float2{0.f, 0.f};
    const float *from = (const float *)(row_from(p, row) + RANK) + lane / 16;
    return float2{load_l2(from), load_l2(from + 2)};
  }
  __device__ __forceinline__ void load(Numbers &to, int rows, int half, int first) const {
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int key = (first + n) * 2 + lane / 4 % 2, row = __shfl_sync(ALL, rows, key);
      const char *from = row_from(p, row);
      to.x[n] = uint4{0, 0, 0, 0};
      if (row >= 0) to.x[n] = load_l2((const uint4 *)(from + half * COLUMNS + lane / 8 * 64 + lane % 4 * 16));
    }
  }
  __device__ __forceinline__ void store(const Numbers &from, float2 scales, int slot, int half,
                                        int first) const {
    u32 at = line(slot, first * 2) + (half * HALF_SQUARES + lane / 8) * SQUARE_BYTES + lane / 4 % 2 * 128 +
             ((lane % 4 * 2) ^ (lane / 4 % 2)) * 16;
    asm volatile("" : "+r"(at));  // else places of all keys are kept in registers
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int key = (first + n) * 2 + lane / 4 % 2;
      const float scale = __shfl_sync(ALL, half ? scales.y : scales.x, key + lane / 16 * 16);
      const u32 x[4] = {from.x[n].x, from.x[n].y, from.x[n].z, from.x[n].w};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        u32 y[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          u32 low, high;
          unpack_fp8<false>(x[e * 2 + i], low, high);
          y[i * 2] = scaled(low, scale);
          y[i * 2 + 1] = scaled(high, scale);
        }
        const u32 to = (at + n * 256) ^ ((first + n) * 2 % 8 ^ e) * 16;
        *(uint4 *)(memory + to) = uint4{y[0], y[1], y[2], y[3]};
      }
    }
  }
  static __device__ __forceinline__ u32 scaled(u32 x, float scale) {  // of two float16
    return pack<HALF>(to_float<true>((u16)x) * scale, to_float<true>((u16)(x >> 16)) * scale);
  }
};

// Of a warp's share of each tile, positions and rows of the pool, both a key of each lane.
struct Lookup {
  const Params &p;
  const int *indices, *table;
  int end, first;  // of what the token sees; of the share

  __device__ __forceinline__ Lookup(const Params &p, int token, Token t, int warp, int lane)
      : p(p), indices(p.indices + token * p.indices_row), table(p.table + t.request * p.table_row),
        end(t.end), first(warp * WARP_KEYS + lane % WARP_KEYS) {}
  __device__ __forceinline__ int position(int tile) const {
    const int i = tile * TILE_KV + first;
    return i < p.top_k ? load_l2(indices + i) : -1;
  }
  __device__ __forceinline__ int row(int position) const {  // -1: not seen
    if ((u32)position >= (u32)end) return -1;
    return load_l2(table + position / BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE;
  }
};
struct Rows {
  int now, next, position;  // of a tile and of the one behind it; a position of the third one
};
// By a producer, before tiles are counted: queries and the first rows.
__device__ __forceinline__ Rows ask_first(const Params &p, u32 shared, const Lookup &look, int token,
                                          int warp, int lane) {
  const int first = look.position(0), second = look.position(1), third = look.position(2);
  copy_queries(p, shared, Segment{0, token, 1}, blockIdx.x - token * p.row_tiles,
               warp * 32 + lane, GATHER_THREADS);
  return {look.row(first), look.row(second), third};
}

__device__ __forceinline__ void produce_selected(const Params &p, char *memory, u32 shared,
                                                 const Selection &of, const Lookup &look, Rows r, int warp,
                                                 int lane) {
  const Gather gather{p, memory, shared, warp, lane};
  mbarrier_arrive_behind_copies(shared + Q_FULL_AT);
  int rows = r.now, rows_1 = r.next, position = r.position, phases = 0;  // a bit for each tile
  [[maybe_unused]] Gather::Numbers numbers;
  [[maybe_unused]] float2 scales;
  if constexpr (FP8) {
    gather.load(numbers, rows, 0, 0);
    scales = gather.scales_of(rows);
  }
  for (int tile = 0; tile < of.segment.last; ++tile) {
    const int slot = tile % 2, rows_2 = look.row(position);
    const u32 seen = __ballot_sync(ALL, rows >= 0);
    position = look.position(tile + 3);
#pragma unroll(FP8 ? 1 : 2)
    for (int i = 0; i < 2; ++i) {
      // first the half that is needed first; with the other one the rotated keys, whose square held weights
      const int half = i ^ slot;
      const u32 full = full_at(shared, slot, half * HALF_SQUARES);
      // arrive: the warps that have this half of the columns, when their products with it have ended
      mbarrier_wait(empty_at(shared, slot, half), (phases >> slot & 1) ^ 1);
      if (i == 0 && lane == 0) ((u16 *)(memory + SEEN_AT))[slot * GATHER_WARPS + warp] = (u16)seen;
      if constexpr (FP8) {
        if (i == 1) gather.copy<1>(rows, slot, SQUARES - 1, ROW_BYTES - ROPE * 2);
        Gather::Numbers more;
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 2; n += 2 * Gather::AT_ONCE) {
          const bool ends = n + 2 * Gather::AT_ONCE == WARP_KEYS / 2;
          gather.load(more, rows, half, n + Gather::AT_ONCE);
          gather.store(numbers, scales, slot, half, n);
          // of the next half: of this tile, or of the next one, which begins with the other
          if (ends) gather.load(numbers, i ? rows_1 : rows, half ^ (i ^ 1), 0);
          else gather.load(numbers, rows, half, n + 2 * Gather::AT_ONCE);
          gather.store(more, scales, slot, half, n + Gather::AT_ONCE);
        }
        fence_async();
        __syncwarp();
      } else {
        gather.copy<HALF_SQUARES>(rows, slot, half * HALF_SQUARES, half * COLUMNS * 2);
        if (i == 1) gather.copy<1>(rows, slot, SQUARES - 1, RANK * 2);
      }
      mbarrier_arrive_behind_copies(full);
      if (lane == 0) mbarrier_arrive(full);
    }
    phases ^= 1 << slot;
    rows = rows_1;
    if constexpr (FP8) scales = gather.scales_of(rows);
    rows_1 = rows_2;
  }
}
