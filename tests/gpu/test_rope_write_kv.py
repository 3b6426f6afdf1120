"""rope_write_kv on a GPU: the float64 oracle, every batch size, fp8 pools, capture once and replay with other
positions and slots."""

from typing import Any

import pytest
import torch
from op_inputs.rope import ROPE_CASES, assert_rope_close, make_rope_inputs
from torch import Tensor

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS

pytestmark = pytest.mark.gpu
TRITON, REFERENCE = BACKEND_OPS["triton"], BACKEND_OPS["reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = {
    "32/8/128": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "9/3/64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "5/5/80": {"num_heads": 5, "num_kv_heads": 5, "head_dim": 80},
    "8/1/256": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256, "rotary_dim": 64},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE_CASES)
def test_within_the_error_budget(case: str, dtype: torch.dtype) -> None:
    assert_rope_close(TRITON, make_rope_inputs(**ROPE_CASES[case], dtype=dtype, device="cuda"))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 300, 1500])
@pytest.mark.parametrize("heads", HEADS)
def test_batch_sizes_and_heads(heads: str, num_tokens: int, interleaved: bool) -> None:
    """Large batches take more heads per program and more warps."""
    norms = ("q_norm", "k_norm") if num_tokens % 2 == 0 else ()
    inputs = make_rope_inputs(
        **HEADS[heads],
        num_tokens=num_tokens,
        interleaved=interleaved,
        norms=norms,
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert_rope_close(TRITON, inputs)


@pytest.mark.parametrize("scales", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_pools(dtype: torch.dtype, scales: int | None) -> None:
    """Values byte for byte as write_kv stores them; keys at most a rare fp8 step from the reference."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    shape: dict[str, Any] = {
        "num_tokens": 40,
        "head_dim": 64,
        "cache_dtype": dtype,
        "norms": ("k_norm",),
        "dtype": torch.bfloat16,
    }
    options: dict[str, Any] = {}
    if scales:
        options = {"k_scale": torch.linspace(0.5, 2.0, scales), "v_scale": torch.linspace(2.0, 0.25, scales)}
    got, want = make_rope_inputs(**shape, device="cuda"), make_rope_inputs(**shape)
    for inputs in (got, want):
        inputs["v"].mul_(1e5)
    on_gpu = {name: x.cuda() for name, x in options.items()}
    v_cache = got["v_cache"].clone()
    TRITON.write_kv(
        got["k"], got["v"], got["k_cache"].clone(), v_cache, got["slot_mapping"], *on_gpu.values()
    )
    TRITON.rope_write_kv(**got, **on_gpu)
    REFERENCE.rope_write_kv(**want, **options)
    assert torch.equal(got["v_cache"].view(torch.uint8), v_cache.view(torch.uint8))
    assert float(got["v_cache"].float().nan_to_num(0.0).abs().max()) == torch.finfo(dtype).max
    torch.testing.assert_close(
        got["k_cache"].float().cpu(), want["k_cache"].float(), rtol=0.26, atol=1e-2, equal_nan=True
    )
    different = got["k_cache"].view(torch.uint8).cpu() != want["k_cache"].view(torch.uint8)
    assert float(different.float().mean()) < 0.01


def test_one_capture_serves_every_step() -> None:
    """Positions and slots change on the device between replays; no launch synchronises; replays repeat bit
    by bit."""
    shape: dict[str, Any] = {
        "num_tokens": 16,
        "norms": ("q_norm", "k_norm"),
        "dtype": torch.bfloat16,
        "device": "cuda",
    }
    static = make_rope_inputs(**shape)
    TRITON.rope_write_kv(**static)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        TRITON.rope_write_kv(**static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        TRITON.rope_write_kv(**static)
    for seed in range(1, 6):
        step = make_rope_inputs(**shape, seed=seed)
        for name, x in step.items():
            if isinstance(x, Tensor):
                static[name].copy_(x)
        graph.replay()
        TRITON.rope_write_kv(**step)
        written = {name: static[name].clone() for name in ("q_out", "k_cache", "v_cache")}
        graph.replay()
        for name, x in written.items():
            for other in (step[name], static[name]):
                assert torch.equal(x.view(torch.int16), other.view(torch.int16)), (seed, name)
        assert_rope_close(TRITON, make_rope_inputs(**shape, seed=seed))


def test_compiled_with_the_projection() -> None:
    """Fullgraph: the slices of a fused projection go into the op as they are, the pools are not copied."""
    inputs = make_rope_inputs(num_tokens=8, head_dim=64, dtype=torch.bfloat16, device="cuda")
    weight, x = (
        torch.randn(512, 128, device="cuda", dtype=torch.bfloat16),
        torch.randn(8, 128, device="cuda", dtype=torch.bfloat16),
    )
    slots = torch.arange(8, device="cuda") + 16

    def step(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        q, k, v = (x @ weight.T).unflatten(1, (8, 64)).split([4, 2, 2], dim=1)
        return torchpaged.rope_write_kv(
            q, k, v, inputs["positions"], inputs["cos_sin"], k_cache, v_cache, slots
        )

    pools = [torch.zeros(4, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    with torch.no_grad():
        got, want = torch.compile(step, fullgraph=True)(*pools[:2]), step(*pools[2:])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(pools[:2], pools[2:])
    assert bool(pools[0].any())
