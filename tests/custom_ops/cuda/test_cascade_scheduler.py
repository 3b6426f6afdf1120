"""How the tiles of shared prefixes are dealt out to CTAs (cascade_scheduler.cuh), compiled for the host:
every step of every tile once, the splits that the merge looks for, and equal work."""

import random

import pytest
import torch
from cuda_sources import HostProgram, needs_gxx
from specialisations import specialisation

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.cascade_call import CascadeCall
from torchpaged.custom_ops.attention.cuda import prefill_shape as prefill

pytestmark = needs_gxx

PROGRAM = """
#include <cstdio>
#include "prefill_scheduler.cuh"
// lines of tiles, CTAs, least and most steps; shares as turn, CTA, tile, from, to, of; parts as tile, part
int main() {
  int tiles, ctas, least, most;
  while (scanf("%d %d %d %d", &tiles, &ctas, &least, &most) == 4) {
    CascadeScheduler cascade;
    cascade.schedule(tiles, ctas, least, most);
    printf("case %d\\n", cascade.splits);
    for (int cta = 0; cta < ctas; ++cta)
      for (int turn = 0; tiles > 0; ++turn) {
        const CascadeSplit s = cascade.split(cta, turn);
        if (s.tile < 0) break;
        printf("s %d %d %d %d %d %d\\n", turn, cta, s.tile, s.from, s.to, s.of);
      }
    for (int tile = 0; tile < tiles; ++tile)
      for (int n = 0; n < cascade.num_splits(tile); ++n) printf("p %d %d\\n", tile, cascade.partial(tile, n));
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> HostProgram:
    config = prefill.prefill_config(specialisation(causal=False), prefill.Mode(split=True, cascade=True))
    return HostProgram(tmp_path_factory.mktemp("splits"), PROGRAM, "prefill.cu", config)


def run(
    program: HostProgram, cases: list[tuple[int, int, int, int]]
) -> list[tuple[int, list[list[int]], list[list[int]]]]:
    """Of each case: splits of each tile, splits of the CTAs, and the partials that the merge looks for."""
    found: list[tuple[int, list[list[int]], list[list[int]]]] = []
    for line in program(given="\n".join(" ".join(map(str, case)) for case in cases)).splitlines():
        kind, *numbers = line.split()
        if kind == "case":
            found.append((int(numbers[0]), [], []))
        else:
            found[-1][1 if kind == "s" else 2].append(list(map(int, numbers)))
    return found


def test_every_step_once_and_the_merge_finds_each_part(program: HostProgram) -> None:
    rng = random.Random(0)
    cases = [(64, 118, 256, 256), (64, 132, 256, 256), (0, 9, 1 << 23, 0), (1, 1, 1, 1), (3, 120, 7, 90)]
    for _ in range(400):
        ctas = rng.choice((1, 7, 40, 108, 114, 118, 120, 132))
        most = rng.choice((1, 2, 5, 20, 64, 256, 1600))
        least = most if rng.random() < 0.7 else rng.randint(1, most)
        cases.append((rng.randint(1, 3 * ctas), ctas, least, most))
    even = 0
    for (tiles, ctas, least, most), (parts, shares, wanted) in zip(cases, run(program, cases), strict=True):
        even += parts == 0
        assert parts > 0 or least == most
        assert all(turn < prefill.MAX_CTA_SPLITS for turn, *_ in shares), "scratch memory has no more room"
        lengths = [most if least == most else rng.randint(least, most) for _ in range(tiles)]
        seen: list[list[int]] = [[] for _ in range(tiles)]
        units: list[set[int]] = [set() for _ in range(tiles)]
        for turn, cta, tile, begin, end, of in shares:
            seen[tile] += range(lengths[tile] * begin // of, lengths[tile] * end // of)
            units[tile].add(turn * ctas + cta)
        for tile, length in enumerate(lengths):
            assert sorted(seen[tile]) == list(range(length)), (tiles, ctas, least, most)
            assert {unit for at, unit in wanted if at == tile} == units[tile]
        assert len(wanted) == len(shares)
        for cta in {cta for _, cta, *_ in shares}:
            mine = [tile for _, at, tile, *_ in shares if at == cta]
            assert mine == sorted(mine), "tickets of a line rise"
            assert [turn for turn, at, *_ in shares if at == cta] == list(range(len(mine)))
        ends = [tile for *_, tile, _, end, of in shares if end == of]
        assert sorted(ends) == list(range(tiles)), "one part of each tile says what the tile is"
    assert even > 30


@pytest.mark.parametrize(
    ("tiles", "ctas", "steps", "most"),
    [(64, 118, 256, 146), (64, 120, 256, 143), (64, 132, 256, 131), (32, 118, 256, 75), (120, 118, 64, 75)],
)
def test_work_is_shared_out_evenly(
    program: HostProgram, tiles: int, ctas: int, steps: int, most: int
) -> None:
    """The busiest CTA, each of its shares counted as three steps more."""
    ((_, shares, _),) = run(program, [(tiles, ctas, steps, steps)])
    busy = [0] * ctas
    for _, cta, _, begin, end, of in shares:
        busy[cta] += steps * end // of - steps * begin // of + 3
    assert max(busy) <= most


def test_which_calls_take_three_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """By shapes, dtypes and room for parts."""
    from torchpaged.custom_ops.attention.cuda import cascade_attention
    from torchpaged.custom_ops.attention.cuda.paged_attention import Route
    from torchpaged.custom_ops.cuda import gpu

    def route(call: AttentionCall, spec: object) -> Route:  # decode takes tensors on a GPU alone
        return Route("decode" if call.max_query_len <= 2 else "prefill")

    monkeypatch.setattr(cascade_attention, "route", route)
    monkeypatch.setattr(gpu, "capability", lambda index: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda index: 132)

    def reason(
        tokens: int = 256, dim: int = 128, group: int = 4, groups: int = 8, longest: int = 1
    ) -> str | None:
        q, out = (torch.empty(tokens, 8 * group, dim, dtype=torch.bfloat16) for _ in range(2))
        pool = torch.empty(4, 16, 8, dim, dtype=torch.bfloat16)
        table = torch.empty(tokens // longest, 2048, dtype=torch.int32)
        prefix_table, none = torch.empty(groups, 2048, dtype=torch.int32), torch.empty(0)
        own = AttentionCall(q, pool, pool, table, none, none, out, None, max_query_len=longest, scale=0.1)
        return cascade_attention.refuse(CascadeCall(own, prefix_table, none, none, none, none))

    assert reason() is None
    assert reason(dim=64) is None
    assert reason(tokens=512, longest=2) is None
    assert "tiles" in str(reason(tokens=4096))
    assert "suffixes" in str(reason(longest=128))
    assert "no tokens" in str(reason(groups=0))
    assert "width 96" in str(reason(dim=96, group=3))
    assert reason(dim=96) is None
    assert [cascade_attention.prefix_ctas(n) for n in (1, 16, 114, 132)] == [1, 13, 93, 108]
