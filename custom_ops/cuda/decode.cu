// Decode attention over a paged cache: stream-K on a fixed grid, one launch, merged by the last arriver.
//
// The keys of all (request, kv head) pairs are cut into tiles of WARPS * KEYS keys and lined up; every CTA takes an equal run of that
// line, whatever the lengths are. Inside a CTA each warp owns KEYS keys of a tile: it copies them to shared memory itself (cp.async,
// STAGES deep, across the borders of pairs), so that no barrier stands in the loop; the warps' softmax states meet once per pair.
//
// The dots are transposed: S^T = K Q^T and O^T = V^T P^T, keys and value columns as the 16 rows of mma.m16n8k16, query rows
// (query tokens x heads of the group) as its 8 columns. A group of 4 or 8 heads wastes half or nothing instead of 12 or 8 of 16 rows.
//
// Compiled at run time by NVRTC, one specialisation per model shape; every macro below comes from custom_ops/cuda/specialise.py.
// No headers, so that it builds wherever NVRTC is. Sources: Stream-K (arXiv:2301.03598), split-KV merging (arXiv:2501.01005, 2.2).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

// ------------------------------------------------------------------------------------------------ sizes
constexpr int ROWS = GROUP * QUERY_LEN;             // query rows of a pair
constexpr int COLS = (ROWS + 7) / 8;                // n-tiles of 8 rows
constexpr int TILE = WARPS * KEYS;                  // keys of one unit of work
constexpr int SUBS = KEYS / 16;                     // m-tiles of keys per warp
constexpr int K_CHUNKS = DIM * KV_BYTES / 16;       // 16-byte chunks of a key
constexpr int V_CHUNKS = DIM_V * KV_BYTES / 16;
// A key in shared memory: its chunks, padded so that 8 rows fill whole 128-byte lines, and swizzled within a line. The 8 rows of an
// ldmatrix then meet 8 different banks, and a line of device memory stays a line: rows padded by 16 bytes made cp.async ask L2 for
// 1.5 times the bytes.
__host__ __device__ constexpr int padded(int chunks) { return chunks >= 8 ? (chunks + 7) / 8 * 8 : chunks > 4 ? 8 : chunks > 2 ? 4 : 2; }
constexpr int K_PADDED = padded(K_CHUNKS), V_PADDED = padded(V_CHUNKS);
constexpr int K_ROW = K_PADDED * 16, V_ROW = V_PADDED * 16;  // bytes
constexpr int STAGE = KEYS * (K_ROW + V_ROW);                // bytes of one warp's stage
constexpr int OUT_ROW = ROWS * (DIM_V + 4) * 4 <= STAGE ? DIM_V + 4 : DIM_V;  // floats of a query row when states meet, in a stage
constexpr int VECTORS = DIM_V / 4;
constexpr int THREADS = WARPS * 32;
constexpr int LETTER = ROWS * DIM_V;                // floats of a part that a CTA sends to another of its cluster
static_assert(ROWS * OUT_ROW * 4 <= STAGE, "a stage must hold a warp's state");
static_assert(DIM % 16 == 0 && DIM_V % 16 == 0 && KEYS % 16 == 0 && STAGES >= 2, "sizes in multiples of 16, two stages");

constexpr float LOG2E = 1.4426950408889634f;
[[maybe_unused]] constexpr float LN2 = 0.6931471805599453f;
constexpr float FLOOR = -1.0e30f;                   // finite, so that a warp without keys makes no inf - inf
#define INF __int_as_float(0x7f800000)
#define ALL 0xffffffffu

struct Params {  // packed by custom_ops/cuda/paged_attention.py, in this order
  const char *q, *k, *v;
  const int *table, *seq_lens, *starts;
  char *out;
  float *lse;
  const float *slopes;
  const u16 *sinks;
  const float *k_scale, *v_scale;
  float *part_acc, *part_state;
  int *semaphore;
  i64 q_token, q_head, o_token, o_head, l_token, l_head, table_row;  // strides in elements
  float scale, soft_cap;
  int num_reqs, num_tokens, ks_head, vs_head;
};

