"""Shared prefixes by themselves: when they pay, in layers, traces and graphs, and where nothing is shared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_gpt import BLOCK, BLOCKS, DIM, GPT, HEADS, KV_HEADS, TOKENS, WIDTH, decode_runner
from torch import Tensor

from torchpaged import ArgumentError, AttentionMetadata, Limits, PagedAttention, open_session
from torchpaged.backends import attention_spec
from torchpaged.graphs import DecodeGraphRunner, TapeCapture
from torchpaged.graphs.capture import EagerCapture
from torchpaged.prefixes import AutomaticPrefixes, CascadeCosts, PrefixGroup
from torchpaged.prefixes.costs import COSTS, LayerShape, costs_of, groups_that_pay, saved_us

ROOT = Path(__file__).parents[2]
LLAMA = LayerShape(32, 8, 128, 128, 2)
FREE = CascadeCosts(0.0, 0.0, 1.0, 1e9, "whatever is shared pays")
HOPPER = COSTS[9, 0]


def tables(shared: int, rows: int, own: int = 4) -> list[list[int]]:
    """Of requests that share so many blocks."""
    first = list(range(1, shared + 1))
    return [first + list(range(1 + shared + own * row, 1 + shared + own * (row + 1))) for row in range(rows)]


# --------------------------------------------------------------------------------------------------- the rule
def test_the_rule_is_right_about_what_was_measured() -> None:
    """Of all measured cases: what it chooses is at most 5 % slower than the better of both ways, 1 % on
    average."""
    rows = json.loads((ROOT / "benchmarks/results/h200_cascade_op.json").read_text())["rows"]
    late = []
    for row in rows:
        heads, kv_heads, dim = row["heads"]
        count, blocks = row["requests"], row["shared"] // 16
        lens = [16 * (blocks + 4)] * count
        layer = LayerShape(heads, kv_heads, dim, dim, 2)
        batch = tables(blocks, count), [1] * count, lens
        groups = groups_that_pay(*batch, layer, block_size=16, costs=HOPPER)
        us = row["us"]["cascade" if groups else "plain"]
        late.append(us / min(row["us"]["cascade"], row["us"]["plain"]))
    assert len(late) > 50
    assert max(late) < 1.05
    assert sum(late) / len(late) < 1.01
    both = [row["us"]["plain"] < row["us"]["cascade"] for row in rows]
    assert 10 < sum(both) < len(both) - 10, "one way is always the better one: nothing to choose"


def test_groups_pay_together_or_not_at_all() -> None:
    """Launches are paid once; a group that costs more than it saves is left out; the best ones are kept."""
    one, two = tables(200, 4), [[block + 2000 for block in row] for row in tables(200, 4)]
    lens = [16 * 204] * 4
    costs = HOPPER._replace(launch_us=1.5 * saved_us(PrefixGroup((0, 1, 2, 3), 200), 4, LLAMA, 16, HOPPER))
    options: Any = {"block_size": 16, "costs": costs}
    assert groups_that_pay(one, [1] * 4, lens, LLAMA, **options) == []
    both = groups_that_pay(one + two, [1] * 8, lens * 2, LLAMA, **options)
    assert [group.num_blocks for group in both] == [200, 200]
    assert groups_that_pay(one + two, [1] * 8, lens * 2, LLAMA, **options, max_num_groups=1) == []
    slow = costs._replace(flop_per_us=1.0, launch_us=0.0)
    assert groups_that_pay(one, [1] * 4, lens, LLAMA, block_size=16, costs=slow) == []


def test_other_devices_are_said_to_be_guesses() -> None:
    assert "not verified" in costs_of("cpu").evidence
    assert "h200_cascade_op.json" in HOPPER.evidence
    assert costs_of("cpu").launch_us >= HOPPER.launch_us


# -------------------------------------------------------------------------------------------------- in layers
def automatic(**options: Any) -> AutomaticPrefixes:
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "kv_dtype": torch.float32}
    return AutomaticPrefixes(
        **{**sizes, "max_blocks_per_req": WIDTH, "block_size": BLOCK, "costs": FREE, **options}
    )


ROWS = tables(3, 3, 3)
QUERIES, LENS = [1, 2, 1], [17, 20, 13]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "fullgraph"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_a_layer_reads_prefixes_once(passes: list[int], compile: bool, sinks: bool) -> None:
    torch._dynamo.reset()
    layer = PagedAttention(HEADS, DIM, KV_HEADS, sinks=torch.randn(HEADS) if sinks else None)
    pools = [torch.randn(20, BLOCK, KV_HEADS, DIM) for _ in range(2)]
    q, k, v = (torch.randn(4, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    metadata = AttentionMetadata.from_lists(QUERIES, LENS, ROWS, block_size=BLOCK, max_blocks_per_req=WIDTH)
    together = automatic().prepare(metadata, ROWS)
    assert together.prefixes.shared.lens.tolist()[0] == 3 * BLOCK
    assert metadata.prefixes is None
    run: Any = torch.compile(layer, fullgraph=True, backend="aot_eager") if compile else layer
    with torch.no_grad():
        want = layer(q, k, v, (pools[0], pools[1]), metadata)
        assert not passes
        torch.testing.assert_close(run(q, k, v, (pools[0], pools[1]), together), want)
    assert passes == [4]
    assert together.to("cpu").prefixes is None


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (9, -1)},
        {"chunk_size": 8},
        {"alibi_slopes": [0.5] * HEADS},
        {"causal": False},
        {"batch_invariant": True, "backend": "reference"},
    ],
    ids=str,
)
def test_a_layer_that_can_not_reads_alone(passes: list[int], options: dict[str, Any]) -> None:
    """Of one that is batch invariant: whether a request is in a group depends on the others."""
    layer = PagedAttention(HEADS, DIM, KV_HEADS, **options)
    pools = torch.randn(20, BLOCK, KV_HEADS, DIM), torch.randn(20, BLOCK, KV_HEADS, DIM)
    metadata = AttentionMetadata.from_lists(QUERIES, LENS, ROWS, block_size=BLOCK, max_blocks_per_req=WIDTH)
    q = torch.randn(4, HEADS, DIM)
    with torch.no_grad():
        want = layer(q, None, None, pools, metadata)
        assert torch.equal(layer(q, None, None, pools, automatic().prepare(metadata, ROWS)), want)
    assert not passes


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
def test_a_layer_with_functions_reads_alone(
    passes: list[int], monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """Both passes know nothing of them; of backend flex compiled on a CPU, nor of a log-sum-exp."""
    monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", compiler)
    metadata = AttentionMetadata.from_lists(QUERIES, LENS, ROWS, block_size=BLOCK, max_blocks_per_req=WIDTH)
    together = automatic().prepare(metadata, ROWS)
    for layer in (
        PagedAttention(HEADS, DIM, KV_HEADS, score_mod=lambda score, r, h, i, j: score - 0.1 * (i - j)),
        PagedAttention(HEADS, DIM, KV_HEADS, mask_mod=lambda r, h, i, j: j % 2 == 0),
    ):
        assert layer.choice.name == "flex"
        assert not (layer._reads_once and not together.features)
    plain = PagedAttention(HEADS, DIM, KV_HEADS, backend="flex")
    assert plain._reads_once == (compiler != "inductor")


@pytest.mark.parametrize("change", ["lengths", "table", "queries"])
def test_groups_of_an_earlier_step_are_refused(change: str) -> None:
    layer = PagedAttention(HEADS, DIM, KV_HEADS)
    pools = torch.randn(20, BLOCK, KV_HEADS, DIM), torch.randn(20, BLOCK, KV_HEADS, DIM)
    rows = [ROWS[0], list(range(13, 19)), ROWS[2]]  # the one between shares nothing
    metadata = AttentionMetadata.from_lists(QUERIES, LENS, rows, block_size=BLOCK, max_blocks_per_req=WIDTH)
    together = automatic().prepare(metadata, rows)
    if change == "lengths":
        metadata.seq_lens += 1
    elif change == "table":
        metadata.block_table[2, 3] = 19
    else:
        metadata.query_start_loc.copy_(torch.tensor([0, 2, 3, 4]))
    with torch.no_grad(), pytest.raises(ArgumentError, match="prefixes: expected"):
        layer(torch.randn(4, HEADS, DIM), None, None, pools, together)


def test_what_the_host_knows_is_refused_at_once() -> None:
    """Lengths and query lengths that do not fit the groups: before anything is written, without a look at
    the device."""
    shared = automatic().buffers(3, 4)
    group = [PrefixGroup((0, 1, 2), 3)]
    with pytest.raises(ArgumentError, match="groups: expected .*row 2 has 11 tokens there, got one of 12"):
        shared.set(group, ROWS, QUERIES, [17, 20, 12])
    assert not shared.lens.any()
    assert shared.query_lens is None
    shared.set(group, ROWS, QUERIES, LENS)
    for lens, ok in ((QUERIES, True), ([1, 1, 2], False), ([1, 2], False)):
        tables = ROWS[: len(lens)]
        metadata = AttentionMetadata.from_lists(
            lens, LENS[: len(lens)], tables, block_size=BLOCK, max_blocks_per_req=WIDTH
        )
        if ok:
            assert shared.prepare(metadata).prefixes is not None
            continue
        with pytest.raises(ArgumentError, match=r"metadata: expected a batch of query lengths \[1, 2, 1\]"):
            shared.prepare(metadata)


def test_who_has_ended_is_in_no_group() -> None:
    """A row that ended on the device is padding there, before the host knows: its group's others go on."""
    layer = PagedAttention(HEADS, DIM, KV_HEADS)
    pools = torch.randn(20, BLOCK, KV_HEADS, DIM), torch.randn(20, BLOCK, KV_HEADS, DIM)
    metadata = AttentionMetadata.from_lists([1] * 3, LENS, ROWS, block_size=BLOCK, max_blocks_per_req=WIDTH)
    q = torch.randn(3, HEADS, DIM)
    prefixes = automatic()
    shared = prefixes.update(3, 3, ROWS, [1] * 3, LENS)
    assert shared is not None
    metadata.seq_lens[1] = 0
    with torch.no_grad():
        want = layer(q, None, None, pools, metadata)
        got = layer(q, None, None, pools, shared.prepare(metadata))
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]])


