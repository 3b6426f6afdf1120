"""Backends around other people's libraries: on a CPU with stand-ins of FlashInfer and FlashAttention-3,
torch's own for real.

The stand-ins have the libraries' signatures, give NaN where these leave what they find, and refuse what they
fail at.
On a GPU the libraries themselves: tests/gpu/test_library_backends.py.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_tables import capability_tables
from library_backends import attend, host_of, limits_of, spec_of, stand_in

import torchpaged
from torchpaged import BackendUnavailableError, Limits, PagedAttention, PlanError
from torchpaged.backends import (
    Backend,
    GraphSupport,
    HostLengths,
    get_backend,
    list_backends,
    planned_batch,
    select_backend,
    torch_varlen,
    use_backend,
)
from torchpaged.backends import flash_attn as flash_attn_backend
from torchpaged.backends.choose import names
from torchpaged.backends.choose.names import ALIASES
from torchpaged.backends.library_op import Held
from torchpaged.backends.package import FLASHINFER
from torchpaged.custom_ops.errors import ClosedError
from torchpaged.graphs import TapeCapture
from torchpaged.testing import (
    BATCH_SPECS,
    Batch,
    BatchSpec,
    assert_attention_close,
    check_batch_invariance,
    check_graph_support,
    make_batch,
)

BF16 = torch.bfloat16
SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": BF16}


def standing_in(name: str) -> Any:
    @pytest.fixture
    def found() -> Iterator[Backend]:
        with stand_in(name) as backend:
            yield backend

    return found


flash_attn, flashinfer, xqa = map(standing_in, ("flash_attn", "flashinfer", "flashinfer_xqa"))


@pytest.fixture(params=["torch_sdpa", "flash_attn", "flash_attn_4", "flashinfer"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "torch_sdpa":
        yield get_backend("torch_sdpa")
        return
    with stand_in(request.param) as found:
        yield found


def batch_of(name: str, **options: Any) -> Batch:
    return make_batch(BATCH_SPECS[name], **SHAPE | options)


# ---------------------------------------------------------------------------------------------- right results
def test_fewer_tokens_than_requests_and_none(backend: Backend) -> None:
    for seq_lens, query_lens in (((40, 7, 0), (1, 1, 0)), ((0, 0), (0, 0))):
        batch = make_batch(BatchSpec("few", seq_lens, query_lens), **SHAPE)
        out, lse = attend(backend.open([], limits_of(batch), "cpu"), batch)
        assert_attention_close(out, lse, batch)


def test_the_op_keeps_its_contract() -> None:
    """No undeclared mutation, a fake that fits, one trace for sizes that vary."""
    batch = make_batch(BATCH_SPECS["mixed_padded"], sinks=True)
    batch.k_cache.nan_to_num_(0.5), batch.v_cache.nan_to_num_(0.5)  # opcheck compares pools for equality
    options = {"max_query_len": batch.max_query_len, "scale": batch.scale, "window_left": 9, **batch.extras}
    arguments = (*_arguments(batch), torch.zeros(batch.q.shape[:2]))
    torch.library.opcheck(get_backend("torch_sdpa").ops.paged_attention, arguments, options)


@pytest.mark.parametrize("scales", ["none", "one", "per_head"])
@pytest.mark.parametrize("name", ["decode_skewed", "mixed_small"])
def test_fp8_pools(flashinfer: Backend, name: str, scales: str) -> None:
    for found in (flashinfer, get_backend("torch_sdpa")):
        batch = batch_of(name, kv_dtype=torch.float8_e4m3fn, scales=scales)
        out, lse = attend(found.open([], limits_of(batch), "cpu"), batch)
        assert_attention_close(out, lse, batch)


def test_declared_graph_support_holds(backend: Backend) -> None:
    report = check_graph_support(backend, device="cpu", dtypes=(BF16,), head_dim=64)
    if report.declared == GraphSupport.NEVER:
        assert report.eager == 35
        assert not report.replays
    else:
        assert report.replays
        assert report.forgotten_plans == backend.name.startswith("flash")


@pytest.mark.parametrize("name", ["decode_padded", "mixed_padded"])
def test_one_op_in_a_trace(backend: Backend, name: str) -> None:
    torch._dynamo.reset()
    batch, graphs = batch_of(name), []
    session = backend.open([], limits_of(batch), "cpu")
    workspace = session.workspace(spec_of(batch))
    session.plan(batch)

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        tensors, options = batch.arguments(out, lse, **workspace)
        session.ops.paged_attention(q, *tensors[1:], **options)
        return out, lse

    out, lse = torch.compile(call, fullgraph=True, backend=compiler)(batch.q)
    assert_attention_close(out, lse, batch)
    (graph,) = graphs
    assert sum("paged_attention" in str(node.target) for node in graph.graph.nodes) == 1


@pytest.mark.parametrize("name", ["decode_padded", "mixed_padded"])
def test_a_function_opens_a_session_that_lives_as_long_as_its_call(
    backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "REGISTERED", {"here": Backend("here", *_parts(backend))})
    batch = batch_of(name)
    out, lse = torchpaged.paged_attention(
        *_arguments(batch)[:-1],
        max_query_len=batch.max_query_len,
        scale=batch.scale,
        return_lse=True,
        ops=get_backend("here").ops,
    )
    assert_attention_close(out, lse, batch)


def _parts(backend: Backend) -> tuple[Any, ...]:
    return backend.capabilities, backend.ops, lambda: None, backend.session


def test_a_layer_and_its_pools(backend: Backend) -> None:
    """Writes by the device's own op, attends by the library, plans once for two layers; nothing is written
    without a plan."""
    limits = Limits(3, 16, 4, 16, 16)
    session = backend.open([], limits, "cpu")
    layers = [PagedAttention(4, 64, 2, session=session, dtype=BF16) for _ in range(2)]
    reference = PagedAttention(4, 64, 2, backend="reference", dtype=BF16)
    caches = [
        torchpaged.PagedKVCache.uniform(2, 2, 64, block_size=16, num_blocks=16, dtype=BF16) for _ in range(2)
    ]
    tables = [[3, 1], [2, 9], [4, 5]]
    with torch.inference_mode():
        for query_lens, seq_lens in (
            ([5, 9, 1], [5, 9, 1]),
            ([1, 1, 1], [6, 10, 2]),
            ([1, 12, 2], [7, 22, 4]),
        ):
            metadata = torchpaged.AttentionMetadata.from_lists(query_lens, seq_lens, tables, block_size=16)
            q, k, v = (torch.randn(sum(query_lens), heads, 64).to(BF16) for heads in (4, 2, 2))
            if session.plans:
                before = caches[0][0].k_cache.clone()
                with pytest.raises(PlanError):
                    layers[0](q, k, v, caches[0][0], metadata)
                assert torch.equal(caches[0][0].k_cache, before)
            session.plan(metadata)
            for layer, pools, same in zip(layers, *caches, strict=True):
                want = reference(q, k, v, same, metadata)
                torch.testing.assert_close(layer(q, k, v, pools, metadata), want, rtol=0.02, atol=0.02)


# ------------------------------------------------------------------------------------ decode without a plan
@pytest.mark.parametrize(
    "options", [{}, {"window_left": 7}, {"causal": False}], ids=["plain", "window", "all"]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_xqa_decodes(xqa: Backend, options: dict[str, Any], sinks: bool) -> None:
    """Also where requests without a query, or without keys, stand between others."""
    hole = BatchSpec("hole", (40, 9, 0, 7, 33), (1, 0, 1, 1, 1), padded_tokens=2)
    for spec in (*(BATCH_SPECS[name] for name in BATCH_SPECS if name.startswith("decode")), hole):
        batch = make_batch(spec, **SHAPE, sinks=sinks)
        batch.k_cache.nan_to_num_(0.0), batch.v_cache.nan_to_num_(0.0)
        session = xqa.open([spec_of(batch, lse=False)], limits_of(batch), "cpu")
        assert not session.plans
        out, _ = attend(session, batch, lse=False, **options)
        assert_attention_close(out, None, batch, **options)


def test_xqa_is_captured_and_compiled(xqa: Backend) -> None:
    report = check_graph_support(xqa, device="cpu", dtypes=(BF16,), head_dim=64)
    assert report.declared == GraphSupport.SINGLE_TOKEN_DECODE
    assert report.replays
    torch._dynamo.reset()
    batch = batch_of("decode_padded")
    batch.k_cache.nan_to_num_(0.0), batch.v_cache.nan_to_num_(0.0)
    session = xqa.open([spec_of(batch, lse=False)], limits_of(batch), "cpu")
    whole = torch.compile(
        lambda: attend_again(session, batch, lse=False), fullgraph=True, backend="aot_eager"
    )
    assert_attention_close(whole(), None, batch)


def test_a_route_gives_xqa_the_decodes(xqa: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it can be chosen for no layer that gets prompts; in a route each step's decodes are its own."""
    monkeypatch.setattr(names, "REGISTERED", {"xqa": Backend("xqa", *_parts(xqa))})
    sizes: dict[str, Any] = {"num_heads": 4, "head_dim": 64, "num_kv_heads": 2, "dtype": BF16}
    with pytest.raises(BackendUnavailableError, match="queries of any length are over 1"):
        PagedAttention(**sizes, backend="xqa")
    layer = PagedAttention(**sizes, backend=torchpaged.backends.Route("xqa", "torch_sdpa"), block_size=16)
    reference = PagedAttention(**sizes, backend="reference")
    pools, same = (
        torchpaged.PagedKVCache.uniform(1, 2, 64, block_size=16, num_blocks=16, dtype=BF16) for _ in range(2)
    )
    calls = importlib.import_module("flashinfer.decode").XQA_CALLS
    with torch.inference_mode():
        for query_lens, seq_lens in (
            ([5, 20, 1], [5, 20, 1]),
            ([1, 1, 1], [6, 21, 2]),
            ([1, 7, 1], [7, 28, 3]),
        ):
            metadata = torchpaged.AttentionMetadata.from_lists(
                query_lens, seq_lens, [[3, 1], [2, 9], [4, 5]], block_size=16
            )
            q, k, v = (torch.randn(sum(query_lens), heads, 64).to(BF16) for heads in (4, 2, 2))
            calls.clear()
            out, want = layer(q, k, v, pools[0], metadata), reference(q, k, v, same[0], metadata)
            torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
            assert len(calls) == 1


