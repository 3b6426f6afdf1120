"""Fake kernels of the ops that end a step: they state what must fit and compute nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchpaged.custom_ops.early_launch import refuse_inductors_for
from torchpaged.custom_ops.step_end.call import AcceptCall, FinishCall, SampleCall


def _sample_tokens(call: SampleCall) -> None:
    logits, seen, out = call.logits, call.seen, call.out
    torch._check(logits.dim() == 2 and seen.dim() == 2, lambda: "logits, seen: expected 2 dimensions")
    torch._check(seen.dtype == torch.int32, lambda: f"seen: expected int32, got {seen.dtype}")
    torch._check(out.dtype == torch.int64, lambda: f"out: expected int64, got {out.dtype}")
    for name, t in zip(call._fields, call, strict=True):
        torch._check(
            t.shape[0] == logits.shape[0], lambda name=name: f"{name}: expected as many rows as logits"
        )


def _accept_tokens(call: AcceptCall) -> None:
    for name, table in (("block_table", call.block_table), ("stop_token_ids", call.stop_token_ids)):
        torch._check(
            table.dim() == 2,
            lambda name=name, table=table: f"{name}: expected 2 dimensions, got {table.dim()}",
        )
    tensors: tuple[Any, ...] = call[: call._fields.index("block_size")]
    for t in tensors:
        torch._check(
            t is None or t.shape[0] == call.block_table.shape[0],
            lambda: "expected as many rows as block_table in every argument",
        )


def _finish_step(call: FinishCall) -> None:
    refuse_inductors_for(call.sample.logits)
    _sample_tokens(call.sample)
    _accept_tokens(call.accept)


FAKES: dict[str, Callable[..., None]] = {
    "sample_tokens": _sample_tokens,
    "accept_tokens": _accept_tokens,
    "finish_step": _finish_step,
}
