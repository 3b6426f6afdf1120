// The producer: one warp, which has the copy engine bring tiles of queries, keys and values.
#pragma once

#include "../cascade/cascade_load.cuh"
#include "prefill_convert.cuh"
#include "prefill_launch_order.cuh"

struct Producer {
  const Params &p;
  const SharedLayout &smem;
  int *kinds;  // fp8: of each raw stage, what is in it
  PipelineState<K_STAGES> k;
  PipelineState<V_STAGES> v;
  PipelineState<RAW_STAGES> raw;
  int lane;

  // The lane's block of a step. Blocks past the request's last key, and those before the first that the tile
  // sees, are no block at all: the copy engine fills them with zeros.
  __device__ __forceinline__ int block_of(const WorkTile &tile, int first_seen, int step) const {
    const int index = step * TILE_BLOCKS + lane;
    const bool seen = lane < TILE_BLOCKS && index * BLOCK_SIZE < tile.r.seq_len &&
                      (!HIDES_FIRST_KEYS || (index + 1) * BLOCK_SIZE > first_seen);
    return seen ? p.table[tile.request * p.table_row + index] : p.num_blocks;
  }

  // `ring`: the place in it; `kind`: what the stage is said to hold, of those that are converted.
  template <bool RAW, int COUNT, int STAGE, class Ring>
  __device__ __forceinline__ void load(Ring &ring, u32 stages, u32 full, u32 empty, const Map *map,
                                       const Where &at, int head, int block, [[maybe_unused]] int kind) {
    const u32 to = stages + ring.slot * STAGE, filled = full + ring.slot * 8;
    // arrive: Consumer::release of every consumer warp, or Converter::convert of every converter, a round
    // ago
    mbarrier_wait(empty + ring.slot * 8, ring.phase ^ 1);
    if (lane == 0) {
      if constexpr (RAW) kinds[ring.slot] = kind;
      mbarrier_arrive_expect_tx(filled, COUNT);
    }
    __syncwarp();  // expected before anything can arrive
    if (lane < TILE_BLOCKS)
      tma_load_4d(to + lane * (COUNT / TILE_BLOCKS), map, 0, 0, head * at.head_square,
                  head * at.head_group + block * at.block_group, filled);
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
    mbarrier_wait(smem.raw_empty + raw.slot * 8, raw.phase ^ 1);
    if (lane == 0) {
      kinds[raw.slot] = NOTHING_COMES;
      mbarrier_arrive(smem.raw_full + raw.slot * 8);
    }
  }

  // Which steps a ticket's tile goes through: [first, last].
  struct Steps {
    int first, last, first_seen;
    __device__ __forceinline__ int count() const { return last < 0 ? 0 : max(last - first + 1, 0); }
  };
  __device__ __forceinline__ Steps steps_of(const WorkTile &tile,
                                            [[maybe_unused]] const CascadeSplit &split) const {
    Steps s;
    s.first_seen = HIDES_FIRST_KEYS ? tile.r.first_seen(tile.index) : 0;
    s.first = s.first_seen / TILE_KV, s.last = tile.r.level(tile.index) - 1;
    if constexpr (CASCADE) {
      const int all = s.last + 1;
      s.first = all * split.from / split.of, s.last = all * split.to / split.of - 1;
    } else if constexpr (SPLIT) {
      if (tile.splits() > 1) {
        const int all = max(s.last + 1 - s.first, 0);
        s.last = s.first + all * (tile.split() + 1) / tile.splits() - 1;
        s.first += all * tile.split() / tile.splits();
      }
    }
    return s;
  }

  // CASCADE: the CTA's next split, and its tile; `total` if there is none.
  __device__ __forceinline__ int take(const CascadeScheduler &cascade, int turn, int total,
                                      CascadeSplit &split) const {
    split = total > 0 ? cascade.split(blockIdx.x, turn) : CascadeSplit{-1, 0, 0, 1};
    return split.tile < 0 ? total : split.tile;
  }