def test_what_xqa_is_refused(xqa: Backend) -> None:
    def reasons(**options: Any) -> str:
        shape = {
            name: options.pop(name) for name in ("head_dim", "block_size", "num_heads") if name in options
        }
        return "; ".join(
            xqa.reject(spec_of(batch_of("decode_one", **shape), lse=options.pop("lse", False), **options))
        )

    assert reasons() == reasons(window_left=5) == reasons(head_dim=256) == ""
    assert "lse is not supported" in reasons(lse=True)
    assert "logits_soft_cap is not supported" in reasons(logits_soft_cap=5.0)
    assert "block_size 8 is not one of (16, 32, 64, 128)" in reasons(block_size=8)
    assert "head_dim 96 is not one of (64, 128, 256)" in reasons(head_dim=96)
    assert "66 query heads per kv head are over 32" in reasons(num_heads=132)
    prompt = spec_of(batch_of("prefill_small"), lse=False)
    assert "queries of 33 tokens are over 1" in "; ".join(xqa.reject(prompt))
    assert "queries of any length are over 1" in "; ".join(xqa.reject(replace(prompt, max_query_len=None)))
    fp8 = batch_of("decode_one", kv_dtype=torch.float8_e4m3fn, scales="one")
    assert "kv dtype float8_e4m3fn is not one of" in "; ".join(xqa.reject(spec_of(fp8, lse=False)))
    for batch, named in ((batch_of("prefill_small"), "queries of up to 33 tokens"), (fp8, "an fp8 pool")):
        session = xqa.open([], limits_of(batch), "cpu")
        arguments = dict(max_query_len=batch.max_query_len, scale=1.0, **batch.extras)
        with pytest.raises(BackendUnavailableError, match=f"'flashinfer_xqa' cannot .*{named}"):
            session.ops.paged_attention(*_arguments(batch), **arguments, **session.tensors())
    with pytest.raises(BackendUnavailableError, match="it needs a workspace"):
        xqa.ops.paged_attention(*_arguments(batch_of("decode_one")), max_query_len=1, scale=1.0)


