"""The sampling kernels in Triton's interpreter, which test_run_interpreter.py runs."""

import os
from typing import Any

import pytest
import torch
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

pytest.importorskip("triton", reason="triton is not installed")
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1 before Python starts")
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]


@interpreted
@pytest.mark.parametrize(
    ("dtype", "vocab_size"), [(torch.float32, 301), (torch.bfloat16, 600), (torch.float16, 33)], ids=str
)
def test_sample_tokens(dtype: torch.dtype, vocab_size: int) -> None:
    """Several tiles and chunks, a vocabulary that is no multiple of anything, one smaller than a group."""
    rows = list(SAMPLING_ROWS.values())
    assert_samples_close(
        TRITON,
        make_sampling_inputs(
            rows if vocab_size < 400 else rows[6::2], vocab_size=vocab_size, dtype=dtype, padding=3
        ),
    )


@interpreted
def test_ties_and_exact_edges() -> None:
    """Tokens of one likelihood in two chunks: the lowest are kept, as many as the reference keeps."""
    rows = [{"top_p": 0.5}, {"top_k": 5}, {"top_k": 6, "top_p": 0.5}, {"top_k": 12}, {"min_p": 1.0}]
    inputs = make_sampling_inputs(rows * 3, vocab_size=330)
    inputs["logits"].fill_(-1000.0)
    inputs["logits"][:, [3, 64, 100, 128, 200, 290, 300, 329]] = 7.0
    assert_samples_close(TRITON, inputs, slack=0.0)


@interpreted
@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), -0.0], ids=str)
def test_special_logits(value: float) -> None:
    rows = [SAMPLING_ROWS[name] for name in ("greedy", "plain", "top_20", "top_p", "everything")]
    inputs = make_sampling_inputs(rows, vocab_size=40)
    inputs["logits"][:, ::2] = value
    assert_samples_close(TRITON, inputs)
    inputs["logits"].fill_(value)
    assert_samples_close(TRITON, inputs)


@interpreted
def test_the_largest_temperatures() -> None:
    """All tokens are alike then, and noise times such a number is infinite in float32."""
    rows = [{"temperature": 3e38, **row} for row in ({}, {"top_k": 20}, {"top_p": 0.5}, {"min_p": 0.9})]
    assert_samples_close(TRITON, make_sampling_inputs(rows * 3, vocab_size=300))


@pytest.mark.slow_cases(but=("0",))
@interpreted
@pytest.mark.parametrize("token", [0, 255, 256, 599])
def test_one_nan_in_any_tile_leaves_no_token(token: int) -> None:
    """Whether the largest logit is in its tile or in another, and whatever the row asks for; the rows beside
    it draw."""
    rows = [
        SAMPLING_ROWS[name]
        for name in (
            "greedy",
            "plain",
            "top_20",
            "top_p",
            "min_p",
            "top_k_top_p",
            "everything",
            "greedy_penalty",
        )
    ]
    inputs = make_sampling_inputs(rows + rows[1:4], vocab_size=600)
    inputs["logits"][:8, token], inputs["logits"][:, 300] = float("nan"), 50.0
    assert assert_samples_close(TRITON, inputs)[:8].tolist() == [NO_TOKEN] * 8


@interpreted
def test_tokens_of_reference_and_kernel_are_the_same() -> None:
    inputs = make_sampling_inputs([{}] * 30, vocab_size=260, spread=0.3)
    TRITON.sample_tokens(**inputs)
    got = inputs["out"].clone()
    REFERENCE.sample_tokens(**inputs)
    assert torch.equal(got, inputs["out"])


@interpreted
def test_of_two_tokens_that_score_nearly_the_same_the_better_one_is_drawn() -> None:
    """In one tile, in two of a program, in two programs."""
    inputs, better = make_near_ties(20, vocab_size=700)
    TRITON.sample_tokens(**inputs)
    assert torch.equal(inputs["out"], better)


@interpreted
@pytest.mark.parametrize("num_stops", [0, 3, 20])
@pytest.mark.parametrize("num_reqs", [0, 40])
def test_accept_tokens(num_reqs: int, num_stops: int) -> None:
    inputs: dict[str, Any] = make_accept_inputs(num_reqs, num_stops=num_stops)
    same = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    TRITON.accept_tokens(**inputs)
    REFERENCE.accept_tokens(**same)
    assert all(torch.equal(x, same[name]) for name, x in inputs.items() if isinstance(x, torch.Tensor))


@interpreted
@pytest.mark.parametrize(("num_reqs", "launch", "step"), [(40, 7, 1), (40, -1, 1), (300, 5, 0), (300, 5, 1)])
def test_accept_tokens_fills_the_ring(num_reqs: int, launch: int, step: int) -> None:
    """One program and several: the last one counts."""
    inputs: dict[str, Any] = make_accept_inputs(num_reqs, launch=launch, step=step)
    same = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    TRITON.accept_tokens(**inputs)
    REFERENCE.accept_tokens(**same)
    assert all(torch.equal(x, same[name]) for name, x in inputs.items() if isinstance(x, torch.Tensor))


@pytest.mark.slow_cases("19-*", but=("19-4-1",))
@interpreted
@pytest.mark.parametrize(
    ("count", "launch", "step"), [(1, None, 0), (1, 4, 1), (19, 4, 1), (19, 4, 0), (19, -1, 1)]
)
def test_finish_step_is_both_ops(count: int, launch: int | None, step: int) -> None:
    """To the bit: all kinds of rows, idle ones and such as end among them, one program and several, with a
    ring and without."""
    rows = list(SAMPLING_ROWS.values())[:count]
    inputs = make_finish_inputs(rows, vocab_size=500, dtype=torch.float16, launch=launch, step=step)
    if count > 1:
        inputs["logits"][6::7, 499] = float("nan")
    assert_finish_is_both(TRITON, inputs)


@interpreted
def test_opcheck() -> None:
    options = {"block_size": 4}
    inputs = make_accept_inputs()
    del inputs["block_size"]
    torch.library.opcheck(TRITON.accept_tokens, tuple(inputs.values()), options)
    torch.library.opcheck(
        TRITON.sample_tokens,
        tuple(make_sampling_inputs([{}, {"temperature": 0.0}], vocab_size=40).values()),
        {},
    )