// ------------------------------------------------------------------------------------------------ machine
__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const char *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy16_or_zero(u32 to, const char *from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ u32 transpose8x8(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
#if HALF
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#define PACK "cvt.rn.f16x2.f32"
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#define PACK "cvt.rn.bf16x2.f32"
#endif
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(MMA " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 pack(float low, float high) {  // to what the tensor cores compute in
  u32 r;
  asm(PACK " %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 pack_out(float low, float high) {  // to the dtype of q and out
  u32 r;
#if Q_HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}
__device__ __forceinline__ float to_float(u16 x) {  // from the dtype of q
#if Q_HALF
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
#else
  return __int_as_float((u32)x << 16);
#endif
}
#if KV_BYTES == 1
#if E5M2
#define UNPACK "cvt.rn.f16x2.e5m2x2"
#else
#define UNPACK "cvt.rn.f16x2.e4m3x2"
#endif
__device__ __forceinline__ void unpack(u32 x, u32 &low, u32 &high) {
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; " UNPACK " %0, l; " UNPACK " %1, h;}" : "=r"(low), "=r"(high) : "r"(x));
}
#endif
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_(float x) {  // a series near 0, where the formula with exp cancels
  const float x2 = x * x;
  const float series = x * (1.f + x2 * (-0.33333333333f + x2 * (0.13333333333f + x2 * (-0.05396825397f + x2 * 0.02186948854f))));
  const float far = 1.f - 2.f / (exp2_(2.f * LOG2E * x) + 1.f);
  return fabsf(x) < 0.3f ? series : far;
}
__device__ __forceinline__ float load_l2(const float *p) {  // other CTAs wrote it: L1 must not answer
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ float4 load_l2(const float4 *p) {
  float4 x;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory");
  return x;
}

// ------------------------------------------------------------------------------------------------ shared memory
template <int PADDED> __device__ __forceinline__ int swizzle(int row) { return PADDED >= 8 ? row % 8 : row / (8 / PADDED) % PADDED; }

// Address of chunk `2 * pair + odd` of a row, given that of chunk `odd`: the swizzle is an exclusive or below 128 bytes.
template <int PADDED> __device__ __forceinline__ u32 chunk_pair(u32 row, u32 odd, int pair) {
  constexpr int LINE = PADDED >= 8 ? 127 : PADDED * 16 - 1;
  return row + (odd ^ (pair * 32 & LINE)) + (pair * 32 & ~LINE);
}

// ------------------------------------------------------------------------------------------------ clusters
// CTAs of a cluster write into each other's shared memory: parts of a pair then meet without a trip through L2.
#if CLUSTER > 1
__device__ __forceinline__ u32 in_cta(const void *mine, int rank) {  // the address of `mine` in CTA `rank` of the cluster
  u32 theirs;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(mine)), "r"(rank));
  return theirs;
}
__device__ __forceinline__ void send(u32 to, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
__device__ __forceinline__ void send(u32 to, float x) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory"); }
__device__ __forceinline__ void announce(u32 counter) {
  asm volatile("red.release.cluster.shared::cluster.add.u32 [%0], 1;" ::"r"(counter) : "memory");
}
__device__ __forceinline__ void await(const u32 *counter, u32 wanted) {
  u32 seen;
  do asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];" : "=r"(seen) : "r"(shared_address(counter)) : "memory");
  while (seen != wanted);
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

// ------------------------------------------------------------------------------------------------ masks
// Every mask of the op is an interval [low, end) of keys (docs/ops.md); both bounds grow with the position.
__device__ __forceinline__ void visible(int position, int seq_len, int &low, int &end) {
  low = 0;
  end = seq_len;
#if CAUSAL
  end = min(end, position + 1);
#endif
#if WINDOW_LEFT >= 0
  low = max(low, position - (WINDOW_LEFT));
#endif
#if WINDOW_RIGHT >= 0
  end = min(end, position + (WINDOW_RIGHT) + 1);
#endif
#if CHUNK > 0
  const int chunk = position / CHUNK * CHUNK;
  low = max(low, chunk);
  end = min(end, chunk + CHUNK);
#endif
  if (position < 0) end = 0;
  end = max(end, low);
}

// A request as a run of key tiles: what any of its queries sees.
struct Request {
  int start, query_len, seq_len, first_tile, num_tiles, low, end;

  __device__ __forceinline__ void load(const Params &p, int r) {
    start = p.starts[r];
    query_len = p.starts[r + 1] - start;
    seq_len = p.seq_lens[r];
    cut();
  }

  // The same request as lane `home` has.
  __device__ __forceinline__ void take(int home) {
    start = __shfl_sync(ALL, start, home);
    query_len = __shfl_sync(ALL, query_len, home);
    seq_len = __shfl_sync(ALL, seq_len, home);
    cut();
  }

  __device__ __forceinline__ void cut() {
    int unused;
    visible(max(seq_len - query_len, 0), seq_len, low, unused);
    visible(seq_len - 1, seq_len, unused, end);
    end = min(end, seq_len);
    if (query_len <= 0 || seq_len <= 0 || end <= low) low = end = 0;
    first_tile = low / TILE;
    num_tiles = (end + TILE - 1) / TILE - first_tile;
  }
};

// Where a CTA stands in its run: pair (request, head) and tile of the pair.
struct Cursor {
  int request, head, tile;
  Request r;

  __device__ __forceinline__ void next_pair(const Params &p) {
    tile = 0;
    if (++head == NUM_KV_HEADS) {
      head = 0;
      do r.load(p, ++request);  // a run ends before the requests do
      while (r.num_tiles == 0);
    }
  }
};

// ------------------------------------------------------------------------------------------------ copies
// One warp's keys of a tile to shared memory. `ids`: lane i holds the i-th block id of the current batch of tiles.
constexpr int IDS = BLOCK_SIZE >= KEYS ? 1 : KEYS / BLOCK_SIZE;  // block ids of a warp's keys
constexpr int BATCH = 32 / IDS;                                  // tiles whose ids one register per lane holds
constexpr int IN_BLOCK = BLOCK_SIZE >= KEYS ? KEYS : BLOCK_SIZE;

__device__ __forceinline__ int load_ids(const Params &p, const Cursor &c, int warp, int lane) {
  const int key = ((c.r.first_tile + c.tile / BATCH * BATCH + lane / IDS) * WARPS + warp) * KEYS + lane % IDS * IN_BLOCK;
  return key < c.r.end ? p.table[c.request * p.table_row + key / BLOCK_SIZE] : 0;
}

template <int CHUNKS, int PADDED, i64 BLOCK_STRIDE, i64 SLOT_STRIDE>
__device__ __forceinline__ void copy_rows(u32 to, const char *from, int ids, int batch_tile, int first_slot, int real, int lane) {
  constexpr int STEPS = (KEYS * CHUNKS + 31) / 32;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int chunk = i * 32 + lane;
    const int row = chunk / CHUNKS, column = chunk % CHUNKS;
    const int id = IDS == 1 ? __shfl_sync(ALL, ids, batch_tile) : __shfl_sync(ALL, ids, batch_tile * IDS + (row / IN_BLOCK) % IDS);
    const int slot = IDS == 1 ? first_slot + row : row % IN_BLOCK;
    const char *at = from + ((i64)id * BLOCK_STRIDE + (i64)slot * SLOT_STRIDE) * KV_BYTES + column * 16;
    const u32 target = to + row * (PADDED * 16) + (column ^ swizzle<PADDED>(row)) * 16;
    if (KEYS * CHUNKS % 32 && row >= KEYS) continue;
    if (real >= KEYS) copy16(target, at);
    else copy16_or_zero(target, at, row < real);
  }
}

// ------------------------------------------------------------------------------------------------ one warp's state
struct State {
  float top[COLS][2], total[COLS][2];      // of query rows 8 * c + 2 * (lane % 4) + {0, 1}; total: this thread's keys only
  float acc[DIM_V / 16][COLS][4];          // O^T: value columns x query rows

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      top[c][0] = top[c][1] = FLOOR;
      total[c][0] = total[c][1] = 0.f;
#pragma unroll
      for (int d = 0; d < DIM_V / 16; ++d) acc[d][c][0] = acc[d][c][1] = acc[d][c][2] = acc[d][c][3] = 0.f;
    }
  }
};

