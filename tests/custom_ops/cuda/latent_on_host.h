// The instructions of latent attention for the host, in place of machine.cuh, bulk.cuh, wgmma.cuh and
// latent_instructions.cuh. What is asynchronous happens as late, or as early, as it may: products read their
// operands when they are waited for, copies arrive when they are asked for. So a barrier that is missing
// shows as a wrong result, or as a race (races_on_host.cpp).
#pragma once
#include "hopper_on_host.h"

struct Product {
  float *d;
  u64 a, b;
  int columns;  // eights of them
  bool a_turned, b_turned, add;
  bool kept = false;  // `a` was in registers
  int k = 16;         // 32: of e4m3
  float of_a[2][32] = {};
};
struct Products {  // of a thread
  std::vector<std::vector<Product>> groups;  // committed, not waited for
  std::vector<Product> open;
};
inline Products products[MOST_WARPS * 32];

struct Barrier { int expected, pending, phase; i64 bytes; };
inline std::map<u32, Barrier> barriers;
inline void completes(u32 at) {
  Barrier &b = barriers.at(at);
  if (b.pending || b.bytes) return;
  races::complete(memories + at);
  b.phase ^= 1;
  b.pending = b.expected;
  ++moved;
}
inline void mbarrier_init(u32 at, int arrivals) {
  races::touch(memories + at, 8, true);
  barriers[at] = {arrivals, arrivals, 0, 0};
}
inline void mbarrier_arrive(u32 at) {
  races::touch(memories + at, 8, false);
  races::arrive(memories + at);
  --barriers.at(at).pending;
  completes(at);
}
inline void mbarrier_arrive_behind_copies(u32 at) {
  races::commit(races::COPY);
  races::wait(races::COPY, 0);
  mbarrier_arrive(at);
}
inline void mbarrier_arrive_expect_tx(u32 at, int bytes) {
  barriers.at(at).bytes += bytes;
  mbarrier_arrive(at);
}
inline void mbarrier_wait(u32 at, int parity) {
  races::touch(memories + at, 8, false);
  wait_until([&] { return barriers.at(at).phase != parity; });
  races::pass(memories + at);
}
template <class T> void st_cluster(u32 to, T x) { memcpy(memories + to, &x, sizeof x); }
struct alignas(64) Map {  // test_latent_on_host.py fills it in
  const char *from;
  int sizes[4], strides[3], box[4];  // in numbers of 16 bits
  char unused[128 - 8 - 44];
};
inline void tma_load_4d(u32 to, const Map *map, int x, int y, int z, int w, u32 barrier) {
  const int begin[4] = {x, y, z, w};
  const races::As copy(races::BULK, memories + barrier);
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
          memcpy(memories + (place ^ (place >> 7 & 7) << 4), &number, 2);
        }
  barriers.at(barrier).bytes -= count * 2;
  completes(barrier);
}
inline u64 read_once() { return 0; }
inline u64 read_again() { return 0; }
inline void tma_load_4d(u32 to, const Map *map, int x, int y, int z, int w, u32 barrier, u64) {
  tma_load_4d(to, map, x, y, z, w, barrier);
}
inline void bulk_load(u32 to, const void *from, int bytes, u32 barrier, u64) {
  const races::As copy(races::BULK, memories + barrier);
  races::touch(from, bytes, false);
  races::touch(memories + to, bytes, true);
  memcpy(memories + to, from, bytes);
  barriers.at(barrier).bytes -= bytes;
  completes(barrier);
}
inline void prefetch_tensormap(const void *) {}
inline void prefetch_l2(const char *) {}
// What CTAs of a cluster send each other arrives at once.
inline void st_async(u32 to, const float (&x)[4], u32 barrier) {
  if (to / CTA_BYTES == (u32)cta() || to / CTA_BYTES != barrier / CTA_BYTES) abort();
  const races::As copy(races::BULK, memories + barrier);
  memcpy(memories + to, &x, sizeof x);
  barriers.at(barrier).bytes -= sizeof x;
  completes(barrier);
}
inline float4 load_shared(u32 at) { return *(const float4 *)(memories + at); }
template <int N> void take_registers() {}
template <int N> void give_registers() {}

// ----------------------------------------------------------------------------------------------- matrices
template <int COUNT> void stmatrix_trans(u32 at, const u32 (&x)[COUNT]) {
  const int lane = current % 32, matrix = lane / 8, row = lane % 8;
  for (int m = 0; m < COUNT; ++m) {
    const u64 *all = exchange(x[m]);
    if (matrix == m)
      for (int k = 0; k < 8; ++k) {
        const u16 value = (u16)(all[k * 4 + row / 2] >> row % 2 * 16);
        memcpy(memories + at + k * 2, &value, 2);
      }
  }
}
inline void stmatrix_x4_trans(u32 at, u32 a, u32 b, u32 c, u32 d) { stmatrix_trans(at, {a, b, c, d}); }
inline void stmatrix_x2_trans(u32 at, u32 a, u32 b) { stmatrix_trans(at, {a, b}); }

