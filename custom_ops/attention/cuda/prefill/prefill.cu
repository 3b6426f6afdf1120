// Prefill attention over a paged cache on Hopper: one warp has the copy engine fetch blocks, two or three
// warpgroups multiply and exponentiate.
//
// A work tile is 64 packed query rows per consumer warpgroup (query tokens x heads of the group) of one kv
// head; CTAs stay (a persistent kernel), and take the next work tile of a schedule that each of them works
// out by itself (prefill_scheduler.cuh). Keys and values come through a ring of stages each, filled in the
// order K K V K V ... V, each block of the cache in one box; the producer runs on over the borders of tiles.
//
// A warpgroup asks for the scores of the next step before the softmax of this one is applied to the values,
// so that its exponentials run beside its own products; the warpgroups issue products in turns, so that one's
// exponentials run beside the others'. The accumulator is rescaled only if a row maximum of the warp rose,
// which is exact.
//
// Why nothing here waits for ever. (1) Stages are filled and used in one order by all warpgroups; the
// producer waits for a stage only until each consumer warp has released what was in it before. The warpgroup
// that is furthest behind holds at most one stage of each ring, and never the one that what it waits for is
// to go into: in every ring of two stages or more that stage has been released by it, and by those ahead of
// it. (2) A warpgroup that waits for its turn holds no stage. Those before it in the round have all that they
// need or get it by (1), issue their products and pass the turn on. (3) All warpgroups take the same turns:
// steps - 1 of every tile. (4) A tile of queries is waited for in the order in which the producer sends them,
// and released by its last scores, for which (1) holds. Every wait names its arrival beside it. With fp8
// queries (fp8_step) turns are one for every step; whoever has the turn waits for its own products alone; and
// who waits for it, or for keys, may hold the values of the step before. Those keys are loaded in front of
// the values that would go into that stage, so that (1) holds with two stages of values or more.
//
// Compiled by NVRTC for sm_90a; its constants: prefill_config.cuh. Sources: FlashAttention-3
// (arXiv:2407.08608, 3.1 and 3.2).

#include "prefill_convert.cuh"
#include "prefill_products.cuh"
#include "prefill_params.cuh"
#include "prefill_epilogue.cuh"

// Turns: barrier 1 is warpgroup 0's, 2 is warpgroup 1's ...; 256 threads: who waits and who gives the turn.
// Behind them: the warps of one warpgroup.
__device__ __forceinline__ void await_turn(int warpgroup) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + warpgroup) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + (warpgroup + 1) % WARPGROUPS) : "memory");
}
__device__ __forceinline__ void meet(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + WARPGROUPS + warpgroup) : "memory");
}

// The producer's waits. With DEBUG_PATIENCE it gives up after so many tries and ends the kernel with an
// error: for tests. Whoever waits for ever, the producer soon waits too; in the consumer warps the way out
// would cost registers.
__device__ __forceinline__ void wait_or_give_up(u32 at, int parity) {
  if constexpr (DEBUG_PATIENCE > 0)
    asm volatile(
        "{.reg .pred done, out; .reg .u32 left; mov.u32 left, %2; again%=: "
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra there%=;"
        " sub.u32 left, left, 1; setp.eq.u32 out, left, 0; @!out bra again%=; trap; there%=:}" ::"r"(at),
        "r"(parity), "n"(DEBUG_PATIENCE)
        : "memory");
  else
    mbarrier_wait(at, parity);
}

// A wait that begins only when `x`, which is not negative, is there. Without it the compiler puts the
// exponentials behind the wait for the products that they should run beside: nothing else holds them in front
// of it.
__device__ __forceinline__ void barrier_wait_after(u32 at, int parity, float x) {
  mbarrier_wait(at, parity ^ (DEBUG_BESIDE && x < -1.f));
}

