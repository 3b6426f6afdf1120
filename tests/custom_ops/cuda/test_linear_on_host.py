"""linear_wide.cu on the host: its own source, launched by its own launcher, against float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import needs_gxx
from kernels_on_host import HostKernel, assert_no_races, compiled, host_map

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.layers.cuda import linear
from torchpaged.custom_ops.layers.cuda.linear_shape import LinearShape, LinearSpec, linear_config

#: name -> (tokens, weight [N, K], activation, shape)
CASES: dict[str, tuple[int, tuple[int, int], str, LinearShape]] = {
    "one CTA": (60, (128, 328), "none", LinearShape(1, 1, 1, 4, 1, 1, True, 2)),
    "gate and up": (33, (192, 200), "silu", LinearShape(2, 1, 1, 3, 1, 1, True, 3)),
    "a pair": (64, (64, 640), "none", LinearShape(1, 1, 1, 4, 1, 2, True, 2)),
    "three": (61, (64, 1032), "none", LinearShape(1, 1, 1, 3, 1, 3, True, 2)),
    "four": (32, (64, 1032), "none", LinearShape(1, 1, 1, 3, 1, 4, True, 2)),
    "eight": (20, (72, 1032), "silu", LinearShape(1, 1, 1, 3, 2, 8, True, 3)),
    "16 tokens": (13, (128, 512), "none", LinearShape(1, 1, 1, 4, 2, 4, True, 2)),
}


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_matches_float64(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rounding of the result."""
    tokens, (n, k), activation, shape = CASES[case]
    make: dict[str, Any] = {"generator": torch.Generator().manual_seed(n + k), "dtype": torch.float32}
    x, weight = torch.randn(tokens, k, **make).bfloat16(), (torch.randn(n, k, **make) * k**-0.5).bfloat16()

    def kernel(index: int, spec: LinearSpec, shape: LinearShape) -> HostKernel:
        config = linear_config(spec, shape, early=True)
        stand_ins = ("linear_on_host.h", ("bulk.cuh", "wgmma.cuh"))
        library = compiled(tmp_path / "host", "linear_wide.cu", "linear_wide", config, *stand_ins)
        return HostKernel(library, shape.cluster)

    monkeypatch.setattr(linear, "_specialised", kernel)
    monkeypatch.setattr(linear, "_shape", lambda *_: shape)
    monkeypatch.setattr(linear, "_map", linear._map.__wrapped__)
    monkeypatch.setattr(linear, "tensor_map", lambda at, _, *sizes, swizzle: host_map(at, *sizes))
    monkeypatch.setattr(linear, "require_gpu", lambda _: None)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)
    want = x.double() @ weight.double().T
    if activation != "none":
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    out = torch.full(want.shape, torch.nan, dtype=torch.bfloat16)
    linear.linear(linear.LinearCall(x, weight, out, activation=activation))
    assert float((out.double() - want).norm()) <= 3e-3 * float(want.norm())


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_no_races(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight alone is read before the wait for the kernels ahead."""
    assert_no_races(("weight",), test_matches_float64, case, tmp_path, monkeypatch)
