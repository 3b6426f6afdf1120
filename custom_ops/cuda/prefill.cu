// Prefill attention over a paged cache on Hopper: one warp has the copy engine fetch blocks, two warpgroups multiply and exponentiate.
//
// A tile is 64 packed query rows per warpgroup (query tokens x heads of the group) of one kv head; CTAs stay, and take the next tile of a line
// that each of them finds by itself (prefill_tiles.cuh). Keys and values come through one ring of stages in the order K K V K V ... V, each
// block of the cache in one box; the loader runs on over the borders of tiles, and queries have two buffers.
//
// A warpgroup asks for the scores of the next step before the softmax of this one is applied to the values, so that its exponentials run beside
// its own products; the two warpgroups issue products in turns, so that one's exponentials run beside the other's. The accumulator is rescaled
// only if a row maximum of the warp rose, which is exact.
//
// Why nothing here waits for ever. (1) Stages are filled and used in one order, by both warpgroups; the loader waits for a stage only until each
// math warp has released its use before, STAGES stages ago. A warpgroup that waits for a stage has released all but the two before it, so with
// three stages or more the one that is behind gets its stage. (2) A warpgroup that waits for its turn has released everything before the two
// stages of that turn, which the other needs too; so these come, the other issues its products and gives the turn. (3) Both warpgroups take the same
// turns: steps - 1 of every tile. (4) A tile of queries is waited for in the order in which the loader sends them, and released before the next
// but one is sent. Every wait names its arrival beside it.
//
// Compiled by NVRTC for sm_90a; macros: custom_ops/cuda/prefill.py. Sources: FlashAttention-3 (arXiv:2407.08608, 3.1 and 3.2).

#include "prefill_products.cuh"
#include "prefill_shapes.cuh"
#include "prefill_tiles.cuh"

