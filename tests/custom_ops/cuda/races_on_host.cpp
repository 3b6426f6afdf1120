// Races of a kernel that runs on the host (hopper_on_host.h): accesses that no barrier orders, whatever order
// the threads happened to take. The kernel is compiled with -fsanitize=thread, whose calls at each load and
// store end here; its own library is not linked, since neither lanes nor the copy engine are threads to it.
//
// A lane has a vector clock: what of each agent it knows to have happened. Agents are lanes, and what acts
// for them (Proxy). `fenced` is what a fence.proxy.async stands behind: of what lanes wrote, products and bulk
// copies see no more. Shuffles, products and matrix loads of a warp order nothing. Of each two bytes the last
// write is kept, and the reads since. What the kernels ahead wrote has an agent, too: AHEAD.
#include "races_on_host.h"

#include <dlfcn.h>

#include <memory>
#include <set>
#include <string>

#include "hopper_on_host.h"

extern "C" char __start_shared_memory[] __attribute__((weak)), __stop_shared_memory[] __attribute__((weak));

namespace races {
typedef std::vector<u32> Times;  // by agent
struct Clock {
  Times all, fenced;
  std::vector<std::shared_ptr<Clock>> before;  // of other clusters, which semaphores told of
};
struct Edge {
  Clock gathered, released;
  u32 phase = 0;
  int bulk = -1;  // the agent of copies that tell this barrier
};
struct Access {
  u32 epoch = 0, agent = 0, cluster = 0, site = 0;
  Proxy proxy = LANE;
  bool atomic = false;
};
struct Place {
  Access write;
  std::vector<Access> reads;
};
struct Range {
  std::string name;
  char *begin;
  std::vector<Place> places;
};
struct Lane {
  Clock clock;
  u32 groups[5] = {};  // committed, by proxy
};
constexpr Proxy AHEAD = (Proxy)5;

constexpr size_t SHARED_RANGES = 2;  // dynamic shared memory, arrays in it; then tensors
static std::vector<Range> ranges(SHARED_RANGES);
static std::vector<Lane> lanes;
static std::map<const void *, Edge> edges;
static std::map<const void *, std::vector<std::shared_ptr<Clock>>> semaphores;
static std::map<std::pair<int, int>, u32> agents;
static std::set<std::string> found;
static u32 cluster, next_agent;
static bool running, is_quiet;
static Proxy acting;
static const void *acting_for;
static struct {
  char *at, old[16];
  int bytes;
  std::string text;
} doubtful;  // two writes, of the same number perhaps

static u32 &of(Times &t, u32 agent) {
  if (t.size() <= agent) t.resize(agent + 1);
  return t[agent];
}
static void join(Times &to, const Times &from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = max(to[i], from[i]);
}
static void join(Clock &to, const Clock &from) {
  join(to.all, from.all);
  join(to.fenced, from.fenced);
  if (to.before.size() < from.before.size()) to.before.resize(from.before.size());
  for (size_t i = 0; i < from.before.size(); ++i)
    if (from.before[i]) to.before[i] = from.before[i];
}
static u32 agent_of(Proxy proxy, int index) {
  const auto [at, is_new] = agents.insert({{proxy, index}, next_agent});
  next_agent += is_new;
  return at->second;
}
static u32 agent_here(Proxy proxy) { return agent_of(proxy, proxy == PRODUCT ? current / 32 : current); }
static void settle() {
  const int bytes = doubtful.bytes;
  doubtful.bytes = 0;
  if (bytes && memcmp(doubtful.at, doubtful.old, bytes)) found.insert(doubtful.text);
}
static Clock &here() {
  settle();
  return lanes[current].clock;
}

void begin(int ctas, int first, int threads) {
  running = true;
  cluster = first;
  edges.clear();
  agents.clear();
  lanes.assign(ctas * threads, {});
  next_agent = lanes.size();
  for (size_t i = 0; i < lanes.size(); ++i) of(lanes[i].clock.all, i) = 1;
  ranges[0] = {"shared memory", memories, std::vector<Place>(ctas * CTA_BYTES / 2)};
  const size_t bytes = __stop_shared_memory - __start_shared_memory;
  ranges[1] = {"shared arrays", __start_shared_memory, std::vector<Place>((bytes + 1) / 2)};
}
void end() {
  settle();
  running = false;
  const u32 ahead = agent_of(AHEAD, 0);
  for (size_t i = 0, waits = 0; i < lanes.size(); ++i) {
    waits += of(lanes[i].clock.all, ahead);
    if ((i + 1) % cta_threads) continue;
    if (!waits) found.insert("a CTA ends before the kernels ahead");
    waits = 0;
  }
}
void arrive(const void *meeting) {
  Clock &mine = here();
  join(edges[meeting].gathered, mine);
  ++mine.all[current];
}
void complete(const void *meeting) {
  Edge &e = edges[meeting];
  ++e.phase;
  if (e.bulk >= 0) of(e.gathered.all, e.bulk) = e.phase;
  e.released = e.gathered;
}
void pass(const void *meeting) { join(here(), edges[meeting].released); }
void count(const void *semaphore) {
  Clock &mine = here();
  auto &told = semaphores[semaphore];
  if (told.size() <= cluster) told.resize(cluster + 1);
  if (told[cluster]) join(mine, Clock(*told[cluster]));
  join(mine, Clock{{}, {}, told});
  told = mine.before;
  told.resize(max(told.size(), (size_t)cluster + 1));
  told[cluster] = std::make_shared<Clock>(Clock{mine.all, mine.fenced, {}});
  ++mine.all[current];
}
void fence() {
  Clock &mine = here();
  mine.fenced = mine.all;
  ++mine.all[current];
}
void commit(Proxy proxy) { ++lanes[current].groups[proxy]; }
void wait(Proxy proxy, int groups) {
  u32 &known = of(here().all, agent_here(proxy));
  known = max(known, (u32)max((int)lanes[current].groups[proxy] - groups, 0));
}
void waited_for_kernels_ahead() { of(here().all, agent_of(AHEAD, 0)) = 1; }
void act(Proxy proxy, const void *barrier) {
  acting = proxy;
  acting_for = barrier;
}
void quiet(bool is) { is_quiet = is; }

static bool is_async(Proxy p) { return p >= PRODUCT; }
static bool is_ordered(const Access &a, const Access &now, bool is_write) {
  if (!a.epoch || (a.atomic && now.atomic)) return true;
  const Clock *known = &lanes[current].clock;
  if (a.cluster != cluster) {
    if (a.cluster >= known->before.size() || !known->before[a.cluster]) return false;
    known = known->before[a.cluster].get();
  }
  const Times &t = is_write && is_async(now.proxy) && !is_async(a.proxy) ? known->fenced : known->all;
  return a.agent < t.size() && t[a.agent] >= a.epoch;
}
static std::string said(const Access &a, bool writes) {
  static const char *by[] = {"a lane", "cp.async", "a product", "a copy out", "a bulk copy"};
  char text[100];
  snprintf(text, sizeof text, "%s by %s @%x;", writes ? "write" : "read", by[a.proxy], a.site);
  return text;
}
static Access access_here(bool atomic, const void *site) {
  static Dl_info library;
  if (!library.dli_fbase) dladdr((void *)&settle, &library);
  Access now = {lanes[current].clock.all[current], (u32)current, cluster,
                (u32)((char *)site - (char *)library.dli_fbase), acting, atomic};
  if (acting == BULK) {
    Edge &e = edges[acting_for];
    if (e.bulk < 0) e.bulk = agent_of(BULK, (int)((char *)acting_for - memories));
    now.agent = e.bulk, now.epoch = e.phase + 1;
  } else if (acting != LANE) {
    now.agent = agent_here(acting), now.epoch = lanes[current].groups[acting] + 1;
  }
  return now;
}
static void access(char *at, int bytes, bool writes, bool atomic, const void *site) {
  settle();
  if (!running || is_quiet) return;
  for (size_t r = 0; r < ranges.size(); ++r) {
    Range &range = ranges[r];
    if (at < range.begin || at >= range.begin + range.places.size() * 2) continue;
    const Access now = access_here(atomic, site);
    if (r >= SHARED_RANGES && !of(lanes[current].clock.all, agent_of(AHEAD, 0)))
      found.insert((writes ? "early write: " : "early read: ") + range.name);
    std::string race;
    bool of_writes = false;
    for (size_t i = (at - range.begin) / 2; i <= (size_t)(at + bytes - 1 - range.begin) / 2; ++i) {
      Place &place = range.places[i];
      const auto check = [&](const Access &a, bool is_write) {
        if (!race.empty() || is_ordered(a, now, is_write)) return;
        race = range.name + ": " + said(a, is_write) + ", then " + said(now, writes);
        of_writes = is_write && writes;
      };
      check(place.write, true);
      if (writes) {
        for (const Access &a : place.reads) check(a, false);
        place.write = now;
        place.reads.clear();
        continue;
      }
      // a write behind this read is behind all that this read is behind, if a lane reads
      std::erase_if(place.reads, [&](const Access &a) {
        return acting == LANE ? is_ordered(a, now, false) : a.agent == now.agent && a.cluster == cluster;
      });
      place.reads.push_back(now);
    }
    if (of_writes && acting == LANE && bytes <= 16 && !found.count(race)) {
      doubtful.at = at, doubtful.bytes = bytes, doubtful.text = race;
      memcpy(doubtful.old, at, bytes);
    } else if (!race.empty()) {
      found.insert(race);
    }
    return;
  }
}
void touch(const void *at, int bytes, bool writes, bool atomic) {
  access((char *)at, bytes, writes, atomic, __builtin_return_address(0));
}
}  // namespace races

