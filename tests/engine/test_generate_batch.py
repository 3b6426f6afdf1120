"""transformers' ``generate_batch`` of models whose layers keep states, unmodified: the tokens of generate(),
one prompt at a time; what of its options the engine runs, and what is refused by name."""

import gc
import inspect
import re
import threading
import time
from typing import Any

import pytest
import torch
from model_coverage.architectures import model_of
from model_coverage.hybrids import HYBRIDS
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput

from torchpaged import ArgumentError, UnsupportedModelError
from torchpaged.engine import Generator
from torchpaged.engine.generate_batch import EngineBatches, batch_options
from torchpaged.hf import attach, fuse
from torchpaged.hf.families import family_of
from torchpaged.hf.packed_mixers import is_packed, mixers_of

PROMPTS = [[(7 * i + 3 * j) % 90 + 5 for j in range(length)] for i, length in enumerate((5, 23, 1, 40, 12))]
PROMPTS.append([*PROMPTS[3][:30], 9, 8])  # begins as another one does
NEW = 8
PAGE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"
_want: dict[str, list[list[int]]] = {}


def make(name: str) -> Any:
    """As a user gets it: in our attention; with latents, attached."""
    model = model_of(name)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    if family_of(name).caches_latents:
        return attach(model)
    model.set_attn_implementation("torchpaged")
    return model


def eager(name: str) -> list[list[int]]:
    """Greedy tokens of transformers' own states, one prompt at a time."""
    if name not in _want:
        model = model_of(name)
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        rows = [model.generate(torch.tensor([prompt]), **options)[0] for prompt in PROMPTS]
        _want[name] = [row[len(prompt) :].tolist() for row, prompt in zip(rows, PROMPTS, strict=True)]
    return _want[name]


def config(**given: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**given)


def greedy(**given: Any) -> GenerationConfig:
    return GenerationConfig(
        **{"do_sample": False, "max_new_tokens": NEW, "eos_token_id": -1, "pad_token_id": 0} | given
    )


def tokens(outputs: dict[str, GenerationOutput]) -> list[list[int]]:
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.slow_cases(but=("qwen3_next", "bamba", "lfm2", "mamba2", "recurrent_gemma", "kimi_linear"))
@pytest.mark.parametrize("name", HYBRIDS)
def test_tokens_are_those_of_generate(name: str) -> None:
    """By defaults alone; then with prompts in chunks and fewer rows than requests."""
    model = make(name)
    outputs = model.generate_batch(PROMPTS, generation_config=greedy())
    assert list(outputs) == [f"req_{i}" for i in range(len(PROMPTS))]
    assert all(isinstance(output, GenerationOutput) for output in outputs.values())
    assert [output.prompt_ids for output in outputs.values()] == PROMPTS
    assert tokens(outputs) == eager(name)
    small = config(max_requests_per_batch=2, max_batch_tokens=12, **{PAGE: 4})
    outputs = model.generate_batch(
        PROMPTS, generation_config=greedy(), continuous_batching_config=small, warmup=False
    )
    assert tokens(outputs) == eager(name)
    assert model.config._attn_implementation == "torchpaged"
    if not family_of(name).caches_latents:  # attached ones stay as they were
        assert not any(map(is_packed, mixers_of(model)))  # and generate() runs as before


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "bamba"])
def test_tokens_of_fused_hybrids(name: str) -> None:
    model = make(name)
    assert fuse(model, count=False).replaced["norm"]
    assert tokens(model.generate_batch(PROMPTS, generation_config=greedy())) == eager(name)


