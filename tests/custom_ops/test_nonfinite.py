"""NaN and inf by one rule in every backend (docs/ops.md): a query that sees one gives NaN, no other does."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels import INTERPRETED, Kernels, Values, over
from nonfinite import INF, NAN, assert_as_expected, poke, random_batch

from torchpaged.backends import get_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import ATTENTION_VARIANTS, Batch, BatchSpec, make_batch, run_paged_attention

#: name -> lengths; request 1 of each is poked at a position that some of its queries see, some don't, or all.
SPECS = {
    "cpu": {
        "decode": BatchSpec("decode", (40, 37, 3), (1, 1, 1)),
        "speculative": BatchSpec("speculative", (40, 37, 3), (4, 4, 3)),
        "prefill": BatchSpec("prefill", (30, 37, 5), (30, 37, 5)),
        "chunked": BatchSpec("chunked", (30, 37, 5), (12, 20, 1), padded_tokens=2),
    },
    "cuda": {
        "decode": BatchSpec("decode", (400, 370, 3, 0), (1, 1, 1, 1)),
        "long_decode": BatchSpec("long_decode", (5, 9000), (1, 1)),  # parts that are merged
        "speculative": BatchSpec("speculative", (40, 370, 3), (4, 4, 3)),
        "prefill": BatchSpec("prefill", (30, 370, 5), (30, 370, 5), padded_tokens=2),
        # no room for short queries
        "padded_prefill": BatchSpec(
            "padded_prefill", (30, 370, 5), (30, 370, 5), padded_tokens=3 * 370 - 405
        ),
        "mixed": BatchSpec("mixed", (200, 370, 90), (1, 200, 1)),
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 8},
    "cuda": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16},
}
#: What the interpreter, which is slow, runs of these: one spec per kernel.
SPEC = Values(SPECS["cpu"], ("decode", "prefill"), SPECS["cuda"])
POKES = [f"{what}={value}" for what in "qkv" for value in (NAN, INF, -INF)]
CASES = [f"{variant}-{bad}" for variant in ATTENTION_VARIANTS for bad in POKES]
#: Likewise: one variant per kind of mask.
FEW = ["causal-q=nan", "causal-k=nan", "causal-k=inf", "causal-v=nan", "window_both-k=nan"]
FEW += ["window_both-v=nan", "soft_cap-k=nan", "soft_cap-k=inf", "soft_cap-v=nan"]
all_kernels = {"gpu": ("triton", "cuda")}


def made(on: Kernels, spec: str, **options: Any) -> Batch:
    """On the host."""
    return make_batch(SPECS[on.device][spec], **{**SHAPES[on.device], **options})


def attend(on: Kernels, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    there = batch.to(on.device)
    if on.device == "cuda":
        count = batch.block_table.shape[0] * batch.k_cache.shape[2]
        there.extras["semaphore"] = torch.zeros(count, dtype=torch.int32, device="cuda")
    got = run_paged_attention(on.ops, there, **options)
    assert on.device == "cpu" or not there.extras["semaphore"].any()
    return got


def check(on: Kernels, batch: Batch, **options: Any) -> None:
    assert_as_expected(
        attend(on, batch, **options), batch, exact=on.backend in ("reference", "cpu"), **options
    )


@pytest.mark.slow_cases("triton-cpu-prefill-*", but=("triton-cpu-prefill-causal-*",))
@over("reference", "cpu", "triton", **all_kernels, spec=SPEC, case=Values(CASES, FEW, CASES))
def test_one_bad_number(on: Kernels, spec: str, case: str) -> None:
    variant, what, value = case.replace("=", "-", 1).split("-", 2)
    length, queries = SPECS[on.device][spec].seq_lens[1], SPECS[on.device][spec].query_lens[1]
    middle = () if INTERPRETED else (length // 2, length - 3)[: 2 if on.device == "cuda" else 1]
    for position in (length - 1, *middle, 2):
        if what != "q" or position >= length - queries:
            more = (
                {"sinks": variant == "window", "alibi": variant == "soft_cap"} if on.device == "cuda" else {}
            )
            batch = made(on, spec, **more)
            poke(batch, what, float(value), 1, position, 1, 5)
            check(on, batch, **ATTENTION_VARIANTS[variant])


DTYPE = Values(*[(torch.float32, torch.bfloat16, torch.float16)[:n] for n in (3, 2, 3)])


@pytest.mark.slow_cases("triton-cpu-decode-torch.bfloat16", "triton-cpu-prefill-torch.float32")
@over("reference", "cpu", "triton", **all_kernels, spec=SPEC, dtype=DTYPE)
def test_scores_that_are_all_infinite(on: Kernels, spec: str, dtype: torch.dtype) -> None:
    """Every key a head sees scores +inf, or -inf: the softmax of neither exists, so NaN, whatever the first
    tile holds. And of keys that fill the first tiles alone."""
    length = SPECS[on.device][spec].seq_lens[1]
    for value, many in ((INF, 1.0), (-INF, 1.0), (INF, 0.6), (-INF, 0.6))[: 4 if on.device == "cuda" else 2]:
        batch = made(on, spec, dtype=dtype)
        batch.q.abs_().clamp_min_(0.01)
        for position in range(int(length * many)):
            poke(batch, "k", value, 1, position, 1, 3)
        check(on, batch)


@over(gpu=("cuda",), spec=("padded_prefill", "prefill", "mixed"))
def test_the_cuda_prefill_kernel_is_among_them(on: Kernels, spec: str) -> None:
    from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
    from torchpaged.custom_ops.attention.cuda.paged_attention import route

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is written for compute capability 9.0")
    b = made(on, spec).to("cuda")
    lengths = (b.block_table, b.seq_lens, b.query_start_loc)
    tensors = (b.q, b.k_cache, b.v_cache, *lengths, torch.empty_like(b.q), None)
    call = AttentionCall(*tensors, b.max_query_len, b.scale)
    want = "prefill" if spec == "padded_prefill" else "prefill and decode"
    assert route(call, Specialisation.of(call)).kernel == want


@over(**all_kernels, what="qkv")
def test_fp8_pools(on: Kernels, what: str) -> None:
    """Queries are scaled into fp16's range for them: an infinite one must stay infinite, a NaN one NaN."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    for value in (NAN, INF, -INF):
        for dtype in (torch.float8_e5m2, torch.float8_e4m3fn):
            if value == value and what != "q" and dtype == torch.float8_e4m3fn:
                continue  # it has no inf
            for spec in ("decode", "prefill"):
                batch = made(on, spec)
                pools = {name: getattr(batch, name).nan_to_num(0.0) for name in ("k_cache", "v_cache")}
                wide = replace(batch, **pools)
                poke(wide, what, value, 1, 369, 1, 5)
                check(on, replace(wide, k_cache=wide.k_cache.to(dtype), v_cache=wide.v_cache.to(dtype)))


