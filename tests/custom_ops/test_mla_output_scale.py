"""Latent attention that writes e4m3: what is rounded, what is refused, and who takes it; on a CPU."""

from typing import Any

import pytest
import torch
from op_inputs.latent import latent_tensors, make_latent_batch, run_mla_attention, selected
from torch import Tensor

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import shape
from torchpaged.testing import BATCH_SPECS

E4M3 = torch.float8_e4m3fn
CPU, REFERENCE = BACKEND_OPS["cpu"], BACKEND_OPS["reference"]


def run(ops: Any, batch: Any, scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    """``out``, which starts as NaN, and ``lse``."""
    sizes = *batch.q.shape[:2], batch.v_cache.shape[-1]
    out, lse = torch.full(sizes, float("nan")).to(E4M3), torch.full(sizes[:2], float("nan"))
    options |= {"max_query_len": batch.max_query_len, "scale": batch.scale}
    ops.mla_attention(*latent_tensors(batch), out, lse, output_scale=torch.tensor([scale]), **options)
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("spec", ["decode_edges", "mixed_padded", "left_padded"])
def test_the_result_over_the_scale(spec: str, backend: str, dtype: torch.dtype) -> None:
    """Rounded to e4m3, saturated where the scale is too small; rows that see nothing are zeros."""
    batch = make_latent_batch(BATCH_SPECS[spec], rank=24, rope=8, block_size=4, dtype=dtype)
    for options in ({}, {"indices": selected(batch, "some")}):
        want, want_lse = run_mla_attention(BACKEND_OPS[backend], batch, **options)
        for scale in (0.03, 1e-3):
            out, lse = run(BACKEND_OPS[backend], batch, scale, **options)
            assert torch.equal(lse, want_lse)
            exact = (want / torch.tensor(scale, dtype=dtype)).clamp(-448, 448)
            assert torch.equal(out.float(), exact.to(E4M3).float())
        assert float(out.float().abs().max()) == 448


def test_what_is_refused() -> None:
    batch = make_latent_batch(BATCH_SPECS["mixed_small"], rank=16, rope=8)
    sizes = *batch.q.shape[:2], 16
    for name, dtype, scale in (
        ("out", torch.float32, torch.ones(1)),
        ("out", E4M3, None),
        ("out", torch.float8_e5m2, torch.ones(1)),
        ("output_scale", E4M3, torch.ones(4)),
        ("output_scale", E4M3, torch.ones(1, dtype=torch.float64)),
        ("output_scale", E4M3, torch.tensor([0.0])),
        ("output_scale", E4M3, torch.tensor([float("inf")])),
    ):
        out = torch.zeros(sizes).to(dtype)
        for ops in (REFERENCE, CPU):
            with pytest.raises(ArgumentError, match=f"^{name}: expected"):
                ops.mla_attention(
                    *latent_tensors(batch),
                    out,
                    max_query_len=batch.max_query_len,
                    scale=0.1,
                    output_scale=scale,
                )
        assert not out.float().any()


def test_in_a_trace() -> None:
    batch = make_latent_batch(BATCH_SPECS["decode_one"], rank=16, rope=8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = batch.q.new_empty(*batch.q.shape[:2], 16, dtype=dtype)
        CPU.mla_attention(*latent_tensors(batch), out, max_query_len=1, scale=0.1, output_scale=scale)
        return out

    out = step(torch.tensor(0.05), E4M3)
    assert out.float().any()
    with pytest.raises(Exception, match="out: expected torch.float8_e4m3fn"):
        step(torch.tensor(0.05), torch.float32)
    with pytest.raises(Exception, match="out: expected torch.float32"):
        step(None, E4M3)


def test_the_hopper_kernel_leaves_it_to_triton() -> None:
    batch = make_latent_batch(BATCH_SPECS["decode_one"], rank=512, rope=64, dtype=torch.bfloat16)
    out = torch.zeros(*batch.q.shape[:2], 512).to(E4M3)
    metadata = batch.block_table, batch.seq_lens, batch.query_start_loc
    call = LatentCall(batch.q, batch.k_cache, *metadata, out, None, 1, 0.1, output_scale=torch.ones(1))
    assert (shape.why_not(call, (9, 0)) or "").startswith("output_scale")
