// The indexer's logits on Hopper, for few query tokens: weighted sums over heads of clipped products with
// every key of a paged pool, of 16 bits or of e4m3 with a scale each.
//
// 64 keys are the rows of a warpgroup's product, heads its columns, so that a thread has a quarter of the
// heads of two keys, and the sum over heads is its own and three neighbours'. Each warpgroup copies its keys
// itself, STAGES deep; keys of e4m3 become float16 in registers on their way into the product.
//
// Nothing here waits for ever: all waits are barriers of a CTA or of a warpgroup, whose warps go through the
// same tiles. Compiled by NVRTC for sm_90a; its constants: logits_config.cuh. Source: DeepSeek-AI,
// "DeepSeek-V3.2" (arXiv:2512.02556), section 2.1.

#include "logits_products.cuh"
#include "logits_schedule.cuh"

// A token's tiles for one warpgroup: every WARPGROUPS-th one of [first, last).
struct Tiles {
  const Params &p;
  char *memory;
  u32 shared;
  int ring;  // the first of its stages
  int token, end, thread, first, count;
  const int *table;

  __device__ __forceinline__ int tile_at(int i) const { return first + i * WARPGROUPS; }
  // The blocks of the i-th tile; 0 behind the last key, where nothing is read.
  __device__ __forceinline__ void find_blocks(int (&blocks)[TILE_BLOCKS], int i) const {
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; ++b) {
      const int position = tile_at(i) * TILE + b * BLOCK_SIZE;
      blocks[b] = position < end ? load_l2(table + position / BLOCK_SIZE) : 0;
    }
  }
  __device__ __forceinline__ void copy(int stage, int i, const int (&blocks)[TILE_BLOCKS]) const {
    const int begin = tile_at(i) * TILE, in_block = BLOCK_SIZE > TILE ? begin % BLOCK_SIZE : 0,
              chunk = thread % CHUNKS, lane_key = thread / CHUNKS;
    const u32 to = shared + (ring + stage) * TILE_BYTES + chunk / 8 * (TILE * 128);
    const char *from[TILE_BLOCKS];
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; ++b)
      from[b] = p.keys + blocks[b] * p.key_block * (FP8 ? 1 : 2) + (in_block + lane_key) * KEY_BYTES +
                chunk * 16;
#pragma unroll
    for (int n = 0; n < COPIES; ++n) {
      const int block = n * PITCH / BLOCK_SIZE, key = n * PITCH + lane_key;
      cp_async_or_zero(to + key * 128 + (chunk % 8 ^ key % 8) * 16,
                       from[block] + (n * PITCH - block * BLOCK_SIZE) * KEY_BYTES, begin + key < end);
    }
    if (FP8 && thread < TILE / 4) {
      const int key = thread * 4;
      int block = blocks[0];
#pragma unroll
      for (int b = 1; b < TILE_BLOCKS; ++b)
        if (key / BLOCK_SIZE == b) block = blocks[b];
      const float *at = p.scales + block * p.scale_block + in_block + key % BLOCK_SIZE;
      cp_async_or_zero(shared + SCALES_AT + (ring + stage) * (TILE * 4) + key * 4, (const char *)at,
                       begin + key < end);
    }
  }
  __device__ __forceinline__ void score(int stage, int i, const float (&weights)[J][2]) const {
    const int warp = thread / 32, lane = thread % 32;
    float c[J][4];
    multiply(c, memory, shared, (ring + stage) * TILE_BYTES, warp, lane);
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (NUM_HEADS == HEADS || j * 8 + lane % 4 * 2 + e < NUM_HEADS) {
          low += clipped(c[j][e]) * weights[j][e];
          high += clipped(c[j][e + 2]) * weights[j][e];
        }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      low += __shfl_xor_sync(ALL, low, step);
      high += __shfl_xor_sync(ALL, high, step);
    }
    const int key = warp * 16 + lane / 4 + lane % 4 * 8, position = tile_at(i) * TILE + key;
    if (lane % 4 < 2 && position < p.columns) {
      float x = lane % 4 ? high : low;
      if (FP8) x *= ((const float *)(memory + SCALES_AT))[(ring + stage) * TILE + key];
      p.logits[token * p.logits_row + position] = position < end ? x : -INF;
    }
  }
  __device__ __forceinline__ void copy_first() const {
    int blocks[STAGES - 1][TILE_BLOCKS];
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) find_blocks(blocks[i], i);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (i < count) copy(i, i, blocks[i]);
      cp_async_commit();
    }
  }
  __device__ __forceinline__ void run(const float (&weights)[J][2], int id) const {
    int blocks[TILE_BLOCKS];
    find_blocks(blocks, STAGES - 1);
    for (int i = 0, stage = 0; i < count; ++i, stage = stage + 1 == STAGES ? 0 : stage + 1) {
      cp_async_wait<STAGES - 2>();
      fence_async();
      barrier<128>(id);  // the tile is there; the one before has been used by all warps
      if (i + STAGES - 1 < count) copy(stage ? stage - 1 : STAGES - 1, i + STAGES - 1, blocks);
      cp_async_commit();
      find_blocks(blocks, i + STAGES);
      score(stage, i, weights);
    }
    cp_async_wait<0>();
  }
};