# ------------------------------------------------------------------------------ plans, and buffers that stay
def addresses(session: Any) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in session.tensors().items()}


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_buffers_stay_where_they_are(name: str) -> None:
    with stand_in(name) as found:
        first, other = batch_of("decode_edges"), batch_of("decode_skewed")
        limits = Limits(7, 7, first.block_table.shape[1] + 40, 64, 16)
        session = found.open([spec_of(first), spec_of(first, window_left=7)], limits, "cpu")
        before = addresses(session)
        for batch in (first, other, first):
            attend(session, batch)
        assert addresses(session) == before


def test_a_schedule_per_kind_of_layer_with_a_tail_of_zeros(flash_attn: Backend) -> None:
    """Layers of a kind share it; a smaller batch leaves nothing of a larger one behind."""
    large, small = batch_of("decode_edges"), batch_of("decode_one")
    kinds = [spec_of(large), spec_of(large, window_left=7), spec_of(large, lse=False)]
    session: Any = flash_attn.open(kinds, Limits(7, 7, 6, 64, 16), "cpu")
    library = importlib.import_module("flash_attn_interface")
    session.plan(large)
    assert len(library.SCHEDULES) == 2, "with and without a window"
    assert [made["window_size"] for made in library.SCHEDULES] == [(-1, -1), (7, 0)]
    session.plan(small)
    schedule = next(iter(session._schedules.values()))
    assert schedule[:3].tolist() == [33, 2, 1]
    assert not schedule[3:].any()
    attend(session, small)
    call, made = library.CALLS[-1], library.SCHEDULES[-1]
    assert call["num_splits"] == made["num_splits"]
    assert call["scheduler_metadata"].data_ptr() == schedule.data_ptr()
    assert call["max_seqlen_q"] == made["max_seqlen_q"] == 1
    assert made["max_seqlen_k"] == 3 * 16
    assert call["page_table"].max() < 64, "garbage behind the last block is not handed on"