// Turns: barrier 1 is warpgroup 0's, 2 is warpgroup 1's; 256 threads: who waits and who gives the turn. 3 and 4: the warps of one warpgroup.
__device__ __forceinline__ void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }
__device__ __forceinline__ void meet(int group) { asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory"); }

// The loader's waits. With PATIENCE it gives up after so many tries and ends the kernel with an error: for tests. Whoever waits for ever, the
// loader soon waits too; in the math warps the way out would cost registers.
__device__ __forceinline__ void wait_or_give_up(u32 at, int parity) {
#if PATIENCE
  asm volatile("{.reg .pred done, out; .reg .u32 left; mov.u32 left, %2; again%=: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra there%=;"
               " sub.u32 left, left, 1; setp.eq.u32 out, left, 0; @!out bra again%=; trap; there%=:}" ::"r"(at), "r"(parity), "n"(PATIENCE) : "memory");
#else
  barrier_wait(at, parity);
#endif
}

// A wait that begins only when `x`, which is not negative, is there. Without it the compiler puts the exponentials behind the wait for the
// products that they should run beside: nothing else holds them in front of it.
__device__ __forceinline__ void barrier_wait_after(u32 at, int parity, float x) { barrier_wait(at, parity ^ (BESIDE && x < -1.f)); }

// The same number in all lanes, known as such to the compiler: products in a branch that might part a warp are put one behind the other.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(ALL, x, 0); }
__device__ __forceinline__ Job uniform(const Job &x) {
  return {uniform(x.steps), uniform(x.last), uniform(x.tile), uniform(x.start), uniform(x.query_len), uniform(x.seq_len), uniform(x.head), 0};
}

// The loader: one warp.
struct Loader {
  const Params &p;
  const Plan &plan;
  Place place;
  int lane;

  // The lane's block of a step; blocks past the request's last key are no block at all: the copy engine fills them with zeros.
  __device__ __forceinline__ int block_of(const Tile &tile, int step) const {
    const int index = step * PAGES + lane;
    return lane < PAGES && index * BLOCK_SIZE < tile.span.seq_len ? p.table[tile.request * p.table_row + index] : p.num_blocks;
  }

  __device__ __forceinline__ void load(const Map *map, int head, int block) {
    const u32 to = plan.ring + place.slot * STAGE, full = plan.full + place.slot * 8;
    wait_or_give_up(plan.empty + place.slot * 8, place.round ^ 1);  // arrive: release() of every math warp, a round ago
    if (lane == 0) barrier_expect(full, STAGE);
    __syncwarp();  // expected before anything can arrive
    if (lane < PAGES) copy_box4(to + lane * PAGE, map, 0, 0, head * SQUARES, block * (BLOCK_SIZE / 8), full);
    place.advance();
  }

  __device__ __forceinline__ void run(Job *jobs) {
    Line line;
    line.open(p.starts, p.seq_lens, p.num_reqs, p.num_tokens);
    const int total = line.total();
    int ticket = blockIdx.x;
    for (int turn = 0;; ++turn) {
      const int buffer = turn & 1, parity = turn >> 1 & 1;
      const u32 q_full = plan.q_full + buffer * 8;
      wait_or_give_up(plan.q_empty + buffer * 8, parity ^ 1);  // arrive: every math warp after the tile before the last; at once in turns 0 and 1
      if (ticket >= total) {
        if (lane == 0) {
          jobs[buffer].steps = -1;
          barrier_arrive(q_full);
          if (atomicAdd(p.tickets + 1, 1) == (int)gridDim.x - 1) {  // nobody takes a ticket any more: as it was
            p.tickets[0] = 0;
            p.tickets[1] = 0;
          }
        }
        return;
      }
      int next = 0;
      if (lane == 0) next = gridDim.x + atomicAdd(p.tickets, 1);  // comes while this tile is loaded
      const Tile tile = line.find(ticket);
      const int steps = tile.span.level(tile.index), last = steps - 1;
      if (lane == 0) {
        jobs[buffer] = {steps, last, tile.index, tile.span.start, tile.span.query_len, tile.span.seq_len, tile.head, 0};
        if (steps > 0) {
          barrier_expect(q_full, Q_BYTES);  // the job is written before: a wait for q_full sees it
#pragma unroll
          for (int s = 0; s < SQUARES; ++s)
            copy_box3(plan.queries + buffer * Q_TILE + s * (Q_TILE / SQUARES), &p.q, s * 64, tile.head * GROUP,
                      tile.span.start + tile.index * TOKENS, q_full);
        } else {
          barrier_arrive(q_full);
        }
      }
      __syncwarp();
      if (steps > 0) {
        int block = block_of(tile, last), block_before = last > 0 ? block_of(tile, last - 1) : 0;
        load(&p.k, tile.head, block);
        for (int step = last; step > 0; --step) {
          const int ahead = step > 1 ? block_of(tile, step - 2) : 0;
          load(&p.k, tile.head, block_before);
          load(&p.v, tile.head, block);
          block = block_before;
          block_before = ahead;
        }
        load(&p.v, tile.head, block);
      }
      ticket = __shfl_sync(ALL, next, 0);
    }
  }
};

// One thread's share of a warpgroup's 64 rows: rows lane / 4 and lane / 4 + 8 of its warp's 16; columns 8 * n + lane % 4 * 2 + {0, 1}.
// Element i of a product: n = i / 4, row i / 2 % 2, column i % 2.
struct Softmax {
  float s[KEYS / 2];        // scores, then weights
  u32 weights[KEYS / 4];    // in 16 bits, as the second product reads them
  float acc[DIM / 2];
  float top[2], total[2];   // in base 2 with the scale applied; this thread's columns only

  __device__ __forceinline__ void clear() {
    top[0] = top[1] = FLOOR;
    total[0] = total[1] = 0.f;
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) acc[i] = 0.f;
  }

  __device__ __forceinline__ void mask(const int (&end)[2], int key, int lane) {
    const int first = key + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i)
      if (i / 4 * 8 + i % 2 >= end[i / 2 % 2] - first) s[i] = -INF;
  }

  // The rows' maxima with these scores; `shrink`: what sums so far have to be multiplied by.
  __device__ __forceinline__ void raise(float scale, float (&shrink)[2]) {
    float most[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      most[0][j] = fmaxf(s[j * 4], s[j * 4 + 1]);
      most[1][j] = fmaxf(s[j * 4 + 2], s[j * 4 + 3]);
    }
#pragma unroll
    for (int i = 16; i < KEYS / 2; i += 4) {
      most[0][i / 4 % 4] = fmaxf(most[0][i / 4 % 4], fmaxf(s[i], s[i + 1]));
      most[1][i / 4 % 4] = fmaxf(most[1][i / 4 % 4], fmaxf(s[i + 2], s[i + 3]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(fmaxf(most[r][0], most[r][1]), fmaxf(most[r][2], most[r][3]));
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 2));
      const float raised = fmaxf(top[r], x * scale);
      shrink[r] = exp2_(top[r] - raised);
      top[r] = raised;
    }
  }

  __device__ __forceinline__ void exponentiate(float scale, const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) s[i] = exp2_(fmaf(s[i], scale, -top[i / 2 % 2]));
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) sum[i / 2 % 2][i % 2] += s[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = fmaf(total[r], shrink[r], sum[r][0] + sum[r][1]);
  }

  __device__ __forceinline__ void convert() {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 2) weights[i / 2] = pack(s[i], s[i + 1]);
  }

  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
    if (!__any_sync(ALL, shrink[0] < 1.f || shrink[1] < 1.f)) return;
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) acc[i] *= shrink[i / 2 % 2];
  }
};

