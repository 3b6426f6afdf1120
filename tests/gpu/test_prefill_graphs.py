"""Prefill steps in CUDA graphs: tokens of the engine without them, whatever shares a step, and nothing waits
for the device."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchpaged.testing import assert_within_budget

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu
VOCAB = 499


def make(model: Any, **options: Any) -> Any:
    from torchpaged.engine import Generator

    return Generator(
        model, **{"max_batch_size": 8, "max_seq_len": 1536, "compile": False, "buckets": [1, 8], **options}
    )


def draw(rng: random.Random, index: int) -> tuple[list[int], Any]:
    """A prompt of one step or of several, greedy or seeded."""
    from torchpaged.engine import SamplingParams

    prompt = [rng.randrange(8, VOCAB) for _ in range(rng.choice([1, 2, 3, 17, 40, 200, 900]))]
    options: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "ignore_eos": rng.random() < 0.5}
    if index % 2:
        options |= {
            "temperature": 0.9,
            "seed": index,
            "top_p": rng.choice([1.0, 0.9]),
            "repetition_penalty": rng.choice([1.0, 1.2]),
        }
    return prompt, SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_buckets": [128, 256], "prefill_chunk_size": 256, "steps_per_launch": 4},
        {"capture_ahead": False, "num_blocks": 120},
    ],
    ids=["automatic", "chunked", "late-and-preempted"],
)
def test_tokens_equal_the_engine_without_graphs(model: Any, options: dict[str, Any]) -> None:
    rng = random.Random(2)
    requests = [draw(rng, i) for i in range(30)]
    prompts, params = [p for p, _ in requests], [s for _, s in requests]
    want = make(model, graphs=False, buckets=None).generate(prompts, params)
    generator = make(model, **options)
    got = generator.generate(prompts, params)
    assert [(o.token_ids, o.finish_reason) for o in got] == [(o.token_ids, o.finish_reason) for o in want]
    reports = generator.prefill_runners[-1].report()
    assert sum(r.hits > 0 for r in reports) > 1
    assert sum(r.padded_rows for r in reports) > 0
    assert generator.stats.preemptions > 0 or "num_blocks" not in options
    generator.model.session.check("the run")


def test_admission_while_decoding_waits_for_nothing(model: Any) -> None:
    """Prompts of every bucket, of several requests and in chunks, are prefilled beside a running request."""
    from torchpaged.engine import SamplingParams

    generator, rng = make(model, prefill_buckets=[16, 64, 256], prefill_chunk_size=256), random.Random(0)
    for index in range(16):  # kernels are compiled before the watch begins
        generator.submit(*draw(rng, index))
    for _ in generator.stream():
        pass
    hits = [r.hits for r in generator.prefill_runners[-1].report()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        generator.submit([5, 6, 7], SamplingParams(max_new_tokens=1000, ignore_eos=True))
        for step in range(400):
            if step % 20 == 0:
                for _ in range(1 + step // 20 % 3):
                    generator.submit(*draw(rng, step))
            generator.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(
        r.hits > before for r, before in zip(generator.prefill_runners[-1].report(), hits, strict=True)
    )


def test_the_last_part_of_a_shared_prompt_is_a_step_of_one_request(model: Any) -> None:
    """A prompt whose first 1,024 tokens are known replays a graph of one request over the others; two such
    prompts at once do not. Tokens are those of an engine that has neither graphs nor known tokens."""
    from torchpaged.engine import SamplingParams

    rng, params = random.Random(3), SamplingParams(max_new_tokens=4, ignore_eos=True)
    shared, *own = ([rng.randrange(8, VOCAB) for _ in range(tokens)] for tokens in (1024, 16, 9, 200, 7, 30))
    prompts = [shared + tokens for tokens in own]
    with make(model, graphs=False, buckets=None, prefix_cache=False, share_prefixes=False) as plain:
        want = [output.token_ids for output in plain.generate(prompts, params)]
    with make(model) as generator:
        generator.generate([shared], params)
        alone, other = generator.prefill_runners
        first = other.histogram()
        found = [generator.generate([prompt], params)[0].token_ids for prompt in prompts[:3]]
        assert alone.histogram() == {16: 1, 9: 1, 200: 1} and other.histogram() == first
        found += [output.token_ids for output in generator.generate(prompts[3:], params)]
        assert sum(alone.histogram().values()) == 3 and other.histogram() == {**first, 37: 1}
        assert generator.stats.prefix_cache.hit_tokens == len(prompts) * len(shared)
        assert found == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "lens",
    [[(64, 64)], [(5, 5), (1, 1), (2, 90)], [(40, 300), (3, 3)], [(1, 700)] * 8, [(2, 2)] * 8],
    ids=str,
)
def test_logits_of_a_replay_are_those_of_the_step(
    make_llama: Callable[..., Any], dtype: torch.dtype, lens: list[tuple[int, int]]
) -> None:
    """Short queries alone too, which the bucket's upper bound says nothing about; the same step launched from
    Python beside it. Both err against float64 at most twice as much as the reference backend in the
    same dtype."""
    from torchpaged import AttentionMetadata
    from torchpaged.graphs import PackedGraphRunner
    from torchpaged.hf import PagedModel

    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8}
    model = make_llama(vocab_size=VOCAB, **sizes, max_position_embeddings=2048).to("cuda", dtype)
    paged, reference, wide = (
        PagedModel(copy.deepcopy(model).to(kind), num_blocks=500, backend=backend)
        for kind, backend in ((dtype, "auto"), (dtype, "reference"), (torch.float64, "reference"))
    )
    runner = PackedGraphRunner(
        paged,
        buckets=[64],
        max_num_reqs=8,
        max_blocks_per_req=64,
        block_size=16,
        device="cuda",
        num_blocks=500,
    )
    tables, block = [], 1
    for _, seq_len in lens:
        tables.append(list(range(block, block + -(-seq_len // 16))))
        block += len(tables[-1])
    for pools, *others in zip(paged.kv_cache, reference.kv_cache, wide.kv_cache, strict=True):
        pools.k_cache.normal_(), pools.v_cache.normal_()
        for other in others:
            other.k_cache.copy_(pools.k_cache), other.v_cache.copy_(pools.v_cache)
    query_lens, seq_lens = [q for q, _ in lens], [s for _, s in lens]
    ids = [i % VOCAB for i in range(sum(query_lens))]
    ends = [sum(query_lens[: i + 1]) - 1 for i in range(len(lens))]
    with torch.inference_mode():
        metadata = AttentionMetadata.from_lists(
            query_lens, seq_lens, tables, block_size=16, num_blocks=500, device="cuda"
        )
        step = torch.tensor(ids, device="cuda"), metadata, torch.tensor(ends, device="cuda")
        launched, same, exact = paged(*step), reference(*step), wide(*step)
    replayed = runner.run(
        ids, query_lens, seq_lens, tables, ends
    ).clone()  # the next replay writes into the same memory
    again = runner.run(ids, query_lens, seq_lens, tables, ends[-1:])
    assert_within_budget("launched", launched, same, exact, dtype)
    assert_within_budget("replayed", replayed, same, exact, dtype)
    assert torch.equal(again, replayed[-1:])


@pytest.mark.parametrize("ahead", [True, False])
def test_a_prefill_that_can_not_be_captured_leaves_the_decodes_alone(model: Any, ahead: bool) -> None:
    """It reads a device value: "auto" names the op and goes on, in the same process and beside the
    same graphs."""
    from torchpaged.engine import Generator, SamplingParams
    from torchpaged.hf import PagedModel

    class Reading(PagedModel):
        def __call__(self, input_ids: Any, metadata: Any, logits_indices: Any = None) -> Any:
            if metadata.max_query_len > 1:
                metadata.seq_lens.max().item()
            return super().__call__(input_ids, metadata, logits_indices)

    prompts, params = [[8, 9, 10], [11] * 30], SamplingParams(max_new_tokens=12)
    options: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 256, "compile": False}
    paged, stream = Reading(model, num_blocks=40), torch.cuda.current_stream()
    want = [o.token_ids for o in Generator(paged, **options, graphs=False).generate(prompts, params)]
    generator = Generator(paged, **options, capture_ahead=ahead)
    assert [o.token_ids for o in generator.generate(prompts, params)] == want
    assert torch.cuda.current_stream() == stream, "torch.cuda.graph leaves its own behind after a failure"
    assert not generator.prefill_runners
    assert "could not be captured at aten" in generator.prefill_graph_reason
    assert all(r.captured for r in generator.runner.report() if r.hits)
    assert any(r.hits for r in generator.runner.report())
