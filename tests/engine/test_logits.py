"""What requests ask of logits: a user's processor on the device, biases, a minimum of tokens, log
probabilities. Tokens are those of transformers with the same logits processors, in every kind of step."""

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from engine_requests import Letters
from many_threads import in_threads
from model_coverage.architectures import model_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchpaged import ArgumentError, CaptureError
from torchpaged.engine import Generator, LogitsRows, SamplingParams
from torchpaged.graphs import TapeCapture
from torchpaged.hf import accelerate

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
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**SIZES, **WAYS[request.param]}


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
    assert [len(tokens) for tokens in want] == [3, 12, 12, 12, 12]
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
        torch.testing.assert_close(torch.tensor(list(got.values())), row[list(got)], atol=2e-5, rtol=2e-6)


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


# -------------------------------------------------------------------------------------- all of it, and others
EVERYTHING: dict[str, Any] = {
    "logits_processor": no_step_beyond,
    "max_extra_args": 2,
    "max_logit_bias": 3,
    "max_logprobs": 2,
}


def requests(**options: Any) -> list[SamplingParams]:
    """Of all kinds; ends of different lengths, so that rows are moved together."""
    more: list[dict[str, Any]] = [
        {"extra_args": (2.0, 30.0), "logprobs": 2},
        {"logit_bias": {40: 1.5, 7: -0.5}, "temperature": 0.9, "extra_args": (1.0,)},
        {},
        {"min_new_tokens": 8, "stop_token_ids": (68, 13), "logprobs": 0},
        {"extra_args": (3.0, 55.0), "logit_bias": {3: -9.0}, "logprobs": 1, "temperature": 1.2, "top_p": 0.9},
    ]
    return [
        SamplingParams(max_new_tokens=count, seed=i, **given, **options)
        for i, (given, count) in enumerate(zip(more, (17, 4, 9, 13, 6), strict=True))
    ]


def told(outputs: Any) -> list[Any]:
    """Tokens, and log probabilities in as many digits as all ways of computing them share."""
    return [
        (
            o.token_ids,
            o.finish_reason,
            o.logprobs and [{token: round(p, 3) for token, p in each.items()} for each in o.logprobs],
        )
        for o in outputs
    ]


@pytest.fixture(scope="module")
def alone(model: Any) -> list[Any]:
    """Each request by itself, in an engine that has no other options than it needs, and no graphs."""
    found = []
    for prompt, params in zip(PROMPTS, requests(), strict=True):
        generator = Generator(model, **SIZES, graphs=False, **EVERYTHING)
        found += told(generator.generate([prompt], params))
    return found


def test_a_request_gets_what_it_gets_alone(model: Any, alone: Any, way: dict[str, Any]) -> None:
    generator = Generator(model, **way, **EVERYTHING)
    assert told(generator.generate(PROMPTS, requests())) == alone
    assert (
        told(generator.generate(PROMPTS[::-1], requests()[::-1])) == alone[::-1]
    )  # and from the prefix cache
    if "num_blocks" in way:
        assert generator.stats.preemptions


@pytest.mark.parametrize("options", [{"steps_per_launch": 2}, {"graphs": False}], ids=str)
def test_two_threads(model: Any, alone: Any, options: dict[str, Any]) -> None:
    generator = Generator(model, **SIZES, **options, **EVERYTHING)
    found: dict[int, list[Any]] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(3):
            params = requests()[number::2]
            found[number].append(told(generator.generate(PROMPTS[number::2], params)))

    in_threads([functools.partial(work, number) for number in found])
    assert found == {number: [alone[number::2]] * 3 for number in found}


