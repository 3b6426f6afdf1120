"""Argument checks of the ops that end a step, shared by the reference and the launchers.

Shapes, dtypes, devices and strides always; values on the CPU, on a GPU with ``TORCHPAGED_CHECK=1`` only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import (
    check_device,
    check_dims,
    check_dtype,
    check_last_dim,
    reads_values,
)
from torchpaged.custom_ops.errors import ArgumentError


def check_advance_step(
    sampled_token_ids: Tensor,
    block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
) -> None:
    """Every argument of ``advance_step``."""
    check_dims("block_table", block_table, None, None)
    check_dtype("block_table", block_table, torch.int32)
    num_reqs = block_table.shape[0]
    for name, tensor in (
        ("sampled_token_ids", sampled_token_ids),
        ("input_ids", input_ids),
        ("positions", positions),
        ("slot_mapping", slot_mapping),
    ):
        check_dims(name, tensor, num_reqs)
        check_dtype(name, tensor, torch.int64)
    check_dims("seq_lens", seq_lens, num_reqs)
    check_dtype("seq_lens", seq_lens, torch.int32)
    for name, tensor in (
        ("sampled_token_ids", sampled_token_ids),
        ("input_ids", input_ids),
        ("positions", positions),
        ("slot_mapping", slot_mapping),
        ("seq_lens", seq_lens),
        ("block_table", block_table),
    ):
        check_last_dim(**{name: tensor})
    check_device(
        input_ids.device,
        sampled_token_ids=sampled_token_ids,
        block_table=block_table,
        positions=positions,
        seq_lens=seq_lens,
        slot_mapping=slot_mapping,
    )
    if block_size < 1:
        raise ArgumentError("block_size", "at least 1 token", str(block_size))


#: What sampling gives where no token can be drawn: a logit of the row is NaN, or all are -inf. The row ends
#: with it.
NO_TOKEN = -2


def num_seen_words(vocab_size: int) -> int:
    """Words of a row of ``seen``: 32 tokens each."""
    return -(-vocab_size // 32)


def check_sample_tokens(
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
    """Every argument of ``sample_tokens``; raises `ArgumentError` before anything is written."""
    check_dims("logits", logits, None, None)
    num_rows, vocab_size = logits.shape
    if vocab_size < 1 or vocab_size > 2**24:
        raise ArgumentError("logits", "a vocabulary of 1 to 2**24 tokens", f"shape {list(logits.shape)}")
    check_dtype("logits", logits, torch.float32, torch.bfloat16, torch.float16)
    floats = {
        "temperature": temperature,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    integers = {"seeds": seeds, "counters": counters, "out": out}
    for tensors, dtype in ((floats, torch.float32), ({"top_k": top_k}, torch.int32), (integers, torch.int64)):
        for name, tensor in tensors.items():
            check_dims(name, tensor, num_rows)
            check_dtype(name, tensor, dtype)
    check_dims("seen", seen, num_rows, num_seen_words(vocab_size))
    check_dtype("seen", seen, torch.int32)
    check_last_dim(logits=logits, seen=seen, top_k=top_k, **floats, **integers)
    check_device(logits.device, seen=seen, top_k=top_k, **floats, **integers)
    if num_rows and reads_values(logits.device):
        _check_values(
            "temperature",
            temperature,
            (temperature >= 0) & temperature.isfinite(),
            "0 (greedy) or positive numbers",
        )
        _check_values("top_k", top_k, top_k >= 0, "0 (all) or at least 1")
        _check_values("top_p", top_p, (top_p > 0) & (top_p <= 1), "numbers in (0, 1]")
        _check_values("min_p", min_p, (min_p >= 0) & (min_p <= 1), "numbers in [0, 1]")
        penalised = (repetition_penalty > 0) & repetition_penalty.isfinite()
        _check_values("repetition_penalty", repetition_penalty, penalised, "positive numbers (1 = off)")


def check_accept_tokens(
    sampled_token_ids: Tensor | None,
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
    *,
    block_size: int,
    ring: Tensor | None = None,
    launches: Tensor | None = None,
    step: int = 0,
) -> None:
    """Every argument of ``accept_tokens``; raises `ArgumentError` before anything is written.
    ``sampled_token_ids``: None = not yet."""
    check_dims("block_table", block_table, None, None)
    num_reqs = block_table.shape[0]
    if not block_table.shape[1]:
        raise ArgumentError("block_table", "at least one column", f"shape {list(block_table.shape)}")
    sampled = {} if sampled_token_ids is None else {"sampled_token_ids": sampled_token_ids}
    longs = {
        **sampled,
        "input_ids": input_ids,
        "positions": positions,
        "slot_mapping": slot_mapping,
        "counters": counters,
        "tokens_out": tokens_out,
    }
    ints = {"seq_lens": seq_lens, "remaining": remaining}
    for tensors, dtype in ((longs, torch.int64), (ints, torch.int32)):
        for name, tensor in tensors.items():
            check_dims(name, tensor, num_reqs)
            check_dtype(name, tensor, dtype)
    check_dims("stop_token_ids", stop_token_ids, num_reqs, None)
    check_dims("seen", seen, num_reqs, None)
    check_dtype("stop_token_ids", stop_token_ids, torch.int64)
    check_dtype("block_table", block_table, torch.int32)
    check_dtype("seen", seen, torch.int32)
    check_last_dim(block_table=block_table, stop_token_ids=stop_token_ids, seen=seen, **longs, **ints)
    check_device(
        input_ids.device, block_table=block_table, stop_token_ids=stop_token_ids, seen=seen, **longs, **ints
    )
    if block_size < 1:
        raise ArgumentError("block_size", "at least 1 token", str(block_size))
    _check_ring(ring, launches, step, num_reqs, input_ids.device)
    if num_reqs and reads_values(input_ids.device):
        capacity = block_table.shape[1] * block_size
        _check_values(
            "seq_lens", seq_lens, seq_lens <= capacity, f"at most {capacity}, what a row of block_table holds"
        )
        if sampled_token_ids is None:
            return
        fits = (sampled_token_ids >= 0) & (sampled_token_ids < 32 * seen.shape[1]) | (
            sampled_token_ids == NO_TOKEN
        )
        expected = f"tokens in [0, {32 * seen.shape[1]}), as seen has, or {NO_TOKEN} (none could be drawn)"
        _check_values("sampled_token_ids", sampled_token_ids, fits | (seq_lens <= 0), expected)


def check_finish_step(
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
    *,
    block_size: int,
    ring: Tensor | None,
    launches: Tensor | None,
    step: int,
) -> None:
    """Every argument of ``finish_step``; raises `ArgumentError` before anything is written."""
    check_dims("logits", logits, None, None)
    check_dims("block_table", block_table, logits.shape[0], None)
    check_accept_tokens(
        None,
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
        block_size=block_size,
        ring=ring,
        launches=launches,
        step=step,
    )
    check_sample_tokens(
        logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, tokens_out
    )


def _check_ring(
    ring: Tensor | None, launches: Tensor | None, step: int, num_reqs: int, device: torch.device
) -> None:
    if ring is None or launches is None:
        if ring is not launches:
            raise ArgumentError("ring, launches", "both or neither", "one of them")
        return
    if not num_reqs:
        raise ArgumentError("ring", "rows whose tokens it takes", "no rows", "leave ring and launches out")
    check_dims("ring", ring, None, None, None)
    check_dims("launches", launches, 2)
    if ring.shape[0] < 2 or ring.shape[1] < 2 or ring.shape[2] < num_reqs:
        raise ArgumentError(
            "ring", f"[slots + 1, steps + 1, at least {num_reqs}]", f"shape {list(ring.shape)}"
        )
    if not 0 <= step < ring.shape[1] - 1:
        raise ArgumentError("step", f"in [0, {ring.shape[1] - 1}), the steps of ring", str(step))
    check_dtype("ring", ring, torch.int64)
    check_dtype("launches", launches, torch.int64)
    check_last_dim(ring=ring, launches=launches)
    check_device(device, ring=ring, launches=launches)


def _check_values(name: str, tensor: Tensor, good: Tensor, expected: str) -> None:
    if not bool(good.all()):
        row = int((~good).nonzero()[0, 0])
        raise ArgumentError(name, expected, f"{tensor[row].item()} in row {row}")
