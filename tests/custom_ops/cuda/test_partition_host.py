"""How decode cuts its work (decode_scheduler.cuh, decode_requests.cuh) and where keys lie in shared memory
(decode_params.cuh), compiled for the host and run for every CTA of many batches: a warp is 32 coroutines that
meet at its shuffles, so that the kernel's own source is what runs."""

import random
from pathlib import Path

import pytest
from cuda_sources import HostProgram, needs_gxx
from specialisations import specialisation

from torchpaged.custom_ops.attention.cuda import specialise

pytestmark = needs_gxx

#: In place of machine.cuh: a warp's instructions, on 32 stacks that take turns. All lanes come to the same
#: instructions in the same order.
MACHINE = """
#pragma once
#include <ucontext.h>
#include <cstdio>
#include <cstdlib>
#define __device__
#define __host__
#define __forceinline__ inline
#define ALL 0xffffffffu
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __clz(int x) { return __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
inline ucontext_t lanes[32], host;
inline char stacks[32][1 << 16];
inline int current, given[2][32], taken[32];
inline int *meet(int x) {  // what all lanes gave
  const int turn = taken[current]++ & 1, lane = current;
  given[turn][lane] = x;
  current = (lane + 1) % 32;
  swapcontext(&lanes[lane], &lanes[current]);
  return given[turn];
}
inline int __shfl_sync(u32, int x, int lane) { return meet(x)[lane & 31]; }
inline int __shfl_up_sync(u32, int x, int step) { const int lane = current; int *all = meet(x); return lane >= step ? all[lane - step] : x; }
inline int __reduce_add_sync(u32, int x) { int *all = meet(x), sum = 0; for (int i = 0; i < 32; ++i) sum += all[i]; return sum; }
inline void __syncwarp() { meet(0); }
inline u32 __ballot_sync(u32, bool x) { int *all = meet(x); u32 bits = 0; for (int i = 0; i < 32; ++i) bits |= (u32)all[i] << i; return bits; }
inline int load_l2(const int *p) { return *p; }
inline int load_and_forget_l1(const int *p) { return *p; }
inline struct { int x; } blockIdx, gridDim;
template <class F> void warp(F f) {  // f(lane), which ends in the same turn for all
  static F *now;
  now = &f;
  void (*body)() = [] {
    const int lane = current;
    (*now)(lane);
    meet(0);
    if (lane < 31) { current = lane + 1; setcontext(&lanes[current]); }
    setcontext(&host);
  };
  static volatile bool done;
  done = false;
  getcontext(&host);
  if (done) return;
  done = true;
  for (int i = 0; i < 32; ++i) {
    taken[i] = 0;
    getcontext(&lanes[i]);
    lanes[i].uc_stack.ss_sp = stacks[i];
    lanes[i].uc_stack.ss_size = sizeof stacks[i];
    makecontext(&lanes[i], body, 0);
  }
  current = 0;
  setcontext(&lanes[0]);
}
"""  # noqa: E501

