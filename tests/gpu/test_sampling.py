"""sample_tokens and accept_tokens on a GPU: the oracle, whole vocabularies, capture once and replay with
other parameters."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
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
from torchpaged.custom_ops.step_end.reference import gumbel_noise as reference_noise
from torchpaged.custom_ops.step_end.triton.sample_noise import (
    LEFT_OUT,
    MARGIN,
    coarse_score,
    gumbel_noise,
)
from torchpaged.custom_ops.step_end.triton.sample_tokens import sample_tiles
from torchpaged.engine import SamplingParams
from torchpaged.engine.sampling import sample, seen_tokens

pytestmark = pytest.mark.gpu
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
ALL = list(SAMPLING_ROWS.values())
VOCABS = (1, 33, 1000, 50257, 128256, 262144)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_sample_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    for seed, spread in ((0, 3.0), (1, 0.5)):
        inputs = make_sampling_inputs(
            ALL, vocab_size=vocab_size, dtype=dtype, device="cuda", seed=seed, spread=spread, padding=7 * seed
        )
        assert_samples_close(TRITON, inputs)


def test_the_reference_runs_on_a_gpu() -> None:
    assert_samples_close(REFERENCE, make_sampling_inputs(ALL, vocab_size=1000, device="cuda"))


def test_peaked_logits() -> None:
    """As a language model has them: few groups are listed."""
    inputs = make_sampling_inputs(ALL * 4, vocab_size=128256, dtype=torch.bfloat16, device="cuda")
    inputs["logits"] = (inputs["logits"].float() ** 3 / 8).to(torch.bfloat16)
    assert_samples_close(TRITON, inputs)


def test_ties_and_exact_edges() -> None:
    rows = [{"top_p": 0.5}, {"top_k": 500}, {"top_k": 600, "top_p": 0.5}, {"top_k": 1200}, {"min_p": 1.0}]
    inputs = make_sampling_inputs(rows * 20, vocab_size=100_000, device="cuda")
    inputs["logits"].fill_(-1000.0)
    inputs["logits"][:, torch.randperm(100_000, device="cuda")[:1024]] = 7.0
    assert_samples_close(TRITON, inputs, slack=0.0)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), -0.0], ids=str)
def test_special_logits(value: float) -> None:
    inputs = make_sampling_inputs(ALL, vocab_size=5000, device="cuda")
    inputs["logits"][:, ::2] = value
    assert_samples_close(TRITON, inputs)
    inputs["logits"].fill_(value)
    assert_samples_close(TRITON, inputs)


@pytest.mark.parametrize("token", [0, 1023, 1024, 60_000, 99_999])
@pytest.mark.parametrize("count", [1, 4])
def test_one_nan_in_any_tile_leaves_no_token(count: int, token: int) -> None:
    """Whether the largest logit is in its tile or in another, whatever the row asks for, with few rows
    and many."""
    inputs = make_sampling_inputs(ALL * count, vocab_size=100_000, device="cuda")
    inputs["logits"][: len(ALL), token], inputs["logits"][:, 300] = float("nan"), 50.0
    assert assert_samples_close(TRITON, inputs)[: len(ALL)].tolist() == [-2] * len(ALL)


@pytest.mark.parametrize("vocab_size", [5000, 128256])
def test_of_two_tokens_that_score_nearly_the_same_the_better_one_is_drawn(vocab_size: int) -> None:
    inputs, better = make_near_ties(64, vocab_size=vocab_size, device="cuda")
    TRITON.sample_tokens(**inputs)
    assert torch.equal(inputs["out"].cpu(), better)


@triton.jit
def _both_scores(bits_ptr, coarse_ptr, exact_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    bits = tl.load(bits_ptr + at).to(tl.uint32)
    zero = tl.zeros([N], tl.float32)
    tl.store(coarse_ptr + at, coarse_score(zero, bits, 1.0, True))
    tl.store(exact_ptr + at, gumbel_noise(bits))


def test_coarse_scores_are_as_near_as_they_say() -> None:
    """All magnitudes of random bits near both ends, and 2**24 between."""
    ends = torch.arange(2**22, device="cuda")
    between = torch.randint(2**32, (2**24,), device="cuda")
    bits = torch.cat([ends, 2**32 - 1 - ends, between, 2**32 - 1 - (between >> 8)])
    coarse, exact = (torch.empty(len(bits), dtype=torch.float32, device="cuda") for _ in range(2))
    _both_scores[(len(bits) // 1024,)](bits, coarse, exact, N=1024)
    above = coarse.double() + LEFT_OUT.value - exact.double()
    assert above.min() > -0.5 * MARGIN.value
    assert above[bits < 0.99 * 2**32].max() < 0.5 * MARGIN.value
    assert bool(coarse.isfinite().all())
    assert float((exact.double() - reference_noise(bits)).abs().max()) < 2e-5


@pytest.mark.parametrize(
    ("row", "kept"), [({}, 12), ({"top_k": 5}, 5), ({"top_p": 0.8}, 7), ({"temperature": 0.5}, 12)], ids=str
)
def test_draws_follow_the_probabilities(row: dict[str, float], kept: int) -> None:
    logits = torch.tensor([0.2, -1.0, 1.1, 0.0, -0.4, 0.9, -2.0, 0.5, 0.3, -0.1, 0.7, -3.0], device="cuda")
    count = 20_000
    inputs = make_sampling_inputs([row] * count, vocab_size=12, device="cuda")
    inputs |= {"logits": logits.expand(count, -1), "counters": torch.arange(count, device="cuda")}
    inputs["seeds"].fill_(99)
    TRITON.sample_tokens(**inputs)
    likeliest = logits.argsort(descending=True)[:kept]
    counts = inputs["out"].bincount(minlength=12)
    want = (logits[likeliest].double() / row.get("temperature", 1.0)).softmax(-1) * count
    assert int(counts[likeliest].sum()) == count
    assert float(((counts[likeliest] - want) ** 2 / want).sum()) < kept - 1 + 4 * (2 * (kept - 1)) ** 0.5


def test_the_same_token_in_any_company() -> None:
    """Alone and among 63 others, which means other tiles; in other rows, with other strides, time
    after time."""
    inputs = make_sampling_inputs((ALL * 4)[:64], vocab_size=128256, device="cuda", dtype=torch.bfloat16)
    inputs["logits"] /= 3
    assert sample_tiles(1, 128256).tile != sample_tiles(64, 128256).tile
    TRITON.sample_tokens(**inputs)
    want = inputs["out"].clone()
    for _ in range(3):
        TRITON.sample_tokens(**inputs)
        assert torch.equal(inputs["out"], want)
    for row in (0, 7, 30, 63):
        alone = {name: tensor[row : row + 1] for name, tensor in inputs.items()} | {
            "out": torch.zeros(1, dtype=torch.int64, device="cuda")
        }
        alone["logits"] = torch.nn.functional.pad(alone["logits"], (0, 3 + row))[:, :128256]
        TRITON.sample_tokens(**alone)
        assert int(alone["out"]) == int(want[row])


def test_capture_and_replay_with_other_parameters() -> None:
    """One graph serves greedy, plain and truncated rows; counters that move on give other tokens."""
    inputs = make_sampling_inputs([{"temperature": 0.0}] * 19, vocab_size=50257, device="cuda")
    TRITON.sample_tokens(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        TRITON.sample_tokens(**inputs)
    other = make_sampling_inputs(ALL, vocab_size=50257, device="cuda", seed=4)
    for name, tensor in other.items():
        inputs[name].copy_(tensor)
    for _ in range(3):
        inputs["counters"] += 1
        graph.replay()
        got = inputs["out"].clone()
        TRITON.sample_tokens(**inputs)
        assert torch.equal(inputs["out"], got)
        assert torch.equal(assert_samples_close(TRITON, inputs), got.cpu())


def test_nothing_synchronises() -> None:
    inputs, accept = (
        make_sampling_inputs(ALL, vocab_size=1000, device="cuda"),
        make_accept_inputs(device="cuda"),
    )
    TRITON.sample_tokens(**inputs)
    TRITON.accept_tokens(**accept)
    params = [SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.1)] * len(ALL)
    seen = seen_tokens([[1, 2, 3]] * len(ALL), 1000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        TRITON.sample_tokens(**inputs)
        TRITON.accept_tokens(**accept)
        tokens = sample(
            inputs["logits"], params, [5] * len(ALL), [0] * len(ALL), seen, ops=BACKEND_OPS["default"]
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.device.type == "cuda"
    assert tokens.shape == (len(ALL),)


@pytest.mark.parametrize("num_stops", [0, 3, 20])
@pytest.mark.parametrize("num_reqs", [1, 7, 300])
def test_accept_tokens(num_reqs: int, num_stops: int) -> None:
    inputs: dict[str, Any] = make_accept_inputs(num_reqs, num_stops=num_stops, device="cuda")
    same = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    TRITON.accept_tokens(**inputs)
    REFERENCE.accept_tokens(**same)
    assert all(torch.equal(x.cpu(), same[name]) for name, x in inputs.items() if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize(("num_reqs", "launch"), [(1, 0), (64, 7), (64, -1), (300, 5), (1000, 3 * 2**40)])
def test_accept_tokens_fills_the_ring(num_reqs: int, launch: int, step: int) -> None:
    """One program and several: the last one counts. Twice, since their meeting must leave nothing behind."""
    inputs: dict[str, Any] = make_accept_inputs(num_reqs, launch=launch, step=step, device="cuda")
    same = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    for _ in range(2):
        TRITON.accept_tokens(**inputs)
        REFERENCE.accept_tokens(**same)
        torch.cuda.synchronize()  # the op counts on a step between two of its calls
        assert all(
            torch.equal(x.cpu(), same[name]) for name, x in inputs.items() if isinstance(x, torch.Tensor)
        )


@pytest.mark.parametrize(
    ("count", "launch", "step"), [(1, None, 0), (1, 4, 1), (19, 4, 1), (19, 4, 0), (19, -1, 1)]
)
def test_finish_step_is_both_ops(count: int, launch: int | None, step: int) -> None:
    """To the bit: all kinds of rows, idle ones and such as end among them, one program and several, with a
    ring and without."""
    rows = ALL[:count]
    inputs = make_finish_inputs(
        rows, vocab_size=5000, dtype=torch.float16, launch=launch, step=step, device="cuda"
    )
    inputs["logits"][6::7, 7] = float("nan")
    assert_finish_is_both(TRITON, inputs)


def test_opcheck() -> None:
    torch.library.opcheck(TRITON.sample_tokens, tuple(make_sampling_inputs(ALL, device="cuda").values()), {})
    accept = make_accept_inputs(device="cuda")
    options = {"block_size": accept.pop("block_size")}
    torch.library.opcheck(TRITON.accept_tokens, tuple(accept.values()), options)
