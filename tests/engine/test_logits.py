"""What requests ask of logits: a user's processor on the device, biases, a minimum of tokens, log
probabilities. Tokens are those of transformers with the same logits processors, in every kind of step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged.engine import Generator, LogitsRows, SamplingParams
from torchpaged.graphs import TapeCapture
from torchpaged.hf import unfuse

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
PROMPTS = [[5, 6, 7], [9], list(range(11, 40)), [50, 51, 52, 53, 54, 55, 56], [3, 3, 3, 3]]
SIZES: dict[str, Any] = {"block_size": 4, "max_batch_size": 3, "max_seq_len": 96, "prefill_chunk_size": 16}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {"buckets": [2, 3]},
    "launches of 3": {"steps_per_launch": 3, "prefill_buckets": [8, 16]},
    "on a tape": {
        "capture": TapeCapture(),
        "backend": "reference",
        "buckets": [1, 3],
        "prefill_buckets": [16],
        "steps_per_launch": 2,
    },
    "one by one": {"graphs": False},
    "steps apart": {"graphs": False, "mixed_steps": False},
    "short of blocks": {"num_blocks": 15, "max_seq_len": 56},
    "short of blocks, one by one": {"num_blocks": 15, "max_seq_len": 56, "graphs": False},
    "fused": {"fuse": True, "steps_per_launch": 2},
    "batch invariant": {"batch_invariant": True},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, model: Any) -> Iterator[dict[str, Any]]:
    yield {**SIZES, **WAYS[request.param]}
    if request.param == "fused":
        unfuse(model)


@pytest.fixture(scope="module")
def plain(model: Any) -> Any:
    """The model as transformers runs it."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("eager")
    return copied


