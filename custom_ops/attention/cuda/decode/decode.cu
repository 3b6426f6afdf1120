// Decode attention over a paged cache: stream-K on a fixed grid, one launch, merged by the last arriver.
//
// A pair is a request and one kv head, or two narrow ones side by side (PAIR_HEADS). The keys of all requests
// are cut into tiles of WARPS * WARP_KEYS keys and lined up; every team of TEAM CTAs takes an equal run of
// that line, whatever the lengths are, each CTA for a pair of its own: device memory answers faster when the
// heads of a block are read at about one time. Inside a CTA each warp owns WARP_KEYS keys of a tile: it
// copies them to shared memory itself (cp.async, STAGES deep, across the borders of pairs), so that no
// barrier stands in the loop; the warps' softmax states meet once per pair.
//
// The dots are transposed: S^T = K Q^T and O^T = V^T P^T, keys and value columns as the 16 rows of
// mma.m16n8k16, query rows (query tokens x heads of the group) as its 8 columns. A group of 4 or 8 heads
// wastes half or nothing instead of 12 or 8 of 16 rows; two heads of a pair share the 8 columns, each of
// which keeps what belongs to its own head.
//
// Compiled at run time by NVRTC, one specialisation per model shape: decode_config.cuh. No headers but ours,
// so that it builds wherever NVRTC is. Sources: Stream-K (arXiv:2301.03598), split-KV merging
// (arXiv:2501.01005, 2.2).

#include "decode_mainloop.cuh"

// Normalise four columns of a row and store them; the first thread of a row stores the LSE.
__device__ __forceinline__ void store_output(const Params &p, const Request &r, int pair, int row, int column,
                                             float top, float total, float4 x) {
  const int query = query_of(row);
  if (query >= r.query_len) return;
  const int head = kv_head_of(pair, row), q_head = head * GROUP + row % GROUP;
  // `total` does not tell: it is NaN where a score was NaN or +inf, and 0 where all were -inf, which makes 0
  // / 0.
  bool sees = true;  // SAME_MASK: a request whose query sees nothing has no tiles
  if constexpr (!SAME_MASK) {
    int low, end;
    visible(r.seq_len - r.query_len + query, r.seq_len, low, end);
    sees = end > low;
  }
  float shrink = 1.f;
  if constexpr (SINKS) {
    const float sink = to_float<Q_HALF>(p.sinks[q_head]) * LOG2E;
    const float most = fmaxf(top, sink);
    shrink = exp2_(top - most);
    total = total * shrink + exp2_(sink - most);
    top = most;
  }
  float weight = sees ? shrink / total : 0.f;
  if constexpr (SCALES) weight *= p.v_scale[head * p.vs_head];
  if (!sees) x = make_float4(0.f, 0.f, 0.f, 0.f);
  uint2 packed =
      make_uint2(pack<Q_HALF>(x.x * weight, x.y * weight), pack<Q_HALF>(x.z * weight, x.w * weight));
  *(uint2 *)(p.out + ((r.start + query) * p.o_token + q_head * p.o_head + column * 4) * 2) = packed;
  if (LSE && column == 0)
    p.lse[(r.start + query) * p.l_token + q_head * p.l_head] = sees ? (top + log2_(total)) * LN2 : -INF;
}