// Without a decode launch behind it this kernel may begin while the ones ahead still run. Lengths, query
// starts and block tables are read before this, as machine.cuh says; all else is read and written behind it.
// Whatever warp stays passes it once, with work or without, so that no CTA ends before the kernels ahead. The
// kernel behind may begin then; a merge launch, which waits for this kernel's end, already at its start.
__device__ __forceinline__ void wait_for_kernels_ahead() {
  if constexpr (DECODE_LEN == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  if constexpr (DECODE_LEN == 0 && !SPLIT) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Products in a branch that might part a warp are put one behind the other.
__device__ __forceinline__ QueryTile uniform(const QueryTile &x) {
  return {uniform(x.steps),     uniform(x.last),    uniform(x.index), uniform(x.start),
          uniform(x.query_len), uniform(x.seq_len), uniform(x.head), uniform(x.partial)};
}

// The producer: one warp.
struct Producer {
  const Params &p;
  const SharedLayout &smem;
  int *kinds;  // fp8: of each raw stage, what is in it
  PipelineState<K_STAGES> k;
  PipelineState<V_STAGES> v;
  PipelineState<RAW_STAGES> raw;
  int lane;

  // PAIRED: the first block of a step that this CTA brings both.
  static constexpr int MY_BLOCKS = TILE_BLOCKS / SHARERS;
  __device__ __forceinline__ int first_block() const { return PAIRED ? blockIdx.x % 2 * MY_BLOCKS : 0; }

  // The lane's block of a step. Blocks past the request's last key, and those before the first that the tile
  // sees, are no block at all: the copy engine fills them with zeros.
  __device__ __forceinline__ int block_of(const WorkTile &tile, int first_seen, int step) const {
    const int index = step * TILE_BLOCKS + first_block() + lane;
    const bool seen = lane < MY_BLOCKS && index * BLOCK_SIZE < tile.r.seq_len &&
                      (!HIDES_FIRST_KEYS || (index + 1) * BLOCK_SIZE > first_seen);
    return seen ? p.table[tile.request * p.table_row + index] : p.num_blocks;
  }

  // `ring`: the place in it; `kind`: what the stage is said to hold, of those that are converted.
  template <bool RAW, int COUNT, int STAGE, class Ring>
  __device__ __forceinline__ void load(Ring &ring, u32 stages, u32 full, u32 empty, const Map *map,
                                       const Where &at, int head, int block, [[maybe_unused]] int kind) {
    const u32 to = stages + ring.slot * STAGE, filled = full + ring.slot * 8;
    // arrive: release_stage() of every consumer warp, of both CTAs if PAIRED, or Converter::convert of every
    // converter, a round ago
    wait_or_give_up(empty + ring.slot * 8, ring.phase ^ 1);
    if (lane == 0) {
      if constexpr (RAW) kinds[ring.slot] = kind;
      mbarrier_arrive_expect_tx(filled, COUNT);
    }
    __syncwarp();  // expected before anything can arrive
    if constexpr (PAIRED) {
      // The other CTA's stage is empty too: its consumer warps are among those waited for. Its barrier may be
      // told before it expects anything; its phase does not end before that.
      if (lane < MY_BLOCKS)
        tma_load_4d_shared(to + (first_block() + lane) * (COUNT / TILE_BLOCKS), map, 0, 0,
                           head * at.head_square, head * at.head_group + block * at.block_group, filled, 3);
    } else if (lane < TILE_BLOCKS) {
      tma_load_4d(to + lane * (COUNT / TILE_BLOCKS), map, 0, 0, head * at.head_square,
                  head * at.head_group + block * at.block_group, filled);
    }
    ring.advance();
  }
  __device__ __forceinline__ void load_keys(int head, int block) {
    if constexpr (FP8 && !Q_FP8)
      load<true, TILE_KV * DIM, RAW_STAGE_BYTES>(raw, smem.raw, smem.raw_full, smem.raw_empty, &p.k, p.k_at,
                                                 head, block, KEYS_COME);
    else
      load<false, K_STAGE_BYTES, K_STAGE_BYTES>(k, smem.k, smem.k_full, smem.k_empty, &p.k, p.k_at, head,
                                                block, KEYS_COME);
  }
  __device__ __forceinline__ void load_values(int head, int block) {
    if constexpr (FP8)
      load<true, TILE_KV * DIM_V, RAW_STAGE_BYTES>(raw, smem.raw, smem.raw_full, smem.raw_empty, &p.v, p.v_at,
                                                   head, block, VALUES_COME);
    else
      load<false, V_STAGE_BYTES, V_STAGE_BYTES>(v, smem.v, smem.v_full, smem.v_empty, &p.v, p.v_at, head,
                                                block, VALUES_COME);
  }
  __device__ __forceinline__ void end_conversion() {
    // arrive: Converter::convert of every converter, a round ago
    wait_or_give_up(smem.raw_empty + raw.slot * 8, raw.phase ^ 1);
    if (lane == 0) {
      kinds[raw.slot] = NOTHING_COMES;
      mbarrier_arrive(smem.raw_full + raw.slot * 8);
    }
  }

  // Which steps a ticket's tile goes through: [first, last]; whether it is all of the tile.
  struct Steps {
    int first, last, first_seen;
    bool whole;
    __device__ __forceinline__ int count() const { return last < 0 ? 0 : max(last - first + 1, 0); }
  };
  __device__ __forceinline__ Steps steps_of(const TileScheduler &scheduler, const WorkTile &tile, int ticket,
                                            [[maybe_unused]] const CascadeSplit &split) const {
    Steps s;
    s.first_seen = HIDES_FIRST_KEYS ? tile.r.first_seen(tile.index) : 0;
    s.first = s.first_seen / TILE_KV, s.last = tile.r.level(tile.index) - 1;
    s.whole = true;
    if constexpr (CASCADE) {
      const int all = s.last + 1;
      s.first = all * split.from / split.of, s.last = all * split.to / split.of - 1;
      s.whole = false;
    } else if constexpr (SPLIT) {
      s.whole = scheduler.splits == 1 || ticket >= scheduler.live_total();
      if (!s.whole) {
        const int all = max(s.last + 1 - s.first, 0);
        s.last = s.first + all * (tile.split + 1) / scheduler.splits - 1;
        s.first += all * tile.split / scheduler.splits;
      }
    }
    return s;
  }

  // CASCADE: a tile of queries, which stand anywhere in the batch; rows behind the request are zeros.
  __device__ __forceinline__ void gather_queries(const WorkTile &tile, int index, u32 to, u32 filled) const {
#pragma unroll 1
    for (int begin = 0; begin < TILE_TOKENS; begin += 32) {
      const int token = index * TILE_TOKENS + begin + lane;
      int row = p.num_tokens;
      // token rows are less than 2^31: the low word
      if (token < tile.r.query_len) row = load_l2((const int *)(p.order + tile.r.start + token));
      const u32 at = to + (begin + lane) * GROUP * K_WIDTH * 2;
      if (begin + lane < TILE_TOKENS) {
#pragma unroll 1
        for (int s = 0; s < K_SQUARES; ++s)
          tma_load_3d(at + s * (Q_TILE_BYTES / K_SQUARES), &p.q, s * K_WIDTH, tile.head * GROUP, row, filled);
      }
      __syncwarp();
    }
  }

  // CASCADE: the CTA's next split, and its tile; `total` if there is none.
  __device__ __forceinline__ int take(const CascadeScheduler &cascade, int turn, int total,
                                      CascadeSplit &split) const {
    split = total > 0 ? cascade.split(blockIdx.x / SHARERS, turn) : CascadeSplit{-1, 0, 0, 1};
    return split.tile < 0 ? total : split.tile;
  }

  // PAIRED: the first CTA of a cluster draws tickets for both and tells the other one, through one of two
  // places in its memory. `turn`: messages before.
  __device__ __forceinline__ int tell(const Mail &mail, int ticket, int turn) {
    const int slot = turn % 2, phase = turn / 2 & 1;
    if (blockIdx.x % 2 == 0) {
      if (lane == 0) {
        wait_or_give_up(mail.empty + slot * 8, phase ^ 1);  // arrive: below, two messages ago
        st_async(mapa(mail.place + slot * 4, 1), ticket, mapa(mail.full + slot * 8, 1));
      }
      __syncwarp();
      return ticket;
    }
    if (lane == 0) mbarrier_arrive_expect_tx(mail.full + slot * 8, 4);
    wait_or_give_up(mail.full + slot * 8, phase);  // arrive: the line above, and the 4 bytes from above it
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(ticket) : "r"(mail.place + slot * 4) : "memory");
    __syncwarp();
    if (lane == 0) mbarrier_arrive_cluster(mapa(mail.empty + slot * 8, 0));
    return ticket;
  }

  // Kernels behind wait for the late launch alone: it must not end before the decode launch, which does not
  // before the first launch of tiles.
  __device__ __forceinline__ void finish_behind_decode() {
    if (DECODE_LEN > 0 && p.is_late && blockIdx.x == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  }

  __device__ __forceinline__ void run(TileScheduler scheduler, QueryTile *query_tiles,
                                      [[maybe_unused]] const Mail &mail) {
    [[maybe_unused]] CascadeScheduler cascade;
    [[maybe_unused]] CascadeSplit split = {};
    if constexpr (CASCADE)
      cascade.schedule(scheduler.live_total(), p.ctas / SHARERS, scheduler.shortest, scheduler.top);
    const int total = CASCADE ? scheduler.live_total() : scheduler.total();
    // Beside a decode launch: a counter of a request that has tiles here, which that launch does not touch.
    const Tickets tickets = {(u32 *)p.tickets + (DECODE_LEN > 0 ? scheduler.owner * p.ticket_row : 0), total,
                             (p.ctas - p.late) / SHARERS, p.late};
    int ticket = 0;
    if constexpr (CASCADE) {
      ticket = take(cascade, 0, total, split);
    } else {
      if (lane == 0) ticket = tickets.begin(blockIdx.x / SHARERS, DECODE_LEN > 0 && p.is_late);
      ticket = __shfl_sync(ALL, ticket, 0);
    }
    WorkTile tile = {};
    int block = 0, block_before = 0;  // of a tile's last step and of the one before, asked for ahead
    if (ticket < total) {
      tile = scheduler.find(ticket);
      const Steps steps = steps_of(scheduler, tile, ticket, split);
      if (steps.count() > 0) block = block_of(tile, steps.first_seen, steps.last);
      if (steps.count() > 1) block_before = block_of(tile, steps.first_seen, steps.last - 1);
    }
    wait_for_kernels_ahead();
    [[maybe_unused]] SplitTiles *split_tiles = nullptr;
    if constexpr (SPLIT) {
      split_tiles = split_tiles_of(p);
      if (blockIdx.x == 0 && lane == 0 && !p.is_late) {
        split_tiles->tiles = scheduler.live * NUM_KV_HEADS * SHARERS;
        split_tiles->splits = scheduler.splits;
        if constexpr (CASCADE) split_tiles->cascade = cascade;
      }
    }
    for (int turn = 0;; ++turn) {
      const int buffer = turn % Q_STAGES, parity = turn / Q_STAGES & 1;
      const u32 q_full = smem.q_full + buffer * 8;
      // arrive: release() of every consumer warp, Q_STAGES tiles ago
      wait_or_give_up(smem.q_empty + buffer * 8, parity ^ 1);
      if (ticket >= total) {
        if (lane == 0) {
          query_tiles[buffer].steps = -1;
          mbarrier_arrive(q_full);
        }
        if constexpr (FP8) end_conversion();
        finish_behind_decode();
        return;
      }
      int next = 0;  // comes while this tile is loaded
      if constexpr (!CASCADE)
        if (lane == 0 && (!PAIRED || blockIdx.x % 2 == 0)) next = tickets.draw();
      const Steps reach = steps_of(scheduler, tile, ticket, split);
      const int steps = reach.count(), first = reach.first, last = reach.last, first_seen = reach.first_seen;
      const bool whole = reach.whole;
      if (lane == 0) {
        const QueryTile query_tile = {steps,
                         last,
                         PAIRED ? tile.index * 2 + (int)(blockIdx.x % 2) : tile.index,
                         tile.r.start,
                         tile.r.query_len,
                         tile.r.seq_len,
                         tile.head,
                         CASCADE ? turn * p.ctas + (int)blockIdx.x : whole ? -1 : ticket};
        query_tiles[buffer] = query_tile;
        if constexpr (CASCADE) {
          if (split.to == split.of)
            split_tiles->query_tiles[ticket * SHARERS + blockIdx.x % SHARERS] = query_tile;
        } else if constexpr (SPLIT) {
          if (!whole && tile.split == 0) split_tiles->query_tiles[ticket / scheduler.splits] = query_tile;
        }
        if (steps > 0) {
          // the tile is written before: a wait for q_full sees it
          mbarrier_arrive_expect_tx(q_full, Q_LOAD_BYTES);
#pragma unroll 1
          for (int s = 0; !CASCADE && s < K_SQUARES; ++s)
            tma_load_3d(smem.q + buffer * Q_TILE_BYTES + s * (Q_TILE_BYTES / K_SQUARES), &p.q, s * K_WIDTH,
                        tile.head * GROUP, tile.r.start + query_tile.index * TILE_TOKENS, q_full);
        } else {
          mbarrier_arrive(q_full);
        }
      }
      __syncwarp();
      if constexpr (CASCADE)
        if (steps > 0)
          gather_queries(tile, tile.index * SHARERS + blockIdx.x % SHARERS, smem.q + buffer * Q_TILE_BYTES,
                         q_full);
      int block_ahead = 0;
      if (steps > 0) {
        load_keys(tile.head, block);
        if (steps > 1) load_keys(tile.head, block_before);
        if (steps > 2) block_ahead = block_of(tile, first_seen, last - 2);
        load_values(tile.head, block);
      }
      // The next tile is sought while the stages are full, so that nothing waits for it at the border.
      if constexpr (CASCADE) ticket = take(cascade, turn + 1, total, split);
      else ticket = __shfl_sync(ALL, next, 0);
      if constexpr (PAIRED && !CASCADE) ticket = tell(mail, ticket, turn);
      WorkTile coming = {};
      int coming_block = 0, coming_before = 0;
      if (ticket < total) {
        coming = scheduler.find(ticket);
        const Steps steps = steps_of(scheduler, coming, ticket, split);
        if (steps.count() > 0) coming_block = block_of(coming, steps.first_seen, steps.last);
        if (steps.count() > 1) coming_before = block_of(coming, steps.first_seen, steps.last - 1);
      }
      for (int step = last - 1; step >= first; --step) {
        block = block_before;
        block_before = block_ahead;
        if (step > first + 1) block_ahead = block_of(tile, first_seen, step - 2);
        if (step > first) load_keys(tile.head, block_before);
        load_values(tile.head, block);
      }
      tile = coming, block = coming_block, block_before = coming_before;
    }
  }
};

// TREE: of 128 keys, which a row sees, a bit each, and the position at which the first of them counts.
struct Seen {
  u64 bits[2];
  int first;

  __device__ __forceinline__ bool sees(int key) const { return bits[key / 64] >> key % 64 & 1; }
  __device__ __forceinline__ int position(int key) const {
    return first + (key < 64 ? 0 : __popcll(bits[0])) + __popcll(bits[key / 64] & ((1ull << key % 64) - 1));
  }
};

// TREE: what a row sees of its request's query tokens, whose keys begin at `context`. It counts positions
// over these and the context.
struct Branch {
  u64 word;
  int context;

  // of the 64 keys from `key` on
  __device__ __forceinline__ u64 bits(int key) const {
    const int token = key - context;
    if (token >= 0) return token < 64 ? word >> token : 0;
    return token > -64 ? word << -token | ((1ull << -token) - 1) : ~0ull;
  }
  __device__ __forceinline__ Seen from(int key) const {
    const int token = key - context;
    const int before = token <= 0 ? token : __popcll(token > 63 ? word : word & ((1ull << token) - 1));
    return {{bits(key), bits(key + 64)}, context + before};
  }
};

// One thread's share of a warpgroup's 64 rows: rows lane / 4 and lane / 4 + 8 of its warp's 16; columns 8 * n
// + lane % 4 * 2 + {0, 1}. Element i of a product: n = i / 4, row i / 2 % 2, column i % 2.
struct Softmax {
  float s[TILE_KV / 2];              // scores, then weights
  u32 weights[TILE_KV * BYTES / 8];  // as the second product reads them
  float acc[DIM_V / 2];
  float top[2], total[2];   // in base 2 with the scale applied; this thread's columns only

  __device__ __forceinline__ void clear() {
    top[0] = top[1] = FLOOR;
    total[0] = total[1] = 0.f;
#pragma unroll
    for (int i = 0; i < DIM_V / 2; ++i) acc[i] = 0.f;
  }

  // Scores that are more than scaled products, in base 2. `to_key`: this thread's first key minus its rows'
  // positions.
  template <bool MASKED>
  __device__ __forceinline__ void adjust(float scale, float cap, const float (&slope)[2],
                                         const int (&to_key)[2], [[maybe_unused]] const Seen (&seen)[2],
                                         [[maybe_unused]] int first) {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) {
      float x = s[i] * scale;
      if (SOFT_CAP) x = cap * tanh_(x / cap);
      if constexpr (ALIBI && TREE && MASKED) {
        const int r = i / 2 % 2, distance = to_key[r] - first + seen[r].position(i / 4 * 8 + i % 2);
        x = fmaf(slope[r], (float)distance, x);
      } else if (ALIBI) x = fmaf(slope[i / 2 % 2], (float)(to_key[i / 2 % 2] + i / 4 * 8 + i % 2), x);
      s[i] = x * LOG2E;
    }
  }

  __device__ __forceinline__ void mask(const int (&low)[2], const int (&end)[2],
                                       [[maybe_unused]] const Seen (&seen)[2], int first) {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) {
      const int r = i / 2 % 2, key = i / 4 * 8 + i % 2;
      if constexpr (TREE) {
        if (!seen[r].sees(key) || (HIDES_FIRST_KEYS && seen[r].position(key) < low[r])) s[i] = -INF;
      } else if (key >= end[r] - first || (HIDES_FIRST_KEYS && key < low[r] - first)) s[i] = -INF;
    }
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
    for (int i = 16; i < TILE_KV / 2; i += 4) {
      most[0][i / 4 % 4] = fmaxf(most[0][i / 4 % 4], fmaxf(s[i], s[i + 1]));
      most[1][i / 4 % 4] = fmaxf(most[1][i / 4 % 4], fmaxf(s[i + 2], s[i + 3]));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float x = fmaxf(fmaxf(most[r][0], most[r][1]), fmaxf(most[r][2], most[r][3]));
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 1));
      x = fmaxf(x, __shfl_xor_sync(ALL, x, 2));
      const float raised = fmaxf(top[r], Q_FP8 ? fmaf(x, scale, -WEIGHT_BITS) : x * scale);
      shrink[r] = exp2_(top[r] - raised);
      top[r] = raised;
    }
  }

  __device__ __forceinline__ void exponentiate(float scale, const float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) s[i] = exp2_(fmaf(s[i], scale, -top[i / 2 % 2]));
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; ++i) sum[i / 2 % 2][i % 2] += s[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = fmaf(total[r], shrink[r], sum[r][0] + sum[r][1]);
  }

  __device__ __forceinline__ void convert() {
#pragma unroll
    for (int i = 0; i < TILE_KV / 2; i += Q_FP8 ? 8 : 2) {
      if constexpr (Q_FP8) {  // two rows of 16 keys, in the order that turned values have
        weights[i / 4] = pack_e4m3(s[i], s[i + 1], s[i + 4], s[i + 5]);
        weights[i / 4 + 1] = pack_e4m3(s[i + 2], s[i + 3], s[i + 6], s[i + 7]);
      } else {
        weights[i / 2] = pack<HALF>(s[i], s[i + 1]);
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
    if (!__any_sync(ALL, shrink[0] < 1.f || shrink[1] < 1.f)) return;
#pragma unroll
    for (int i = 0; i < DIM_V / 2; ++i) acc[i] *= shrink[i / 2 % 2];
  }
};

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
#if DEBUG_CLOCKS
  i64 spent[4] = {}, since = 0;  // cycles: in all, waiting for tiles, waiting for their first keys, storing
#endif
  __device__ __forceinline__ void begin_clock() {
#if DEBUG_CLOCKS
    since = clock64();
#endif
  }
  __device__ __forceinline__ void end_clock([[maybe_unused]] int kind) {
#if DEBUG_CLOCKS
    spent[kind] += clock64() - since;
#endif
  }

  // What this warp's products and loads have read: they are waited for, their values are there.
  __device__ __forceinline__ void release(u32 barrier) {
    if (DEBUG_EVERY_LANE || lane == 0) mbarrier_arrive(barrier);
  }
  // A stage. PAIRED: the other CTA fills half of it, too.
  __device__ __forceinline__ void release_stage(u32 barrier) {
    if constexpr (PAIRED) {
      if (lane < 2) mbarrier_arrive_cluster(mapa(barrier, (blockIdx.x ^ lane) % 2));
    } else {
      release(barrier);
    }
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

  // A value that nobody sees may be NaN, and 0 * NaN is NaN: zeros for `count` slots from `first` on. All
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
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    // arrive: the other warps of this warpgroup, here
    meet(warpgroup);
  }

  __device__ __forceinline__ void store(const Softmax &x, const QueryTile &tile) {
    store_rows<DIM_V / 8>(p, tile, warpgroup * 64 + warp * 16 + lane / 4, lane, x.top, x.total, x.acc, 0);
  }

  // What prefill_merge.cu puts together: nothing is weighed or summed over threads yet.
  __device__ __forceinline__ void store_partial(const Softmax &x, int partial) {
    float4 *to = partial_of(p, partial) + threadIdx.x - 128;
#pragma unroll
    for (int n = 0; n < DIM_V / 8; ++n)
      to[n * CONSUMER_THREADS] =
          make_float4(x.acc[n * 4], x.acc[n * 4 + 1], x.acc[n * 4 + 2], x.acc[n * 4 + 3]);
    to[DIM_V / 8 * CONSUMER_THREADS] = make_float4(x.top[0], x.top[1], x.total[0], x.total[1]);
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
    release_stage(k_empty);
    if (key == begin) release(q_empty);
    finish_scores<MASKED>(x, rows, key);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    // arrive: as above; the next step's keys, or this one's values if it was the last
    barrier_wait_after(key > begin ? smem.k_full + k.slot * 8 : smem.v_full + v.slot * 8,
                       key > begin ? k.phase : v.phase, x.total[0] + x.total[1]);
    wgmma_wait<0>();
    release_stage(v_empty);
    x.convert();
    x.rescale(shrink);
  }

  // A step with fp8 queries, whose products take half as long: the scores of `key`, behind the products with
  // the values before, which nobody has waited for; then the weights; then the products with the values are
  // asked for and left to run. The turn is kept until both products are done, so that they stand beside the
  // other warpgroup's exponentials and not beside its products.
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
    release_stage(smem.k_empty + k.slot * 8);
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
    release_stage(smem.v_empty + (v.slot == 0 ? V_STAGES - 1 : v.slot - 1) * 8);
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
    begin_clock();
    // arrive: Producer::load's expect and the bytes of its copies
    mbarrier_wait(smem.k_full + k.slot * 8, k.phase);
    end_clock(2);
    wgmma_fence();
    issue_scores(x, queries, k.slot);
    wgmma_wait<0>();
    release_stage(smem.k_empty + k.slot * 8);
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
    release_stage(smem.v_empty + v.slot * 8);
    v.advance();
  }

  // Whether no row of the warpgroup stands for a query: a short chunk fills some of a tile's warpgroups, a
  // pair's second tile may be empty.
  __device__ __forceinline__ bool is_idle(const QueryTile &tile) const {
    return (SPLIT || PAIRED) && tile.index * TILE_TOKENS + warpgroup * 64 / GROUP >= tile.query_len;
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
        release_stage(smem.k_empty + k.slot * 8);
        k.advance();
        if (left == 1) release(q_empty);
        mbarrier_wait(smem.v_full + v.slot * 8, v.phase);
        release_stage(smem.v_empty + v.slot * 8);
        v.advance();
      }
      return;
    }
    // arrive, here and below: Producer::load's expect and the bytes of its copies
    mbarrier_wait(smem.k_full + k.slot * 8, k.phase);
    release_stage(smem.k_empty + k.slot * 8);
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
      release_stage(k_empty);
      if (left == 1) release(q_empty);
      release_stage(v_empty);
    }
    mbarrier_wait(smem.v_full + v.slot * 8, v.phase);
    release_stage(smem.v_empty + v.slot * 8);
    v.advance();
  }

  __device__ __forceinline__ int run(const QueryTile *query_tiles) {
    Softmax x;
    int steps = 0;
    wait_for_kernels_ahead();
    if (warpgroup == WARPGROUPS - 1) give_turn(warpgroup);  // warpgroup 0 begins
    for (int turn = 0;; ++turn) {
      const int buffer = turn % Q_STAGES;
      begin_clock();
      // arrive: Producer::run, with the bytes of the queries where there are any
      mbarrier_wait(smem.q_full + buffer * 8, turn / Q_STAGES & 1);
      end_clock(1);
      const QueryTile tile = uniform(query_tiles[buffer]);
      if (tile.steps < 0) break;
      const u32 q_empty = smem.q_empty + buffer * 8;
      if (tile.steps > 0 && is_idle(tile)) {
        skip(tile.steps, q_empty);
        steps += tile.steps;
        continue;
      }
      if (tile.steps > 0) {
        mainloop(x, tile, smem.q + buffer * Q_TILE_BYTES, q_empty);
      } else {
        release(q_empty);
        x.clear();
      }
      begin_clock();
      if (SPLIT && tile.partial >= 0) store_partial(x, tile.partial);
      else store(x, tile);
      end_clock(3);
      steps += tile.steps;
    }
    // arrive: the last warpgroup's last turn, or its start; the barrier is left as it was found
    if (warpgroup == 0) await_turn(warpgroup);
    return steps;
  }
};

