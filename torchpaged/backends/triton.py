"""The ``triton`` backend: own Triton kernels for NVIDIA (sm_80 and later) and AMD GPUs.

With ``TRITON_INTERPRET=1`` the same kernels run on CPU tensors through Triton's interpreter: slow, for tests.
"""

from torchpaged.backends.base import Backend
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.triton_kernels import CAPABILITIES, unavailable
from torchpaged.custom_ops import BACKEND_OPS

BACKEND = Backend(
    name="triton",
    capabilities=CAPABILITIES,
    ops=BACKEND_OPS["triton"],
    unavailable=unavailable,
    session=SemaphoreSession,
)