// The queries of a pair as the B operand of S^T = K Q^T, with what turns a dot into a score in base 2, and each row's keys.
struct Queries {
  u32 b[DIM / 16][COLS][2];
  float scale[COLS][2];
#if !SAME_MASK
  int low[COLS][2], end[COLS][2];
#endif
#if ALIBI || !SAME_MASK
  int position[COLS][2];
#endif
#if ALIBI
  float slope[COLS][2];
#endif

  __device__ __forceinline__ void load(const Params &p, const Cursor &c, int lane) {
    const int quad = lane % 4;
    float k_scale = 1.f;
#if SCALES
    k_scale = p.k_scale[c.head * p.ks_head];
#endif
#pragma unroll
    for (int n = 0; n < COLS; ++n) {
      const int row = n * 8 + lane / 4;
      const bool real = row < ROWS && row / GROUP < c.r.query_len;
      const char *at = p.q + ((c.r.start + row / GROUP) * p.q_token + (c.head * GROUP + row % GROUP) * p.q_head) * 2;
#pragma unroll
      for (int s = 0; s < DIM / 16; ++s) {
#if KV_BYTES == 1  // the order of columns in which fp8 keys unpack
        const u64 x = real ? *(const u64 *)(at + (s * 16 + quad * 4) * 2) : 0;
        b[s][n][0] = (u32)x;
        b[s][n][1] = (u32)(x >> 32);
#else
        b[s][n][0] = real ? *(const u32 *)(at + (s * 16 + quad * 2) * 2) : 0;
        b[s][n][1] = real ? *(const u32 *)(at + (s * 16 + quad * 2 + 8) * 2) : 0;
#endif
      }
      float fold = 1.f;
#if KV_BYTES == 1 && !Q_HALF
      // fp8 converts to fp16 only: a power of two per row brings q into fp16's range, exactly.
      float largest = 1e-30f;
#pragma unroll
      for (int s = 0; s < DIM / 16; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          largest = fmaxf(largest, fabsf(to_float((u16)b[s][n][h])));
          largest = fmaxf(largest, fabsf(to_float((u16)(b[s][n][h] >> 16))));
        }
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
      fold = __int_as_float((__float_as_int(largest) & 0x7f800000) + 0x00800000);  // the next power of two
      const float shrink = 1.f / fold;
#pragma unroll
      for (int s = 0; s < DIM / 16; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) b[s][n][h] = pack(to_float((u16)b[s][n][h]) * shrink, to_float((u16)(b[s][n][h] >> 16)) * shrink);
#endif
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // from here on rows as in the scores: two per thread
        const float row_fold = KV_BYTES == 1 && !Q_HALF ? __shfl_sync(ALL, fold, (quad * 2 + i) * 4) : 1.f;
        scale[n][i] = p.scale * k_scale * row_fold * (SOFT_CAP || ALIBI ? 1.f : LOG2E);
        [[maybe_unused]] const int query = n * 8 + quad * 2 + i;
#if ALIBI || !SAME_MASK
        position[n][i] = c.r.seq_len - c.r.query_len + query / GROUP;
#endif
#if !SAME_MASK
        visible(position[n][i], c.r.seq_len, low[n][i], end[n][i]);
        if (query / GROUP >= c.r.query_len || query >= ROWS) end[n][i] = low[n][i];
#endif
#if ALIBI
        slope[n][i] = query < ROWS ? p.slopes[c.head * GROUP + query % GROUP] : 0.f;
#endif
      }
    }
  }
};