  __device__ __forceinline__ void run(TileScheduler scheduler, QueryTile *query_tiles, Bands *bands) {
    scheduler.bands = bands;  // the same, but an address that needs no registers
    Cursor cursor = {0, scheduler.top};
    [[maybe_unused]] CascadeScheduler cascade;
    [[maybe_unused]] CascadeSplit split = {};
    if constexpr (CASCADE)
      cascade.schedule(scheduler.live_total(), p.ctas, scheduler.shortest, scheduler.top);
    const int total = CASCADE ? scheduler.live_total() : scheduler.total();
    // With a decode launch behind: a counter of a request that has tiles here, which that launch does not
    // touch.
    const Tickets tickets = {(u32 *)p.tickets + (DECODE_LEN > 0 ? scheduler.owner * p.ticket_row : 0), total,
                             p.ctas - p.late, p.late};
    int ticket = 0;
    if constexpr (CASCADE) {
      ticket = take(cascade, 0, total, split);
    } else {
      if (lane == 0) ticket = tickets.begin(blockIdx.x, DECODE_LEN > 0 && p.is_late);
      ticket = __shfl_sync(ALL, ticket, 0);
    }
    WorkTile tile = {};
    int block = 0, block_before = 0;  // of a tile's last step and of the one before, asked for ahead
    if (ticket < total) {
      tile = scheduler.find(ticket, cursor);
      const Steps steps = steps_of(tile, split);
      if (steps.count() > 0) block = block_of(tile, steps.first_seen, steps.last);
      if (steps.count() > 1) block_before = block_of(tile, steps.first_seen, steps.last - 1);
    }
    wait_for_kernels_ahead();
    [[maybe_unused]] SplitTiles *split_tiles = nullptr;
    if constexpr (SPLIT) {
      split_tiles = split_tiles_of(p);
      if (blockIdx.x == 0 && lane == 0 && !p.is_late) {
        split_tiles->tiles = (CASCADE ? scheduler.live : scheduler.cut_tiles) * NUM_KV_HEADS;
        if constexpr (CASCADE) split_tiles->cascade = cascade;
      }
    }
    for (int turn = 0;; ++turn) {
      const int buffer = turn % Q_STAGES, parity = turn / Q_STAGES & 1;
      const u32 q_full = smem.q_full + buffer * 8;
      // arrive: release() of every consumer warp, Q_STAGES tiles ago
      mbarrier_wait(smem.q_empty + buffer * 8, parity ^ 1);
      if (ticket >= total) {
        if (lane == 0) {
          query_tiles[buffer].steps = -1;
          mbarrier_arrive(q_full);
        }
        if constexpr (FP8) end_conversion();
        finish_behind_decode(p);
        return;
      }
      const Steps reach = steps_of(tile, split);
      const int steps = reach.count(), first = reach.first, last = reach.last, first_seen = reach.first_seen;
      // Behind a long tile the next one is drawn late: it must not wait for this CTA while others are done. A
      // CTA has few of those that may be cut. Fp8 queries leave no registers for both ways.
      const bool is_long = !CASCADE && (SPLIT || (!Q_FP8 && steps > scheduler.long_steps));
      int next = 0;  // comes while this tile is loaded
      if constexpr (!CASCADE)
        if (lane == 0 && !is_long) next = tickets.draw();
      if (lane == 0) {
        const int partial = CASCADE ? turn * p.ctas + (int)blockIdx.x : SPLIT ? tile.partial() : -1;
        const QueryTile query_tile = {steps,            last,           tile.index, tile.r.start,
                                      tile.r.query_len, tile.r.seq_len, tile.head,  partial};
        query_tiles[buffer] = query_tile;
        if constexpr (CASCADE) {
          if (split.to == split.of) split_tiles->query_tiles[ticket] = query_tile;
        } else if constexpr (SPLIT) {
          if (tile.splits() > 1 && tile.split() == 0) {
            split_tiles->query_tiles[tile.cut()] = query_tile;
            split_tiles->query_tiles[tile.cut()].steps = tile.splits();
          }
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
        if (steps > 0) gather_queries(p, tile, smem.q + buffer * Q_TILE_BYTES, q_full, lane);
      int block_ahead = 0;
      if (steps > 0) {
        load_keys(tile.head, block);
        if (steps > 1) load_keys(tile.head, block_before);
        if (steps > 2) block_ahead = block_of(tile, first_seen, last - 2);
        load_values(tile.head, block);
      }
      // The next tile is sought while the stages are full, so that nothing waits for it at the border.
      WorkTile coming = {};
      int coming_block = 0, coming_before = 0;
      const auto seek = [&](WorkTile &found, int &first_block, int &second_block) {
        if constexpr (CASCADE) ticket = take(cascade, turn + 1, total, split);
        else ticket = __shfl_sync(ALL, next, 0);
        if (ticket >= total) return;
        found = scheduler.find(ticket, cursor);
        const Steps steps = steps_of(found, split);
        if (steps.count() > 0) first_block = block_of(found, steps.first_seen, steps.last);
        if (steps.count() > 1) second_block = block_of(found, steps.first_seen, steps.last - 1);
      };
      if (!is_long) seek(coming, coming_block, coming_before);
      for (int step = last - 1; step >= first; --step) {
        block = block_before;
        block_before = block_ahead;
        if (step > first + 1) block_ahead = block_of(tile, first_seen, step - 2);
        if (step > first) load_keys(tile.head, block_before);
        load_values(tile.head, block);
      }
      if (is_long) {
        if (lane == 0) next = tickets.draw();
        seek(tile, block, block_before);
      } else {
        tile = coming, block = coming_block, block_before = coming_before;
      }
    }
  }
};
