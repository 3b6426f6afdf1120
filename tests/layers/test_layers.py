"""`torchpaged.layers`: encoders, cross attention and chunks against dense attention; eagerly, in one graph,
and captured."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchpaged import ArgumentError, BackendUnavailableError, BlockPoolExhaustedError, PagedAttention
from torchpaged.backends.choose import names
from torchpaged.cache import PagedKVCache
from torchpaged.graphs.capture import TapeCapture
from torchpaged.layers import (
    AttentionType,
    ChunkedLocalAttention,
    CrossAttention,
    CrossMetadata,
    EncoderOnlyAttention,
    attention_layer,
    encoder_metadata,
)

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 8


def packed(lens: list[int], heads: int, width: int = DIM, seed: int = 0) -> Tensor:
    return torch.randn(sum(lens), heads, width, generator=torch.Generator().manual_seed(seed))


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Callable[[Tensor, Tensor], Tensor], cap: float = 0.0
) -> Tensor:
    """Attention of one row in float64: ``seen(query positions [s, 1], key positions [1, l])``."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * DIM**-0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    mask = seen(torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None])
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(0, 1).float()


def of_rows(
    lens: list[int],
    keys: list[int],
    tensors: tuple[Tensor, ...],
    seen: Callable[[Tensor, Tensor], Tensor],
    cap: float = 0.0,
) -> Tensor:
    q, k, v = tensors
    parts = zip(q.split(lens), k.split(keys), v.split(keys), strict=True)
    return torch.cat([dense(*part, seen, cap) for part in parts])


def everything(query: Tensor, key: Tensor) -> Tensor:
    return (query >= 0) & (key >= 0)


def make_cache(head_dim_v: int = DIM_V, num_blocks: int = 32) -> PagedKVCache:
    return PagedKVCache.uniform(
        1, KV_HEADS, DIM, head_dim_v, block_size=4, num_blocks=num_blocks, dtype=torch.float32
    )


# ------------------------------------------------------------------------------------------------ encoders
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [0.0, 0.5])
def test_an_encoder(window: int | None, cap: float) -> None:
    lens = [7, 0, 3, 12]
    tensors = packed(lens, HEADS), packed(lens, KV_HEADS, seed=1), packed(lens, KV_HEADS, DIM_V, seed=2)
    sides = (-1, -1) if window is None else (window, window)
    layer = EncoderOnlyAttention(
        HEADS, DIM, KV_HEADS, head_dim_v=DIM_V, window_size=sides, logits_soft_cap=cap or None
    )
    near = everything if window is None else lambda query, key: (query - key).abs() <= window
    got = layer(*tensors, encoder_metadata(lens))
    torch.testing.assert_close(got, of_rows(lens, lens, tensors, near, cap), rtol=1e-4, atol=1e-5)


def test_an_encoder_in_one_graph() -> None:
    """For all lengths, with a bound of them."""
    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    counter = CompileCounterWithBackend("aot_eager")
    layer = EncoderOnlyAttention(HEADS, DIM, KV_HEADS)
    step = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for lens in ([5, 2, 11], [1, 12, 6], [6, 6, 3]):
            tensors = packed(lens, HEADS), packed(lens, KV_HEADS, seed=1), packed(lens, KV_HEADS, seed=2)
            got = step(*tensors, encoder_metadata(lens, max_len=12))
            torch.testing.assert_close(got, of_rows(lens, lens, tensors, everything), rtol=1e-4, atol=1e-5)
    # next to one that is empty
    assert [len(graph.graph.nodes) > 0 for graph in counter.graphs].count(True) == 1


