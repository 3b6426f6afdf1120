"""What the launches of whole steps, ``delta_step.cu`` and ``mamba2_step.cu``, share: arguments of the batch,
of the convolution and of the states, and what is asked of their addresses."""

from __future__ import annotations

from math import prod

from torchpaged.custom_ops.state.call import DeltaStepCall, Mamba2StepCall
from torchpaged.custom_ops.state.cuda import decode

#: Bytes of a batch's states up to which registers hold them: 96 KiB on each of 132 multiprocessors.
FEW_BYTES = 132 * 96 << 10


def params_of(call: DeltaStepCall | Mamba2StepCall) -> dict[str, int]:
    """Fields of both kernels' ``Params`` that have the same names."""
    return {
        "slots": call.state_slots.data_ptr(),
        "lens": call.seq_lens.data_ptr(),
        "starts": call.query_start_loc.data_ptr(),
        "x_token": call.x.stride(0),
        "weight_channel": call.weight.stride(0),
        "conv_slot": call.conv_state.stride(0),
        "conv_row": call.conv_state.stride(1),
        "state_slot": call.state.stride(0),
        "state_head": call.state.stride(1),
        "out_token": call.out.stride(0),
        "out_head": call.out.stride(1),
        "num_reqs": call.state_slots.shape[0],
        "num_tokens": call.x.shape[0],
    }


def no_pairs(call: DeltaStepCall | Mamba2StepCall) -> str | None:
    """Why the convolution's numbers can't be read two at a time, or None."""
    for name, pairs in (("x", call.x), ("conv_state", call.conv_state)):
        if pairs.data_ptr() % 4 or any(n % 2 for n in pairs.stride()[:-1]):
            return f"{name} with strides {tuple(pairs.stride())}: rows that begin at multiples of 4 bytes"
    return None


def is_once(call: DeltaStepCall | Mamba2StepCall) -> bool:
    """Whether L2 is told to let this batch's states go first."""
    return _bytes_of(call) <= decode.ONCE_BYTES


def is_few(call: DeltaStepCall | Mamba2StepCall) -> bool:
    """Whether all CTAs of this batch have registers for their states at once."""
    return _bytes_of(call) <= FEW_BYTES


def _bytes_of(call: DeltaStepCall | Mamba2StepCall) -> int:
    """Of the states of a batch."""
    return call.state_slots.shape[0] * prod(call.state.shape[1:]) * call.state.element_size()
