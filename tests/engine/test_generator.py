"""The engine end to end: every request's tokens equal HuggingFace's own, whatever joins, leaves, waits or is
put back."""

import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sessions import KEPT, semaphore_of

from torchpaged.backends.choose import names as names_module
from torchpaged.engine import Generator, SamplingParams
from torchpaged.engine.outputs import TextStream

PROMPTS = [[5, 6, 7], [9], list(range(11, 40)), [50, 51, 52, 53, 54, 55, 56], [3, 3, 3, 3]]


@pytest.fixture(scope="module")
def model(make_llama: Callable[..., Any]) -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96}
    return make_llama(**sizes, max_position_embeddings=128, eos_token_id=None)


@pytest.fixture(scope="module")
def greedy(model: Any) -> list[list[int]]:
    """20 tokens for each prompt, alone, by HuggingFace's generate()."""
    model.set_attn_implementation("eager")
    out = [
        model.generate(torch.tensor([p]), max_new_tokens=20, do_sample=False)[0, len(p) :].tolist()
        for p in PROMPTS
    ]
    return out


def free_again(generator: Generator) -> bool:
    return generator.pool.num_free == generator.pool.num_usable and not generator.has_unfinished


@pytest.mark.slow_cases("*compile*")
@pytest.mark.parametrize(
    "options", [{"graphs": True}, {"graphs": False}, {"compile": True, "max_batch_size": 2}], ids=str
)
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_tokens_equal_generate(
    model: Any, greedy: list[list[int]], chunk: int, options: dict[str, Any]
) -> None:
    if options.get("compile") and chunk != 7:
        pytest.skip("compiled once is enough")
    torch._dynamo.reset()
    generator = Generator(model, block_size=4, prefill_chunk_size=chunk, **{"max_batch_size": 3, **options})
    outputs = generator.generate(PROMPTS, SamplingParams(max_new_tokens=20))
    assert [o.token_ids for o in outputs] == greedy
    assert {o.finish_reason for o in outputs} == {"length"}
    assert free_again(generator)
    stats = generator.stats
    assert (stats.prompt_tokens, stats.new_tokens) == (sum(map(len, PROMPTS)), 100)
    assert 0 < stats.peak_blocks_used <= stats.num_blocks
    assert stats.prefill_tokens + stats.decode_tokens == sum(map(len, PROMPTS)) + 5 * 19


@pytest.mark.parametrize("graphs", [True, False])
def test_every_step_carries_a_kept_semaphore(
    model: Any, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, decode and mixed steps: no call is left to make its own, and no step makes a new one."""
    monkeypatch.setattr(names_module, "REGISTERED", {"kept": KEPT})
    generator = Generator(model, max_batch_size=3, graphs=graphs, prefill_chunk_size=5, backend="kept")
    ops, seen = generator.model._cache.backend.ops, []  # type: ignore[attr-defined]

    def attend(*args: Any, **options: Any) -> None:
        seen.append(options["semaphore"])
        ops.paged_attention(*args, **options)

    monkeypatch.setattr(generator.model._cache.backend, "ops", ops._replace(paged_attention=attend))  # type: ignore[attr-defined]
    generator.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    assert seen
    assert not any(x is None for x in seen)
    assert {x.data_ptr() for x in seen} == {semaphore_of(generator.model.session).data_ptr()}
    assert not any(x.any() for x in seen)


def test_ends(model: Any, greedy: list[list[int]]) -> None:
    generator = Generator(model, block_size=4, max_seq_len=40)
    stop = greedy[0][5]
    output = generator.generate([PROMPTS[0]], SamplingParams(stop_token_ids=(stop,)))[0]
    assert output.token_ids == greedy[0][: greedy[0].index(stop) + 1]
    assert output.finish_reason == "stop"
    assert len(generator.generate([PROMPTS[2]], SamplingParams(max_new_tokens=100))[0].token_ids) == 40 - len(
        PROMPTS[2]
    )
    generator.model.eos_token_ids = (stop,)
    assert generator.generate([PROMPTS[0]], SamplingParams(max_new_tokens=20))[0].finish_reason == "stop"
    assert (
        generator.generate([PROMPTS[0]], SamplingParams(max_new_tokens=20, ignore_eos=True))[0].token_ids
        == greedy[0]
    )


def test_a_seed_means_the_same_alone_and_in_a_batch(model: Any) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=5, top_k=20)
    alone = Generator(model, block_size=4).generate([PROMPTS[3]], params)[0].token_ids
    others = SamplingParams(max_new_tokens=12, temperature=1.0)
    crowd = Generator(model, block_size=4).generate(
        PROMPTS, [others, others, others, params, SamplingParams(max_new_tokens=3)]
    )
    assert crowd[3].token_ids == alone


class Bytes:
    """A tokenizer whose tokens are bytes: characters arrive in pieces."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(Bytes(), stop)
    shown = [stream.push(byte) for byte in text.encode()]
    return [*shown, stream.flush()], stream


def test_text_arrives_in_whole_characters() -> None:
    shown, _ = pieces("naïve 東京 🙂!")
    assert "".join(shown) == "naïve 東京 🙂!"
    assert not any("\ufffd" in piece for piece in shown)


def test_stop_strings_are_never_shown_in_part() -> None:
    shown, stream = pieces("one END two", ("END",))
    assert "".join(shown) == "one "
    assert stream.stopped
    shown, stream = pieces("an ENDless road, E", ("END of it", "END!"))
    assert "".join(shown) == "an ENDless road, E"
    assert not stream.stopped
    assert not any(piece.endswith(("E", "EN", "END")) for piece in shown[:-1])


def test_a_stop_string_in_front_of_half_a_character(model: Any) -> None:
    """It shows when the last token is decoded for good, and cuts the text: that is why the request ended."""

    class Half:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [5]}

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "so END\ufffd"

    generator = Generator(model, Half(), max_batch_size=1)
    [output] = generator.generate([[5]], SamplingParams(max_new_tokens=1, stop=["END"]))
    assert (output.text, output.finish_reason) == ("so ", "stop")


