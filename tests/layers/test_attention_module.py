"""PagedAttention and the checked functions: against dense SDPA, compiled once, no copy of a pool,
typed refusals."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sessions import kept_session
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import torchpaged
from torchpaged import ArgumentError, AttentionMetadata, Limits, PagedAttention, PagedKVCache, Session
from torchpaged.backends import Backend, SemaphoreSession, get_backend
from torchpaged.custom_ops import BACKEND_OPS

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 4, 53


class Layer(nn.Module):
    """Fused qkv, paged attention, output projection."""

    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)
        self.attention = PagedAttention(HEADS, DIM, KV_HEADS, block_size=BLOCK, session=session)

    def forward(self, x: Tensor, pools: Any, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        n = x.shape[0]
        y = self.attention(
            q.view(n, HEADS, DIM), k.view(n, KV_HEADS, DIM), v.view(n, KV_HEADS, DIM), pools, metadata
        )
        return x + self.out(y.reshape(n, -1))


class Model(nn.Module):
    def __init__(self, session: Session | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(session) for _ in range(3))

    def forward(self, x: Tensor, pools: list[Any], metadata: AttentionMetadata) -> Tensor:
        for layer, pair in zip(self.layers, pools, strict=True):
            x = layer(x, pair, metadata)
        return x

    def dense(self, x: Tensor) -> Tensor:
        """The same over one whole sequence, without a cache."""
        for layer in self.layers:
            n = x.shape[0]
            q, k, v = layer.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
            q, k, v = (t.view(n, -1, DIM).transpose(0, 1)[None] for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            x = x + layer.out(y.reshape(n, -1))
        return x


def cache() -> PagedKVCache:
    return PagedKVCache.uniform(3, KV_HEADS, DIM, block_size=BLOCK, num_blocks=BLOCKS, dtype=torch.float32)


def metadata(query_lens: list[int], seq_lens: list[int]) -> AttentionMetadata:
    tables = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(len(seq_lens))]
    return AttentionMetadata.from_lists(
        query_lens, seq_lens, tables, block_size=BLOCK, num_blocks=BLOCKS, max_blocks_per_req=8
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@torch.inference_mode()
def test_chunks_and_decodes_equal_dense(backend: str, request: pytest.FixtureRequest) -> None:
    """Two sequences, fed in uneven pieces in one mixed batch after another, equal dense attention over
    the whole."""
    if backend == "cpu":
        request.getfixturevalue("native")
    with torchpaged.use_backend(backend):
        model = Model()
    assert {layer.attention.choice.name for layer in model.layers} == {backend}
    pools, xs = list(cache()), [torch.randn(n, HEADS * DIM) for n in (23, 30)]
    want, got, seen = [model.dense(x) for x in xs], [[], []], [0, 0]
    for sizes in [(5, 1), (1, 16), (16, 1), (1, 12)]:
        batch = metadata(list(sizes), [s + n for s, n in zip(seen, sizes, strict=True)])
        y = model(torch.cat([x[s : s + n] for x, s, n in zip(xs, seen, sizes, strict=True)]), pools, batch)
        for i, piece in enumerate(y.split(list(sizes))):
            got[i].append(piece)
            seen[i] += sizes[i]
    for pieces, whole in zip(got, want, strict=True):
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-4, atol=1e-5)


def test_one_compile_for_all_batches_and_lengths_and_no_copy_of_a_pool() -> None:
    """Inductor's code calls the ops on the pools as they came in, allocates nothing of their size, and misses
    no reinplacing."""
    from torch._dynamo.utils import ReinplaceCounters

    torch._dynamo.reset()
    ReinplaceCounters.clear()
    model, pools = Model(kept_session()).eval(), list(cache())
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    codes: list[str] = []
    with torch.no_grad():
        for n, length in [(3, 9), (5, 1), (2, 30), (6, 17)]:
            batch = metadata([1] * n, [length] * n)
            x = torch.randn(n, HEADS * DIM)
            for tensor in (x, batch.block_table, batch.seq_lens, batch.slot_mapping):
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            torch._dynamo.decorators.mark_unbacked(batch.query_start_loc, 0)
            before = [p.k_cache.clone() for p in pools]
            if codes:
                got = compiled(x, pools, batch)
            else:
                got, codes = run_and_get_code(compiled, x, pools, batch)
            after = [p.k_cache.clone() for p in pools]
            for pair, old in zip(pools, before, strict=True):
                pair.k_cache.copy_(old)
            torch.testing.assert_close(got, model(x, pools, batch), rtol=1e-4, atol=1e-5)
            for pair, new in zip(pools, after, strict=True):
                torch.testing.assert_close(pair.k_cache, new)
    assert counter.frame_count == 1, f"{counter.frame_count} compiles"
    code = "\n".join(x for x in codes[0].splitlines() if not x.lstrip().startswith("#"))
    calls = re.findall(r"torch\.ops\.torchpaged\.(\w+)\.", code)
    assert [c for c in calls if c in ("write_kv", "paged_attention")] == ["write_kv", "paged_attention"] * 3
    pool_sized = rf"empty_strided\w*\(\({BLOCKS}, |(?:clone|copy_)\b.*\({BLOCKS}, "
    assert not [x for x in code.splitlines() if re.search(pool_sized, x) and "assert_size_stride" not in x]
    # the graph's own input in every layer, neither cloned nor copied back
    semaphores = re.findall(r"semaphore=(\w+)", code)
    assert len(semaphores) == 3, semaphores
    assert len(set(semaphores)) == 1, semaphores
    assert re.fullmatch(r"arg\d+_1", semaphores[0]), semaphores
    assert not re.search(r"\bcopy_|\bclone", code)
    assert ReinplaceCounters.get_total_missed() == 0


def test_layers_of_one_session_share_one_semaphore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers per request and kv head, never an inference tensor; a layer of more kv heads gets a longer
    one, and the first stays."""
    seen: list[Tensor | None] = []
    with torch.inference_mode():
        session = kept_session()
    model = Model(session)
    for layer in model.layers:
        ops = layer.attention._ops
        attend = lambda *args, ops=ops, **options: (  # noqa: E731
            seen.append(options["semaphore"]),
            ops.paged_attention(*args, **options),
        )
        monkeypatch.setattr(layer.attention, "_ops", ops._replace(paged_attention=attend))
    with torch.no_grad():
        model(torch.randn(3, HEADS * DIM), list(cache()), metadata([1, 2], [9, 5]))
    (semaphore,) = session.tensors().values()
    assert semaphore.shape == (16 * KV_HEADS,)
    assert semaphore.dtype == torch.int32
    assert not semaphore.any()
    assert not semaphore.is_inference()
    assert [x is semaphore for x in seen] == [True] * 3
    PagedAttention(HEADS, DIM, HEADS, session=session)
    assert [x.shape[0] for x in session.tensors().values()] == [16 * KV_HEADS, 16 * HEADS]
    assert model.layers[0].attention._workspace["semaphore"] is semaphore
    for x in session.tensors().values():
        x[1] = 3
    with pytest.raises(torchpaged.SemaphoreError, match=r"expected zeros after a test, got \[3\] at \[1\]"):
        session.check("a test")
    session.reset()
    session.check("a test")


