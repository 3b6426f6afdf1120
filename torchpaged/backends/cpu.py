"""The ``cpu`` backend: native C++ kernels (AVX2, AVX-512, portable) built by CMakeLists.txt."""

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.features import OWN_FEATURES
from torchpaged.backends.spec import GraphSupport
from torchpaged.custom_ops import BACKEND_OPS, native_status

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _unavailable() -> str | None:
    loaded, reason = native_status()
    return None if loaded else reason


BACKEND = Backend(
    name="cpu",
    capabilities=Capabilities(
        device_types=("cpu",),
        dtypes=_FLOATS,
        kv_dtypes=_FLOATS,
        fp8_latents=True,
        graph_support=GraphSupport.ALWAYS,
        features=OWN_FEATURES,
    ),
    ops=BACKEND_OPS["cpu"],
    unavailable=_unavailable,
)
