"""NaN and inf by one rule in every backend (docs/ops.md): a query that sees one gives NaN, no other does."""

import os
from typing import Any

import pytest
import torch
from nonfinite import INF, NAN, assert_as_expected, poke

from torchpaged.backends import get_backend
from torchpaged.custom_ops import BACKEND_OPS, native_status
from torchpaged.testing import ATTENTION_VARIANTS, BatchSpec, make_batch, run_paged_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("triton",) if INTERPRETED else ("reference", "cpu")
EXACT = ("reference", "cpu")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and not native_status()[0]:
        pytest.skip(native_status()[1])
    if request.param == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    return str(request.param)


#: name -> lengths; the middle request of each is poked at a position that some of its queries see, some
#: don't, or all do.
SPECS = {
    "decode": BatchSpec("decode", (40, 37, 3), (1, 1, 1)),
    "speculative": BatchSpec("speculative", (40, 37, 3), (4, 4, 3)),
    "prefill": BatchSpec("prefill", (30, 37, 5), (30, 37, 5)),
    "chunked": BatchSpec("chunked", (30, 37, 5), (12, 20, 1), padded_tokens=2),
}
#: What the interpreter runs of these: one spec per kernel, one variant per kind of mask.
FEW_SPECS, FEW_VARIANTS, SLOW = (
    ("decode", "prefill"),
    ("causal", "window_both", "soft_cap"),
    "the interpreter is slow",
)
POKES = [(what, value) for what in "qkv" for value in (NAN, INF, -INF)]