// One warp's KEYS keys at `key`: scores, softmax, weighted values.
__device__ __forceinline__ void attend(State &state, const Queries &queries, const Params &p, const Cursor &c, u32 stage, int key, int lane) {
  float s[SUBS][COLS][4];
#pragma unroll
  for (int m = 0; m < SUBS; ++m) {
    float odd_sum[COLS][4];  // two chains of dependent mma instead of one
#pragma unroll
    for (int n = 0; n < COLS; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] = odd_sum[n][j] = 0.f;
    const u32 at = stage + (m * 16 + lane % 16) * K_ROW, odd = (lane / 16 ^ swizzle<K_PADDED>(lane % 16)) * 16;
#if KV_BYTES == 1
#pragma unroll
    for (int d = 0; d < (DIM + 31) / 32; ++d) {
      u32 raw[4], a[4];
      load_matrices(raw, chunk_pair<K_PADDED>(at, odd, d));
      unpack(raw[0], a[0], a[2]);
      unpack(raw[1], a[1], a[3]);
#pragma unroll
      for (int n = 0; n < COLS; ++n) mma(s[m][n], a, queries.b[2 * d][n][0], queries.b[2 * d][n][1]);
      if (2 * d + 1 < DIM / 16) {
        unpack(raw[2], a[0], a[2]);
        unpack(raw[3], a[1], a[3]);
#pragma unroll
        for (int n = 0; n < COLS; ++n) mma(odd_sum[n], a, queries.b[(2 * d + 1) % (DIM / 16)][n][0], queries.b[(2 * d + 1) % (DIM / 16)][n][1]);
      }
    }
#else
#pragma unroll
    for (int d = 0; d < DIM / 16; ++d) {
      u32 a[4];
      load_matrices(a, chunk_pair<K_PADDED>(at, odd, d));
#pragma unroll
      for (int n = 0; n < COLS; ++n) mma(d % 2 ? odd_sum[n] : s[m][n], a, queries.b[d][n][0], queries.b[d][n][1]);
    }
#endif
#pragma unroll
    for (int n = 0; n < COLS; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] += odd_sum[n][j];
  }
  [[maybe_unused]] const bool whole = SAME_MASK && key + KEYS <= c.r.end && key >= c.r.low;  // no key of these is masked
  bool moved = false;
  float top[COLS][2];
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = state.top[n][i];
#pragma unroll
      for (int m = 0; m < SUBS; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float x = s[m][n][2 * h + i] * queries.scale[n][i];
          [[maybe_unused]] const int at = key + m * 16 + h * 8 + lane / 4;
#if SOFT_CAP
          x = p.soft_cap * tanh_(x / p.soft_cap);
#endif
#if ALIBI
          x += queries.slope[n][i] * (float)(at - queries.position[n][i]);
#endif
#if SOFT_CAP || ALIBI
          x *= LOG2E;
#endif
#if SAME_MASK
          if (!whole) x = at < c.r.end && at >= c.r.low ? x : -INF;
#else
          x = at < queries.end[n][i] && at >= queries.low[n][i] ? x : -INF;
#endif
          s[m][n][2 * h + i] = x;
          most = fmaxf(most, x);
        }
      most = fmaxf(most, __shfl_xor_sync(ALL, most, 4));
      most = fmaxf(most, __shfl_xor_sync(ALL, most, 8));
      most = fmaxf(most, __shfl_xor_sync(ALL, most, 16));
      moved |= most > state.top[n][i];
      top[n][i] = most;
    }
  if (__any_sync(ALL, moved)) {
#pragma unroll
    for (int n = 0; n < COLS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float shrink = exp2_(state.top[n][i] - top[n][i]);
        state.top[n][i] = top[n][i];
        state.total[n][i] *= shrink;
#pragma unroll
        for (int d = 0; d < DIM_V / 16; ++d) {
          state.acc[d][n][i] *= shrink;
          state.acc[d][n][i + 2] *= shrink;
        }
      }
  }