def test_more_requests_than_the_session_has_room_for() -> None:
    """Limits that were said are kept to, eagerly before anything is written; unsaid ones cost speed alone:
    the kernel makes its own semaphore."""
    pools, batch = cache()[0], metadata([1] * 3, [3, 4, 5])
    q, k = torch.randn(3, HEADS, DIM), torch.randn(3, KV_HEADS, DIM)
    layer = PagedAttention(HEADS, DIM, KV_HEADS, session=kept_session(2))
    with pytest.raises(
        ArgumentError, match="metadata: expected at most 2 requests, as the session's limits say, got 3"
    ):
        layer(q, k, k, pools, batch)
    with pytest.raises(ArgumentError, match="metadata: expected at most 2 requests"):
        PagedAttention(HEADS, DIM, KV_HEADS, limits=Limits(max_num_reqs=2))(q, k, k, pools, batch)
    assert not pools.k_cache.any()
    backend = Backend(
        "kept", get_backend("reference").capabilities, BACKEND_OPS["default"], lambda: None, SemaphoreSession
    )
    unsaid = backend.open([layer.spec], Limits(), "cpu")
    workspace = unsaid.workspace(layer.spec)
    assert unsaid.workspace_for(workspace, 1024) is workspace
    assert unsaid.workspace_for(workspace, 1025) == {}