extern "C" {
void races_watch(const char *name, char *begin, i64 bytes) {
  races::ranges.push_back({name, begin, std::vector<races::Place>((bytes + 1) / 2)});
}
const char *races_found() {
  static std::string text;
  text.clear();
  for (const std::string &f : races::found) text += f + "\n";
  races::found.clear();
  races::ranges.resize(races::SHARED_RANGES);
  races::semaphores.clear();
  return text.c_str();
}
#define HERE __builtin_return_address(0)
#define CALLS(kind, writes)                                                                        \
  void __tsan_##kind##1(char *at) { races::access(at, 1, writes, false, HERE); }                   \
  void __tsan_##kind##2(char *at) { races::access(at, 2, writes, false, HERE); }                   \
  void __tsan_##kind##4(char *at) { races::access(at, 4, writes, false, HERE); }                   \
  void __tsan_##kind##8(char *at) { races::access(at, 8, writes, false, HERE); }                   \
  void __tsan_##kind##16(char *at) { races::access(at, 16, writes, false, HERE); }                 \
  void __tsan_##kind##_range(char *at, long bytes) { races::access(at, bytes, writes, false, HERE); }
CALLS(read, false) CALLS(write, true) CALLS(unaligned_read, false) CALLS(unaligned_write, true)
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
}
