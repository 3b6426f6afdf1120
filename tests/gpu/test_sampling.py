"""sample_tokens on a GPU: whole vocabularies, capture once and replay with other parameters."""

import pytest
import torch
import triton
import triton.language as tl
from captured import captured
from op_inputs.sampling import SAMPLING_ROWS, assert_samples_close, make_accept_inputs, make_sampling_inputs

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.step_end.reference import gumbel_noise as reference_noise
from torchpaged.custom_ops.step_end.triton.sample_noise import LEFT_OUT, MARGIN, coarse_score, gumbel_noise
from torchpaged.custom_ops.step_end.triton.sample_tokens import sample_tiles

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


def test_tokens_are_independent_of_batch_composition() -> None:
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
    graph, _ = captured(lambda: TRITON.sample_tokens(**inputs))
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
    torch.cuda.set_sync_debug_mode("error")
    try:
        TRITON.sample_tokens(**inputs)
        TRITON.accept_tokens(**accept)
    finally:
        torch.cuda.set_sync_debug_mode("default")
