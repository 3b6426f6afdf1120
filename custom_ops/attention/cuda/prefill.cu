// Prefill attention over a paged cache on Hopper: one warp has the copy engine fetch blocks, two or three
// warpgroups multiply and exponentiate.
//
// A tile is 64 packed query rows per warpgroup (query tokens x heads of the group) of one kv head; CTAs stay,
// and take the next tile of a line that each of them finds by itself (prefill_tiles.cuh). Keys and values
// come through a ring of stages each, filled in the order K K V K V ... V, each block of the cache in one
// box; the loader runs on over the borders of tiles.
//
// A warpgroup asks for the scores of the next step before the softmax of this one is applied to the values,
// so that its exponentials run beside its own products; the warpgroups issue products in turns, so that one's
// exponentials run beside the others'. The accumulator is rescaled only if a row maximum of the warp rose,
// which is exact.
//
// Why nothing here waits for ever. (1) Stages are filled and used in one order by all warpgroups; the loader
// waits for a stage only until each math warp has released what was in it before. The warpgroup that is
// furthest behind holds at most one stage of each ring, and never the one that what it waits for is to go
// into: in every ring of two stages or more that stage has been released by it, and by those ahead of it. (2)
// A warpgroup that waits for its turn holds no stage. Those before it in the round have all that they need or
// get it by (1), issue their products and pass the turn on. (3) All warpgroups take the same turns: steps - 1
// of every tile. (4) A tile of queries is waited for in the order in which the loader sends them, and
// released by its last scores, for which (1) holds. Every wait names its arrival beside it. With fp8 queries
// (short_step) turns are one for every step; whoever has the turn waits for its own products alone; and who
// waits for it, or for keys, may hold the values of the step before. Those keys are loaded in front of the
// values that would go into that stage, so that (1) holds with two stages of values or more.
//
// Compiled by NVRTC for sm_90a; its constants: prefill_config.cuh. Sources: FlashAttention-3
// (arXiv:2407.08608, 3.1 and 3.2).

#include "prefill_convert.cuh"
#include "prefill_products.cuh"
#include "prefill_shapes.cuh"
#include "prefill_store.cuh"

// Turns: barrier 1 is warpgroup 0's, 2 is warpgroup 1's ...; 256 threads: who waits and who gives the turn.
// Behind them: the warps of one warpgroup.
__device__ __forceinline__ void await_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % GROUPS) : "memory");
}
__device__ __forceinline__ void meet(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(1 + GROUPS + group) : "memory");
}

// The loader's waits. With PATIENCE it gives up after so many tries and ends the kernel with an error: for
// tests. Whoever waits for ever, the loader soon waits too; in the math warps the way out would cost
// registers.
__device__ __forceinline__ void wait_or_give_up(u32 at, int parity) {
  if constexpr (PATIENCE > 0)
    asm volatile(
        "{.reg .pred done, out; .reg .u32 left; mov.u32 left, %2; again%=: "
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra there%=;"
        " sub.u32 left, left, 1; setp.eq.u32 out, left, 0; @!out bra again%=; trap; there%=:}" ::"r"(at),
        "r"(parity), "n"(PATIENCE)
        : "memory");
  else
    mbarrier_wait(at, parity);
}

// A wait that begins only when `x`, which is not negative, is there. Without it the compiler puts the
// exponentials behind the wait for the products that they should run beside: nothing else holds them in front
// of it.
__device__ __forceinline__ void barrier_wait_after(u32 at, int parity, float x) {
  mbarrier_wait(at, parity ^ (BESIDE && x < -1.f));
}

