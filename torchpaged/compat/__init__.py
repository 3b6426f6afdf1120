"""Other libraries' call shapes on the kernels of torchpaged, so that code written for them runs unchanged.

    from torchpaged.compat import flash_attn_varlen_func, flash_attn_with_kvcache
    from torchpaged.compat import reshape_and_cache_flash, varlen_attn, varlen_attn_out

- `flash_attn_varlen_func`, `flash_attn_with_kvcache`: FlashAttention's (vLLM's build of it, and version 3).
- `reshape_and_cache_flash`: vLLM's.
- `varlen_attn`, `varlen_attn_out`: those of ``torch.nn.attention.varlen`` (torch 2.12), here with any torch.

All run in eager mode, under ``torch.compile(fullgraph=True)`` and in a CUDA graph; none waits for the device.
An argument that changes the result and that no kernel here honours is refused by its name. One that only
tunes the original's speed is taken, changes nothing, and is logged once, at level INFO of the logger
``torchpaged.compat``.
"""

from torchpaged.compat.kvcache import flash_attn_with_kvcache
from torchpaged.compat.reshape_and_cache import reshape_and_cache_flash
from torchpaged.compat.torch_varlen import varlen_attn, varlen_attn_out
from torchpaged.compat.varlen import flash_attn_varlen_func

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "reshape_and_cache_flash",
    "varlen_attn",
    "varlen_attn_out",
]
