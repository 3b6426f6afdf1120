"""The ``reference`` backend: the ops' specification in plain torch. Any device, every feature, no speed."""

import torch

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.features import FEATURES
from torchpaged.backends.spec import GraphSupport
from torchpaged.custom_ops import BACKEND_OPS

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

BACKEND = Backend(
    name="reference",
    capabilities=Capabilities(
        device_types=("cpu", "cuda"),
        dtypes=_FLOATS,
        kv_dtypes=(*_FLOATS, torch.float8_e4m3fn, torch.float8_e5m2),
        fp8_latents=True,
        graph_support=GraphSupport.NEVER,  # it reads lengths on the host
        batch_invariant=True,  # one request after the other, in tensors of its own
        features=frozenset(FEATURES),
    ),
    ops=BACKEND_OPS["reference"],
    unavailable=lambda: None,
)
