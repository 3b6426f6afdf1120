"""Fake kernels of the ops that end a step: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.early_launch import refuse_inductors_for


def _sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    seen: Tensor,
    seeds: Tensor,
    counters: Tensor,
    out: Tensor,
) -> None:
    torch._check(logits.dim() == 2 and seen.dim() == 2, lambda: "logits, seen: expected 2 dimensions")
    torch._check(seen.dtype == torch.int32, lambda: f"seen: expected int32, got {seen.dtype}")
    torch._check(out.dtype == torch.int64, lambda: f"out: expected int64, got {out.dtype}")
    for name, t in (
        ("temperature", temperature),
        ("top_k", top_k),
        ("top_p", top_p),
        ("min_p", min_p),
        ("seen", seen),
        ("repetition_penalty", repetition_penalty),
        ("seeds", seeds),
        ("counters", counters),
        ("out", out),
    ):
        torch._check(
            t.shape[0] == logits.shape[0], lambda name=name: f"{name}: expected as many rows as logits"
        )


def _accept_tokens(
    sampled_token_ids: Tensor, block_table: Tensor, stop_token_ids: Tensor, *state: Tensor, **_: Any
) -> None:
    torch._check(
        block_table.dim() == 2, lambda: f"block_table: expected 2 dimensions, got {block_table.dim()}"
    )
    torch._check(
        stop_token_ids.dim() == 2,
        lambda: f"stop_token_ids: expected 2 dimensions, got {stop_token_ids.dim()}",
    )
    for t in (sampled_token_ids, stop_token_ids, *state):
        torch._check(
            t.shape[0] == block_table.shape[0],
            lambda: "expected as many rows as block_table in every argument",
        )


def _finish_step(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    repetition_penalty: Tensor,
    seeds: Tensor,
    block_table: Tensor,
    stop_token_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    counters: Tensor,
    remaining: Tensor,
    seen: Tensor,
    tokens_out: Tensor,
    **_: Any,
) -> None:
    refuse_inductors_for(logits)
    _sample_tokens(
        logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, tokens_out
    )
    _accept_tokens(
        tokens_out,
        block_table,
        stop_token_ids,
        input_ids,
        positions,
        seq_lens,
        slot_mapping,
        counters,
        remaining,
        seen,
        tokens_out,
    )


FAKES: dict[str, Callable[..., None]] = {
    "sample_tokens": _sample_tokens,
    "accept_tokens": _accept_tokens,
    "finish_step": _finish_step,
}
