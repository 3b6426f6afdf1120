"""Shared prefixes behind the engine and PagedCache on a GPU: captured and compiled steps in groups give the
tokens of steps that read row by row; a runner."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchpaged import AttentionMetadata, PagedAttention
from torchpaged.graphs import DecodeGraphRunner
from torchpaged.prefixes import AutomaticPrefixes, CascadeCosts

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.gpu
FREE = CascadeCosts(0.0, 0.0, 1.0, 1e12, "whatever is shared pays")


@pytest.fixture
def model(make_llama: Callable[..., Any]) -> Any:
    return make_llama(vocab_size=99, hidden_size=256, intermediate_size=384, max_position_embeddings=1024).to(
        "cuda"
    )


@pytest.mark.parametrize("options", [{}, {"fuse": True}, {"steps_per_launch": 4}], ids=str)
def test_an_engine(model: Any, options: dict[str, Any]) -> None:
    """In float32; requests join and end, groups change, the graphs stay."""
    from torchpaged.engine import Generator, SamplingParams

    torch.manual_seed(0)
    system = torch.randint(3, 99, (333,)).tolist()
    prompts = [[*system, 5 + i, *range(20 + i)] for i in range(5)] + [system[:50], [7, 8, 9]]
    each = [SamplingParams(max_new_tokens=12 + 3 * i, ignore_eos=True) for i in range(len(prompts))]
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 512, "buckets": [4]}
    plain = Generator(model, **sizes, share_prefixes=False, **options)
    want = [output.token_ids for output in plain.generate(prompts, each)]
    generator = Generator(model, **sizes, cascade=FREE, **options)
    assert [output.token_ids for output in generator.generate(prompts, each)] == want
    (report,) = generator.loop.runner.prefix_graphs.report()  # type: ignore[union-attr]
    assert report.hits > 5
    assert generator.stats.shared_tokens > 1000


def test_rows_between_two_second_graphs(model: Any) -> None:
    """Of default buckets second graphs are every 16 rows: 21 requests take that of 32, behind 40 others."""
    from torchpaged.engine import Generator, SamplingParams

    torch.manual_seed(1)
    system = torch.randint(3, 99, (200,)).tolist()
    loads = [[[*system, 5 + i, 9, 3 + i % 7] for i in range(count)] for count in (40, 21)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    sizes: dict[str, Any] = {"max_batch_size": 40, "max_seq_len": 256}
    plain = Generator(model, **sizes, share_prefixes=False)
    want = [[output.token_ids for output in plain.generate(load, params)] for load in loads]
    generator = Generator(model, **sizes, cascade=FREE)
    assert [[output.token_ids for output in generator.generate(load, params)] for load in loads] == want
    hits = {report.bucket: report.hits for report in generator.loop.runner.prefix_graphs.report()}  # type: ignore[union-attr]
    assert set(hits) == {1, 2, 4, 8, 16, 32, 40} and hits[32] > 5 and hits[40] > 5


@pytest.mark.parametrize("compiled", [False, True])
def test_a_paged_cache(model: Any, compiled: bool) -> None:
    """One prompt that eight rows continue: eagerly, and compiled with CUDA graphs."""
    from torchpaged.hf import PagedCache

    torch._dynamo.reset()
    ids = torch.randint(3, 99, (8, 24), device="cuda")
    ids[:, :16] = ids[:1, :16]
    prompt = torch.cat([torch.randint(3, 99, (1, 250), device="cuda"), ids[:1, :6]], 1)
    model.set_attn_implementation("torchpaged")
    found = []
    for cascade in (FREE, False):
        run = torch.compile(model, fullgraph=True, mode="reduce-overhead") if compiled else model
        cache = PagedCache(model.config, 8, 512, cascade=cascade)
        logits = []
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            cache.batch_repeat_interleave(8)
            assert cache.prefixes.active == (cascade is not False)
            for step in range(24):
                at = torch.full((8, 1), 256 + step, device="cuda")
                torch.compiler.cudagraph_mark_step_begin()
                out = run(input_ids=ids[:, step : step + 1], position_ids=at, past_key_values=cache)
                logits.append(out.logits.clone())
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_batch_invariant_engine(model: Any) -> None:
    """By the first backend with graphs that declares it; refused where none does."""
    from torchpaged import ArgumentError, BackendUnavailableError
    from torchpaged.engine import Generator, SamplingParams

    model = model.to(torch.bfloat16)
    options: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 128, "batch_invariant": True}
    try:
        generator = Generator(model, **options)
    except (ArgumentError, BackendUnavailableError) as error:
        assert "batch_invariant" in str(error)
        pytest.skip(f"no backend here: {error}")
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, temperature=1.0, seed=5)
    watched = list(range(3, 40))
    (alone,) = generator.generate([watched], params)
    others = [[5 + i] * (9 + 17 * i) for i in range(6)]
    for order in ([watched, *others], [*others[:3], watched, *others[3:]]):
        outputs = generator.generate(order, params)
        assert outputs[order.index(watched)].token_ids == alone.token_ids


@pytest.mark.parametrize(
    "options", [{}, {"fuse": True}, {"steps_per_launch": 4}, {"num_blocks": 70}], ids=str
)
def test_blocks_that_outlive_their_requests(model: Any, options: dict[str, Any]) -> None:
    """In float32, with preemption where blocks are few: the second run finds the first one's prompts and
    outputs, and draws its tokens."""
    from torchpaged.engine import Generator, SamplingParams

    torch.manual_seed(0)
    system = torch.randint(3, 99, (333,)).tolist()
    prompts = [[*system, 5 + i, *range(20 + i)] for i in range(5)] + [system[:50], [7, 8, 9]]
    each = [
        SamplingParams(max_new_tokens=12 + 3 * i, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    sizes: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 512, "buckets": [4]}
    plain = Generator(model, **sizes, prefix_cache=False, share_prefixes=False, **options)
    generator = Generator(model, **sizes, **options)
    for _ in range(2):
        want = [output.token_ids for output in plain.generate(prompts, each)]
        assert [output.token_ids for output in generator.generate(prompts, each)] == want
        turns = [prompt + tokens + [4, 5] for prompt, tokens in zip(prompts, want, strict=True)]
        want = [output.token_ids for output in plain.generate(turns, each)]
        assert [output.token_ids for output in generator.generate(turns, each)] == want
    stats = generator.stats.prefix_cache
    assert stats.hit_tokens > stats.queried_tokens / 3
    assert stats.queried_tokens == stats.hit_tokens + sum(stats.missed_tokens.values())
    generator.model.session.check("the runs")


HEADS, KV_HEADS, DIM, BLOCK, WIDTH = 32, 8, 128, 16, 40


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
def test_steps_in_groups_equal_steps_alone(compile: bool) -> None:
    sizes: Any = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "kv_dtype": torch.bfloat16}
    prefixes = AutomaticPrefixes(
        **sizes, max_blocks_per_req=WIDTH, block_size=BLOCK, device="cuda", costs=FREE
    )
    words = [
        torch.randn(50, n, DIM, dtype=torch.bfloat16, device="cuda") for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    first = [torch.randn(200, BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    runners = []
    for given in (prefixes, None):
        layer = PagedAttention(HEADS, DIM, KV_HEADS, device="cuda", dtype=torch.bfloat16)
        pools = [pool.clone() for pool in first]

        def step(ids: Tensor, metadata: AttentionMetadata, layer: Any = layer, pools: Any = pools) -> Tensor:
            q, k, v = (of[ids] for of in words)
            return layer(q, k, v, (pools[0], pools[1]), metadata).flatten(1)

        options: Any = {"max_batch_size": 4, "max_blocks_per_req": WIDTH, "block_size": BLOCK}
        runners.append(
            DecodeGraphRunner(
                step, **options, buckets=[4], num_blocks=200, device="cuda", compile=compile, prefixes=given
            )
        )
    shared = list(range(1, 21))
    tables = [[*shared, *range(30 + 10 * row, 40 + 10 * row)] for row in range(3)]
    alone = list(range(100, 140))
    for n in range(6):
        rows = [*tables[: 2 + n % 2], alone]
        lens = [325 + 7 * row + n for row in range(len(rows) - 1)] + [500 + n]
        ids = [(5 * n + row) % 50 for row in range(len(rows))]
        got, want = (runner.run(ids, lens, rows).float().clone() for runner in runners)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert runners[0].prefix_graphs is not None
    assert sum(report.hits for report in runners[0].prefix_graphs.report()) == 6