def test_a_session_is_given_or_opened_not_both() -> None:
    session = kept_session()
    assert PagedAttention(HEADS, DIM, KV_HEADS, session=session).choice.reason == "session= was given"
    for options in ({"limits": Limits(max_num_reqs=3)}, {"backend": "reference"}):
        with pytest.raises(
            ArgumentError, match="session: expected a session, or a backend and limits, got both"
        ):
            PagedAttention(HEADS, DIM, KV_HEADS, session=session, **options)
    with pytest.raises(torchpaged.BackendUnavailableError, match="head_dim 300 is over 256"):
        narrow = Backend("narrow", get_backend("triton").capabilities, BACKEND_OPS["default"], lambda: None)
        PagedAttention(1, 300, session=narrow.open([], Limits(), "cpu"))


@pytest.mark.parametrize("bad", ["short", "dtype", "not_zero"])
def test_bad_semaphores(bad: str) -> None:
    """By hand, through the checked function: a session's are always right."""
    pools, batch = cache()[0], metadata([1, 1], [3, 4])
    zeros = torch.zeros(4, dtype=torch.int32)
    semaphore = {"short": zeros[:3], "dtype": zeros.long(), "not_zero": zeros + 1}[bad]
    with pytest.raises(ArgumentError, match="semaphore"):
        torchpaged.paged_attention(
            torch.randn(2, 4, DIM),
            *pools[:2],
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            max_query_len=1,
            workspace={"semaphore": semaphore},
        )


def test_functions_trace_to_one_call_each() -> None:
    def step(q: Tensor, k: Tensor, pools: Any, m: AttentionMetadata) -> Tensor:
        torchpaged.write_kv(k, k, *pools[:2], m.slot_mapping)
        return torchpaged.paged_attention(
            q, *pools[:2], m.block_table, m.seq_lens, m.query_start_loc, max_query_len=1
        )

    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend=counter)(
            torch.randn(2, 4, DIM), torch.randn(2, 2, DIM), cache()[0], metadata([1, 1], [3, 4])
        )
    names = [str(node.target) for node in counter.graphs[0].graph.nodes if "torchpaged" in str(node.target)]
    assert names == ["torchpaged.write_kv.default", "torchpaged.paged_attention.default"]


def test_merge_equals_attention_over_both_halves() -> None:
    q, k, v = torch.randn(1, 4, DIM), torch.randn(32, 2, DIM), torch.randn(32, 2, DIM)
    pools = cache()[0]
    torchpaged.write_kv(k, v, *pools[:2], torch.arange(32) + BLOCK)
    starts, call = torch.tensor([0, 1], dtype=torch.int32), torchpaged.paged_attention
    options: dict[str, Any] = {"max_query_len": 1, "return_lse": True}
    tables = [
        torch.tensor([list(blocks)], dtype=torch.int32) for blocks in (range(1, 4), range(4, 9), range(1, 9))
    ]
    lens = [torch.tensor([n], dtype=torch.int32) for n in (12, 20, 32)]
    parts = [call(q, *pools[:2], table, n, starts, **options) for table, n in zip(tables, lens, strict=True)]
    out, lse = torchpaged.merge_attn_states(*parts[0], *parts[1])
    torch.testing.assert_close((out, lse), parts[2], rtol=1e-5, atol=1e-5)


def test_advance_step_by_hand() -> None:
    table = torch.tensor([[3, 1], [2, 9], [4, 5], [0, 0]], dtype=torch.int32)
    ids, positions, slots = torch.tensor([5, 6, 7, 0]), torch.tensor([2, 3, 7, 0]), torch.tensor([1, 1, 1, 1])
    lens = torch.tensor([3, 4, 8, 0], dtype=torch.int32)
    torchpaged.advance_step(torch.tensor([50, 60, 70, 80]), table, ids, positions, lens, slots, block_size=4)
    assert ids.tolist() == [50, 60, 7, 0]
    assert positions.tolist() == [3, 4, 7, 0]
    assert lens.tolist() == [4, 5, 8, 0]
    assert slots.tolist() == [3 * 4 + 3, 9 * 4, -1, -1]