@pytest.mark.slow_cases("triton-prefill-*", but=("triton-prefill-causal-*",))
@pytest.mark.parametrize(("what", "value"), POKES, ids=[f"{what}={value}" for what, value in POKES])
@pytest.mark.parametrize("variant", ATTENTION_VARIANTS)
@pytest.mark.parametrize("spec", SPECS)
def test_one_bad_number(backend: str, spec: str, variant: str, what: str, value: float) -> None:
    if INTERPRETED and (
        value == -INF
        or (what != "k" and value == INF)
        or spec not in FEW_SPECS
        or variant not in FEW_VARIANTS
        or (variant != "causal" and what == "q")
        or (variant == "window_both" and value == INF)
    ):
        pytest.skip(SLOW)
    options = ATTENTION_VARIANTS[variant]
    for position in (36, 2) if INTERPRETED else (36, 20, 2):
        if what == "q" and position < 37 - SPECS[spec].query_lens[1]:
            continue
        batch = make_batch(SPECS[spec], head_dim=16, block_size=8, num_heads=4, num_kv_heads=2)
        poke(batch, what, value, 1, position, 1, 5)
        assert_as_expected(
            run_paged_attention(BACKEND_OPS[backend], batch, **options),
            batch,
            exact=backend in EXACT,
            **options,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_scores_that_are_all_infinite(backend: str, spec: str, dtype: torch.dtype) -> None:
    """Every key a head sees scores +inf, or -inf: the softmax of neither exists, so NaN, whatever the first
    tile holds."""
    if INTERPRETED and (spec not in FEW_SPECS or dtype == torch.float16):
        pytest.skip(SLOW)
    for value in (INF, -INF):
        batch = make_batch(SPECS[spec], head_dim=16, block_size=8, num_heads=4, num_kv_heads=2, dtype=dtype)
        start, end = batch.query_start_loc.tolist()[1:3]
        batch.q[start:end, 2] = 1.0
        for position in range(37):
            poke(batch, "k", value, 1, position, 1, 3)
        assert_as_expected(run_paged_attention(BACKEND_OPS[backend], batch), batch, exact=backend in EXACT)


@pytest.mark.skipif(INTERPRETED, reason="not a kernel of Triton's")
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_a_bad_number_in_torch_sdpa(spec: str, what: str) -> None:
    for value in (NAN, INF):
        batch = make_batch(SPECS[spec], head_dim=16, block_size=8, num_heads=4, num_kv_heads=2)
        poke(batch, what, value, 1, 36, 1, 5)
        got = run_paged_attention(get_backend("torch_sdpa").ops, batch)
        assert_as_expected(got, batch, exact=False)


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(INTERPRETED, reason="of the cpu backend alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("what", "value"), POKES, ids=[f"{what}={value}" for what, value in POKES])
def test_one_bad_number_among_many_rows(what: str, value: float, dtype: torch.dtype) -> None:
    """Enough for the CPU's products of matrices, which take numbers apart; others see what is before it."""
    for options in ({}, {"window_left": 5}):
        batch = make_batch(
            BatchSpec("many", (70, 300, 5), (1, 2, 1)),
            head_dim=16,
            num_heads=64,
            num_kv_heads=1,
            dtype=dtype,
        )
        poke(batch, what, value, 1, 299, 0, 5)
        results = run_paged_attention(BACKEND_OPS["cpu"], batch, **options)
        assert_as_expected(results, batch, exact=True, **options)


@pytest.mark.parametrize("spec", ["decode", "prefill"])
def test_a_first_tile_of_minus_inf_is_outweighed(backend: str, spec: str) -> None:
    """Keys that score -inf weigh nothing beside others, though they fill the tiles that come first."""
    batch = make_batch(
        BatchSpec("long", (300, 150), (1, 1) if spec == "decode" else (120, 40)),
        head_dim=16,
        num_heads=2,
        num_kv_heads=1,
    )
    batch.q.abs_()
    for position in range(140):
        poke(batch, "k", -INF, 0, position, 0, 3)
    assert_as_expected(run_paged_attention(BACKEND_OPS[backend], batch), batch, exact=backend in EXACT)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_sink_belongs_to_its_head(backend: str, value: float) -> None:
    batch = make_batch(SPECS["chunked"], head_dim=16, sinks=True)
    batch.extras["sinks"][2] = value
    assert_as_expected(run_paged_attention(BACKEND_OPS[backend], batch), batch, exact=backend in EXACT)


@pytest.mark.slow_cases(
    "triton-decode-narrow-*",
    "triton-prefill-narrow-*",
    but=("triton-decode-narrow-{'window_left': 5}", "triton-prefill-narrow-{'window_left': 5}"),
)
@pytest.mark.parametrize(
    "options",
    [{"window_left": 5}, {"chunk_size": 8}, {"causal": False, "window_left": 3, "window_right": 2}],
    ids=str,
)
@pytest.mark.parametrize(
    "shape",
    [{"num_heads": 4, "num_kv_heads": 2}, {"num_heads": 32, "num_kv_heads": 1}],
    ids=["narrow", "wide"],
)
@pytest.mark.parametrize("spec", SPECS)
def test_blocks_that_no_query_sees_never_matter(
    backend: str, spec: str, shape: dict[str, int], options: dict[str, Any]
) -> None:
    """All NaN in front of every query's interval: the answer is that of the clean pool, bit for bit."""
    if INTERPRETED and (spec not in FEW_SPECS or (spec == "prefill" and shape["num_heads"] == 32)):
        pytest.skip(SLOW)
    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch(SPECS[spec], head_dim=16, block_size=8, dtype=dtype, **shape)
        clean = run_paged_attention(BACKEND_OPS[backend], batch, **options)
        for request, (length, queries) in enumerate(
            zip(batch.spec.seq_lens, batch.spec.query_lens, strict=True)
        ):
            first = length - queries
            low = (
                first // options["chunk_size"] * options["chunk_size"]
                if "chunk_size" in options
                else max(0, first - options["window_left"])
            )
            for position in range(low):
                block = int(batch.block_table[request, position // 8])
                batch.k_cache[block, position % 8] = batch.v_cache[block, position % 8] = NAN
        got = run_paged_attention(BACKEND_OPS[backend], batch, **options)
        assert torch.equal(got[0], clean[0])
        assert torch.equal(got[1], clean[1])


@pytest.mark.parametrize("variant", ["causal", "bidirectional", "window_both", "soft_cap"])
def test_positions_below_zero_see_nothing(backend: str, variant: str) -> None:
    """Left padding: zeros and -inf, without causality too; the request's other queries see what they would
    see without it."""
    options = ATTENTION_VARIANTS[variant]
    batch = make_batch(
        BatchSpec("padded", (3, 6, -2, 0), (6, 9, 4, 2)),
        head_dim=16,
        block_size=8,
        sinks=variant == "bidirectional",
    )
    out, lse = run_paged_attention(BACKEND_OPS[backend], batch, **options)
    blind = [*range(3), *range(6, 9), *range(15, 21)]
    assert not bool(out[blind].any())
    assert bool((lse[blind] == -INF).all())
    assert bool(lse.isfinite()[[i for i in range(21) if i not in blind]].all())
    assert_as_expected((out, lse), batch, exact=True, **options)


def merge(
    backend: str,
    a: float,
    b: float,
    out_a: float = 1.0,
    out_b: float = 3.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[float, float]:
    """Merge two states of one row and one head."""
    state = [torch.full((1, 1, 8), x, dtype=dtype) for x in (out_a, out_b)]
    lse = [torch.full((1, 1), x) for x in (a, b)]
    out, merged = torch.full((1, 1, 8), 9.0, dtype=dtype), torch.full((1, 1), 9.0)
    BACKEND_OPS[backend].merge_attn_states(state[0], lse[0], state[1], lse[1], out, merged)
    assert bool((out == out[0, 0, 0]).all()) or bool(out.isnan().all())
    return float(out[0, 0, 0]), float(merged)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("other", [0.5, -INF, INF, NAN])
def test_merging_a_bad_state_gives_nan(backend: str, bad: float, other: float) -> None:
    for a, b in ((bad, other), (other, bad)):
        out, lse = merge(backend, a, b)
        assert out != out, (a, b, out, lse)
        assert lse != lse, (a, b, out, lse)


def test_merging_a_side_that_saw_nothing(backend: str) -> None:
    """LSE -inf: what the side's out holds is of no account."""
    for rubbish in (NAN, INF, 7.0):
        assert merge(backend, 0.5, -INF, 1.0, rubbish) == (1.0, 0.5)
        assert merge(backend, -INF, 0.5, rubbish, 3.0) == (3.0, 0.5)
        assert merge(backend, -INF, -INF, rubbish, rubbish) == (0.0, -INF)
    out, lse = merge(backend, 0.0, 0.0, NAN, 3.0)
    assert out != out
    assert lse == pytest.approx(0.6931472)


@pytest.mark.skipif(INTERPRETED, reason="of the reference alone")
def test_merge_in_float64() -> None:
    """The weights of float64 states are computed in float64."""
    lse_a, lse_b = (torch.randn(3, 2) * 3 for _ in range(2))
    a, b = (torch.randn(3, 2, 8, dtype=torch.float64) for _ in range(2))
    out, lse = torch.empty_like(a), torch.empty(3, 2)
    BACKEND_OPS["reference"].merge_attn_states(a, lse_a, b, lse_b, out, lse)
    weights = torch.softmax(torch.stack([lse_a, lse_b]).double(), dim=0)[..., None]
    torch.testing.assert_close(out, weights[0] * a + weights[1] * b, rtol=1e-14, atol=1e-14)
