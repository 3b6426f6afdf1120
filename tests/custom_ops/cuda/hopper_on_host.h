// Hopper's instructions for the host, in place of machine.cuh, bulk.cuh, wgmma.cuh and latent_instructions.cuh: a
// CTA's threads are coroutines that take turns by chance, so that the kernels' own sources are what runs.
//
// What is asynchronous happens as late, or as early, as it may: products read their operands when they are
// waited for, copies arrive when they are asked for. So a barrier that is missing shows as a wrong result. A
// wait that nothing can end is noticed, since no coroutine moves.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "latent_config.cuh"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define ALL 0xffffffffu
#define INF __builtin_inff()
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
constexpr float LN2 = 0.6931471805599453f, FLOOR = -1.0e30f;
using std::max;
using std::min;

// ---------------------------------------------------------------------------------------------- coroutines
struct Product { float *d; u64 a, b; int columns; bool turned, add; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool ended;
  std::vector<std::vector<Product>> groups;  // committed, not waited for
  std::vector<Product> open;
};
inline std::vector<Thread> threads;
inline int current, moved;
inline ucontext_t scheduler;
struct Index { int x; };
inline Index block, grid;
inline Index thread_index() { return {current}; }
#define threadIdx (thread_index())
#define blockIdx block
#define gridDim grid

inline void yield() {
  const int me = current;
  swapcontext(&threads[me].context, &scheduler);
}
template <class F> void wait_until(F done) {
  while (!done()) yield();
  ++moved;
}

