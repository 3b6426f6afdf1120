"""Latent attention's ops: the oracle, the rows that are written, what is refused, and the trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import Kernels, Values, over
from op_inputs.latent import assert_latent_close, make_latent_batch, run_mla_attention
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE
from torchpaged.testing import BATCH_SPECS

CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPE = Values(FLOATS[:1], FLOATS[:1], FLOATS)


@pytest.mark.slow_cases("triton-cpu-*", but=("triton-cpu-mixed_*-True-*", "triton-cpu-decode_*-True-*"))
@over("cpu", "reference", "default", "triton", spec=BATCH_SPECS, causal=(True, False), dtype=DTYPE)
def test_matches_the_oracle(on: Kernels, spec: str, causal: bool, dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {"rank": 24, "rope": 8, "block_size": 4}
    if on.backend == "triton":
        sizes = {"num_heads": 3, "rank": 16, "rope": 8, "block_size": 4}
    if on.device == "cuda":
        sizes = {"num_heads": 5, "rank": 64, "rope": 16}
    batch = make_latent_batch(BATCH_SPECS[spec], dtype=dtype, device=on.device, **sizes)
    assert_latent_close(*run_mla_attention(on.ops, batch, causal=causal), batch, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_deepseeks_width(dtype: torch.dtype) -> None:
    batch = make_latent_batch(BATCH_SPECS["mixed_small"], num_heads=16, rank=512, rope=64, dtype=dtype)
    assert_latent_close(*run_mla_attention(CPU, batch), batch)


def test_more_heads_than_the_native_kernel_takes_at_once() -> None:
    for num_heads in (65, 129):
        batch = make_latent_batch(BATCH_SPECS["mixed_small"], num_heads=num_heads, rank=24, rope=8)
        assert_latent_close(*run_mla_attention(CPU, batch), batch)


@over("cpu", "reference", "triton")
def test_a_row_is_a_latent_and_its_key(on: Kernels) -> None:
    rank, rope = (512, 64) if on.device == "cuda" else (16, 8)
    pool = torch.full((4, 4, 1, rank + rope), 7.0, device=on.device)
    kv_c, k_pe = (torch.randn(3, width, device=on.device) for width in (rank, rope))
    on.ops.write_latent(kv_c, k_pe, pool, torch.tensor([14, -1, 5], device=on.device))
    assert torch.equal(pool[3, 2, 0], torch.cat((kv_c[0], k_pe[0])))
    assert torch.equal(pool[1, 1, 0], torch.cat((kv_c[2], k_pe[2])))
    assert int((pool != 7.0).any(-1).sum()) == 2


def arguments() -> dict[str, Any]:
    batch = make_latent_batch(BATCH_SPECS["mixed_small"], rank=16, rope=8, block_size=4)
    out = torch.zeros(*batch.q.shape[:2], 16)
    return {
        "q": batch.q,
        "kv_cache": batch.k_cache,
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "query_start_loc": batch.query_start_loc,
        "out": out,
        "lse": torch.zeros(out.shape[:2]),
        "max_query_len": batch.max_query_len,
        "scale": 0.1,
    }


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "two_heads_in_the_pool": ("kv_cache", lambda a: {"kv_cache": torch.zeros(4, 4, 2, 24)}),
    "an_fp8_pool": ("kv_cache", lambda a: {"kv_cache": a["kv_cache"].to(torch.float8_e4m3fn)}),
    "a_query_of_the_rank_alone": ("q", lambda a: {"q": a["q"][..., :16].contiguous()}),
    "another_dtype": ("q", lambda a: {"q": a["q"].half()}),
    "no_heads": ("q", lambda a: {"q": a["q"][:, :0], "out": a["out"][:, :0], "lse": None}),
    "as_wide_as_the_pool": ("out", lambda a: {"out": torch.zeros_like(a["q"])}),
    "out_of_another_dtype": ("out", lambda a: {"out": a["out"].half()}),
    "out_in_the_pool": (
        "kv_cache",
        lambda a: {"out": a["kv_cache"].view(-1, 24)[: 7 * 4, :16].view(7, 4, 16)},
    ),
    "lse_of_another_dtype": ("lse", lambda a: {"lse": a["lse"].double()}),
    "lse_of_another_shape": ("lse", lambda a: {"lse": a["lse"][:1]}),
    "a_table_of_int64": ("block_table", lambda a: {"block_table": a["block_table"].long()}),
    "lengths_of_fewer_rows": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"][:1]}),
    "a_length_past_the_table": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"] + 4000}),
    "a_block_that_is_none": ("block_table", lambda a: {"block_table": a["block_table"] * 0 - 1}),
    "a_block_twice": (
        "block_table",
        lambda a: {"block_table": a["block_table"][:, :1].expand_as(a["block_table"])},
    ),
    "lse_in_the_result": ("out", lambda a: {"lse": a["out"].view(-1)[:28].view(7, 4)}),
    "no_dimension_for_heads": ("q", lambda a: {"q": a["q"][:, 0]}),
    "a_result_without_heads": ("out", lambda a: {"out": a["out"][:, 0]}),
    "no_maximum": ("max_query_len", lambda a: {"max_query_len": 0}),
    "too_small_a_maximum": ("max_query_len", lambda a: {"max_query_len": 2}),
    "no_scale": ("scale", lambda a: {"scale": 0.0}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    name, change = BAD[case]
    given = arguments()
    given |= change(given)
    before = given["out"].nan_to_num_().clone()
    for ops in (REFERENCE, CPU):
        with pytest.raises(ArgumentError, match=f"^{name}: expected") as refused:
            ops.mla_attention(**given)
        assert refused.value.__context__ is None  # nothing of paged_attention's arguments
    assert torch.equal(given["out"], before)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kv_c, k_pe", {"k_pe": torch.zeros(2, 7)}),
        ("kv_c", {"kv_c": torch.zeros(3, 16)}),
        ("k_pe", {"k_pe": torch.zeros(2, 8).half()}),
        ("kv_c", {"kv_c": torch.ones(2)}),
        ("kv_cache", {"kv_cache": torch.zeros(3, 4, 2, 24)}),
        ("slot_mapping", {"slot_mapping": torch.tensor([4, 99])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([4, 4])}),
        ("slot_mapping", {"slot_mapping": torch.tensor([4, 5], dtype=torch.int32)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_written(name: str, change: dict[str, Tensor]) -> None:
    given = {
        "kv_c": torch.ones(2, 16),
        "k_pe": torch.ones(2, 8),
        "kv_cache": torch.zeros(3, 4, 1, 24),
        "slot_mapping": torch.tensor([4, 5]),
    }
    for ops in (REFERENCE, CPU):
        with pytest.raises(ArgumentError, match=f"^{name}: expected") as refused:
            ops.write_latent(**given | change)
        assert refused.value.__context__ is None  # nothing of write_kv's arguments
    assert not given["kv_cache"].any()


def test_float64_is_the_references() -> None:
    given = {name: x.double() if name in ("q", "kv_cache", "out") else x for name, x in arguments().items()}
    REFERENCE.mla_attention(**given)
    with pytest.raises(ArgumentError, match="^q: expected .*float32"):
        CPU.mla_attention(**given)


@pytest.mark.parametrize(("fp8", "sparse"), [(False, False), (True, False), (False, True)])
def test_one_graph_for_all_sizes(fp8: bool, sparse: bool) -> None:
    """Written and read in one trace, without a copy of the pool, at any number of requests."""
    torch._dynamo.reset()  # another test's model may have made sizes dynamic
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def step(q: Tensor, kv_c: Tensor, k_pe: Tensor, slots: Tensor, pool: Tensor, *batch: Any) -> Tensor:
        CPU.write_latent(kv_c, k_pe, pool, slots)
        out = q.new_empty(*q.shape[:2], kv_c.shape[1])
        CPU.mla_attention(q, pool, *batch[:3], out, max_query_len=1, scale=0.2, indices=batch[3])
        return out

    for rows in (5, 3, 9):  # unlike every other size
        pool, kv_c, k_pe = torch.randn(12, 4, 1, 24), torch.randn(rows, 16), torch.randn(rows, 8)
        if fp8:
            pool = torch.zeros(12, 4, 1, 36, dtype=torch.uint8).view(ROW_DTYPE)
        table = torch.arange(1, rows + 1, dtype=torch.int32)[:, None]
        lens, starts = torch.full((rows,), 3, dtype=torch.int32), torch.arange(rows + 1, dtype=torch.int32)
        slots, q = table[:, 0].long() * 4 + 2, torch.randn(rows, 2, 24)
        indices = torch.randint(-1, 4, (rows, 7), dtype=torch.int32) if sparse else None
        got = step(q, kv_c, k_pe, slots, pool, table, lens, starts, indices)
        if fp8:
            assert pool.view(torch.uint8)[1 : rows + 1, 2].any(-1).all()
        else:
            assert torch.equal(pool[1 : rows + 1, 2, 0], torch.cat((kv_c, k_pe), dim=-1))
        want = torch.empty_like(got)
        options: dict[str, Any] = {"max_query_len": 1, "scale": 0.2, "indices": indices}
        REFERENCE.mla_attention(q, pool, table, lens, starts, want, **options)
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1
    if sparse:
        with pytest.raises(Exception, match="indices: expected"):
            torch.compile(step)(q, kv_c, k_pe, slots, pool, table, lens, starts, indices.long())
        return
    width, refused = 25, "out: expected at most the queries' width"
    if fp8:
        width, refused = 20, "q: expected what fits the pool's width 36"
    with pytest.raises(Exception, match=refused):
        torch.compile(lambda q, out, *rest: CPU.mla_attention(q, *rest, out, max_query_len=1, scale=0.2))(
            q, torch.empty(rows, 2, width), pool, table, lens, starts
        )