@over(**all_kernels, share=range(10))
def test_random_batches(on: Kernels, share: int) -> None:
    """test_fuzz.py runs them on a CPU."""
    for seed in range(share * 20, share * 20 + 20):
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        batch, options = random_batch(random.Random(seed), dtypes=dtypes, small=True)
        try:
            check(on, batch, **options)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {batch.spec}, {options}, {batch.q.dtype}: {error}") from error


@pytest.mark.skipif(INTERPRETED, reason="not a kernel of Triton's")
@pytest.mark.parametrize("spec", SPECS["cpu"])
@pytest.mark.parametrize("what", ["q", "k", "v"])
def test_a_bad_number_in_torch_sdpa(spec: str, what: str) -> None:
    for value in (NAN, INF):
        batch = make_batch(SPECS["cpu"][spec], **SHAPES["cpu"])
        poke(batch, what, value, 1, 36, 1, 5)
        got = run_paged_attention(get_backend("torch_sdpa").ops, batch)
        assert_as_expected(got, batch, exact=False)


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(INTERPRETED, reason="of the cpu backend alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bad", POKES)
def test_one_bad_number_among_many_rows(bad: str, dtype: torch.dtype) -> None:
    """Enough for the CPU's products of matrices, which take numbers apart; others see what is before it."""
    for options in ({}, {"window_left": 5}):
        batch = make_batch(
            BatchSpec("many", (70, 300, 5), (1, 2, 1)), head_dim=16, num_heads=64, num_kv_heads=1, dtype=dtype
        )
        poke(batch, bad[0], float(bad[2:]), 1, 299, 0, 5)
        results = run_paged_attention(BACKEND_OPS["cpu"], batch, **options)
        assert_as_expected(results, batch, exact=True, **options)


@pytest.mark.parametrize("spec", ["decode", "prefill"])
@over("reference", "cpu", "triton")
def test_a_first_tile_of_minus_inf_is_outweighed(on: Kernels, spec: str) -> None:
    """Keys that score -inf weigh nothing beside others, though they fill the tiles that come first."""
    long = BatchSpec("long", (300, 150), (1, 1) if spec == "decode" else (120, 40))
    batch = make_batch(long, head_dim=16, num_heads=2, num_kv_heads=1)
    batch.q.abs_()
    for position in range(140):
        poke(batch, "k", -INF, 0, position, 0, 3)
    check(on, batch)


@over("reference", "cpu", "triton", **all_kernels, value=(NAN, INF, -INF))
def test_a_bad_sink_belongs_to_its_head(on: Kernels, value: float) -> None:
    batch = made(on, "chunked" if on.device == "cpu" else "mixed", sinks=True)
    batch.extras["sinks"][2] = value
    check(on, batch)


