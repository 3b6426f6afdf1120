"""The end of a step in plain torch: the specification of ``sample_tokens``, ``accept_tokens``,
``finish_step`` and ``advance_step``.

A row of logits becomes a token in this order:

1. repetition penalty (arXiv:1909.05858, as transformers has it): a seen token's logit is divided by p if
   positive, else multiplied; in float32, so that ties are the same in every backend. Called z from here on.
2. temperature 0: the token with the largest z, the lowest index of equals. No more steps.
3. likelihood is softmax(z / temperature). Tokens are ordered by z, equals by index. Kept are the first
   ``top_k``; of these, those whose likelier ones hold less than ``top_p`` of the mass of these; of all, those
   with at least ``min_p`` times the largest likelihood.
4. the token is the kept one with the largest z / temperature + g, g its Gumbel noise: a draw from the
   renormalised likelihoods.

The noise of token ``v`` is a function of the row's seed and counter and of ``v`` alone. Its 32 random bits
are word ``v % 4`` of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
with key words (low, high) of the seed and counter words (v // 4, low of the counter, high of the counter, 0).
With u = 1 - (bits + 1/2) / 2**32, in (0, 1), g = -log(-log(u)): large noise comes from u near 1, where the
bits' resolution is finest.

A row with a NaN among its logits, whatever the others are, and a row whose logits are all -inf give
`NO_TOKEN`, -2: there is nothing to draw from, and a reader of the tokens must not take it for one.
`accept_tokens` ends such a row.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.step_end.call import AcceptCall, AdvanceCall, FinishCall, SampleCall
from torchpaged.custom_ops.step_end.check import (
    NO_TOKEN,
    check_accept_tokens,
    check_advance_step,
    check_finish_step,
    check_sample_tokens,
)


def advance_step(call: AdvanceCall) -> None:
    """Turn one decode step's buffers into the next one's: token in, position and length + 1, slot from
    the table."""
    check_advance_step(call)
    sampled_token_ids, block_table, input_ids, positions, seq_lens, slot_mapping, block_size = call
    old_lens = seq_lens.long()
    moves = (old_lens > 0) & (old_lens < block_table.shape[1] * block_size)
    column = (old_lens // block_size).clamp_max(block_table.shape[1] - 1)
    block = block_table.long().gather(1, column[:, None])[:, 0]
    slot_mapping.copy_(torch.where(moves, block * block_size + old_lens % block_size, -1))
    input_ids.copy_(torch.where(moves, sampled_token_ids, input_ids))
    positions.copy_(torch.where(moves, old_lens, positions))
    seq_lens.copy_(torch.where(moves, old_lens + 1, old_lens).to(torch.int32))


_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words of random bits. All words are int64 tensors with values in [0, 2**32)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # modulo 2**64: the bits of the unsigned product
        c0, c1, c2, c3 = (b >> 32 & _LOW) ^ c1 ^ k0, b & _LOW, (a >> 32 & _LOW) ^ c3 ^ k1, a & _LOW
        k0, k1 = k0 + _WEYL[0] & _LOW, k1 + _WEYL[1] & _LOW
    return c0, c1, c2, c3


def random_bits(seeds: Tensor, counters: Tensor, vocab_size: int) -> Tensor:
    """``[B, vocab_size]`` int64 in [0, 2**32) from ``seeds`` and ``counters [B]`` int64, as the module's
    docstring says."""
    quarter = torch.arange(-(-vocab_size // 4), device=seeds.device)[None]
    low, high = (counters & _LOW)[:, None], (counters >> 32 & _LOW)[:, None]
    key = ((seeds & _LOW)[:, None], (seeds >> 32 & _LOW)[:, None])
    words = philox(key, (quarter, low, high, torch.zeros_like(quarter)))
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def gumbel_noise(bits: Tensor) -> Tensor:
    """Float64 noise of random bits."""
    return -torch.log(-torch.log1p(-(bits.double() + 0.5) * 2.0**-32))


def penalised_logits(logits: Tensor, repetition_penalty: Tensor, seen: Tensor) -> Tensor:
    """``[B, V]`` float32: step 1 of the module's docstring; -inf for NaN."""
    z = logits.float()
    z = torch.where(z.isnan(), float("-inf"), z)
    if z.device.type == "cpu" and bool((repetition_penalty == 1).all()):  # most batches, on a CPU
        return z
    token = torch.arange(z.shape[1], device=z.device)
    occurred = (seen[:, token // 32] >> (token % 32)[None]) & 1
    penalty = repetition_penalty[:, None]
    return torch.where(occurred.bool() & (penalty != 1), torch.where(z > 0, z / penalty, z * penalty), z)


def kept_tokens(z: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Bool ``[B, V]``: step 3. ``temperature`` is positive."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    ordered, k = ordered.double(), top_k[:, None]
    weight = torch.where(
        ordered == ordered[:, :1], 1.0, torch.exp((ordered - ordered[:, :1]) / temperature[:, None].double())
    )
    keep = (torch.arange(z.shape[1], device=z.device)[None] < k) | (k == 0)
    mass = torch.where(keep, weight, 0.0).cumsum(-1)
    before = mass - weight
    keep &= (before < top_p[:, None].double() * mass[:, -1:]) | (top_p[:, None] == 1)
    keep &= weight >= min_p[:, None].double()
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(1, order, keep)


def sample_tokens(call: SampleCall) -> None:
    """One token per row; arguments as in ``schema.py``, semantics in this module's docstring."""
    check_sample_tokens(call)
    logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, out = call
    z = penalised_logits(logits, repetition_penalty, seen)
    largest, token = z.max(-1)
    out.copy_(token)
    drawn = temperature > 0
    if z.device.type == "cpu":  # no work for greedy rows where looking costs nothing
        rows = drawn.nonzero()[:, 0]
        if rows.numel():
            arguments = [t[rows] for t in (z, temperature, top_k, top_p, min_p, seeds, counters)]
            out.index_copy_(0, rows, _draw(*arguments))
    else:
        positive = torch.where(drawn, temperature, 1.0)
        out.copy_(torch.where(drawn, _draw(z, positive, top_k, top_p, min_p, seeds, counters), out))
    out.masked_fill_((largest == float("-inf")) | logits.isnan().any(-1), NO_TOKEN)


def _draw(
    z: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> Tensor:
    noise = gumbel_noise(random_bits(seeds, counters, z.shape[1]))
    # times the temperature: no overflow where it is tiny
    score = z.double() + temperature[:, None].double() * noise
    truncated = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if z.device.type != "cpu" or bool(truncated.any()):
        score = score.masked_fill(~kept_tokens(z, temperature, top_k, top_p, min_p), float("-inf"))
    return score.argmax(-1)


def accept_tokens(call: AcceptCall) -> None:
    """Take the sampled tokens and turn this step's buffers into the next one's; arguments as
    in ``schema.py``.

    A row with seq_len 0 gives token -1 and slot -1 and stays as it is. A row that ends (stop token,
    `NO_TOKEN`, ``remaining`` used up, table full) gets seq_len 0 and slot -1 and keeps its input_ids
    and position.
    """
    check_accept_tokens(call)
    sampled_token_ids, block_table, stop_token_ids, input_ids, positions, seq_lens, slot_mapping = call[:7]
    assert sampled_token_ids is not None
    remaining, block_size = call.remaining, call.block_size
    old_lens = seq_lens.long()
    active = old_lens > 0
    token = torch.where(active, sampled_token_ids, -1)
    call.tokens_out.copy_(token)
    if call.ring is not None and call.launches is not None:
        _put(call.ring, call.launches, call.step, token)
    call.counters.add_(active)
    remaining.sub_(active.to(torch.int32))
    _mark_seen(call.seen, token)
    stopped = (stop_token_ids == token[:, None]).any(-1)
    goes_on = active & (token >= 0) & ~stopped & (remaining > 0) & (old_lens < call.capacity)
    column = (old_lens // block_size).clamp(0, block_table.shape[1] - 1)
    block = block_table.gather(1, column[:, None])[:, 0].long()
    slot_mapping.copy_(torch.where(goes_on, block * block_size + old_lens % block_size, -1))
    input_ids.copy_(torch.where(goes_on, token, input_ids))
    positions.copy_(torch.where(goes_on, old_lens, positions))
    seq_lens.copy_(torch.where(goes_on, old_lens + 1, torch.where(active, 0, old_lens)).to(torch.int32))


def finish_step(call: FinishCall) -> None:
    """`sample_tokens`, then `accept_tokens`; arguments as in ``schema.py``."""
    check_finish_step(call)
    sampled = torch.empty_like(call.accept.counters)
    sample_tokens(call.sample._replace(out=sampled))
    accept_tokens(call.accept._replace(sampled_token_ids=sampled))


def _put(ring: Tensor, launches: Tensor, step: int, token: Tensor) -> None:
    """The tokens into the launch's slot; behind those of its last step the launch's number, which then
    is counted."""
    num_slots, num_steps, launch = ring.shape[0] - 1, ring.shape[1] - 1, launches[:1]
    slot = torch.where(launch < 0, num_slots, launch % num_slots)
    ring[:, step, : token.shape[0]].index_copy_(0, slot, token[None])
    if step == num_steps - 1:
        ring[:, num_steps, :1].index_copy_(0, slot, launch[None])
        launch.add_(launch >= 0)


def _mark_seen(seen: Tensor, token: Tensor) -> None:
    """Set the bit of each row's token; -1 and tokens beyond the mask are left out."""
    if not seen.shape[1]:
        return
    word = token // 32
    inside = (token >= 0) & (word < seen.shape[1])
    column = word.clamp(0, seen.shape[1] - 1)[:, None]
    bit = torch.where(inside, torch.ones_like(token) << token % 32, 0).to(torch.int32)
    seen.scatter_(1, column, seen.gather(1, column) | bit[:, None])
