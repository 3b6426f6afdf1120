"""FlexAttention as a backend, on a CPU: unfused for most, compiled by Inductor where that is the question."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from library_backends import attend, limits_of, spec_of

import torchpaged
from torchpaged import ArgumentError, BackendUnavailableError, Limits, PagedAttention, open_session
from torchpaged.backends import GraphSupport, flex_compiled, get_backend
from torchpaged.backends.flex import flex_backend
from torchpaged.backends.query_tiles import most_keys, num_tiles, query_tiles, visible_blocks
from torchpaged.custom_ops.attention.mask import Mask
from torchpaged.graphs.capture import EagerCapture
from torchpaged.testing import ATTENTION_VARIANTS, BATCH_SPECS, Batch, assert_attention_close, make_batch

FLEX = get_backend("flex")


@pytest.fixture(autouse=True)
def _unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "eager")


def batch_of(name: str, **options: Any) -> Batch:
    """Pools are finite: hidden values are multiplied by 0."""
    batch = make_batch(BATCH_SPECS[name], **{"head_dim": 32} | options)
    batch.k_cache.nan_to_num_(0.5), batch.v_cache.nan_to_num_(0.5)
    return batch


@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
@pytest.mark.parametrize("name", ["decode_edges", "mixed_padded", "left_padded_chunk"])
def test_every_option(name: str, variant: str) -> None:
    sinks, alibi = variant in ("causal", "soft_cap"), variant in ("causal", "window")
    batch = batch_of(name, sinks=sinks, alibi=alibi, head_dim_v=48, num_heads=6, block_size=8)
    options = ATTENTION_VARIANTS[variant]
    out, lse = attend(FLEX.open([], limits_of(batch), "cpu"), batch, **options)
    assert_attention_close(out, lse, batch, **options)


def test_shapes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls of other lengths and numbers of requests share what was compiled."""
    monkeypatch.setattr(flex_compiled.PLAIN, "compiled", {})
    for name in ("decode_skewed", "decode_padded"):  # of 4 requests and tokens
        batch = batch_of(name, num_blocks=64)
        attend(FLEX.open([], limits_of(batch), "cpu"), batch)
    assert len(flex_compiled.PLAIN.compiled) == 1
    batch = batch_of("decode_empty_row", num_blocks=64)  # 3, padded to 4
    out, lse = attend(FLEX.open([], limits_of(batch), "cpu"), batch)
    assert_attention_close(out, lse, batch)
    assert len(flex_compiled.PLAIN.compiled) == 1


# ------------------------------------------------------------------------------------ functions of one's own
def test_a_score_mod_and_a_mask_mod_in_positions_of_the_sequence() -> None:
    """ALiBi and a window, written by a user, are ALiBi and a window."""
    slopes = 2.0 ** -torch.linspace(1, 8, 4)
    mine = flex_backend(
        "mine",
        score_mod=lambda score, request, head, query, key: score + slopes[head] * (key - query),
        mask_mod=lambda request, head, query, key: key >= query - 7,
    )
    for name in ("decode_edges", "mixed_padded"):
        batch = batch_of(name)
        out, lse = attend(mine.open([], limits_of(batch), "cpu"), batch)
        batch.extras["alibi_slopes"] = slopes
        assert_attention_close(out, lse, batch, window_left=7)


def test_a_mod_of_requests_reads_what_changes_between_calls() -> None:
    first = torch.tensor([0, 3, 0, 0])
    mine = flex_backend("mine", mask_mod=lambda request, head, query, key: key >= first[request])
    batch = batch_of("decode_skewed")
    session = mine.open([], limits_of(batch), "cpu")
    whole, _ = attend(FLEX.open([], limits_of(batch), "cpu"), batch)
    out, lse = attend(session, batch)
    assert not out[1].any(), "it has 3 keys and sees none"
    assert bool((lse[1] == float("-inf")).all()), "it has 3 keys and sees none"
    torch.testing.assert_close(out[[0, 2, 3]], whole[[0, 2, 3]])
    first.zero_()
    torch.testing.assert_close(attend(session, batch)[0], whole)