// Descriptors as the PTX ISA has them: begin, bytes between groups of 8 lines and between squares of 64
// columns; 128-byte swizzle.
inline u64 operand(u32 at, int groups = 1024, int columns = 0) {
  return (u64)at | (u64)(groups >> 4) << 32 | (u64)(columns >> 4) << 48;
}
inline u64 behind(u64 operand, int bytes) { return operand + bytes; }
inline u64 blocks(u32 at) { return (u64)at | (u64)0xffff << 48; }  // of 8 x 8, without swizzle
inline u32 place_of(u64 of, bool turned, int row, int k) {
  if (of >> 48 == 0xffff) return (u32)of + row / 8 * 256 + k / 8 * 128 + row % 8 * 16 + k % 8 * 2;
  const u32 groups = (u32)(of >> 32 & 0xffff) << 4, columns = (u32)(of >> 48) << 4,
            begin = (u32)of + (turned ? row / 64 * columns + k / 8 * groups + k % 8 * 128 + row % 64 * 2
                                      : row / 8 * groups + row % 8 * 128 + k * 2);
  return begin ^ (begin >> 7 & 7) << 4;
}
inline u32 place_of_byte(u64 of, int row, int k) {
  const u32 at = (u32)of + row / 8 * ((u32)(of >> 32 & 0xffff) << 4) + row % 8 * 128 + k;
  return at ^ (at >> 7 & 7) << 4;
}
inline float element(u64 of, bool turned, int row, int k) {
  return number<HALF>(half_at(place_of(of, turned, row, k)));
}
// A product is asked for: it may read from now on until it is waited for.
inline void ask(const Product &p) {
#ifdef RACES
  const races::As product(races::PRODUCT);
  const auto reads = [](u32 at) { races::touch(memories + at, 2, false); };
  const int row = current % cta_threads % 128 / 32 * 16 + current % 32 / 4;
  for (int k = 0; k < p.k; ++k) {
    for (int r = 0; r < 16 && !p.kept; r += 8) reads(place_of(p.a, p.a_turned, row + r, k));
    for (int n = current % 4 * 2; n < p.columns * 8; n += n % 2 ? 7 : 1)
      if (p.k == 16) reads(place_of(p.b, p.b_turned, n, k));
      else if (k % 2 == 0) reads(place_of_byte(p.b, n, k));
  }
#endif
  products[current].open.push_back(p);
}
template <int TURNED, int ADD = 1, int J> void product16(float (&d)[J][4], u64 a, u64 b) {
  ask({d[0], a, b, J, TURNED == 1, false, ADD == 1});
}
template <int ADD> void scores16(float (&d)[32], u64 a, u64 b) {
  ask({d, a, b, 8, false, false, ADD == 1});
}
inline void values16(float (&d)[128], u64 a, u64 b, int) {
  ask({d, a, b, 32, false, true, true});
}
inline void ask_kept(Product made, const u32 (&a)[4]) {
  made.kept = true;
  for (int n = 0; n < 4; ++n) {
    const u64 *all = exchange(a[n]);
    for (int k = 0; k < made.k / 2; ++k) {
      const u32 x = (u32)all[current % 32 / 4 * 4 + k * 8 / made.k];
      made.of_a[n % 2][n / 2 * (made.k / 2) + k] =
          made.k == 16 ? number<HALF>((u16)(x >> k % 2 * 16)) : from_e4m3(x >> k % 4 * 8);
    }
  }
  ask(made);
}
inline void values16(float (&d)[128], const u32 (&a)[4], u64 b, int) {
  ask_kept({d, 0, b, 32, false, true, true}, a);
}
template <int ADD, int J> void product16(float (&d)[J][4], const u32 (&a)[4], u64 b) {
  ask_kept({d[0], 0, b, J, false, false, ADD == 1}, a);
}
template <int ADD, int J> void product32(float (&d)[J][4], const u32 (&a)[4], u64 b) {
  ask_kept({d[0], 0, b, J, false, false, ADD == 1, true, 32}, a);
}
inline void stmatrix_x4(u32 at, const u32 (&x)[4]) {
  const int lane = current % 32;
  for (int m = 0; m < 4; ++m) {
    const u64 *all = exchange(x[m]);
    if (lane / 8 == m)
      for (int k = 0; k < 4; ++k) {
        const u32 pair = (u32)all[lane % 8 * 4 + k];
        memcpy(memories + at + k * 4, &pair, 4);
      }
  }
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  races::commit(races::PRODUCT);
  products[current].groups.push_back(std::move(products[current].open));
  products[current].open.clear();
}
inline Meeting warpgroups[MOST_CTAS * 4];
template <int N> void wgmma_wait() {
  // no warp of the warpgroup has its results before all have asked
  const int thread = current % cta_threads;
  meet(warpgroups[cta() * 4 + thread / 128], 128, false);
  races::wait(races::PRODUCT, N);
  Products &t = products[current];
  while ((int)t.groups.size() > N) {
    const races::Quiet quiet;
    for (const Product &p : t.groups.front()) {
      const int row = thread % 128 / 32 * 16 + thread % 32 / 4;
      float of_a[2][32];
      for (int r = 0; r < 2; ++r)
        for (int k = 0; k < p.k; ++k)
          of_a[r][k] = p.kept ? p.of_a[r][k] : element(p.a, p.a_turned, row + r * 8, k);
      for (int j = 0; j < p.columns; ++j)
        for (int e = 0; e < 2; ++e)
          for (int r = 0; r < 2; ++r) {
            float sum = p.add ? p.d[j * 4 + r * 2 + e] : 0.f;
            for (int k = 0; k < p.k; ++k) {
              const int n = j * 8 + current % 4 * 2 + e;
              sum += of_a[r][k] * (p.k == 16 ? element(p.b, p.b_turned, n, k)
                                             : from_e4m3((unsigned char)memories[place_of_byte(p.b, n, k)]));
            }
            p.d[j * 4 + r * 2 + e] = sum;
          }
    }
    t.groups.erase(t.groups.begin());
  }
  exchange(0);  // what a lane lets go behind the wait, no other lane still reads
}
inline const bool forgets = (forget = [] {
  barriers.clear();
  for (Meeting &m : warpgroups) m = {};
  for (Products &t : products) t = {};
}, true);