def test_nothing_pays_and_nothing_is_touched() -> None:
    metadata = AttentionMetadata.from_lists(QUERIES, LENS, ROWS, block_size=BLOCK, max_blocks_per_req=WIDTH)
    assert automatic(costs=HOPPER).prepare(metadata, ROWS) is metadata
    prefixes = automatic()
    before = prefixes.buffers(3, 4)
    assert prefixes.update(3, 4, ROWS, QUERIES, LENS) is before
    assert before.lens.any()
    before.clear()
    assert not before.lens.any()
    assert prefixes.buffers(3, 4) is before
    with pytest.raises(ArgumentError, match="block_size: expected an int of at least 1"):
        automatic(block_size=0)


# -------------------------------------------------------------------------------------------------- in graphs
def test_a_runner_takes_the_graph_that_pays(passes: list[int], native: None) -> None:
    """Two graphs per bucket for all lengths and groups: requests share blocks in some steps, in others they
    don't, and the tokens are those of each alone."""
    spec = attention_spec(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        block_size=BLOCK,
    )
    gpt = GPT(open_session(spec, Limits(max_num_reqs=4), "cpu"))
    runner = decode_runner(
        gpt, num_blocks=BLOCKS, buckets=[4], capture=TapeCapture(), prefixes=automatic(), debug=True
    )
    shared = [1, 2, 3]  # 12 tokens of sequence 0, which requests continue as they like
    rows = [[*shared, 4, 5, 6], [*shared, 7, 8, 9], [*shared, 10, 11, 12]]
    alone = [[13, 14, 15, 16, 17, 18]]
    ids = torch.stack([TOKENS[0], torch.cat([TOKENS[0, :12], TOKENS[1, :12]]), TOKENS[0]])
    with torch.no_grad():
        for n in range(1, 13):  # the prefix, token by token, into the shared blocks and into one's own
            runner.run([int(TOKENS[0, n - 1])] * 2, [n, n], [shared[: -(-n // BLOCK)], alone[0]])
    assert not passes, "two requests of which one is alone share nothing"
    for n in range(13, 20):
        count = 3 if n % 2 else 2
        runner_rows = rows if n < 16 else [*rows[:2], alone[0]]
        with torch.no_grad():
            if n >= 16 and n == 16:
                for k in range(13, 16):
                    runner.run([int(TOKENS[0, k - 1])], [k], alone)
            logits = runner.run(ids[:count, n - 1], [n] * count, runner_rows[:count]).clone()
            if count == 2 and n < 19:  # the third request's token, which this step left out
                runner.run(ids[2:, n - 1], [n], runner_rows[2:])
            want = torch.stack([gpt.dense(ids[row, :n])[-1] for row in range(count)])
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-4)
    assert set(passes) == {4}
    assert runner.report()[0].hits > 0
    assert sum(report.hits for report in runner.prefix_graphs.report()) == 7  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_compiled_runner(native: None, no_codegen: None) -> None:
    """A step of its own is compiled for each of the two graphs, once for all groups."""
    layer, first = PagedAttention(HEADS, DIM, KV_HEADS), torch.randn(2, 20, BLOCK, KV_HEADS, DIM)
    words = torch.randn(50, HEADS + 2 * KV_HEADS, DIM)
    runners = []
    for given in (automatic(), None):
        pools = tuple(pool.clone() for pool in first)

        def step(ids: Tensor, metadata: AttentionMetadata, pools: Any = pools) -> Tensor:
            q, k, v = words[ids].split([HEADS, KV_HEADS, KV_HEADS], 1)
            return layer(q, k, v, pools, metadata).flatten(1)

        runners.append(
            DecodeGraphRunner(
                step,
                max_batch_size=4,
                max_blocks_per_req=WIDTH,
                block_size=BLOCK,
                buckets=[4],
                capture=EagerCapture(),
                prefixes=given,
            )
        )
    runners[0].capture()
    for graphs in (runners[0], runners[0].prefix_graphs):
        graphs._capture_one = None  # type: ignore[assignment, method-assign, union-attr]
    for lens in ([13, 14, 15], [15, 16], [16, 17, 18]):
        got, want = (runner.run(lens, lens, ROWS[: len(lens)]).clone() for runner in runners)
        torch.testing.assert_close(got, want)
    assert runners[0].prefix_graphs.report()[0].hits == 3  # type: ignore[union-attr]


def test_second_graphs_are_fewer(native: None) -> None:
    """Of default buckets every 16: a batch of 20 takes the graph of 32, in which rows of the batch before are
    padding again."""
    layer, pools = PagedAttention(HEADS, DIM, KV_HEADS), torch.randn(2, 90, BLOCK, KV_HEADS, DIM)
    words, seen = torch.randn(50, HEADS + 2 * KV_HEADS, DIM), list[list[int]]()

    def step(ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        seen.append(metadata.seq_lens.tolist())
        q, k, v = words[ids].split([HEADS, KV_HEADS, KV_HEADS], 1)
        return layer(q, k, v, tuple(pools), metadata).flatten(1)

    sizes: Any = {"max_batch_size": 40, "max_blocks_per_req": WIDTH, "block_size": BLOCK, "compile": False}
    runner = DecodeGraphRunner(step, capture=EagerCapture(), prefixes=automatic(), **sizes)
    plain = DecodeGraphRunner(step, capture=EagerCapture(), **sizes)
    rows = tables(3, 40, 2)
    for count in (40, 20):
        ids, lens = [row % 50 for row in range(count)], [13 + row % 7 for row in range(count)]
        got, want = (each.run(ids, lens, rows[:count]).clone() for each in (plain, runner))
        torch.testing.assert_close(got, want)
    assert seen[-1] == [*lens, *[0] * 12]
    assert {r.bucket: r.hits for r in runner.prefix_graphs.report() if r.hits} == {40: 1, 32: 1}  # type: ignore[union-attr]


def test_a_session_that_plans_is_refused(native: None) -> None:
    from sessions import PLANNING

    session = PLANNING.open([], Limits(max_num_reqs=4, max_blocks_per_req=WIDTH), "cpu")
    with pytest.raises(ArgumentError, match="prefixes: expected None with a session that plans"):
        DecodeGraphRunner(
            lambda ids, metadata: ids,
            max_batch_size=2,
            max_blocks_per_req=WIDTH,
            block_size=BLOCK,
            session=session,
            prefixes=automatic(),
        )
