"""Launches of ``delta_chunks.cu``, the first kernel of a gated delta net's long rows, in place of Triton's,
for calls that the second one takes (delta_pass.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import specialised
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import steps_of, struct_of
from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.cuda.decode import requests_of

#: Tokens of a chunk, numbers of a key, threads of a CTA.
CHUNK, KEY_DIM, THREADS = 64, 128, 128
#: Bytes of a record of delta_records.cuh: two squares of 64 x 64 without what is above their diagonals, and
#: between them three factors of each token and one of the chunk.
RECORD_BYTES = 2 * 10 * 512 + 3 * CHUNK * 4 + 128


class ChunkSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    value_dim: int
    key_heads: int
    group: int
    short: int
    beta: int
    min_ctas: int = 4

    @classmethod
    def of(cls, call: LinearAttentionCall, short: int) -> ChunkSpec:
        """Of a call that `why_not` lets pass."""
        key_heads = call.q.shape[1]
        return cls(
            value_dim=call.v.shape[2],
            key_heads=key_heads,
            group=call.v.shape[1] // key_heads,
            short=short,
            beta=0 if call.beta is None else 2 if call.beta.dtype == torch.float32 else 1,
        )

    @property
    def shared_bytes(self) -> int:
        """Rows of queries and keys, or squares of both products; norms; sums and beta of each warp."""
        squares = 10 * 16 * 16 * 4
        return 2 * max(CHUNK * KEY_DIM * 2, squares) + 2 * CHUNK * 4 + THREADS // 32 * 2 * CHUNK * 4

    def config(self) -> Config:
        """The constants."""
        return DELTA_CHUNKS.of(self, SHARED_BYTES=self.shared_bytes)


DELTA_CHUNKS = Table.of_file("state/cuda/delta_chunks_config.cuh")


def launch(call: LinearAttentionCall, short: int) -> Tensor:
    """Launch for a call that `delta_pass.why_not` lets pass, whose keys and queries are read 16 bytes at a
    time. Records, ``[chunks, heads, RECORD_BYTES]``: a row's from ``starts[row] // CHUNK + row`` on."""
    q, k, g, beta, out = call.q, call.k, call.g, call.beta, call.out
    num_reqs, num_tokens = call.state_slots.shape[0], call.v.shape[0]
    number, heads = num_tokens // CHUNK + num_reqs, call.v.shape[1]
    records = out.new_empty(number, heads, RECORD_BYTES, dtype=torch.uint8)
    params = struct_of("delta_chunks.cu")(
        **{name: x.data_ptr() for name, x in (("q", q), ("k", k), ("g", g), ("out", out))},
        beta=address(beta),
        records=records.data_ptr(),
        **steps_of(q=q, k=k, out=out),
        g_token=g.stride(0),
        beta_token=0 if beta is None else beta.stride(0),
        scale=call.scale,
        eps=NORM_EPS,
        **requests_of(call),
    )
    index = out.device.index or 0
    spec = ChunkSpec.of(call, short)
    grid = number * spec.key_heads
    specialised.launch("delta_chunks.cu", "delta_chunks", spec, index, grid, THREADS, params)
    return records
