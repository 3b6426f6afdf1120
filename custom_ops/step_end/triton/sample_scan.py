"""sample_tokens' first launch: a program's tiles of a greedy row, or of one that keeps some tokens only; of
one that is drawn plainly: sample_draw.py."""

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.triton.sample_draw import NO_TOKEN, max_or_nan
from torchpaged.custom_ops.step_end.triton.sample_rows import GROUP
from torchpaged.custom_ops.step_end.triton.sample_search import likelihood, load_logits, penalised_logits


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
    """A program's tiles of a greedy row: the best logit of all, and its token. A lane keeps its best one, and
    the number of its tile."""
    first = program * (TILES_EACH * TILE) + tl.arange(0, TILE)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    tile = tl.full([TILE], 0, tl.int32)
    if logits.penalty == 1.0:
        for i in tl.static_range(TILES_EACH):  # unrolled: all loads at once
            token = first + i * TILE
            logit = tl.load(logits.at + token, mask=token < logits.vocab_size, other=float("-inf"))
            logit = logit.to(tl.float32)
            tile = tl.where(logit > highest, i, tile)
            highest = max_or_nan(highest, logit)
    else:
        for i in range(TILES_EACH):
            logit = penalised_logits(logits, first + i * TILE, first + i * TILE < logits.vocab_size)
            tile = tl.where(logit > highest, i, tile)
            highest = max_or_nan(highest, logit)
    # A NaN as in `scan_drawn`: nothing is above inf, and of equals the lower place wins.
    broken = highest != highest
    highest = tl.where(broken, float("inf"), highest)
    place = tl.where(broken, NO_TOKEN, first + tile * TILE)
    peak = tl.max(highest, 0)
    tl.store(parts_at + program, peak)
    tl.store(indices_at + program, tl.min(tl.where(highest == peak, place, 2147483647), 0))