// Combine `splits` partials of a pair, from `slot(0)` on in this order, and hand each row's maximum, sum and
// columns to `use`. AHEAD: partials asked for at once; a trip to L2 takes longer than everything else here.
template <int AHEAD, class Slot, class Use>
__device__ __forceinline__ void merge_partials(const Params &p, Slot slot, int splits, int thread, Use use) {
  for (int e = thread; e < TILE_Q * V_VECTORS; e += THREADS) {
    const int row = e / V_VECTORS, column = e % V_VECTORS;
    float top = FLOOR, total = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int begin = 0; begin < splits; begin += AHEAD) {
      float part_top[AHEAD], part_total[AHEAD];
      float4 x[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        // past the end: the last one again, with no weight; no branch between loads
        const int split = min(begin + j, splits - 1);
        const i64 at = slot(split);
        part_top[j] = load_l2(p.part_state + at * 2 * TILE_Q + row);
        part_total[j] = load_l2(p.part_state + at * 2 * TILE_Q + TILE_Q + row);
        x[j] = load_l2((const float4 *)p.part_acc + at * TILE_Q * V_VECTORS + e);
      }
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (begin + j >= splits) part_top[j] = -INF;
      float most = top;
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) most = fmaxf(most, part_top[j]);
      const float shrink = exp2_(top - most);
      top = most;
      total *= shrink;
      sum.x *= shrink; sum.y *= shrink; sum.z *= shrink; sum.w *= shrink;
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        const float weight = exp2_(part_top[j] - most);
        total += part_total[j] * weight;
        sum.x += x[j].x * weight;
        sum.y += x[j].y * weight;
        sum.z += x[j].z * weight;
        sum.w += x[j].w * weight;
      }
    }
    use(row, column, top, total, sum);
  }
}

// Where a pair's partials are, and where they go when merged. Its CTAs are in teams first ...: slot 1 of the
// first one holds its partial, slot 0 of the others.
struct PartialSlots {
  int first, begin;  // team; split
  __device__ __forceinline__ i64 operator()(int i) const {
    const int split = begin + i;
    return (i64)((first + split) * TEAM + blockIdx.x % TEAM) * 2 + (split == 0);
  }
};
struct GroupSlots {
  int first;
  const SplitGroups &groups;
  __device__ __forceinline__ i64 operator()(int group) const {
    return (i64)((first + groups.keeper(group)) * TEAM + blockIdx.x % TEAM) * 2 + 1;
  }
};
struct StoreOutput {
  const Params &p;
  const Cursor &c;
  __device__ __forceinline__ void operator()(int row, int column, float top, float total, float4 x) const {
    store_output(p, c.r, c.pair, row, column, top, total, x);
  }
};
struct StorePartial {
  const Params &p;
  i64 slot;
  __device__ __forceinline__ void operator()(int row, int column, float top, float total, float4 x) const {
    ((float4 *)p.part_acc)[slot * TILE_Q * V_VECTORS + row * V_VECTORS + column] = x;
    if (column == 0) {
      p.part_state[slot * 2 * TILE_Q + row] = top;
      p.part_state[slot * 2 * TILE_Q + TILE_Q + row] = total;
    }
  }
};

// Zeros and -inf for what no run covers: requests whose queries see nothing, and token rows after the last
// request's.
__device__ __noinline__ void store_empty(const Params &p) {
  constexpr int HEADS = NUM_KV_HEADS * GROUP;
  const int used = p.starts[p.num_reqs];
  for (int request = blockIdx.x; request < p.num_reqs + (p.num_tokens - used); request += gridDim.x) {
    int first = used + request - p.num_reqs, last = first + 1;
    if (request < p.num_reqs) {
      Request r;
      r.load(p, request);
      if (r.num_tiles || r.is_others()) continue;
      first = r.start;
      last = r.start + r.query_len;
    }
    for (int e = threadIdx.x; e < (last - first) * HEADS * V_VECTORS; e += THREADS) {
      const int token = first + e / (HEADS * V_VECTORS), head = e / V_VECTORS % HEADS, column = e % V_VECTORS;
      *(uint2 *)(p.out + (token * p.o_token + head * p.o_head + column * 4) * 2) = make_uint2(0, 0);
      if (LSE && column == 0) p.lse[token * p.l_token + head * p.l_head] = -INF;
    }
  }
}

