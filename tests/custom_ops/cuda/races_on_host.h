// What races_on_host.cpp is told of a kernel's order. Without RACES nothing is told.
#pragma once

namespace races {
// Who reads and writes in place of the lane that asks: copies of cp.async, a warp's products, copies out of
// shared memory, copies that a barrier is told of.
enum Proxy { LANE, COPY, PRODUCT, STORE, BULK };
#ifdef RACES
#define SHARED_ARRAY static __attribute__((section("shared_memory")))
void begin(int ctas, int first_cta, int threads);  // a cluster
void end();
void arrive(const void *meeting);    // what was done before is seen by those that pass it when it is complete
void complete(const void *meeting);
void pass(const void *meeting);
void count(const void *semaphore);   // both, of CTAs that may be of different clusters
void fence();                        // of proxies
void commit(Proxy proxy);
void wait(Proxy proxy, int groups);  // all but so many
void waited_for_kernels_ahead();
void touch(const void *at, int bytes, bool writes, bool atomic = false);
void act(Proxy proxy, const void *barrier);
void quiet(bool is);
struct As {  // within a scope
  As(Proxy proxy, const void *barrier = nullptr) { act(proxy, barrier); }
  ~As() { act(LANE, nullptr); }
};
struct Quiet {
  Quiet() { quiet(true); }
  ~Quiet() { quiet(false); }
};
#else
#define SHARED_ARRAY static
inline void begin(int, int, int) {}
inline void end() {}
inline void arrive(const void *) {}
inline void complete(const void *) {}
inline void pass(const void *) {}
inline void count(const void *) {}
inline void fence() {}
inline void commit(Proxy) {}
inline void wait(Proxy, int) {}
inline void waited_for_kernels_ahead() {}
inline void touch(const void *, int, bool, bool = false) {}
struct As {
  As(Proxy, const void * = nullptr) {}
};
struct Quiet {};
#endif
}  // namespace races
