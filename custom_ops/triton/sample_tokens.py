"""sample_tokens: Gumbel-max in two launches, with a search for the threshold instead of a sort where a row is truncated.

The first kernel cuts the vocabulary into tiles, one or a few per program, and reads every logit once. For a greedy row each program leaves
its best token, for a plainly drawn one each tile's. For a row with top_k, top_p or min_p it leaves its tile's largest logit and mass,
and the largest logit of each group of 64 tokens. The second kernel, a program per row, merges the tiles. A truncated row goes on there:

1. The groups' maxima bound the threshold from below: k groups that reach a value hold k tokens that do; the same with masses.
2. Groups that reach the bound are listed. For usual distributions they fit one chunk, which then stays in the first-level cache.
3. The threshold is the largest listed logit at and above which lie k tokens (top_k) or the mass p (top_p): bisection over the ordered
   integer images of floats, in which both ends always jump to logits that occur.
4. The kept tokens of the listed groups are scored with their noise. Of tokens equal to the threshold the first are kept.

Which of this a row needs is read from its parameters on the device. Sums run in a fixed order, so that replays agree bit for bit.
Semantics and noise: `torchpaged.custom_ops.reference_sampling`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpaged.custom_ops import validation_sampling as validation
from torchpaged.custom_ops.triton.config import INTERPRET, early_launch, next_power_of_2, require_launchable

GROUP = 64


class SampleTiles(NamedTuple):
    """Sizes of both launches.

    Attributes:
        tile: logits of a tile.
        tile_warps: warps of a program of the first launch.
        tiles_each: tiles of such a program.
        chunk: listed logits that the second launch reads at once.
        chunk_warps: its warps.
    """

    tile: int
    tile_warps: int
    tiles_each: int
    chunk: int
    chunk_warps: int


def sample_tiles(num_rows: int, vocab_size: int) -> SampleTiles:
    """Small tiles while large ones would leave multiprocessors idle; several for a program once there are more programs than fit."""
    if INTERPRET:
        return SampleTiles(256, 4, 2, 256, 4)
    if num_rows * vocab_size <= 2**21:
        return SampleTiles(1024, 4, 1 if num_rows * vocab_size <= 2**20 else 3, 4096, 16)
    return SampleTiles(2048, 8, 4, 4096, 16)


@triton.jit
def load_logits(row_at, seen_at, token, inside, penalty):
    """Float32 logits of ``token`` after the repetition penalty; -inf for NaN and where not ``inside``, no negative zero."""
    z = tl.load(row_at + token, mask=inside, other=float("-inf")).to(tl.float32)
    if penalty != 1.0:
        occurred = (tl.load(seen_at + token // 32, mask=inside, other=0) >> (token % 32)) & 1
        z = tl.where(occurred != 0, tl.where(z > 0, tl.div_rn(z, penalty), z * penalty), z)
    return tl.where(z != z, float("-inf"), tl.where(z == 0.0, 0.0, z))


@triton.jit
def natural_log(x):
    """Logarithm of normal positive numbers to float32's precision (Cephes' logf): without the branches of the library's for all others."""
    bits = x.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0  # of a significand in [sqrt(1/2), sqrt(2))
    p = ((7.0376836292e-2 * f - 1.1514610310e-1) * f + 1.1676998740e-1) * f - 1.2420140846e-1
    p = (((p * f + 1.4249322787e-1) * f - 1.6668057665e-1) * f + 2.0000714765e-1) * f - 2.4999993993e-1
    p = (p * f + 3.3333331174e-1) * f * f * f - 2.12194440e-4 * exponent - 0.5 * f * f
    return f + p + 0.693359375 * exponent


@triton.jit
def gumbel_noise(seed, counter, quarter):
    """Noise of tokens ``4 * quarter ... 4 * quarter + 3``: ``[N, 4]`` of ``[N]``."""
    zero = tl.zeros_like(quarter).to(tl.uint32)
    low, high = zero + (counter & 0xFFFFFFFF).to(tl.uint32), zero + ((counter >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, quarter.to(tl.uint32), low, high, zero)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [quarter.shape[0], 4])
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.3333333432674408 + v * 0.25)))  # of -log(1 - v), where 1 - v loses v's bits
    u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - v, to the last bit where it is small
    exponential = tl.where(v < 0.015625, series, -natural_log(u))
    return -natural_log(exponential)


@triton.jit
def likelihood(z, maximum, temperature):
    """exp((z - maximum) / temperature), 1 at the maximum even if that is infinite."""
    return tl.where(z == maximum, 1.0, tl.exp2((z - maximum) * (1.4426950408889634 / temperature)))