HEADS = {"narrow": (4, 2), "wide": (32, 1)}
BLIND: dict[str, dict[str, Any]] = {
    "window": {"window_left": 5},
    "chunks": {"chunk_size": 8},
    "both ways": {"causal": False, "window_left": 3, "window_right": 2},
}


@pytest.mark.slow_cases(
    "triton-cpu-*",
    but=(
        "triton-cpu-decode-narrow-both ways",
        "triton-cpu-decode-wide-chunks",
        "triton-cpu-prefill-narrow-window",
    ),
)
@over("reference", "cpu", "triton", **all_kernels, spec=SPEC, heads=HEADS, hidden=BLIND)
def test_blocks_that_no_query_sees_never_matter(on: Kernels, spec: str, heads: str, hidden: str) -> None:
    """All NaN in front of every query's interval: the answer is that of the clean pool, bit for bit."""
    if INTERPRETED and spec == "prefill" and heads == "wide":
        pytest.skip("the interpreter is slow")
    further = {"window_left": 50, "chunk_size": 64} if on.device == "cuda" else {}
    options = {name: further.get(name, value) for name, value in BLIND[hidden].items()}
    for dtype in (torch.float32, torch.bfloat16):
        shape = dict(zip(("num_heads", "num_kv_heads"), HEADS[heads], strict=True))
        batch = made(on, spec, dtype=dtype, **shape)
        clean, size = attend(on, batch, **options), batch.k_cache.shape[1]
        for request, (length, queries) in enumerate(
            zip(batch.spec.seq_lens, batch.spec.query_lens, strict=True)
        ):
            first, chunk = length - queries, options.get("chunk_size")
            for position in range(
                first // chunk * chunk if chunk else max(0, first - options["window_left"])
            ):
                block = int(batch.block_table[request, position // size])
                batch.k_cache[block, position % size] = batch.v_cache[block, position % size] = NAN
        got = attend(on, batch, **options)
        assert torch.equal(got[0], clean[0])
        assert torch.equal(got[1], clean[1])


@pytest.mark.parametrize("variant", ["causal", "bidirectional", "window_both", "soft_cap"])
@over("reference", "cpu", "triton")
def test_positions_below_zero_see_nothing(on: Kernels, variant: str) -> None:
    """Left padding: zeros and -inf, without causality too; the request's other queries see what they would
    see without it."""
    options, spec = ATTENTION_VARIANTS[variant], BatchSpec("padded", (3, 6, -2, 0), (6, 9, 4, 2))
    batch = make_batch(spec, head_dim=16, block_size=8, sinks=variant == "bidirectional")
    out, lse = attend(on, batch, **options)
    blind = [*range(3), *range(6, 9), *range(15, 21)]
    assert not bool(out[blind].any())
    assert bool((lse[blind] == -INF).all())
    assert bool(lse.isfinite()[[i for i in range(21) if i not in blind]].all())
    assert_as_expected((out, lse), batch, exact=True, **options)


def merge(on: Kernels, a: float, b: float, out_a: float = 1.0, out_b: float = 3.0) -> tuple[float, float]:
    """Merge two states of one row and one head."""
    with torch.device(on.device):
        state = [torch.full((1, 1, 8), x) for x in (out_a, out_b)]
        lse = [torch.full((1, 1), x) for x in (a, b)]
        out, merged = torch.full((1, 1, 8), 9.0), torch.full((1, 1), 9.0)
    on.ops.merge_attn_states(state[0], lse[0], state[1], lse[1], out, merged)
    assert bool((out == out[0, 0, 0]).all()) or bool(out.isnan().all())
    return float(out[0, 0, 0]), float(merged)


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("other", [0.5, -INF, INF, NAN])
@over("reference", "cpu", "triton")
def test_merging_a_bad_state_gives_nan(on: Kernels, bad: float, other: float) -> None:
    for a, b in ((bad, other), (other, bad)):
        out, lse = merge(on, a, b)
        assert out != out, (a, b, out, lse)
        assert lse != lse, (a, b, out, lse)


@over("reference", "cpu", "triton")
def test_merging_a_side_that_saw_nothing(on: Kernels) -> None:
    """LSE -inf: what the side's out holds is of no account."""
    for rubbish in (NAN, INF, 7.0):
        assert merge(on, 0.5, -INF, 1.0, rubbish) == (1.0, 0.5)
        assert merge(on, -INF, 0.5, rubbish, 3.0) == (3.0, 0.5)
        assert merge(on, -INF, -INF, rubbish, rubbish) == (0.0, -INF)
    out, lse = merge(on, 0.0, 0.0, NAN, 3.0)
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
