"""Attention that writes e4m3 over an ``output_scale``, on a GPU: the oracle, routes, strides, graphs."""

from typing import Any

import pytest
import torch
from captured import captured
from gpus import needs_fp8, needs_hopper
from op_inputs.output_scale import CHUNKS, E4M3, LONG, ONE_PROMPT, assert_e4m3, opcheck_e4m3, run_e4m3

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda.paged_attention import route
from torchpaged.prefixes import PrefixGroup, SharedPrefixes, cascade_attention
from torchpaged.testing import BATCH_SPECS, BatchSpec, make_batch

pytestmark = [pytest.mark.gpu, needs_fp8]
BACKENDS = ("triton", "cuda")
SPECS = {spec.name: spec for spec in (LONG, CHUNKS, ONE_PROMPT, *BATCH_SPECS.values())}
HEADS: dict[str, dict[str, Any]] = {
    "32/8/128": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "9/3/64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "8/1/256": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256},
    "5/5/80": {"num_heads": 5, "num_kv_heads": 5, "head_dim": 80},
    "12/4/96": {"num_heads": 12, "num_kv_heads": 4, "head_dim": 96},
    "16/4/192-128": {"num_heads": 16, "num_kv_heads": 4, "head_dim": 192, "head_dim_v": 128},
    "7/1/20": {"num_heads": 7, "num_kv_heads": 1, "head_dim": 20, "head_dim_v": 12},
}


def kernel_of(batch: Any, out: torch.Tensor) -> str:
    """By which kernels backend ``cuda`` serves a batch."""
    scale = torch.ones(1, device="cuda")
    call = AttentionCall(*batch.tensors, out, None, batch.max_query_len, batch.scale, output_scale=scale)
    call = call.for_launch()
    return route(call, Specialisation.of(call)).kernel


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("spec", ["long", "chunks", "one_prompt", "speculative", "mixed_padded"])
def test_matches_the_oracle(spec: str, heads: str, backend: str) -> None:
    """In both 16-bit dtypes; saturated in one of the calls."""
    for dtype, scale in ((torch.bfloat16, 0.01), (torch.float16, 1e-4)):
        batch = make_batch(SPECS[spec], dtype=dtype, device="cuda", **HEADS[heads])
        out, lse = run_e4m3(BACKEND_OPS[backend], batch, scale)
        assert_e4m3(out, lse, batch, scale)
    assert float(out.float().abs().max()) == 448


def test_float32_by_triton() -> None:
    for spec in (LONG, CHUNKS):
        batch = make_batch(spec, device="cuda")
        assert_e4m3(*run_e4m3(BACKEND_OPS["triton"], batch, 0.01), batch, 0.01)


