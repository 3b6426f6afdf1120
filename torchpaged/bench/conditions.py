"""What a result file says about where its figures come from: machine, versions, clocks, commit, command."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torchpaged", "torch", "triton", "flashinfer-python", "tokenspeed-fa3", "transformers")
_SMI_FIELDS = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The checkout's commit, "+changes" if files differ from it; None outside of a checkout."""
    here = ("git", "-C", str(Path(__file__).parent))
    head = _output(*here, "rev-parse", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _output(*here, "status", "--porcelain", "--untracked-files=no") else "")


def gpu_state(device: torch.device) -> dict[str, str] | None:
    """Driver, clocks, power and temperature of the GPU at this moment as nvidia-smi reports them; None
    without it."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # not on every build
    values = _output(
        "nvidia-smi",
        f"--query-gpu={_SMI_FIELDS}",
        "--format=csv,noheader",
        f"--id={f'GPU-{uuid}' if uuid else index}",
    )
    return None if values is None else dict(zip(_SMI_FIELDS.split(","), values.split(", "), strict=False))


def collect(device: torch.device) -> dict[str, Any]:
    """The conditions as data."""
    conditions: dict[str, Any] = {
        "device": str(device),
        "commit": commit(),
        "command": shlex.join(sys.orig_argv),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        conditions |= {
            "gpu": properties.name,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "gpu_state_before": gpu_state(device),
        }
    else:
        model = Path("/proc/cpuinfo")
        lines = model.read_text().splitlines() if model.exists() else []
        conditions["cpu"] = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            platform.processor(),
        )
    return conditions
