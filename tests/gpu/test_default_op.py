"""Without a choice the ``cuda`` backend runs: the registered op, the functions and the module launch the
CUDA C++ decode kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchpaged
from torchpaged import AttentionMetadata, PagedAttention, use_backend
from torchpaged.backends import get_backend

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """Names of the kernels that ``call`` launches, compiled already."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.fixture
def decode() -> tuple[Any, ...]:
    """``(q, k_cache, v_cache, metadata)`` of two requests with one query token each."""
    if get_backend("cuda").unavailable() is not None:
        pytest.skip(str(get_backend("cuda").unavailable()))
    metadata = AttentionMetadata.from_lists(
        [1, 1], [20, 33], [[1, 2], [3, 4, 5]], block_size=BLOCK, device="cuda"
    )
    pools = [torch.randn(8, BLOCK, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return (torch.randn(2, HEADS, DIM, device="cuda", dtype=torch.bfloat16), *pools, metadata)


def doors(q: Any, k_cache: Any, v_cache: Any, m: AttentionMetadata) -> dict[str, Callable[[], Any]]:
    arguments = (q, k_cache, v_cache, m.block_table, m.seq_lens, m.query_start_loc)
    out = torch.empty_like(q)
    module = PagedAttention(HEADS, DIM, KV_HEADS, device="cuda", dtype=torch.bfloat16)
    return {
        "op": lambda: torch.ops.torchpaged.paged_attention(*arguments, out, max_query_len=1, scale=DIM**-0.5),
        "function": lambda: torchpaged.paged_attention(*arguments, max_query_len=1),
        "module": lambda: module(q, None, None, (k_cache, v_cache), m),
    }


@pytest.mark.parametrize("door", ["op", "function", "module"])
def test_decode_runs_the_cuda_kernel(door: str, decode: tuple[Any, ...]) -> None:
    names = kernels_of(doors(*decode)[door])
    assert any(name.startswith("paged_decode") for name in names), names
    assert not any("decode_kernel" in name for name in names), names


@pytest.mark.parametrize("door", ["function", "module"])
def test_triton_runs_where_it_was_asked_for(door: str, decode: tuple[Any, ...]) -> None:
    """And the other test can fail: names tell the two apart."""
    with use_backend("triton"):
        names = kernels_of(doors(*decode)[door])
    assert any("decode_kernel" in name for name in names), names
    assert not any(name.startswith("paged_decode") for name in names), names