// Lengths, tables and query starts are read before this point, and PREFETCH stages of keys and values before
// the query tokens' own: what writes those does not let its dependents start early (stream_order.py), so that
// they are complete when this kernel begins. Everything else is read behind it, when all kernels before have
// finished. PREFETCH_L2 tiles more are only asked for into L2.
//
// Every thread comes here exactly once, with work or without, before it ends: a kernel that ended without
// waiting could end before those ahead of it, and the one behind would take them for finished.
//
// The next kernel may be launched from here on, not earlier: whoever wrote the query tokens' keys did let its
// dependents start early, and to an attention behind this one they are keys to be read before its wait.
//
// DECODE_LEN > 0: a prefill launch (prefill.cu) stands right before this one, and neither writes what the
// other reads. It began when all kernels ahead of it had ended, and lets this one begin when each of its CTAs
// runs: so nobody waits here, and whatever is read was complete before. What an older kernel left in L1 is
// gone by load_and_forget_l1, which stands before every plain load. The last CTA waits at its end.
__device__ __forceinline__ void wait_and_launch_next() {
  if constexpr (PDL && DECODE_LEN == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  if constexpr (PDL) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Kernels behind wait for this launch alone: it must not end before the prefill launch. That waits for none
// of its dependents, so it ends.
__device__ __forceinline__ void wait_for_prefill() {
  if (PDL && DECODE_LEN > 0 && blockIdx.x == gridDim.x - 1) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// What the warps of a CTA share.
struct Shared {
  // [WARPS][STAGES]; where a warp's keys were, its state is left
  char *stages;
  float (*all_tops)[TILE_Q], (*all_totals)[TILE_Q];  // [WARPS], of these states
  int *is_last;                                  // whether this CTA is the last of a pair's to arrive
  u32 *arrived_partials;                            // CLUSTER > 1: partials of others that are in the inbox
  float *inbox, *inbox_states;  // CLUSTER > 1: [CLUSTER - 1][PARTIAL_FLOATS], [CLUSTER - 1][2][TILE_Q]
};

// The producer's side of a warp's pipeline: it runs ahead of the warp over the same tiles.
struct Producer {
  LoadCursor &at;
  int to_load, ids;
  u32 stages;  // the warp's

  // The next tile's keys and values on their way to a stage; an empty group of copies if there is none, which
  // keeps the count.
  __device__ __forceinline__ void load(const Params &p, int stage, int warp, int lane) {
    if (to_load > 0) {
      const int key = ((at.r.first_tile + at.tile) * WARPS + warp) * WARP_KEYS;
      const int skip = at.r.low - key, real = at.r.end - key;
      const int batch_tile = at.tile % BATCH, first_slot = BLOCK_SIZE >= WARP_KEYS ? key % BLOCK_SIZE : 0;
      const u32 to = stages + stage * STAGE_BYTES;
      if (real > 0 && skip < WARP_KEYS) {
        const char *k = keys_of(p, at), *v = values_of(p, at);
        copy_rows<K_CHUNKS, K_PADDED, K_BLOCK, K_SLOT>(to, k, ids, batch_tile, first_slot, skip, real, lane);
        copy_rows<V_CHUNKS, V_PADDED, V_BLOCK, V_SLOT>(to + WARP_KEYS * K_ROW_BYTES, v, ids, batch_tile,
                                                       first_slot, skip, real, lane);
      }
      if (--to_load > 0) {
        const int old = at.request;
        if (++at.tile == at.r.num_tiles) at.next_pair(p);
        if (at.tile % BATCH == 0 && (at.r.num_tiles > BATCH || at.request != old))
          ids = load_ids(p, at, warp, lane);
      }
    }
    cp_async_commit();
  }
};

// Fill all stages but one, and read the queries: as many keys as may be read before the kernels ahead have
// ended, the wait, everything else.
__device__ __forceinline__ void prologue(const Params &p, const Cursor &c, Producer &producer,
                                         Queries &queries, int warp, int lane) {
  int filled = 0;
  if constexpr (PDL && PREFETCH > 0 && DECODE_LEN == 0) {
#pragma unroll 1
    for (; filled < PREFETCH && is_context(producer.at, warp); ++filled) producer.load(p, filled, warp, lane);
    if (filled == PREFETCH) prefetch_tiles(p, producer.at, producer.ids, producer.to_load, warp, lane);
  }
  wait_and_launch_next();
  queries.load(p, c, lane);
#pragma unroll 1
  for (; filled < STAGES - 1; ++filled) producer.load(p, filled, warp, lane);
}

// The warps' states of a pair, which lie in the stages they have used last, become one partial: it is stored
// as output if the pair has no others or the others' have come in, else it is sent or stored for whoever
// finishes the pair. `sender`: this CTA's place among those that send to the pair's first CTA; -1: that is
// this one.
__device__ __forceinline__ void hand_over(const Params &p, const Cursor &c, const Splits &splits,
                                          const Shared &shared, int used_stage, i64 slot,
                                          [[maybe_unused]] int sender) {
  for (int e = threadIdx.x; e < TILE_Q * V_VECTORS; e += THREADS) {
    const int row = e / V_VECTORS, column = e % V_VECTORS;
    float tops[WARPS], top = FLOOR, sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w] = shared.all_tops[w][row]);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float *from = (float *)(shared.stages + (w * STAGES + used_stage) * STAGE_BYTES);
      const float weight = exp2_(tops[w] - top);
      const float4 y = *(const float4 *)(from + row * STATE_ROW + column * 4);
      sum += shared.all_totals[w][row] * weight;
      x.x += y.x * weight; x.y += y.y * weight; x.z += y.z * weight; x.w += y.w * weight;
    }
#if CLUSTER > 1
    if (splits.near && sender < 0) {  // fold in the others, always in this order
      const float mine = top;
      for (int i = 0; i < splits.count - 1; ++i) top = fmaxf(top, shared.inbox_states[i * 2 * TILE_Q + row]);
      const float shrink = exp2_(mine - top);
      sum *= shrink;
      x.x *= shrink; x.y *= shrink; x.z *= shrink; x.w *= shrink;
#pragma unroll 4
      for (int i = 0; i < splits.count - 1; ++i) {
        const float weight = exp2_(shared.inbox_states[i * 2 * TILE_Q + row] - top);
        const float4 y = ((const float4 *)shared.inbox)[i * (PARTIAL_FLOATS / 4) + e];
        sum += shared.inbox_states[i * 2 * TILE_Q + TILE_Q + row] * weight;
        x.x += y.x * weight; x.y += y.y * weight; x.z += y.z * weight; x.w += y.w * weight;
      }
    }
    if (splits.near && sender >= 0) {
      st_cluster(mapa((float4 *)shared.inbox + sender * (PARTIAL_FLOATS / 4) + e, splits.first % CLUSTER), x);
      if (column == 0) {
        st_cluster(mapa(shared.inbox_states + sender * 2 * TILE_Q + row, splits.first % CLUSTER), top);
        st_cluster(mapa(shared.inbox_states + sender * 2 * TILE_Q + TILE_Q + row, splits.first % CLUSTER),
                   sum);
      }
    } else
#endif
    if (splits.whole || splits.near) {
      store_output(p, c.r, c.pair, row, column, top, sum, x);
    } else {
      ((float4 *)p.part_acc)[slot * TILE_Q * V_VECTORS + e] = x;
      if (column == 0) {
        p.part_state[slot * 2 * TILE_Q + row] = top;
        p.part_state[slot * 2 * TILE_Q + TILE_Q + row] = sum;
      }
    }
  }
}

