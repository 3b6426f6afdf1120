"""sample_tokens' first launch: a program's tiles of a greedy row, or of one that keeps some tokens only; of
one that is drawn plainly: sample_draw.py."""

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.triton.sample_draw import NO_TOKEN
from torchpaged.custom_ops.step_end.triton.sample_rows import GROUP
from torchpaged.custom_ops.step_end.triton.sample_search import likelihood, load_logits


@triton.jit
def scan_truncated(
    logits, temperature, parts_at, program, num_tiles, TILE: tl.constexpr, TILES_EACH: tl.constexpr
):
    """A program's tiles of a row that keeps some tokens only: best and mass of each, maxima of groups."""
    for i in range(TILES_EACH):
        tile = program * TILES_EACH + i
        token = (tile * (TILE // 4) + tl.arange(0, TILE // 4))[:, None] * 4 + tl.arange(0, 4)[None, :]
        z, broken = load_logits(logits, token, token < logits.vocab_size)
        peaks = tl.max(tl.reshape(tl.max(z, 1), [TILE // GROUP, GROUP // 4]), 1)
        tl.store(parts_at + 2 * num_tiles + tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP), peaks)
        best = tl.max(peaks, 0)
        tl.store(parts_at + tile, best)
        # A NaN's mass is inf, which no row has otherwise: `merge_row` sees it.
        weight = tl.where(broken, float("inf"), likelihood(z, best, temperature))
        tl.store(parts_at + num_tiles + tile, tl.sum(tl.reshape(weight, [TILE]), 0))


@triton.jit
def scan_greedy(logits, parts_at, indices_at, program, TILE: tl.constexpr, TILES_EACH: tl.constexpr):
    """A program's tiles of a greedy row: the best logit of all, and its token."""
    first = program * (TILES_EACH * TILE) + tl.arange(0, TILE)
    logit, broken = load_logits(logits, first, first < logits.vocab_size)
    highest, place = tl.where(broken, float("inf"), logit), tl.where(broken, NO_TOKEN, first)
    for i in tl.static_range(1, TILES_EACH):  # unrolled: all loads at once
        logit, broken = load_logits(logits, first + i * TILE, first + i * TILE < logits.vocab_size)
        place = tl.where(broken, NO_TOKEN, tl.where(logit > highest, first + i * TILE, place))
        # A NaN as in `scan_drawn`: nothing is above inf, and of equals the lower place wins.
        highest = tl.where(broken, float("inf"), tl.maximum(highest, logit))
    peak = tl.max(highest, 0)
    tl.store(parts_at + program, peak)
    tl.store(indices_at + program, tl.min(tl.where(highest == peak, place, 2147483647), 0))
