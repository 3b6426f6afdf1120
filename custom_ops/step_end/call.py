"""Calls of the ops that end a step as records: made once where torch's flat arguments end (registry.py).
Shapes, dtypes and meanings: schema.py."""

from typing import Any, NamedTuple, Self

from torch import Tensor


class AdvanceCall(NamedTuple):
    """The arguments of ``advance_step``."""

    sampled_token_ids: Tensor
    block_table: Tensor
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_size: int


class SampleCall(NamedTuple):
    """The arguments of ``sample_tokens``."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seen: Tensor
    seeds: Tensor
    counters: Tensor
    out: Tensor


class AcceptCall(NamedTuple):
    """The arguments of ``accept_tokens``; ``sampled_token_ids``: None before they are drawn."""

    sampled_token_ids: Tensor | None
    block_table: Tensor
    stop_token_ids: Tensor
    input_ids: Tensor
    positions: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    counters: Tensor
    remaining: Tensor
    seen: Tensor
    tokens_out: Tensor
    block_size: int
    ring: Tensor | None = None
    launches: Tensor | None = None
    step: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block table holds."""
        return self.block_table.shape[1] * self.block_size


class FinishCall(NamedTuple):
    """The arguments of ``finish_step``: of drawing (into ``tokens_out``), and of accepting what is drawn."""

    sample: SampleCall
    accept: AcceptCall

    @classmethod
    def of(cls, *tensors: Any, **options: Any) -> Self:
        """The call of flat arguments, as torch's dispatcher gives them."""
        logits, temperature, top_k, top_p, min_p, penalty, seeds, *rows = tensors
        accept = AcceptCall(None, *rows, **options)
        drawing = logits, temperature, top_k, top_p, min_p, penalty
        return cls(SampleCall(*drawing, accept.seen, seeds, accept.counters, accept.tokens_out), accept)