def test_no_splits_where_bits_must_not_depend_on_the_batch(flash_attn: Backend) -> None:
    """In the schedule and in the call, for all layers of the session; and blocks that are read in one way."""
    batch = batch_of("decode_edges")
    spec = spec_of(batch)
    asks = replace(spec, batch_invariant=True)
    library = importlib.import_module("flash_attn_interface")
    for specs, splits in (([spec], 32), ([asks], 1), ([spec, asks], 1)):
        session = flash_attn.open(specs, limits_of(batch), "cpu")
        attend(session, batch)
        assert library.CALLS[-1]["num_splits"] == library.SCHEDULES[-1]["num_splits"] == splits
    (reason,) = flash_attn.reject(replace(asks, block_size=64))
    assert "batch_invariant with blocks of 64: above 32 tokens" in reason
    assert "blocks of unknown size" in "; ".join(flash_attn.reject(replace(asks, block_size=None)))
    few: dict[str, Any] = {
        "requests": ((1, 37), (20, 90)),
        "options": ({},),
        "dtypes": (BF16,),
        "head_dim": 64,
    }
    assert check_batch_invariance(flash_attn, device="cpu", **few).calls == 14


def test_splits_follow_from_shapes_alone() -> None:
    splits = flash_attn_backend.num_splits
    assert splits(1, 1, 32, 128) == 32
    assert splits(64, 1, 32, 128) == 32
    assert splits(4, 2048, 32, 128) == 1, "partial results of prompts would take gigabytes"
    assert 1 < splits(512, 1, 64, 128) < 32


def test_a_wrapper_per_number_of_requests_and_a_short_plan_from_then_on(flashinfer: Backend) -> None:
    first, other = batch_of("decode_edges"), batch_of("decode_skewed")
    session: Any = flashinfer.open([spec_of(first)], Limits(7, 7, 40, 64, 16), "cpu")
    decode = importlib.import_module("flashinfer.decode")
    for batch in (first, other, first, other):
        attend(session, batch)
    assert decode.PLANS == ["plan", "plan", "fast", "fast"]
    assert decode.BatchDecodeWithPagedKVCacheWrapper.made == 2


