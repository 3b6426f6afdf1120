"""Launches of ``delta_chunks.cu``, the first kernel of a gated delta net's long rows, in place of Triton's;
which calls it takes, by shapes and dtypes."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from torchpaged.custom_ops.cuda import gpu, jit
from torchpaged.custom_ops.cuda.config import Config, Constant, Table
from torchpaged.custom_ops.cuda.loaded_kernel import Kernel, address
from torchpaged.custom_ops.cuda.routes import not_hopper
from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.triton.records import Chunks

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
#: Tokens of a chunk, and threads of a CTA.
CHUNK, THREADS = 64, 128
KEY_DIMS = (64, 128)

DELTA_CHUNKS = Table(
    "delta_chunks_config.cuh",
    ("delta_chunks.cu",),
    "a shard of two of Qwen3-Next's",
    (
        Constant("KEY_DIM", "int", "numbers of a key"),
        Constant("VALUE_DIM", "int", "numbers of a value"),
        Constant("KEY_HEADS", "int", "heads of keys"),
        Constant("GROUP", "int", "heads of values per head of keys"),
        Constant("SHORT", "int", "tokens up to which a row is another kernel's"),
        Constant("OUT_FLOAT", "bool", "out is float32, else of two bytes"),
        Constant("BETA", "int", "beta: 0 none, 1 bfloat16, 2 float32"),
        Constant("SHARED_BYTES", "int", "of dynamic shared memory"),
        Constant("MIN_CTAS", "int", "CTAs of a multiprocessor that registers must be there for"),
    ),
)


class ChunkParams(ctypes.Structure):
    """``struct Params`` of delta_chunks_params.cuh."""

    _fields_ = [
        *((name, _POINTER) for name in ("q", "k", "beta", "g", "out", "scores", "solved")),
        *((name, _POINTER) for name in ("since", "left", "decay", "seen", "slots", "lens", "starts")),
        *((f"{name}_{step}", ctypes.c_int64) for name in "qk" for step in ("token", "head")),
        *((name, ctypes.c_int64) for name in ("g_token", "beta_token", "out_token", "out_head")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        *((name, _INT) for name in ("num_reqs", "num_tokens")),
    ]


class ChunkSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    key_dim: int
    value_dim: int
    key_heads: int
    group: int
    short: int
    out_float: bool
    beta: int
    min_ctas: int = 4

    @classmethod
    def of(cls, call: LinearAttentionCall, short: int) -> ChunkSpec:
        """Of a call that `why_not` lets pass."""
        key_heads = call.q.shape[1]
        return cls(
            key_dim=call.q.shape[2],
            value_dim=call.v.shape[2],
            key_heads=key_heads,
            group=call.v.shape[1] // key_heads,
            short=short,
            out_float=call.out.dtype == torch.float32,
            beta=0 if call.beta is None else 2 if call.beta.dtype == torch.float32 else 1,
        )

    @property
    def shared_bytes(self) -> int:
        """Rows of queries and keys, or squares of both products; norms; sums and beta of each warp."""
        squares = 10 * 16 * 16 * 4
        return 2 * max(CHUNK * self.key_dim * 2, squares) + 2 * CHUNK * 4 + THREADS // 32 * 2 * CHUNK * 4

    def config(self) -> Config:
        """The constants."""
        return DELTA_CHUNKS.of(self, SHARED_BYTES=self.shared_bytes)


def why_not(call: LinearAttentionCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel can't take the chunks of a call, or None."""
    if reason := not_hopper(capability):
        return reason
    if not call.delta_rule or not call.normalize or call.g.dim() != 2:
        return "no delta rule, keys that are not normalised, or decays by key"
    if call.v.dtype != torch.bfloat16 or call.q.shape[2] not in KEY_DIMS:
        return f"{call.v.dtype}, keys of {call.q.shape[2]}"
    return None


def launch(call: LinearAttentionCall, chunks: Chunks, short: int) -> None:
    """Launch for a call that `why_not` lets pass, whose keys and queries are read 16 bytes at a time."""
    q, k, g, beta, out = call.q, call.k, call.g, call.beta, call.out
    num_reqs, num_tokens = call.state_slots.shape[0], call.v.shape[0]
    params = ChunkParams(
        **{name: x.data_ptr() for name, x in (("q", q), ("k", k), ("g", g), ("out", out))},
        beta=address(beta),
        **{name: address(getattr(chunks, name)) for name in ("scores", "solved", "since", "left")},
        **{name: address(getattr(chunks, name)) for name in ("decay", "seen")},
        slots=call.state_slots.data_ptr(),
        lens=call.seq_lens.data_ptr(),
        starts=call.query_start_loc.data_ptr(),
        q_token=q.stride(0),
        q_head=q.stride(1),
        k_token=k.stride(0),
        k_head=k.stride(1),
        g_token=g.stride(0),
        beta_token=0 if beta is None else beta.stride(0),
        out_token=out.stride(0),
        out_head=out.stride(1),
        scale=call.scale,
        eps=NORM_EPS,
        num_reqs=num_reqs,
        num_tokens=num_tokens,
    )
    index = out.device.index or 0
    spec = ChunkSpec.of(call, short)
    grid = (num_tokens // CHUNK + num_reqs) * spec.key_heads
    _specialised(index, spec).launch(grid, THREADS, params, early=gpu.launches_early(index))


@functools.cache
def _specialised(index: int, spec: ChunkSpec) -> Kernel:
    device = torch.device("cuda", index)
    return jit.kernel(
        "delta_chunks.cu", "delta_chunks", spec.config(), device, shared_bytes=spec.shared_bytes
    )