// Word `lane % 4` of four lanes' blocks of columns for word 0..3 of this lane's block: afterwards the lane holds 16 contiguous bytes.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const bool upper = lane & step;
      const u32 got = __shfl_xor_sync(ALL, upper ? w[i] : w[i + step], step);
      if (upper) w[i] = got;
      else w[i + step] = got;
    }
}

struct Math {
  const Params &p;
  const Plan &plan;
  Place place;
  int group, warp, lane;  // warpgroup, warp of it, lane of that

  __device__ __forceinline__ void release(u32 barrier) {  // what this warp's products have read: they are waited for before
    if (lane == 0) barrier_arrive(barrier);
  }

  __device__ __forceinline__ void ask_scores(Softmax &x, u32 queries, int slot) {
    const u64 a = matrix(queries + group * 64 * 128, 16, SQUARE), b = matrix(plan.ring + slot * STAGE, 16, SQUARES * SQUARE);
    scores16<0>(x.s, a, b);
#pragma unroll
    for (int k = 1; k < DIM / 16; ++k)
      scores16<1>(x.s, a + (k / 4 * (Q_TILE / SQUARES) + k % 4 * 32) / 16, b + (k / 4 * SQUARE + k % 4 * 32) / 16);
    wgmma_commit();
  }

  __device__ __forceinline__ void ask_values(Softmax &x, int slot) {
    const u64 b = matrix(plan.ring + slot * STAGE, SQUARE, SQUARES * SQUARE);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) values16(x.acc, x.weights + k * 4, b + k * 2 * SQUARES * SQUARE / 16);
    wgmma_commit();
  }

  // A value that nobody sees may be NaN, and 0 * NaN is NaN: zeros for the slots of the last block behind the last key. Both warpgroups write
  // them, each before its own products.
  __device__ __forceinline__ void clear_tail(int slot, int used) {
    constexpr int CHUNKS = DIM * 2 / 16;
    const u32 values = plan.ring + slot * STAGE;
    for (int e = threadIdx.x % 128; e < (BLOCK_SIZE - used % BLOCK_SIZE) * CHUNKS; e += 128) {
      const int token = used + e / CHUNKS, chunk = e % CHUNKS;
      const u32 at = values + (token / 8 * SQUARES + chunk / 8) * SQUARE + token % 8 * 128 + chunk % 8 * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor cores read what ordinary stores wrote
    meet(group);                                                  // arrive: the other warps of this warpgroup, here
  }

  __device__ __forceinline__ void store(Softmax &x, const Job &job) {
    float weight[2];
    int token[2];
    char *at[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = x.total[r];
      total += __shfl_xor_sync(ALL, total, 1);
      total += __shfl_xor_sync(ALL, total, 2);
      weight[r] = total > 0.f ? 1.f / total : 0.f;
      const int row = group * 64 + warp * 16 + r * 8 + lane / 4;
      token[r] = row < TOKENS * GROUP ? job.tile * TOKENS + row / GROUP : job.query_len;
      const i64 position = job.start + token[r], head = job.head * GROUP + row % GROUP;
      at[r] = p.out + (position * p.o_token + head * p.o_head + lane % 4 * 8) * 2;
#if LSE
      if (token[r] < job.query_len && lane % 4 == 0)
        p.lse[position * p.l_token + head * p.l_head] = total > 0.f ? (x.top[r] + log2_(total)) * LN2 : -INF;
#endif
    }
#pragma unroll
    for (int n = 0; n < DIM / 8; n += 4)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float *pair = x.acc + (n + i) * 4 + r * 2;
          w[i] = weight[r] > 0.f ? pack_out(pair[0] * weight[r], pair[1] * weight[r]) : 0;
        }
        transpose_quad(w, lane);
        if (token[r] < job.query_len) *(uint4 *)(at[r] + n * 16) = make_uint4(w[0], w[1], w[2], w[3]);
      }
  }

  // Scores of the step before `key`, products with the values of the step at `key`. MASKED: some row of the warpgroup sees less than all its keys.
  template <bool MASKED> __device__ __forceinline__ void step(Softmax &x, const int (&end)[2], int &key, float scale, u32 queries, u32 q_empty) {
    float shrink[2];
    const Place keys = place;
    place.advance();
    const Place values = place;
    place.advance();
    key -= KEYS;
    await_turn(group);  // arrive: give_turn of the other warpgroup, or at the start of the kernel
    wgmma_begin();
    ask_scores(x, queries, keys.slot);
    barrier_wait(plan.full + values.slot * 8, values.round);  // arrive: Loader::load's expect and the bytes of its copies
    wgmma_begin();                                            // the compiler asks for one behind every loop
    ask_values(x, values.slot);
    give_turn(group);
    wgmma_wait<1>();  // the scores are here
    release(plan.empty + keys.slot * 8);
    if (key == 0) release(q_empty);
    if (MASKED) x.mask(end, key, lane);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    barrier_wait_after(plan.full + place.slot * 8, place.round, x.total[0] + x.total[1]);  // arrive: as above; the next step's keys, or values
    wgmma_wait<0>();
    release(plan.empty + values.slot * 8);
    x.convert();
    x.rescale(shrink);
  }

  // One tile; `queries`: where they lie, `q_empty`: the barrier that gives them back.
  __device__ __forceinline__ void attend(Softmax &x, const Job &job, u32 queries, u32 q_empty) {
    const float scale = p.scale * LOG2E;
    int end[2];  // one past the last key of this thread's rows
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = job.tile * TOKENS + (group * 64 + warp * 16 + r * 8 + lane / 4) / GROUP;
      const int position = job.seq_len - job.query_len + token;
      end[r] = position < 0 ? 0 : CAUSAL ? min(position + 1, job.seq_len) : job.seq_len;
    }
    const int first_position = job.seq_len - job.query_len + job.tile * TOKENS + group * 64 / GROUP;
    const int all_see = first_position < 0 ? 0 : CAUSAL ? min(first_position + 1, job.seq_len) : job.seq_len;  // keys that no row masks
    x.clear();
    float shrink[2];
    int key = job.last * KEYS;
    barrier_wait(plan.full + place.slot * 8, place.round);  // arrive: Loader::load's expect and the bytes of its copies
    wgmma_begin();
    ask_scores(x, queries, place.slot);
    wgmma_wait<0>();
    release(plan.empty + place.slot * 8);
    place.advance();
    if (job.steps == 1) release(q_empty);
    if (key + KEYS > all_see) x.mask(end, key, lane);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    x.convert();
    if (key + KEYS > job.seq_len && job.seq_len % BLOCK_SIZE) {
      Place values = place;
      if (job.steps > 1) values.advance();  // behind the next step's keys
      barrier_wait(plan.full + values.slot * 8, values.round);  // arrive: as above
      clear_tail(values.slot, job.seq_len - key);
    }
    barrier_wait(plan.full + place.slot * 8, place.round);  // arrive: as above; the next step's keys, or this one's values if it was the last
