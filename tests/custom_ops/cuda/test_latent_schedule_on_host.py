"""Who works on which keys in latent attention for 64 query rows: the schedule's own source on the host, for
drawn lengths. CTAs of a cluster that wait for each other have to agree on it."""

import ctypes
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import kernels_on_host
import pytest
import torch
from cuda_sources import needs_gxx
from kernels_on_host import HostKernel
from op_inputs.latent import latent_tensors, make_latent_batch

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import latent
from torchpaged.custom_ops.mla.cuda.shape import LatentSpec, latent_config
from torchpaged.testing import BatchSpec

pytestmark = needs_gxx
MOST = 64  # segments of a CTA that are told of
#: What each CTA works on: numbers to `p.parts`.
PROBE = """
#include "latent_cut.cuh"
#include "latent_pairs_load.cuh"
extern "C" void probe(const Params p) {
  int group;
  Schedule schedule;
  Place place;
  const Walk first = open_walk<THREADS>(p, (int *)(cta_memory() + SCAN_AT), group, schedule, place);
  int *to = (int *)p.parts + blockIdx.x * (8 + MOST * 3), count = 0;
  if (threadIdx.x) return;
  Walk walk = first;
  for (Segment s; walk.next(s) && count < MOST; ++count) {
    to[8 + count * 3] = s.request;
    to[9 + count * 3] = s.first;
    to[10 + count * 3] = s.last;
  }
  const Cut cut = find_cut(p, schedule, place, group, first.row_tile);
  const int told[8] = {group, first.row_tile, schedule.joined(), count,
                       cut.parts, cut.first_group, cut.behind, cut.apart};
  for (int i = 0; i < 8; ++i) to[i] = told[i];
}
""".replace("MOST", str(MOST))


class Work(NamedTuple):
    """Of a CTA; ``segments``: request, first tile and one past the last."""

    group: int
    row_tile: int
    joined: bool
    segments: list[tuple[int, int, int]]
    parts: int
    first_group: int
    behind: int
    apart: int


class Probe(HostKernel):
    """In place of attention's kernel; what it found is in ``work``."""

    work: list[Work]

    def launch(self, grid: int, threads: int, arguments: ctypes.Structure, *, early: bool) -> None:
        told = torch.zeros(grid, 8 + MOST * 3, dtype=torch.int32)
        arguments.parts = told.data_ptr()
        super().launch(grid, threads, arguments, early=early)
        self.work = []
        for row in told.tolist():
            group, row_tile, joined, count, parts, first_group, behind, apart = row[:8]
            segments = [(row[i], row[i + 1], row[i + 2]) for i in range(8, 8 + 3 * count, 3)]
            self.work.append(Work(group, row_tile, bool(joined), segments, parts, first_group, behind, apart))


