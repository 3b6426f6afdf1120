"""What the launches of whole steps, ``delta_step.cu`` and ``mamba2_step.cu``, share: arguments of the batch,
of the convolution and of the states, and what is asked of their addresses."""

from torchpaged.custom_ops.cuda.params import steps_of
from torchpaged.custom_ops.state.call import DeltaStepCall, Mamba2StepCall
from torchpaged.custom_ops.state.cuda.decode import requests_of

#: CTAs up to which a head's columns are shared out: two for each multiprocessor.
MAX_SPLIT_CTAS, MAX_SPLIT, LEAST_COLUMNS = 264, 4, 32
_SMS = 132  # of an H100 and an H200


def split_of(call: DeltaStepCall | Mamba2StepCall, most: int = MAX_SPLIT) -> int:
    """CTAs that share a head's columns, ``most`` at most: more than one where few rows would leave
    multiprocessors idle, since each reads and writes its part of a state at its own rate."""
    rows, (num_heads, key_dim, columns) = call.state_slots.shape[0], call.state.shape[1:]
    split = 1
    while (
        split * 2 <= min(most, MAX_SPLIT)
        and rows * num_heads * split * 2 <= MAX_SPLIT_CTAS
        and columns // split >= 2 * LEAST_COLUMNS
        and 3 * key_dim * split * 2 <= 15 * columns  # there is room for what is made beside the state
    ):
        split *= 2
    return split


def comes_early(call: DeltaStepCall | Mamba2StepCall, split: int, ctas_per_sm: int) -> bool:
    """Whether states go into registers ahead of the wait: of a new step, where all CTAs run at once. One that
    begins behind others' end finds its token there, which would come behind its state."""
    ctas = call.state_slots.shape[0] * call.state.shape[1] * split
    return call.new_step and ctas <= ctas_per_sm * _SMS


def params_of(call: DeltaStepCall | Mamba2StepCall) -> dict[str, int]:
    """Fields of both kernels' ``Params`` that have the same names."""
    return {
        **requests_of(call),
        "x_token": call.x.stride(0),
        "weight_channel": call.weight.stride(0),
        "conv_slot": call.conv_state.stride(0),
        "conv_row": call.conv_state.stride(1),
        "state_slot": call.state.stride(0),
        "state_head": call.state.stride(1),
        **steps_of(out=call.out),
    }


def no_pairs(call: DeltaStepCall | Mamba2StepCall) -> str | None:
    """Why the convolution's numbers can't be read two at a time, or None."""
    for name, pairs in (("x", call.x), ("conv_state", call.conv_state)):
        if pairs.data_ptr() % 4 or any(n % 2 for n in pairs.stride()[:-1]):
            return f"{name} with strides {tuple(pairs.stride())}: rows that begin at multiples of 4 bytes"
    return None