#if PAIRED
#define CLUSTERED __cluster_dims__(2, 1, 1)
#else
#define CLUSTERED
#endif
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    paged_prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[BARRIERS];
  __shared__ __align__(16) QueryTile query_tiles[Q_STAGES];
  __shared__ int kinds[FP8 ? RAW_STAGES : 1];
  const SharedLayout smem(shared, barriers);
  [[maybe_unused]] Mail mail = {};
#if PAIRED
  __shared__ __align__(8) u64 mails[5];
  mail = {shared_address(mails), shared_address(mails) + 16, shared_address(mails) + 32};
  if (threadIdx.x == 0)
    for (int i = 0; i < 4; ++i) mbarrier_init(mail.full + i * 8, 1);
#endif
  // The decode launch behind this one waits for nothing that is written here, but for its end at its own
  // (decode.cu). With it this kernel began when all ahead of it had ended: it is not launched early, but for
  // the late CTAs, which wait for decode at their end. The merge launch waits for all of this one at once.
  // All CTAs run when they let the next kernel go.
  if constexpr (DECODE_LEN > 0 || SPLIT) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#if DEBUG_CLOCKS
  const i64 begin = clock64();
#endif
  // The late launch begins before those ahead have ended. What it reads was complete when the first one
  // began, but this multiprocessor's L1 may be older.
  if (DECODE_LEN > 0 && p.is_late) load_and_forget_l1(p.starts);
  __shared__ TileScheduler opened;
  if (threadIdx.x < 32) {  // here, where it may have more registers than the producer
    TileScheduler scheduler;
    scheduler.open(p.starts, p.seq_lens, p.num_reqs, p.num_tokens, p.ctas);
    if (threadIdx.x == 0) opened = scheduler;
  }
  if (threadIdx.x == 32) {
    const u32 full[4] = {smem.k_full, smem.v_full, smem.q_full, smem.raw_full},
              empty[4] = {smem.k_empty, smem.v_empty, smem.q_empty, smem.raw_empty};
    const int count[4] = {K_STAGES, V_STAGES, Q_STAGES, RAW_STAGES};
    for (int kind = 0; kind < 4; ++kind)
      for (int i = 0; i < count[kind]; ++i) {
        mbarrier_init(full[kind] + i * 8,
                      FP8 && (kind == 1 || (kind == 0 && !Q_FP8)) ? CONVERTERS * ARRIVING : 1);
        mbarrier_init(empty[kind] + i * 8,
                      (kind == 3 ? CONVERTERS : CONSUMER_WARPS * (kind < 2 ? SHARERS : 1)) * ARRIVING);
      }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine sees them
    prefetch_tensormap(&p.q);
    prefetch_tensormap(&p.k);
    prefetch_tensormap(&p.v);
  }
  __syncthreads();
#if PAIRED
  // Nobody tells the other CTA's barriers, or copies into its memory, before they are made.
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_arrive();
  cluster_wait();
#endif
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    // known to be the same in all lanes: otherwise the producer spills
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      Producer producer{p, smem, kinds, {}, {}, {}, (int)threadIdx.x};
      producer.run(opened, query_tiles, mail);
    } else if constexpr (FP8) {
      wait_for_kernels_ahead();
      Converter{smem, {}, {}, {}, (int)threadIdx.x - 32}.run(kinds);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer consumer{p,
              smem,
              {},
              {},
              uniform(threadIdx.x / 128) - 1,
              uniform(threadIdx.x / 32 % 4),
              (int)threadIdx.x % 32};
    [[maybe_unused]] const int steps = consumer.run(query_tiles);
#if DEBUG_CLOCKS
    if (threadIdx.x == 128) {
      consumer.spent[0] = clock64() - begin;
      for (int i = 0; i < 4; ++i) p.clocks[blockIdx.x * 5 + i] = consumer.spent[i];
      p.clocks[blockIdx.x * 5 + 4] = steps;
    }
#endif
  }
#if PAIRED
  // A CTA stays until the other one sends and tells it nothing more.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
#endif
}
