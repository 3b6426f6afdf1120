"""Requests that can't be are refused by name, before anything is queued."""

from array import array
from typing import Any

import numpy
import pytest
import torch
from engine_requests import EACH, PROMPTS, Letters, assert_unharmed, engine, tokens_of

from torchpaged import ArgumentError
from torchpaged.engine import SamplingParams
from torchpaged.engine.prompts import encoded

pytestmark = pytest.mark.timeout(300)  # a hang is a failure


INTEGERS = [
    *(1.5, 2.0, "1", True, numpy.float32(1.0), numpy.bool_(True), torch.tensor(1), float("nan"), 10**5000),
    *(-(10**5000), [1], 1j),
]
FLOATS = [
    *("1", True, float("nan"), float("inf"), 10**400, 1j, [0.5], torch.tensor(0.5), numpy.float64("nan")),
    -0.5,
]
BAD = {
    **dict.fromkeys(("top_k", "seed"), INTEGERS),
    "max_new_tokens": [x for x in INTEGERS if x is not INTEGERS[8]] + [0, -1, None],
    "temperature": [*FLOATS, None, 1e39],
    "top_p": [*FLOATS, None, 0.0, 1e-50, 1.5],
    "min_p": [*FLOATS, None, 1.1],
    "repetition_penalty": [*FLOATS, None, 0.0, 1e-50, 1e39],
    "stop": ["text", ("",), (1,), {"a"}, None, (None,), b"x"],
    "stop_token_ids": [3, (1.5,), (True,), "12", {3}, None, (2**63,), (-1,), ("a",)],
    "ignore_eos": [1, None, "yes"],
    **{name: [x for x in INTEGERS if x is not INTEGERS[8]] + [-1] for name in ("logprobs", "n")},
    "min_new_tokens": [*INTEGERS, None, -1, 65],
    "logit_bias": [
        *(None, [(3, 0.5)], {3: "1"}, {3: None}, {3: True}, {1.5: 1.0}, {-1: 1.0}, {"3": 1.0}),
        *({3: float("nan")}, {3: float("inf")}, {3: 1e39}),
    ],
    "extra_args": [3.0, None, "12", {3.0}, ("1",), (True,), (float("nan"),), (float("inf"),), (1e39,)],
}


@pytest.mark.parametrize("name", BAD)
def test_every_field_is_checked_by_type_and_range(name: str) -> None:
    values = BAD[name] + ([2**63, -(2**63) - 1] if name == "seed" else [2**31, -1] if name == "top_k" else [])
    for value in values:
        with pytest.raises(ArgumentError, match=f"^{name}: expected"):
            SamplingParams(**{name: value})


def test_numbers_of_numpy_become_plain() -> None:
    params = SamplingParams(
        max_new_tokens=numpy.int32(3),
        seed=numpy.int64(-5),
        top_k=numpy.uint8(4),
        temperature=numpy.float32(0.5),
        top_p=1,
        stop=["a"],
        stop_token_ids=[numpy.int64(4)],
        logit_bias={numpy.int64(4): numpy.float32(0.5)},
        extra_args=[1, numpy.float64(0.5)],
    )
    assert params == SamplingParams(
        3, 0.5, 4, 1.0, seed=-5, stop=("a",), stop_token_ids=(4,), logit_bias={4: 0.5}, extra_args=(1.0, 0.5)
    )
    integers = params.max_new_tokens, params.seed, params.top_k, *params.stop_token_ids, *params.logit_bias
    assert {type(x) for x in integers} == {int}
    floats = params.temperature, params.top_p, *params.logit_bias.values(), *params.extra_args
    assert {type(x) for x in floats} == {float}


def test_bad_prompts_are_refused_before_anything_is_queued(faulty: Any, want: list[list[int]]) -> None:
    generator = engine(faulty)
    for prompt in (
        *(
            [1.5],
            [True],
            [5, True],
            [5, 98, 99],
            ["a"],
            [[1, 2]],
            torch.tensor([1.0]),
            torch.tensor([[1, 2]]),
            [torch.tensor([1, 2]), torch.tensor([3])],
            [5, numpy.array([5, 6])],
            [torch.tensor(5)],
        ),
        *(7, None, b"ab", {"input_ids": [1]}, [99], [-1], []),
    ):
        with pytest.raises(ArgumentError, match="^prompt: expected"):
            generator.submit(prompt)
        with pytest.raises(ArgumentError, match="^prompts?: expected"):
            generator.generate([PROMPTS[0], prompt])
    for sampling in (3, {"top_k": 2}, [SamplingParams()], "greedy"):
        with pytest.raises(ArgumentError, match="^sampling: expected"):
            generator.submit(PROMPTS[0], sampling)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^stop_token_ids: expected token ids in \[0, 99\), got 99"):
        generator.submit(PROMPTS[0], SamplingParams(stop_token_ids=(99,)))
    with pytest.raises(ArgumentError, match="^prompts: expected"):
        generator.generate([5, 6, 7])
    with pytest.raises(ArgumentError, match="^tokenizer: expected"):
        generator.submit("text")
    with pytest.raises(ArgumentError, match="^max_batch_size: expected an integer"):
        engine(faulty, max_batch_size=2.5)
    assert not generator.has_unfinished
    assert generator.stats.prompt_tokens == 0
    prompts = [torch.tensor(PROMPTS[0]), numpy.array(PROMPTS[2]), array("i", PROMPTS[0])]
    outputs = generator.generate(prompts, [EACH[0], EACH[2], EACH[0]])
    assert tokens_of(outputs) == [want[0], want[2], want[0]]
    assert_unharmed(generator, want)


def test_text_that_no_tokenizer_takes_is_named() -> None:
    with pytest.raises(ArgumentError, match="^prompt: expected text in UTF-8"):
        encoded("half \ud800", lambda text: {"input_ids": [1]})


def test_one_string_is_one_prompt(faulty: Any) -> None:
    generator = engine(faulty)
    generator.tokenizer = Letters()
    outputs = generator.generate("hello", EACH[0])
    assert len(outputs) == 1
    assert outputs[0].prompt_token_ids == Letters()("hello")["input_ids"]
    assert tokens_of(outputs) == tokens_of(generator.generate(["hello"], EACH[0]))
