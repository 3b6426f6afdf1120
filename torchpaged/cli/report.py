"""The environment report behind ``torchpaged env``: versions, kernels, devices and variables, every
probe guarded."""

import contextlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import Any

import torch

from torchpaged.backends import get_backend, list_backends
from torchpaged.custom_ops import native_status
from torchpaged.custom_ops.variables import VARIABLES

_PACKAGES = "torchpaged torch triton transformers flashinfer-python gguf nvtx numpy safetensors tokenizers"


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of the packages that are installed; None of the others."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def of_torch() -> dict[str, Any]:
    """What torch was built for, and its threads."""
    return {"cuda": torch.version.cuda, "hip": torch.version.hip, "threads": torch.get_num_threads()}


def of_gpu(device: torch.device | int) -> dict[str, Any]:
    """What the GPU is."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
    }


def collect() -> dict[str, Any]:
    """The report as data."""
    loaded, detail = native_status()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(_PACKAGES.split()),
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