@pytest.mark.parametrize("options", [{}, {"steps_per_launch": 3}, {"graphs": False}], ids=str)
def test_a_processor_that_raises_loses_nothing(model: Any, alone: Any, options: dict[str, Any]) -> None:
    """Events come once, each with its log probabilities; a step that broke off is computed again. No request
    is to blame for an error that comes at times."""
    calls, failures, armed = 0, 0, False

    def fails(logits: Tensor, rows: LogitsRows) -> Tensor:
        nonlocal calls, failures
        calls += 1
        if armed and calls % (11 if options.get("steps_per_launch") else 5) == 0:
            failures += 1
            raise MemoryError
        return no_step_beyond(logits, rows)

    ahead = options.get("graphs", True)  # captures are of no account here
    generator = Generator(
        model, **SIZES, **options, capture_ahead=ahead, **EVERYTHING | {"logits_processor": fails}
    )
    armed = True
    ids = [generator.submit(prompt, params) for prompt, params in zip(PROMPTS, requests(), strict=True)]
    events: dict[int, list[Any]] = {number: [] for number in ids}
    while generator.has_unfinished:
        for event in generator.step():
            events[event.request_id].append(event)
    assert failures > 2
    for (tokens, reason, logprobs), got in zip(alone, events.values(), strict=True):
        assert [event.token_id for event in got] == tokens
        assert got[-1].finish_reason == reason
        if logprobs is None:
            assert {event.logprobs for event in got} == {None}
        else:
            rounded = [{token: round(p, 3) for token, p in event.logprobs.items()} for event in got]
            assert rounded == logprobs


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_hybrids(name: str) -> None:
    hybrid = model_of(name).eval()
    hybrid.generation_config.eos_token_id = None
    reference = copy.deepcopy(hybrid)
    args = [(1.0, 10.0), (2.0, 30.0), (4.0, 3.0)]
    want = [
        eager(reference, p, 8, NoStepBeyond(p, *a), pad_token_id=0)
        for p, a in zip(PROMPTS[:3], args, strict=True)
    ]
    generator = Generator(hybrid, **SIZES, steps_per_launch=2, **EVERYTHING)
    params = [SamplingParams(max_new_tokens=8, logprobs=2, extra_args=a) for a in args]
    outputs = generator.generate(PROMPTS[:3], params)
    assert [o.token_ids for o in outputs] == want
    for output in outputs:
        check_logprobs(reference, output, 2)


def test_without_options_a_step_has_no_further_op(model: Any) -> None:
    """Beside the op that ends a step there are views, which launch nothing."""

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append((func._schema.name, args))
            return func(*args, **(kwargs or {}))

    ran: list[Any] = []
    rows = Generator(model, **SIZES, buckets=[3]).loop.rows  # type: ignore[union-attr]
    logits = torch.zeros(3, 99)
    with torch.inference_mode(), rows.padding(3), Names():
        rows.finish_step(logits, 3, 0)
    assert {name for name, _ in ran} <= {"torchpaged::finish_step", "aten::slice", "aten::select"}
    assert next(args for name, args in ran if name == "torchpaged::finish_step")[0] is logits
    assert rows.tensors()["logits_words"].numel() == 0
    assert rows.ring.records is None


@pytest.mark.parametrize("graphs", [True, False])
def test_stop_strings_wait_for_the_minimum(model: Any, graphs: bool) -> None:
    generator = Generator(model, Letters(), **SIZES, graphs=graphs)
    [free] = generator.generate([PROMPTS[0]], SamplingParams(max_new_tokens=12, ignore_eos=True))
    early, late = free.text[1:3], free.text[7:9]
    assert free.text.index(late) == 7
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, stop=(early, late), min_new_tokens=5)
    [output] = generator.generate([PROMPTS[0]], params)
    assert (output.text, output.token_ids, output.finish_reason) == (
        free.text[:7],
        free.token_ids[:9],
        "stop",
    )
    across = SamplingParams(max_new_tokens=12, ignore_eos=True, stop=(late,), min_new_tokens=8)
    [output] = generator.generate([PROMPTS[0]], across)  # it begins before the minimum, and ends behind it
    assert (output.text, output.finish_reason) == (free.text[:7], "stop")