// Weights of a token's heads into shared memory, once for a CTA: all CTAs want the same few lines of L2,
// which answers one request after the other (docs/log/indexer.md).
__device__ __forceinline__ void load_weights(const Params &p, char *memory, int token, int thread) {
  if (thread < HEADS)
    ((float *)(memory + WEIGHTS_AT))[thread] =
        thread < NUM_HEADS ? load_l2(p.weights + token * p.w_token + thread) : 0.f;
}

// Of a thread's heads, of e4m3 keys with what their products are to be multiplied by.
__device__ __forceinline__ void weights_of(float (&weights)[J][2], const char *memory, int lane) {
  const float *all = (const float *)(memory + WEIGHTS_AT), *factors = (const float *)(memory + FACTORS_AT);
#pragma unroll
  for (int j = 0; j < J; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int head = j * 8 + lane % 4 * 2 + e;
      weights[j][e] = all[head] * (FP8 ? factors[head] : 1.f);
    }
}

// -inf behind the last tile of each token.
__device__ __forceinline__ void store_unseen(const Params &p, const char *memory, int thread) {
  const int *ends = (const int *)(memory + ENDS_AT);
  for (int token = 0; token < p.num_tokens; ++token) {
    const int first = (ends[token] + TILE - 1) / TILE * TILE;
    for (int column = first + blockIdx.x * THREADS + thread; column < p.columns;
         column += gridDim.x * THREADS)
      p.logits[token * p.logits_row + column] = -INF;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) index_logits(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char memory[];
  const int thread = threadIdx.x, lane = thread % 32, warpgroup = __shfl_sync(ALL, thread / 128, 0);
  griddepcontrol_launch_dependents();
  line_up(p, memory, thread);
  const int *begins = (const int *)(memory + BEGINS_AT), *ends = (const int *)(memory + ENDS_AT),
            *requests = (const int *)(memory + REQUESTS_AT);
  const i64 all = begins[p.num_tokens];
  int tile = (int)(all * blockIdx.x / gridDim.x);
  const int last = (int)(all * (blockIdx.x + 1) / gridDim.x);
  int token = tile < last ? token_of(memory, p.num_tokens, tile) : 0;
  griddepcontrol_wait();
  while (tile < last) {
    while (begins[token + 1] <= tile) ++token;  // a tile is left, so that a token with it is behind
    const int until = min(last, begins[token + 1]), begin = begins[token];
    const int first = tile - begin + warpgroup, left = until - begin - first;
    const Tiles tiles = {p, memory, shared_address(memory), warpgroup * STAGES, token, ends[token],
                         thread % 128, first, left > 0 ? (left + WARPGROUPS - 1) / WARPGROUPS : 0,
                         p.table + requests[token] * p.table_row};
    tiles.copy_first();
    load_weights(p, memory, token, thread);
    load_heads(p, memory, token, thread);
    fence_async();
    __syncthreads();
    float weights[J][2];
    weights_of(weights, memory, lane);
    tiles.run(weights, 1 + warpgroup);
    __syncthreads();  // heads and stages are free
    tile = until;
  }
  store_unseen(p, memory, thread);
}
