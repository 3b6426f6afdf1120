"""generate() of an accelerated model: transformers' own tokens, and what the engine's loop refuses."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from many_threads import in_threads
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

import torchpaged.hf as hf
from torchpaged.custom_ops.errors import ArgumentError, NotCopyableError, RequestError, UnsupportedModelError

SHAPE = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def pair(make_llama: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
    """A model as transformers runs it, and an accelerated one of the same weights."""
    plain, fast = made = [make_llama(**SHAPE) for _ in range(2)]
    fast.load_state_dict(plain.state_dict())
    for model in made:
        model.generation_config.pad_token_id = 0
    plain.set_attn_implementation("eager")
    hf.accelerate(fast, max_batch_size=3, max_seq_len=64, block_size=8)
    yield plain, fast


def padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, 99, (len(lengths), width), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, : width - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


def both(pair: tuple[Any, Any], inputs: dict[str, torch.Tensor], **options: Any) -> tuple[Any, Any]:
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, **options}
    return pair[0].generate(**inputs, **options), pair[1].generate(**inputs, **options)


@pytest.mark.parametrize("lengths", [[5], [9, 9], [3, 17, 8, 1, 12]], ids=str)
def test_greedy_tokens_are_transformers_own(pair: tuple[Any, Any], lengths: list[int]) -> None:
    want, got = both(pair, padded(lengths))
    assert got.dtype == torch.int64
    assert torch.equal(got, want)


def test_rows_end_at_their_end_tokens(pair: tuple[Any, Any]) -> None:
    inputs = padded([4, 11, 7])
    free = both(pair, inputs)[0][:, 11:]
    ends = [int(free[0, 2]), int(free[1, 5])]
    want, got = both(pair, inputs, eos_token_id=ends, pad_token_id=98)
    assert torch.equal(got, want)
    assert 98 in got[0].tolist()
    want, got = both(pair, inputs, eos_token_id=[-1, ends[0]], pad_token_id=98)
    assert torch.equal(got, want)


def test_a_negative_end_token_is_none(pair: tuple[Any, Any]) -> None:
    want, got = both(pair, padded([4, 11]), eos_token_id=-1, pad_token_id=98)
    assert torch.equal(got, want)


def test_repetition_penalty(pair: tuple[Any, Any]) -> None:
    inputs = padded([9, 9])
    want, got = both(pair, inputs, repetition_penalty=1.7)
    assert torch.equal(got, want)
    assert not torch.equal(got, both(pair, inputs)[0])


def test_repetition_penalty_of_padded_rows(pair: tuple[Any, Any]) -> None:
    """transformers 5.23 leaves the padding out, as we do; 5.17 counts it as a token that occurred."""
    inputs = padded([3, 9])
    takes = inspect.signature(RepetitionPenaltyLogitsProcessor).parameters["prompt_ignore_length"]
    if "Tensor" in str(takes.annotation):
        want, got = both(pair, inputs, repetition_penalty=1.7)
        assert torch.equal(got, want)
    else:
        with pytest.warns(UserWarning, match="can't do a repetition penalty that leaves 0 tokens out"):
            want, got = both(pair, inputs, repetition_penalty=1.7)
        assert torch.equal(got, want)


def test_sampling_follows_the_options_and_torchs_seed(pair: tuple[Any, Any]) -> None:
    _, fast = pair
    inputs = padded([6])

    def draw(seed: int, **options: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        options = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "top_k": 0, **options}
        return fast.generate(**inputs, **options)

    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))
    several = draw(0, num_return_sequences=4)
    assert several.shape == (4, 18)
    assert len({tuple(row) for row in several.tolist()}) == 4
    greedy = fast.generate(**inputs, do_sample=False, max_new_tokens=12, eos_token_id=None)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert torch.equal(draw(3, **narrow), greedy), narrow


class Streamer:
    """Keeps tokens, and -1 for each end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_a_streamer_gets_every_token(pair: tuple[Any, Any]) -> None:
    streams = [Streamer(), Streamer()]
    for model, streamer in zip(pair, streams, strict=True):
        model.generate(**padded([7]), do_sample=False, max_new_tokens=6, eos_token_id=None, streamer=streamer)
    assert streams[1].tokens == streams[0].tokens
    assert len(streams[1].tokens) == 14
    assert streams[1].tokens.count(-1) == 1
    with pytest.raises(ArgumentError, match="streamer: expected one row"):
        pair[1].generate(**padded([7, 3]), max_new_tokens=6, streamer=Streamer())