def test_a_bad_call_writes_nothing() -> None:
    layer, pools = PagedAttention(4, DIM, 2), cache()[0]
    k, batch = torch.randn(2, 2, DIM), metadata([1, 1], [3, 4])
    bad_table = AttentionMetadata(
        batch.block_table + 90,
        *(getattr(batch, n) for n in ("seq_lens", "query_start_loc", "slot_mapping", "positions")),
        1,
    )
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("block_table", (torch.randn(2, 4, DIM), k, k, pools, bad_table)),
        ("k_cache", (torch.randn(2, 4, DIM).double(), k, k, pools, batch)),
        ("v", (torch.randn(2, 4, DIM), k, k[:1], pools, batch)),
        ("key, value", (torch.randn(2, 4, DIM), k, None, pools, batch)),
        ("query", (torch.randn(2, 4, DIM, requires_grad=True), k, k, pools, batch)),
    ]
    for argument, args in cases:
        with pytest.raises(ArgumentError, match=argument):
            layer(*args)
        assert not pools.k_cache.any()
        assert not pools.v_cache.any()


HEADS_FIRST = {
    "all": lambda q, k, v: (q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)),
    "keys_and_values": lambda q, k, v: (q, k.transpose(0, 1), v.transpose(0, 1)),
    "values": lambda q, k, v: (q, k, v.transpose(0, 1)),
    "with_a_batch": lambda q, k, v: tuple(x.transpose(0, 1)[None] for x in (q, k, v)),
    "of_a_linear": lambda q, k, v: tuple(x.flatten(1) for x in (q, k, v)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [3, 8])
@pytest.mark.parametrize("layout", HEADS_FIRST)
def test_heads_before_tokens_are_not_taken_for_tokens(layout: str, tokens: int, compiled: bool) -> None:
    """The order of torch's own attention, and what a linear layer gives."""
    torch._dynamo.reset()
    layer, pools, batch = PagedAttention(4, DIM, 2), cache()[0], metadata([tokens], [tokens])
    call: Any = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    q, k, v = torch.randn(tokens, 4, DIM), torch.randn(tokens, 2, DIM), torch.randn(tokens, 2, DIM)
    with torch.no_grad():
        # Dynamo shows an error's parts behind "raised exception".
        said = "raised exception ArgumentError" if compiled else None
        with pytest.raises(Exception if compiled else ArgumentError, match=said) as error:
            call(*HEADS_FIRST[layout](q, k, v), pools, batch)
        assert not pools.k_cache.any()
        assert not pools.v_cache.any()
        call(q, k, v, pools, batch)
    if not compiled:
        argument = {"keys_and_values": "key", "values": "value"}.get(layout, "query")
        heads = 4 if argument == "query" else 2
        fix = rf"unflatten\(-1, \[{heads}, {DIM}\]\)" if layout == "of_a_linear" else "transpose"
        assert re.match(
            rf"{argument}: expected a shape that ends in \[{heads}, {DIM}\], got .*; .*{fix}",
            str(error.value),
        )


def test_arguments_of_another_kind() -> None:
    layer, of_all, batch = PagedAttention(4, DIM, 2), cache(), metadata([1], [1])
    q, k = torch.randn(1, 4, DIM), torch.randn(1, 2, DIM)
    for bad in (of_all, None, of_all[0].k_cache, (of_all[0].k_cache,), batch):
        with pytest.raises(ArgumentError, match=r"^kv_cache: expected one layer's pools.*cache\[layer\]"):
            layer(q, k, k, bad, batch)
    for none in (None, of_all[0]):
        with pytest.raises(ArgumentError, match="^metadata: expected AttentionMetadata, got.*from_lists"):
            layer(q, k, k, of_all[0], none)
    assert not of_all[0].k_cache.any()
    assert layer(q, k, k, list(of_all[0][:2]), batch).shape == q.shape


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("num_kv_heads", {"num_kv_heads": 3}),
        ("sinks", {"sinks": [1.0]}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(5)}),
    ],
)
def test_bad_modules(argument: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=argument):
        PagedAttention(4, DIM, **options)


def test_sinks_and_slopes_may_become_parameters() -> None:
    """As models assign them, and ``load_state_dict(assign=True)`` of parameters."""
    numbers = torch.tensor([0.5, -1.0, 2.0, 0.25])
    module = PagedAttention(HEADS, DIM, KV_HEADS, sinks=numbers, alibi_slopes=numbers)
    cache = PagedKVCache.uniform(1, KV_HEADS, DIM, block_size=BLOCK, num_blocks=3, dtype=torch.float32)
    metadata = AttentionMetadata.from_lists([3], [3], [[1]], block_size=BLOCK)
    query, key = torch.randn(3, HEADS, DIM), torch.randn(3, KV_HEADS, DIM)
    want = module(query, key, key, cache[0], metadata)
    for name in ("sinks", "alibi_slopes"):
        setattr(module, name, nn.Parameter(numbers, requires_grad=False))
    torch.testing.assert_close(module(query, key, key, cache[0], metadata), want)
    for name in ("sinks", "alibi_slopes"):
        module.requires_grad_(False).get_parameter(name).requires_grad_(True)
        with pytest.raises(ArgumentError, match=f"{name}: expected a tensor without grad"):
            module(query, key, key, cache[0], metadata)


