// The instructions of the decode kernels of states for the host, in place of machine.cuh and bulk.cuh. Copies
// into shared memory happen as late as they may, when their barrier is waited for, and those out of it at
// once: so a barrier that is missing shows as a wrong result.
#pragma once
#include "hopper_on_host.h"

struct Copy { u32 to; const void *from; int bytes; };
inline std::map<u32, Copy> asked;     // by barrier
inline std::map<u32, int> expected;   // bytes, by barrier
inline void mbarrier_init(u32 at, int arrivals) {
  races::touch(memories + at, 8, true);
  expected[at] = arrivals == 1 ? 0 : -1;
}
inline void mbarrier_arrive_expect_tx(u32 at, int bytes) {
  races::touch(memories + at, 8, false);
  races::arrive(memories + at);
  expected.at(at) += bytes;
}
inline void bulk_load(u32 to, const void *from, int bytes, u32 barrier, u64) {
  if (to % 16 || (u64)from % 16 || bytes % 16) abort();
  const races::As copy(races::BULK, memories + barrier);
  races::touch(from, bytes, false);
  races::touch(memories + to, bytes, true);
  asked[barrier] = {to, from, bytes};
}
inline void bulk_prefetch(const void *from, int bytes) {
  if ((u64)from % 16 || bytes % 16) abort();
}
inline void prefetch_l2(const char *) {}
inline void st_cluster(u32 to, float x) { *(float *)(memories + to) = x; }
inline void mbarrier_wait(u32 at, int parity) {
  if (parity) abort();
  races::touch(memories + at, 8, false);
  wait_until([&] { return asked.count(at) && asked[at].bytes == expected.at(at); });
  Copy &c = asked[at];
  if (c.from) {
    memcpy(memories + c.to, c.from, c.bytes);
    races::complete(memories + at);
  }
  c.from = nullptr;
  races::pass(memories + at);
}
inline void bulk_store(void *to, u32 from, int bytes, u64) {
  if (from % 16 || (u64)to % 16 || bytes % 16) abort();
  const races::As copy(races::STORE);
  races::touch(memories + from, bytes, false);
  races::touch(to, bytes, true);
  memcpy(to, memories + from, bytes);
  races::commit(races::STORE);
}
inline void bulk_wait_read() { races::wait(races::STORE, 0); }
inline u64 read_once() { return 0; }
inline u64 read_again() { return 0; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline const bool forgets = [] {
  forget = [] {
    asked.clear();
    expected.clear();
  };
  return true;
}();