def test_generate_in_between() -> None:
    """A persistent manager keeps its pools; the model goes on to run by itself, and a longer request fails
    alone."""
    model = make("qwen3_next")
    options = {"generation_config": greedy(), "persistent_manager": True}
    assert tokens(model.generate_batch(PROMPTS, **options)) == eager("qwen3_next")
    manager = model._cached_continuous_batching_manager
    row = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=NEW, do_sample=False)[0]
    assert row[len(PROMPTS[1]) :].tolist() == eager("qwen3_next")[1]
    outputs = model.generate_batch([PROMPTS[0], [5] * 60, PROMPTS[2]], **options)
    assert model._cached_continuous_batching_manager is manager
    got = list(outputs.values())
    assert [output.generated_tokens for output in got] == [eager("qwen3_next")[0], [], eager("qwen3_next")[2]]
    assert "max_new_tokens: " in got[1].error or "prompt: " in got[1].error
    model.destroy_cached_continuous_batching_manager()
    manager.batch_processor = None
    gc.collect()
    assert not any(map(is_packed, mixers_of(model)))


def test_the_garbage_collector_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come in the middle of another engine's capture, which would take what closing launches."""
    model = make("lfm2")
    model.generate_batch(PROMPTS[:1], generation_config=greedy(), persistent_manager=True)
    manager = model._cached_continuous_batching_manager
    model.destroy_cached_continuous_batching_manager()
    closes: list[Any] = []
    monkeypatch.setattr(Generator, "close", closes.append)
    manager.batch_processor.itself = manager.batch_processor
    manager.batch_processor = None
    gc.collect()
    assert not closes


