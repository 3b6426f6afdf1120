"""A row's logits, and which tokens a truncated row keeps: the device functions of `sample_tokens` and
`finish_step`.

A row with top_k, top_p or min_p has left each group's largest logit. `list_groups` writes the groups that may
hold kept tokens, in order; `find_threshold` narrows the threshold among their logits; `draw_listed` scores
what is kept. The method: `sample_tokens`, steps 1 to 4.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.triton.sample_noise import gumbel_noise, noise_bits
from torchpaged.custom_ops.step_end.triton.sample_rows import GROUP


class Logits(NamedTuple):
    """A row of logits, as a kernel has it: pointers, the repetition penalty, and how many there are. Triton
    compiles what it holds."""

    at: Any
    seen_at: Any
    penalty: Any
    vocab_size: Any


class Listed(NamedTuple):
    """The groups of a row that may hold kept tokens: a pointer to their list, and how many there are."""

    at: Any
    count: Any


@triton.jit
def row_of(row, rows, penalty):
    """`Logits` of a row."""
    wide = row.to(tl.int64)
    return Logits(
        rows.logits + wide * rows.logits_row, rows.seen + wide * rows.seen_row, penalty, rows.vocab_size
    )


@triton.jit
def penalised_logits(logits, token, inside):
    """Float32 logits of ``token`` after the repetition penalty; -inf where not ``inside``."""
    z = tl.load(logits.at + token, mask=inside, other=float("-inf")).to(tl.float32)
    if logits.penalty != 1.0:
        occurred = (tl.load(logits.seen_at + token // 32, mask=inside, other=0) >> (token % 32)) & 1
        z = tl.where(occurred != 0, tl.where(z > 0, tl.div_rn(z, logits.penalty), z * logits.penalty), z)
    return z


@triton.jit
def load_logits(logits, token, inside):
    """`penalised_logits`, -inf for NaN, without negative zero. And which were NaN."""
    z = penalised_logits(logits, token, inside)
    return tl.where(z != z, float("-inf"), tl.where(z == 0.0, 0.0, z)), z != z


@triton.jit
def likelihood(z, maximum, temperature):
    """exp((z - maximum) / temperature), 1 at the maximum even if that is infinite."""
    return tl.where(z == maximum, 1.0, tl.exp2((z - maximum) * (1.4426950408889634 / temperature)))


@triton.jit
def midpoint(low, high):
    """The float in the middle of ``low < high`` in the order of floats, above ``low``. The order's
    integers: `next_above`."""
    a, b = low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    a, b = a ^ ((a >> 31) & 0x7FFFFFFF), b ^ ((b >> 31) & 0x7FFFFFFF)
    middle = ((a.to(tl.int64) + b.to(tl.int64) + 1) >> 1).to(tl.int32)
    return (middle ^ ((middle >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def next_above(z):
    """The next float: floats in order are their bits as integers, those of negative ones turned round. NaN
    above +inf."""
    bits = z.to(tl.int32, bitcast=True)
    after = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 1
    return (after ^ ((after >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def add_min_max(a, b, c, other_a, other_b, other_c):
    """For `tl.reduce`: a sum, a minimum and a maximum in one pass through the threads."""
    return a + other_a, tl.minimum(b, other_b), tl.maximum(c, other_c)


@triton.jit
def part(z, weight, pivot):
    """What `add_min_max` makes a measure of: the weight at and above ``pivot``, the least value there, and
    the largest value below."""
    above = z >= pivot
    return tl.where(above, weight, 0.0), tl.where(above, z, float("inf")), tl.where(above, float("-inf"), z)


@triton.jit
def narrow(low, high, mass, least_above, largest_below, target):
    """A step of the search for the largest value at and above which lies ``target``; done where ``low
    >= high``."""
    enough = mass >= target
    return tl.where(enough, least_above, low), tl.where(
        enough, tl.where(mass == target, least_above, high), largest_below
    )


@triton.jit
def group_bound(peaks, weight, target):
    """The largest of ``peaks`` at and above which ``weight`` sums to ``target``; -inf if all of
    them don't."""
    high = tl.max(peaks, 0)
    low = tl.full([], float("-inf"), tl.float32)
    while low < high:
        mass, least_above, largest_below = tl.reduce(part(peaks, weight, midpoint(low, high)), 0, add_min_max)
        low, high = narrow(low, high, mass, least_above, largest_below, target)
    return low


