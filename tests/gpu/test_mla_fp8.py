"""Rows of fp8 latents, and e4m3 results, on a GPU: the float64 oracle, bytes, one capture, a model."""

from typing import Any

import pytest
import torch
from gpus import needs_fp8, needs_hopper
from op_inputs.latent import (
    as_fp8,
    assert_latent_close,
    assert_sparse_close,
    latent_tensors,
    make_latent_batch,
    run_mla_attention,
    selected,
)

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import shape
from torchpaged.custom_ops.mla.cuda.mla_attention import route
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE
from torchpaged.testing import BATCH_SPECS, BatchSpec

pytestmark = [pytest.mark.gpu, needs_fp8]
TRITON, REFERENCE, CUDA = (BACKEND_OPS[name] for name in ("triton", "reference", "cuda"))
LONG = BatchSpec("long", (2000, 3, 700, 0), (1, 1, 1, 1), padded_tokens=1)
CHUNKS = BatchSpec("chunks", (600, 90, 3, 41), (200, 1, 3, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "rank", "rope"), [(128, 512, 64), (16, 512, 64), (32, 512, 64), (40, 256, 32), (3, 52, 6)]
)
def test_matches_the_oracle(heads: int, rank: int, rope: int, dtype: torch.dtype) -> None:
    """Long contexts in parts, prompts, and selected keys."""
    for spec in (LONG, CHUNKS):
        sizes: dict[str, Any] = {"num_heads": heads, "rank": rank, "rope": rope, "block_size": 64}
        batch = as_fp8(make_latent_batch(spec, dtype=dtype, device="cuda", **sizes))
        assert_latent_close(*run_mla_attention(CUDA, batch), batch)
        indices = selected(batch, "beyond", 300)
        assert_sparse_close(*run_mla_attention(TRITON, batch, indices=indices), batch, indices)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("heads", [1, 5, 16, 20, 32, 100])
def test_short_queries_on_hopper(heads: int, block_size: int, dtype: torch.dtype) -> None:
    """By the kernels in CUDA C++ but many rows of float16, the same bits twice."""
    edges = BatchSpec("edges of tiles", (63, 64, 65, 127, 128, 129), (1,) * 6)
    ranges = BatchSpec("ranges, not clusters", (9000, 3, 700, 0, *edges.seq_lens, -1), (1,) * 11)
    drafts = BatchSpec("drafts in ranges", (17000, 70, 1, 2, 0), (2, 2, 1, 2, 1), padded_tokens=1)
    for number, spec in enumerate(
        (LONG, edges, ranges, drafts, BATCH_SPECS["speculative"], BATCH_SPECS["left_padded_chunk"])
    ):
        rows = max(spec.query_lens) * heads
        if rows > shape.MAX_ROWS:
            continue
        sizes: dict[str, Any] = {"num_heads": heads, "rank": 512, "rope": 64, "block_size": block_size}
        batch = as_fp8(make_latent_batch(spec, dtype=dtype, device="cuda", seed=number, **sizes))
        out, lse = run_mla_attention(CUDA, batch, causal=number % 2 == 0)
        call = LatentCall(*latent_tensors(batch), out, lse, batch.max_query_len, batch.scale)
        assert (route(call) is None) == (dtype == torch.bfloat16 or rows <= shape.MAX_FP8_HALF_ROWS)
        assert_latent_close(out, lse, batch, causal=number % 2 == 0)
        again = run_mla_attention(CUDA, batch, causal=number % 2 == 0)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bytes_are_the_references(dtype: torch.dtype) -> None:
    kv_c, k_pe = (torch.randn(300, n, device="cuda").to(dtype) for n in (512, 64))
    kv_c[7], kv_c[8, :128] = 0.0, 1e-7
    slots = torch.randperm(320, device="cuda")[:300]
    slots[5] = -1
    pool, want = (torch.zeros(5, 64, 1, 656, dtype=torch.uint8, device="cuda") for _ in range(2))
    TRITON.write_latent(kv_c, k_pe, pool.view(ROW_DTYPE), slots)
    REFERENCE.write_latent(kv_c, k_pe, want.view(ROW_DTYPE), slots)
    assert torch.equal(pool, want)
    assert pool.any()


@pytest.mark.parametrize("fp8", [False, True])
def test_output_scale(fp8: bool) -> None:
    """Within half a step of e4m3 of what is written without."""
    batch = make_latent_batch(
        LONG, num_heads=16, rank=512, rope=64, dtype=torch.float16, device="cuda", block_size=64
    )
    batch, scale = as_fp8(batch) if fp8 else batch, torch.tensor(0.02, device="cuda")
    for options in ({}, {"indices": selected(batch, "some", 300)}):
        want, _ = run_mla_attention(TRITON, batch, **options)  # the Hopper kernel rounds otherwise
        for ops in (TRITON, CUDA):
            out = torch.full(want.shape, float("nan"), device="cuda").to(torch.float8_e4m3fn)
            ops.mla_attention(
                *latent_tensors(batch),
                out,
                max_query_len=batch.max_query_len,
                scale=batch.scale,
                output_scale=scale,
                **options,
            )
            error = (out.float() * scale - want.float()).abs()
            assert (error <= want.float().abs() / 15 + 0.02 * 2**-9).all()


@pytest.mark.parametrize("model_type", ["youtu", "deepseek_v32"])
def test_a_compiled_model_says_what_an_eager_one_says(model_type: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from model_coverage.architectures import model_of
    from model_coverage.checks import prompts

    from torchpaged.hf import PagedCache, attach

    model = attach(model_of(model_type, "eager").to("cuda"))
    inputs = {name: tensor.to("cuda") for name, tensor in prompts().items()}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for eager in (True, False):
        cache = PagedCache(model.config, 2, 64, kv_dtype="fp8_e4m3")
        found.append(model.generate(**inputs, **options, past_key_values=cache, disable_compile=eager))
        assert cache.choice.name == "cuda"
    assert torch.equal(*found)