@needs_hopper
def test_which_kernels_run() -> None:
    """Those of CUDA C++; Triton's where four numbers of a row, or of prompts 16, do not begin aligned."""
    for spec, padding, kernel in (
        (LONG, (0, 0, 0), "decode"),
        (LONG, (4, 4, 4), "decode"),
        (LONG, (0, 0, 2), "triton"),
        (LONG, (0, 1, 0), "triton"),
        (SPECS["mixed_padded"], (0, 0, 0), "prefill and decode"),
        (SPECS["mixed_padded"], (16, 16, 16), "prefill and decode"),
        (CHUNKS, (0, 0, 0), "prefill"),  # 50 query tokens a request
        (CHUNKS, (4, 4, 4), "triton"),
        (ONE_PROMPT, (0, 0, 0), "prefill"),
    ):
        batch = make_batch(spec, dtype=torch.bfloat16, device="cuda", **HEADS["32/8/128"])
        out, lse = run_e4m3(BACKEND_OPS["cuda"], batch, 0.01, padding)
        assert kernel_of(batch, out) == kernel
        assert_e4m3(out, lse, batch, 0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("padding", [(4, 4, 4), (5, 1, 3), (16, 16, 16)], ids=str)
def test_nothing_is_written_between_rows(padding: tuple[int, int, int], backend: str) -> None:
    for spec in (LONG, CHUNKS, ONE_PROMPT):
        batch = make_batch(spec, dtype=torch.bfloat16, device="cuda", **HEADS["32/8/128"])
        out, _ = run_e4m3(BACKEND_OPS[backend], batch, 0.01, padding)
        memory = torch.empty(0, dtype=torch.uint8, device="cuda").set_(out.untyped_storage())
        assert int((memory == 0x7F).sum()) == memory.numel() - out.numel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_that_are_not_finite(backend: str) -> None:
    """NaN stays NaN, inf is the largest number; a tiny scale makes no NaN of zeros."""
    for spec in (LONG, CHUNKS):
        batch = make_batch(spec, dtype=torch.bfloat16, device="cuda", **HEADS["32/8/128"])
        batch.v_cache[int(batch.block_table[0, 0]), 0, 0, :2] = torch.tensor([float("nan"), float("inf")])
        batch.v_cache[..., 2:] = batch.v_cache[..., 2:].nan_to_num() * 0
        out, _ = run_e4m3(BACKEND_OPS[backend], batch, 1e-40)
        first = out[: int(batch.query_start_loc[1]), :4].float()
        assert first[..., 0].isnan().all()
        assert (first[..., 1] == 448).all()
        assert not out[..., 2:].float().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_capture_serves_other_lengths_and_scales(backend: str) -> None:
    longest = BatchSpec("longest", (1500, 1500, 1500), (1, 1, 1))
    batch = make_batch(longest, dtype=torch.bfloat16, device="cuda", **HEADS["32/8/128"])
    scale = torch.full((1,), 0.01, device="cuda")
    out, lse = torch.empty(batch.q.shape, device="cuda").to(E4M3), torch.empty(3, 32, device="cuda")
    tensors, named = batch.arguments(out, lse)

    def attend() -> None:
        BACKEND_OPS[backend].paged_attention(*tensors, **named, output_scale=scale)

    graph, _ = captured(attend)
    for seq_lens, number in (((1500, 3, 700), 0.01), ((0, 129, 1), 0.1), ((1, 1, 0), 1e-3)):
        batch.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        scale.fill_(number)
        out.view(torch.uint8).fill_(0x7F)
        graph.replay()
        assert_e4m3(out, lse, batch, number)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefixes_read_once(backend: str) -> None:
    """Both passes are merged before they are rounded; the same as plain attention but for that."""
    torch.manual_seed(0)
    tables = [[1, 2, 3, 4, 10 + row] for row in range(6)]
    lens, block = [70 + row for row in range(6)], 16
    pools = [torch.randn(20, block, 8, 128, device="cuda").bfloat16() for _ in range(2)]
    q = torch.randn(6, 32, 128, device="cuda").bfloat16()
    table, seq_lens, starts = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in (tables, lens, list(range(7)))
    )
    prefixes = SharedPrefixes.allocate(
        max_num_groups=2, num_reqs=6, num_tokens=6, max_blocks_per_req=5, block_size=block, device="cuda"
    )
    prefixes.set([PrefixGroup(tuple(range(6)), 4)], tables, [1] * 6, lens)
    common: dict[str, Any] = {"max_query_len": 1, "return_lse": True, "ops": BACKEND_OPS[backend]}
    scaled = {**common, "output_scale": torch.tensor(0.01, device="cuda")}
    tensors = (q, *pools, table, seq_lens, starts)
    want, want_lse = torchpaged.paged_attention(*tensors, **common)
    out, lse = cascade_attention(*tensors, prefixes, **scaled)
    assert out.dtype == E4M3
    error = (out.float() * 0.01 - want.float().clamp(-4.48, 4.48)).abs()
    assert (error <= want.float().abs() / 14 + 5e-3).all()
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("overload", ["triton", "cuda", "default"])
def test_opcheck(overload: str) -> None:
    opcheck_e4m3(BACKEND_OPS[overload], "cuda")