def drawn_lengths(rng: random.Random) -> tuple[list[int], list[int]]:
    """Sequence and query lengths of a batch."""
    count = rng.choice((1, 1, 2, 3, 4, 5, 8, 13, 30, 70, 161))
    most = int(2 ** rng.uniform(0, 15 if count < 9 else 11))
    kind = rng.randrange(6)
    lengths = [most if kind == 0 else rng.randint(1, most) for _ in range(count)]
    if kind == 1:  # equally many tiles
        lengths = [max(1, -(-most // 64) * 64 - rng.randrange(64)) for _ in lengths]
    elif kind == 2:
        lengths = [most if i == count // 2 else rng.randint(1, 300) for i in range(count)]
    elif kind == 3:
        lengths = [n if rng.random() < 0.3 else 0 for n in lengths]
    elif kind == 4:
        lengths = [max(1, most >> i % 9) for i in range(count)]
    return lengths, [rng.randint(0, 2) if kind == 5 else 2 for _ in lengths]


def check(work: list[Work], lengths: list[int], rows: list[int], row_tiles: int) -> str:
    """That all keys are worked on once, that CTAs of a cluster meet, and that the merge finds all parts; the
    kind of schedule."""
    assert sorted((w.group, w.row_tile) for w in work) == [
        (g, t) for g in range(len(work) // row_tiles) for t in range(row_tiles)
    ]
    for left, right in zip(work[::2], work[1::2], strict=True):
        meet = [w.joined and bool(w.segments) for w in (left, right)]
        assert meet[0] == meet[1], (left, right)
        if meet[0]:
            ((request, _, end),), ((same, begin, _),) = left.segments, right.segments
            assert (request, end, left.row_tile, left.group + 1) == (same, begin, right.row_tile, right.group)
    at = {(w.group, w.row_tile): w for w in work}
    seen: dict[tuple[int, int], list[tuple[int, int, Work]]] = defaultdict(list)
    for w in work:
        for request, first, last in w.segments:
            assert first < last and w.row_tile * 64 < rows[request]
            seen[request, w.row_tile].append((first, last, w))
    for request, length in enumerate(lengths):
        tiles = -(-length // 64) if length > 0 else 0
        for row_tile in range(row_tiles):
            parts = sorted(seen.pop((request, row_tile), []), key=lambda part: part[0])
            if not tiles or row_tile * 64 >= rows[request]:
                assert not parts
                continue
            ends = [0, *(last for _, last, _ in parts)]
            assert [first for first, _, _ in parts] == ends[:-1] and ends[-1] == tiles
            apart = 2 if parts[0][2].joined else 1
            if len(parts) // apart > 1:
                first_group = parts[0][2].group
                cut = at[first_group + (len(parts) > 1 and not parts[0][2].joined), row_tile]
                told = [w for w in (at[first_group, row_tile], cut) if w.parts]
                assert any(
                    (w.parts, w.first_group, w.apart) == (len(parts) // apart, first_group, apart)
                    for w in told
                ), (parts, told)
    assert not seen
    joined = any(w.joined and w.segments for w in work)
    return "joined" if joined else "cut" if any(w.parts for w in work) else "whole"


@pytest.fixture
def probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[int], list[int], int], tuple[list[Work], int]]:
    """A function that gives the work of all CTAs."""
    probes: dict[int, Probe] = {}
    ctas = 0

    def specialised(_: int, spec: LatentSpec) -> tuple[Probe, None, Any]:
        if ctas not in probes:
            with monkeypatch.context() as patched:
                sources = {**jit.sources(), "probe.cu": PROBE}
                patched.setattr(jit, "sources", lambda: sources)
                replaced = ("bulk.cuh", "wgmma.cuh", "latent_instructions.cuh")
                config = latent_config(spec)
                made = tmp_path / str(ctas), "probe.cu", "probe", config, "latent_on_host.h", replaced
                probes[ctas] = Probe(kernels_on_host.compiled(*made), 2)
        return probes[ctas], None, latent_config(spec)

    monkeypatch.setattr(latent, "_specialised", specialised)
    monkeypatch.setattr(latent, "pool_map", lambda *_: (latent.Map(), 1))
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)

    def run(lengths: list[int], query_lens: list[int], device_ctas: int) -> tuple[list[Work], int]:
        nonlocal ctas
        ctas = device_ctas
        short = BatchSpec("drawn", tuple(min(n, 1) for n in lengths), tuple(query_lens))
        batch = make_latent_batch(short, num_heads=64, rank=512, rope=64, block_size=64, dtype=torch.bfloat16)
        batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out = torch.empty(*batch.q.shape[:2], 512, dtype=torch.bfloat16)
        call = LatentCall(*latent_tensors(batch), out, None, batch.max_query_len, batch.scale)
        latent.attend(call, LatentSpec.of(call, ctas))
        return probes[ctas].work, batch.max_query_len

    return run


@pytest.mark.slow_cases(but=("13-12",))
@pytest.mark.parametrize(("ctas", "batches"), [(13, 12), (8, 60), (13, 60), (34, 60), (132, 40)])
def test_ctas_agree(ctas: int, batches: int, probed: Any) -> None:
    rng, kinds = random.Random(ctas), set()
    for _ in range(batches):
        lengths, query_lens = drawn_lengths(rng)
        work, row_tiles = probed(lengths, query_lens, ctas)
        reached = [n if q else 0 for n, q in zip(lengths, query_lens, strict=True)]
        kinds.add(check(work, reached, [q * 64 for q in query_lens], row_tiles))
    assert kinds == {"joined", "cut", "whole"}
