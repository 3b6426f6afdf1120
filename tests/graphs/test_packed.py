"""Packed steps in graphs on a CPU: buffers and padding, capture semantics, refusals, reports."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_gpt import BLOCK, BLOCKS, GPT, VOCAB
from torch import Tensor

from torchpaged import ArgumentError, AttentionMetadata, CaptureError, PagedKVCache
from torchpaged.graphs import PackedBuffers, PackedGraphRunner, TapeCapture, bucket_table, staged
from torchpaged.graphs.buckets import default_prefill_buckets
from torchpaged.graphs.capture import EagerCapture
from torchpaged.graphs.packed_buffers import PackedBatch

COLUMNS = 10
#: (query_len, seq_len) of each request: one alone, several, chunks of longer prompts, single tokens, a bucket
#: to its last token.
BATCHES = {
    "one": [(7, 7)],
    "several": [(3, 3), (5, 5), (1, 1)],
    "chunks": [(4, 30), (6, 9)],
    "singles": [(1, 12), (1, 1), (1, 40)],
    "full": [(10, 10), (6, 22)],
}


def pools_of(cache: PagedKVCache) -> list[Tensor]:
    """Of all layers."""
    return [pool for pools in cache for pool in pools[:2]]


class Toy(GPT):
    """Counts its steps; its caches hold numbers."""

    def __init__(self) -> None:
        super().__init__()
        for pool in pools_of(self.cache):
            pool.copy_(torch.randn_like(pool))
        self.calls = 0

    def forward(self, input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        return super().forward(input_ids, metadata)[logits_indices]


def batch_of(lens: list[tuple[int, int]]) -> dict[str, Any]:
    """Arguments of ``run``: shuffled blocks, and more of them than the lengths need."""
    query_lens, seq_lens = [q for q, _ in lens], [s for _, s in lens]
    blocks = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(len(lens))).add(1).tolist()
    tables = []
    for seq_len in seq_lens:
        count = -(-seq_len // BLOCK) + (seq_len < 30)
        tables.append(blocks[:count])
        del blocks[:count]
    return {
        "input_ids": [(11 * i) % VOCAB for i in range(sum(query_lens))],
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "block_tables": tables,
        "logits_indices": [sum(query_lens[: i + 1]) - 1 for i in range(len(lens))],
    }


def oracle(batch: dict[str, Any]) -> tuple[Tensor, PagedKVCache]:
    """The batch without buffers or padding, and the caches after it."""
    toy = Toy()
    metadata = AttentionMetadata.from_lists(
        batch["query_lens"], batch["seq_lens"], batch["block_tables"], block_size=BLOCK
    )
    with torch.inference_mode():
        return toy(
            torch.tensor(batch["input_ids"]), metadata, torch.tensor(batch["logits_indices"])
        ), toy.cache


def runner(toy: Any, capture: Any = None, **options: Any) -> PackedGraphRunner:
    settings: dict[str, Any] = {
        "buckets": [8, 16],
        "max_num_reqs": 4,
        "max_blocks_per_req": COLUMNS,
        "block_size": BLOCK,
    }
    return PackedGraphRunner(
        toy, **{**settings, "num_blocks": BLOCKS, "capture": capture or EagerCapture(), **options}
    )


@pytest.mark.parametrize("capture", [EagerCapture, TapeCapture])
def test_replays_equal_steps_without_buffers(capture: Any) -> None:
    """Batch after batch through the same tensors: nothing of the one before shows, and the caches hold
    the same."""
    toy, fresh = Toy(), Toy().cache
    r = runner(toy, capture())
    r.capture()
    calls, batches = (
        toy.calls,
        [BATCHES[name] for name in ("full", "one", "chunks", "singles", "full", "several")],
    )
    for lens in batches:
        for pool, old in zip(pools_of(toy.cache), pools_of(fresh), strict=True):
            pool.copy_(old)
        want, cache = oracle(batch_of(lens))
        torch.testing.assert_close(r.run(**batch_of(lens)), want, rtol=1e-5, atol=1e-5)
        for pool, expected in zip(pools_of(toy.cache), pools_of(cache), strict=True):
            torch.testing.assert_close(pool, expected, rtol=1e-5, atol=1e-5)
    assert toy.calls == calls + (len(batches) if capture is EagerCapture else 0)


@pytest.mark.parametrize("capture", [EagerCapture, TapeCapture])
def test_requests_that_the_device_writes(capture: Any) -> None:
    """Decodes in front of the listed requests: what `fill` writes is all that is known of them."""
    decodes, rest = [(1, 12), (1, 40)], [(6, 9), (3, 3)]
    whole = batch_of([*decodes, *rest])
    expected, caches = oracle(whole)
    toy = Toy()
    r = runner(toy, capture())
    r.run(**batch_of(BATCHES["full"]))  # what lies there before
    for pool, old in zip(pools_of(toy.cache), pools_of(Toy().cache), strict=True):
        pool.copy_(old)
    metadata = AttentionMetadata.from_lists(
        [1, 1], [12, 40], whole["block_tables"][:2], block_size=BLOCK, max_blocks_per_req=COLUMNS
    )
    known = {"input_ids": torch.tensor(whole["input_ids"][:2])} | metadata.tensors()

    def fill(input_ids: Tensor, batch: AttentionMetadata) -> None:
        tensors = {"input_ids": input_ids} | batch.tensors()
        assert batch.query_start_loc.tolist() == [0, 1, 2, 8, 11]
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table"):
            tensors[name][:2].copy_(known[name])

    lists = {name: numbers[2:] for name, numbers in whole.items() if name != "logits_indices"}
    out = r.run(**lists, logits_indices=whole["logits_indices"], fill=fill, filled=2)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, pools_of(toy.cache), pools_of(caches)))
    for options, words in (({"filled": 2}, "fill is None"), ({"filled": 3, "fill": fill}, "1 to 1 requests")):
        with pytest.raises(ArgumentError, match=words):
            r.run(**lists, logits_indices=whole["logits_indices"], **options)


def test_a_capture_writes_nothing_and_comes_with_the_first_step() -> None:
    toy = Toy()
    before = [pool.clone() for pool in pools_of(toy.cache)]
    seen: list[tuple[int, int, str]] = []
    r = runner(toy, progress=lambda *a: seen.append(a))
    r.capture()
    r.launch_padding(16)
    assert all(torch.equal(pool, old) for pool, old in zip(pools_of(toy.cache), before, strict=True))
    assert [a[:2] for a in seen] == [(1, 2), (2, 2)]
    assert seen[0][2] == "prefill 16"
    later = runner(Toy())
    want, _ = oracle(batch_of(BATCHES["one"]))
    torch.testing.assert_close(later.run(**batch_of(BATCHES["one"])), want, rtol=1e-5, atol=1e-5)
    assert [(x.captured, x.hits, x.padded_rows) for x in later.report()] == [(True, 1, 1), (False, 0, 0)]
    lines = bucket_table(later.report(), "tokens", "padded tokens").splitlines()
    assert lines[0].startswith("tokens")
    assert lines[0].endswith("padded tokens")
    assert len({len(line) for line in lines}) == 1


def test_padding_as_it_lies() -> None:
    buffers = PackedBuffers([8, 16], 4, COLUMNS, BLOCK, "cpu", BLOCKS)
    for name in ("full", "several"):
        buffers.put(PackedBatch(**batch_of(BATCHES[name])), 16)
    ids, m, indices = buffers.view(16)
    assert ids[9:].tolist() == [0] * 7
    assert m.slot_mapping[9:].tolist() == [-1] * 7
    assert m.positions[9:].tolist() == [0] * 7
    assert m.query_start_loc.tolist() == [0, 3, 8, 9, 9]
    assert m.seq_lens.tolist() == [3, 5, 1, 0]
    assert indices.tolist() == [2, 7, 8, 0]
    assert not m.block_table[3].any()
    assert m.max_query_len == 16
    assert (m.num_reqs, m.num_tokens) == (4, 16)
    assert all(
        x.data_ptr() % 64 == 0
        for x in (ids, m.positions, m.slot_mapping, indices, m.seq_lens, m.query_start_loc, m.block_table)
    )
    with buffers.padding(16):
        assert not m.query_start_loc.any()
        assert not m.seq_lens.any()
        assert (m.slot_mapping == -1).all()


def bad_batches() -> Iterator[tuple[dict[str, Any], str]]:
    good = batch_of(BATCHES["several"])
    yield batch_of([(9, 9), (8, 8)]), "input_ids: expected 1 to 16"
    for name in ("input_ids", "query_lens", "seq_lens", "logits_indices"):
        yield {**good, name: [good[name][0] + 0.0, *good[name][1:]]}, f"{name}: expected integers, got"
    yield {**good, "block_tables": [[1.5], *good["block_tables"][1:]]}, "block_tables: expected integers"
    yield batch_of([(1, 1)] * 5), "query_lens: expected 1 to 4 requests, got 5; run the step without a graph"
    yield {**good, "query_lens": [3, 6, 0]}, "query_lens: expected at least 1 token per request"
    yield (
        {**good, "input_ids": good["input_ids"][1:]},
        "input_ids: expected as many tokens as query_lens says",
    )
    yield {**good, "logits_indices": [9]}, r"logits_indices: expected at most 4 tokens in \[0, 9\)"
    yield {**good, "seq_lens": [3, 4, 1]}, "seq_lens: expected at least the 5 new tokens of row 1"
    yield (
        {**good, "block_tables": [[1], [2], [3]]},
        "block_tables: expected 2 blocks of 4 for 5 tokens in row 1",
    )
    yield {**good, "block_tables": [[1], [BLOCKS, 2], [3]]}, "block_tables: expected block ids in"
    for uncounted in (None, 3, torch.tensor(3)):
        yield {**good, "input_ids": uncounted}, "input_ids: expected a list of integers, got "
    yield {**good, "block_tables": [1, 2, 3]}, r"block_tables: expected integers, got \[1, 2, 3\]"
    yield (
        {**good, "block_tables": [list(range(1, 12)), [20, 21], [30]]},
        "block_tables: expected at most 10 blocks per request, got 11",
    )


@pytest.mark.parametrize(
    ("batch", "words"), list(bad_batches()), ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("captured", [True, False])
def test_refusals_write_nothing(batch: dict[str, Any], words: str, captured: bool) -> None:
    toy = Toy()
    r = runner(toy)
    if captured:
        r.run(**batch_of(BATCHES["full"]))
    before, calls = r.buffers.tensors()["packed"].clone(), toy.calls
    with pytest.raises(ArgumentError, match=words):
        r.run(**batch)
    assert torch.equal(r.buffers.tensors()["packed"], before)
    assert toy.calls == calls


def test_bad_sizes() -> None:
    for options, argument in (
        ({"buckets": []}, "buckets"),
        ({"buckets": [0, 4]}, "buckets"),
        ({"buckets": 4}, "buckets: expected a list of sizes of at least 1, got 4"),
        ({"buckets": [4.0]}, "buckets"),
        ({"trees": 1}, "trees: expected True or False, got 1"),
        ({"max_num_reqs": 0}, "max_num_reqs"),
        ({"max_blocks_per_req": 0}, "max_blocks_per_req"),
        ({"capture": "cuda"}, "capture"),
    ):
        with pytest.raises(ArgumentError, match=argument):
            runner(Toy(), **options)
    with pytest.raises(ArgumentError, match="max_num_tokens"):
        default_prefill_buckets(0)


def test_a_step_that_reads_the_device_is_refused_by_bucket() -> None:
    toy = Toy()
    r = runner(lambda *a: toy(*a) * int(a[1].seq_lens.max()), TapeCapture())
    with pytest.raises(CaptureError, match=r"bucket 8: the prefill step could not be captured at aten"):
        r.run(**batch_of(BATCHES["one"]))
    assert not any(x.captured for x in r.report())


def test_moved_memory_is_noticed() -> None:
    toy = Toy()
    pools = {"k_cache[0]": toy.cache[0].k_cache}
    r = runner(toy, debug=True, watch=lambda: pools)
    r.run(**batch_of(BATCHES["one"]))
    pools["k_cache[0]"] = toy.cache[0].k_cache.clone()
    with pytest.raises(CaptureError, match=r"k_cache\[0\]: expected at"):
        r.run(**batch_of(BATCHES["one"]))


def test_default_buckets() -> None:
    assert default_prefill_buckets(512) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert default_prefill_buckets(100) == [16, 32, 64, 100]
    assert default_prefill_buckets(7) == [7]
    assert default_prefill_buckets(100_000)[-3:] == [2048, 4096, 8192]


TREES = {
    "two": ([(5, 9), (3, 30)], [[-1, 0, 0, 1, 1], None]),
    "one": ([(7, 7)], [[-1, -1, 0, 1, 2, 2, 5]]),
    "three": ([(4, 25), (1, 12), (8, 20)], [[-1, 0, 1, 0], [-1], [-1, 0, 0, 0, 1, 2, 3, 3]]),
}


def test_one_capture_serves_all_trees() -> None:
    """Words of bits are an input of the graph: on a tape, which runs no Python again, tree after tree gives
    what a step without buffers gives."""
    toy = Toy()
    fresh = [pool.clone() for pool in pools_of(toy.cache)]
    r = runner(toy, TapeCapture(), trees=True, max_query_len=8)
    r.capture()
    calls = toy.calls
    for name in ("two", "one", "three", "two"):
        lens, parents = TREES[name]
        batch, other = batch_of(lens), Toy()
        for pool, old in zip(pools_of(toy.cache), fresh, strict=True):
            pool.copy_(old)
        metadata = AttentionMetadata.from_lists(
            batch["query_lens"],
            batch["seq_lens"],
            batch["block_tables"],
            block_size=BLOCK,
            tree_parents=parents,
        )
        ids, indices = torch.tensor(batch["input_ids"]), torch.tensor(batch["logits_indices"])
        with torch.inference_mode():
            want = other(ids, metadata, indices)
            plain = Toy()(ids, replace(metadata, tree_mask=None), indices)
        got = r.run(**batch, tree_parents=parents)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(want, plain, rtol=1e-3, atol=1e-3), "the tree matters"
    assert toy.calls == calls
    assert r.buffers.view(16)[1].max_query_len == 8


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({}, {"tree_parents": [[-1, 0, 0], None, None]}, "tree_parents: expected None"),
        ({"trees": True}, {"tree_parents": [[-1, 0, 0]]}, "tree_parents: expected a tree per request"),
        ({"trees": True}, {"tree_parents": [[-1, 0], None, None]}, "a parent for each of the 3"),
        ({"trees": True}, {"tree_parents": [[-1, 1, 0], None, None]}, "parents: expected -1, or a token"),
        ({"trees": True, "max_query_len": 4}, {}, "query_lens: expected at most 4 tokens per request"),
    ],
)
def test_trees_that_do_not_fit_are_refused(options: Any, change: Any, words: str) -> None:
    r = runner(Toy(), **options)
    before = r.buffers.tensors()["packed"].clone()
    with pytest.raises(ArgumentError, match=words):
        r.run(**{**batch_of(BATCHES["several"]), **change})
    assert torch.equal(before, r.buffers.tensors()["packed"])


class NotYet:
    """An event whose copies are done when they are told to be."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def record(self) -> None:
        self.done = False


def test_staged_numbers_are_not_written_over_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "record_behind", lambda event, device: event.record())
    staging, target = staged.Staging(64, torch.device("cpu")), torch.zeros(32, dtype=torch.uint8)
    memories = []
    for number in range(3):  # none is copied yet
        memories.append(memory := staging.take())
        memory.event = NotYet()  # type: ignore[assignment]
        memory.words["i"][:8] = array("i", [number] * 8)
        staging.send(memory, target)
        assert target.view(torch.int32).tolist() == [number] * 8
    assert len(set(map(id, memories))) == 3
    memories[0].event.done = True
    assert staging.take() is memories[0], "and then they are"
    assert staging.take() not in memories


@pytest.mark.parametrize("debug", [True, False])
def test_lists_of_the_callers_own_books_are_checked_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    given = batch_of(BATCHES["several"])
    r = runner(Toy(), debug=debug)
    want, looked = r.run(**given).clone(), list[Any]()
    monkeypatch.setattr(r.buffers, "check", lambda *batch: looked.append(batch))
    with torch.inference_mode():
        assert torch.equal(r.run_known(PackedBatch(**given)), want)
    assert len(looked) == debug
    r.run(**given)
    assert len(looked) == debug + 1
