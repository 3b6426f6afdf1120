"""Triton's kernels of sample_tokens, accept_tokens and finish_step, against the reference."""

from typing import Any

import pytest
import torch
from kernels import Kernels, over
from op_inputs.sampling import (
    SAMPLING_ROWS,
    assert_finish_is_both,
    assert_samples_close,
    make_accept_inputs,
    make_finish_inputs,
    make_near_ties,
    make_sampling_inputs,
)

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.step_end.check import NO_TOKEN

REFERENCE = BACKEND_OPS["reference"]
ALL = list(SAMPLING_ROWS.values())


@pytest.mark.parametrize(
    ("dtype", "vocab_size"), [(torch.float32, 301), (torch.bfloat16, 600), (torch.float16, 33)], ids=str
)
@over("triton")
def test_sample_tokens(on: Kernels, dtype: torch.dtype, vocab_size: int) -> None:
    """Several tiles and chunks, a vocabulary that is no multiple of anything, one smaller than a group."""
    rows = {301: ALL, 600: ALL[6::2], 33: ALL[::2]}[vocab_size]
    options: dict[str, Any] = {"dtype": dtype, "device": on.device, "padding": 3}
    assert_samples_close(on.ops, make_sampling_inputs(rows, vocab_size=vocab_size, **options))