struct Meeting { int count = 0, generation = 0; };
inline void meet(Meeting &m, int wanted) {
  const int generation = m.generation;
  if (++m.count == wanted) {
    m.count = 0;
    ++m.generation;
    ++moved;
  } else {
    wait_until([&] { return m.generation != generation; });
  }
}
inline Meeting warp_meetings[64], named[16];
inline u64 given[64][2][32];
inline int turns[64][32];
inline const u64 *exchange(u64 x) {  // what all lanes of the warp gave
  const int warp = current / 32, lane = current % 32, turn = turns[warp][lane]++ & 1;
  given[warp][turn][lane] = x;
  meet(warp_meetings[warp], 32);
  return given[warp][turn];
}
template <class T> T shuffled(T x, int from) {
  u64 bits = 0;
  memcpy(&bits, &x, sizeof x);
  bits = exchange(bits)[from];
  memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T> T __shfl_sync(u32, T x, int lane) { return shuffled(x, lane & 31); }
template <class T> T __shfl_xor_sync(u32, T x, int mask) { return shuffled(x, current % 32 ^ mask); }
template <class T> T __shfl_up_sync(u32, T x, int step) {
  const int lane = current % 32;
  return shuffled(x, lane >= step ? lane - step : lane);
}
inline void __syncwarp() { exchange(0); }
inline bool __any_sync(u32, bool x) {
  const u64 *all = exchange(x);
  return std::any_of(all, all + 32, [](u64 y) { return y; });
}
inline void __syncthreads() { meet(named[0], (int)threads.size()); }
template <int COUNT> void barrier(int id) { meet(named[id], COUNT); }
inline u64 votes[2];
template <int COUNT> bool barrier_or(int id, bool mine) {
  static int generation;  // of a CTA that runs alone
  const int turn = named[id].generation & 1;
  generation = turn;
  if (mine) votes[turn] = 1;
  meet(named[id], COUNT);
  const bool any = votes[turn];
  meet(named[15], COUNT);
  votes[turn] = 0;
  meet(named[15], COUNT);
  return any;
}

// ------------------------------------------------------------------------------------------ shared memory
alignas(1024) inline char memory[232448];
inline u32 shared_address(const void *p) { return (u32)((const char *)p - memory); }
struct Barrier { int expected, pending, phase; i64 bytes; };
inline std::map<u32, Barrier> barriers;
inline void completes(Barrier &b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.expected;
  ++moved;
}
inline void mbarrier_init(u32 at, int arrivals) { barriers[at] = {arrivals, arrivals, 0, 0}; }
inline void mbarrier_arrive(u32 at) {
  --barriers.at(at).pending;
  completes(barriers.at(at));
}
inline void mbarrier_arrive_expect_tx(u32 at, int bytes) {
  barriers.at(at).bytes += bytes;
  mbarrier_arrive(at);
}
inline void mbarrier_wait(u32 at, int parity) {
  wait_until([&] { return barriers.at(at).phase != parity; });
}
struct alignas(64) Map {  // test_latent_on_host.py fills it in
  const char *from;
  int sizes[4], strides[3], box[4];  // in numbers of 16 bits
  char unused[128 - 8 - 44];
};
inline void tma_load_4d(u32 to, const Map *map, int x, int y, int z, int w, u32 barrier) {
  const int begin[4] = {x, y, z, w};
  int count = 0;
  for (int d = 0; d < map->box[3]; ++d)
    for (int c = 0; c < map->box[2]; ++c)
      for (int b = 0; b < map->box[1]; ++b)
        for (int a = 0; a < map->box[0]; ++a, ++count) {
          const int at[4] = {begin[0] + a, begin[1] + b, begin[2] + c, begin[3] + d};
          bool inside = true;
          i64 from = at[0];
          for (int i = 0; i < 4; ++i) inside &= 0 <= at[i] && at[i] < map->sizes[i];
          for (int i = 0; i < 3; ++i) from += (i64)at[i + 1] * map->strides[i];
          u16 number = 0;
          if (inside) memcpy(&number, map->from + from * 2, 2);
          const u32 place = to + count * 2;
          memcpy(memory + (place ^ (place >> 7 & 7) << 4), &number, 2);
        }
  barriers.at(barrier).bytes -= count * 2;
  completes(barriers.at(barrier));
}
inline void prefetch_tensormap(const void *) {}
inline void prefetch_l2(const char *) {}
inline void cp_async_or_zero(u32 to, const char *from, bool real) {
  if (real) memcpy(memory + to, from, 16);
  else memset(memory + to, 0, 16);
}
inline void cp_async_commit() {}
template <int N> void cp_async_wait() {}
inline void fence_mbarrier_init() {}
inline void fence_async() {}
inline void wait_for_kernels_ahead() {}
inline void let_next_kernel_begin() {}
template <int N> void take_registers() {}
template <int N> void give_registers() {}
inline int load_l2(const int *p) { return *p; }
inline float load_l2(const float *p) { return *p; }
inline float4 load_l2(const float4 *p) { return *p; }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }

// ------------------------------------------------------------------------------------------------ numbers
inline float exp2_(float x) { return std::exp2(x); }
inline float log2_(float x) { return std::log2(x); }
inline float number(u16 x) {
  if (HALF) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return (float)y;
  }
  const u32 bits = (u32)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
inline u16 rounded(float x) {
  u16 r;
  if (HALF) {
    const _Float16 y = (_Float16)x;
    memcpy(&r, &y, 2);
    return r;
  }
  u32 bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
template <bool> u32 pack(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }

// ----------------------------------------------------------------------------------------------- matrices
inline u32 movmatrix_trans(u32 x) {
  const u64 *all = exchange(x);
  const int row = current % 32 / 4, column = current % 4 * 2;
  u32 y = 0;
  for (int i = 0; i < 2; ++i) y |= (u32)(u16)(all[(column + i) * 4 + row / 2] >> row % 2 * 16) << i * 16;
  return y;
}
template <int COUNT> void stmatrix_trans(u32 at, const u32 (&x)[COUNT]) {
  const int lane = current % 32, matrix = lane / 8, row = lane % 8;
  for (int m = 0; m < COUNT; ++m) {
    const u64 *all = exchange(x[m]);
    if (matrix == m)
      for (int k = 0; k < 8; ++k) {
        const u16 value = (u16)(all[k * 4 + row / 2] >> row % 2 * 16);
        memcpy(memory + at + k * 2, &value, 2);
      }
  }
}
inline void stmatrix_x4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) { stmatrix_trans(at, {a, b, c, d}); }
inline void stmatrix_x2_trans(u32 at, u32 a, u32 b) { stmatrix_trans(at, {a, b}); }

