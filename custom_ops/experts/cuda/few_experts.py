"""Launches of ``few_experts.cu``: `apply_experts` of at most 8 tokens, which calls it takes and how
their work is cut, by shapes and dtypes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.activations import ACTIVATIONS
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel, address
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper, unaligned
from torchpaged.custom_ops.experts.call import ExpertsCall
from torchpaged.custom_ops.experts.limits import MAX_TOP_K

FILE = "few_experts.cu"
MAX_TOKENS, MAX_EXPERTS, PIECE, WARPS, STAGES = 8, 512, 128, 8, 4  # as the source has them
_RING_BYTES = STAGES * WARPS * 16 * PIECE * 2


class ExpertsSpec(NamedTuple):
    """What the kernels are compiled for; the constants of the same names."""

    hidden: int
    inner: int
    shared: int
    top_k: int
    activation: int
    half: bool
    pdl: bool

    @classmethod
    def of(cls, call: ExpertsCall, early: bool) -> ExpertsSpec:
        """Of a call that `why_not` lets pass."""
        _, hidden, inner = call.down.shape
        return cls(
            hidden=hidden,
            inner=inner,
            shared=0 if call.shared_down is None else call.shared_down.shape[1],
            top_k=call.ids.shape[1],
            activation=ACTIVATIONS[call.activation],
            half=call.x.dtype == torch.float16,
            pdl=early,
        )

    def config(self) -> Config:
        """The constants."""
        return FEW_EXPERTS.of(self)


FEW_EXPERTS = Table.of_file("experts/cuda/few_experts_config.cuh")


@functools.cache
def _kernel(name: str, spec: ExpertsSpec, index: int) -> Kernel:
    return jit.kernel(FILE, name, spec.config(), torch.device("cuda", index), shared_bytes=_RING_BYTES)


def why_not(call: ExpertsCall, capability: tuple[int, int]) -> str | None:
    """Why the kernels can't take a call, or None. Shapes, dtypes, strides and addresses only."""
    if reason := not_hopper(capability):
        return reason
    if call.x.dim() != 2 or call.ids.dim() != 2 or call.down.dim() != 3:
        return "not matrices"
    if call.x.dtype not in (torch.bfloat16, torch.float16):
        return f"{call.x.dtype}, not bfloat16 or float16"
    tokens, (experts, hidden, inner), top_k = call.x.shape[0], call.down.shape, call.ids.shape[1]
    if not 1 <= tokens <= MAX_TOKENS or not 1 <= top_k <= MAX_TOP_K:
        return f"{tokens} tokens of {top_k} experts: 1 to {MAX_TOKENS}, of 1 to {MAX_TOP_K}"
    if experts > MAX_EXPERTS:
        return f"{experts} experts, not {MAX_EXPERTS}"
    shared = () if call.shared_down is None else (call.shared_down.shape[-1],)
    if (
        hidden not in range(1024, 4097, PIECE * WARPS)
        or not inner
        or any(n % PIECE for n in (inner, *shared))
    ):
        return f"rows of {hidden} and {inner}: multiples of {PIECE * WARPS}, up to 4,096, and of {PIECE}"
    rows = [("x", call.x, 1), ("gate_up", call.gate_up, 2), ("down", call.down, 2)]
    for name in ("shared_gate_up", "shared_down", "residual"):
        if (tensor := getattr(call, name)) is not None:
            rows.append((name, tensor, 1))
    if call.shared_gate is not None:
        rows.append(("shared_gate", call.shared_gate, 0))
    return unaligned(*rows)


def apply_few(call: ExpertsCall) -> None:
    """Launch a checked call that `why_not` lets pass."""
    x, gate_up, down, ids = call.x, call.gate_up, call.down, call.ids
    index = x.device.index or 0
    spec = ExpertsSpec.of(call, gpu.launches_early(index))
    num_sms, experts = gpu.num_sms(index), min(ids.numel(), down.shape[0])
    inner = x.new_empty(MAX_TOKENS * (spec.shared + experts * spec.inner))

    def stride(tensor: torch.Tensor | None) -> int:
        return 0 if tensor is None else tensor.stride(0)

    params = struct_of(FILE)(
        **{name: address(tensor) for name, tensor in call._asdict().items() if name != "activation"},
        inner=inner.data_ptr(),
        x_token=x.stride(0),
        gate_up_expert=gate_up.stride(0),
        gate_up_row=gate_up.stride(1),
        shared_gate_up_row=stride(call.shared_gate_up),
        down_expert=down.stride(0),
        down_row=down.stride(1),
        shared_down_row=stride(call.shared_down),
        residual_token=stride(call.residual),
        out_token=call.out.stride(0),
        tokens=x.shape[0],
        num_experts=down.shape[0],
    )
    units = (spec.shared + experts * spec.inner) // 8
    for name, ctas in (("experts_gate_up", units), ("experts_down", spec.hidden // 16)):
        kernel = _kernel(name, spec, index)
        kernel.launch(min(ctas, num_sms), WARPS * 32, params, early=spec.pdl)
