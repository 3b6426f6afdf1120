"""Kernels that a test runs: each of a backend on a device. One test so proves the same of all of them: on
this CPU; on a GPU (marked ``gpu``); and of Triton's in its interpreter (marked ``interpreted``), for which
custom_ops/triton/test_run_interpreter.py runs the file again."""

import os
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from torchpaged.backends import get_backend
from torchpaged.custom_ops import BACKEND_OPS, BackendOps, native_status

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    pytest.importorskip("triton", reason="triton is not installed")


class Kernels(NamedTuple):
    """One backend's, and where they run."""

    backend: str
    device: str

    @property
    def ops(self) -> BackendOps:
        """Its op handles; the test is skipped where it can't run."""
        if self.backend == "cpu" and not native_status()[0]:
            pytest.skip(native_status()[1])
        chosen = self.backend != "default"
        if chosen and self.device == "cuda" and (why := get_backend(self.backend).unavailable()):
            pytest.skip(why)
        return BACKEND_OPS[self.backend]


class Values(NamedTuple):
    """Of a parameter, that differ by where the kernels run."""

    cpu: Iterable[Any]
    interpreted: Iterable[Any]
    cuda: Iterable[Any]


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: The interpreter truncates to bfloat16 where GPUs round.
DTYPES = Values(_FLOATS, (torch.float32, torch.float16), _FLOATS)


def over(*cpu: str, gpu: tuple[str, ...] = ("triton",), **values: Iterable[Any]) -> Any:
    """Parametrises ``on``, `Kernels`, and with it each name of ``values``.

    Args:
        cpu: backends that run on this CPU; "triton": in the interpreter.
        gpu: backends that run on a GPU.
    """
    cases = []
    places = [(name, "cpu") for name in cpu if (name == "triton") == INTERPRETED]
    for on in map(Kernels._make, places + [(name, "cuda") for name in gpu]):
        place, mark = ("interpreted",) * 2 if INTERPRETED and on.device == "cpu" else (on.device, "gpu")
        marks = [] if place == "cpu" else [getattr(pytest.mark, mark)]
        for each in product(*(getattr(x, place) if isinstance(x, Values) else x for x in values.values())):
            cases.append(pytest.param(on, *each, marks=marks, id="-".join(map(str, (*on, *each)))))
    return pytest.mark.parametrize(["on", *values], cases)
