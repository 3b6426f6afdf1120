"""Kernels that let those behind them begin at once, and end late: all that may begin early does, long before
anything is written, and what is read too early is old every time. For compute capability 9.0 and later."""

import ctypes
import functools

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Table
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel

MICROSECONDS = 200
_TABLE = Table("late_end_config.cuh", "inline constexpr int NS = 0;  // until it ends")
_SOURCE = """
#include "late_end_config.cuh"
struct Rows {
  const char *from;
  char *to;
  const long long *slots;
  long long bytes;
};
extern "C" __global__ void late_end(Rows rows) {
  long long begin, now;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    asm volatile("nanosleep.u32 500;");
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < NS);
  for (long long i = threadIdx.x; i < rows.bytes; i += blockDim.x)
    rows.to[rows.slots[blockIdx.x] * rows.bytes + i] = rows.from[blockIdx.x * rows.bytes + i];
}
"""


@functools.cache
def _kernel(index: int) -> Kernel:
    config = _TABLE.config({"NS": MICROSECONDS * 1000})
    return Kernel(jit.compile_source(_SOURCE, config, gpu.capability(index)), "late_end", 0)


def _launch(ctas: int, *arguments: int) -> None:
    kernel = _kernel(torch.cuda.current_device())
    kernel.launch(ctas, 128, (ctypes.c_int64 * 4)(*arguments), early=False)


def launch() -> None:
    """One that does nothing else, on the current stream."""
    _launch(1, 0, 0, 0, 0)


def write(rows: Tensor, to: Tensor, slots: Tensor) -> None:
    """Rows of bytes ``[n, width]`` to those rows of ``to``, ``[m, width]``; ``slots``: int64 ``[n]``."""
    assert rows.dtype == to.dtype == torch.uint8 and rows.is_contiguous() and to.is_contiguous()
    _launch(len(slots), rows.data_ptr(), to.data_ptr(), slots.data_ptr(), rows.shape[1])