#: Reads batches "ctas requests starts... lengths..." and walks the runs of all CTAs.
WALK = """
#include "decode_scheduler.cuh"
#include <map>
#include <set>
#include <tuple>
#include <vector>
#define CHECK(x) do { if (!(x)) { printf("batch %d, CTA %d: %s\\n", batch, cta, #x); exit(1); } } while (0)
struct Found : Run { Cursor c; bool works; };
int numbers[Requests::NUMBERS + 1];
Found find(const Params &p, int lane) {  // as paged_decode does
  Found run = {schedule(p, lane, numbers)};
  run.works = run.unit < run.unit_end;
  if (run.works) run.c = run.cursor();
  return run;
}
struct Piece { int team, begin, end, first, count; bool whole; };
int main() {
  int ctas, reqs, batch = 0, moved = 0;
  for (; scanf("%d %d", &ctas, &reqs) == 2; ++batch) {
    std::vector<int> starts(reqs + 1), lens(reqs);
    for (int &x : starts) scanf("%d", &x);
    for (int &x : lens) scanf("%d", &x);
    Params p = {};
    p.starts = starts.data(), p.seq_lens = lens.data(), p.num_reqs = reqs;
    std::map<std::pair<int, int>, std::vector<Piece>> pairs;
    bool moves = false;
    int total = 0, busy = 0, cta = -1, shortest_run = 1 << 30, longest_run = 0;
    std::vector<int> tiles(reqs);
    for (int r = 0; r < reqs; ++r) {
      Request x;
      x.load(p, r);
      total += (tiles[r] = x.num_tiles) * LINES;
      busy += x.num_tiles > 0;
    }
    for (cta = 0; cta < ctas; ++cta) {
      static Found run[32];
      blockIdx.x = cta, gridDim.x = ctas;
      warp([&](int lane) { run[lane] = find(p, lane); });
      for (int i = 0; i < 32; ++i) {  // what barriers rely on
        CHECK(run[i].works == run[0].works && run[i].busy == busy && run[i].partition.total == total && run[i].used == starts[reqs]);
        CHECK(run[i].partition.teams == run[0].partition.teams && run[i].partition.border == run[0].partition.border && run[i].unit == run[0].unit && run[i].unit_end == run[0].unit_end);
        if (!run[0].works) continue;
        CHECK(run[i].c.request == run[0].c.request && run[i].c.pair == run[0].c.pair && run[i].c.tile == run[0].c.tile);
        CHECK(run[i].moves == run[0].moves && run[i].c.r.start == run[0].c.r.start && run[i].c.r.end == run[0].c.r.end && run[i].c.r.low == run[0].c.r.low);
      }
      if (!run[0].works) continue;
      moves = NEAR > 0 && run[0].moves;
      Cursor c = run[0].c;
      LoadCursor ahead(p, c);
      const int unit_end = run[0].unit_end;
      int unit = run[0].unit;
      CHECK(unit < unit_end && unit_end <= total);
      longest_run = max(longest_run, unit_end - unit);
      shortest_run = min(shortest_run, unit_end - unit);
      while (true) {
        CHECK(c.request < reqs && c.pair < PAIRS && c.pair % TEAM == cta % TEAM && c.tile < tiles[c.request] && c.r.start == starts[c.request]);
        CHECK(c.r.query_len == starts[c.request + 1] - c.r.start && c.r.seq_len == lens[c.request] && c.r.num_tiles == tiles[c.request]);
        Splits splits = {};
        splits.find(c, unit, unit_end, run[0].partition, NEAR > 0 && run[0].moves ? NEAR : 0);
        const int end = min(c.tile + unit_end - unit, c.r.num_tiles);
        pairs[{c.request, c.pair}].push_back({Run::team(), c.tile, end, splits.first, splits.count, splits.whole});
        unit += end - c.tile;
        if (unit == unit_end) break;
        c.next_pair(p);
        ahead.next_pair(p);  // the cursor of the copies takes the same way, a request ahead in its reads
        CHECK(ahead.request == c.request && ahead.pair == c.pair && ahead.tile == c.tile && ahead.r.end == c.r.end && ahead.r.start == c.r.start);
      }
    }
    for (int r = 0; r < reqs; ++r)
      for (int pair = 0; pair < PAIRS; ++pair) {
        const auto &pieces = pairs[{r, pair}];  // in the order of teams
        int at = 0;
        if (moves && pieces.size() > 1) CHECK(pieces[0].end > NEAR && tiles[r] - pieces.back().begin > NEAR);
        for (size_t i = 0; i < pieces.size(); ++i) {
          const Piece &x = pieces[i];
          CHECK(x.begin == at && x.whole == (pieces.size() == 1));
          CHECK(x.whole || (x.first == pieces[0].team && x.count == (int)pieces.size() && x.team == x.first + (int)i));
          at = x.end;
        }
        CHECK(at == tiles[r]);
      }
    if (longest_run) CHECK(longest_run - shortest_run <= 2 + 2 * LATE_TILES + (moves ? 4 * NEAR : 0));
    moved += moves;
  }
  printf("%d %d\\n", batch, moved);
}
"""  # noqa: E501