def test_a_layer_on_a_backend_with_mods() -> None:
    """Its session gives the op the functions; compiled code and the op alone refuse to run without."""
    soft = flex_backend(
        "soft", score_mod=lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0), graph_support=GraphSupport.NEVER
    )
    session = soft.open([], Limits(), "cpu")
    capped = PagedAttention(4, 32, 2, logits_soft_cap=5.0, backend="flex", dtype=torch.float32)
    layer = PagedAttention(4, 32, 2, session=session, dtype=torch.float32)
    assert layer.choice.name == "soft"
    cache = torchpaged.PagedKVCache.uniform(1, 2, 32, block_size=4, num_blocks=8, dtype=torch.float32)
    metadata = torchpaged.AttentionMetadata.from_lists([3, 1], [3, 5], [[1], [2, 3]], block_size=4)
    q, k, v = torch.randn(4, 4, 32) * 9, torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    with torch.inference_mode():
        want = capped(q, k, v, cache[0], metadata)
        torch.testing.assert_close(layer(q, k, v, cache[0], metadata), want)
    batch = batch_of("decode_one")
    pools = (batch.k_cache, batch.v_cache)
    tensors = (
        batch.q,
        *pools,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        torch.empty_like(batch.q),
    )
    with pytest.raises(
        RuntimeError, match="handle: expected that of an open session of a backend with mods, got None"
    ):
        soft.ops.paged_attention(*tensors, max_query_len=1, scale=1.0)
    with pytest.raises(BackendUnavailableError, match="graph support NEVER is less than ALWAYS"):
        soft.open([], Limits(graphs=GraphSupport.ALWAYS), "cpu")


SLOPES = 2.0 ** -torch.linspace(1, 8, 4)
OWN: dict[str, Any] = {
    "score_mod": lambda score, request, head, query, key: score + SLOPES[head] * (key - query),
    "mask_mod": lambda request, head, query, key: key >= query - 3,
}


@pytest.mark.slow_cases("eager")
@pytest.mark.parametrize("how", ["eager", "compiled", "captured"])
def test_functions_at_the_layer(how: str) -> None:
    """They are ALiBi and a window, in layers that share a session with a plain one. Replays read other
    lengths."""
    torch._dynamo.reset()
    shape: dict[str, Any] = {"num_heads": 4, "head_dim": 32, "num_kv_heads": 2, "dtype": torch.float32}
    session = open_session(PagedAttention(**shape, **OWN).spec, Limits())
    assert session.name == "flex"
    mine, plain = (PagedAttention(**shape, session=session, **given) for given in (OWN, {}))
    same = PagedAttention(**shape, backend="cpu", alibi_slopes=SLOPES, window_size=(3, -1))
    whole = PagedAttention(**shape, backend="cpu")
    cache = torchpaged.PagedKVCache.uniform(1, 2, 32, block_size=4, num_blocks=8, dtype=torch.float32)
    metadata = torchpaged.AttentionMetadata.from_lists([1, 1], [7, 12], [[1, 4], [2, 3, 5]], block_size=4)
    q, k, v = (torch.randn(2, heads, 32) for heads in (4, 2, 2))
    for pool in cache[0][:2]:
        pool.copy_(torch.randn(pool.shape))

    def step() -> torch.Tensor:
        return torch.stack([mine(q, k, v, cache[0], metadata), plain(q, None, None, cache[0], metadata)])

    run: Any = step
    if how == "compiled":
        run = torch.compile(step, fullgraph=True, backend="eager")
    with torch.inference_mode():
        if how == "captured":
            graph = EagerCapture().capture(step, None)

            def run() -> torch.Tensor:
                graph.replay()
                return graph.output

        for shorter in (0, 2):
            metadata.seq_lens -= shorter
            got = run()
            want = [layer(q, None, None, cache[0], metadata) for layer in (same, whole)]
            torch.testing.assert_close(got, torch.stack(want))