#pragma unroll
  for (int m = 0; m < SUBS; ++m) {
    u32 b[COLS][2];
#pragma unroll
    for (int n = 0; n < COLS; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] = exp2_(s[m][n][j] - state.top[n][j % 2]);
      state.total[n][0] += s[m][n][0] + s[m][n][2];
      state.total[n][1] += s[m][n][1] + s[m][n][3];
      b[n][0] = transpose8x8(pack(s[m][n][0], s[m][n][1]));
      b[n][1] = transpose8x8(pack(s[m][n][2], s[m][n][3]));
    }
    const u32 values = stage + KEYS * K_ROW;
#if KV_BYTES == 1
    const u32 at = values + (m * 16 + lane % 16) * V_ROW, odd = (lane / 16 ^ swizzle<V_PADDED>(lane % 16)) * 16;
#pragma unroll
    for (int d = 0; d < DIM_V / 16; d += 2) {
      u32 raw[4], a[4];
      load_transposed(raw, chunk_pair<V_PADDED>(at, odd, d / 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[i] = __byte_perm(raw[i], 0, 0x3120);
      unpack(raw[0], a[0], a[1]);
      unpack(raw[1], a[2], a[3]);
#pragma unroll
      for (int n = 0; n < COLS; ++n) mma(state.acc[d][n], a, b[n][0], b[n][1]);
      if (d + 1 < DIM_V / 16) {
        unpack(raw[2], a[0], a[1]);
        unpack(raw[3], a[2], a[3]);
#pragma unroll
        for (int n = 0; n < COLS; ++n) mma(state.acc[(d + 1) % (DIM_V / 16)][n], a, b[n][0], b[n][1]);
      }
    }
#else
    const int value = lane % 8 + lane / 16 * 8;
    const u32 at = values + (m * 16 + value) * V_ROW, odd = (lane / 8 % 2 ^ swizzle<V_PADDED>(value)) * 16;
#pragma unroll
    for (int d = 0; d < DIM_V / 16; ++d) {
      u32 a[4];
      load_transposed(a, chunk_pair<V_PADDED>(at, odd, d));
#pragma unroll
      for (int n = 0; n < COLS; ++n) mma(state.acc[d][n], a, b[n][0], b[n][1]);
    }
#endif
  }
}

// A warp's state to shared memory: acc [ROWS][OUT_ROW] into a stage of its own, top [ROWS] and total [ROWS] beside it.
__device__ __forceinline__ void park(State &state, float *to, float *tops, float *totals, int lane) {
  const int quad = lane % 4, r = lane / 4;
#pragma unroll
  for (int n = 0; n < COLS; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = state.total[n][i];
      total += __shfl_xor_sync(ALL, total, 4);
      total += __shfl_xor_sync(ALL, total, 8);
      total += __shfl_xor_sync(ALL, total, 16);
      const int row = n * 8 + quad * 2 + i;
      if (row < ROWS) {
#pragma unroll
        for (int d = 0; d < DIM_V / 16; ++d) {
          // fp8 values unpack in pairs of neighbours, 16-bit ones as columns r and r + 8
          to[row * OUT_ROW + d * 16 + (KV_BYTES == 1 ? 2 * r : r)] = state.acc[d][n][i];
          to[row * OUT_ROW + d * 16 + (KV_BYTES == 1 ? 2 * r + 1 : r + 8)] = state.acc[d][n][i + 2];
        }
        if (r == 0) {
          tops[row] = state.top[n][i];
          totals[row] = total;
        }
      }
    }
}

