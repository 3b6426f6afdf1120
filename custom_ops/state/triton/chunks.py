"""Launches of the kernels of long rows, and which calls have such rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall
from torchpaged.custom_ops.state.triton.chunk_pass import join_kernel, pass_kernel
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
#: Tokens of the longest row from which on it is cut into segments, and their tokens at least; up to how many
#: rows, each of which takes memory; how many segments must fit side by side, without and with decays by key.
CUT, LEAST, MOST_ROWS, SEGMENTS = 2048, 512, 32, {False: 4, True: 6}
#: Widths of keys that go in chunks, and what widths of values and the kernels' strides are multiples of.
KEY_DIMS, MULTIPLE = {False: (64, 128), True: (128,)}, 16
#: Columns of keys at a time where they decay one by one.
KEY_TILE = 32


class Kernels(NamedTuple):
    """Launches in place of Triton's two.

    Attributes:
        relate_tokens: the first kernel's, of a call whose rows are even, for rows of more tokens than the
            last argument; what it leaves to the second.
        pass_chunks: the second's, over that. Further arguments: what segments are joined by, their tokens,
            whether it is the first pass.
        cut: tokens of the longest row from which on it is cut into segments.
    """

    relate_tokens: Callable[[LinearAttentionCall, int], Tensor]
    pass_chunks: Callable[[LinearAttentionCall, Tensor, int, Tensor | None, int, bool], None]
    cut: int


class Tiles(NamedTuple):
    """Tokens of a chunk; value columns of a program of the second kernel; stages of its loads; how float32
    numbers are multiplied; tokens of a segment, a multiple of a chunk's, None where rows go as wholes. Both
    kernels have 4 warps: for 8 and 64 rows Triton 3.6 and 3.7 make products of 128 rows, which read beyond
    their operands."""

    chunk: int
    value: int
    stages: int
    precision: str
    segment: int | None = None


def tiles(call: LinearAttentionCall, cut: int = CUT) -> Tiles:
    """By shapes alone; as measured on an H200 (docs/log/state_prompts.md). Few heads go in narrower tiles, up
    to a program per multiprocessor, and rows of ``cut`` tokens of still fewer in segments; a third stage
    takes the place of programs, which short rows want more."""
    num_tokens, num_heads, value_dim = call.v.shape
    if value_dim % 64:
        return Tiles(64, 16 if value_dim == 16 else 32, 2, "tf32")
    num_reqs, by_key = call.state_slots.shape[0], call.g.dim() == 3
    columns, sms = num_heads * value_dim // 64, launching.num_sms(call.v.device)
    longest = min(call.max_query_len, num_tokens)
    fits = SEGMENTS[by_key] * columns * num_tokens <= sms * longest and num_reqs <= MOST_ROWS
    if call.delta_rule and longest >= cut and fits:
        segment = max(triton.cdiv(num_tokens, sms // columns), LEAST)
        return Tiles(64, 64, 2 if by_key else 3, "tf32", triton.cdiv(segment, 64) * 64)
    value, programs = 64, num_reqs * columns
    while value > 16 and 2 * programs <= sms:
        value, programs = value // 2, programs * 2
    deep = call.delta_rule or num_tokens >= LONG * num_reqs
    if by_key and value == 64:  # no room
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
    chunks = Chunks(new(chunk), *(new(dtype=wide) for _ in range(2)))
    if call.g.dim() == 3:
        number = num_tokens // chunk + call.state_slots.shape[0]
        decay = call.v.new_empty(number, num_heads, key_dim, dtype=wide)
        by_key = {name: new(key_dim) for name in ("queries", "known", "keys")}
        by_key |= {"decay": decay, "sums": new(KEY_TILE, dtype=wide)}
        return chunks._replace(solved=new(chunk), seen=chunks.left, **by_key)
    chunks = chunks._replace(decay=new(dtype=wide))
    return chunks._replace(solved=new(chunk), seen=new(dtype=wide)) if call.delta_rule else chunks


def attend_in_chunks(call: LinearAttentionCall, kernels: Kernels | None) -> None:
    """Rows of more than ``SHORT`` tokens, and zeros behind the last row. ``kernels``: in place of Triton's
    two."""
    num_tokens, num_heads, value_dim = call.v.shape
    num_reqs, key_dim = call.state_slots.shape[0], call.q.shape[2]
    tile = tiles(call) if kernels is None else tiles(call, kernels.cut)
    call = call._replace(q=even(call.q), k=even(call.k), v=even(call.v))
    q, k, v = (Tokens.of(x) for x in (call.q, call.k, call.v))
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
    if kernels is not None:
        records = kernels.relate_tokens(call, SHORT)
    else:
        chunks = _workspace(call, tile.chunk)
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
            TILE=KEY_TILE if by_key else min(64, max(16, next_power_of_2(max(key_dim, value_dim)))),
            NORMALIZE=call.normalize,
            EPS=NORM_EPS,
            num_warps=4,
            **common,
        )
    of_pass = {"KEY_PAD": max(16, next_power_of_2(key_dim)), "TILE": tile.value, "num_warps": 4}
    state, segment, joined, places = State.of(call.state), tile.segment or num_tokens, None, num_reqs

    def run_pass(columns: int, ends: bool) -> None:
        if kernels is not None:
            kernels.pass_chunks(call, records, SHORT, joined, segment, ends)
            return
        launch_kernel(
            pass_kernel,
            (places * num_heads * triton.cdiv(columns, tile.value),),
            num_reqs,
            num_tokens,
            segment,
            q,
            k,
            v,
            batch,
            state,
            out,
            chunks,
            joined,
            STAGES=2 if ends else tile.stages,
            BY_KEY=by_key,
            ENDS=ends,
            **common,
            **of_pass,
        )

    if tile.segment is not None:
        places += num_tokens // segment
        joined = call.v.new_empty(places, num_heads, key_dim, value_dim + key_dim, dtype=torch.float32)
        run_pass(value_dim + key_dim, ends=True)
        launch_kernel(
            join_kernel,
            (num_reqs * num_heads * triton.cdiv(value_dim, 16),),
            segment,
            batch,
            state,
            joined,
            NUM_HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            SHORT=SHORT,
            HALF=call.v.dtype == torch.bfloat16,
            PRECISION=tile.precision,
            **of_pass | {"TILE": 16, "num_warps": 8},
        )
    run_pass(value_dim, ends=False)