// Without a decode launch behind it this kernel may begin while the ones ahead still run. Lengths, query
// starts and block tables are read before this, as machine.cuh says; all else is read and written behind it.
// Whatever warp stays passes it once, with work or without, so that no CTA ends before the kernels ahead. The
// kernel behind may begin then; a merge launch, which waits for this kernel's end, already at its start.
__device__ __forceinline__ void wait_for_kernels_ahead() {
  if constexpr (SHORT == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  if constexpr (SHORT == 0 && !SPLIT) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Products in a branch that might part a warp are put one behind the other.
__device__ __forceinline__ Job uniform(const Job &x) {
  return {uniform(x.steps),     uniform(x.last),    uniform(x.tile), uniform(x.start),
          uniform(x.query_len), uniform(x.seq_len), uniform(x.head), uniform(x.unit)};
}

// The loader: one warp.
struct Loader {
  const Params &p;
  const Plan &plan;
  int *kinds;  // fp8: of each raw stage, what is in it
  Place<K_STAGES> k;
  Place<V_STAGES> v;
  Place<RAW_STAGES> raw;
  int lane;

  // PAIRED: the first block of a step that this CTA brings both.
  static constexpr int MY_PAGES = PAGES / SHARERS;
  __device__ __forceinline__ int first_page() const { return PAIRED ? blockIdx.x % 2 * MY_PAGES : 0; }

  // The lane's block of a step. Blocks past the request's last key, and those before the first that the tile
  // sees, are no block at all: the copy engine fills them with zeros.
  __device__ __forceinline__ int block_of(const Tile &tile, int first_seen, int step) const {
    const int index = step * PAGES + first_page() + lane;
    const bool seen = lane < MY_PAGES && index * BLOCK_SIZE < tile.span.seq_len &&
                      (!LOW || (index + 1) * BLOCK_SIZE > first_seen);
    return seen ? p.table[tile.request * p.table_row + index] : p.num_blocks;
  }

  // `ring`: the place in it; `kind`: what the stage is said to hold, of those that are converted.
  template <bool RAW, int COUNT, int STAGE, class Ring>
  __device__ __forceinline__ void load(Ring &ring, u32 stages, u32 full, u32 empty, const Map *map,
                                       const Where &at, int head, int block, [[maybe_unused]] int kind) {
    const u32 to = stages + ring.slot * STAGE, filled = full + ring.slot * 8;
    // arrive: give_back() of every math warp, of both CTAs if PAIRED, or Converter::convert of every
    // converter, a round ago
    wait_or_give_up(empty + ring.slot * 8, ring.round ^ 1);
    if (lane == 0) {
      if constexpr (RAW) kinds[ring.slot] = kind;
      mbarrier_arrive_expect_tx(filled, COUNT);
    }
    __syncwarp();  // expected before anything can arrive
    if constexpr (PAIRED) {
      // The other CTA's stage is empty too: its math warps are among those waited for. Its barrier may be
      // told before it expects anything; its phase does not end before that.
      if (lane < MY_PAGES)
        tma_load_4d_shared(to + (first_page() + lane) * (COUNT / PAGES), map, 0, 0, head * at.head_square,
                           head * at.head_group + block * at.block_group, filled, 3);
    } else if (lane < PAGES) {
      tma_load_4d(to + lane * (COUNT / PAGES), map, 0, 0, head * at.head_square,
                  head * at.head_group + block * at.block_group, filled);
    }
    ring.advance();
  }
  __device__ __forceinline__ void load_keys(int head, int block) {
    if constexpr (FP8 && !Q_FP8)
      load<true, KEYS * DIM, RAW_STAGE>(raw, plan.raw, plan.raw_full, plan.raw_empty, &p.k, p.k_at, head,
                                        block, KEYS_COME);
    else
      load<false, K_STAGE, K_STAGE>(k, plan.k, plan.k_full, plan.k_empty, &p.k, p.k_at, head, block,
                                    KEYS_COME);
  }
  __device__ __forceinline__ void load_values(int head, int block) {
    if constexpr (FP8)
      load<true, KEYS * DIM_V, RAW_STAGE>(raw, plan.raw, plan.raw_full, plan.raw_empty, &p.v, p.v_at, head,
                                          block, VALUES_COME);
    else
      load<false, V_STAGE, V_STAGE>(v, plan.v, plan.v_full, plan.v_empty, &p.v, p.v_at, head, block,
                                    VALUES_COME);
  }
  __device__ __forceinline__ void end_conversion() {
    // arrive: Converter::convert of every converter, a round ago
    wait_or_give_up(plan.raw_empty + raw.slot * 8, raw.round ^ 1);
    if (lane == 0) {
      kinds[raw.slot] = NOTHING_COMES;
      mbarrier_arrive(plan.raw_full + raw.slot * 8);
    }
  }

  // Which steps a ticket's tile goes through: [first, last]; whether it is all of the tile.
  struct Steps {
    int first, last, first_seen;
    bool whole;
    __device__ __forceinline__ int count() const { return last < 0 ? 0 : max(last - first + 1, 0); }
  };
  __device__ __forceinline__ Steps steps_of(const Line &line, const Tile &tile, int ticket,
                                            [[maybe_unused]] const Share &share) const {
    Steps s;
    s.first_seen = LOW ? tile.span.first_seen(tile.index) : 0;
    s.first = s.first_seen / KEYS, s.last = tile.span.level(tile.index) - 1;
    s.whole = true;
    if constexpr (CASCADE) {
      const int all = s.last + 1;
      s.first = all * share.from / share.of, s.last = all * share.to / share.of - 1;
      s.whole = false;
    } else if constexpr (SPLIT) {
      s.whole = line.parts == 1 || ticket >= line.live_total();
      if (!s.whole) {
        const int all = max(s.last + 1 - s.first, 0);
        s.last = s.first + all * (tile.part + 1) / line.parts - 1;
        s.first += all * tile.part / line.parts;
      }
    }
    return s;
  }

  // CASCADE: a tile of queries, which stand anywhere in the batch; rows behind the request are zeros.
  __device__ __forceinline__ void gather_queries(const Tile &tile, int index, u32 to, u32 filled) const {
#pragma unroll 1
    for (int begin = 0; begin < TOKENS; begin += 32) {
      const int token = index * TOKENS + begin + lane;
      int row = p.num_tokens;
      // token rows are less than 2^31: the low word
      if (token < tile.span.query_len) row = load_l2((const int *)(p.order + tile.span.start + token));
      const u32 at = to + (begin + lane) * GROUP * K_WIDTH * 2;
      if (begin + lane < TOKENS) {
#pragma unroll 1
        for (int s = 0; s < K_SQUARES; ++s)
          tma_load_3d(at + s * (Q_TILE / K_SQUARES), &p.q, s * K_WIDTH, tile.head * GROUP, row, filled);
      }
      __syncwarp();
    }
  }

  // CASCADE: the CTA's next share, and its tile; `total` if there is none.
  __device__ __forceinline__ int take(const Shares &shares, int turn, int total, Share &share) const {
    share = total > 0 ? shares.share(blockIdx.x / SHARERS, turn) : Share{-1, 0, 0, 1};
    return share.tile < 0 ? total : share.tile;
  }

  // PAIRED: the first CTA of a cluster draws tickets for both and tells the other one, through one of two
  // places in its memory. `turn`: messages before.
  __device__ __forceinline__ int tell(const Mail &mail, int ticket, int turn) {
    const int slot = turn % 2, round = turn / 2 & 1;
    if (blockIdx.x % 2 == 0) {
      if (lane == 0) {
        wait_or_give_up(mail.empty + slot * 8, round ^ 1);  // arrive: below, two messages ago
        st_async(mapa(mail.place + slot * 4, 1), ticket, mapa(mail.full + slot * 8, 1));
      }
      __syncwarp();
      return ticket;
    }
    if (lane == 0) mbarrier_arrive_expect_tx(mail.full + slot * 8, 4);
    wait_or_give_up(mail.full + slot * 8, round);  // arrive: the line above, and the 4 bytes from above it
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(ticket) : "r"(mail.place + slot * 4) : "memory");
    __syncwarp();
    if (lane == 0) mbarrier_arrive_cluster(mapa(mail.empty + slot * 8, 0));
    return ticket;
  }

  // Kernels behind wait for the late launch alone: it must not end before the decode launch, which does not
  // before the first launch of tiles.
  __device__ __forceinline__ void finish_behind_decode() {
    if (SHORT > 0 && p.is_late && blockIdx.x == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  }

  __device__ __forceinline__ void run(Line line, Job *jobs, [[maybe_unused]] const Mail &mail) {
    [[maybe_unused]] Shares shares;
    [[maybe_unused]] Share share = {};
    if constexpr (CASCADE) shares.plan(line.live_total(), p.ctas / SHARERS, line.shortest, line.top);
    const int total = CASCADE ? line.live_total() : line.total();
    // Beside a decode launch: a counter of a request that has tiles here, which that launch does not touch.
    const Tickets tickets = {(u32 *)p.tickets + (SHORT > 0 ? line.owner * p.ticket_row : 0), total,
                             (p.ctas - p.late) / SHARERS, p.late};
    int ticket = 0;
    if constexpr (CASCADE) {
      ticket = take(shares, 0, total, share);
    } else {
      if (lane == 0) ticket = tickets.begin(blockIdx.x / SHARERS, SHORT > 0 && p.is_late);
      ticket = __shfl_sync(ALL, ticket, 0);
    }
    Tile tile = {};
    int block = 0, block_before = 0;  // of a tile's last step and of the one before, asked for ahead
    if (ticket < total) {
      tile = line.find(ticket);
      const Steps steps = steps_of(line, tile, ticket, share);
      if (steps.count() > 0) block = block_of(tile, steps.first_seen, steps.last);
      if (steps.count() > 1) block_before = block_of(tile, steps.first_seen, steps.last - 1);
    }
    wait_for_kernels_ahead();
    [[maybe_unused]] Cut *cut = nullptr;
    if constexpr (SPLIT) {
      cut = cut_of(p);
      if (blockIdx.x == 0 && lane == 0 && !p.is_late) {
        cut->tiles = line.live * NUM_KV_HEADS * SHARERS;
        cut->parts = line.parts;
        if constexpr (CASCADE) cut->shares = shares;
      }
    }
    for (int turn = 0;; ++turn) {
      const int buffer = turn % Q_BUFFERS, parity = turn / Q_BUFFERS & 1;
      const u32 q_full = plan.q_full + buffer * 8;
      // arrive: release() of every math warp, Q_BUFFERS tiles ago
      wait_or_give_up(plan.q_empty + buffer * 8, parity ^ 1);
      if (ticket >= total) {
        if (lane == 0) {
          jobs[buffer].steps = -1;
          mbarrier_arrive(q_full);
        }
        if constexpr (FP8) end_conversion();
        finish_behind_decode();
        return;
      }
      int next = 0;  // comes while this tile is loaded
      if constexpr (!CASCADE)
        if (lane == 0 && (!PAIRED || blockIdx.x % 2 == 0)) next = tickets.draw();
      const Steps reach = steps_of(line, tile, ticket, share);
      const int steps = reach.count(), first = reach.first, last = reach.last, first_seen = reach.first_seen;
      const bool whole = reach.whole;
      if (lane == 0) {
        const Job job = {steps,
                         last,
                         PAIRED ? tile.index * 2 + (int)(blockIdx.x % 2) : tile.index,
                         tile.span.start,
                         tile.span.query_len,
                         tile.span.seq_len,
                         tile.head,
                         CASCADE ? turn * p.ctas + (int)blockIdx.x : whole ? -1 : ticket};
        jobs[buffer] = job;
        if constexpr (CASCADE) {
          if (share.to == share.of) cut->jobs[ticket * SHARERS + blockIdx.x % SHARERS] = job;
        } else if constexpr (SPLIT) {
          if (!whole && tile.part == 0) cut->jobs[ticket / line.parts] = job;
        }
        if (steps > 0) {
          mbarrier_arrive_expect_tx(q_full, Q_BYTES);  // the job is written before: a wait for q_full sees it
#pragma unroll 1
          for (int s = 0; !CASCADE && s < K_SQUARES; ++s)
            tma_load_3d(plan.q + buffer * Q_TILE + s * (Q_TILE / K_SQUARES), &p.q, s * K_WIDTH,
                        tile.head * GROUP, tile.span.start + job.tile * TOKENS, q_full);
        } else {
          mbarrier_arrive(q_full);
        }
      }
      __syncwarp();
      if constexpr (CASCADE)
        if (steps > 0)
          gather_queries(tile, tile.index * SHARERS + blockIdx.x % SHARERS, plan.q + buffer * Q_TILE,
                         q_full);
      int block_ahead = 0;
      if (steps > 0) {
        load_keys(tile.head, block);
        if (steps > 1) load_keys(tile.head, block_before);
        if (steps > 2) block_ahead = block_of(tile, first_seen, last - 2);
        load_values(tile.head, block);
      }
      // The next tile is sought while the stages are full, so that nothing waits for it at the border.
      if constexpr (CASCADE) ticket = take(shares, turn + 1, total, share);
      else ticket = __shfl_sync(ALL, next, 0);
      if constexpr (PAIRED && !CASCADE) ticket = tell(mail, ticket, turn);
      Tile coming = {};
      int coming_block = 0, coming_before = 0;
      if (ticket < total) {
        coming = line.find(ticket);
        const Steps steps = steps_of(line, coming, ticket, share);
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
  float s[KEYS / 2];        // scores, then weights
  u32 weights[KEYS * BYTES / 8];  // as the second product reads them
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
    for (int i = 0; i < KEYS / 2; ++i) {
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
    for (int i = 0; i < KEYS / 2; ++i) {
      const int r = i / 2 % 2, key = i / 4 * 8 + i % 2;
      if constexpr (TREE) {
        if (!seen[r].sees(key) || (LOW && seen[r].position(key) < low[r])) s[i] = -INF;
      } else if (key >= end[r] - first || (LOW && key < low[r] - first)) s[i] = -INF;
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
    for (int i = 16; i < KEYS / 2; i += 4) {
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
    for (int i = 0; i < KEYS / 2; ++i) s[i] = exp2_(fmaf(s[i], scale, -top[i / 2 % 2]));
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < KEYS / 2; ++i) sum[i / 2 % 2][i % 2] += s[i];
#pragma unroll
    for (int r = 0; r < 2; ++r) total[r] = fmaf(total[r], shrink[r], sum[r][0] + sum[r][1]);
  }

  __device__ __forceinline__ void convert() {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += Q_FP8 ? 8 : 2) {
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

struct Math {
  const Params &p;
  const Plan &plan;
  Place<K_STAGES> k;
  Place<V_STAGES> v;
  int group, warp, lane;  // warpgroup, warp of it, lane of that
#if CLOCKS
  i64 spent[4] = {}, since = 0;  // cycles: in all, waiting for tiles, waiting for their first keys, storing
#endif
  __device__ __forceinline__ void begin_clock() {
#if CLOCKS
    since = clock64();
#endif
  }
  __device__ __forceinline__ void end_clock([[maybe_unused]] int kind) {
#if CLOCKS
    spent[kind] += clock64() - since;
#endif
  }

  // What this warp's products and loads have read: they are waited for, their values are there.
  __device__ __forceinline__ void release(u32 barrier) {
    if (EVERY_LANE || lane == 0) mbarrier_arrive(barrier);
  }
  // A stage. PAIRED: the other CTA fills half of it, too.
  __device__ __forceinline__ void give_back(u32 barrier) {
    if constexpr (PAIRED) {
      if (lane < 2) mbarrier_arrive_cluster(mapa(barrier, (blockIdx.x ^ lane) % 2));
    } else {
      release(barrier);
    }
  }

  __device__ __forceinline__ void ask_scores(Softmax &x, u32 queries, int slot) {
    const u64 a = matrix<K_LINE>(queries + group * 64 * K_LINE, 16, K_SQUARE);
    const u64 b = matrix<K_LINE>(plan.k + slot * K_STAGE, 16, K_SQUARES * K_SQUARE);
    constexpr int IN_SQUARE = K_LINE / 32;
    scores<0>(x.s, a, b);
#pragma unroll
    for (int i = 1; i < DIM * BYTES / 32; ++i) {
      const u64 ai = a + (i / IN_SQUARE * (Q_TILE / K_SQUARES) + i % IN_SQUARE * 32) / 16,
                bi = b + (i / IN_SQUARE * K_SQUARE + i % IN_SQUARE * 32) / 16;
      scores<1>(x.s, ai, bi);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void ask_values(Softmax &x, int slot) {
    if constexpr (Q_FP8) {
      constexpr int IN_LINE = TURNED_LINE / 32;
      const u64 b = matrix<TURNED_LINE>(plan.v + slot * V_STAGE, 16, 8 * TURNED_LINE);
#pragma unroll
      for (int i = 0; i < KEYS / 32; ++i)
        values32(x.acc, x.weights + i * 4,
                 b + (i / IN_LINE * DIM_V * TURNED_LINE + i % IN_LINE * 32) / 16);
    } else {
      const u64 b = matrix<V_LINE>(plan.v + slot * V_STAGE, V_SQUARE, V_SQUARES * V_SQUARE);
#pragma unroll
      for (int i = 0; i < KEYS / 16; ++i)
        values16(x.acc, x.weights + i * 4, b + i * 2 * V_SQUARES * V_SQUARE / 16);
    }
    wgmma_commit();
  }

  // A value that nobody sees may be NaN, and 0 * NaN is NaN: zeros for `count` slots from `first` on. All
  // warpgroups write them, each before its own products.
  __device__ __forceinline__ void clear_values(int slot, int first, int count) {
    const u32 values = plan.v + slot * V_STAGE;
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
    meet(group);
  }

  __device__ __forceinline__ void store(const Softmax &x, const Job &job) {
    store_rows<DIM_V / 8>(p, job, group * 64 + warp * 16 + lane / 4, lane, x.top, x.total, x.acc, 0);
  }

  // What prefill_merge.cu puts together: nothing is weighed or summed over threads yet.
  __device__ __forceinline__ void store_part(const Softmax &x, int unit) {
    float4 *to = part_of(p, unit) + threadIdx.x - 128;
#pragma unroll
    for (int n = 0; n < DIM_V / 8; ++n)
      to[n * MATH_THREADS] = make_float4(x.acc[n * 4], x.acc[n * 4 + 1], x.acc[n * 4 + 2], x.acc[n * 4 + 3]);
    to[DIM_V / 8 * MATH_THREADS] = make_float4(x.top[0], x.top[1], x.total[0], x.total[1]);
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
    const u32 values = v.slot, v_full = plan.v_full + values * 8, v_empty = plan.v_empty + values * 8,
              k_empty = plan.k_empty + k.slot * 8;
    const int round = v.round;
    key -= KEYS;
    await_turn(group);  // arrive: give_turn of the warpgroup before this one, or at the start of the kernel
    wgmma_fence();
    ask_scores(x, queries, k.slot);
    k.advance();
    v.advance();
    mbarrier_wait(v_full, round);  // arrive: Loader::load's expect and the bytes of its copies
    wgmma_fence();                // the compiler asks for one behind every loop
    ask_values(x, values);
    give_turn(group);
    wgmma_wait<1>();  // the scores are here
    give_back(k_empty);
    if (key == begin) release(q_empty);
    finish_scores<MASKED>(x, rows, key);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    // arrive: as above; the next step's keys, or this one's values if it was the last
    barrier_wait_after(key > begin ? plan.k_full + k.slot * 8 : plan.v_full + v.slot * 8,
                       key > begin ? k.round : v.round, x.total[0] + x.total[1]);
    wgmma_wait<0>();
    give_back(v_empty);
    x.convert();
    x.rescale(shrink);
  }

  // A step with fp8 queries, whose products take half as long: the scores of `key`, behind the products with
  // the values before, which nobody has waited for; then the weights; then the products with the values are
  // asked for and left to run. The turn is kept until both products are done, so that they stand beside the
  // other warpgroup's exponentials and not beside its products.
  template <bool MASKED>
  __device__ __forceinline__ void short_step(Softmax &x, const Rows &rows, int key, int begin, float scale,
                                             u32 queries, u32 q_empty, const Job &job) {
    float shrink[2];
    const bool is_first = key == job.last * KEYS;
    mbarrier_wait(plan.k_full + k.slot * 8, k.round);  // arrive: Loader::load's expect and its copies' bytes
    await_turn(group);  // arrive: give_turn of the warpgroup before this one, or at the start of the kernel
    wgmma_fence();
    ask_scores(x, queries, k.slot);
    wgmma_wait<0>();
    give_turn(group);
    give_back(plan.k_empty + k.slot * 8);
    if (!is_first) give_back_values();
    k.advance();
    if (key == begin) release(q_empty);
    finish_scores<MASKED>(x, rows, key);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    x.convert();
    x.rescale(shrink);
    mbarrier_wait(plan.v_full + v.slot * 8, v.round);  // arrive: Converter::convert of every converter
    if (MASKED && is_first && key + KEYS > job.seq_len && job.seq_len % BLOCK_SIZE)
      clear_values(v.slot, job.seq_len - key, BLOCK_SIZE - job.seq_len % BLOCK_SIZE);
    if (LOW && key == begin) clear_unseen_values(job, begin);
    wgmma_fence();
    ask_values(x, v.slot);
    v.advance();
  }
  // The stage whose products were asked for last.
  __device__ __forceinline__ void give_back_values() {
    give_back(plan.v_empty + (v.slot == 0 ? V_STAGES - 1 : v.slot - 1) * 8);
  }
  // The tile's first block holds keys that none of its rows sees; blocks before it came as zeros.
  __device__ __forceinline__ void clear_unseen_values(const Job &job, int begin) {
    const int before = job.seq_len - job.query_len;
    const int skipped = first_key(max(before + (TREE ? 0 : job.tile * TOKENS), 0)) - begin;
    if (skipped > 0 && skipped % BLOCK_SIZE)
      clear_values(v.slot, skipped / BLOCK_SIZE * BLOCK_SIZE, skipped % BLOCK_SIZE);
  }

  // One tile; `queries`: where they lie, `q_empty`: the barrier that gives them back.
  __device__ __forceinline__ void attend(Softmax &x, const Job &job, u32 queries, u32 q_empty) {
    Rows rows;
    rows.scale = p.scale;
    if constexpr (SCALES) rows.scale *= p.k_scale[job.head * p.ks_head];
    const float scale = ADJUST ? 1.f : rows.scale * LOG2E;
    const int before = job.seq_len - job.query_len;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = group * 64 + warp * 16 + r * 8 + lane / 4;
      const int position = before + job.tile * TOKENS + row / GROUP;
      rows.position[r] = position;
      rows.low[r] = first_key(position);
      rows.end[r] = end_key(position, job.seq_len);
      if constexpr (TREE) {
        const int token = job.tile * TOKENS + row / GROUP;
        const u64 own = 1ull << min(token, 63);
        const u64 word = token < job.query_len ? (u64)p.tree[job.start + token] & (own - 1) : 0;
        rows.branch[r] = {word | own, before};
        rows.position[r] = before + __popcll(word);
        rows.low[r] = first_key(rows.position[r]);
      }
      if constexpr (ALIBI) rows.slope[r] = p.slopes[job.head * GROUP + row % GROUP];
    }
    // Keys that all rows of the warpgroup see: of rows behind the request as well, which mask more than is
    // needed.
    const int all_low = first_key(before + job.tile * TOKENS + (group * 64 + 63) / GROUP);
    const int all_end =
        TREE ? max(before, 0) : end_key(before + job.tile * TOKENS + group * 64 / GROUP, job.seq_len);
    x.clear();
    float shrink[2];
    int key = job.last * KEYS;
    const int begin = key - (job.steps - 1) * KEYS;
    if constexpr (Q_FP8) {
#pragma unroll 1
      for (; key >= begin; key -= KEYS) {
        if (key + KEYS > all_end || (LOW && key < all_low))
          short_step<true>(x, rows, key, begin, scale, queries, q_empty, job);
        else
          short_step<false>(x, rows, key, begin, scale, queries, q_empty, job);
      }
      wgmma_wait<0>();
      give_back_values();
      return;
    }
    begin_clock();
    // arrive: Loader::load's expect and the bytes of its copies
    mbarrier_wait(plan.k_full + k.slot * 8, k.round);
    end_clock(2);
    wgmma_fence();
    ask_scores(x, queries, k.slot);
    wgmma_wait<0>();
    give_back(plan.k_empty + k.slot * 8);
    k.advance();
    if (job.steps == 1) release(q_empty);
    if (key + KEYS > all_end || (LOW && key < all_low)) finish_scores<true>(x, rows, key);
    else finish_scores<false>(x, rows, key);
    x.raise(scale, shrink);
    x.exponentiate(scale, shrink);
    x.convert();
    if (key + KEYS > job.seq_len && job.seq_len % BLOCK_SIZE) {
      mbarrier_wait(plan.v_full + v.slot * 8, v.round);  // arrive: as above
      clear_values(v.slot, job.seq_len - key, BLOCK_SIZE - job.seq_len % BLOCK_SIZE);
    }
    // arrive: as above; the next step's keys, or this one's values if it was the last
    mbarrier_wait(job.steps > 1 ? plan.k_full + k.slot * 8 : plan.v_full + v.slot * 8,
                  job.steps > 1 ? k.round : v.round);
#pragma unroll 1
    while (key > max(all_end, begin)) step<true>(x, rows, key, begin, scale, queries, q_empty);
#pragma unroll 1
    while (key > (LOW ? max(begin, all_low + KEYS - 1) : begin))
      step<false>(x, rows, key, begin, scale, queries, q_empty);
#pragma unroll 1
    while (LOW && key > begin) step<true>(x, rows, key, begin, scale, queries, q_empty);
    if (LOW) clear_unseen_values(job, begin);
    wgmma_fence();
    ask_values(x, v.slot);
    wgmma_wait<0>();
    give_back(plan.v_empty + v.slot * 8);
    v.advance();
  }

  // Whether no row of the warpgroup stands for a query: a short chunk fills some of a tile's warpgroups, a
  // pair's second tile may be empty.
  __device__ __forceinline__ bool is_idle(const Job &job) const {
    return (SPLIT || PAIRED) && job.tile * TOKENS + group * 64 / GROUP >= job.query_len;
  }

  // A tile without rows for this warpgroup: the waits, turns and releases of `attend` in its order, without
  // its products. So what holds for `attend` holds here.
  __device__ __forceinline__ void pass(int steps, u32 q_empty) {
    if constexpr (Q_FP8) {  // of `short_step`
#pragma unroll 1
      for (int left = steps; left > 0; --left) {
        mbarrier_wait(plan.k_full + k.slot * 8, k.round);
        await_turn(group);  // arrive: as there
        give_turn(group);
        give_back(plan.k_empty + k.slot * 8);
        k.advance();
        if (left == 1) release(q_empty);
        mbarrier_wait(plan.v_full + v.slot * 8, v.round);
        give_back(plan.v_empty + v.slot * 8);
        v.advance();
      }
      return;
    }
    // arrive, here and below: Loader::load's expect and the bytes of its copies
    mbarrier_wait(plan.k_full + k.slot * 8, k.round);
    give_back(plan.k_empty + k.slot * 8);
    k.advance();
    if (steps == 1) release(q_empty);
#pragma unroll 1
    for (int left = steps - 1; left > 0; --left) {
      const u32 k_empty = plan.k_empty + k.slot * 8, v_empty = plan.v_empty + v.slot * 8;
      mbarrier_wait(plan.k_full + k.slot * 8, k.round);
      await_turn(group);  // arrive: as in step
      mbarrier_wait(plan.v_full + v.slot * 8, v.round);
      give_turn(group);
      k.advance();
      v.advance();
      give_back(k_empty);
      if (left == 1) release(q_empty);
      give_back(v_empty);
    }
    mbarrier_wait(plan.v_full + v.slot * 8, v.round);
    give_back(plan.v_empty + v.slot * 8);
    v.advance();
  }

  __device__ __forceinline__ int run(const Job *jobs) {
    Softmax x;
    int steps = 0;
    wait_for_kernels_ahead();
    if (group == GROUPS - 1) give_turn(group);  // warpgroup 0 begins
    for (int turn = 0;; ++turn) {
      const int buffer = turn % Q_BUFFERS;
      begin_clock();
      // arrive: Loader::run, with the bytes of the queries where there are any
      mbarrier_wait(plan.q_full + buffer * 8, turn / Q_BUFFERS & 1);
      end_clock(1);
      const Job job = uniform(jobs[buffer]);
      if (job.steps < 0) break;
      const u32 q_empty = plan.q_empty + buffer * 8;
      if (job.steps > 0 && is_idle(job)) {
        pass(job.steps, q_empty);
        steps += job.steps;
        continue;
      }
      if (job.steps > 0) {
        attend(x, job, plan.q + buffer * Q_TILE, q_empty);
      } else {
        release(q_empty);
        x.clear();
      }
      begin_clock();
      if (SPLIT && job.unit >= 0) store_part(x, job.unit);
      else store(x, job);
      end_clock(3);
      steps += job.steps;
    }
    // arrive: the last warpgroup's last turn, or its start; the barrier is left as it was found
    if (group == 0) await_turn(group);
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
  __shared__ __align__(16) Job jobs[Q_BUFFERS];
  __shared__ int kinds[FP8 ? RAW_STAGES : 1];
  const Plan plan(shared, barriers);
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
  if constexpr (SHORT > 0 || SPLIT) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#if CLOCKS
  const i64 begin = clock64();
#endif
  // The late launch begins before those ahead have ended. What it reads was complete when the first one
  // began, but this multiprocessor's L1 may be older.
  if (SHORT > 0 && p.is_late) load_and_forget_l1(p.starts);
  __shared__ Line opened;
  if (threadIdx.x < 32) {  // here, where it may have more registers than the loader
    Line line;
    line.open(p.starts, p.seq_lens, p.num_reqs, p.num_tokens, p.ctas);
    if (threadIdx.x == 0) opened = line;
  }
  if (threadIdx.x == 32) {
    const u32 full[4] = {plan.k_full, plan.v_full, plan.q_full, plan.raw_full},
              empty[4] = {plan.k_empty, plan.v_empty, plan.q_empty, plan.raw_empty};
    const int count[4] = {K_STAGES, V_STAGES, Q_BUFFERS, RAW_STAGES};
    for (int kind = 0; kind < 4; ++kind)
      for (int i = 0; i < count[kind]; ++i) {
        mbarrier_init(full[kind] + i * 8,
                      FP8 && (kind == 1 || (kind == 0 && !Q_FP8)) ? CONVERTERS * ARRIVING : 1);
        mbarrier_init(empty[kind] + i * 8,
                      (kind == 3 ? CONVERTERS : MATH_WARPS * (kind < 2 ? SHARERS : 1)) * ARRIVING);
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
    // known to be the same in all lanes: otherwise the loader spills
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      Loader loader{p, plan, kinds, {}, {}, {}, (int)threadIdx.x};
      loader.run(opened, jobs, mail);
    } else if constexpr (FP8) {
      wait_for_kernels_ahead();
      Converter{plan, {}, {}, {}, (int)threadIdx.x - 32}.run(kinds);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MATH_REGISTERS));
    Math math{p,
              plan,
              {},
              {},
              uniform(threadIdx.x / 128) - 1,
              uniform(threadIdx.x / 32 % 4),
              (int)threadIdx.x % 32};
    [[maybe_unused]] const int steps = math.run(jobs);
#if CLOCKS
    if (threadIdx.x == 128) {
      math.spent[0] = clock64() - begin;
      for (int i = 0; i < 4; ++i) p.clocks[blockIdx.x * 5 + i] = math.spent[i];
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