// merge_if_last in two steps (SplitGroups): by a counter of the partials of this CTA's group, and one of
// groups. Whoever comes last to the second one puts both back to zero.
__device__ __forceinline__ void merge_groups(const Params &p, const Cursor &c, const Splits &splits, int team,
                                             int *is_last) {
  const SplitGroups groups(splits.count);
  const int group = groups.of(team - splits.first), begin = groups.begin(group), size = groups.size(group);
  int *semaphore = p.semaphore + c.request * PAIRS + c.pair;
#pragma unroll 1
  for (int step = 0; step < 2; ++step) {
    __syncthreads();  // what all threads stored stands before one thread says so
    if (threadIdx.x == 0) {
      const int bit = step == 0 ? group * groups.bits : SplitGroups::DONE;
      const u32 most = step == 0 ? (1u << groups.bits) - 1 : 15u;
      u32 old;
      asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], %2;"
                   : "=r"(old)
                   : "l"(semaphore), "r"(1u << bit)
                   : "memory");
      *is_last = (int)(old >> bit & most) == (step == 0 ? size : groups.number) - 1;
      if (step == 1 && *is_last) *semaphore = 0;  // as in merge_if_last
    }
    __syncthreads();
    if (!*is_last) return;
    if (step == 0)
      merge_partials<16>(p, PartialSlots{splits.first, begin}, size, threadIdx.x,
                      StorePartial{p, GroupSlots{splits.first, groups}(group)});
    else
      merge_partials<8>(p, GroupSlots{splits.first, groups}, groups.number, threadIdx.x, StoreOutput{p, c});
  }
}

