// Where a prefill launch waits for the kernels ahead of it and lets the next one begin
// (docs/stream_order.md).
#pragma once

#include "prefill_params.cuh"

// The decode launch behind this one waits for nothing that is written here, but for its end at its own
// (decode.cu). With it this kernel began when all ahead of it had ended: it is not launched early, but for
// the late CTAs, which wait for decode at their end. The merge launch waits for all of this one at once.
// All CTAs run when they let the next kernel go.
__device__ __forceinline__ void let_merge_or_decode_begin() {
  if constexpr (DECODE_LEN > 0 || SPLIT) griddepcontrol_launch_dependents();
}

// Without a decode launch behind it this kernel may begin while the ones ahead still run. Lengths, query
// starts and block tables are read before this, as machine.cuh says; all else is read and written behind it.
// Whatever warp stays passes it once, with work or without, so that no CTA ends before the kernels ahead. The
// kernel behind may begin then; a merge launch, which waits for this kernel's end, already at its start.
__device__ __forceinline__ void wait_for_kernels_ahead() {
  if constexpr (DECODE_LEN == 0) griddepcontrol_wait();
  if constexpr (DECODE_LEN == 0 && !SPLIT) griddepcontrol_launch_dependents();
}

// Kernels behind wait for the late launch alone: it must not end before the decode launch, which does not
// before the first launch of tiles.
__device__ __forceinline__ void finish_behind_decode(const Params &p) {
  if (DECODE_LEN > 0 && p.is_late && blockIdx.x == 0) griddepcontrol_wait();
}