def test_lengths_of_the_host_are_not_read_from_the_device(
    flashinfer: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TORCHPAGED_CHECK=1 does, to compare them."""
    batch = batch_of("decode_edges")
    session = flashinfer.open([spec_of(batch)], limits_of(batch), "cpu")
    host = host_of(batch)
    session.plan(batch, host)
    wrong = HostLengths(host.query_lens, [length + 1 for length in host.seq_lens])
    with monkeypatch.context() as checking:
        checking.setenv("TORCHPAGED_CHECK", "1")
        with pytest.raises(torchpaged.ArgumentError, match="host.seq_lens: expected"):
            session.plan(batch, wrong)

    def read(self: torch.Tensor) -> Any:
        raise AssertionError("a length was read from the device")

    decode = importlib.import_module("flashinfer.decode")
    monkeypatch.setattr(decode, "fast_decode_plan", lambda *_, **__: None)
    for method in ("item", "tolist", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, method, read)
    session.plan(batch, host)
    with pytest.raises(AssertionError, match="read from the device"):
        session.plan(batch)


def test_eager_wrappers_are_few_and_captured_ones_stay(flashinfer: Backend) -> None:
    specs = [BatchSpec("b", (5,) * rows, (1,) * rows) for rows in range(1, 14)]
    batches = [make_batch(spec, **SHAPE) for spec in specs]
    session: Any = flashinfer.open([spec_of(batches[0])], Limits(13, 13, 3, 64, 16), "cpu")
    with torch.inference_mode():
        session.plan(batches[0], host_of(batches[0]))
        TapeCapture().capture(lambda: attend_again(session, batches[0]), None)
        for batch in batches[1:]:
            attend(session, batch)
    rows = [rows for _, rows in session._decoders]
    assert sorted(rows) == [1, *range(6, 14)]


def attend_again(session: Any, batch: Batch, lse: bool = True) -> torch.Tensor:
    """A call of what was planned."""
    out = torch.empty_like(batch.q)
    tensors, options = batch.arguments(out, None, **session.workspace(spec_of(batch, lse)))
    session.ops.paged_attention(*tensors, **options)
    return out


def test_a_plan_of_other_integers_than_the_captured_ones_is_refused(flashinfer: Backend) -> None:
    batch = batch_of("decode_edges")
    session: Any = flashinfer.open([spec_of(batch)], limits_of(batch), "cpu")
    decode = importlib.import_module("flashinfer.decode")
    with torch.inference_mode():
        session.plan(batch)
        graph = TapeCapture().capture(lambda: attend_again(session, batch), None)
        session.plan(batch)
        graph.replay()

        class Other(decode.BatchDecodeWithPagedKVCacheWrapper):  # type: ignore[name-defined,misc]
            def _schedule(self, *arguments: Any) -> None:
                super()._schedule(*arguments)
                self._plan_info = [7, 8]

        next(iter(session._decoders.values())).wrapper.__class__ = Other
        with pytest.raises(
            PlanError, match=r"expected the integers .* captured with, \(7, 7\), got \(7, 8\)"
        ):
            session.plan(batch)


def test_what_flashinfer_can_not_plan(flashinfer: Backend) -> None:
    hole = make_batch(BatchSpec("hole", (5, 9, 7), (1, 0, 1)), **SHAPE)
    with pytest.raises(
        PlanError, match=r"without a query token behind all others .* got query lengths \[1, 0, 1\]"
    ):
        attend(flashinfer.open([], limits_of(hole), "cpu"), hole)
    prompt = batch_of("prefill_small")
    session = flashinfer.open([spec_of(prompt)], limits_of(prompt), "cpu")
    session.plan(prompt)
    with torch.inference_mode(), pytest.raises(Exception, match="Capture decode batches alone"):
        TapeCapture().capture(lambda: attend_again(session, prompt), None)


def test_the_first_layer_of_a_captured_step_compares_for_all(
    flash_attn: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager layers compare each: between them the batch may change in place."""
    layers = [batch_of("decode_edges", seed=0)] * 3
    pools = [(b.k_cache.clone(), b.v_cache.clone()) for b in layers]
    layers = [replace(b, k_cache=k, v_cache=v) for b, (k, v) in zip(layers, pools, strict=True)]
    session = flash_attn.open([spec_of(layers[0])], limits_of(layers[0]), "cpu")
    session.plan(layers[0])
    compared: list[int] = []
    monkeypatch.setattr(planned_batch, "assert_planned", lambda planned, live: compared.append(1))

    def step() -> torch.Tensor:
        return torch.stack([attend_again(session, layer) for layer in layers])

    with torch.inference_mode():
        step()
        assert len(compared) == 3
        for steps, more in ((1, 1), (2, 2), (1, 1)):
            compared.clear()
            TapeCapture().capture(lambda steps=steps: [step() for _ in range(steps)][-1], None)
            assert len(compared) == more
        betweens = (lambda: session.plan(layers[0]), lambda: attend_again(session, layers[0]))
        for between, other in zip(betweens, layers[1:], strict=True):
            TapeCapture().capture(lambda: attend_again(session, layers[0]), None)
            between()
            compared.clear()
            TapeCapture().capture(lambda other=other: attend_again(session, other), None)
            assert len(compared) == 1, "the step of another model"


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer"])
def test_a_batch_that_was_not_planned(name: str) -> None:
    with stand_in(name) as found:
        batch, other = batch_of("decode_edges"), batch_of("decode_edges", seed=1)
        session = found.open([spec_of(batch)], limits_of(batch), "cpu")
        with pytest.raises(PlanError, match=r"call session\.plan\(metadata\) before the step"):
            attend_again(session, batch)
        session.plan(batch)
        with pytest.raises(RuntimeError, match="plan: expected one for this batch"):
            attend_again(session, other)
        with pytest.raises(RuntimeError, match="handle: expected that of an open session, got None"):
            session.ops.paged_attention(*_arguments(batch), max_query_len=1, scale=1.0)


def test_a_handle_of_nothing_that_is_open() -> None:
    held = Held[Any]("session")
    kept = torch.nn.Identity()
    handle = held.add(kept)
    assert held.of(handle) is kept
    del kept
    with pytest.raises(ClosedError, match="got one of a session that is closed"):
        held.of(handle)
    with pytest.raises(BackendUnavailableError, match="got None"):
        held.of(None)


def _arguments(batch: Batch) -> tuple[torch.Tensor, ...]:
    pools = (batch.k_cache, batch.v_cache)
    return (
        batch.q,
        *pools,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        torch.empty_like(batch.q),
    )


# ------------------------------------------------------------------------------- names, absence and refusals
@pytest.mark.parametrize("alias", ALIASES)
def test_names_that_others_have(alias: str) -> None:
    assert get_backend(alias) is get_backend(ALIASES[alias])
    spec = spec_of(batch_of("decode_one"))
    if alias == "TORCH_SDPA":
        choice = select_backend(spec, alias)
        assert choice.name == "torch_sdpa"
        assert choice.reason == "backend='TORCH_SDPA' was given"
        assert PagedAttention(4, 64, 2, backend=alias).choice.name == "torch_sdpa"
        with torchpaged.use_backend(alias):
            assert select_backend(spec).name == "torch_sdpa"
    elif get_backend(alias).unavailable():
        with pytest.raises(BackendUnavailableError, match=ALIASES[alias]):
            select_backend(spec, alias)


def test_a_traced_function_runs_a_built_in_backend_that_was_named() -> None:
    torch._dynamo.reset()
    batch = batch_of("decode_edges")
    arguments = _arguments(batch)[:-1]

    def call() -> torch.Tensor:
        return torchpaged.paged_attention(*arguments, max_query_len=1, scale=batch.scale)

    with torchpaged.use_backend("TORCH_SDPA"):
        out = torch.compile(call, fullgraph=True, backend="eager")()
    assert_attention_close(out, None, batch)


def test_what_is_absent_says_why_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "flashinfer is not installed; pip install 'flashinfer-python>=" in str(FLASHINFER.unavailable())
    assert "not installed; pip install tokenspeed-fa3" in str(flash_attn_backend.PACKAGE.unavailable())
    assert "flashinfer is not installed" in str(get_backend("flashinfer_xqa").unavailable())
    with pytest.raises(BackendUnavailableError, match="'flashinfer_xqa' .*is not installed; pip install"):
        select_backend(spec_of(batch_of("decode_one"), lse=False), "flashinfer_xqa")
    monkeypatch.undo()
    for version in ("0.6.12", "0.8.0", "1.0"):
        with stand_in("flashinfer"):
            monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
            reason = FLASHINFER.missing()
            assert f"flashinfer {version} is installed, 0.6.13 to 0.7 are supported" in str(reason)
            with pytest.raises(BackendUnavailableError, match=r"0\.6\.13 to 0\.7 are supported; pip install"):
                FLASHINFER.load()
    for version in ("0.6.13", "0.7.2.post1", "0.7.9+cu130"):
        with stand_in("flashinfer"):
            monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
            assert FLASHINFER.missing() is None


def test_flash_attention_4_is_not_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder of its package may be that of another one, whose import loads kernels."""
    from torchpaged.backends import flash_attn_4

    assert "flash-attn-4[cu13]' (about 100 MB" in str(flash_attn_4.PACKAGE.missing())
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "(FlashAttention-4) is not installed" in str(flash_attn_4.PACKAGE.unavailable())
    with pytest.raises(BackendUnavailableError, match="not installed; pip install --pre 'flash-attn-4"):
        flash_attn_4.PACKAGE.load()
    monkeypatch.undo()
    with stand_in("flash_attn_4") as found:
        assert flash_attn_4.PACKAGE.missing() is None
        library = flash_attn_4.PACKAGE.load()
        monkeypatch.setattr(library, "flash_attn_varlen_func", lambda q, k, v, page_table: None)
        with pytest.raises(BackendUnavailableError, match="lacks cu_seqlens_q, .*pip install --pre"):
            flash_attn_4.PACKAGE.load()
        assert "graph support NEVER is less than" in str(
            found.reject(replace(spec_of(batch_of("decode_one")), graphs=GraphSupport.ALWAYS))
        )


def test_a_package_of_that_name_that_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in("flash_attn"):
        library = importlib.import_module("flash_attn_interface")
        monkeypatch.setattr(library, "flash_attn_with_kvcache", lambda q, k_cache, cache_seqlens: None)
        with pytest.raises(BackendUnavailableError, match="flash_attn_with_kvcache of .* lacks page_table, "):
            flash_attn_backend.PACKAGE.load()
        config = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
        monkeypatch.setitem(config, "FLASHATTENTION_DISABLE_PAGEDKV", True)
        assert "built without paged keys and values; pip install" in str(flash_attn_backend.PACKAGE.missing())


def test_what_a_wheel_was_built_without(flash_attn: Backend) -> None:
    def reasons(**options: Any) -> str:
        head_dim = options.pop("head_dim", 64)
        return "; ".join(flash_attn.reject(spec_of(batch_of("decode_one", head_dim=head_dim), **options)))

    assert "logits_soft_cap is not in this wheel" in reasons(logits_soft_cap=5.0)
    assert reasons() == reasons(window_left=5) == reasons(head_dim=96) == ""
    assert "head_dim 264 is over 256" in reasons(head_dim=264)
    assert "head_dim 100 is no multiple of 8" in reasons(head_dim=100)
    fp8 = spec_of(batch_of("decode_one", kv_dtype=torch.float8_e4m3fn, scales="one"))
    assert "reads fp8 keys with fp8 queries alone" in "; ".join(flash_attn.reject(fp8))


def test_what_flashinfer_is_refused(flashinfer: Backend) -> None:
    def reasons(**options: Any) -> str:
        head_dim = options.pop("head_dim", 64)
        return "; ".join(flashinfer.reject(spec_of(batch_of("decode_one", head_dim=head_dim), **options)))

    assert reasons() == reasons(logits_soft_cap=5.0) == reasons(causal=False) == ""
    assert "decode kernel reads memory that is not its own" in reasons(head_dim=96)
    assert "chunked is not supported" in reasons(chunk_size=4)
    assert "a window to the right is not supported" in reasons(causal=False, window_right=3)


def test_a_torch_without_what_flex_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.flex_attention as theirs

    monkeypatch.delattr(theirs, "AuxRequest")
    with pytest.raises(
        BackendUnavailableError, match=r"no flex_attention with AuxRequest; pip install 'torch>=2"
    ):
        PagedAttention(4, 64, backend="flex", dtype=BF16)


def test_torchs_own_varlen_function() -> None:
    reason = str(torch_varlen.unavailable())
    assert "pip install 'torch>=2.12'" in reason or "activate_flash_attention_impl('FA3')" in reason
    assert get_backend("torch_varlen").capabilities.graph_support == GraphSupport.NEVER


def test_a_gpu_that_the_kernels_do_not_know_gets_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turing: FlexAttention by itself, SDPA where that can't, each with the reasons why not those before.
    What is around a library that may be absent is named or not chosen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    spec = replace(spec_of(batch_of("decode_one")), device=torch.device("cuda"), dtype=torch.float16)
    spec = replace(spec, kv_dtype=torch.float16)
    monkeypatch.setattr(torch.version, "hip", None)
    choice = select_backend(spec)
    assert choice.name == "flex"
    assert choice.rejected == {}
    assert "Turing: not verified here" in choice.reason
    fp8 = select_backend(replace(spec, kv_dtype=torch.float8_e4m3fn))
    assert fp8.name == "torch_sdpa"
    assert list(fp8.rejected) == ["flex"]
    with use_backend("triton"), pytest.raises(BackendUnavailableError, match=r"\(7, 5\) is below \(8, 0\)"):
        select_backend(spec)
    assert select_backend(spec, "flex").name == "flex"
    assert get_backend("flex").reject(replace(spec, block_size=8))
    for name in ("flash_attn", "flash_attn_4", "flashinfer", "flashinfer_xqa", "torch_varlen"):
        assert any("compute capability (7, 5)" in reason for reason in get_backend(name).reject(spec)), name


def test_a_name_of_others_can_not_be_taken() -> None:
    cpu = get_backend("cpu")
    for name in ("FLASHINFER", "flex"):
        with pytest.raises(torchpaged.ArgumentError, match=f"expected a new name, got '{name}'"):
            torchpaged.backends.register_backend(Backend(name, *_parts(cpu)))


def test_the_benchmark_runs_one_that_is_named() -> None:
    """By a name of its own, since the library itself may be a peer; not where none is named."""
    from attention_peers.cases import AttentionCase
    from attention_peers.contenders import contenders
    from attention_peers.inputs import exact_outputs, make_inputs, relative_error

    device, f32 = torch.device("cpu"), torch.float32
    assert {contender.name for contender in contenders(device, peers=False)} == {"cpu"}
    named = contenders(device, backends=["torch_sdpa", "flex"])
    assert len({contender.name for contender in named}) == len(named)
    case = AttentionCase("small", 4, 2, 64, (40, 16, 3), (1, 1, 1), 16, f32, f32, "smoke")
    inputs = make_inputs(case, device)
    (sdpa,) = (contender for contender in named if contender.name == "torch_sdpa_backend")
    assert sdpa.why_not(case, device) is None
    out = sdpa.prepare(case, inputs).calls[0]()
    assert relative_error(case, out, exact_outputs(case, inputs, 0)) < 1e-5


def test_no_automatic_choice_on_a_cpu_is_one_of_these() -> None:
    assert list_backends()[:3] == ["cuda", "triton", "cpu"]
    rejected = select_backend(spec_of(batch_of("decode_one"))).rejected
    assert select_backend(spec_of(batch_of("decode_one"))).name in ("cpu", "reference"), rejected


# ---------------------------------------------------------------------------------------- what they declare
def test_the_page_has_the_tables_that_the_data_makes() -> None:
    if "cpu" in get_backend("triton").capabilities.device_types:
        pytest.skip("TRITON_INTERPRET=1 changes what triton declares")
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    before, _, rest = page.partition("<!-- made: backends -->\n")
    made, _, after = rest.partition("<!-- end -->")
    assert made == capability_tables(), "python benchmarks/backend_tables.py"
    for name in list_backends():
        assert f"| `{name}` |" in made
        assert f"`{name}`" in before + after


def test_what_is_declared_is_plain_data() -> None:
    import json

    from torchpaged.cli.backends import declared

    rows = json.loads(json.dumps({name: declared(name) for name in list_backends()}))
    assert rows["flashinfer"]["head_dims"] == [64, 128, 256]
    assert rows["flashinfer"]["alibi"] is False
    assert rows["flex"]["finite_pools"]
    assert rows["flex"]["other_names"] == ["FLEX_ATTENTION"]
    assert {name for name, row in rows.items() if row["planning"] != "NEVER"} == {"flash_attn", "flashinfer"}


def test_the_engine_and_a_huggingface_cache(make_llama: Any) -> None:
    """On torch's own attention, captured, compared with the device's own kernels."""
    import copy

    from torchpaged.engine import Generator, SamplingParams
    from torchpaged.hf import PagedCache

    model = make_llama(vocab_size=99, hidden_size=64, intermediate_size=96, max_position_embeddings=256)
    params, prompts = SamplingParams(max_new_tokens=8, ignore_eos=True), [[5, 9, 11, 20, 3], [8, 30]]
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "prefill_chunk_size": 4}
    want, got = (
        [out.token_ids for out in Generator(copy.deepcopy(model), **sizes, **named).generate(prompts, params)]
        for named in ({}, {"backend": "TORCH_SDPA", "prefill_buckets": [2, 4], "capture": TapeCapture()})
    )
    assert got == want
    ids = torch.tensor([[5, 9, 11, 20, 3]])
    dense = model.generate(input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    model.set_attn_implementation("torchpaged")
    cache = PagedCache(model.config, 1, 32, block_size=4, backend="torch_sdpa")
    paged = model.generate(
        input_ids=ids, max_new_tokens=6, min_new_tokens=6, do_sample=False, past_key_values=cache
    )
    assert torch.equal(paged, dense)
