"""What the kernels that write into a KV cache do at their begin and at their end, for the sake of ``paged_attention`` behind them.

``paged_attention`` reads the keys and values ahead of its query tokens before the kernels ahead of it have finished (the contract in
``custom_ops/ops.py``). So a kernel that writes such keys does not let it start early, and makes them visible before it ends; one that
writes the query tokens' own may. Both may be launched early themselves: they wait for the kernels ahead of them first.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def begin_write(ARE_QUERY_TOKENS: tl.constexpr, PDL: tl.constexpr):
    """PDL: the kernel is launched with programmatic dependent launch."""
    if PDL:
        if ARE_QUERY_TOKENS:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def end_write(ARE_QUERY_TOKENS: tl.constexpr, PDL: tl.constexpr):
    """After the last store. That all programs have ended starts the kernel behind, but does not say that their stores can be seen."""
    if PDL and not ARE_QUERY_TOKENS:
        fence()


@triton.jit
def fence():
    """For every thread: its stores before can be seen by the whole GPU, its loads behind find nothing that was in L1 before."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