// Normalise four columns of a row and store them; the first thread of a row stores the LSE.
__device__ __forceinline__ void finish(const Params &p, int start, int query_len, int head, int row, int column, float top, float total, float4 x) {
  const int query = row / GROUP;
  if (query >= query_len) return;
  const int q_head = head * GROUP + row % GROUP;
  const bool sees = total > 0.f;
#if SINKS
  const float sink = to_float(p.sinks[q_head]) * LOG2E;
  const float most = fmaxf(top, sink);
  const float shrink = exp2_(top - most);
  total = total * shrink + exp2_(sink - most);
  top = most;
#else
  const float shrink = 1.f;
#endif
  float weight = sees ? shrink / total : 0.f;
#if SCALES
  weight *= p.v_scale[head * p.vs_head];
#endif
  if (!sees) x = make_float4(0.f, 0.f, 0.f, 0.f);
  uint2 packed = make_uint2(pack_out(x.x * weight, x.y * weight), pack_out(x.z * weight, x.w * weight));
  *(uint2 *)(p.out + ((start + query) * p.o_token + q_head * p.o_head + column * 4) * 2) = packed;
#if LSE
  if (column == 0) p.lse[(start + query) * p.l_token + q_head * p.l_head] = sees ? (top + log2_(total)) * LN2 : -INF;
#endif
}

// The CTAs that share the pair a cursor has reached; found while its first keys are on their way.
struct Parts {
  int first, count;
  bool whole;  // this run holds the whole pair
  bool near;   // all of them are in one cluster

  // The CTA whose run [p * total / programs, (p + 1) * total / programs) holds `unit`.
  static __device__ __forceinline__ int owner(int unit, int total, int programs) {
    if (__umulhi(total, programs) == 0) return ((u32)(unit + 1) * programs - 1) / (u32)total;
    return (int)(((u64)(unit + 1) * programs - 1) / total);
  }

  __device__ __forceinline__ void find(const Cursor &c, int unit, int unit_end, int total, int programs) {
    const int begin = unit - c.tile, last = begin + c.r.num_tiles - 1;
    whole = c.tile == 0 && last < unit_end;
    near = false;
    if (!whole) {
      first = owner(begin, total, programs);
      count = owner(last, total, programs) - first + 1;
      near = CLUSTER > 1 && first / CLUSTER == (first + count - 1) / CLUSTER;
    }
  }
};

// Combine the parts of a pair, left by CTAs first ...: slot 1 of the first, slot 0 of the others; always in this order.
__device__ __forceinline__ void merge(const Params &p, const Cursor &c, int first, int parts, int thread) {
  constexpr int AHEAD = 8;
  for (int e = thread; e < ROWS * VECTORS; e += THREADS) {
    const int row = e / VECTORS, column = e % VECTORS;
    float top = FLOOR, total = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int begin = 0; begin < parts; begin += AHEAD) {
      float part_top[AHEAD], part_total[AHEAD];
      float4 x[AHEAD];
#pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        const int part = min(begin + j, parts - 1);  // past the end: the last one again, with no weight; no branch between loads
        const i64 slot = (i64)(first + part) * 2 + (part == 0);
        part_top[j] = load_l2(p.part_state + slot * 2 * ROWS + row);
        part_total[j] = load_l2(p.part_state + slot * 2 * ROWS + ROWS + row);
        x[j] = load_l2((const float4 *)p.part_acc + slot * ROWS * VECTORS + e);
      }
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (begin + j >= parts) part_top[j] = -INF;
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
        sum.x += x[j].x * weight; sum.y += x[j].y * weight; sum.z += x[j].z * weight; sum.w += x[j].w * weight;
      }
    }
    finish(p, c.r.start, c.r.query_len, c.head, row, column, top, total, sum);
  }
}

// Zeros and -inf for what no run covers: requests whose queries see nothing, and token rows after the last request's.
__device__ __noinline__ void store_empty(const Params &p) {
  constexpr int HEADS = NUM_KV_HEADS * GROUP;
  const int used = p.starts[p.num_reqs];
  for (int request = blockIdx.x; request < p.num_reqs + (p.num_tokens - used); request += gridDim.x) {
    int first = used + request - p.num_reqs, last = first + 1;
    if (request < p.num_reqs) {
      Request r;
      r.load(p, request);
      if (r.num_tiles) continue;
      first = r.start;
      last = r.start + r.query_len;
    }
    for (int e = threadIdx.x; e < (last - first) * HEADS * VECTORS; e += THREADS) {
      const int token = first + e / (HEADS * VECTORS), head = e / VECTORS % HEADS, column = e % VECTORS;
      *(uint2 *)(p.out + (token * p.o_token + head * p.o_head + column * 4) * 2) = make_uint2(0, 0);
#if LSE
      if (column == 0) p.lse[token * p.l_token + head * p.l_head] = -INF;
#endif
    }
  }
}