def test_the_choice_follows_the_module() -> None:
    layer = PagedAttention(4, DIM, 2, sinks=[0.0] * 4, alibi_slopes=[0.5] * 4).to(torch.float64)
    assert layer.choice.name == "reference"
    assert "dtype" in str(layer.choice.rejected)
    assert layer.alibi_slopes.dtype == torch.float32


def test_a_move_that_the_named_backend_cannot_follow(native: None) -> None:
    with pytest.raises(torchpaged.BackendUnavailableError, match="float64"):
        PagedAttention(4, DIM, 2, backend="cpu").to(torch.float64)


@pytest.mark.parametrize(("query_lens", "promised"), [([1, 1], True), ([1, 4], False)])
def test_only_single_tokens_let_attention_read_early(
    monkeypatch: pytest.MonkeyPatch, query_lens: list[int], promised: bool
) -> None:
    """Longer queries of one request may be the context of another in the same step."""
    layer, said = PagedAttention(4, DIM, 2, block_size=BLOCK, backend="reference"), []
    write_kv = layer._ops.write_kv

    def noted(*args: Any, are_query_tokens: bool = False) -> None:
        said.append(are_query_tokens)
        write_kv(*args, are_query_tokens=are_query_tokens)

    monkeypatch.setattr(layer, "_ops", layer._ops._replace(write_kv=noted))
    n = sum(query_lens)
    k = torch.randn(n, 2, DIM)
    layer(torch.randn(n, 4, DIM), k, k, cache()[0], metadata(query_lens, [8, 9]))
    assert said == [promised]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_of_another_block_size_than_the_batch(compiled: bool) -> None:
    """Slots for blocks of 4 in a cache of 8: refused from shapes alone, in a trace as well, before anything
    is written."""
    torch._dynamo.reset()
    layer = PagedAttention(4, DIM, 2)
    call: Any = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    pools = PagedKVCache.uniform(1, KV_HEADS, DIM, block_size=8, num_blocks=BLOCKS, dtype=torch.float32)[0]
    k, batch = torch.randn(2, 2, DIM), metadata([1, 1], [3, 4])
    with torch.no_grad():
        with pytest.raises(Exception, match="kv_cache.*blocks of 4 tokens, as this batch.*blocks of 8"):
            call(torch.randn(2, 4, DIM), k, k, pools, batch)
        assert not pools.k_cache.any()
        assert not pools.v_cache.any()
        call(torch.randn(2, 4, DIM), k, k, cache()[0], batch)
        unsaid = AttentionMetadata(*list(vars(batch).values())[:6])
        assert unsaid.block_size is None
        assert batch.to("cpu").block_size == BLOCK
        call(torch.randn(2, 4, DIM), k, k, pools, unsaid)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_that_was_built_for_another_block_size(compiled: bool) -> None:
    """Asked for once: without it the cache says it, with it the two are compared, in a trace as well."""
    torch._dynamo.reset()
    k, q, batch = torch.randn(2, 2, DIM), torch.randn(2, 4, DIM), metadata([1, 1], [3, 4])
    layer = PagedAttention(4, DIM, 2, block_size=16)
    call: Any = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    said = "kv_cache.*blocks of 16 tokens, as this module was built for.*blocks of 4"
    with torch.no_grad(), pytest.raises(Exception if compiled else ArgumentError, match=said):
        call(q, k, k, cache()[0], batch)
    outputs = [
        PagedAttention(4, DIM, 2, block_size=size)(q, k, k, cache()[0], batch) for size in (None, BLOCK)
    ]
    assert torch.equal(*outputs)


def test_rows_of_a_runner_know_their_block_size() -> None:
    """What a graph runner and the engine hand to a model carries it."""
    from torchpaged.graphs import PackedBuffers
    from torchpaged.graphs.buffers import DecodeBuffers

    assert DecodeBuffers(2, 4, 8, "cpu").view(1)[1].block_size == 8
    assert PackedBuffers([4], 2, 4, 8, "cpu").view(4)[1].block_size == 8
