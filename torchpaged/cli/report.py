"""The environment report behind ``torchpaged env``: versions, kernels, devices and variables, every
probe guarded."""

import os
import platform
from typing import Any

import torch

from torchpaged.backends import get_backend, list_backends
from torchpaged.bench.conditions import of_gpu, of_torch, versions
from torchpaged.custom_ops import native_status
from torchpaged.custom_ops.variables import VARIABLES

_PACKAGES = (
    "torchpaged",
    "torch",
    "triton",
    "transformers",
    "flashinfer-python",
    "gguf",
    "nvtx",
    "numpy",
    "safetensors",
    "tokenizers",
)


def collect() -> dict[str, Any]:
    """The report as data."""
    loaded, detail = native_status()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(_PACKAGES),
        "torch": {"version": torch.__version__, **of_torch()},
        "cpu": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "native_kernels": loaded,
            "detail": detail,
        },
        "gpus": [of_gpu(index) for index in range(gpus)],
        "backends": {name: get_backend(name).unavailable() or "available" for name in list_backends()},
        "environment": {
            v.name: {"value": os.environ.get(v.name), "default": v.default, "meaning": v.meaning}
            for v in VARIABLES
        },
    }