# --------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logprobs": 3}, "logprobs: expected None, or at most 2, got 3; make .* a larger max_logprobs"),
        (
            {"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}},
            "logit_bias: .* 3 tokens .*, got 4; .* max_logit_bias",
        ),
        (
            {"min_new_tokens": 1, "stop_token_ids": (5, 6, 5), "logit_bias": {5: 1.0}},
            "logit_bias and min_new_tokens: expected at most 3 tokens with a bias, .*, got 4",
        ),
        ({"extra_args": (1.0, 2.0, 3.0)}, "extra_args: expected at most 2 numbers, got 3; .* max_extra_args"),
        ({"logit_bias": {99: 1.0}}, r"logit_bias: expected token ids in \[0, 99\), got 99"),
        (
            {"n": 2, "temperature": 1.0},
            r"n: expected 1 for a request, got 2; submit each of sampling.samples",
        ),
    ],
)
def test_requests_beyond_what_the_generator_was_made_for(
    model: Any, params: dict[str, Any], words: str
) -> None:
    generator = Generator(model, **SIZES, **EVERYTHING)
    with pytest.raises(ArgumentError, match=f"^{words}"):
        generator.submit([5, 6], SamplingParams(**params))
    assert not generator.has_unfinished


def test_a_generator_of_no_options_names_them(model: Any) -> None:
    generator = Generator(model, **SIZES)
    for params, option in (
        ({"logprobs": 0}, "max_logprobs"),
        ({"logit_bias": {3: 1.0}}, "max_logit_bias"),
        ({"min_new_tokens": 2, "stop_token_ids": (3,)}, "max_logit_bias"),
        ({"extra_args": (0.0,)}, "max_extra_args"),
    ):
        with pytest.raises(ArgumentError, match=f"make the Generator with a larger {option}$"):
            generator.generate([[5, 6]], SamplingParams(**params))  # type: ignore[arg-type]
    # nothing can end it but its length
    least = SamplingParams(max_new_tokens=4, min_new_tokens=4, ignore_eos=True)
    assert len(generator.generate([[5, 6]], least)[0].token_ids) == 4


def test_ends_that_the_vocabulary_lacks_need_no_bias(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(model, **SIZES, max_logit_bias=1)
    monkeypatch.setattr(generator.model, "eos_token_ids", (7, 5000, -1))
    [output] = generator.generate([[5, 6]], SamplingParams(max_new_tokens=4, min_new_tokens=4))
    assert len(output.token_ids) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"logits_processor": 3}, "logits_processor: expected a callable"),
        ({"max_extra_args": 1}, "max_extra_args: expected 0 without a logits_processor"),
        ({"max_logit_bias": -1}, "max_logit_bias: expected at least 0, got -1"),
        ({"max_logit_bias": None}, "max_logit_bias: expected an integer"),
        ({"max_logprobs": 1.0}, "max_logprobs: expected an integer"),
        ({"max_logprobs": 100}, "max_logprobs: expected None, or at most the 99 tokens"),
    ],
)
def test_options_that_cannot_be(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{words}"):
        Generator(model, **SIZES, **options)


def test_accelerate_takes_no_processor(model: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^logits_processor: .*; give generate\(\) a list"):
        accelerate(model, logits_processor=no_step_beyond)
    with pytest.raises(ArgumentError, match="^n: expected 1 with temperature 0"):
        SamplingParams(n=2)


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda logits, rows: None, "logits_processor: expected logits, got NoneType; return"),
        (
            lambda logits, rows: logits[:, :50],
            r"expected float32 logits of shape \[\d, 99\] on cpu, got .* 50\]",
        ),
        (lambda logits, rows: logits.double(), "expected float32 logits .* got float64 logits"),
    ],
)
@pytest.mark.parametrize("graphs", [True, False])
def test_processors_that_give_something_else(model: Any, processor: Any, words: str, graphs: bool) -> None:
    generator = Generator(model, **SIZES, graphs=graphs, capture_ahead=False, logits_processor=processor)
    with pytest.raises(ArgumentError, match=words):
        generator.generate([[5, 6]], SamplingParams(max_new_tokens=3))
    assert not generator.has_unfinished


def test_a_processor_that_reads_the_device_is_refused_at_capture(model: Any) -> None:
    def reads(logits: Tensor, rows: LogitsRows) -> Tensor:
        return logits * rows.num_generated.max().item()

    capture: dict[str, Any] = {"capture": TapeCapture(), "backend": "reference", "buckets": [3]}
    with pytest.raises(CaptureError, match=r"item|_local_scalar_dense"):
        Generator(model, **SIZES, **capture, capture_ahead=True, logits_processor=reads)
