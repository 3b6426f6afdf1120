"""The line of prefill tiles (prefill_scheduler.cuh), compiled for the host: every tile once, longest first,
against a model that lists them all; and whether all CTAs have work to the end."""

import heapq
import itertools
from pathlib import Path

import pytest
import torch
from cuda_sources import HostProgram, needs_gxx
from specialisations import specialisation

from torchpaged.custom_ops.attention.cuda import prefill_shape as prefill
from torchpaged.custom_ops.attention.mask import Mask

KEYS = 128
pytestmark = needs_gxx

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "prefill_scheduler.cuh"
// arguments: requests, token rows, then query starts (requests + 1), then lengths
int main(int argc, char **argv) {
  const int requests = atoi(argv[1]), tokens = atoi(argv[2]), stride = 1;
  int starts[4096], lengths[4096];
  for (int i = 0; i <= requests; ++i) starts[i] = atoi(argv[3 + i]);
  for (int i = 0; i < requests; ++i) lengths[i] = atoi(argv[4 + requests + i]);
  TileScheduler scheduler;
  static Bands bands;
  scheduler.open(starts, lengths, requests, tokens, 132, &bands);
  printf("%d %d %d %d %d\\n", scheduler.total(), scheduler.heads, scheduler.owner, scheduler.live_total(),
         scheduler.cut_tiles * NUM_KV_HEADS);
  Cursor cursor = {0, scheduler.top};
  for (int ticket = 0; ticket < scheduler.total(); ticket += stride) {
    const WorkTile t = scheduler.find(ticket, cursor);
    const int level = t.r.level(t.index);
    printf("%d %d %d %d ", t.request, t.head, t.index, t.split());
    printf("%d %d %d ", t.r.start, t.r.query_len, t.r.seq_len);
    printf("%d %d ", level, level ? t.r.first_seen(t.index) / TILE_KV : 0);
    printf("%d %d %d\\n", t.splits(), t.splits() > 1 ? t.cut() : -1, t.partial());
  }
}
"""


def build(
    folder: Path,
    tokens: int,
    heads: int,
    causal: bool,
    left: int = -1,
    right: int = -1,
    chunk: int = 0,
    short: int = 0,
    split: bool = False,
    text: str = PROGRAM,
) -> HostProgram:
    config = prefill.prefill_config(
        specialisation(
            group=128 // tokens,
            num_kv_heads=heads,
            causal=causal,
            window_left=left,
            window_right=right,
            chunk_size=chunk,
        ),
        prefill.Mode(short=short, split=split),
    )
    assert (config["TILE_KV"], config["WARPGROUPS"]) == (KEYS, 2), "128 query rows in a tile"
    return HostProgram(folder, text, "prefill.cu", config)


def ranges(
    query_len: int, seq_len: int, tokens: int, causal: bool, left: int, right: int, chunk: int
) -> list[tuple[int, int]]:
    """Per tile the key tiles up to the last key that any of its tokens sees, and the first key tile with a
    visible key (0 if there is none)."""
    found = []
    for first in range(0, query_len, tokens):
        positions = torch.arange(
            seq_len - query_len + first, seq_len - query_len + min(first + tokens, query_len)
        )
        query = positions[:, None]
        seen = Mask(causal, left, right, chunk).sees(query, torch.arange(max(seq_len, 0))) & (query >= 0)
        keys = seen.any(0).nonzero().flatten().tolist()
        found.append((keys[-1] // KEYS + 1, keys[0] // KEYS) if keys else (0, 0))
    return found


BATCHES = {
    "one": ([300], [300], 0),
    "context": ([5, 700], [900, 1000], 0),
    "ragged": ([1, 300, 16, 77, 128, 513, 5], [1, 300, 16, 77, 128, 513, 5], 3),
    "empty": ([5, 0, 17, 40, 0], [0, 30, 17, 23, 0], 50),
    "nothing": ([], [], 7),
    "left padding": ([300, 40, 20], [100, 1, -3], 0),
    "long": ([1000, 100], [40000, 20000], 0),  # 9 tiles of 128 tokens, in 3 parts or more; one head at a time
    "many": ([1 + 37 * i % 211 for i in range(70)], [5 + 53 * i % 401 for i in range(70)], 11),
}


MASKS = {
    "causal": (True, -1, -1, 0),
    "open": (False, -1, -1, 0),
    "window": (True, 200, -1, 0),
    "both": (False, 30, 170, 0),
    "right": (False, -1, 70, 0),
    "chunks": (True, -1, -1, 300),
    "chunks, open": (False, -1, -1, 130),
    "all": (True, 1000, 3, 777),
}


@pytest.mark.slow_cases(
    but=(
        "32-8-0-False-*",
        "128-1-0-False-causal",
        "18-6-0-False-window",
        "32-8-5-False-chunks",
        "18-6-1-False-all",
        "128-1-0-True-all",
        "32-8-5-True-all",
    )
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("tokens", "heads", "short", "split"),
    [
        (32, 8, 0, False),
        (128, 1, 0, False),
        (18, 6, 0, False),
        (32, 8, 5, False),
        (18, 6, 1, False),
        (128, 1, 0, True),
        (32, 8, 5, True),
    ],
)
def test_every_tile_once_and_the_longest_first(
    tmp_path: Path, tokens: int, heads: int, short: int, split: bool, mask: str
) -> None:
    """``short``: requests of up to so many query tokens, and the rows of padding, belong to another launch.
    ``split``: tiles are cut where few see keys."""
    program = build(tmp_path, tokens, heads, *MASKS[mask], short, split)
    for name, (query_lens, seq_lens, padding) in BATCHES.items():
        starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
        numbers = [len(seq_lens), starts[-1] + padding, *starts, *seq_lens]
        text = program(*numbers)
        (total, section, owner, live, cut), *tiles = [
            tuple(map(int, line.split())) for line in text.splitlines()
        ]
        parts, expected = {tile[:3]: tile[9] for tile in tiles}, {}
        for request, (query_len, seq_len) in enumerate(
            zip([*query_lens, padding], [*seq_lens, 0], strict=True)
        ):
            start = [*starts, 0][request] if request < len(query_lens) else starts[-1]
            if short and (request == len(query_lens) or query_len <= short):
                continue
            for index, (level, first) in enumerate(ranges(query_len, seq_len, tokens, *MASKS[mask])):
                for head in range(heads):
                    for part in range(parts[request, head, index]):
                        expected[request, head, index, part] = (start, query_len, seq_len, level, first)
        assert total == len(tiles) == len(expected), name
        assert {tile[:4]: tile[4:9] for tile in tiles} == expected, name
        if expected:
            assert owner == min(request for request, *_ in expected), name
        seeing = [tile for tile in tiles if tile[7]]
        assert tiles[: len(seeing)] == seeing, name
        assert len(seeing) == live, name
        assert all(tile[9] == 1 for tile in tiles[live:]), name
        assert split or not cut, name
        check_parts([tile for tile in seeing if tile[9] > 1], cut)
        per_section = len(seeing) // (heads // section)
        for begin in range(0, len(seeing), per_section or 1):
            order = [tile[7] for tile in seeing[begin : begin + per_section]]
            assert order == sorted(order, reverse=True), name
            assert len({tile[1] for tile in seeing[begin : begin + per_section]}) == section, name


def check_parts(tickets: list[tuple[int, ...]], cut: int) -> None:
    """The merge counts on it: a tile's parts are neighbours, their places and the cut tiles' numbers have no
    gaps, and there is room for all."""
    assert [ticket[11] for ticket in tickets] == list(range(len(tickets)))
    assert len(tickets) <= prefill.CTA_PARTS * 132
    found = [(number, *(len(list(same)),)) for number, same in itertools.groupby(tickets, lambda x: x[10])]
    assert [number for number, _ in found] == list(range(cut))
    for tile, same in itertools.groupby(tickets, lambda x: (*x[:3], x[9])):
        assert [ticket[3] for ticket in same] == list(range(tile[3]))


@pytest.mark.parametrize(
    ("heads", "query_lens", "seq_lens", "mask", "parts"),
    [
        (8, [64], [32768], "causal", 8),
        (8, [32], [32768], "causal", 16),
        (1, [1], [200000], "causal", 132),
        (8, [512], [33000], "causal", 1),
        (8, [64], [500], "causal", 1),
        (8, [64], [3000], "causal", 8),
        (8, [64], [1100], "causal", 3),
        (8, [64], [32768], "window", 1),
        (8, [64] * 8, [8000] * 8, "causal", 1),
        (8, [64] * 4, [8000] * 4, "causal", 2),
        (8, [64, 64, 64], [8000, 0, -3], "causal", 8),
        (8, [96] * 4, [8000] * 4, "causal", 1),  # 96 tiles
        (8, [96] * 4, [40000] * 4, "causal", 4),  # three turns of 128 parts, 79 steps each
        (4, [100] * 6, [50000, 300, 300, 300, 300, 300], "causal", 7),
        (8, [2000], [40000], "causal", 1),  # 504 tiles are enough
    ],
)
def test_how_often_a_tile_is_cut(
    tmp_path: Path, heads: int, query_lens: list[int], seq_lens: list[int], mask: str, parts: int
) -> None:
    """Into as many parts as let all run at once on 132 multiprocessors, none of them too short; rows that see
    nothing do not count. Where tiles differ much, only those are cut that are longer than the parts."""
    program = build(tmp_path, 32, heads, *MASKS[mask], split=True)
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    numbers = [len(seq_lens), starts[-1] + 100, *starts, *seq_lens]
    _, *tiles = (tuple(map(int, line.split())) for line in program(*numbers).splitlines())
    assert max(tile[9] for tile in tiles) == parts
    assert {tile[9] for tile in tiles if tile[7] <= 3} <= {1}


def makespan(tickets: list[int], ctas: int = 132) -> float:
    """Steps until the last CTA ends: each takes the next ticket when it is free."""
    free = [0.0] * ctas
    for steps in tickets:
        heapq.heapreplace(free, free[0] + steps)
    return max(free)


ONE_LONG = [93, 142, 51, 160, 242, 146], [12763, 9251, 55538, 158, 4113, 5773]
TWO_LONG = [200, 261, 98, 57, 121, 147, 130, 354], [2391, 58787, 6097, 887, 738, 9324, 1217, 23700]
SIXTEEN_HEADS = [1365, 159, 559, 1201], [113, 367, 19888, 2466]
EQUAL_CHUNKS = [981] * 8, [306, 46666, 1917, 160, 1955, 130, 32131, 134]


@pytest.mark.parametrize(
    ("tokens", "heads", "split", "chunks", "bound"),
    [
        (32, 4, True, ONE_LONG, 1.3),
        (32, 1, True, TWO_LONG, 1.2),
        (32, 16, False, SIXTEEN_HEADS, 1.05),
        (32, 4, False, EQUAL_CHUNKS, 1.05),
    ],
)
def test_all_multiprocessors_have_work_to_the_end(
    tmp_path: Path, tokens: int, heads: int, split: bool, chunks: tuple[list[int], list[int]], bound: float
) -> None:
    """Chunks over contexts of very different lengths: at most ``bound`` times an equal share of steps."""
    program = build(tmp_path, tokens, heads, *MASKS["causal"], split=split)
    query_lens, contexts = chunks
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    lengths = [query + context for query, context in zip(query_lens, contexts, strict=True)]
    text = program(len(lengths), starts[-1], *starts, *lengths)
    _, *tiles = (tuple(map(int, line.split())) for line in text.splitlines())
    steps = [tile[7] * (tile[3] + 1) // tile[9] - tile[7] * tile[3] // tile[9] for tile in tiles]
    assert makespan(steps) <= bound * sum(steps) / 132


TICKETS = """
#include <cstdio>
#include <cstdlib>
#include "prefill_scheduler.cuh"
// arguments: tickets, early CTAs, late CTAs, seed; in random order each CTA begins, then draws with a tile
int main(int, char **argv) {
  const int total = atoi(argv[1]), early = atoi(argv[2]), late = atoi(argv[3]);
  srand(atoi(argv[4]));
  unsigned counter = 0;
  const Tickets tickets = {&counter, total, early, late};
  static int has[512];
  for (int &x : has) x = -1;  // not begun
  for (int ended = 0; ended < early + late;) {
    const int cta = rand() % (early + late);
    if (has[cta] == -2) continue;
    if (has[cta] == -1) {
      has[cta] = tickets.begin(cta, cta >= early);
    } else if (has[cta] < total) {
      printf("%d\\n", has[cta]);
      has[cta] = tickets.draw();
    } else {
      has[cta] = -2;
      ++ended;
    }
  }
  printf("%u\\n", counter);
}
"""


def test_every_ticket_is_given_once_and_the_counter_returns_to_zero(tmp_path: Path) -> None:
    """In any order of arrival; with CTAs of a second launch and without, more or fewer of them than tiles."""
    program = build(tmp_path, 32, 8, causal=True, text=TICKETS)
    cases = itertools.product((0, 1, 9, 66, 67, 131, 132, 133, 500), (1, 66, 132), (0, 3, 66))
    for seed, (total, early, late) in enumerate(cases):
        *given, counter = map(int, program(total, early, late, seed).split())
        assert sorted(given) == list(range(total)), (total, early, late)
        assert counter == 0, (total, early, late)


def test_a_section_of_heads_fits_l2(tmp_path: Path) -> None:
    """Of whole prompts; where tiles are so few that the last section's first would end last, all heads are
    one section."""
    program = build(tmp_path, 32, 8, causal=True)
    for length, heads in ((100, 8), (8192, 8), (16384, 4), (32768, 2), (65536, 1), (200000, 1)):
        assert int(program(1, length, 0, length, length).split(None, 2)[1]) == heads, length
        assert int(program(1, 64, 0, 64, length).split(None, 2)[1]) == 8, length
    program = build(tmp_path, 32, 8, causal=True, short=1)
    found = int(program(2, 8193, 0, 1, 8193, 200000, 8192).split(None, 2)[1])
    assert found == 8, "a request of another launch does not count"