#: Every split is in one group, whose counter holds its splits; what groups make lies where nothing else does.
GROUPS = """
#include "decode_scheduler.cuh"
#include <set>
#define CHECK(x) do { if (!(x)) { printf("%d splits: %s\\n", splits, #x); exit(1); } } while (0)
int main() {
  for (int splits = SplitGroups::FROM; splits <= 600; ++splits) {
    const SplitGroups groups(splits);
    CHECK(groups.number > 1 && groups.number < 16 && groups.number * groups.bits <= SplitGroups::DONE);
    int split = 0;
    std::set<int> keepers;
    for (int group = 0; group < groups.number; ++group) {
      CHECK(groups.begin(group) == split && groups.size(group) >= 2 && groups.size(group) < 1 << groups.bits);
      for (int i = 0; i < groups.size(group); ++i) CHECK(groups.of(split++) == group);
      const int keeper = groups.keeper(group);
      CHECK(keeper > 0 && keeper < splits - 1 && groups.of(keeper) == group && keepers.insert(keeper).second);
    }
    CHECK(split == splits);
  }
}
"""

#: `copy_rows` puts chunk `column` of a row at row * line + (column ^ swizzle(row)) * 16.
SWIZZLE = """
#include "decode_params.cuh"
#include <set>
#define CHECK(x) do { if (!(x)) { printf("%d chunks: %s\\n", CHUNKS, #x); exit(1); } } while (0)
template <int CHUNKS> void check() {
  constexpr int PADDED = padded(CHUNKS);
  CHECK(PADDED >= CHUNKS && (PADDED % 8 == 0 || 8 % PADDED == 0));
  std::set<u32> used;
  for (int row = 0; row < 32; ++row)
    for (int column = 0; column < CHUNKS; ++column) {
      const u32 at = row * PADDED * 16 + (column ^ swizzle<PADDED>(row)) * 16;
      CHECK(at < 32u * PADDED * 16 && used.insert(at).second);
      CHECK(at == chunk_pair<PADDED>(row * PADDED * 16, (u32)(column % 2 ^ swizzle<PADDED>(row)) * 16, column / 2));
    }
  for (int column = 0; column < CHUNKS; ++column)
    for (int row = 0; row < 32; row += 8) {  // the 8 rows of an ldmatrix lie in 8 different groups of banks
      std::set<u32> banks;
      for (int i = 0; i < 8; ++i) banks.insert(((row + i) * PADDED + (column ^ swizzle<PADDED>(row + i))) % 8);
      CHECK(banks.size() == 8);
    }
}
int main() {
  check<1>(), check<2>(), check<3>(), check<4>(), check<6>(), check<8>(), check<10>(), check<12>(), check<14>(), check<16>();
  check<20>(), check<24>(), check<32>();
}
"""  # noqa: E501


def build(folder: Path, program: str, **constants: int) -> HostProgram:
    """``program`` with the kernel's headers and the machine above."""
    config, _ = specialise.decode_config(specialisation(), 1, 64, early=True, sms=132, shared_per_sm=233472)
    cut = {"WARPS": 4, "WARP_KEYS": 16, "STAGES": 3, "TEAM": 8, "CLUSTER": 1, "MIN_TILES": 2}
    values = {name: config[name] for name in config.table.kinds} | cut | constants
    options = ("-Wall", "-Wno-unknown-pragmas", "-Wno-unused")
    headers = {"machine.cuh": MACHINE}
    return HostProgram(folder, program, "decode.cu", config.table.config(values), headers, options)


