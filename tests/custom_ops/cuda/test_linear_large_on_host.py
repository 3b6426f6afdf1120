"""linear_large.cu and linear_sum.cu on the host: their own sources, launched by their own launcher, against
float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import needs_gxx
from kernels_on_host import HostKernel, assert_no_races, compiled, host_map

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.layers.cuda import linear, linear_large
from torchpaged.custom_ops.layers.cuda.linear_large import LargeShape

#: name -> (tokens, weight [N, K], activation, residual, shape)
CASES: dict[str, tuple[int, tuple[int, int], str, bool, LargeShape]] = {
    "gate and up": (70, (256, 328), "silu", False, LargeShape(80, 2, 1, 1)),
    "tall tiles": (81, (256, 584), "silu", False, LargeShape(96, 2, 2, 1)),
    "parts": (65, (128, 776), "none", True, LargeShape(80, 2, 1, 4)),
    "short tiles": (80, (128, 1032), "none", True, LargeShape(80, 1, 1, 4)),
    "an edge": (66, (72, 200), "none", True, LargeShape(80, 1, 1, 2)),
    "an edge between warps": (66, (80, 200), "none", True, LargeShape(80, 1, 1, 2)),
    "an edge between warpgroups": (66, (192, 200), "silu", False, LargeShape(80, 2, 1, 2)),
    "an edge of one part": (66, (200, 200), "none", False, LargeShape(80, 2, 1, 1)),
}


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_matches_float64(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rounding of the result."""
    tokens, (n, k), activation, has_residual, shape = CASES[case]
    make: dict[str, Any] = {"generator": torch.Generator().manual_seed(n + k), "dtype": torch.float32}
    x, weight = torch.randn(tokens, k, **make).bfloat16(), (torch.randn(n, k, **make) * k**-0.5).bfloat16()

    def kernel(file: str, name: str, config: Config, *_: object, **__: object) -> HostKernel:
        stand_ins = ("linear_on_host.h", ("bulk.cuh", "wgmma.cuh"))
        return HostKernel(compiled(tmp_path / name, file, name, config, *stand_ins))

    monkeypatch.setattr(jit, "kernel", kernel)
    monkeypatch.setattr(jit, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(linear_large, "large_shape", lambda *_: shape)
    monkeypatch.setattr(linear, "_large_kernels", linear._large_kernels.__wrapped__)
    monkeypatch.setattr(linear, "_map", linear._map.__wrapped__)
    monkeypatch.setattr(linear, "tensor_map", lambda at, _, *sizes, swizzle: host_map(at, *sizes))
    monkeypatch.setattr(linear, "require_gpu", lambda _: None)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda _: 132)
    want = x.double() @ weight.double().T
    if activation != "none":
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    residual = torch.randn(want.shape, **make).bfloat16() if has_residual else None
    want = want if residual is None else want + residual.double()
    out = torch.full(want.shape, torch.nan, dtype=torch.bfloat16)
    linear.linear(linear.LinearCall(x, weight, out, residual=residual, activation=activation))
    assert float((out.double() - want).norm()) <= 3e-3 * float(want.norm())


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_no_races(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight alone is read before the wait for the kernels ahead."""
    assert_no_races(("weight",), test_matches_float64, case, tmp_path, monkeypatch)


def test_rows_that_overlap_are_left_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    monkeypatch.setattr(gpu, "num_sms", lambda _: 132)
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16) for rows in (128, 28672))
    out = torch.empty(128, 28672, dtype=torch.bfloat16)
    assert linear._large_shape(linear.LinearCall(x, weight, out)) is not None
    assert linear._large_shape(linear.LinearCall(x[:1].expand(128, -1), weight, out)) is None
