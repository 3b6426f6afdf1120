"""delta_step of the ``cuda`` backend: one launch by the Hopper kernel; which calls it takes, by shapes,
dtypes, strides and addresses. What it can't take goes through the ops that the step is made of."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda import gpu, specialised
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper, require_gpu
from torchpaged.custom_ops.state.call import NORM_EPS, DeltaStepCall
from torchpaged.custom_ops.state.check_steps import check_delta_step
from torchpaged.custom_ops.state.cuda import decode
from torchpaged.custom_ops.state.cuda.linear_attention import linear_attention
from torchpaged.custom_ops.state.cuda.whole_step import comes_early, no_pairs, params_of, split_of

#: Sizes of a head's keys and values, and CTAs of a cluster, so heads that share a key.
KEY_DIMS, VALUE_DIMS, MAX_CLUSTER = (64, 128), (64, 128), 8

#: Tensors of a call whose addresses the kernel gets under their names.
_TENSORS = (
    *("x", "weight", "bias", "a", "b", "a_log", "dt_bias", "gate", "norm_weight"),
    *("conv_state", "state", "out"),
)


class StepSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    key_dim: int
    value_dim: int
    num_heads: int
    group: int
    split: int
    together: int
    by_key: bool
    bounded: bool
    sigmoid: bool
    width: int
    half: bool
    state_float: bool
    a_log_float: bool
    dt_bias_float: bool
    norm_float: bool
    new_step: bool
    threads: int = 256
    min_ctas: int = 2

    @classmethod
    def of(cls, call: DeltaStepCall) -> StepSpec:
        """Of a call that `why_not` lets pass."""
        num_heads, key_dim, value_dim = call.state.shape[1:]
        a_log, dt_bias, norm_weight = (
            x.dtype == torch.float32 for x in (call.a_log, call.dt_bias, call.norm_weight)
        )
        group = num_heads // call.num_key_heads
        split = split_of(call, MAX_CLUSTER // group)
        return cls(
            key_dim,
            value_dim // split,
            num_heads,
            group,
            split,
            call.b.shape[2],
            call.by_key,
            call.bound is not None,
            call.activation == "sigmoid",
            call.weight.shape[1],
            call.x.dtype == torch.float16,
            call.state.dtype == torch.float32,
            a_log,
            dt_bias,
            norm_weight,
            comes_early(call, split, cls._field_defaults["min_ctas"]),
        )

    def config(self) -> Config:
        """The constants."""
        return DELTA_STEP.of(self)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, as delta_step.cu counts it."""
        sizes = (self.key_dim, self.value_dim, self.threads, self.state_float, self.by_key)
        return decode.shared_bytes(*sizes, turns=1, held=True) + self.value_dim * self.split // 32 * 4


DELTA_STEP = Table.of_file("state/cuda/delta_step_config.cuh")


def delta_step(call: DeltaStepCall) -> None:
    """Launch; arguments as in ``custom_ops/state/schema.py``. Every choice here depends on shapes, never on
    lengths."""
    require_gpu(call.x.device)
    check_delta_step(call)
    if route(call) is None:
        launch(call, StepSpec.of(call))
        return
    from torchpaged.custom_ops.state.triton.delta_step import run_parts  # only now: Triton loads slowly

    run_parts(call, linear_attention)


def route(call: DeltaStepCall) -> str | None:
    """Why a checked call goes through several launches, or None."""
    if not call.state_slots.numel() or not call.x.numel():
        return "no requests or no tokens"
    return why_not(call, gpu.capability(call.x.device.index or 0))


def why_not(call: DeltaStepCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take a call, or None. Shapes, dtypes, strides and addresses only."""
    x, state, group = call.x, call.state, call.state.shape[1] // max(call.num_key_heads, 1)
    if reason := not_hopper(capability):
        return reason
    if call.max_query_len > 1:
        return "rows of several tokens"
    if x.dtype not in decode.DTYPES:
        return f"{x.dtype}, not bfloat16 or float16"
    if state.shape[2] not in KEY_DIMS or state.shape[3] not in VALUE_DIMS:
        return f"states of {state.shape[2]} x {state.shape[3]}"
    if group > MAX_CLUSTER:
        return f"{group} heads that share a key"
    if call.a.shape[1] != call.gate.shape[1]:
        return f"{call.a.shape[1]} groups of a, {call.gate.shape[1]} of gate"
    return decode.no_bulk(state) or no_pairs(call)


def launch(call: DeltaStepCall, spec: StepSpec) -> None:
    """Launch a checked call that `why_not` lets pass."""
    index = call.state.device.index or 0
    pointers = {name: address(getattr(call, name)) for name in _TENSORS}
    strides = {
        f"{name}_{step}": getattr(call, name).stride(dim)
        for name in ("a", "b", "gate")
        for dim, step in enumerate(("token", "group"))
    }
    params = struct_of("delta_step.cu")(
        **pointers,
        **strides,
        norm_head=call.norm_weight.stride(0) if call.norm_weight.dim() == 2 else 0,
        scale=call.scale,
        beta_scale=call.beta_scale,
        bound=call.bound or 0.0,
        eps=call.eps,
        key_eps=NORM_EPS,
        **params_of(call),
    )
    grid = call.state_slots.shape[0] * spec.num_heads * spec.split
    specialised.launch("delta_step.cu", "delta_step", spec, index, grid, spec.threads, params)
