"""Which calls the CUDA C++ kernel takes, and the shapes it takes them with; no GPU needed."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchpaged import BackendUnavailableError
from torchpaged.backends import get_backend
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cuda import jit, specialise

SHARED = (102400, 167936, 233472)  # bytes per multiprocessor of sm_86, sm_80 and sm_90


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_every_shape_fits_its_device(dim: int) -> None:
    for rows, kv_bytes, shared, pairs in itertools.product((1, 4, 8, 16, 32), (1, 2), SHARED, (1, 64, 200, 5000)):
        if -(-rows // 8) * dim > 512:
            continue
        shape = specialise.decode_shape(dim, dim, kv_bytes, rows, pairs, 132, shared)
        assert shape.warps >= 1 and shape.stages >= 2 and shape.keys % 16 == 0
        assert shape.ctas_per_sm * (shape.shared_bytes(dim, dim, kv_bytes, rows) + 3072) <= shared
        assert rows * dim * 4 <= shape.stage_bytes(dim, dim, kv_bytes), "states meet in a stage"


def test_clusters_only_where_two_ctas_share_a_pair() -> None:
    clusters = {pairs: specialise.decode_shape(128, 128, 2, 4, pairs, 132, 233472).cluster for pairs in (1, 8, 32, 44, 64, 66, 67, 512)}
    assert clusters == {1: 1, 8: 1, 32: 1, 44: 2, 64: 2, 66: 2, 67: 1, 512: 1}


def cache(dtype: torch.dtype, dim: int = 64, heads: int = 2, block_size: int = 16) -> torch.Tensor:
    return torch.zeros(4, block_size, heads, dim, dtype=dtype, device="meta")


def test_what_it_leaves_to_triton() -> None:
    q = torch.zeros(3, 8, 64, dtype=torch.bfloat16, device="meta")
    pool = cache(torch.bfloat16)
    assert "device" in str(specialise.unsupported(q, pool, pool, q, None, 1))


def test_why_it_is_unavailable() -> None:
    reasons = [get_backend("cuda").unavailable(), jit.unavailable()]
    if torch.version.cuda is None:
        assert "no CUDA device" in str(reasons[0]) and "without CUDA" in str(reasons[1])
        with pytest.raises(BackendUnavailableError, match="backend 'cuda'"):
            jit.kernel("decode.cu", "paged_decode", {}, torch.device("cuda", 0), shared_bytes=0)


def test_the_overload_has_the_contract_of_the_others() -> None:
    assert set(BACKEND_OPS) == {"default", "reference", "cpu", "triton", "cuda"}
    schemas = {str(BACKEND_OPS[name].paged_attention._schema).split("(", 1)[1] for name in BACKEND_OPS}
    assert len(schemas) == 1
