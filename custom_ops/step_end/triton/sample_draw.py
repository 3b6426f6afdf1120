"""The first launch of `sample_tokens` over rows that may draw any token.

Exact noise takes two logarithms of a token. Coarse ones, an instruction each, say which may win; those too
near to tell are scored exactly. So the token is the one of exact scores alone.
"""

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end import check
from torchpaged.custom_ops.step_end.triton.sample_noise import (
    LEFT_OUT,
    MARGIN,
    ROUNDING,
    coarse_score,
    gumbel_noise,
    noise_bits,
)
from torchpaged.custom_ops.step_end.triton.sample_search import load_logits, penalised_logits

NO_TOKEN: tl.constexpr = tl.constexpr(check.NO_TOKEN)


@triton.jit
def max_or_nan(a, b):
    """For `tl.reduce`."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def best_token(logits, parameters, quarter):
    """The best score of tokens ``4 * quarter ... 4 * quarter + 3`` of ``quarter [N]`` and its token, the
    lowest of equals. With a NaN among them inf and NO_TOKEN: of a row's bests that is the best, as nothing is
    above inf, and of equals the lower token wins."""
    token = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
    z, broken = load_logits(logits, token, token < logits.vocab_size)
    # Noise times the temperature, not logits by it, which overflow where it is tiny.
    noise = gumbel_noise(noise_bits(parameters.seed, parameters.counter, quarter))
    score = z + parameters.temperature * noise
    # Triton 3.6 gives wrong places for tl.max(tl.reshape(...), return_indices=True) of a tile loaded in
    # another shape, so tokens are looked for by value; reshaped tiles are only reduced, where order does
    # not matter.
    best = tl.max(tl.max(score, 1), 0)
    drawn = tl.min(tl.min(tl.where(broken, NO_TOKEN, tl.where(score == best, token, 2147483647)), 1), 0)
    return tl.where(drawn < 0, float("inf"), best), drawn


@triton.jit
def best_of_tiles(logits, parameters, first, TILE: tl.constexpr, TILES_EACH: tl.constexpr):
    """`best_token` of a program's tiles, whose first one has the quarters ``first``."""
    score, drawn = best_token(logits, parameters, first)
    for i in range(1, TILES_EACH):
        more, token = best_token(logits, parameters, first + i * (TILE // 4))
        drawn = tl.where((more > score) | ((more == score) & (token < drawn)), token, drawn)
        score = tl.maximum(score, more)
    return score, drawn


@triton.jit
def best_by_coarse_scores(
    logits, parameters, first, TILE: tl.constexpr, TILES_EACH: tl.constexpr, PTX: tl.constexpr
):
    """`best_of_tiles`, by coarse scores. Each lane keeps its best four tokens and the best score of its
    others. Where no other comes near the best of all, its four alone are scored exactly; else, once in some
    hundred programs, all."""
    temperature = parameters.temperature
    place = first
    best = tl.full([TILE // 4], float("-inf"), tl.float32)
    other = best
    for i in range(TILES_EACH):
        quarter = first + i * (TILE // 4)
        token = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
        z = penalised_logits(logits, token, token < logits.vocab_size)
        bits = noise_bits(parameters.seed, parameters.counter, quarter)
        highest = tl.reduce(coarse_score(z, bits, temperature, PTX), 1, max_or_nan)
        other = tl.maximum(other, tl.minimum(best, highest))
        place = tl.where(highest > best, quarter, place)
        best = max_or_nan(best, highest)
    peak = tl.reduce(best, 0, max_or_nan)
    margin = MARGIN * temperature + ROUNDING * tl.abs(peak)
    near = (best >= peak - margin).to(tl.int32)  # none where the peak is infinite or NaN
    count = tl.sum(near + (other >= peak - margin).to(tl.int32), 0)
    chosen = tl.max(tl.where(near != 0, place, 0), 0)
    score, drawn = best_token(logits, parameters, chosen + tl.arange(0, 1))
    if peak == float("-inf"):
        score, drawn = peak, tl.full([], 0, tl.int32)
    elif (count != 1) | (score < peak - 0.5 * margin + LEFT_OUT * temperature):
        score, drawn = best_of_tiles(logits, parameters, first, TILE, TILES_EACH)
    return score, drawn


@triton.jit
def scan_drawn(
    logits,
    parameters,
    parts_at,
    indices_at,
    program,
    TILE: tl.constexpr,
    TILES_EACH: tl.constexpr,
    PTX: tl.constexpr,
):
    """A program's tiles of a row that may draw any token: the best score of all, and its token. One tile
    alone is scored exactly: the GPU is half idle then, and two scores would be one behind the other."""
    first = program * (TILES_EACH * (TILE // 4)) + tl.arange(0, TILE // 4)
    if TILES_EACH == 1:
        score, drawn = best_of_tiles(logits, parameters, first, TILE, TILES_EACH)
    else:
        score, drawn = best_by_coarse_scores(logits, parameters, first, TILE, TILES_EACH, PTX)
    tl.store(parts_at + program, score)
    tl.store(indices_at + program, drawn)
