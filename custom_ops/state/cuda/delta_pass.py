"""Launches of ``delta_pass.cu``, which goes from chunk to chunk of a gated delta net's long rows, in place of
Triton's kernel; which calls it takes, by shapes, dtypes, strides and addresses."""

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config, Constant, Table
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel, address
from torchpaged.custom_ops.cuda.routes import unaligned
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.cuda import delta_chunks
from torchpaged.custom_ops.state.triton.records import Chunks

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
KEY_DIM, VALUE_DIMS = 128, (64, 128)

DELTA_PASS = Table(
    "delta_pass_config.cuh",
    ("delta_pass.cu",),
    "a shard of two of Qwen3-Next's",
    (
        Constant("VALUE_DIM", "int", "columns of a state"),
        Constant("NUM_HEADS", "int", "heads of values"),
        Constant("GROUP", "int", "of these, heads per head of keys"),
        Constant("GROUPS", "int", "warpgroups of a CTA, each with 64 columns"),
        Constant("SHORT", "int", "tokens up to which a row is another kernel's"),
        Constant("STATE_FLOAT", "bool", "states are float32, else bfloat16"),
        Constant("JOINED", "bool", "rows are cut into segments"),
        Constant("ENDS", "bool", "what segments make of zeros and of the identity, without results"),
        Constant("SHARED_BYTES", "int", "of dynamic shared memory"),
    ),
)


class PassParams(ctypes.Structure):
    """``struct Params`` of delta_pass_params.cuh."""

    _fields_ = [
        *((name, _POINTER) for name in ("q", "k", "v", "scores", "solved", "since", "left", "decay")),
        *((name, _POINTER) for name in ("seen", "state", "out", "joined", "slots", "lens", "starts")),
        *((f"{name}_{step}", ctypes.c_int64) for name in "qkv" for step in ("token", "head")),
        *((name, ctypes.c_int64) for name in ("out_token", "out_head")),
        *((f"state_{step}", ctypes.c_int64) for step in ("slot", "head", "row")),
        *((name, _INT) for name in ("num_reqs", "num_tokens", "segment", "unused")),
    ]


class PassSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    value_dim: int
    num_heads: int
    group: int
    groups: int
    short: int
    state_float: bool
    joined: bool = False
    ends: bool = False

    @property
    def shared_bytes(self) -> int:
        """Three stages of a chunk's rows, results of each warpgroup, factors of tokens twice."""
        squares = 3 + self.groups + (0 if self.ends else 3)
        results, factors = (0, 2) if self.ends else (self.groups, 3)
        return (3 * squares + results) * 8192 + 2 * factors * delta_chunks.CHUNK * 4

    @property
    def tiles(self) -> int:
        """CTAs of a row or segment and head."""
        return (self.value_dim + (KEY_DIM if self.ends else 0)) // (64 * self.groups)

    def config(self) -> Config:
        """The constants."""
        return DELTA_PASS.of(self, exact=True, SHARED_BYTES=self.shared_bytes)


def why_not(call: LinearAttentionCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take a call, or None."""
    if reason := delta_chunks.why_not(call, capability):
        return reason
    if call.q.shape[2] != KEY_DIM or call.v.shape[2] not in VALUE_DIMS:
        return f"states of {call.q.shape[2]} x {call.v.shape[2]}"
    if call.out.dtype != torch.bfloat16 or call.state.dtype not in (torch.bfloat16, torch.float32):
        return f"out of {call.out.dtype}, states of {call.state.dtype}"
    return unaligned(("out", call.out, 2))


def launch(
    call: LinearAttentionCall,
    chunks: Chunks,
    short: int,
    joined: Tensor | None = None,
    segment: int | None = None,
    ends: bool = False,
) -> None:
    """Launch for a call that `why_not` lets pass, whose keys, queries and values are read 16 bytes at a time.
    The last arguments are those of Triton's kernel."""
    q, k, v, state, out = call.q, call.k, call.v, call.state, call.out
    num_tokens, num_heads, value_dim = v.shape
    places = call.state_slots.shape[0] if joined is None else joined.shape[0]
    index = out.device.index or 0
    wide = value_dim == 128 and (ends or places * num_heads >= gpu.num_sms(index))
    spec = PassSpec(
        value_dim=value_dim,
        num_heads=num_heads,
        group=num_heads // q.shape[1],
        groups=2 if wide else 1,
        short=short,
        state_float=state.dtype == torch.float32,
        joined=joined is not None,
        ends=ends,
    )
    if value_dim == 128 and not ends:  # other numbers of rows take the other form: both are compiled at once
        _specialised(index, spec._replace(groups=3 - spec.groups))
    params = PassParams(
        **{name: x.data_ptr() for name, x in (("q", q), ("k", k), ("v", v), ("state", state), ("out", out))},
        **{name: address(getattr(chunks, name)) for name in ("scores", "solved", "since", "left")},
        **{name: address(getattr(chunks, name)) for name in ("decay", "seen")},
        joined=address(joined),
        slots=call.state_slots.data_ptr(),
        lens=call.seq_lens.data_ptr(),
        starts=call.query_start_loc.data_ptr(),
        **{f"{name}_token": x.stride(0) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))},
        **{f"{name}_head": x.stride(1) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))},
        **{f"state_{name}": state.stride(n) for n, name in enumerate(("slot", "head", "row"))},
        num_reqs=call.state_slots.shape[0],
        num_tokens=num_tokens,
        segment=segment or num_tokens,
    )
    grid = places * num_heads * spec.tiles
    _specialised(index, spec).launch(grid, 128 * spec.groups, params, early=gpu.launches_early(index))


@functools.cache
def _specialised(index: int, spec: PassSpec) -> Kernel:
    device = torch.device("cuda", index)
    return jit.kernel("delta_pass.cu", "delta_pass", spec.config(), device, shared_bytes=spec.shared_bytes)
