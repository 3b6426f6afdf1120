"""linear_wide.cu, linear_large.cu and linear_sum.cu on the host: their own sources, launched by their own
launcher, against float64."""

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
from torchpaged.custom_ops.layers.cuda.linear_shape import LinearShape, LinearSpec, linear_config

#: name -> (tokens, weight [N, K], activation, residual, shape)
CASES: dict[str, tuple[int, tuple[int, int], str, bool, LinearShape | LargeShape]] = {
    "one CTA": (60, (128, 328), "none", False, LinearShape(1, 1, 1, 4, 1, 1, True, 2)),
    "gate and up": (33, (192, 200), "silu", False, LinearShape(2, 1, 1, 3, 1, 1, True, 3)),
    "a pair": (64, (64, 640), "none", False, LinearShape(1, 1, 1, 4, 1, 2, True, 2)),
    "three": (61, (64, 1032), "none", False, LinearShape(1, 1, 1, 3, 1, 3, True, 2)),
    "four": (32, (64, 1032), "none", False, LinearShape(1, 1, 1, 3, 1, 4, True, 2)),
    "eight": (20, (72, 1032), "silu", False, LinearShape(1, 1, 1, 3, 2, 8, True, 3)),
    "16 tokens": (13, (128, 512), "none", False, LinearShape(1, 1, 1, 4, 2, 4, True, 2)),
    "large, gate and up": (70, (256, 328), "silu", False, LargeShape(80, 2, 1, 1)),
    "tall tiles": (81, (256, 584), "silu", False, LargeShape(96, 2, 2, 1)),
    "parts": (65, (128, 776), "none", True, LargeShape(80, 2, 1, 4)),
    "short tiles": (80, (128, 1032), "none", True, LargeShape(80, 1, 1, 4)),
    "an edge": (66, (72, 200), "none", True, LargeShape(80, 1, 1, 2)),
    "an edge between warps": (66, (80, 200), "none", True, LargeShape(80, 1, 1, 2)),
    "an edge between warpgroups": (66, (192, 200), "silu", False, LargeShape(80, 2, 1, 2)),
    "an edge of one part": (66, (200, 200), "none", False, LargeShape(80, 2, 1, 1)),
}
#: Whose races a default run looks for, with all that the others are asked.
WATCHED = ("one CTA", "three", "eight", "large, gate and up", "tall tiles", "parts")


@needs_gxx
@pytest.mark.slow_cases(*WATCHED)
@pytest.mark.parametrize("case", CASES)
def test_matches_float64(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the rounding of the result."""
    tokens, (n, k), activation, has_residual, shape = CASES[case]
    make: dict[str, Any] = {"generator": torch.Generator().manual_seed(n + k), "dtype": torch.float32}
    x, weight = torch.randn(tokens, k, **make).bfloat16(), (torch.randn(n, k, **make) * k**-0.5).bfloat16()

    def kernel(file: str, name: str, config: Config, *_: object, **__: object) -> HostKernel:
        stand_ins = ("linear_on_host.h", ("bulk.cuh", "wgmma.cuh"))
        cluster = shape.cluster if isinstance(shape, LinearShape) else 1
        return HostKernel(compiled(tmp_path / name, file, name, config, *stand_ins), cluster)

    def wide(_: int, spec: LinearSpec, shape: LinearShape) -> HostKernel:
        return kernel("linear_wide.cu", "linear_wide", linear_config(spec, shape, early=True))

    if isinstance(shape, LinearShape):
        monkeypatch.setattr(linear, "_specialised", wide)
        monkeypatch.setattr(linear, "_shape", lambda *_: shape)
    else:
        monkeypatch.setattr(jit, "kernel", kernel)
        monkeypatch.setattr(jit, "compile_ahead", lambda *_: None)
        monkeypatch.setattr(linear_large, "large_shape", lambda *_: shape)
        monkeypatch.setattr(linear, "_large_kernels", linear._large_kernels.__wrapped__)
        monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
        monkeypatch.setattr(gpu, "num_sms", lambda _: 132)
    monkeypatch.setattr(linear, "_map", linear._map.__wrapped__)
    monkeypatch.setattr(linear, "tensor_map", lambda at, _, *sizes, swizzle: host_map(at, *sizes))
    monkeypatch.setattr(linear, "require_gpu", lambda _: None)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)
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
@pytest.mark.slow_cases(but=WATCHED)
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