// Say that this CTA's partial of a pair is stored; the last one to say so merges them all. Nobody waits here,
// whether the others run at the same time or have ended. It needs a 0 at the start. A number left by a launch
// that was cut short, or two launches on two streams that share it, make a merge come early or never, not
// hang.
__device__ __forceinline__ void merge_if_last(const Params &p, const Cursor &c, const Splits &splits,
                                              int team, int *is_last) {
  if constexpr (GROUPED) {
    if (splits.count >= SplitGroups::FROM) {
      merge_groups(p, c, splits, team, is_last);
      return;
    }
  }
  __syncthreads();  // all threads' partials are stored before one thread says so
  if (threadIdx.x == 0) {
    int old;
    int *semaphore = p.semaphore + c.request * PAIRS + c.pair;
    asm volatile("atom.global.acq_rel.gpu.add.s32 %0, [%1], 1;" : "=r"(old) : "l"(semaphore) : "memory");
    *is_last = old == splits.count - 1;
    // A plain store: each CTA of the pair arrives once, and this is the last of them, so that nobody looks at
    // the number any more but the next launch, which counts only when this one has ended.
    if (*is_last) *semaphore = 0;
  }
  __syncthreads();
  if (*is_last) {
    const PartialSlots slots = {splits.first, 0};
    if (splits.count <= 8) merge_partials<8>(p, slots, splits.count, threadIdx.x, StoreOutput{p, c});
    else merge_partials<16>(p, slots, splits.count, threadIdx.x, StoreOutput{p, c});
  }
}

