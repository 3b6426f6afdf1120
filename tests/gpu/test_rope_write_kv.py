"""rope_write_kv on a GPU: every batch size, capture once and replay with other positions and slots."""

from typing import Any

import pytest
import torch
from captured import captured
from op_inputs.rope import assert_rope_close, make_rope_inputs
from torch import Tensor

import torchpaged
from torchpaged.custom_ops import BACKEND_OPS

pytestmark = pytest.mark.gpu
TRITON = BACKEND_OPS["triton"]
HEADS = {
    "32/8/128": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    "9/3/64": {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    "5/5/80": {"num_heads": 5, "num_kv_heads": 5, "head_dim": 80},
    "8/1/256": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 256, "rotary_dim": 64},
}


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
    graph, _ = captured(lambda: TRITON.rope_write_kv(**static))
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