#pragma unroll 1
    while (key > all_see) step<true>(x, end, key, scale, queries, q_empty);
#pragma unroll 1
    while (key > 0) step<false>(x, end, key, scale, queries, q_empty);
    wgmma_begin();
    ask_values(x, place.slot);
    wgmma_wait<0>();
    release(plan.empty + place.slot * 8);
    place.advance();
  }

  __device__ __forceinline__ int run(const Job *jobs) {
    Softmax x;
    int steps = 0;
    if (group == 1) give_turn(group);  // warpgroup 0 begins
    for (int turn = 0;; ++turn) {
      const int buffer = turn & 1;
      barrier_wait(plan.q_full + buffer * 8, turn >> 1 & 1);  // arrive: Loader::run, with the bytes of the queries where there are any
      const Job job = uniform(jobs[buffer]);
      if (job.steps < 0) break;
      const u32 q_empty = plan.q_empty + buffer * 8;
      if (job.steps > 0) {
        attend(x, job, plan.queries + buffer * Q_TILE, q_empty);
      } else {
        release(q_empty);
        x.clear();
      }
      store(x, job);
      steps += job.steps;
    }
    if (group == 0) await_turn(group);  // arrive: warpgroup 1's last turn, or its start; the barrier is left as it was found
    return steps;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) paged_prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[BARRIERS];
  __shared__ __align__(16) Job jobs[2];
  const Plan plan(shared, barriers);
#if CLOCKS
  if (threadIdx.x == 128) p.clocks[blockIdx.x * 2] = -clock64();
#endif
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(plan.full + s * 8, 1);
      barrier_init(plan.empty + s * 8, MATH_WARPS);
    }
    for (int b = 0; b < 2; ++b) {
      barrier_init(plan.q_full + b * 8, 1);
      barrier_init(plan.q_empty + b * 8, MATH_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine sees them
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) {
      Loader loader{p, plan, Place(), (int)threadIdx.x};
      loader.run(jobs);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Math math{p, plan, Place(), uniform(threadIdx.x / 128) - 1, uniform(threadIdx.x / 32 % 4), (int)threadIdx.x % 32};
    [[maybe_unused]] const int steps = math.run(jobs);
#if CLOCKS
    if (threadIdx.x == 128) {
      p.clocks[blockIdx.x * 2] += clock64();
      p.clocks[blockIdx.x * 2 + 1] = steps;
    }
#endif
  }
}