@triton.jit
def load_chunk(logits, listed, first, CHUNK: tl.constexpr):
    """Logits ``[CHUNK / 4, 4]`` of listed groups from number ``first`` on, in the order of tokens, and their
    ``quarter [CHUNK / 4]``."""
    place = tl.arange(0, CHUNK // 4)
    number = first + place // (GROUP // 4)
    group = tl.load(listed.at + number, mask=number < listed.count, other=0)
    quarter = group * (GROUP // 4) + place % (GROUP // 4)
    token = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = (number < listed.count)[:, None] & (token < logits.vocab_size)
    # a row with a NaN gets no token, whatever is found here
    z, _ = load_logits(logits, token, inside)
    return z, quarter


@triton.jit
def measure_row(logits, listed, pivot, maximum, temperature, MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The measure of the listed groups (see `part`); weights are likelihoods (MASS) or 1."""
    mass = tl.zeros([CHUNK], tl.float32)
    least_above = tl.full([CHUNK], float("inf"), tl.float32)
    largest_below = tl.full([CHUNK], float("-inf"), tl.float32)
    for first in range(0, listed.count, CHUNK // GROUP):
        z, _ = load_chunk(logits, listed, first, CHUNK)
        z = tl.reshape(z, [CHUNK])
        weight = tl.full([CHUNK], 1.0, tl.float32)
        if MASS:
            weight = likelihood(z, maximum, temperature)
        a, b, c = part(z, weight, pivot)
        mass, least_above, largest_below = mass + a, tl.minimum(least_above, b), tl.maximum(largest_below, c)
    return tl.reduce((mass, least_above, largest_below), 0, add_min_max)


@triton.jit
def find_threshold(
    logits, listed, target, low, maximum, temperature, MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """``(threshold, weight above it)``: the largest listed logit at and above which lies ``target``, known to
    be no less than ``low``."""
    high = maximum
    while low < high:
        mass, least_above, largest_below = measure_row(
            logits, listed, midpoint(low, high), maximum, temperature, MASS, CHUNK
        )
        low, high = narrow(low, high, mass, least_above, largest_below, target)
    mass, _, _ = measure_row(logits, listed, next_above(low), maximum, temperature, MASS, CHUNK)
    return low, mass


@triton.jit
def list_groups(peaks_at, list_at, maximum, total, parameters, vocab_size, num_groups, GROUPS: tl.constexpr):
    """Write the groups that may hold kept tokens, in order; them, and a bound below the threshold."""
    temperature, top_k, top_p = parameters.temperature, parameters.top_k, parameters.top_p
    group = tl.arange(0, GROUPS)
    peaks = tl.load(peaks_at + group, mask=group < num_groups, other=float("-inf"))
    weight = likelihood(peaks, maximum, temperature)
    limited = (top_k > 0) & (top_k < vocab_size)
    inside = group < num_groups
    # top_p counts all of top_k's tokens. Selects: the interpreter of Triton 3.9 takes no mask that a scalar
    # comparison is spread into.
    listed = tl.where(limited & (top_p < 1.0), inside, inside & (weight >= parameters.min_p))
    bound = tl.full([], float("-inf"), tl.float32)
    if limited:
        bound = group_bound(peaks, tl.full([GROUPS], 1.0, tl.float32), top_k.to(tl.float32))
    elif top_p < 1.0:
        # tokens less likely than this hold less than 1 - p, all together
        rest = tl.log((1.0 - top_p) * 0.99 * total / vocab_size)
        bound = tl.maximum(group_bound(peaks, weight, top_p * total), maximum + temperature * rest)
    listed = listed & (peaks >= bound)
    tl.store(list_at + tl.cumsum(listed.to(tl.int32), 0) - 1, group, mask=listed)
    tl.debug_barrier()  # all lanes' groups are stored before any lane reads the list
    return Listed(list_at, tl.sum(listed.to(tl.int32), 0)), bound


@triton.jit
def draw_listed(logits, listed, threshold, allowed, maximum, parameters, CHUNK: tl.constexpr):
    """The token with the best score of those above ``threshold`` and the first ``allowed`` equal to it; 0 if
    all are -inf."""
    temperature = parameters.temperature
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    ties = tl.full([], 0, tl.int32)
    for first in range(0, listed.count, CHUNK // GROUP):
        z, quarter = load_chunk(logits, listed, first, CHUNK)
        equal = (z == threshold).to(tl.int32)
        count = tl.sum(equal, 1)
        in_chunk = tl.sum(count, 0)
        kept = z >= threshold
        if ties + in_chunk > allowed:
            rank = ties + (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(equal, 1)
            kept = kept & ((z > threshold) | (rank <= allowed))
        ties += in_chunk
        kept = kept & (likelihood(z, maximum, temperature) >= parameters.min_p)
        noise = gumbel_noise(noise_bits(parameters.seed, parameters.counter, quarter))
        score = tl.where(kept, z + temperature * noise, float("-inf"))
        value = tl.max(tl.max(score, 1), 0)
        tokens = quarter[:, None] * 4 + tl.arange(0, 4)[None, :]
        first_token = tl.min(tl.min(tl.where(score == value, tokens, 2147483647), 1), 0)
        token = tl.where(value > best, first_token, token)
        best = tl.maximum(best, value)
    return token


@triton.jit
def draw_truncated(logits, parameters, parts, maximum, total, GROUPS: tl.constexpr, CHUNK: tl.constexpr):
    """The token of a row that keeps some only, whose likelihoods sum to ``total``. The row of indices becomes
    the list of groups."""
    temperature, top_k, top_p = parameters.temperature, parameters.top_k, parameters.top_p
    vocab_size = logits.vocab_size
    peaks_at = parts.at + 2 * parts.num_tiles
    listed, threshold = list_groups(
        peaks_at, parts.list_at, maximum, total, parameters, vocab_size, parts.num_groups, GROUPS
    )
    allowed = vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        threshold, above = find_threshold(
            logits, listed, top_k.to(tl.float32), threshold, maximum, temperature, False, CHUNK
        )
        allowed = top_k - above.to(tl.int32)
        if top_p < 1.0:
            heavier, _, _ = measure_row(
                logits, listed, next_above(threshold), maximum, temperature, True, CHUNK
            )
            total = heavier + allowed * likelihood(threshold, maximum, temperature)
    if top_p < 1.0:
        lowest = threshold
        threshold, heavier = find_threshold(
            logits, listed, top_p * total, threshold, maximum, temperature, True, CHUNK
        )
        needed = tl.ceil((top_p * total - heavier) / likelihood(threshold, maximum, temperature))
        ties = tl.maximum(tl.minimum(needed, 16777216.0).to(tl.int32), 1)
        allowed = tl.where(threshold > lowest, ties, tl.minimum(ties, allowed))
    return draw_listed(logits, listed, threshold, allowed, maximum, parameters, CHUNK)