def test_positional_arguments_are_arguments(pair: tuple[Any, Any]) -> None:
    """generate() takes loops of its own and a streamer by place, too."""

    plain, fast = pair
    ids, options = padded([7])["input_ids"], {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    takes = list(inspect.signature(type(fast).generate).parameters)[2:]  # without the model and its inputs

    def given(name: str, value: Any) -> list[Any]:
        return [value if name == other else None for other in takes[: takes.index(name) + 1]]

    streamer = Streamer()
    out = fast.generate(ids, *given("streamer", streamer), **options)
    assert streamer.tokens == [*out[0].tolist(), -1]
    with pytest.raises(ArgumentError, match="^assistant_model: expected None"):
        fast.generate(ids, *given("assistant_model", plain), **options)
    own = fast.generate(ids, *given("custom_generate", lambda model, input_ids, **_: input_ids + 1))
    assert own.equal(ids + 1)


def test_no_row_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(ArgumentError, match="^input_ids: expected one row at least"):
        pair[1].generate(padded([7])["input_ids"][:0], max_new_tokens=2)


def prepares_another_way(model: Any) -> None:
    """As peft's wrapper of learned prompts does for each call of the model in it."""
    own = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: own(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda model: model.to(torch.bfloat16), "dtype"),
        (lambda model: model.resize_token_embeddings(101), "vocab_size"),
        (lambda model: model.set_attn_implementation("eager"), "attn_implementation"),
        (prepares_another_way, "prepare_inputs_for_generation"),
    ],
    ids=["dtype", "vocabulary", "attention", "inputs"],
)
def test_a_model_that_changed_is_refused(
    make_llama: Callable[..., Any], change: Callable[[Any], Any], name: str
) -> None:
    """Its pools and rows were made for what it was."""
    model = make_llama(**SHAPE)
    hf.accelerate(model, max_batch_size=1, max_seq_len=32)
    change(model)
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    with pytest.raises(ArgumentError, match=f"^model: expected {name} .*as accelerate\\(\\) found it"):
        model.generate(padded([7])["input_ids"], **options)
    hf.unaccelerate(model)
    if "prepare_inputs_for_generation" in vars(model):
        with pytest.raises(UnsupportedModelError, match="prepare_inputs_for_generation was replaced"):
            hf.accelerate(model, max_batch_size=1, max_seq_len=32)
        del model.prepare_inputs_for_generation
    hf.accelerate(model, max_batch_size=1, max_seq_len=32)
    assert model.generate(padded([7])["input_ids"], **options).shape == (1, 11)


def test_a_dictionary_is_returned_when_asked(pair: tuple[Any, Any]) -> None:
    want, got = both(pair, padded([4, 6]), return_dict_in_generate=True)
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("output_attentions", {"output_attentions": True, "return_dict_in_generate": True}),
        ("use_cache", {"use_cache": False}),
        ("cache_implementation", {"cache_implementation": "static"}),
        ("assistant_model", {"assistant_model": "pair"}),
        ("assistant_early_exit", {"assistant_early_exit": 1}),
        ("position_ids", {"position_ids": torch.arange(7)[None] + 1}),
        ("max_new_tokens", {"max_new_tokens": 60}),
    ],
)
def test_what_the_loop_cant_do_is_refused(pair: tuple[Any, Any], name: str, options: dict[str, Any]) -> None:
    if options.get("assistant_model") == "pair":
        options = {"assistant_model": pair[0]}
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, **options}
    with pytest.raises(ArgumentError, match=f"^{name}: expected"):
        pair[1].generate(**padded([7]), **options)
    assert not pair[1].generate.generator.has_unfinished
    want, got = both(pair, padded([7]))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 3, "num_return_sequences": 2},
        {"logits_processor": [lambda ids, scores: -scores]},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 5, "eos_token_id": list(range(3, 60))},
        {"min_length": 12, "eos_token_id": list(range(3, 60))},
        {"bad_words_ids": [[n] for n in range(3, 50)]},
        {"max_time": 90.0},
        {"stopping_criteria": [lambda ids, scores: torch.full((len(ids),), ids.shape[1] > 12)]},
        {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20},
        {"repetition_penalty": 1.7, "min_new_tokens": 2, "eos_token_id": 5},
        {"max_new_tokens": None, "max_length": 14, "no_repeat_ngram_size": 1},
        {"max_new_tokens": 60, "no_repeat_ngram_size": 3},  # more than the engine's rows hold
    ],
    ids=lambda options: "-".join(options),
)
def test_what_the_loop_cant_do_runs_in_transformers_own(
    pair: tuple[Any, Any], options: dict[str, Any]
) -> None:
    """With a warning, padded rows as well; the engine goes on behind it."""
    inputs = padded([9] if "prompt_lookup_num_tokens" in options else [4, 9, 6])
    with pytest.warns(UserWarning, match="accelerated model runs step by step in transformers' own loop"):
        want, got = both(pair, inputs, **options)
    assert torch.equal(got, want)
    want, got = both(pair, inputs)
    assert torch.equal(got, want)


