"""Sampling parameters of a request, and drawing tokens for a batch of them.

Token ``t`` of a request is drawn from ``(seed, t)`` alone: batch composition, preemption and recomputation never change it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchpaged.custom_ops.errors import ArgumentError


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Attributes:
        max_new_tokens: tokens at most.
        temperature: 0 = greedy; else logits are divided by it.
        top_k: the k likeliest tokens only; 0 = all.
        top_p: the likeliest tokens whose probabilities sum to p; 1 = all (nucleus sampling, arXiv:1904.09751).
        seed: of this request's draws; None = a fresh one.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end it, besides the model's own end.
        ignore_eos: go on past the model's end token.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ArgumentError("max_new_tokens", "at least 1", str(self.max_new_tokens))
        if not 0.0 <= self.temperature < float("inf"):
            raise ArgumentError("temperature", "0 (greedy) or a positive number", str(self.temperature))
        if self.top_k < 0:
            raise ArgumentError("top_k", "0 (off) or at least 1", str(self.top_k))
        if not 0.0 < self.top_p <= 1.0:
            raise ArgumentError("top_p", "a number in (0, 1]", str(self.top_p))
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise ArgumentError("stop", "a tuple of non-empty strings", repr(self.stop))


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that depends on ``(seed, step)`` only (Python's own seeding from a string, stable across versions)."""
    return random.Random(f"{seed}:{step}").random()


def sample(logits: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> Tensor:
    """One token per row.

    Args:
        logits: ``[num_rows, vocab_size]``.
        params: of each row.
        draws: a uniform number in [0, 1) per row; ignored by greedy rows.

    Returns:
        ``[num_rows]`` int64 on the logits' device.
    """
    greedy = logits.argmax(-1)
    rows = [i for i, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return greedy
    device, vocab = logits.device, logits.shape[-1]
    index = torch.tensor(rows, device=device)
    temperature = torch.tensor([params[i].temperature for i in rows], device=device)
    top_k = torch.tensor([params[i].top_k or vocab for i in rows], device=device)
    top_p = torch.tensor([params[i].top_p for i in rows], device=device)
    draw = torch.tensor([draws[i] for i in rows], device=device, dtype=torch.float64)
    ordered, tokens = (logits[index].float() / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(vocab, device=device)[None] >= top_k[:, None], float("-inf"))
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens; 0 for the first, so one always stays
    probabilities = probabilities.masked_fill(before >= top_p[:, None], 0.0)
    cumulative = probabilities.double().cumsum(-1)
    rank = (cumulative <= draw[:, None] * cumulative[:, -1:]).sum(-1).clamp_max(vocab - 1)
    return greedy.index_copy(0, index, tokens.gather(1, rank[:, None])[:, 0])
