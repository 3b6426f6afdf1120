// The consumer warpgroups: products, softmax, turns, tile by tile.
#pragma once

#include "prefill_convert.cuh"
#include "prefill_epilogue.cuh"
#include "prefill_launch_order.cuh"
#include "prefill_softmax.cuh"

// Turns: barrier 1 is warpgroup 0's, 2 is warpgroup 1's ...; 256 threads: who waits and who gives the turn.
// Behind them: the warps of one warpgroup.
__device__ __forceinline__ void await_turn(int warpgroup) {
  barrier<256>(1 + warpgroup);
}
__device__ __forceinline__ void give_turn(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + (warpgroup + 1) % WARPGROUPS) : "memory");
}
__device__ __forceinline__ void meet(int warpgroup) {
  barrier<128>(1 + WARPGROUPS + warpgroup);
}

// A wait that begins only when `x`, which is not negative, is there. Without it the compiler puts the
// exponentials behind the wait for the products that they should overlap: nothing else holds them in front
// of it.
__device__ __forceinline__ void barrier_wait_after(u32 at, int parity, float x) {
  mbarrier_wait(at, parity ^ (x < -1.f));
}

// Products in a branch that might part a warp are put one behind the other.
__device__ __forceinline__ QueryTile uniform(const QueryTile &x) {
  return {uniform(x.steps),     uniform(x.last),    uniform(x.index), uniform(x.start),
          uniform(x.query_len), uniform(x.seq_len), uniform(x.head), uniform(x.partial)};
}

// What a thread knows of its two rows of a tile.
struct Rows {
  int low[2], end[2], position[2];
  float slope[2];
  Branch branch[2];
  float scale;  // of scores, in which the keys' scale is
};

struct Consumer {
  const Params &p;
  const SharedLayout &smem;
  PipelineState<K_STAGES> k;
  PipelineState<V_STAGES> v;
  int warpgroup, warp, lane;  // warpgroup, warp of it, lane of that

