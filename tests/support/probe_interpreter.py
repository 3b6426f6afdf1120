"""Run with TRITON_INTERPRET=1: whether Triton's interpreter works with this NumPy. A loop whose end is
loaded, as every kernel's here is."""

import torch
import triton
import triton.language as tl


@triton.jit
def _count(end_ptr, out_ptr):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(tl.load(end_ptr)):
        total += i
    tl.store(out_ptr, total)


if __name__ == "__main__":
    end, out = torch.tensor([4]), torch.tensor([0])
    _count[(1,)](end, out)
    assert out.item() == 6
