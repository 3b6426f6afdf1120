"""Argument checks of the ops that end a step, shared by the reference and the launchers.

Shapes, dtypes, devices and strides always; values on the CPU, on a GPU with ``TORCHPAGED_CHECK=1`` only.
"""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    check_tensor,
    reads_values,
)
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.step_end.call import AcceptCall, AdvanceCall, FinishCall, SampleCall


def check_advance_step(call: AdvanceCall) -> None:
    """Every argument of ``advance_step``."""
    *tensors, block_size = call
    named: dict[str, Tensor] = dict(zip(call._fields, tensors, strict=False))
    table = named.pop("block_table")
    check_dims("block_table", table, None, None)
    check_dtype("block_table", table, torch.int32)
    for name, tensor in named.items():
        check_dims(name, tensor, table.shape[0])
        check_dtype(name, tensor, torch.int32 if name == "seq_lens" else torch.int64)
    check_last_dim(**named, block_table=table)
    check_device(call.input_ids.device, **named, block_table=table)
    if block_size < 1:
        raise ArgumentError("block_size", "at least 1 token", str(block_size))


#: Rows of logits on a GPU, whose grids have no more programs in their second dimension.
MAX_ROWS = 65_535
#: What sampling gives where no token can be drawn: a logit of the row is NaN, or all are -inf. The row ends
#: with it.
NO_TOKEN = -2


def num_seen_words(vocab_size: int) -> int:
    """Words of a row of ``seen``: 32 tokens each."""
    return -(-vocab_size // 32)


def _check_rows(num_rows: int, call: Any, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """These arguments, one number for each row, by name; None is left out."""
    named = {name: tensor for name in dtypes if (tensor := getattr(call, name)) is not None}
    for name, tensor in named.items():
        check_dims(name, tensor, num_rows)
        check_dtype(name, tensor, dtypes[name])
    return named


_SAMPLED = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), torch.float32),
    "top_k": torch.int32,
    **dict.fromkeys(("seeds", "counters", "out"), torch.int64),
}


def check_sample_tokens(call: SampleCall) -> None:
    """Every argument of ``sample_tokens``; raises `ArgumentError` before anything is written."""
    logits, temperature, top_k, top_p, min_p, penalty, seen, *_ = call
    check_dims("logits", logits, None, None)
    num_rows, vocab_size = logits.shape
    if vocab_size < 1 or vocab_size > 2**24:
        raise ArgumentError("logits", "a vocabulary of 1 to 2**24 tokens", f"shape {list(logits.shape)}")
    if num_rows > MAX_ROWS and logits.device.type != "cpu":
        fix = "sample them in several calls"
        raise ArgumentError("logits", f"at most {MAX_ROWS:,} rows", f"shape {list(logits.shape)}", fix)
    check_dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    rows = _check_rows(num_rows, call, _SAMPLED)
    check_tensor("seen", seen, (num_rows, num_seen_words(vocab_size)), torch.int32)
    check_last_dim(logits=logits, **rows)
    check_device(logits.device, seen=seen, **rows)
    if num_rows and reads_values(logits.device):
        finite = (temperature >= 0) & temperature.isfinite()
        _check_values("temperature", temperature, finite, "0 (greedy) or positive numbers")
        _check_values("top_k", top_k, top_k >= 0, "0 (all) or at least 1")
        _check_values("top_p", top_p, (top_p > 0) & (top_p <= 1), "numbers in (0, 1]")
        _check_values("min_p", min_p, (min_p >= 0) & (min_p <= 1), "numbers in [0, 1]")
        penalised = (penalty > 0) & penalty.isfinite()
        _check_values("repetition_penalty", penalty, penalised, "positive numbers (1 = off)")


_ACCEPTED = {
    **dict.fromkeys(("sampled_token_ids", "input_ids", "positions", "slot_mapping"), torch.int64),
    **dict.fromkeys(("counters", "tokens_out"), torch.int64),
    **dict.fromkeys(("seq_lens", "remaining"), torch.int32),
}


def check_accept_tokens(call: AcceptCall) -> None:
    """Every argument of ``accept_tokens``; raises `ArgumentError` before anything is written."""
    sampled, table, seq_lens = call.sampled_token_ids, call.block_table, call.seq_lens
    device = call.input_ids.device
    check_dims("block_table", table, None, None)
    num_reqs = table.shape[0]
    if not table.shape[1]:
        raise ArgumentError("block_table", "at least one column", f"shape {list(table.shape)}")
    rows = _check_rows(num_reqs, call, _ACCEPTED)
    check_last_dim(**rows)
    rows |= {"block_table": table, "stop_token_ids": call.stop_token_ids, "seen": call.seen}
    check_tensor("stop_token_ids", call.stop_token_ids, (num_reqs, None), torch.int64)
    check_tensor("block_table", table, (num_reqs, None), torch.int32)
    check_tensor("seen", call.seen, (num_reqs, None), torch.int32)
    check_device(device, **rows)
    if call.block_size < 1:
        raise ArgumentError("block_size", "at least 1 token", str(call.block_size))
    _check_ring(call, num_reqs, device)
    if num_reqs and reads_values(device):
        most = f"at most {call.capacity}, what a row of block_table holds"
        _check_values("seq_lens", seq_lens, seq_lens <= call.capacity, most)
        if sampled is None:
            return
        tokens = 32 * call.seen.shape[1]
        fits = (sampled >= 0) & (sampled < tokens) | (sampled == NO_TOKEN)
        expected = f"tokens in [0, {tokens}), as seen has, or {NO_TOKEN} (none could be drawn)"
        _check_values("sampled_token_ids", sampled, fits | (seq_lens <= 0), expected)


def check_finish_step(call: FinishCall) -> None:
    """Every argument of ``finish_step``; raises `ArgumentError` before anything is written."""
    check_dims("logits", call.sample.logits, None, None)
    check_dims("block_table", call.accept.block_table, call.sample.logits.shape[0], None)
    check_accept_tokens(call.accept)
    check_sample_tokens(call.sample)


def _check_ring(call: AcceptCall, num_reqs: int, device: torch.device) -> None:
    ring, launches, step = call.ring, call.launches, call.step
    if ring is None or launches is None:
        if ring is not launches:
            raise ArgumentError("ring, launches", "both or neither", "one of them")
        return
    if not num_reqs:
        raise ArgumentError("ring", "rows whose tokens it takes", "no rows", "leave ring and launches out")
    check_tensor("ring", ring, (None, None, None), torch.int64)
    check_tensor("launches", launches, (2,), torch.int64)
    if ring.shape[0] < 2 or ring.shape[1] < 2 or ring.shape[2] < num_reqs:
        raise ArgumentError(
            "ring", f"[slots + 1, steps + 1, at least {num_reqs}]", f"shape {list(ring.shape)}"
        )
    if not 0 <= step < ring.shape[1] - 1:
        raise ArgumentError("step", f"in [0, {ring.shape[1] - 1}), the steps of ring", str(step))
    check_device(device, ring=ring, launches=launches)


def _check_values(name: str, tensor: Tensor, good: Tensor, expected: str) -> None:
    if not bool(good.all()):
        row = int((~good).nonzero()[0, 0])
        raise ArgumentError(name, expected, f"{tensor[row].item()} in row {row}")
