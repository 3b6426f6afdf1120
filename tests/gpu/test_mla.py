"""Latent attention on a GPU at models' sizes: the float64 oracle, one capture for other lengths, a model."""

import logging
from dataclasses import replace

import pytest
import torch
from captured import captured
from gpus import needs_fp8
from op_inputs.latent import as_fp8, assert_latent_close, make_latent_batch, run_mla_attention

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.testing import BatchSpec

pytestmark = pytest.mark.gpu
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONG = BatchSpec("long", (2000, 3, 700, 0), (1, 1, 1, 1), padded_tokens=1)
CHUNKS = BatchSpec("chunks", (600, 90, 3, 41), (200, 1, 3, 40))
#: heads, latent, rotated key
SIZES = {
    "128/512/64": (128, 512, 64),
    "16/512/64": (16, 512, 64),
    "40/256/32": (40, 256, 32),
    "3/50/6": (3, 50, 6),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_models_sizes(sizes: str, dtype: torch.dtype) -> None:
    """Long contexts in parts, and prompts."""
    num_heads, rank, rope = SIZES[sizes]
    for spec in (LONG, CHUNKS):
        batch = make_latent_batch(
            spec, num_heads=num_heads, rank=rank, rope=rope, dtype=dtype, device="cuda", block_size=64
        )
        assert_latent_close(*run_mla_attention(BACKEND_OPS["cuda"], batch), batch)


@pytest.mark.parametrize("keys", [97, 1024])
def test_float32_sums_are_short(keys: int) -> None:
    """16 + sqrt(keys) / 2 roundings of the largest result: one sum over a latent and its rotated key, or over
    all keys, takes more."""
    for seed in range(8):
        batch = make_latent_batch(
            BatchSpec("short sums", (keys, keys // 2), (1, 3)),
            num_heads=16,
            rank=512,
            rope=64,
            dtype=torch.float32,
            device="cuda",
            seed=seed,
        )
        wide = replace(batch, q=batch.q.double(), k_cache=batch.k_cache.double())
        (out, _), (exact, _) = run_mla_attention(TRITON, batch), run_mla_attention(REFERENCE, wide)
        largest = exact.abs().max()
        error = float((out - exact).abs().max() / largest) / torch.finfo(torch.float32).eps
        assert error <= 16 + keys**0.5 / 2


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=needs_fp8)])
def test_one_capture_serves_other_lengths(fp8: bool) -> None:
    """Of a batch at its longest; a row ends, another is padding."""
    longest = BatchSpec("longest", (1500, 1500, 1500), (1, 1, 1))
    batch = make_latent_batch(longest, num_heads=16, rank=512, rope=64, dtype=torch.bfloat16, device="cuda")
    batch.k_cache.nan_to_num_()
    batch = as_fp8(batch) if fp8 else batch
    graph, (out, lse) = captured(lambda: run_mla_attention(TRITON, batch))
    for seq_lens in ((1500, 3, 700), (0, 129, 1), (1, 1, 0)):
        batch.seq_lens.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        graph.replay()
        assert_latent_close(out, lse, batch)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "auto_compiled"])
def test_a_model_attends_over_latents(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from model_coverage.architectures import model_of
    from model_coverage.checks import prompts

    from torchpaged.hf import PagedCache, attach

    model = model_of("youtu", "eager").to("cuda")
    inputs = {name: tensor.to("cuda") for name, tensor in prompts().items()}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(**inputs, **options)
    attach(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # which a reset keeps
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cache = PagedCache(model.config, 2, 64)
            got = model.generate(**inputs, **options, past_key_values=cache, disable_compile=not compiled)
            assert torch.equal(got, want)
    assert cache.paged[0].latent
    assert cache.choice.name == "cuda"
    assert "skipping cudagraphs" not in caplog.text
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