  // What this warp's products and loads have read: they are waited for, their values are there.
  __device__ __forceinline__ void release(u32 barrier) {
    if (EVERY_LANE || lane == 0) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void issue_scores(Softmax &x, u32 queries, int slot) {
    const u64 a = matrix<K_LINE>(queries + warpgroup * 64 * K_LINE, 16, K_SQUARE);
    const u64 b = matrix<K_LINE>(smem.k + slot * K_STAGE_BYTES, 16, K_SQUARES * K_SQUARE);
    constexpr int IN_SQUARE = K_LINE / 32;
    scores<0>(x.s, a, b);
#pragma unroll
    for (int i = 1; i < DIM * BYTES / 32; ++i) {
      const u64 ai = a + (i / IN_SQUARE * (Q_TILE_BYTES / K_SQUARES) + i % IN_SQUARE * 32) / 16,
                bi = b + (i / IN_SQUARE * K_SQUARE + i % IN_SQUARE * 32) / 16;
      scores<1>(x.s, ai, bi);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(Softmax &x, int slot) {
    if constexpr (Q_FP8) {
      constexpr int IN_LINE = TURNED_LINE / 32;
      const u64 b = matrix<TURNED_LINE>(smem.v + slot * V_STAGE_BYTES, 16, 8 * TURNED_LINE);
#pragma unroll
      for (int i = 0; i < TILE_KV / 32; ++i)
        values32(x.acc, x.weights + i * 4,
                 b + (i / IN_LINE * DIM_V * TURNED_LINE + i % IN_LINE * 32) / 16);
    } else {
      const u64 b = matrix<V_LINE>(smem.v + slot * V_STAGE_BYTES, V_SQUARE, V_SQUARES * V_SQUARE);
#pragma unroll
      for (int i = 0; i < TILE_KV / 16; ++i)
        values16(x.acc, x.weights + i * 4, b + i * 2 * V_SQUARES * V_SQUARE / 16);
    }
    wgmma_commit();
  }

  // A masked value may be NaN, and 0 * NaN is NaN: zeros for `count` slots from `first` on. All
  // warpgroups write them, each before its own products.
  __device__ __forceinline__ void clear_values(int slot, int first, int count) {
    const u32 values = smem.v + slot * V_STAGE_BYTES;
    if constexpr (Q_FP8) {
      for (int e = threadIdx.x % 128; e < count * DIM_V; e += 128)
        asm volatile("st.shared.b8 [%0], %1;" ::"r"(values + turned_at(e % DIM_V, first + e / DIM_V)), "r"(0)
                     : "memory");
    } else {
      // of 16 bytes; their order within a token's line of a square is of no account
      constexpr int CHUNKS = DIM_V / 8, IN_SQUARE = V_WIDTH / 8;
      for (int e = threadIdx.x % 128; e < count * CHUNKS; e += 128) {
        const int token = first + e / CHUNKS, chunk = e % CHUNKS;
        const u32 at = values + (token / 8 * V_SQUARES + chunk / IN_SQUARE) * V_SQUARE + token % 8 * V_LINE +
                       chunk % IN_SQUARE * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
      }
    }
    // the tensor cores read what ordinary stores wrote
    fence_async();
    // arrive: the other warps of this warpgroup, here
    meet(warpgroup);
  }

  // Scores that have just come, of the keys from `key` on.
  template <bool MASKED>
  __device__ __forceinline__ void finish_scores(Softmax &x, const Rows &rows, int key) {
    const int first = key + lane % 4 * 2;
    Seen seen[2];
    if constexpr (TREE && MASKED) {
#pragma unroll
      for (int r = 0; r < 2; ++r) seen[r] = rows.branch[r].from(first);
    }
    if (ADJUST) {
      const int to_key[2] = {first - rows.position[0], first - rows.position[1]};
      x.adjust<MASKED>(SCALES ? rows.scale : p.scale, p.soft_cap, rows.slope, to_key, seen, first);
    }
    if (MASKED) x.mask(rows.low, rows.end, seen, first);
  }

  // Scores of the step before `key`, products with the values of the step at `key`. MASKED: some row of the
  // warpgroup does not see all its keys.
  template <bool MASKED>
  __device__ __forceinline__ void step(Softmax &x, const Rows &rows, int &key, int begin, float scale,
                                       u32 queries, u32 q_empty) {
    float shrink[2];
    const u32 values = v.slot, v_full = smem.v_full + values * 8, v_empty = smem.v_empty + values * 8,
              k_empty = smem.k_empty + k.slot * 8;
    const int phase = v.phase;
    key -= TILE_KV;
    // arrive: give_turn of the warpgroup before this one, or at the start of the kernel
    await_turn(warpgroup);
    wgmma_fence();
    issue_scores(x, queries, k.slot);
    k.advance();
    v.advance();
    mbarrier_wait(v_full, phase);  // arrive: Producer::load's expect and the bytes of its copies
    wgmma_fence();                 // the compiler asks for one behind every loop
    issue_values(x, values);
    give_turn(warpgroup);
    wgmma_wait<1>();  // the scores are here
    release(k_empty);
    if (key == begin) release(q_empty);
    finish_scores<MASKED>(x, rows, key);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    // arrive: as above; the next step's keys, or this one's values if it was the last
    barrier_wait_after(key > begin ? smem.k_full + k.slot * 8 : smem.v_full + v.slot * 8,
                       key > begin ? k.phase : v.phase, x.total[0] + x.total[1]);
    wgmma_wait<0>();
    release(v_empty);
    x.convert();
    x.rescale(shrink);
  }

  // A step with fp8 queries, whose products take half as long: the scores of `key`, behind the products with
  // the values before, which were not waited for; then the weights; then the products with the values are
  // asked for and left to run. The turn is kept until both products are done, so that they overlap the
  // other warpgroup's exponentials and not its products.
  template <bool MASKED>
  __device__ __forceinline__ void fp8_step(Softmax &x, const Rows &rows, int key, int begin, float scale,
                                             u32 queries, u32 q_empty, const QueryTile &tile) {
    float shrink[2];
    const bool is_first = key == tile.last * TILE_KV;
    // arrive: Producer::load's expect and its copies' bytes
    mbarrier_wait(smem.k_full + k.slot * 8, k.phase);
    // arrive: give_turn of the warpgroup before this one, or at the start of the kernel
    await_turn(warpgroup);
    wgmma_fence();
    issue_scores(x, queries, k.slot);
    wgmma_wait<0>();
    give_turn(warpgroup);
    release(smem.k_empty + k.slot * 8);
    if (!is_first) release_values();
    k.advance();
    if (key == begin) release(q_empty);
    finish_scores<MASKED>(x, rows, key);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    x.convert();
    x.rescale(shrink);
    mbarrier_wait(smem.v_full + v.slot * 8, v.phase);  // arrive: Converter::convert of every converter
    if (MASKED && is_first && key + TILE_KV > tile.seq_len && tile.seq_len % BLOCK_SIZE)
      clear_values(v.slot, tile.seq_len - key, BLOCK_SIZE - tile.seq_len % BLOCK_SIZE);
    if (HIDES_FIRST_KEYS && key == begin) clear_unseen_values(tile, begin);
    wgmma_fence();
    issue_values(x, v.slot);
    v.advance();
  }
  // The stage whose products were asked for last.
  __device__ __forceinline__ void release_values() {
    release(smem.v_empty + (v.slot == 0 ? V_STAGES - 1 : v.slot - 1) * 8);
  }
  // The tile's first block holds keys that none of its rows sees; blocks before it came as zeros.
  __device__ __forceinline__ void clear_unseen_values(const QueryTile &tile, int begin) {
    const int before = tile.seq_len - tile.query_len;
    const int skipped = first_key(max(before + (TREE ? 0 : tile.index * TILE_TOKENS), 0)) - begin;
    if (skipped > 0 && skipped % BLOCK_SIZE)
      clear_values(v.slot, skipped / BLOCK_SIZE * BLOCK_SIZE, skipped % BLOCK_SIZE);
  }

  // One tile; `queries`: where they lie, `q_empty`: the barrier that gives them back.
  __device__ __forceinline__ void mainloop(Softmax &x, const QueryTile &tile, u32 queries, u32 q_empty) {
    Rows rows;
    rows.scale = p.scale;
    if constexpr (SCALES) rows.scale *= p.k_scale[tile.head * p.ks_head];
    const float scale = ADJUST ? 1.f : rows.scale * LOG2E;
    const int before = tile.seq_len - tile.query_len;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warpgroup * 64 + warp * 16 + r * 8 + lane / 4;
      const int position = before + tile.index * TILE_TOKENS + row / GROUP;
      rows.position[r] = position;
      rows.low[r] = first_key(position);
      rows.end[r] = end_key(position, tile.seq_len);
      if constexpr (TREE) {
        const int token = tile.index * TILE_TOKENS + row / GROUP;
        const u64 own = 1ull << min(token, 63);
        const u64 word = token < tile.query_len ? (u64)p.tree[tile.start + token] & (own - 1) : 0;
        rows.branch[r] = {word | own, before};
        rows.position[r] = before + __popcll(word);
        rows.low[r] = first_key(rows.position[r]);
      }
      if constexpr (ALIBI) rows.slope[r] = p.slopes[tile.head * GROUP + row % GROUP];
    }
    // Keys that all rows of the warpgroup see: of rows behind the request as well, which mask more than is
    // needed.
    const int all_low = first_key(before + tile.index * TILE_TOKENS + (warpgroup * 64 + 63) / GROUP);
    const int all_end =
        TREE ? max(before, 0)
             : end_key(before + tile.index * TILE_TOKENS + warpgroup * 64 / GROUP, tile.seq_len);
    x.clear();
    float shrink[2];
    int key = tile.last * TILE_KV;
    const int begin = key - (tile.steps - 1) * TILE_KV;
    if constexpr (Q_FP8) {
#pragma unroll 1
      for (; key >= begin; key -= TILE_KV) {
        if (key + TILE_KV > all_end || (HIDES_FIRST_KEYS && key < all_low))
          fp8_step<true>(x, rows, key, begin, scale, queries, q_empty, tile);
        else
          fp8_step<false>(x, rows, key, begin, scale, queries, q_empty, tile);
      }
      wgmma_wait<0>();
      release_values();
      return;
    }
    // arrive: Producer::load's expect and the bytes of its copies
    mbarrier_wait(smem.k_full + k.slot * 8, k.phase);
    wgmma_fence();
    issue_scores(x, queries, k.slot);
    wgmma_wait<0>();
    release(smem.k_empty + k.slot * 8);
    k.advance();
    if (tile.steps == 1) release(q_empty);
    if (key + TILE_KV > all_end || (HIDES_FIRST_KEYS && key < all_low)) finish_scores<true>(x, rows, key);
    else finish_scores<false>(x, rows, key);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    x.convert();
    if (key + TILE_KV > tile.seq_len && tile.seq_len % BLOCK_SIZE) {
      mbarrier_wait(smem.v_full + v.slot * 8, v.phase);  // arrive: as above
      clear_values(v.slot, tile.seq_len - key, BLOCK_SIZE - tile.seq_len % BLOCK_SIZE);
    }
    // arrive: as above; the next step's keys, or this one's values if it was the last
    mbarrier_wait(tile.steps > 1 ? smem.k_full + k.slot * 8 : smem.v_full + v.slot * 8,
                  tile.steps > 1 ? k.phase : v.phase);
#pragma unroll 1
    while (key > max(all_end, begin)) step<true>(x, rows, key, begin, scale, queries, q_empty);
#pragma unroll 1
    while (key > (HIDES_FIRST_KEYS ? max(begin, all_low + TILE_KV - 1) : begin))
      step<false>(x, rows, key, begin, scale, queries, q_empty);
#pragma unroll 1
    while (HIDES_FIRST_KEYS && key > begin) step<true>(x, rows, key, begin, scale, queries, q_empty);
    if (HIDES_FIRST_KEYS) clear_unseen_values(tile, begin);
    wgmma_fence();
    issue_values(x, v.slot);
    wgmma_wait<0>();
    release(smem.v_empty + v.slot * 8);
    v.advance();
  }

  // Whether no row of the warpgroup stands for a query: a short chunk fills some of a tile's warpgroups.
  __device__ __forceinline__ bool is_idle(const QueryTile &tile) const {
    return SPLIT && tile.index * TILE_TOKENS + warpgroup * 64 / GROUP >= tile.query_len;
  }

  // A tile without rows for this warpgroup: the waits, turns and releases of `mainloop` in its order, without
  // its products. So what holds for `mainloop` holds here.
  __device__ __forceinline__ void skip(int steps, u32 q_empty) {
    if constexpr (Q_FP8) {  // of `fp8_step`
#pragma unroll 1
      for (int left = steps; left > 0; --left) {
        mbarrier_wait(smem.k_full + k.slot * 8, k.phase);
        await_turn(warpgroup);  // arrive: as there
        give_turn(warpgroup);
        release(smem.k_empty + k.slot * 8);
        k.advance();
        if (left == 1) release(q_empty);
        mbarrier_wait(smem.v_full + v.slot * 8, v.phase);
        release(smem.v_empty + v.slot * 8);
        v.advance();
      }
      return;
    }
    // arrive, here and below: Producer::load's expect and the bytes of its copies
    mbarrier_wait(smem.k_full + k.slot * 8, k.phase);
    release(smem.k_empty + k.slot * 8);
    k.advance();
    if (steps == 1) release(q_empty);
#pragma unroll 1
    for (int left = steps - 1; left > 0; --left) {
      const u32 k_empty = smem.k_empty + k.slot * 8, v_empty = smem.v_empty + v.slot * 8;
      mbarrier_wait(smem.k_full + k.slot * 8, k.phase);
      await_turn(warpgroup);  // arrive: as in step
      mbarrier_wait(smem.v_full + v.slot * 8, v.phase);
      give_turn(warpgroup);
      k.advance();
      v.advance();
      release(k_empty);
      if (left == 1) release(q_empty);
      release(v_empty);
    }
    mbarrier_wait(smem.v_full + v.slot * 8, v.phase);
    release(smem.v_empty + v.slot * 8);
    v.advance();
  }

  __device__ __forceinline__ void run(const QueryTile *query_tiles) {
    Softmax x;
    wait_for_kernels_ahead();
    if (warpgroup == WARPGROUPS - 1) give_turn(warpgroup);  // warpgroup 0 begins
    for (int turn = 0;; ++turn) {
      const int buffer = turn % Q_STAGES;
      // arrive: Producer::run, with the bytes of the queries where there are any
      mbarrier_wait(smem.q_full + buffer * 8, turn / Q_STAGES & 1);
      const QueryTile tile = uniform(query_tiles[buffer]);
      if (tile.steps < 0) break;
      const u32 q_empty = smem.q_empty + buffer * 8;
      if (tile.steps > 0 && is_idle(tile)) {
        skip(tile.steps, q_empty);
        continue;
      }
      if (tile.steps > 0) {
        mainloop(x, tile, smem.q + buffer * Q_TILE_BYTES, q_empty);
      } else {
        release(q_empty);
        x.clear();
      }
      if (SPLIT && tile.partial >= 0) store_partial(p, x.top, x.total, x.acc, tile.partial);
      else
        store_rows<DIM_V / 8>(p, tile, warpgroup * 64 + warp * 16 + lane / 4, lane, x.top, x.total, x.acc, 0);
    }
    // arrive: the last warpgroup's last turn, or its start; the barrier is left as it was found
    if (warpgroup == 0) await_turn(warpgroup);
  }
};
