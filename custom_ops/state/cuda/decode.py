"""Launches of ``state_decode.cu``: ``linear_attention`` of single tokens; which calls it takes, by
shapes, dtypes, strides and addresses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import specialised
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import steps_of, struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper
from torchpaged.custom_ops.state.call import NORM_EPS, DeltaStepCall, LinearAttentionCall, Mamba2StepCall

DTYPES = (torch.bfloat16, torch.float16)
#: Sizes of a head's keys and values, and bytes of its state at most.
KEY_DIMS, VALUE_DIMS, MAX_STATE_BYTES = (64, 128, 256), (64, 128), 64 * 1024
#: Bytes of a batch's states up to which they are loaded evict-first into L2 (docs/log/state_decode.md).
ONCE_BYTES = 256 << 20


class StateSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    key_dim: int
    value_dim: int
    num_heads: int
    group: int
    half: bool
    state_float: bool
    out_float: bool
    beta: int
    by_key: bool
    delta: bool
    normalize: bool
    once: bool = True
    threads: int = 256
    min_ctas: int = 4

    @classmethod
    def of(cls, call: LinearAttentionCall) -> StateSpec:
        """Of a call that `why_not` lets pass."""
        _, num_heads, value_dim = call.v.shape
        wide = call.state.dtype == torch.float32
        matrix_bytes = call.q.shape[2] * value_dim * call.state.element_size()
        return cls(
            key_dim=call.q.shape[2],
            value_dim=value_dim,
            num_heads=num_heads,
            group=num_heads // call.q.shape[1],
            half=call.v.dtype == torch.float16,
            state_float=wide,
            out_float=call.out.dtype == torch.float32,
            beta=0 if call.beta is None else 2 if call.beta.dtype == torch.float32 else 1,
            by_key=call.g.dim() == 3,
            delta=call.delta_rule,
            normalize=call.normalize,
            once=call.state_slots.shape[0] * num_heads * matrix_bytes <= ONCE_BYTES,
            min_ctas=3 if matrix_bytes > 32 * 1024 else 4,  # as shared memory has room for
        )

    def config(self) -> Config:
        """The constants."""
        return STATE_DECODE.of(self)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, of two tokens in turn."""
        sizes = (self.key_dim, self.value_dim, self.threads, self.state_float, self.by_key)
        return shared_bytes(*sizes, turns=2)


STATE_DECODE = Table.of_file("state/cuda/state_decode_config.cuh")


def why_not(call: LinearAttentionCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take a call, or None. Shapes, dtypes, strides and addresses only."""
    q, k, v, state = call.q, call.k, call.v, call.state
    key_dim, value_dim = q.shape[2], v.shape[2]
    if reason := not_hopper(capability):
        return reason
    if call.max_query_len > 1:
        return f"{call.max_query_len} tokens of a row"
    if v.dtype not in DTYPES:
        return f"{v.dtype}, not bfloat16 or float16"
    state_bytes = key_dim * value_dim * state.element_size()
    if key_dim not in KEY_DIMS or value_dim not in VALUE_DIMS or state_bytes > MAX_STATE_BYTES:
        return f"states of {key_dim} x {value_dim}, {state_bytes} bytes"
    if reason := no_bulk(state):
        return reason
    for name, x in (("q", q), ("k", k)):
        if x.data_ptr() % 4 or any(n % 2 for n in x.stride()[:2]):
            return f"{name} with strides {tuple(x.stride())}: heads that begin at multiples of 4 bytes"
    return None


def no_bulk(state: Tensor) -> str | None:
    """Why matrices of ``state`` can't come as one copy each, or None."""
    row, steps = state.shape[3], state.stride()[:2]
    if state.stride()[2:] != (row, 1) or any(n * state.element_size() % 16 for n in steps):
        return (
            f"state with strides {tuple(state.stride())}: matrices in one piece, from multiples of 16 bytes"
        )
    return "state does not begin at a multiple of 16 bytes" if state.data_ptr() % 16 else None


def requests_of(call: LinearAttentionCall | DeltaStepCall | Mamba2StepCall) -> dict[str, int]:
    """What every kernel over states is told of the requests."""
    return {
        "slots": call.state_slots.data_ptr(),
        "lens": call.seq_lens.data_ptr(),
        "starts": call.query_start_loc.data_ptr(),
        "num_reqs": call.state_slots.shape[0],
        "num_tokens": call.out.shape[0],
    }


def launch(call: LinearAttentionCall, spec: StateSpec) -> None:
    """Launch a checked call that `why_not` lets pass."""
    q, k, v, g, state, out, beta = call.q, call.k, call.v, call.g, call.state, call.out, call.beta
    index = state.device.index or 0
    pointers = {"q": q, "k": k, "v": v, "beta": beta, "g": g, "state": state, "out": out}
    params = struct_of("state_decode.cu")(
        **{name: address(tensor) for name, tensor in pointers.items()},
        **steps_of(q=q, k=k, v=v, g=g, out=out),
        beta_token=0 if beta is None else beta.stride(0),
        state_slot=state.stride(0),
        state_head=state.stride(1),
        scale=call.scale,
        eps=NORM_EPS,
        **requests_of(call),
    )
    grid = call.state_slots.shape[0] * spec.num_heads
    specialised.launch("state_decode.cu", "update_states", spec, index, grid, spec.threads, params)


def shared_bytes(
    key_dim: int,
    value_dim: int,
    threads: int,
    state_float: bool,
    by_key: bool,
    turns: int,
    held: bool = False,
) -> int:
    """Dynamic shared memory, as state_decode_tile.cuh counts it."""
    row = value_dim * (4 if state_float else 2)
    parts = threads // 32 if row // 16 < 32 else threads // (row // 16)
    factors = turns * key_dim * (4 if by_key else 2) * 4
    kept = 12 * parts if held else key_dim * row  # products of key and query, or the state
    return kept + factors + (2 * parts + 1) * value_dim * 4 + 16