def batches(seed: int) -> list[tuple[list[int], list[int]]]:
    """Query and key lengths: few and many requests, equal, skewed, short, empty, padded ones."""
    source = random.Random(seed)
    plain = [
        [1],
        [64],
        [65],
        [2048],
        [102400] * 2,
        [65536] + [200] * 63,
        [128] * 128,
        [1024] * 256,
        [4096] * 64,
        [1] * 7,
        [16] * 300,
        [300] * 33,
        [131072] + [512] * 127,
        [0, 0, 77],
        [0] * 5,
        [5000, 0, 0, 0, 3],
        [63, 64, 65] * 50,
        [0] * 40 + [900] + [0] * 90,
        [7000] * 129,
    ]
    drawn = [
        [int(source.lognormvariate(5.5, 1.5)) for _ in range(source.choice((1, 3, 16, 40, 130, 270)))]
        for _ in range(12)
    ]
    made = [([1] * len(lens), lens) for lens in plain + drawn]
    for lens in drawn:  # requests without queries, longer queries, lengths below them
        made.append(
            (
                [source.choice((0, 1, 1, 2, 5)) for _ in lens],
                [source.choice((0, -3, 1, n, n, n)) for n in lens],
            )
        )
    return made


@pytest.mark.slow_cases(
    but=(
        "{'TEAM': 2, 'QUERY_LEN': 4, 'CHUNK': 256, 'GROUP': 2}",
        "{'TEAM': 1, 'CLUSTER': 2, 'WARPS': 8, 'MIN_TILES': 1}",
    )
)
@pytest.mark.parametrize(
    "constants",
    [
        {"ONE_WARP_SCHEDULES": 1},
        {"TEAM": 1, "WARPS": 8, "MIN_TILES": 1},
        {"TEAM": 4, "WARPS": 3, "WARP_KEYS": 32, "STAGES": 2, "ONE_WARP_SCHEDULES": 1, "ASKED": 4},
        {"TEAM": 1, "CLUSTER": 2, "WARPS": 8, "MIN_TILES": 1},
        {
            "NUM_KV_HEADS": 1,
            "TEAM": 1,
            "WARPS": 8,
            "MIN_TILES": 1,
            "WINDOW_LEFT": 500,
            "ONE_WARP_SCHEDULES": 1,
        },
        {"TEAM": 2, "QUERY_LEN": 4, "CHUNK": 256, "GROUP": 2},
        {"NEAR": 1},
        {"NEAR": 1, "STAGES": 2, "ONE_WARP_SCHEDULES": 1, "ASKED": 4},
        {"NEAR": 2, "TEAM": 1, "WARPS": 3, "WARP_KEYS": 32, "ONE_WARP_SCHEDULES": 1, "ASKED": 8},
    ],
    ids=str,
)
def test_every_tile_has_one_owner_and_sharers_know_each_other(
    tmp_path: Path, constants: dict[str, int]
) -> None:
    program, text, count = build(tmp_path, WALK, **constants), "", 0
    for ctas in (264, 9):
        for query_lens, seq_lens in batches(len(constants) + ctas):
            if "ONE_WARP_SCHEDULES" not in constants and len(seq_lens) > 64:  # such a warp holds no more
                continue
            starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
            text += (
                " ".join(
                    map(str, (ctas - ctas % constants.get("CLUSTER", 1), len(seq_lens), *starts, *seq_lens))
                )
                + "\n"
            )
            count += 1
    walked, moved = map(int, program(given=text).split())
    assert walked == count
    assert (moved > count // 8) == ("NEAR" in constants), "batches whose borders move"


def test_groups_of_a_pair_of_many_splits(tmp_path: Path) -> None:
    assert not build(tmp_path, GROUPS)()


def test_keys_in_shared_memory_meet_different_banks(tmp_path: Path) -> None:
    assert not build(tmp_path, SWIZZLE)()
