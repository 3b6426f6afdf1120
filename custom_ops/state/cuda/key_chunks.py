"""Launches of ``key_chunks.cu``, the first kernel of long rows of Kimi delta attention, in place of Triton's;
which calls it takes, by shapes, dtypes, strides and addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchpaged.custom_ops.cuda import specialised
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import steps_of, struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper, unaligned
from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.cuda.decode import requests_of
from torchpaged.custom_ops.state.cuda.delta_chunks import CHUNK, KEY_DIM

if TYPE_CHECKING:
    from torchpaged.custom_ops.state.triton.records import Chunks

#: Of a CTA.
THREADS = 256


class KeyChunkSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    value_dim: int
    heads: int
    group: int
    short: int
    beta: int
    min_ctas: int = 3

    @property
    def shared_bytes(self) -> int:
        """Weighed queries and keys, these twice; of ten squares factors of columns, and numbers of float32;
        sums of strips' decays; sums of squares of half rows, norms, beta; which columns decay too much."""
        rows, factors, squares = 3 * CHUNK * KEY_DIM * 2, 10 * KEY_DIM * 4, 10 * 16 * 16 * 4
        return rows + factors + squares + 4 * KEY_DIM * 4 + (4 + 3) * CHUNK * 4 + 128

    def config(self) -> Config:
        """The constants."""
        return KEY_CHUNKS.of(self, SHARED_BYTES=self.shared_bytes)


KEY_CHUNKS = Table.of_file("state/cuda/key_chunks_config.cuh")


def why_not(call: LinearAttentionCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel for Hopper can't take the long rows of a call, or None."""
    if reason := not_hopper(capability):
        return reason
    if not call.delta_rule or not call.normalize or call.g.dim() != 3:
        return "no delta rule, keys that are not normalised, or a decay for each head"
    if call.q.shape[2] != KEY_DIM or any(x.dtype != torch.bfloat16 for x in (call.v, call.out)):
        return f"keys of {call.q.shape[2]}, {call.v.dtype}, out of {call.out.dtype}"
    return unaligned(("g", call.g, 2))


def launch(call: LinearAttentionCall, chunks: Chunks, short: int) -> None:
    """Launch for a call that `why_not` lets pass, whose keys and queries are read 16 bytes at a time;
    ``chunks``: filled."""
    q, k, g, beta, out = call.q, call.k, call.g, call.beta, call.out
    num_reqs, (num_tokens, heads, value_dim) = call.state_slots.shape[0], call.v.shape
    made = {name: getattr(chunks, name).data_ptr() for name in _MADE}
    params = struct_of("key_chunks.cu")(
        **{name: x.data_ptr() for name, x in (("q", q), ("k", k), ("g", g), ("out", out))},
        **made,
        beta=address(beta),
        **steps_of(q=q, k=k, g=g, out=out),
        beta_token=0 if beta is None else beta.stride(0),
        scale=call.scale,
        eps=NORM_EPS,
        **requests_of(call),
    )
    spec = KeyChunkSpec(
        value_dim=value_dim,
        heads=heads,
        group=heads // q.shape[1],
        short=short,
        beta=0 if beta is None else 2 if beta.dtype == torch.float32 else 1,
    )
    grid = (num_tokens // CHUNK + num_reqs) * heads
    specialised.launch("key_chunks.cu", "key_chunks", spec, out.device.index or 0, grid, THREADS, params)


_MADE = ("queries", "known", "keys", "scores", "solved", "since", "left", "decay")