def test_the_same_of_a_fused_model(pair: tuple[Any, Any]) -> None:
    """By its config, as models have it that set one, and while another thread's call runs in the engine."""
    model = copy.deepcopy(pair[0])
    hf.accelerate(model, max_batch_size=3, max_seq_len=64, fuse=True)
    model.generation_config.no_repeat_ngram_size = 2
    found: list[Any] = []

    def run(**options: Any) -> None:
        call = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, **options}
        found.append((options, model.generate(**padded([4, 9]), **call)))

    calls: list[dict[str, Any]] = [{}, {"no_repeat_ngram_size": 0}, {}, {"no_repeat_ngram_size": 0}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        in_threads([partial(run, **options) for options in calls])
    assert len(found) == 4
    for options, got in found:
        want = both(pair, padded([4, 9]), **{"no_repeat_ngram_size": 2, **options})[0]
        assert torch.equal(got, want), options


def test_stop_strings_with_the_calls_tokenizer(pair: tuple[Any, Any]) -> None:
    """transformers drops the tokenizer ahead of a loop of the caller's."""
    letters = Tokenizer(BPE({letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet())[:99])}, []))
    letters.pre_tokenizer, letters.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer, inputs = PreTrainedTokenizerFast(tokenizer_object=letters), padded([4, 9])
    whole = both(pair, inputs)[0][:, 9:]
    ends = [tokenizer.decode(row[2:4]) for row in whole]
    with pytest.warns(UserWarning, match="can't do stop_strings"):
        want, got = both(pair, inputs, stop_strings=ends, tokenizer=tokenizer)
    assert torch.equal(got, want)
    assert want.shape[1] < 9 + whole.shape[1]


def test_scores_and_hidden_states_of_transformers_own_loop(pair: tuple[Any, Any]) -> None:
    names = ("scores", "logits", "hidden_states")
    options = {"return_dict_in_generate": True, **{f"output_{name}": True for name in names}}
    with pytest.warns(UserWarning, match="can't do output_scores=True"):
        want, got = both(pair, padded([4, 6]), **options)
    assert type(got) is type(want)
    assert torch.equal(got.sequences, want.sequences)
    for a, b in zip(got.scores + got.logits, want.scores + want.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert len(got.hidden_states) == len(want.hidden_states)


def test_a_streamer_gets_the_prompt_once_in_either_loop(pair: tuple[Any, Any]) -> None:
    streams = [Streamer(), Streamer()]
    for model, streamer in zip(pair, streams, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None, "no_repeat_ngram_size": 2}
            model.generate(**padded([7]), **call, streamer=streamer)
    assert streams[1].tokens == streams[0].tokens
    assert len(streams[1].tokens) == 14


def test_the_error_of_a_length_names_the_tightest_row(pair: tuple[Any, Any]) -> None:
    inputs = padded([3, 40, 8])
    with pytest.raises(ArgumentError, match="^max_new_tokens: expected at most 24 for a prompt of 40 tokens"):
        pair[1].generate(**inputs, max_new_tokens=62)
    with pytest.raises(
        ArgumentError, match="^input_ids: expected at most 63 tokens per row .*got 70; .*shorten"
    ):
        pair[1].generate(**padded([70, 3]), max_new_tokens=2)


def test_right_padding_and_caches_of_the_caller_are_refused(pair: tuple[Any, Any]) -> None:
    inputs = padded([4, 7])
    with pytest.raises(ArgumentError, match="padding_side='left'"):
        pair[1].generate(inputs["input_ids"].flip(1), attention_mask=inputs["attention_mask"].flip(1))
    cache = hf.PagedCache(pair[1].config, max_batch_size=1, max_seq_len=32)
    with pytest.raises(ArgumentError, match="past_key_values: expected None"):
        pair[1].generate(**padded([4]), past_key_values=cache)
    with pytest.raises(ArgumentError, match="inputs_embeds: expected None"):
        pair[1].generate(inputs_embeds=torch.zeros(1, 3, 64))


def test_a_failing_row_raises_and_the_model_goes_on(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fast = pair
    weight = fast.lm_head.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        with pytest.raises(RequestError):
            fast.generate(**padded([4, 6]), max_new_tokens=4)
    finally:
        weight.copy_(kept)
    want, got = both(pair, padded([4, 6]))
    assert torch.equal(got, want)


def test_threads_get_their_own_tokens(pair: tuple[Any, Any]) -> None:
    wanted, found = [both(pair, padded([3 + seed], seed))[0] for seed in range(3)], {}

    def run(seed: int) -> None:
        found[seed] = pair[1].generate(
            **padded([3 + seed], seed), do_sample=False, max_new_tokens=12, eos_token_id=None
        )

    in_threads([partial(run, seed) for seed in range(3)])
    assert all(torch.equal(found[seed], wanted[seed]) for seed in range(3))


def test_the_model_gets_its_own_generate_back(make_llama: Callable[..., Any]) -> None:
    model = make_llama(**SHAPE)
    with pytest.raises(ArgumentError, match="accelerate\\(\\) was called on"):
        hf.unaccelerate(model)
    assert hf.accelerate(model, max_seq_len=32) is model
    with pytest.raises(ArgumentError, match="not accelerated"):
        hf.accelerate(model)
    with pytest.raises(NotCopyableError, match="unaccelerate"):
        copy.deepcopy(model)
    hf.unaccelerate(model)
    assert "generate" not in vars(model)
    ids = torch.tensor([[3, 4]])
    assert model.generate(ids, max_new_tokens=2, num_beams=2, eos_token_id=None).shape == (1, 4)


def test_an_encoder_decoder_model_is_refused() -> None:
    import transformers

    config = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="causal LMs"):
        hf.accelerate(transformers.T5ForConditionalGeneration(config))