def test_a_layer_with_functions_runs_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"num_heads": 4, "head_dim": 32, "dtype": torch.float32}
    layer, again = PagedAttention(**shape, **OWN), PagedAttention(**shape, **OWN)
    assert layer.choice.name == "flex"
    assert "take no functions" in str(layer.choice.rejected["cpu"])
    assert flex_compiled.MODS.of(layer._workspace["mods"]) is flex_compiled.MODS.of(again._workspace["mods"])
    other = PagedAttention(**shape, score_mod=OWN["score_mod"])
    assert flex_compiled.MODS.of(other._workspace["mods"]) is not flex_compiled.MODS.of(
        layer._workspace["mods"]
    )
    moved = copy.deepcopy(layer).half().float()
    assert moved.choice.name == "flex"
    assert moved.score_mod is OWN["score_mod"]
    why = "score_mod and mask_mod are not supported: its kernels take no functions"
    with pytest.raises(BackendUnavailableError, match=rf"backend 'cpu' \(backend='cpu' was given\) .*{why}"):
        PagedAttention(**shape, **OWN, backend="cpu")
    with torchpaged.use_backend("torch_sdpa"), pytest.raises(BackendUnavailableError, match=why):
        PagedAttention(**shape, **OWN)
    with pytest.raises(BackendUnavailableError, match=why):
        PagedAttention(**shape, **OWN, session=get_backend("cpu").open([], Limits(), "cpu"))
    mine = flex_backend("mine", **OWN)
    with pytest.raises(BackendUnavailableError, match=why):  # it has its own
        PagedAttention(**shape, **OWN, session=mine.open([], Limits(), "cpu"))
    with pytest.raises(ArgumentError, match="mask_mod: expected a function, or None, got 3"):
        PagedAttention(**shape, mask_mod=3)  # type: ignore[arg-type]


def test_heads_that_its_gpu_kernels_do_not_take() -> None:
    """Wide ones get tiles that fit."""
    spec = dataclasses.replace(spec_of(batch_of("decode_one"), lse=False), device=torch.device("cuda"))
    assert (
        FLEX.capabilities.reject(spec)
        == []
        == FLEX.capabilities.reject(dataclasses.replace(spec, head_dim=512))
    )
    (reason,) = FLEX.capabilities.reject(dataclasses.replace(spec, head_dim_v=8))
    assert reason == "head_dim 8 is below 16, the least of its GPU kernels"

    def options(width: int, tile_q: int) -> Any:
        sizes = (8, 8, 8, width, 9, 16, 2, width, width)
        mask = Mask(True, -1, -1, 0)
        f32 = torch.float32
        shape = flex_compiled.Shape(
            "inductor", torch.device("cuda"), f32, tile_q, sizes, 16, mask, 1.0, 0.0, False, False, False
        )
        return flex_compiled.kernel_options(shape)

    assert options(128, 1) == {"BLOCK_N": 16}
    assert options(128, 64) == {
        "BLOCK_N": 16,
        "num_warps": 4,
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": 64,
    }
    assert options(512, 64)["BLOCK_M"] == 32
    assert options(512, 64)["num_warps"] == 8


def test_functions_that_are_none() -> None:
    with pytest.raises(ArgumentError, match="score_mod, mask_mod: expected at least one function"):
        flex_backend("nothing")
    with pytest.raises(ArgumentError, match="score_mod: expected a function, or None, got 3"):
        flex_backend("three", score_mod=3)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- refusals
def test_pools_that_are_not_finite_or_lie_otherwise() -> None:
    batch = make_batch(BATCH_SPECS["decode_edges"], head_dim=32)
    with pytest.raises(ArgumentError, match="k_cache: expected finite numbers in every slot .* torch.zeros"):
        attend(FLEX.open([], limits_of(batch), "cpu"), batch)
    batch = batch_of("decode_edges", heads_first=True)
    with pytest.raises(ArgumentError, match="k_cache: expected the tokens of all blocks at one stride"):
        attend(FLEX.open([], limits_of(batch), "cpu"), batch)