def test_an_encoder_captured() -> None:
    """Lengths are read on the device: a captured step serves others."""
    layer, total = EncoderOnlyAttention(HEADS, DIM, KV_HEADS), 16
    batch = encoder_metadata([4, 12], max_len=16)
    q, k, v = (torch.zeros(total, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    capture = TapeCapture()
    captured = capture.capture(lambda: layer(q, k, v, batch), capture.new_pool())
    lens = [10, 6]
    tensors = packed(lens, HEADS), packed(lens, KV_HEADS, seed=1), packed(lens, KV_HEADS, seed=2)
    new = encoder_metadata(lens, max_len=16)
    for name in ("block_table", "seq_lens", "query_start_loc"):
        getattr(batch, name).copy_(getattr(new, name))
    for buffer, tensor in zip((q, k, v), tensors, strict=True):
        buffer.copy_(tensor)
    captured.replay()
    torch.testing.assert_close(
        captured.output, of_rows(lens, lens, tensors, everything), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: encoder_metadata([3, -1]), "lens: expected lengths of at least 0"),
        (lambda: encoder_metadata([3, 5], max_len=4), r"max_len: expected at least the longest row \(5\)"),
        (lambda: EncoderOnlyAttention(4, 16, block_size=16), "block_size: expected nothing"),
        (
            lambda: EncoderOnlyAttention(4, 16)(
                torch.zeros(5, 4, 16), *(torch.zeros(4, 4, 16) for _ in "kv"), encoder_metadata([5])
            ),
            "key: expected",
        ),
        (
            lambda: EncoderOnlyAttention(4, 16)(
                *(torch.zeros(5, 4, 16) for _ in "qkv"), encoder_metadata([6])
            ),
            "query_start_loc",
        ),
        (
            lambda: EncoderOnlyAttention(4, 16)(
                *(torch.zeros(4, 5, 16) for _ in "qkv"), encoder_metadata([5])
            ),
            r"key: expected a shape that ends in \[4, 16\], got \[4, 5, 16\]; .*transpose",
        ),
        (
            lambda: EncoderOnlyAttention(4, 16)(
                torch.zeros(4, 5, 16), *(torch.zeros(5, 4, 16) for _ in "kv"), encoder_metadata([5])
            ),
            r"query: expected a shape that ends in \[4, 16\], got \[4, 5, 16\]; .*transpose",
        ),
        (
            lambda: EncoderOnlyAttention(4, 16)(torch.zeros(5, 4, 16), None, None, encoder_metadata([5])),
            "key: expected a tensor, got NoneType",
        ),
        (
            lambda: EncoderOnlyAttention(4, 16)(*(torch.zeros(5, 4, 16) for _ in "qkv"), None),
            "metadata: expected AttentionMetadata, got NoneType",
        ),
    ],
    ids=["negative", "bound", "cache", "keys", "tokens", "heads first", "queries", "no keys", "no batch"],
)
def test_refused_of_an_encoder(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call()


# ----------------------------------------------------------------------------------------- cross attention
def test_cross_attention() -> None:
    """The encoder's keys are written once; a row may have more queries than keys, and none at all."""
    layer, cache = CrossAttention(HEADS, DIM, KV_HEADS, head_dim_v=DIM_V), make_cache()
    keys, rows = [9, 2, 5], cache.allocate(3)
    k, v = packed(keys, KV_HEADS, seed=1), packed(keys, KV_HEADS, DIM_V, seed=2)
    written = rows.append(keys)
    for step, lens in enumerate(([3, 6, 0], [1, 1, 1], [2, 0, 1])):
        q = packed(lens, HEADS, seed=3 + step)
        states = (k, v) if step == 0 else (None, None)
        batch = rows.cross(lens, written=written if step == 0 else None)
        got = layer(q, *states, cache[0], batch)
        torch.testing.assert_close(got, of_rows(lens, keys, (q, k, v), everything), rtol=1e-4, atol=1e-5)


def test_cross_attention_in_one_graph_and_captured() -> None:
    layer, cache = CrossAttention(HEADS, DIM, KV_HEADS, head_dim_v=DIM_V), make_cache()
    rows, keys = cache.allocate(2, max_seq_len=12), [9, 3]
    k, v = packed(keys, KV_HEADS, seed=1), packed(keys, KV_HEADS, DIM_V, seed=2)
    layer(packed([1, 1], HEADS), k, v, cache[0], rows.cross([1, 1], written=rows.append(keys)))
    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    counter, batch = CompileCounterWithBackend("aot_eager"), rows.cross([1, 1])
    step = torch.compile(layer, fullgraph=True, backend=counter)
    buffer = torch.zeros(2, HEADS, DIM)
    capture = TapeCapture()
    with torch.no_grad():
        captured = capture.capture(lambda: layer(buffer, None, None, cache[0], batch), capture.new_pool())
        for seed in range(3):
            q = packed([1, 1], HEADS, seed=5 + seed)
            want = of_rows([1, 1], keys, (q, k, v), everything)
            torch.testing.assert_close(step(q, None, None, cache[0], batch), want, rtol=1e-4, atol=1e-5)
            buffer.copy_(q)
            captured.replay()
            torch.testing.assert_close(captured.output, want, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_keys_of_an_encoder_are_no_query_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step of one query per row, too: the attention reads all of them, and must not start early."""
    seen = []
    for layer_class in (CrossAttention, PagedAttention):
        layer, cache = layer_class(HEADS, DIM, KV_HEADS), make_cache(DIM)
        plain = layer._ops.write_kv

        def write(*args: Any, are_query_tokens: bool, plain: Any = plain, **given: Any) -> None:
            seen.append(are_query_tokens)
            plain(*args, are_query_tokens=are_query_tokens, **given)

        monkeypatch.setattr(layer, "_ops", layer._ops._replace(write_kv=write))
        rows = cache.allocate(1)
        written = rows.append([1])
        batch = rows.cross([1], written) if layer_class is CrossAttention else written
        layer(packed([1], HEADS), *(packed([1], KV_HEADS) for _ in "kv"), cache[0], batch)
    assert seen == [False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"written": None}, "metadata: expected where the encoder's tokens go"),
        ({"key": None, "value": None}, "key: expected the encoder's keys"),
        ({"value": None}, "key, value: expected both or neither"),
        ({"key": torch.zeros(KV_HEADS, 3, DIM)}, "key: expected a shape that ends in"),
        ({"value": torch.zeros(KV_HEADS, 3, DIM)}, "value: expected a shape that ends in"),
    ],
    ids=["nowhere", "no keys", "half", "keys heads first", "values heads first"],
)
def test_refused_of_cross_attention(change: dict[str, Any], words: str) -> None:
    layer, cache = CrossAttention(HEADS, DIM, KV_HEADS), make_cache(DIM)
    rows = cache.allocate(1)
    written = rows.append([3])
    states = {name: packed([3], KV_HEADS) for name in ("key", "value")}
    batch = rows.cross([1], change.get("written", written))
    given = {**states, **{name: state for name, state in change.items() if name in states}}
    with pytest.raises(ArgumentError, match=words):
        layer(packed([1], HEADS), given["key"], given["value"], cache[0], batch)
    assert not cache[0].k_cache.any()


@pytest.mark.parametrize(
    "option", ["window_size", "alibi_slopes", "chunk_size", "causal", "score_mod", "mask_mod"]
)
def test_options_that_compare_positions(option: str) -> None:
    with pytest.raises(ArgumentError, match=f"{option}: expected nothing"):
        CrossAttention(HEADS, DIM, **{option: 4})


@pytest.mark.parametrize("lens", [[2.7, 1], ["2"], [True], None, 3], ids=str)
def test_lengths_of_encoders_are_not_rounded(lens: list[Any]) -> None:
    with pytest.raises(ArgumentError, match="lens: expected lengths of at least 0, as ints"):
        encoder_metadata(lens)
    with pytest.raises(ArgumentError, match="max_len: expected"):
        encoder_metadata([3], max_len=3.5)  # type: ignore[arg-type]


def test_a_decoders_batch_is_none_of_cross_attention() -> None:
    cache = make_cache(DIM)
    batch = cache.allocate(1).append([1])
    with pytest.raises(ArgumentError, match="metadata: expected CrossMetadata, got AttentionMetadata"):
        CrossAttention(HEADS, DIM, KV_HEADS)(packed([1], HEADS), None, None, cache[0], batch)


def test_rows_of_cross_metadata() -> None:
    with pytest.raises(ArgumentError, match="^query_lens: expected one for each of 2 rows"):
        CrossMetadata.from_lists([1], [2, 3], [[1], [2]], block_size=4)
    for tables, got in (([[1]], "1"), (None, "None")):
        with pytest.raises(ArgumentError, match=f"^block_tables: expected .*, got {got}"):
            CrossMetadata.from_lists([1, 1], [2, 3], tables, block_size=4)


# ---------------------------------------------------------------------------------------- chunks and types
def test_chunks() -> None:
    """A prefill that ends in a chunk, and steps across its border."""
    layer, cache = ChunkedLocalAttention(HEADS, DIM, KV_HEADS, chunk_size=4, head_dim_v=DIM_V), make_cache()
    total, rows, got = [11, 6], cache.allocate(2), []
    tensors = packed(total, HEADS), packed(total, KV_HEADS, seed=1), packed(total, KV_HEADS, DIM_V, seed=2)
    done = [0, 0]
    outs: list[list[Tensor]] = [[], []]
    for lens in ([6, 3], [1, 1], [1, 1], [3, 1]):
        parts = [
            torch.cat([x.split(total)[row][done[row] : done[row] + n] for row, n in enumerate(lens)])
            for x in tensors
        ]
        got = layer(*parts, cache[0], rows.append(lens)).split(lens)
        for row, out in enumerate(got):
            outs[row].append(out)
            done[row] += lens[row]
    want = of_rows(total, total, tensors, lambda query, key: (key <= query) & (key // 4 == query // 4))
    torch.testing.assert_close(torch.cat([*outs[0], *outs[1]]), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="chunk_size: expected an int of at least 1"):
        ChunkedLocalAttention(HEADS, DIM, chunk_size=0)


def test_types() -> None:
    for kind in AttentionType:
        layer = attention_layer(kind.value, HEADS, DIM, KV_HEADS, logits_soft_cap=5.0)
        assert layer.causal is (kind is AttentionType.DECODER)
        assert layer.logits_soft_cap == 5.0
        assert getattr(layer, "attention_type", AttentionType.DECODER) is kind
    with pytest.raises(ArgumentError, match="one of decoder, encoder, encoder_only, encoder_decoder"):
        attention_layer("prefix", HEADS, DIM)


@pytest.mark.parametrize("kind", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER, "chunks"])
def test_a_backend_that_can_not_is_refused_at_construction(
    kind: AttentionType | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from torchpaged.backends import Backend
    from torchpaged.backends.features import FEATURES
    from torchpaged.backends.reference import BACKEND

    able = replace(BACKEND.capabilities, features=frozenset(FEATURES) - {"bidirectional", "chunked"})
    poor = Backend("poor", able, BACKEND.ops, lambda: None)
    monkeypatch.setitem(names.REGISTERED, "poor", poor)
    with pytest.raises(BackendUnavailableError, match="(bidirectional attention|chunked) is not supported"):
        if isinstance(kind, AttentionType):
            attention_layer(kind, HEADS, DIM, backend="poor")
        else:
            ChunkedLocalAttention(HEADS, DIM, chunk_size=4, backend="poor")
    PagedAttention(HEADS, DIM, backend="poor")


# -------------------------------------------------------------------------------------- requests of a cache
def test_requests_grow_and_shrink() -> None:
    cache = make_cache(num_blocks=6)
    rows = cache.allocate(2, max_seq_len=12)
    batch = rows.append([5, 1])
    assert rows.seq_lens == [5, 1]
    assert [len(blocks) for blocks in rows.block_tables] == [2, 1]
    assert batch.block_table.shape == (2, 3)
    assert batch.query_lens == (5, 1)
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0]
    batch = rows.append([0, 4])
    assert batch.seq_lens.tolist() == [5, 5]
    assert batch.positions.tolist() == [1, 2, 3, 4]
    before = rows.seq_lens, [list(blocks) for blocks in rows.block_tables]
    with pytest.raises(BlockPoolExhaustedError):
        rows.append([4, 4])
    assert (rows.seq_lens, rows.block_tables) == before
    assert cache.pool.num_free == 1
    with pytest.raises(ArgumentError, match="query_lens: expected at most max_seq_len=12 tokens per request"):
        rows.append([8, 0])
    rows.truncate([5, 3])
    assert cache.pool.num_free == 2
    assert rows.append([0, 1]).positions.tolist() == [3]
    rows.free()
    assert cache.pool.num_free == 5
    assert rows.seq_lens == [0, 0]


def test_requests_are_copied_with_their_cache_alone() -> None:
    """A copy with free blocks of its own would write over the other's tokens."""
    cache = make_cache(num_blocks=6)
    rows = cache.allocate(1)
    rows.append([5])
    for alone in (copy.copy, copy.deepcopy):
        with pytest.raises(ArgumentError, match="together with their cache"):
            alone(rows)
    for both in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other, twin = both((cache, rows))
        assert twin.pool is other.pool is not cache.pool
        twin.append([4])
        assert (twin.seq_lens, rows.seq_lens) == ([9], [5])
        assert cache.pool.num_used == 2
    alone = pickle.loads(pickle.dumps(rows))
    for use in (lambda: alone.append([1]), lambda: alone.truncate([1]), alone.free, lambda: alone.cross([1])):
        with pytest.raises(ArgumentError, match="requests: expected unpickled together with their cache"):
            use()
    assert alone.seq_lens == [5]
    assert rows.append([1]).seq_lens.tolist() == [6]


@pytest.mark.parametrize("lens", [[1], [1, -1], [1, 1.0], [True, 1]])
def test_refused_lengths(lens: list[Any]) -> None:
    rows = make_cache().allocate(2)
    with pytest.raises(ArgumentError, match="query_lens: expected an int of at least 0 for each of 2"):
        rows.append(lens)
    with pytest.raises(ArgumentError, match="seq_lens: expected at most what is held"):
        rows.truncate([1, 0])
