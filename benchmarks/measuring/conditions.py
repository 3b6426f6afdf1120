"""What a result file says about where its figures come from: day, machine, versions, clocks, commit,
command."""

import datetime
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from torchpaged.cli.report import of_gpu, of_torch, versions

_PACKAGES = ("torchpaged", "torch", "triton", "flashinfer-python", "tokenspeed-fa3", "transformers")
_SMI_FIELDS = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
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
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": str(device),
        "commit": commit(),
        "command": shlex.join(sys.orig_argv),
        "python": platform.python_version(),
        "packages": versions(_PACKAGES),
        "torch": torch.__version__,
        **of_torch(),
    }
    if device.type == "cuda":
        gpu = of_gpu(device)
        conditions |= {"gpu": gpu.pop("name"), "memory_gib": gpu.pop("gib"), **gpu}
        conditions["gpu_state_before"] = gpu_state(device)
    else:
        model = Path("/proc/cpuinfo")
        lines = model.read_text().splitlines() if model.exists() else []
        conditions["cpu"] = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            platform.processor(),
        )
    return conditions