def eager(model: Any, prompt: list[int], count: int, *processors: Any, **options: Any) -> list[int]:
    """Greedy tokens of transformers with these logits processors."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        logits_processor=transformers.LogitsProcessorList(processors),
        **options,
    )
    return out[0, len(prompt) :].tolist()


# ------------------------------------------------------------------------------------ a user's processor
def no_step_beyond(logits: Tensor, rows: LogitsRows) -> Tensor:
    """Bans tokens within ``extra_args[0]`` of the newest one; for every third token also those below
    ``extra_args[1]``; behind a text of 30 tokens favours the one of its length."""
    token = torch.arange(logits.shape[1])
    near = (token - rows.last_token_ids[:, None]).abs() <= rows.extra_args[:, :1]
    low = (rows.num_generated[:, None] % 3 == 2) & (token < rows.extra_args[:, 1:])
    logits += 0.5 * ((rows.seq_lens[:, None] > 30) & (token == rows.seq_lens[:, None]))
    return logits.masked_fill(near | low, float("-inf"))


class NoStepBeyond(transformers.LogitsProcessor):
    """The same for one row of transformers."""

    def __init__(self, prompt: list[int], *extra_args: float) -> None:
        self.begin, self.args = len(prompt), torch.tensor([extra_args])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        count = torch.tensor([input_ids.shape[1]])
        return no_step_beyond(
            scores.clone(), LogitsRows(count - self.begin, input_ids[:, -1], count, self.args)
        )


def test_a_processor_gives_the_tokens_of_transformers(model: Any, plain: Any, way: dict[str, Any]) -> None:
    args = [(float(i), 20.0 * i) for i in range(5)]
    want = [
        eager(plain, p, 14, NoStepBeyond(p, *a), eos_token_id=None)
        for p, a in zip(PROMPTS, args, strict=True)
    ]
    assert len({*map(tuple, want)}) == 5
    assert want != [eager(plain, p, 14, eos_token_id=None) for p in PROMPTS]
    generator = Generator(model, **way, logits_processor=no_step_beyond, max_extra_args=2)
    params = [SamplingParams(max_new_tokens=14, ignore_eos=True, extra_args=a) for a in args]
    outputs = generator.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == want
    if "num_blocks" in way:
        assert generator.stats.preemptions


# ---------------------------------------------------------------------------- biases and a minimum of tokens
def test_biases_and_a_minimum_give_the_tokens_of_transformers(
    model: Any, plain: Any, way: dict[str, Any]
) -> None:
    """Ends are tokens that the texts would have early."""
    free = [eager(plain, p, 12, eos_token_id=None) for p in PROMPTS]
    ends = [tokens[2:4] for tokens in free]
    biases = [{}, {free[1][0]: -1.5}, {17: 0.7, 98: -0.5, free[2][1]: float("-inf")}, {}, {60: 100.0}]
    least = [0, 6, 7, 10, 9]
    want = []
    for prompt, end, bias, count in zip(PROMPTS, ends, biases, least, strict=True):
        options: dict[str, Any] = {"eos_token_id": end, "pad_token_id": 0}
        if count:
            options["min_new_tokens"] = count
        if bias:
            options["sequence_bias"] = {(token,): added for token, added in bias.items()}
        want.append(eager(plain, prompt, 12, **options))
    assert [len(tokens) for tokens in want][:2] == [3, 12]
    generator = Generator(model, **way, max_logit_bias=5)
    params = [
        SamplingParams(
            max_new_tokens=12, min_new_tokens=count, logit_bias=bias, stop_token_ids=end, ignore_eos=True
        )
        for end, bias, count in zip(ends, biases, least, strict=True)
    ]
    outputs = generator.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == want


# ------------------------------------------------------------------------------------------ log probabilities
def check_logprobs(model: Any, output: Any, count: int) -> None:
    """Against eager logits of the whole text."""
    text, begin = output.prompt_token_ids + output.token_ids, len(output.prompt_token_ids)
    with torch.inference_mode():
        want = model(torch.tensor([text])).logits[0, begin - 1 : -1].log_softmax(-1)
    assert len(output.logprobs) == len(output.token_ids) == len(want)
    for token, got, row in zip(output.token_ids, output.logprobs, want, strict=True):
        likeliest = row.topk(count).indices.tolist()
        assert list(got) == list(dict.fromkeys([token, *likeliest]))
        torch.testing.assert_close(torch.tensor(list(got.values())), row[list(got)], atol=2e-5, rtol=0)


def test_logprobs_are_of_the_models_own_logits(model: Any, plain: Any, way: dict[str, Any]) -> None:
    """Whatever the tokens are drawn from; of requests that want others or none beside them."""
    generator = Generator(
        model,
        **way,
        max_logprobs=4,
        max_logit_bias=1,
        max_extra_args=2,
        logits_processor=lambda logits, rows: logits + rows.extra_args[:, :1] * rows.extra_args[:, 1:],
    )
    drawn = {"temperature": 1.3, "repetition_penalty": 1.2, "logit_bias": {8: 9.0}, "extra_args": (1.0, 2.0)}
    counts = [4, 0, None, 2, 3]
    params = [
        SamplingParams(max_new_tokens=11, logprobs=count, seed=i, **(drawn if i != 3 else {}))
        for i, count in enumerate(counts)
    ]
    outputs = generator.generate(PROMPTS, params)
    for output, count in zip(outputs, counts, strict=True):
        if count is None:
            assert output.logprobs is None
        else:
            check_logprobs(plain, output, count)
    # the draws are those of a Generator that tells nothing
    silent = [SamplingParams(max_new_tokens=11, seed=i, **(drawn if i != 3 else {})) for i in range(5)]
    assert [o.token_ids for o in generator.generate(PROMPTS, silent)] == [o.token_ids for o in outputs]


# ------------------------------------------------------------------------------------------ several samples
@pytest.mark.parametrize("graphs", [True, False])
def test_samples_share_their_prompt_and_are_those_of_their_seeds(model: Any, graphs: bool) -> None:
    generator = Generator(model, **SIZES, graphs=graphs)
    sampling = SamplingParams(max_new_tokens=9, temperature=1.1, seed=2**63 - 2, n=4)
    several = [PROMPTS[2], PROMPTS[0]]
    outputs = generator.generate(several, [sampling, SamplingParams(max_new_tokens=9)])
    assert [o.prompt_token_ids for o in outputs] == [PROMPTS[2]] * 4 + [PROMPTS[0]]
    assert len({tuple(o.token_ids) for o in outputs}) == 5
    # 29 tokens are 7 full blocks of 4
    assert generator.stats.shared_tokens == 3 * 28
    seeds = [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]
    alone = Generator(model, **SIZES, graphs=False, share_prefixes=False)
    for output, seed in zip(outputs[:4], seeds, strict=True):
        one = SamplingParams(max_new_tokens=9, temperature=1.1, seed=seed)
        assert alone.generate([PROMPTS[2]], one)[0].token_ids == output.token_ids
    ids = [generator.submit(PROMPTS[2], one) for one in sampling.samples()]
    tokens: dict[int, list[int]] = {number: [] for number in ids}
    for event in generator.stream():
        assert event.token_id is not None
        tokens[event.request_id].append(event.token_id)
    assert list(tokens.values()) == [o.token_ids for o in outputs[:4]]
    free = [one.seed for one in SamplingParams(n=3, temperature=1.0).samples()]
    assert free == [None] * 3
