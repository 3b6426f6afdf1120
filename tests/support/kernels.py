"""Kernels that a test runs: each of a backend on a device. One test so proves the same of all of them: on
this CPU; on a GPU (marked ``gpu``); and of Triton's in its interpreter (marked ``interpreted``), for which
custom_ops/triton/test_run_interpreter.py runs the file again."""

import os
from typing import Any, NamedTuple

import pytest
import torch

from torchpaged.backends import get_backend
from torchpaged.custom_ops import BACKEND_OPS, BackendOps, native_status

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kernels(NamedTuple):
    """One backend's, and where it runs."""

    backend: str
    device: str

    @property
    def ops(self) -> BackendOps:
        """Its op handles; the test is skipped where it can't run."""
        if self.backend == "cpu" and not native_status()[0]:
            pytest.skip(native_status()[1])
        if self.device == "cuda" and (why := get_backend(self.backend).unavailable()):
            pytest.skip(why)
        return BACKEND_OPS[self.backend]


def over(*cpu: str, gpu: tuple[str, ...] = ("triton",), dtypes: tuple[torch.dtype, ...] = ()) -> Any:
    """Parametrises ``on``, `Kernels`; and, of ``dtypes``, ``dtype``: in the interpreter not bfloat16, to
    which it truncates where GPUs round.

    Args:
        cpu: backends that run on this CPU; "triton": in the interpreter.
        gpu: backends that run on a GPU.
    """
    if INTERPRETED:
        pytest.importorskip("triton", reason="triton is not installed")
    names = [(name, "cpu") for name in cpu if (name == "triton") == INTERPRETED]
    cases = []
    for on in map(Kernels._make, names + [(name, "cuda") for name in gpu]):
        marks = [pytest.mark.gpu] if on.device == "cuda" else [pytest.mark.interpreted] if INTERPRETED else []
        if not dtypes:
            cases.append(pytest.param(on, marks=marks, id=f"{on.backend}-{on.device}"))
        for dtype in dtypes:
            if dtype != torch.bfloat16 or on.backend != "triton" or on.device != "cpu":
                cases.append(pytest.param(on, dtype, marks=marks, id=f"{on.backend}-{on.device}-{dtype}"))
    return pytest.mark.parametrize(("on", "dtype") if dtypes else "on", cases)
