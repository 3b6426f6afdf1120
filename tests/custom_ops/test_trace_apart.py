"""Pools that some torch compiles wrong are refused while it traces."""

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cache_write import fake


@pytest.mark.parametrize("inference", [False, True])
def test_halves_of_one_tensor(monkeypatch: pytest.MonkeyPatch, inference: bool) -> None:
    """Inductor of torch 2.11 read and wrote beyond them; a view made in inference mode names no base."""
    k, slots = torch.randn(3, 2, 16), torch.tensor([4, 9, 11])

    def step(k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        BACKEND_OPS["reference"].write_kv(k, k + 1, k_cache, v_cache, slots)
        return k_cache.sum()

    with torch.inference_mode(inference):
        halves = torch.zeros(2, 5, 4, 2, 16).unbind()
        monkeypatch.setattr(fake, "_SPLITS_WRONG", True)
        torch._dynamo.reset()
        with pytest.raises(TorchRuntimeError, match="k_cache, v_cache: expected memory of their own"):
            torch.compile(step, backend="aot_eager", fullgraph=True)(*halves)
        torch._dynamo.reset()
        torch.compile(step, backend="aot_eager", fullgraph=True)(*(half.clone() for half in halves))
    assert not any(bool(half.any()) for half in halves)