@triton.jit
def is_truncated(temperature, top_k, top_p, min_p, vocab_size):
    """Whether a row keeps some tokens only."""
    return (temperature > 0.0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def load_parameters(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seeds_ptr, counters_ptr):
    """How a row samples. Read before the kernels ahead have finished, perhaps: from L2, since a first-level cache may hold an older step's."""
    temperature, penalty = tl.load(temperature_ptr + row, cache_modifier=".cg"), tl.load(penalty_ptr + row, cache_modifier=".cg")
    top_k, top_p = tl.load(top_k_ptr + row, cache_modifier=".cg"), tl.load(top_p_ptr + row, cache_modifier=".cg")
    min_p, seed = tl.load(min_p_ptr + row, cache_modifier=".cg"), tl.load(seeds_ptr + row, cache_modifier=".cg")
    return temperature, top_k, top_p, min_p, penalty, seed, tl.load(counters_ptr + row, cache_modifier=".cg")


@triton.jit
def sample_tiles_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seen_ptr, seeds_ptr, counters_ptr, parts_ptr, indices_ptr,
    vocab_size, logits_row, seen_row, parts_row, indices_row,
    TILE: tl.constexpr, TILES_EACH: tl.constexpr, GROUP: tl.constexpr, READS_EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs, rows), of TILES_EACH tiles each. READS_EARLY: of a row's parameters, before the kernels ahead have finished.

    Row of parts: best of each tile, of a greedy row of each program; of a truncated row also the mass of each tile and the maximum of
    each group. Row of indices: token of each tile or program.
    """
    program, row = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(0) * TILES_EACH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not READS_EARLY:
            tl.extra.cuda.gdc_wait()
    temperature, top_k, top_p, min_p, penalty, seed, counter = load_parameters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seeds_ptr, counters_ptr
    )
    if PDL and READS_EARLY:
        tl.extra.cuda.gdc_wait()
    parts_at, indices_at = parts_ptr + row.to(tl.int64) * parts_row, indices_ptr + row.to(tl.int64) * indices_row
    row_at, seen_at = logits_ptr + row.to(tl.int64) * logits_row, seen_ptr + row.to(tl.int64) * seen_row
    if is_truncated(temperature, top_k, top_p, min_p, vocab_size):
        for i in range(TILES_EACH):
            tile = program * TILES_EACH + i
            token = (tile * (TILE // 4) + tl.arange(0, TILE // 4))[:, None] * 4 + tl.arange(0, 4)[None, :]
            z = load_logits(row_at, seen_at, token, token < vocab_size, penalty)
            peaks = tl.max(tl.reshape(tl.max(z, 1), [TILE // GROUP, GROUP // 4]), 1)
            tl.store(parts_at + 2 * num_tiles + tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP), peaks)
            best = tl.max(peaks, 0)
            tl.store(parts_at + tile, best)
            tl.store(parts_at + num_tiles + tile, tl.sum(tl.reshape(likelihood(z, best, temperature), [TILE]), 0))
    elif temperature > 0.0:
        for i in range(TILES_EACH):
            tile = program * TILES_EACH + i
            quarter = tile * (TILE // 4) + tl.arange(0, TILE // 4)
            token = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
            z = load_logits(row_at, seen_at, token, token < vocab_size, penalty)
            score = z + temperature * gumbel_noise(seed, counter, quarter)  # times the temperature: no overflow where it is tiny
            # Triton 3.6 gives wrong places for tl.max(tl.reshape(...), return_indices=True) of a tile loaded in another shape, so
            # tokens are looked for by value; reshaped tiles are only reduced, where order does not matter.
            best = tl.max(tl.max(score, 1), 0)
            tl.store(parts_at + tile, best)
            tl.store(indices_at + tile, tl.min(tl.min(tl.where(score == best, token, 2147483647), 1), 0))
    else:
        first = program * (TILES_EACH * TILE) + tl.arange(0, TILE)
        highest = load_logits(row_at, seen_at, first, first < vocab_size, penalty)
        place = first
        for i in tl.static_range(1, TILES_EACH):  # unrolled: all loads at once
            logit = load_logits(row_at, seen_at, first + i * TILE, first + i * TILE < vocab_size, penalty)
            place = tl.where(logit > highest, first + i * TILE, place)
            highest = tl.maximum(highest, logit)
        peak = tl.max(highest, 0)
        tl.store(parts_at + program, peak)
        tl.store(indices_at + program, tl.min(tl.where(highest == peak, place, 2147483647), 0))


@triton.jit
def better(a, token_a, b, token_b):
    """For `tl.reduce`: the larger value and its token, the lower token of equal values."""
    first = (a > b) | ((a == b) & (token_a < token_b))
    return tl.where(first, a, b), tl.where(first, token_a, token_b)


@triton.jit
def midpoint(low, high):
    """The float in the middle of ``low < high`` in the order of floats, above ``low``. The order's integers: `next_above`."""
    a, b = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    a, b = a ^ ((a >> 31) & 0x7FFFFFFF), b ^ ((b >> 31) & 0x7FFFFFFF)
    middle = ((a.to(tl.int64) + b.to(tl.int64) + 1) >> 1).to(tl.int32)
    return (middle ^ ((middle >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_above(z):
    """The next float: floats in order are their bits as integers, those of negative ones turned round. NaN above +inf."""
    bits = z.to(tl.int32, bitcast=True)
    after = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 1
    return (after ^ ((after >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def add_min_max(a, b, c, other_a, other_b, other_c):
    """For `tl.reduce`: a sum, a minimum and a maximum in one pass through the threads."""
    return a + other_a, tl.minimum(b, other_b), tl.maximum(c, other_c)


@triton.jit
def part(z, weight, pivot):
    """What `add_min_max` makes a measure of: the weight at and above ``pivot``, the least value there, and the largest value below."""
    above = z >= pivot
    return tl.where(above, weight, 0.0), tl.where(above, z, float("inf")), tl.where(above, float("-inf"), z)


@triton.jit
def narrow(low, high, mass, least_above, largest_below, target):
    """A step of the search for the largest value at and above which lies ``target``; done where ``low >= high``."""
    enough = mass >= target
    return tl.where(enough, least_above, low), tl.where(enough, tl.where(mass == target, least_above, high), largest_below)


@triton.jit
def group_bound(peaks, weight, target):
    """The largest of ``peaks`` at and above which ``weight`` sums to ``target``; -inf if all of them don't."""
    high = tl.max(peaks, 0)
    low = tl.full([], float("-inf"), tl.float32)
    while low < high:
        mass, least_above, largest_below = tl.reduce(part(peaks, weight, midpoint(low, high)), 0, add_min_max)
        low, high = narrow(low, high, mass, least_above, largest_below, target)
    return low


@triton.jit
def load_chunk(row_at, seen_at, list_at, first, listed, penalty, vocab_size, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Logits ``[CHUNK / 4, 4]`` of listed groups from number ``first`` on, in the order of tokens, and their ``quarter [CHUNK / 4]``."""
    place = tl.arange(0, CHUNK // 4)
    number = first + place // (GROUP // 4)
    group = tl.load(list_at + number, mask=number < listed, other=0)
    quarter = group * (GROUP // 4) + place % (GROUP // 4)
    token = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = (number < listed)[:, None] & (token < vocab_size)
    return load_logits(row_at, seen_at, token, inside, penalty), quarter


@triton.jit
def measure_row(
    row_at, seen_at, list_at, listed, penalty, vocab_size, pivot, maximum, temperature,
    MASS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The measure of the listed groups (see `part`); weights are likelihoods (MASS) or 1."""
    mass = tl.zeros([CHUNK], tl.float32)
    least_above = tl.full([CHUNK], float("inf"), tl.float32)
    largest_below = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, listed, CHUNK // GROUP):
        z, _ = load_chunk(row_at, seen_at, list_at, first, listed, penalty, vocab_size, GROUP, CHUNK)
        z = tl.reshape(z, [CHUNK])
        weight = tl.full([CHUNK], 1.0, tl.float32)
        if MASS:
            weight = likelihood(z, maximum, temperature)
        a, b, c = part(z, weight, pivot)
        mass, least_above, largest_below = mass + a, tl.minimum(least_above, b), tl.maximum(largest_below, c)
    return tl.reduce((mass, least_above, largest_below), 0, add_min_max)


@triton.jit
def find_threshold(
    row_at, seen_at, list_at, listed, penalty, vocab_size, target, low, maximum, temperature,
    MASS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``(threshold, weight above it)``: the largest listed logit at and above which lies ``target``, known to be no less than ``low``."""
    high = maximum
    while low < high:
        mass, least_above, largest_below = measure_row(
            row_at, seen_at, list_at, listed, penalty, vocab_size, midpoint(low, high), maximum, temperature, MASS, GROUP, CHUNK
        )
        low, high = narrow(low, high, mass, least_above, largest_below, target)
    mass, _, _ = measure_row(
        row_at, seen_at, list_at, listed, penalty, vocab_size, next_above(low), maximum, temperature, MASS, GROUP, CHUNK
    )
    return low, mass


@triton.jit
def list_groups(peaks_at, list_at, maximum, total, temperature, top_k, top_p, min_p, vocab_size, num_groups, GROUPS: tl.constexpr):
    """Write the groups that may hold kept tokens, in order; ``(how many, a bound below the threshold)``."""
    group = tl.arange(0, GROUPS)
    peaks = tl.load(peaks_at + group, mask=group < num_groups, other=float("-inf"))
    weight = likelihood(peaks, maximum, temperature)
    limited = (top_k > 0) & (top_k < vocab_size)
    listed = (group < num_groups) & ((weight >= min_p) | (limited & (top_p < 1.0)))  # top_p counts all of top_k's tokens
    bound = tl.full([], float("-inf"), tl.float32)
    if limited:
        bound = group_bound(peaks, tl.full([GROUPS], 1.0, tl.float32), top_k.to(tl.float32))
    elif top_p < 1.0:
        rest = tl.log((1.0 - top_p) * 0.99 * total / vocab_size)  # tokens less likely than this hold less than 1 - p, all together
        bound = tl.maximum(group_bound(peaks, weight, top_p * total), maximum + temperature * rest)
    listed = listed & (peaks >= bound)
    tl.store(list_at + tl.cumsum(listed.to(tl.int32), 0) - 1, group, mask=listed)
    tl.debug_barrier()  # all lanes' groups are stored before any lane reads the list
    return tl.sum(listed.to(tl.int32), 0), bound


@triton.jit
def draw_listed(
    row_at, seen_at, list_at, listed, penalty, vocab_size, threshold, allowed, min_p, maximum, temperature, seed, counter,
    GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The token with the best score of those above ``threshold`` and the first ``allowed`` equal to it; 0 if all are -inf."""
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    ties = tl.full([], 0, tl.int32)
    for first in range(0, listed, CHUNK // GROUP):
        z, quarter = load_chunk(row_at, seen_at, list_at, first, listed, penalty, vocab_size, GROUP, CHUNK)
        equal = (z == threshold).to(tl.int32)
        count = tl.sum(equal, 1)
        in_chunk = tl.sum(count, 0)
        kept = z >= threshold
        if ties + in_chunk > allowed:
            rank = ties + (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(equal, 1)
            kept = kept & ((z > threshold) | (rank <= allowed))
        ties += in_chunk
        kept = kept & (likelihood(z, maximum, temperature) >= min_p)
        score = tl.where(kept, z + temperature * gumbel_noise(seed, counter, quarter), float("-inf"))
        value = tl.max(tl.max(score, 1), 0)
        tokens = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
        first_token = tl.min(tl.min(tl.where(score == value, tokens, 2147483647), 1), 0)
        token = tl.where(value > best, first_token, token)
        best = tl.maximum(best, value)
    return token


@triton.jit
def merge_row(
    row, temperature, top_k, top_p, min_p, penalty, seed, counter, logits_ptr, seen_ptr, parts_ptr, indices_ptr,
    vocab_size, num_programs, num_tiles, num_groups, logits_row, seen_row, parts_row, indices_row,
    TILES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row's token out of what the first launch left. The row of indices becomes the list of groups where the row is truncated."""
    truncated = is_truncated(temperature, top_k, top_p, min_p, vocab_size)
    parts_at, list_at = parts_ptr + row.to(tl.int64) * parts_row, indices_ptr + row.to(tl.int64) * indices_row
    tile = tl.arange(0, TILES)
    written = tile < tl.where(temperature > 0.0, num_tiles, num_programs)
    best = tl.load(parts_at + tile, mask=written, other=float("-inf"))
    tokens = tl.load(list_at + tile, mask=written, other=2147483647)  # not yet there where the row is truncated
    maximum, token = tl.reduce((best, tokens), 0, better)
    if truncated:
        row_at, seen_at = logits_ptr + row.to(tl.int64) * logits_row, seen_ptr + row.to(tl.int64) * seen_row
        mass = tl.load(parts_at + num_tiles + tile, mask=tile < num_tiles, other=0.0)
        total = tl.sum(mass * likelihood(best, maximum, temperature), 0)
        listed, threshold = list_groups(
            parts_at + 2 * num_tiles, list_at, maximum, total, temperature, top_k, top_p, min_p, vocab_size, num_groups, GROUPS
        )
        allowed = vocab_size
        if (top_k > 0) & (top_k < vocab_size):
            threshold, above = find_threshold(
                row_at, seen_at, list_at, listed, penalty, vocab_size, top_k.to(tl.float32), threshold, maximum, temperature,
                False, GROUP, CHUNK,
            )  # fmt: skip
            allowed = top_k - above.to(tl.int32)
            if top_p < 1.0:
                heavier, _, _ = measure_row(
                    row_at, seen_at, list_at, listed, penalty, vocab_size, next_above(threshold), maximum, temperature, True, GROUP, CHUNK
                )
                total = heavier + allowed * likelihood(threshold, maximum, temperature)
        if top_p < 1.0:
            lowest = threshold
            threshold, heavier = find_threshold(
                row_at, seen_at, list_at, listed, penalty, vocab_size, top_p * total, threshold, maximum, temperature, True, GROUP, CHUNK
            )
            needed = tl.ceil((top_p * total - heavier) / likelihood(threshold, maximum, temperature))
            ties = tl.maximum(tl.minimum(needed, 16777216.0).to(tl.int32), 1)
            allowed = tl.where(threshold > lowest, ties, tl.minimum(ties, allowed))
        token = draw_listed(
            row_at, seen_at, list_at, listed, penalty, vocab_size, threshold, allowed, min_p, maximum, temperature, seed, counter,
            GROUP, CHUNK,
        )  # fmt: skip
    return token


@triton.jit
def merge_tiles_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seen_ptr, seeds_ptr, counters_ptr, parts_ptr, indices_ptr,
    out_ptr, vocab_size, num_programs, num_tiles, num_groups, logits_row, seen_row, parts_row, indices_row,
    TILES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). TILES, GROUPS: powers of two."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    temperature, top_k, top_p, min_p, penalty, seed, counter = load_parameters(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, penalty_ptr, seeds_ptr, counters_ptr
    )
    token = merge_row(
        row, temperature, top_k, top_p, min_p, penalty, seed, counter, logits_ptr, seen_ptr, parts_ptr, indices_ptr,
        vocab_size, num_programs, num_tiles, num_groups, logits_row, seen_row, parts_row, indices_row, TILES, GROUPS, GROUP, CHUNK,
    )  # fmt: skip
    tl.store(out_ptr + row, token.to(tl.int64))


class Merge(NamedTuple):
    """What the first launch left for the second.

    Attributes:
        arguments: of the second kernel, the first ones: the op's inputs, parts and indices.
        sizes: ``vocab_size, num_programs, num_tiles, num_groups`` and the four strides.
        options: constexprs and launch options.
    """

    arguments: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    options: dict[str, Any]


def launch_tiles(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, repetition_penalty: Tensor,
                 seen: Tensor, seeds: Tensor, counters: Tensor, reads_early: bool) -> Merge:  # fmt: skip
    """The first launch, without checks; ``logits`` has rows. ``reads_early``: see `sample_tiles_kernel`."""
    num_rows, vocab_size = logits.shape
    tiles = sample_tiles(num_rows, vocab_size)
    num_programs = triton.cdiv(vocab_size, tiles.tile * tiles.tiles_each)
    num_tiles = num_programs * tiles.tiles_each  # those beyond the vocabulary hold -inf
    num_groups = num_tiles * (tiles.tile // GROUP)
    parts = torch.empty(num_rows, 2 * num_tiles + num_groups, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
    arguments = (logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, parts, indices)
    strides = (logits.stride(0), seen.stride(0), parts.stride(0), indices.stride(0))
    early = early_launch(logits.device)
    sample_tiles_kernel[(num_programs, num_rows)](
        *arguments, vocab_size, *strides, TILE=tiles.tile, TILES_EACH=tiles.tiles_each, GROUP=GROUP,
        READS_EARLY=reads_early, num_warps=tiles.tile_warps, **early,
    )  # fmt: skip
    options = {"TILES": next_power_of_2(num_tiles), "GROUPS": next_power_of_2(num_groups), "GROUP": GROUP, "CHUNK": tiles.chunk}
    sizes = (vocab_size, num_programs, num_tiles, num_groups, *strides)
    return Merge(arguments, sizes, options | {"num_warps": tiles.chunk_warps} | early)


def sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, repetition_penalty: Tensor,
                  seen: Tensor, seeds: Tensor, counters: Tensor, out: Tensor) -> None:  # fmt: skip
    """Launch; arguments as in ``custom_ops/ops.py``."""
    require_launchable(logits)
    validation.check_sample_tokens(logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, out)
    if logits.shape[0]:
        merge = launch_tiles(logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, reads_early=False)
        merge_tiles_kernel[(logits.shape[0],)](*merge.arguments, out, *merge.sizes, **merge.options)