def test_ends_times_and_log_probabilities() -> None:
    """End tokens, timestamps, and log probabilities of the model's logits."""
    model, want = make("lfm2"), eager("lfm2")
    ends = [want[0][2], want[3][4]]
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=greedy(eos_token_id=ends),
        continuous_batching_config=config(return_logprobs=True),
        record_timestamps=True,
    )
    cut = [[*(t for t in row[: next((i for i, t in enumerate(row) if t in ends), NEW) + 1])] for row in want]
    assert min(map(len, cut)) < NEW
    assert tokens(outputs) == cut
    for output in outputs.values():
        times = output.timestamps
        assert len(times) == len(output.logprobs) == len(output.generated_tokens)
        assert output.created_time <= output.lifespan[0] <= times[0] <= times[-1] <= output.lifespan[1]
    out = outputs["req_1"]
    ids = torch.tensor([PROMPTS[1] + out.generated_tokens])
    with torch.no_grad():
        logprobs = model_of("lfm2")(ids).logits.log_softmax(-1)[0, len(PROMPTS[1]) - 1 : -1]
    expected = logprobs.gather(1, ids[0, len(PROMPTS[1]) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(out.logprobs), expected, atol=1e-4, rtol=1e-4)


def test_sampling() -> None:
    """A seed repeats it, another one does not; the only likely token is the greedy one, in children too."""
    model = make("mamba2")

    def draw(seed: int, **given: Any) -> list[list[int]]:
        return tokens(
            model.generate_batch(
                PROMPTS,
                generation_config=greedy(do_sample=True, **given),
                continuous_batching_config=config(seed=seed),
            )
        )

    first = draw(1, temperature=2.0, top_k=40, top_p=0.99)
    assert first == draw(1, temperature=2.0, top_k=40, top_p=0.99)
    assert first != draw(2, temperature=2.0, top_k=40, top_p=0.99)
    assert draw(3, top_k=1) == eager("mamba2")
    sampling = greedy(do_sample=True, top_k=1, num_return_sequences=2)
    with model.continuous_batching_context_manager(sampling) as manager:
        names = manager.add_requests(PROMPTS, max_new_tokens=NEW)
        outputs = [manager.get_result(timeout=60) for _ in range(2 * len(PROMPTS))]
    found = {output.request_id: output.generated_tokens for output in outputs}
    for name, row in zip(names, eager("mamba2"), strict=True):
        assert [found[name], found[f"{name}__child#0"]] == [row, row]


def test_a_manager_of_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of their own sampling and lengths, streamed, cancelled, refused alone, and none of them
    waiting for another; and the manager pauses. Its thread begins when one of them is cancelled, which would
    have come to its end."""
    model, want = make("bamba"), eager("bamba")
    sizes = config(per_request_processors=True, max_blocks_per_request=16, **{PAGE: 4})
    sampling = greedy(do_sample=True, temperature=3.0, top_k=30)
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=sizes) as manager:
        assert isinstance(manager.batch_processor, EngineBatches)
        assert manager.batch_processor.generator.max_seq_len == 64
        prepare, begin = manager.batch_processor.prepare_next_batch, threading.Event()
        monkeypatch.setattr(
            manager.batch_processor, "prepare_next_batch", lambda: begin.wait(60) and prepare()
        )
        top = {"top_k": 1, "eos_token_id": -1}
        one = manager.add_request(PROMPTS[1], streaming=True, max_new_tokens=5, **top)
        manager.add_request(PROMPTS[0], request_id="long", max_new_tokens=50, **top)
        manager.cancel_request("long")
        begin.set()
        if hasattr(manager, "pause"):  # not in transformers 5.17
            with manager.pause():
                time.sleep(0.01)
        streamed = [output.generated_tokens for output in manager.request_id_iter(one)]
        assert streamed == [want[1][: n + 1] for n in range(5)]
        wrong = {"empty": [], "outside": [5, 10_000], "long": [5] * 63}
        for name, ids in wrong.items():
            manager.add_request(ids, request_id=f"{name} prompt", **top)
        manager.add_request(PROMPTS[0], request_id="kwargs", typical_p=0.5)
        last = manager.add_request(PROMPTS[2], max_new_tokens=NEW, **top)
        found: dict[str, GenerationOutput] = {}
        while last not in found:
            output = manager.get_result(timeout=60)
            assert output is not None
            found[output.request_id] = output
        for name in (*(f"{name} prompt" for name in wrong), "kwargs"):
            assert found[name].error
            assert found[name].is_finished()
        assert found[last].generated_tokens == want[2]
        assert set(found) == {last, "kwargs", *(f"{name} prompt" for name in wrong)}
        assert not manager.batch_processor.has_pending_requests()


def test_a_cancellation_right_behind_its_request_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come between the loop's looks at the two queues."""
    manager = make("mamba2").init_continuous_batching(greedy())
    taken, empty = [], manager.input_queue.empty

    def empty_then_both() -> bool:
        is_empty = empty()
        if is_empty and not taken:
            taken.append(manager.add_request(PROMPTS[0]))
            manager.cancel_request(taken[0])
        return is_empty

    monkeypatch.setattr(manager.input_queue, "empty", empty_then_both)
    assert not manager.batch_processor.prepare_next_batch()
    assert taken
    assert not manager.batch_processor.prepare_next_batch()


def test_an_error_of_a_step_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("lfm2")

    def fails(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("torchpaged.engine.generator.Generator.step", fails)
    outputs = model.generate_batch(PROMPTS[:2], generation_config=greedy())
    assert [output.error for output in outputs.values()] == ["the device is gone"] * 2


REFUSED: dict[str, Any] = {
    "max_memory_percent": 0.5,
    "use_async_batching": True,
    "q_padding_interval_size": 64,
    "kv_padding_interval_size": 64,
    "varlen_compile_config": CompileConfig(),
    "decode_compile_config": CompileConfig(),
    "default_compile_level": 1,
    "scheduler_type": "prefill_first",
    "safety_margin": 0.1,
    "cpu_offload_space": 1.0,
    "use_cuda_graph": (True, False),
}


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_the_engine_has_not(field: str) -> None:
    model = make("mamba2")
    given = config(**{field: REFUSED[field]})
    with pytest.raises(ArgumentError, match=f"^{field}: "):
        model.generate_batch(PROMPTS, generation_config=greedy(), continuous_batching_config=given)
    assert model.config._attn_implementation == "torchpaged"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_beams": 2}, "generation_config: .*beam"),
        ({"prompt_lookup_num_tokens": 2}, "generation_config: .*assisted"),
        ({"stop_strings": ["a"]}, "stop_strings: "),
        ({"max_time": 1.0}, "max_time: "),
        ({"do_sample": True, "typical_p": 0.5}, "generation_config: .*TypicalLogitsWarper"),
        ({"do_sample": True, "top_k": 5}, "return_logprobs: .*TopKLogitsWarper"),
    ],
    ids=["beams", "lookup", "stop", "time", "typical", "log probabilities"],
)
def test_sampling_that_the_engine_has_not(given: dict[str, Any], words: str) -> None:
    model = make("mamba2")
    asked = config(return_logprobs="return_logprobs" in words, drop_unsupported_processors=False)
    with pytest.raises(ArgumentError, match=words):
        model.generate_batch(PROMPTS, generation_config=greedy(**given), continuous_batching_config=asked)
    assert not any(map(is_packed, mixers_of(model)))


