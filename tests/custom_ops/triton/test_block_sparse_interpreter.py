"""The mask "vertical and slash" of Triton's kernels in the interpreter: against the oracle, with tiles left
out and without, and which tiles these are."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from as_oracle import assert_as_oracle

from torchpaged import BlockSparse
from torchpaged.backends import Backend, GraphSupport, get_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.mask import Mask
from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.attention.triton.block_sparse import ordinals, path_of, place
from torchpaged.graphs import TapeCapture
from torchpaged.testing import BATCH_SPECS, BatchSpec, make_batch, run_paged_attention
from torchpaged.testing.graph_conformance import check_replays, conformance_cases

TRITON = BACKEND_OPS["triton"]
#: name -> pattern, and whether tiles that no row sees are left out, at two query heads per kv head.
PATTERNS = {
    "query heads": (BlockSparse(64, 1, 4, head_step=1), True),
    "all heads": (BlockSparse(64, 2, 3, offset=0), True),
    "kv heads": (BlockSparse(64, 1, 3, 2, 1, 2), True),
    "every second": (BlockSparse(32, 1, 5, 3, 2), True),
    "narrow": (BlockSparse(8, 2, 4, head_step=1), False),
    "odd": (BlockSparse(5, 2, 3, head_step=1), False),
    "all blocks": (BlockSparse(64, 1, 2, head_step=1), False),
}
SPECS = {
    "split": BatchSpec("split", (700, 1, 0, 257), (1, 1, 1, 1)),
    "drafts": BatchSpec("drafts", (650, 333, 5), (4, 3, 2)),
    "prompts": BatchSpec("prompts", (330, 130), (90, 130)),
    "mixed": BatchSpec("mixed", (300, 200, 40), (1, 40, 40), padded_tokens=3),
    "left_padded": BATCH_SPECS["left_padded"],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 200},
    "chunks, cap": {"chunk_size": 150, "logits_soft_cap": 5.0},
}
#: Every pattern and every batch with one of the options, in turn.
CASES = [
    (pattern, spec, list(OPTIONS)[(i + j) % len(OPTIONS)])
    for i, pattern in enumerate(PATTERNS)
    for j, spec in enumerate(SPECS)
]


@pytest.mark.slow_cases(
    but=(
        "query heads-split-*",
        "query heads-prompts-*",
        "all heads-drafts-*",
        "kv heads-mixed-*",
        "odd-split-*",
    )
)
@pytest.mark.parametrize(("pattern", "spec", "options"), CASES)
def test_matches_the_oracle(pattern: str, spec: str, options: str) -> None:
    given = {"block_sparse": PATTERNS[pattern][0], **OPTIONS[options]}
    dtype = torch.bfloat16 if pattern in ("all heads", "narrow") else torch.float32
    batch = make_batch(SPECS[spec], head_dim=16, dtype=dtype, sinks=True, alibi=options == "window")
    assert_as_oracle(TRITON, batch, **given)


@pytest.mark.slow_cases("mixed")
@pytest.mark.parametrize("spec", ["split", "mixed"])
def test_over_an_fp8_cache(spec: str) -> None:
    pattern = BlockSparse(64, 1, 3, head_step=1)
    batch = make_batch(SPECS[spec], head_dim=16, kv_dtype=torch.float8_e4m3fn, scales="per_head")
    assert_as_oracle(TRITON, batch, block_sparse=pattern)


@pytest.mark.slow_cases("*-prompts")
@pytest.mark.parametrize("spec", ["split", "prompts"])
@pytest.mark.parametrize("pattern", ["query heads", "narrow"])
def test_blocks_that_no_head_sees_do_not_matter(pattern: str, spec: str) -> None:
    """In bfloat16 decode cuts its tiles into slices."""
    mask = Mask(block_sparse=PATTERNS[pattern][0])
    dtype = torch.bfloat16 if pattern == "narrow" else torch.float32
    batch = make_batch(SPECS[spec], head_dim=16, dtype=dtype)
    want, _ = run_paged_attention(TRITON, batch, block_sparse=mask.block_sparse)
    length, count = batch.spec.seq_lens[0], batch.spec.query_lens[0]
    key, query = torch.arange(length), torch.arange(length - count, length)
    for kv_head in range(2):
        heads = torch.arange(2) + 2 * kv_head
        seen = mask.sees(query[:, None], key, heads[:, None, None]).flatten(0, 1).any(0)
        assert not bool(seen.all()), "something is hidden"
        for at in (~seen).nonzero()[:, 0].tolist():
            slot = batch.block_table[0, at // 16], at % 16, kv_head
            batch.k_cache[slot] = batch.v_cache[slot] = float("nan")
    got, _ = run_paged_attention(TRITON, batch, block_sparse=mask.block_sparse)
    assert torch.equal(got, want)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", [BlockSparse(32, 1, 2, head_step=1, heads_per_step=2), BlockSparse(8, 2, 3)]
)
@pytest.mark.parametrize("case", conformance_cases(GraphSupport.ALWAYS)[:2], ids=lambda case: case.name)
def test_one_graph_serves_all_lengths(case: Any, pattern: BlockSparse) -> None:
    able = replace(get_backend("triton").capabilities, device_types=("cpu",))
    backend = Backend("interpreted", able, TRITON, lambda: None)
    asked = case._replace(options={"block_sparse": pattern})
    assert check_replays(backend, asked, TapeCapture(), "cpu", head_dim=16) == len(case.batches) + 1


class Tiling(NamedTuple):
    """What the functions of the mask read."""

    verticals: int


class Spec(NamedTuple):
    """Likewise."""

    block_sparse: BlockSparse
    group: int


@triton.jit
def _tiles_kernel(
    tiles_ptr,
    low_key,
    end_key,
    position,
    kv_head,
    SPEC: tl.constexpr,
    TILING: tl.constexpr,
    TILE: tl.constexpr,
    OWN: tl.constexpr,
):
    path = path_of(position, kv_head, end_key, SPEC, TILING, OWN)
    first, end = ordinals(low_key, end_key, path.slash, path.verticals, SPEC, TILING)
    for at in range(first, end, TILE):
        tl.store(tiles_ptr + (at - first) // TILE, place(at, path, SPEC, TILING))


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("own", [False, True], ids=["most", "own"])
@pytest.mark.parametrize(
    ("pattern", "group"),
    [
        (BlockSparse(32, 2, 4, head_step=1), 2),
        (BlockSparse(16, 1, 8, 1, 1), 4),
        (BlockSparse(16, 3, 3, 0), 3),
        (BlockSparse(32, 1, 7, 5, 2), 3),
        (BlockSparse(16, 2, 5, 4, 3, 2), 2),
    ],
    ids=str,
)
def test_tiles_are_those_that_some_row_sees(pattern: BlockSparse, group: int, own: bool) -> None:
    """Each once and in order; besides them at most one stride's verticals, before a window, and the end."""
    tiling = Tiling(pattern.verticals_of(group))
    assert tiling.verticals
    mask, size = Mask(block_sparse=pattern), pattern.block_size
    for kv_head, position, low in itertools.product(range(3), (0, 40, 333, 480), (0, 200)):
        low, end = min(low, position), position + 1
        found = torch.full((64,), -1, dtype=torch.int32)
        _tiles_kernel[(1,)](found, low, end, position, kv_head, Spec(pattern, group), tiling, 16, own)
        heads = torch.arange(group) + kv_head * group
        seen = mask.sees(torch.tensor(position), torch.arange(end), heads[:, None]).any(0)
        wanted = sorted({int(key) // 16 * 16 for key in seen.nonzero()[:, 0] if key >= low})
        tiles = [tile for tile in found[found >= 0].tolist() if tile < end]
        assert tiles == sorted(set(tiles))
        assert [tile for tile in tiles if tile >= low // 16 * 16] == wanted
        before = [tile for tile in tiles if tile < low // size * size]
        assert len(before) <= tiling.verticals * size // 16
        assert len(found[found >= end]) <= (0 if own else tiling.verticals * size // 16)


def test_which_patterns_leave_tiles_out() -> None:
    for pattern, leaves_out in PATTERNS.values():
        keys = config.keys_of_a_block(pattern.block_size, 64)
        assert bool(pattern.block_size % keys == 0 and pattern.verticals_of(2)) == leaves_out
    assert BlockSparse(64, 16, 8, head_step=1).verticals_of(4) == 4
    assert BlockSparse(64, 16, 8, head_step=1).verticals_of(8) == 0, "each head has another vertical"
    assert BlockSparse(64, 16, 8, head_step=3).verticals_of(4) == 0, "not at even distances"
    assert BlockSparse(64, 16, 8, 1, 1, 3).verticals_of(4) == 0, "kv heads have more and fewer"


def test_a_slash_over_all_keys_hides_nothing() -> None:
    batch = make_batch(SPECS["drafts"], head_dim=16)
    want, got = (
        run_paged_attention(TRITON, batch, **options)
        for options in ({}, {"block_sparse": BlockSparse(64, 1000, 5)})
    )
    assert all(torch.equal(*pair) for pair in zip(want, got, strict=True))
