"""The environment report behind ``torchpaged env``: versions, kernels, devices and variables, every
probe guarded."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

from torchpaged.backends import get_backend, list_backends
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """The report as data."""
    loaded, detail = native_status()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "threads": torch.get_num_threads(),
        },
        "cpu": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "native_kernels": loaded,
            "detail": detail,
        },
        "gpus": [],
        "backends": {name: get_backend(name).unavailable() or "available" for name in list_backends()},
        "environment": {
            v.name: {"value": os.environ.get(v.name), "default": v.default, "meaning": v.meaning}
            for v in VARIABLES
        },
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            report["gpus"].append(
                {
                    "name": properties.name,
                    "capability": [properties.major, properties.minor],
                    "gib": round(properties.total_memory / 2**30, 1),
                    "multiprocessors": properties.multi_processor_count,
                }
            )
    return report