// ------------------------------------------------------------------------------------------------ the kernel
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif
extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, CTAS_PER_SM) paged_decode(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int arrived;
  __shared__ float all_tops[WARPS][ROWS], all_totals[WARPS][ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if CLUSTER > 1
  __shared__ u32 letters;                                             // parts that have come in
  float *inbox = (float *)(shared + WARPS * STAGES * STAGE);          // [CLUSTER - 1][LETTER]
  float *inbox_states = inbox + (CLUSTER - 1) * LETTER;               // [CLUSTER - 1][2][ROWS]
  if (threadIdx.x == 0) letters = 0;
  cluster_arrive();  // nobody writes to another CTA before all have come this far
  bool met = false;
#endif
#if PDL  // the next kernel may be launched; this one goes on when all before it have finished
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif

  // The run of this CTA; every warp works it out for itself. Lane i counts the i-th share of the requests.
  const int share = (p.num_reqs + 31) / 32;
  int tiles = 0, busy = 0;
  const int used = p.starts[p.num_reqs];  // token rows of requests; those after it are padding
  Cursor c = {};
  for (int r = lane * share; r < min((lane + 1) * share, p.num_reqs); ++r) {
    c.r.load(p, r);
    tiles += c.r.num_tiles;
    busy += c.r.num_tiles > 0;
  }
  busy = __reduce_add_sync(ALL, busy);
  int upto = tiles;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(ALL, upto, step);
    if (lane >= step) upto += below;
  }
  const int total = __shfl_sync(ALL, upto, 31) * NUM_KV_HEADS;
  const int pairs = max(busy * NUM_KV_HEADS, 1);
  const int wanted = max(min((int)gridDim.x, total / MIN_TILES), 1);
  int programs = wanted;
  if (pairs <= wanted) {  // equal lengths: let runs end where pairs end, unless that idles a quarter of the CTAs
    const int each = wanted / pairs, even = 1 << (31 - __clz(each));  // a power of two keeps a pair's CTAs in one cluster
    if (CLUSTER > 1 && even <= CLUSTER && even * pairs * 10 >= wanted * 7) programs = even * pairs;
    else if (each * pairs * 4 >= wanted * 3) programs = each * pairs;
  }
  const int program = blockIdx.x;
  const int base = total / programs, extra = total % programs;
  int unit = program * base + program * extra / programs;
  const int unit_end = program < programs ? (program + 1) * base + (program + 1) * extra / programs : unit;

  if (unit < unit_end) {
    const int home = __ffs(__ballot_sync(ALL, upto * NUM_KV_HEADS > unit)) - 1;
    int before = (upto - tiles) * NUM_KV_HEADS, request = lane * share;
    if (share > 1 && lane == home) {
      for (;; ++request) {
        c.r.load(p, request);
        if (before + c.r.num_tiles * NUM_KV_HEADS > unit) break;
        before += c.r.num_tiles * NUM_KV_HEADS;
      }
    }
    c.request = __shfl_sync(ALL, request, home);
    before = __shfl_sync(ALL, before, home);
    c.r.take(home);
    c.head = (unit - before) / c.r.num_tiles;
    c.tile = unit - before - c.head * c.r.num_tiles;

    const u32 stages = shared_address(shared) + warp * STAGES * STAGE;
    Cursor ahead = c;
    int to_load = unit_end - unit, ids = load_ids(p, ahead, warp, lane), slot = 0;

    auto load = [&](int into) {
      if (to_load > 0) {
        const int key = ((ahead.r.first_tile + ahead.tile) * WARPS + warp) * KEYS;
        const int real = ahead.r.end - key, batch_tile = ahead.tile % BATCH, first_slot = BLOCK_SIZE >= KEYS ? key % BLOCK_SIZE : 0;
        const u32 to = stages + into * STAGE;
        if (real > 0) {
          copy_rows<K_CHUNKS, K_PADDED, K_BLOCK, K_SLOT>(to, p.k + (i64)ahead.head * K_HEAD * KV_BYTES, ids, batch_tile, first_slot, real, lane);
          copy_rows<V_CHUNKS, V_PADDED, V_BLOCK, V_SLOT>(to + KEYS * K_ROW, p.v + (i64)ahead.head * V_HEAD * KV_BYTES, ids, batch_tile, first_slot, real, lane);
        }
        if (--to_load > 0) {
          const int old = ahead.request;
          if (++ahead.tile == ahead.r.num_tiles) ahead.next_pair(p);
          if (ahead.tile % BATCH == 0 && (ahead.r.num_tiles > BATCH || ahead.request != old)) ids = load_ids(p, ahead, warp, lane);
        }
      }
      commit();  // an empty group keeps the count
    };

    Queries queries;
    queries.load(p, c, lane);  // on their way together with the block ids
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) load(s);
    State state;
    state.clear();
    int pair_begin = c.tile;  // first tile of this run in the pair
    Parts parts;
    parts.find(c, unit, unit_end, total, programs);

    while (true) {
      wait_groups<STAGES - 2>();
      __syncwarp();
      const int key = ((c.r.first_tile + c.tile) * WARPS + warp) * KEYS;
      load(slot == 0 ? STAGES - 1 : slot - 1);  // into what the last round used up
      if (key < c.r.end) attend(state, queries, p, c, stages + slot * STAGE, key, lane);
      const int used_slot = slot;
      slot = slot == STAGES - 1 ? 0 : slot + 1;
      ++c.tile;
      ++unit;
      if (c.tile < c.r.num_tiles && unit < unit_end) {
        __syncwarp();
        continue;
      }

      // The end of a pair, or of the run: the warps' states meet in the stage they have just used.
      __syncwarp();
      park(state, (float *)(shared + (warp * STAGES + used_slot) * STAGE), all_tops[warp], all_totals[warp], lane);
      __syncthreads();
      const i64 part = (i64)program * 2 + (pair_begin == 0);
      [[maybe_unused]] const int sender = program - parts.first - 1;  // -1: the pair begins here, the others' parts come to this CTA
#if CLUSTER > 1
      if (!met) cluster_wait();
      met = true;
      if (parts.near && sender < 0) {
        if (threadIdx.x == 0) await(&letters, parts.count - 1);
        __syncthreads();
      }
#endif
      for (int e = threadIdx.x; e < ROWS * VECTORS; e += THREADS) {
        const int row = e / VECTORS, column = e % VECTORS;
        float tops[WARPS], top = FLOOR, sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, tops[w] = all_tops[w][row]);
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
          const float *from = (float *)(shared + (w * STAGES + used_slot) * STAGE);
          const float weight = exp2_(tops[w] - top);
          const float4 y = *(const float4 *)(from + row * OUT_ROW + column * 4);
          sum += all_totals[w][row] * weight;
          x.x += y.x * weight; x.y += y.y * weight; x.z += y.z * weight; x.w += y.w * weight;
        }
#if CLUSTER > 1
        if (parts.near && sender < 0) {  // fold in the others, always in this order
          const float mine = top;
          for (int i = 0; i < parts.count - 1; ++i) top = fmaxf(top, inbox_states[i * 2 * ROWS + row]);
          const float shrink = exp2_(mine - top);
          sum *= shrink;
          x.x *= shrink; x.y *= shrink; x.z *= shrink; x.w *= shrink;
#pragma unroll 4
          for (int i = 0; i < parts.count - 1; ++i) {
            const float weight = exp2_(inbox_states[i * 2 * ROWS + row] - top);
            const float4 y = ((const float4 *)inbox)[i * (LETTER / 4) + e];
            sum += inbox_states[i * 2 * ROWS + ROWS + row] * weight;
            x.x += y.x * weight; x.y += y.y * weight; x.z += y.z * weight; x.w += y.w * weight;
          }
        }
        if (parts.near && sender >= 0) {
          send(in_cta((float4 *)inbox + sender * (LETTER / 4) + e, parts.first % CLUSTER), x);
          if (column == 0) {
            send(in_cta(inbox_states + sender * 2 * ROWS + row, parts.first % CLUSTER), top);
            send(in_cta(inbox_states + sender * 2 * ROWS + ROWS + row, parts.first % CLUSTER), sum);
          }
        } else
#endif
        if (parts.whole || parts.near) {
          finish(p, c.r.start, c.r.query_len, c.head, row, column, top, sum, x);
        } else {
          ((float4 *)p.part_acc)[part * ROWS * VECTORS + e] = x;
          if (column == 0) {
            p.part_state[part * 2 * ROWS + row] = top;
            p.part_state[part * 2 * ROWS + ROWS + row] = sum;
          }
        }
      }
#if CLUSTER > 1
      if (parts.near && sender >= 0) {
        __syncthreads();  // all threads' parts are sent before one thread says so
        if (threadIdx.x == 0) announce(in_cta(&letters, parts.first % CLUSTER));
      }
#endif
      if (!parts.whole && !parts.near) {
        __syncthreads();  // all threads' parts are stored before one thread says so
        if (threadIdx.x == 0) {
          int old;
          int *semaphore = p.semaphore + c.request * NUM_KV_HEADS + c.head;
          asm volatile("atom.global.acq_rel.gpu.add.s32 %0, [%1], 1;" : "=r"(old) : "l"(semaphore) : "memory");
          arrived = old == parts.count - 1;
          if (arrived) *semaphore = 0;
        }
        __syncthreads();
        if (arrived) merge(p, c, parts.first, parts.count, threadIdx.x);
      }
      if (unit == unit_end) break;
      __syncthreads();  // the stage is free again
      c.next_pair(p);
      pair_begin = 0;
      queries.load(p, c, lane);
      parts.find(c, unit, unit_end, total, programs);
      state.clear();
    }
  }
#if CLUSTER > 1
  if (!met) cluster_wait();
#endif
  if (busy < p.num_reqs || used < p.num_tokens) store_empty(p);
}