def test_no_field_is_unknown() -> None:
    """Each field of this transformers is taken, refused, or transformers' own business; a new one fails
    here."""
    taken = {PAGE, "num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_blocks_per_request"}
    taken |= {"allow_block_sharing", "use_cuda_graph", "return_logprobs", "seed"}
    theirs = {"auto_switch_to_flash", "cpu_offload_space_safety_threshold", "max_queue_size"}
    theirs |= {"per_request_processors", "drop_unsupported_processors", "disable_nccl_graph_mixing"}
    theirs |= {"cpu_group_timeout", "block_size"}
    refused = {*REFUSED, "use_default_compile_configs", "max_cached_graphs"}
    assert set(inspect.signature(ContinuousBatchingConfig).parameters) - taken - theirs - refused == set()


def test_sizes_are_taken() -> None:
    """Each field that has a counterpart, by what it is there."""
    given = config(
        num_blocks=10,
        max_batch_tokens=32,
        max_requests_per_batch=3,
        max_blocks_per_request=4,
        allow_block_sharing=False,
        return_logprobs=True,
        use_cuda_graph=(False, True),
        **{PAGE: 8},
    )
    assert batch_options(make("mamba2"), greedy(), given) == {
        "max_batch_size": 3,
        "max_seq_len": 32,
        "block_size": 8,
        "num_blocks": 11,
        "prefill_chunk_size": 32,
        "share_prefixes": False,
        "max_logprobs": 0,
        "graphs": True,
        "prefill_buckets": None,
    }


@pytest.mark.parametrize("name", ["zamba", "zaya"])
def test_hybrids_that_the_engine_refuses(name: str) -> None:
    """By name, before anything runs; transformers says "Invalid layer type"."""
    model = model_of(name, "torchpaged")
    with pytest.raises(UnsupportedModelError, match=rf"^{name}: layer \d keeps a recurrent state"):
        model.generate_batch([[5, 6], [7, 8, 9]], generation_config=greedy())
    assert model.config._attn_implementation == "torchpaged"


def test_latents_want_an_attached_model() -> None:
    with pytest.raises(UnsupportedModelError, match="attach"):
        model_of("kimi_linear", "torchpaged").generate_batch([[5, 6]], generation_config=greedy())


def test_other_implementations_stay_with_transformers() -> None:
    with pytest.raises(ValueError, match="Invalid (layer|group) type"):
        model_of("bamba", "sdpa").generate_batch([[5, 6]], generation_config=greedy())


def test_what_the_manager_calls() -> None:
    """What is not public: the method that makes the batch processor, and what the loop asks of one."""
    source = inspect.getsource(ContinuousBatchingManager)
    assert source.count("self._create_batch_processor()") == 2  # warmup, and the loop's beginning
    asked = {*re.findall(r"batch_processor\.(\w+)", source), "_create_batch_processor"}
    asked -= {"reset", "_create_batch_processor"}  # within the one that is replaced
    missing = {name for name in asked if not hasattr(EngineBatches, name)}
    assert not missing
