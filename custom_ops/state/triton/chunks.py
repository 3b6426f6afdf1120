"""Launches of the two kernels of long rows, and which calls have such rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.triton.chunk_pass import pass_kernel
from torchpaged.custom_ops.state.triton.chunk_products import chunk_kernel
from torchpaged.custom_ops.state.triton.key_products import key_chunk_kernel
from torchpaged.custom_ops.state.triton.records import Batch, Chunks, State
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import next_power_of_2
from torchpaged.custom_ops.triton.records import Matrix, Tokens

#: Tokens up to which a row goes one by one.
SHORT = 16
#: Tokens of a row, in the mean, from which on it is long.
LONG = 1024
#: Widths of keys that go in chunks, and what widths of values and the kernels' strides are multiples of.
KEY_DIMS, MULTIPLE = {False: (64, 128), True: (128,)}, 16


class Tiles(NamedTuple):
    """Tokens of a chunk; value columns of a program of the second kernel; stages of its loads; how float32
    numbers are multiplied. Both kernels have 4 warps: for 8 and 64 rows Triton 3.6 and 3.7 make products of
    128 rows, which read beyond their operands."""

    chunk: int
    value: int
    stages: int
    precision: str


def tiles(call: LinearAttentionCall) -> Tiles:
    """By shapes alone; as measured on an H200 (docs/log/state_prompts.md). Few heads go in narrower tiles, up
    to a program per multiprocessor; a third stage takes the place of programs, which short rows want more."""
    num_tokens, num_heads, value_dim = call.v.shape
    if value_dim % 64:
        return Tiles(64, 16 if value_dim == 16 else 32, 2, "tf32")
    num_reqs = call.state_slots.shape[0]
    value, programs = 64, num_reqs * num_heads * value_dim // 64
    while value > 16 and 2 * programs <= launching.num_sms(call.v.device):
        value, programs = value // 2, programs * 2
    deep = call.delta_rule or num_tokens >= LONG * num_reqs
    if call.g.dim() == 3 and value == 64:  # no room
        deep = False
    return Tiles(64, value, 3 if deep else 2, "tf32")


def has_long_rows(call: LinearAttentionCall) -> bool:
    """Whether rows may go in chunks, by what the host knows without reading a length: calls of the kind that
    was proved on a GPU."""
    q, v = call.q, call.v
    return (
        call.max_query_len > SHORT
        and v.dtype == torch.bfloat16
        and (call.g.dim() == 2 or call.delta_rule)
        and q.shape[2] in KEY_DIMS[call.delta_rule]
        and v.shape[2] % MULTIPLE == 0
        and launching.is_hopper(v.device)
    )


def even(x: Tensor) -> Tensor:
    """``x``, or a copy of it whose rows are read 16 bytes at a time, by asynchronous copies. Where they are
    not, ptxas 12.8 makes some of the second kernel's products from registers that nothing was written to
    (docs/log/state_prompts.md)."""
    if x.data_ptr() % 16 or any(n % MULTIPLE for n in x.stride()[:2]):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _workspace(call: LinearAttentionCall, chunk: int) -> Chunks:
    """Memory for what the first kernel leaves to the second, by the number of tokens."""
    num_tokens, num_heads, _ = call.v.shape
    dtype = torch.bfloat16 if call.v.dtype == torch.bfloat16 else torch.float32

    def new(*width: int, dtype: torch.dtype = dtype) -> Tensor:
        return call.v.new_empty(num_heads, num_tokens, *width, dtype=dtype)

    key_dim, wide = call.q.shape[2], torch.float32
    if call.g.dim() == 3:
        since, left, seen = (new(key_dim) for _ in range(3))
        return Chunks(new(chunk), since, left, solved=new(chunk), seen=seen, sums=new(key_dim, dtype=wide))
    chunks = Chunks(new(chunk), *(new(dtype=wide) for _ in range(3)))
    return chunks._replace(solved=new(chunk), seen=new(dtype=wide)) if call.delta_rule else chunks


def attend_in_chunks(call: LinearAttentionCall) -> None:
    """Rows of more than ``SHORT`` tokens, and zeros behind the last row."""
    num_tokens, num_heads, value_dim = call.v.shape
    num_reqs, key_dim = call.state_slots.shape[0], call.q.shape[2]
    tile = tiles(call)
    chunks = _workspace(call, tile.chunk)
    q, k, v = (Tokens.of(even(x)) for x in (call.q, call.k, call.v))
    out, by_key = Tokens.of(call.out), call.g.dim() == 3
    batch = Batch(call.state_slots, call.seq_lens, call.query_start_loc)
    common: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // call.q.shape[1],
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "CHUNK": tile.chunk,
        "SHORT": SHORT,
        "DELTA": call.delta_rule,
        "PRECISION": tile.precision,
    }
    launch_kernel(
        key_chunk_kernel if by_key else chunk_kernel,
        ((num_tokens // tile.chunk + num_reqs) * num_heads,),
        num_reqs,
        num_tokens,
        call.scale,
        q,
        k,
        v,
        Tokens.of(call.g) if by_key else Matrix.of(call.g),
        Matrix.of(call.beta),
        batch,
        out,
        chunks,
        TILE=min(32 if by_key else 64, max(16, next_power_of_2(max(key_dim, value_dim)))),
        NORMALIZE=call.normalize,
        EPS=NORM_EPS,
        num_warps=4,
        **common,
    )
    launch_kernel(
        pass_kernel,
        (num_reqs * num_heads * triton.cdiv(value_dim, tile.value),),
        num_tokens,
        q,
        k,
        v,
        batch,
        State.of(call.state),
        out,
        chunks,
        KEY_PAD=max(16, next_power_of_2(key_dim)),
        TILE=tile.value,
        STAGES=tile.stages,
        BY_KEY=by_key,
        num_warps=4,
        **common,
    )