def test_the_token_that_ends_a_request_gives_no_text(model: Any, greedy: list[list[int]]) -> None:
    class Words:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [5]}

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join(f"{token} " for token in ids)

    generator = Generator(model, Words(), max_batch_size=1)
    end = greedy[0].index(greedy[0][5])
    [output] = generator.generate([PROMPTS[0]], SamplingParams(stop_token_ids=(greedy[0][5],)))
    assert output.token_ids == greedy[0][: end + 1]
    assert output.text == Words().decode(greedy[0][:end])


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("graphs", [True, False])
def test_golden_tokens_of_a_real_model(smollm2_path: Path, graphs: bool) -> None:
    golden = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())["prompts"]
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path)
    generator = Generator(model, tokenizer, max_seq_len=64, graphs=graphs)
    outputs = generator.generate(
        [p["prompt"] for p in golden], SamplingParams(max_new_tokens=24, ignore_eos=True)
    )
    assert [o.prompt_token_ids for o in outputs] == [p["input_ids"] for p in golden]
    assert [o.token_ids for o in outputs] == [p["new_ids"] for p in golden]
    assert outputs[0].text.startswith(" Paris.")


@contextlib.contextmanager
def collections_counted(threshold: int) -> Iterator[list[int]]:
    """How often the garbage collector comes, by generation, if it does so as soon as ``threshold`` more
    objects were made than freed."""
    counts, before = [0, 0, 0], gc.get_threshold()

    def count(phase: str, info: dict[str, int]) -> None:
        counts[info["generation"]] += phase == "start"

    gc.collect()
    gc.callbacks.append(count)
    gc.set_threshold(threshold, *before[1:])
    try:
        yield counts
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(count)


def test_decode_steps_are_nothing_for_the_garbage_collector(model: Any) -> None:
    """It visits all objects of a process, 0.3 s with transformers, when enough new ones have stayed for a
    while; objects of a step count if it comes in the middle of one. So a step makes few: an event for each
    token, which the caller frees."""
    rows = 64
    generator = Generator(model, max_batch_size=rows, max_seq_len=64)
    for i in range(rows):
        generator.submit([5, 6, 7, i + 1], SamplingParams(max_new_tokens=50, ignore_eos=True))
    for _ in range(8):
        generator.step()
    assert len(generator.scheduler.running) == rows
    with collections_counted(20 * rows) as counts:
        for _ in range(20):
            assert len(generator.step()) == rows
    assert counts == [0, 0, 0]


@pytest.mark.parametrize("by", ["step", "stream", "stream of some", "generate"])
@pytest.mark.parametrize("graphs", [True, False])
def test_requests_that_ended_are_freed_without_the_garbage_collector(
    model: Any, monkeypatch: pytest.MonkeyPatch, by: str, graphs: bool
) -> None:
    """Their tokens would stay in memory until it visits all objects of the process."""
    params, prompts = SamplingParams(max_new_tokens=4, ignore_eos=True), [[5, 6, 7], [8, 9], [10], [11, 12]]
    with Generator(model, max_batch_size=3, max_seq_len=64, graphs=graphs) as generator:
        seen, add = list[weakref.ref[Any]](), generator._stepper.add

        def noted(sequence: Any) -> None:
            seen.append(weakref.ref(sequence))
            add(sequence)

        monkeypatch.setattr(generator._stepper, "add", noted)
        gc.disable()
        try:
            for _ in range(2):
                if by == "generate":
                    generator.generate(prompts, params)
                    continue
                ids = [generator.submit(prompt, params) for prompt in prompts]
                if by == "step":
                    while generator.has_unfinished:
                        generator.step()
                else:
                    assert sum(1 for _ in generator.stream(ids if by == "stream of some" else None)) == 16
            generator.step()  # what the last one handed out, and its plan
            assert len(seen) == 8
            assert sum(ref() is not None for ref in seen) == 0
        finally:
            gc.enable()