@over("triton")
def test_ties_and_exact_edges(on: Kernels) -> None:
    """Tokens of one likelihood in several chunks: the lowest are kept, as many as the reference keeps."""
    vocab_size, equal, times = (330, 8, 3) if on.device == "cpu" else (100_000, 1024, 20)
    rows = [{"top_p": 0.5}, {"top_k": equal * 5 // 8}, {"top_k": equal * 3 // 4, "top_p": 0.5}]
    rows += [{"top_k": equal * 3 // 2}, {"min_p": 1.0}]
    inputs = make_sampling_inputs(rows * times, vocab_size=vocab_size, device=on.device)
    inputs["logits"].fill_(-1000.0)
    inputs["logits"][:, torch.randperm(vocab_size, device=on.device)[:equal]] = 7.0
    assert_samples_close(on.ops, inputs, slack=0.0)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), -0.0], ids=str)
@over("triton")
def test_special_logits(on: Kernels, value: float) -> None:
    rows = [SAMPLING_ROWS[name] for name in ("greedy", "plain", "top_20", "top_p", "everything")]
    few = on.device == "cpu"
    inputs = make_sampling_inputs(rows if few else ALL, vocab_size=40 if few else 5000, device=on.device)
    inputs["logits"][:, ::2] = value
    assert_samples_close(on.ops, inputs)
    inputs["logits"].fill_(value)
    assert_samples_close(on.ops, inputs)


@over("triton")
def test_the_largest_temperatures(on: Kernels) -> None:
    """All tokens are alike then, and noise times such a number is infinite in float32."""
    rows = [{"temperature": 3e38, **row} for row in ({}, {"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.9})]
    rows *= 1 if on.device == "cpu" else 3
    assert_samples_close(on.ops, make_sampling_inputs(rows, vocab_size=300, device=on.device))


#: Ends of the vocabulary and of tiles, in the interpreter and on a GPU.
TOKENS = {"cpu": (0, 255, 256, 400, 599), "cuda": (0, 1023, 1024, 60_000, 99_999)}


@pytest.mark.slow_cases("triton-cpu-*", but=("*-0",))
@pytest.mark.parametrize("at", range(5))
@over("triton")
def test_one_nan_in_any_tile_leaves_no_token(on: Kernels, at: int) -> None:
    """Whether the largest logit is in its tile or in another, and whatever the row asks for; the rows beside
    it draw."""
    names = ("greedy", "plain", "top_20", "top_p", "min_p", "top_k_top_p", "everything", "greedy_penalty")
    rows = [SAMPLING_ROWS[name] for name in names] if on.device == "cpu" else ALL
    token, vocab_size = TOKENS[on.device][at], TOKENS[on.device][-1] + 1
    for beside in (rows[1:4],) if on.device == "cpu" else ([], rows * 3):
        inputs = make_sampling_inputs(rows + beside, vocab_size=vocab_size, device=on.device)
        inputs["logits"][: len(rows), token], inputs["logits"][:, 300] = float("nan"), 50.0
        got = assert_samples_close(on.ops, inputs)
        assert got[: len(rows)].tolist() == [NO_TOKEN] * len(rows)


@over("triton", gpu=())
def test_tokens_of_reference_and_kernel_are_the_same(on: Kernels) -> None:
    inputs = make_sampling_inputs([{}] * 10, vocab_size=260, spread=0.3, device=on.device)
    on.ops.sample_tokens(**inputs)
    got = inputs["out"].clone()
    REFERENCE.sample_tokens(**inputs)
    assert torch.equal(got, inputs["out"])


@over("triton")
def test_of_two_tokens_that_score_nearly_the_same_the_better_one_is_drawn(on: Kernels) -> None:
    """In one tile, in two of a program, in two programs."""
    count, sizes = (8, (700,)) if on.device == "cpu" else (20, (5000, 128256))
    for vocab_size in sizes:
        inputs, better = make_near_ties(count, vocab_size=vocab_size, device=on.device)
        on.ops.sample_tokens(**inputs)
        assert torch.equal(inputs["out"].cpu(), better)


def assert_accepts_as_the_reference(on: Kernels, num_reqs: int, times: int, **options: Any) -> None:
    inputs = make_accept_inputs(num_reqs, device=on.device, **options)
    same = {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    for _ in range(times):
        on.ops.accept_tokens(**inputs)
        REFERENCE.accept_tokens(**same)
        got = {name: x.cpu() for name, x in inputs.items() if isinstance(x, torch.Tensor)}  # the op is over
        assert all(torch.equal(x, same[name]) for name, x in got.items())


@pytest.mark.parametrize("num_stops", [0, 3, 20])
@pytest.mark.parametrize("num_reqs", [0, 1, 40, 300])
@over("triton")
def test_accept_tokens(on: Kernels, num_reqs: int, num_stops: int) -> None:
    assert_accepts_as_the_reference(on, num_reqs, 1, num_stops=num_stops)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(("num_reqs", "launch"), [(1, 0), (40, 7), (40, -1), (300, 5), (300, 3 * 2**40)])
@over("triton")
def test_accept_tokens_fills_the_ring(on: Kernels, num_reqs: int, launch: int, step: int) -> None:
    """One program and several: the last one counts. Twice, since their meeting must leave nothing behind."""
    assert_accepts_as_the_reference(on, num_reqs, 2, launch=launch, step=step)


@pytest.mark.slow_cases("triton-cpu-19-*", but=("triton-cpu-19-4-1",))
@pytest.mark.parametrize(
    ("count", "launch", "step"), [(1, None, 0), (1, 4, 1), (19, 4, 1), (19, 4, 0), (19, -1, 1)]
)
@over("triton")
def test_finish_step_is_both_ops(on: Kernels, count: int, launch: int | None, step: int) -> None:
    """To the bit: all kinds of rows, idle ones and such as end among them, one program and several, with a
    ring and without."""
    options: dict[str, Any] = {"vocab_size": 500 if on.device == "cpu" else 5000, "device": on.device}
    inputs = make_finish_inputs(ALL[:count], dtype=torch.float16, launch=launch, step=step, **options)
    if count > 1:
        inputs["logits"][6::7, 499] = float("nan")
    assert_finish_is_both(on.ops, inputs)


@over("triton")
def test_opcheck(on: Kernels) -> None:
    inputs = make_accept_inputs(device=on.device)
    options = {"block_size": inputs.pop("block_size")}
    torch.library.opcheck(on.ops.accept_tokens, tuple(inputs.values()), options)
    inputs = make_sampling_inputs([{}, {"temperature": 0.0}], vocab_size=40, device=on.device)
    torch.library.opcheck(on.ops.sample_tokens, tuple(inputs.values()), {})
