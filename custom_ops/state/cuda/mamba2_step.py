"""mamba2_step of the ``cuda`` backend: one launch by the Hopper kernel; which calls it takes, by shapes,
dtypes, strides and addresses. What it can't take goes through the ops that the step is made of."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda import gpu, specialised
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper, require_gpu
from torchpaged.custom_ops.state.call import Mamba2StepCall
from torchpaged.custom_ops.state.check_steps import check_mamba2_step
from torchpaged.custom_ops.state.cuda import decode
from torchpaged.custom_ops.state.cuda.linear_attention import linear_attention
from torchpaged.custom_ops.state.cuda.whole_step import comes_early, no_pairs, params_of, split_of

#: Tensors of a call whose addresses the kernel gets under their names.
_TENSORS = (
    *("x", "weight", "bias", "dt", "a_log", "dt_bias", "skip_weight", "gate"),
    *("conv_state", "state", "out"),
)


class Mamba2StepSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    key_dim: int
    value_dim: int
    num_heads: int
    group: int
    split: int
    width: int
    half: bool
    state_float: bool
    a_log_float: bool
    dt_bias_float: bool
    skip_float: bool
    gated: bool
    new_step: bool
    beside: bool
    threads: int = 256
    min_ctas: int = 3

    @classmethod
    def of(cls, call: Mamba2StepCall) -> Mamba2StepSpec:
        """Of a call that `why_not` lets pass."""
        num_heads, key_dim, value_dim = call.state.shape[1:]
        matrix_bytes = key_dim * value_dim * call.state.element_size()
        a_log, dt_bias, skip = (
            x.dtype == torch.float32 for x in (call.a_log, call.dt_bias, call.skip_weight)
        )
        split = split_of(call)
        min_ctas = 2 if matrix_bytes > 32 * 1024 else 3  # as there are registers for
        return cls(
            key_dim,
            value_dim // split,
            num_heads,
            num_heads // call.num_groups,
            split,
            call.weight.shape[1],
            call.x.dtype == torch.float16,
            call.state.dtype == torch.float32,
            a_log,
            dt_bias,
            skip,
            call.gate is not None,
            comes_early(call, split, min_ctas) and not call.beside,
            call.beside,
            min_ctas=min_ctas,
        )

    def config(self) -> Config:
        """The constants."""
        return MAMBA2_STEP.of(self)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as mamba2_step.cu counts it."""
        sizes = (self.key_dim, self.value_dim, self.threads, self.state_float, False)
        return decode.shared_bytes(*sizes, turns=1, held=True) + 4


MAMBA2_STEP = Table.of_file("state/cuda/mamba2_step_config.cuh")


def mamba2_step(call: Mamba2StepCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``. Every choice here depends on shapes, never on
    lengths."""
    require_gpu(call.x.device)
    check_mamba2_step(call)
    if route(call) is None:
        launch(call, Mamba2StepSpec.of(call))
        return
    from torchpaged.custom_ops.state.triton.mamba2_step import run_parts  # only now: Triton loads slowly

    run_parts(call, linear_attention)


def route(call: Mamba2StepCall) -> str | None:
    """Why a checked call goes through several launches, or None."""
    if not call.state_slots.numel() or not call.x.numel():
        return "no requests or no tokens"
    return why_not(call, gpu.capability(call.x.device.index or 0))


def why_not(call: Mamba2StepCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take a call, or None. Shapes, dtypes, strides and addresses only."""
    x, state = call.x, call.state
    if reason := not_hopper(capability):
        return reason
    if x.dtype not in decode.DTYPES:
        return f"{x.dtype}, not bfloat16 or float16"
    key_dim, value_dim = state.shape[2:]
    state_bytes = key_dim * value_dim * state.element_size()
    if (
        key_dim not in decode.KEY_DIMS
        or value_dim not in decode.VALUE_DIMS
        or state_bytes > decode.MAX_STATE_BYTES
    ):
        return f"states of {key_dim} x {value_dim}, {state_bytes} bytes"
    return decode.no_bulk(state) or no_pairs(call)


def launch(call: Mamba2StepCall, spec: Mamba2StepSpec) -> None:
    """Launch a checked call that `why_not` lets pass."""
    index, gate, num_reqs = call.state.device.index or 0, call.gate, call.state_slots.shape[0]
    semaphore = call.semaphore
    if semaphore is None:
        count = num_reqs * call.num_groups
        semaphore = torch.zeros(count, dtype=torch.int32, device=call.state.device)
    params = struct_of("mamba2_step.cu")(
        **{name: address(getattr(call, name)) for name in _TENSORS},
        semaphore=semaphore.data_ptr(),
        dt_token=call.dt.stride(0),
        gate_token=0 if gate is None else gate.stride(0),
        gate_head=0 if gate is None else gate.stride(1),
        min_step=call.min_step,
        max_step=inf if call.max_step is None else call.max_step,
        **params_of(call),
    )
    grid = num_reqs * spec.num_heads * spec.split
    specialised.launch("mamba2_step.cu", "mamba2_step", spec, index, grid, spec.threads, params)
