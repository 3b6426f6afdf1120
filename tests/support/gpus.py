"""What the GPU here can do, for tests that need more than one."""

import pytest
import torch

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
#: Whether kernels that are written for compute capability 9.0 are to run: without NVRTC they fail.
HOPPER = CAPABILITY == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="the kernel is written for compute capability 9.0")
needs_fp8 = pytest.mark.skipif(CAPABILITY < (8, 9), reason="fp8 needs compute capability 8.9")