def test_what_flex_can_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(batch_of("decode_one"))
    assert FLEX.reject(spec) == []
    monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "inductor")
    assert FLEX.reject(spec_of(batch_of("decode_one"), lse=False)) == []
    (reason,) = FLEX.reject(spec)
    assert reason == "lse and sinks: torch's compiled FlexAttention returns no log-sum-exp on a CPU"
    mixed = spec_of(
        make_batch(BATCH_SPECS["decode_one"], kv_dtype=torch.float8_e4m3fn, scales="one"), lse=False
    )
    assert any("which FlexAttention asks for" in reason for reason in FLEX.reject(mixed))
    monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "nvcc")
    with pytest.raises(ValueError, match="TORCHPAGED_FLEX_COMPILER: expected inductor or eager, got 'nvcc'"):
        FLEX.reject(spec)


# -------------------------------------------------------------------------------------- compiled by Inductor
@pytest.mark.slow
@pytest.mark.parametrize("name", ["decode_one", "mixed_padded"])
def test_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, and as one op of a compiled call around it."""
    monkeypatch.setenv("TORCHPAGED_FLEX_COMPILER", "inductor")
    torch._dynamo.reset()
    batch = batch_of(name, alibi=True)
    out, _ = attend(
        FLEX.open([], limits_of(batch), "cpu"), batch, lse=False, window_left=20, logits_soft_cap=9.0
    )
    assert_attention_close(out, None, batch, window_left=20, logits_soft_cap=9.0)

    def call(q: torch.Tensor) -> torch.Tensor:
        pools = (batch.k_cache, batch.v_cache)
        arguments = (*pools, batch.block_table, batch.seq_lens, batch.query_start_loc)
        return torchpaged.paged_attention(
            q * 1.0,
            *arguments,
            max_query_len=batch.max_query_len,
            alibi_slopes=batch.extras["alibi_slopes"],
            window_size=(20, -1),
            logits_soft_cap=9.0,
        )

    with torchpaged.use_backend("FLEX_ATTENTION"):
        again = torch.compile(call, fullgraph=True)(batch.q)
    assert torch.equal(again, out)


# ----------------------------------------------------------------------------------------------- query tiles
@pytest.mark.parametrize("tile_q", [1, 4, 16])
@pytest.mark.parametrize("name", BATCH_SPECS)
def test_tiles_hold_every_query_once(name: str, tile_q: int) -> None:
    batch = make_batch(BATCH_SPECS[name])
    tiles = query_tiles(batch.seq_lens, batch.query_start_loc, len(batch.q), tile_q)
    assert tiles.token.shape == (num_tiles(len(batch.q), len(batch.seq_lens), tile_q), tile_q)
    starts, at = batch.query_start_loc.tolist(), 0
    for request, length in enumerate(batch.seq_lens.tolist()):
        for token in range(starts[request], starts[request + 1]):
            row = int(tiles.row_of_token[token])
            assert tiles.token.flatten()[row] == token
            assert tiles.request[row // tile_q] == request
            assert tiles.position.flatten()[row] == length - starts[request + 1] + token
            at += 1
    assert int(tiles.is_query.sum()) == at == starts[-1]
    rows = set(tiles.row_of_token[tiles.is_query].tolist())
    others = [i for i in range(tiles.token.numel()) if i not in rows]
    assert (tiles.position.flatten()[others] < 0).all()


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
def test_listed_blocks_hold_all_that_is_seen(variant: str, block_size: int) -> None:
    """And the outermost ones hold something; a static bound holds for all of them."""
    options = {name: x for name, x in ATTENTION_VARIANTS[variant].items() if name in Mask._fields}
    mask = Mask(**options)
    for name in BATCH_SPECS:
        batch = make_batch(BATCH_SPECS[name])
        for tile_q in (1, 8):
            tiles = query_tiles(batch.seq_lens, batch.query_start_loc, len(batch.q), tile_q)
            first, count = visible_blocks(tiles, mask, block_size)
            most = most_keys(mask, tile_q)
            for tile in range(len(first)):
                length = max(int(tiles.seq_lens[tile]), 0)
                position = tiles.position[tile][:, None]
                shown = mask.sees(position, torch.arange(length)) & (position >= 0)
                seen = shown.any(0).nonzero().flatten() // block_size
                if not len(seen):
                    assert count[tile] <= 1
                    continue
                assert (int(first[tile]), int(count[tile])) == (int(seen[0]), int(seen[-1] - seen[0]) + 1)
                assert most is None or int(count[tile]) <= (most - 1) // block_size + 2
