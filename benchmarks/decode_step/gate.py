"""The gate of the decode-step benchmark: a contender that passes computes what HuggingFace's model computes,
as exactly as its bf16 does.

Fixed random tokens are fed (teacher forcing) to requests of different lengths: a prefill through the paged
model, then a few decode steps. Two limits, both relative to what HuggingFace's eager model of the same dtype
loses against float32:

- logits: Frobenius error relative to float32 at most twice HuggingFace's;
- chosen tokens: the float32 logit of each is below the best one by at most 4 times HuggingFace's largest
  absolute logit error (an error of twice that on each of two near-equal logits may swap them; nothing
  larger may).
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 8
STEPS = 4
_LEAST_RELATIVE, _LEAST_ABSOLUTE = 1e-5, 1e-4  # of float32 models, where HuggingFace's own error is 0


@dataclass(frozen=True)
class Reference:
    """What is fed and what should come out.

    Attributes:
        tokens: ``[num_rows, length]`` int64, on the host.
        prompt_lens: tokens of each row that are prefilled.
        logits: ``[num_rows, STEPS, vocab_size]`` float32: step ``s`` of row ``r`` was fed token
            ``prompt_lens[r] + s``.
        error: relative Frobenius error of HuggingFace's eager model.
        largest: its largest absolute error.
    """

    tokens: Tensor
    prompt_lens: list[int]
    logits: Tensor
    error: float
    largest: float

    @property
    def error_limit(self) -> float:
        """Relative error a contender may have."""
        return max(2 * self.error, _LEAST_RELATIVE)

    @property
    def gap_limit(self) -> float:
        """How far below the best float32 logit a chosen token's may lie."""
        return max(4 * self.largest, _LEAST_ABSOLUTE)


@torch.inference_mode()
def make_reference(model: Any, num_rows: int = MAX_ROWS) -> Reference:
    """Float32 logits of ``model`` (a plain HuggingFace one), and its own error; holds a float32 copy of
    it meanwhile."""
    generator = torch.Generator().manual_seed(1)
    prompt_lens = [(17 + 11 * row) % 61 + 4 for row in range(num_rows)]  # on both sides of multiples of 16
    tokens = torch.randint(
        1, model.config.vocab_size, (num_rows, max(prompt_lens) + STEPS), generator=generator
    )
    model.set_attn_implementation("eager")
    own = _at_steps(model, tokens, prompt_lens)
    if model.dtype == torch.float32:
        exact = own
    else:
        wide = copy.deepcopy(model).float()
        exact = _at_steps(wide, tokens, prompt_lens)
        del wide
    return Reference(tokens, prompt_lens, exact, relative_error(own, exact), (own - exact).abs().max().item())


def _at_steps(model: Any, tokens: Tensor, prompt_lens: list[int]) -> Tensor:
    hidden = model.model(input_ids=tokens.to(model.device), use_cache=False).last_hidden_state
    steps = torch.tensor(
        [[length + step for step in range(STEPS)] for length in prompt_lens], device=hidden.device
    )
    chosen = hidden.gather(1, steps[..., None].expand(-1, -1, hidden.shape[-1]))
    return model.lm_head(chosen).float()


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``; NaN where ``got`` is not finite."""
    return ((got.float() - exact).norm() / exact.norm()).item()


def verdict(reference: Reference, logits: Tensor, chosen: Tensor) -> dict[str, Any]:
    """Compare ``logits [rows, STEPS, vocab_size]`` and ``chosen [rows, STEPS]`` int64 tokens of the
    first rows.

    Returns:
        ``error``, ``error_limit``, ``token_gap``, ``token_gap_limit``, ``same_tokens``; with ``reason`` if a
        limit is exceeded.
    """
    exact = reference.logits[: len(logits)]
    error = relative_error(logits, exact)
    best = exact.max(-1)
    in_range = ((chosen >= 0) & (chosen < exact.shape[-1])).all().item()
    picked = exact.gather(-1, chosen.clamp(0, exact.shape[-1] - 1)[..., None])[..., 0]
    gap = (best.values - picked).max().item() if in_range else float("inf")
    entry: dict[str, Any] = {
        "error": error,
        "error_limit": reference.error_limit,
        "token_gap": gap,
        "token_gap_limit": reference.gap_limit,
        "same_tokens": (chosen == best.indices).float().mean().item(),
    }
    if not error <= reference.error_limit:
        entry["reason"] = (
            f"logits: relative error {error:.2e} is over {reference.error_limit:.2e} (twice HuggingFace's)"
        )
    elif not gap <= reference.gap_limit:
        entry["reason"] = (
            f"tokens: one is {gap:.2e} below the best float32 logit, over {reference.gap_limit:.2e}"
        )
    return entry
