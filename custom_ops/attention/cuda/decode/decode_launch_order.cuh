// Where a decode launch waits for the kernels ahead of it and lets the next one begin (docs/stream_order.md).
#pragma once
#include "decode_params.cuh"

// Lengths, tables and query starts are read before this point, and PREFETCH stages of keys and values before
// the query tokens' own: what writes those does not let its dependents start early (docs/stream_order.md), so
// that they are complete when this kernel begins. Everything else is read behind it, when all kernels before
// have finished. PREFETCH_L2 tiles more are only asked for into L2.
//
// Every thread comes here exactly once, with work or without, before it ends: a kernel that ended without
// waiting could end before those ahead of it, and the one behind would take them for finished.
//
// The next kernel may be launched from here on, not earlier: the kernel that wrote the query tokens' keys let
// its dependents start early, and to an attention behind this one they are keys to be read before its wait.
//
// DECODE_LEN > 0: a prefill launch (prefill.cu) stands right before this one, and neither writes what the
// other reads. It began when all kernels ahead of it had ended, and lets this one begin when each of its CTAs
// runs: so no CTA waits here, and all that is read was complete before. What an older kernel left in L1 is
// gone by load_and_forget_l1, which stands before every plain load. The last CTA waits at its end.
__device__ __forceinline__ void wait_and_launch_next() {
  if constexpr (PDL && DECODE_LEN == 0) griddepcontrol_wait();
  if constexpr (PDL) griddepcontrol_launch_dependents();
}
// Kernels behind wait for this launch alone: it must not end before the prefill launch. That waits for none
// of its dependents, so it ends.
__device__ __forceinline__ void wait_for_prefill() {
  if (PDL && DECODE_LEN > 0 && blockIdx.x == gridDim.x - 1) griddepcontrol_wait();
}