// All tiles of a run that is not empty: the loop, and what comes at the end of each pair. `met`: whether this
// CTA has waited for those of its cluster to have started.
__device__ __forceinline__ void mainloop(const Params &p, const Run &run, const Shared &shared,
                                           [[maybe_unused]] bool &met, int warp, int lane) {
  Cursor c = run.cursor();
  int unit = run.unit;
  const int unit_end = run.unit_end, team = Run::team();
  const int near = NEAR > 0 && run.moves ? NEAR : 0;
  const u32 stages = shared_address(shared.stages) + warp * STAGES * STAGE_BYTES;
  LoadCursor ahead(p, c);
  Producer producer = {ahead, unit_end - unit, 0, stages};
  producer.ids = load_ids(p, producer.at, warp, lane);
  int stage = 0;
  Queries queries;
  prologue(p, c, producer, queries, warp, lane);
  State state;
  state.clear();
  int pair_begin = c.tile;  // first tile of this run in the pair
  Splits splits;
  splits.find(c, unit, unit_end, run.partition, near);

  while (true) {
    cp_async_wait<STAGES - 2>();
    __syncwarp();
    const int key = ((c.r.first_tile + c.tile) * WARPS + warp) * WARP_KEYS;
    producer.load(p, stage == 0 ? STAGES - 1 : stage - 1, warp, lane);  // into what the last round used up
    if (key < c.r.end && key + WARP_KEYS > c.r.low)
      attend(state, queries, p, c, stages + stage * STAGE_BYTES, key, lane);
    const int used_stage = stage;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    ++c.tile;
    ++unit;
    if (c.tile < c.r.num_tiles && unit < unit_end) {
      __syncwarp();
      continue;
    }

    // The end of a pair, or of the run: the warps' states meet in the stage they have just used.
    [[maybe_unused]] Cursor next;
    if constexpr (ASK_EARLY) {
      next = c;
      if (unit < unit_end) {  // the next queries come while the states meet
        next.next_pair(p);
        queries.load(p, next, lane);
      }
    }
    __syncwarp();
    leave_state(state, (float *)(shared.stages + (warp * STAGES + used_stage) * STAGE_BYTES),
                shared.all_tops[warp], shared.all_totals[warp], lane);
    __syncthreads();
    const i64 slot = (i64)blockIdx.x * 2 + (pair_begin == 0);
    // -1: the pair begins here, the others' partials come to this CTA
    [[maybe_unused]] const int sender = team - splits.first - 1;
#if CLUSTER > 1
    if (!met) cluster_wait();
    met = true;
    if (splits.near && sender < 0) {
      // Waits for the next CTAs of this cluster, all of which run. Each has sent its partial before it waits
      // itself: it sends at the end of its run's first pair, receives at the end of the last, and does one of
      // the two where these are the same. So a CTA is sent partials of one pair only, and `arrived_partials`
      // counts that pair's.
      if (threadIdx.x == 0) wait_for_count(shared.arrived_partials, splits.count - 1);
      __syncthreads();
    }
#endif
    hand_over(p, c, splits, shared, used_stage, slot, sender);
#if CLUSTER > 1
    if (splits.near && sender >= 0) {
      __syncthreads();  // all threads' partials are sent before one thread says so
      // The receiver can't have ended: it leaves its last pair, this one, only when all partials have
      // arrived.
      if (threadIdx.x == 0) red_release_cluster(mapa(shared.arrived_partials, splits.first % CLUSTER));
    }
#endif
    if (!splits.whole && !splits.near) merge_if_last(p, c, splits, team, shared.is_last);
    if (unit == unit_end) break;
    __syncthreads();  // the stage is free again
    if constexpr (ASK_EARLY) {
      c = next;
    } else {
      c.next_pair(p);
    }
    pair_begin = 0;
    if constexpr (!ASK_EARLY) queries.load(p, c, lane);
    splits.find(c, unit, unit_end, run.partition, near);
    state.clear();
  }
}

#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif
#if MAX_REGISTERS > 0  // the two attributes exclude each other
#define BOUNDED __maxnreg__(MAX_REGISTERS)
#else
#define BOUNDED __launch_bounds__(THREADS, CTAS_PER_SM)
#endif
extern "C" __global__ void CLUSTERED BOUNDED paged_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ int is_last;
  __shared__ float all_tops[WARPS][TILE_Q], all_totals[WARPS][TILE_Q];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Shared shared = {stages, all_tops, all_totals, &is_last};
  bool met = false;
#if CLUSTER > 1
  __shared__ u32 arrived_partials;
  shared.arrived_partials = &arrived_partials;
  shared.inbox = (float *)(stages + WARPS * STAGES * STAGE_BYTES);
  shared.inbox_states = shared.inbox + (CLUSTER - 1) * PARTIAL_FLOATS;
  if (threadIdx.x == 0) arrived_partials = 0;
  // Nobody writes to another CTA before all have come this far. Every thread arrives here and waits once: at
  // the end of its first pair, or, without one, before it leaves (`met` is the same in all warps). Nothing
  // that could wait stands between the start and this line.
  cluster_arrive();
#endif
#if ONE_WARP_SCHEDULES
  // The stages are free until all warps know the run.
  static_assert(Requests::NUMBERS * 4 <= WARPS * STAGES * STAGE_BYTES);
  __shared__ Run run;
  if (warp == 0) {
    const Run found = schedule(p, lane, (int *)stages);
    if (lane == 0) run = found;
  }
  __syncthreads();
#else
  const Run run = schedule(p, lane, nullptr);
#endif
  if (run.unit < run.unit_end) {
    mainloop(p, run, shared, met, warp, lane);
  } else {
    wait_and_launch_next();
  }
#if CLUSTER > 1
  if (!met) cluster_wait();  // a CTA without work stays until the others run: none of them writes to it
#endif
  if (run.busy < p.num_reqs || run.used < p.num_tokens) store_empty(p);
  wait_for_prefill();
}
