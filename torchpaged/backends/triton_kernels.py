"""What the Triton kernels take and need: the ``triton`` backend is made of them, and ``cuda`` runs them for
what its own do not take."""

import importlib.util
import os

import torch

from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.features import OWN_FEATURES
from torchpaged.backends.spec import AttentionSpec, GraphSupport

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def unavailable() -> str | None:
    """Why they can't run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed; pip install 'torchpaged[triton]'"
    if not _INTERPRETED and not torch.cuda.is_available():
        return "no CUDA or ROCm device is visible (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    return None


def further(spec: AttentionSpec) -> list[str]:
    """Reasons against latents and results in fp8, whose conversion older GPUs have no instruction for."""
    asked = {
        "latents": "latent" in spec.uses and spec.kv_dtype == torch.float8_e4m3fn,
        "results": "output_scale" in spec.uses,
    }
    what = [name for name, is_asked in asked.items() if is_asked]
    if not what or spec.device.type != "cuda":
        return []
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return []
    found = torch.cuda.get_device_capability(spec.device)
    return (
        [] if found >= (8, 9) else [f"{' and '.join(what)} in fp8 need compute capability 8.9, got {found}"]
    )


CAPABILITIES = Capabilities(
    device_types=("cuda", "cpu") if _INTERPRETED else ("cuda",),
    dtypes=_FLOATS,
    kv_dtypes=(*_FLOATS, torch.float8_e4m3fn, torch.float8_e5m2),
    graph_support=GraphSupport.ALWAYS,
    min_compute_capability=(8, 0),
    max_head_dim=256,
    features=OWN_FEATURES,
    max_latent=(512, 128),
    fp8_latents=True,
    further=further,
)
