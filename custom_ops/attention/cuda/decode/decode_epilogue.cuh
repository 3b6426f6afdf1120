// The end of a pair: the warps' states meet, splits are merged, rows are stored.
#pragma once
#include "decode_scheduler.cuh"

// What the warps of a CTA share.
struct Shared {
  // [WARPS][STAGES]; where a warp's keys were, its state is left
  char *stages;
  float (*all_tops)[TILE_Q], (*all_totals)[TILE_Q];  // [WARPS], of these states
  int *is_last;                                  // whether this CTA is the last of a pair's to arrive
  u32 *arrived_partials;                            // CLUSTER > 1: partials of others that are in the inbox
  float *inbox, *inbox_states;  // CLUSTER > 1: [CLUSTER - 1][PARTIAL_FLOATS], [CLUSTER - 1][2][TILE_Q]
};

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
  x.x *= weight; x.y *= weight; x.z *= weight; x.w *= weight;
  char *const at = p.out + ((r.start + query) * p.o_token + q_head * p.o_head + column * 4) * OUT_BYTES;
  if constexpr (FP8_RESULTS) {
    const float inverse = inverse_of(*p.output_scale);
    *(u32 *)at = pack_e4m3(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
  } else {
    *(uint2 *)at = make_uint2(pack<Q_HALF>(x.x, x.y), pack<Q_HALF>(x.z, x.w));
  }
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
      char *const at = p.out + (token * p.o_token + head * p.o_head + column * 4) * OUT_BYTES;
      if constexpr (FP8_RESULTS) *(u32 *)at = 0;
      else *(uint2 *)at = make_uint2(0, 0);
      if (LSE && column == 0) p.lse[token * p.l_token + head * p.l_head] = -INF;
    }
  }
}

// The warps' states of a pair, which lie in the stages they have used last, become one partial: it is stored
// as output if the pair has no others or the others' have come in, else it is sent or stored for the CTA that
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
// groups. The last CTA at the second one puts both back to zero.
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

// Say that this CTA's partial of a pair is stored; the last one to say so merges them all. No CTA waits here,
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
    // A plain store: each CTA of the pair arrives once, and this is the last of them, so that only
    // the next launch reads the number again, which counts only when this one has ended.
    if (*is_last) *semaphore = 0;
  }
  __syncthreads();
  if (*is_last) {
    const PartialSlots slots = {splits.first, 0};
    if (splits.count <= 8) merge_partials<8>(p, slots, splits.count, threadIdx.x, StoreOutput{p, c});
    else merge_partials<16>(p, slots, splits.count, threadIdx.x, StoreOutput{p, c});
  }
}
