"""Fake kernels of the ops that end a step: they state what must fit and compute nothing."""

from collections.abc import Callable
from typing import Any

import torch

from torchpaged.custom_ops.facts import expect, expect_dims, expect_dtype, expect_rows
from torchpaged.custom_ops.step_end.call import AcceptCall, FinishCall, SampleCall


def _sample_tokens(call: SampleCall) -> None:
    logits, seen = call.logits, call.seen
    expect(logits.dim() == seen.dim() == 2, "logits, seen: expected 2 dimensions")
    expect_dtype(torch.int32, seen=seen)
    expect_dtype(torch.int64, out=call.out)
    expect_rows("logits", logits.shape[0], **call._asdict())


def _accept_tokens(call: AcceptCall) -> None:
    expect_dims(2, block_table=call.block_table, stop_token_ids=call.stop_token_ids)
    tensors: tuple[Any, ...] = call[: call._fields.index("block_size")]
    for t in tensors:
        fits = t is None or t.shape[0] == call.block_table.shape[0]
        expect(fits, "expected as many rows as block_table in every argument")


def _finish_step(call: FinishCall) -> None:
    _sample_tokens(call.sample)
    _accept_tokens(call.accept)


FAKES: dict[str, Callable[..., None]] = {
    "sample_tokens": _sample_tokens,
    "accept_tokens": _accept_tokens,
    "finish_step": _finish_step,
}