// Descriptors as the PTX ISA has them: begin, bytes between groups of 8 lines; 128-byte swizzle.
inline u64 operand(u32 at, int groups) { return (u64)at | (u64)groups << 32; }
inline float element(u64 of, bool turned, int row, int k) {
  const u32 begin = (u32)of, groups = (u32)(of >> 32);
  const u32 at = turned ? begin + k / 8 * groups + k % 8 * 128 + row * 2
                        : begin + row / 8 * groups + row % 8 * 128 + k * 2;
  u16 x;
  memcpy(&x, memory + (at ^ (at >> 7 & 7) << 4), 2);
  return number(x);
}
template <int TURNED, int ADD = 1, int J> void product16(float (&d)[J][4], u64 a, u64 b) {
  threads[current].open.push_back({d[0], a, b, J, TURNED == 1, ADD == 1});
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  threads[current].groups.push_back(std::move(threads[current].open));
  threads[current].open.clear();
}
inline Meeting warpgroups[4];
template <int N> void wgmma_wait() {
  // no warp of the warpgroup has its results before all have asked
  meet(warpgroups[current / 128], 128);
  Thread &t = threads[current];
  while ((int)t.groups.size() > N) {
    for (const Product &p : t.groups.front()) {
      const int row = current % 128 / 32 * 16 + current % 32 / 4;
      float of_a[2][16];
      for (int r = 0; r < 2; ++r)
        for (int k = 0; k < 16; ++k) of_a[r][k] = element(p.a, p.turned, row + r * 8, k);
      for (int j = 0; j < p.columns; ++j)
        for (int e = 0; e < 2; ++e)
          for (int r = 0; r < 2; ++r) {
            float sum = p.add ? p.d[j * 4 + r * 2 + e] : 0.f;
            for (int k = 0; k < 16; ++k)
              sum += of_a[r][k] * element(p.b, false, j * 8 + current % 4 * 2 + e, k);
            p.d[j * 4 + r * 2 + e] = sum;
          }
    }
    t.groups.erase(t.groups.begin());
  }
}

// ------------------------------------------------------------------------------------------------- launch
template <class F> int launch(int ctas, int count, unsigned seed, F kernel) {
  static F *now;
  now = &kernel;
  std::mt19937 chance(seed);
  threads.resize(count);
  grid.x = ctas;
  for (block.x = 0; block.x < ctas; ++block.x) {
    memset(memory, 0xff, sizeof memory);  // NaN
    barriers.clear();
    for (Meeting &m : warp_meetings) m = {};
    for (Meeting &m : warpgroups) m = {};
    for (Meeting &m : named) m = {};
    memset(turns, 0, sizeof turns);
    for (Thread &t : threads) {
      t.stack.resize(1 << 17);
      t.ended = false;
      t.groups.clear();
      t.open.clear();
      getcontext(&t.context);
      t.context.uc_stack.ss_sp = t.stack.data();
      t.context.uc_stack.ss_size = t.stack.size();
      t.context.uc_link = &scheduler;
      void (*body)() = [] {
        (*now)();
        threads[current].ended = true;
        ++moved;
      };
      makecontext(&t.context, body, 0);
    }
    std::vector<int> order(count);
    for (int i = 0; i < count; ++i) order[i] = i;
    for (int left = count, before = -1; left;) {
      if (moved == before) {
        printf("CTA %d of %d: nobody moves any more\n", block.x, ctas);
        return 1;
      }
      before = moved;
      std::shuffle(order.begin(), order.end(), chance);
      for (const int i : order) {
        if (threads[i].ended) continue;
        current = i;
        swapcontext(&scheduler, &threads[i].context);
        left -= threads[i].ended;
      }
    }
  }
  return 0;
}
