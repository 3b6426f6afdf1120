"""Launches of the kernels of long rows, and which calls have such rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.triton.chunk_pass import join_kernel, pass_kernel
from torchpaged.custom_ops.state.triton.chunk_products import chunk_kernel
from torchpaged.custom_ops.state.triton.key_products import key_chunk_kernel
from torchpaged.custom_ops.state.triton.records import Batch, Chunks, Sizes, State
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
            whether it is the first pass. None: Triton's, over `Chunks`.
        cut: tokens of the longest row from which on it is cut into segments.
        segments: how many of these must fit side by side; None: as of Triton's.
    """

    relate_tokens: Callable[[LinearAttentionCall, int], Any]
    pass_chunks: Callable[[LinearAttentionCall, Any, int, Tensor | None, int, bool], None] | None = None
    cut: int = CUT
    segments: int | None = None


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


def tiles(call: LinearAttentionCall, cut: int = CUT, segments: int | None = None) -> Tiles:
    """By shapes alone; as measured on an H200 (docs/log/state_prompts.md). Few heads go in narrower tiles, up
    to a program per multiprocessor, and rows of ``cut`` tokens of still fewer in segments; a third stage
    takes the place of programs, which short rows want more."""
    num_tokens, num_heads, value_dim = call.v.shape
    if value_dim % 64:
        return Tiles(64, 16 if value_dim == 16 else 32, 2, "tf32")
    num_reqs, by_key = call.state_slots.shape[0], call.g.dim() == 3
    columns, sms = num_heads * value_dim // 64, launching.num_sms(call.v.device)
    longest = min(call.max_query_len, num_tokens)
    beside = SEGMENTS[by_key] if segments is None else segments
    fits = beside * columns * num_tokens <= sms * longest and num_reqs <= MOST_ROWS
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


def workspace(call: LinearAttentionCall, chunk: int) -> Chunks:
    """Memory for what the first kernel leaves to the second, by the number of tokens; none for ``sums``."""
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
        return chunks._replace(solved=new(chunk), seen=chunks.left, decay=decay, **by_key)
    chunks = chunks._replace(decay=new(dtype=wide))
    return chunks._replace(solved=new(chunk), seen=new(dtype=wide)) if call.delta_rule else chunks


class _Launches:
    """Triton's kernels over the long rows of one call, whose rows are `even`; ``tile``: of `tiles`."""

    def __init__(self, call: LinearAttentionCall, tile: Tiles) -> None:
        self._call, self._stages = call, tile.stages
        self._tensors = [Tokens.of(x) for x in (call.q, call.k, call.v)]
        self._out, self._state = Tokens.of(call.out), State.of(call.state)
        self._batch = Batch(call.state_slots, call.seq_lens, call.query_start_loc)
        self._counts = call.state_slots.shape[0], call.v.shape[0]
        self._sizes = Sizes.of(call, tile.value, SHORT, tile.chunk, tile.precision)

    def relate_tokens(self) -> Chunks:
        """The first kernel; what it leaves to the second."""
        call, sizes, (num_reqs, num_tokens) = self._call, self._sizes, self._counts
        kernel, chunks = chunk_kernel, workspace(call, sizes.chunk)
        tile = min(64, max(16, next_power_of_2(max(sizes.key_dim, sizes.value_dim))))
        if sizes.by_key:
            kernel, tile = key_chunk_kernel, KEY_TILE
            sums = call.v.new_empty(sizes.heads, num_tokens, KEY_TILE, dtype=torch.float32)
            chunks = chunks._replace(sums=sums)
        launch_kernel(
            kernel,
            ((num_tokens // sizes.chunk + num_reqs) * sizes.heads,),
            *(*self._counts, call.scale, *self._tensors[:2]),
            Tokens.of(call.g) if sizes.by_key else Matrix.of(call.g),
            *(Matrix.of(call.beta), self._batch, self._out, chunks),
            SIZES=sizes._replace(tile=tile),
            num_warps=4,
        )
        return chunks

    def pass_chunks(self, chunks: Chunks, joined: Tensor | None, segment: int, ends: bool) -> None:
        """The second kernel, over ``chunks``; the other arguments as in `Kernels`."""
        sizes = self._sizes
        places = self._counts[0] if joined is None else joined.shape[0]
        columns = sizes.value_dim + (sizes.key_dim if ends else 0)
        launch_kernel(
            pass_kernel,
            (places * sizes.heads * triton.cdiv(columns, sizes.tile),),
            *(*self._counts, segment, *self._tensors),
            *(self._batch, self._state, self._out, chunks, joined),
            SIZES=sizes,
            STAGES=2 if ends else self._stages,
            ENDS=ends,
            num_warps=4,
        )

    def join(self, joined: Tensor, segment: int) -> None:
        """States at the begins of segments, from what the segments make of zeros and of the identity."""
        sizes = self._sizes._replace(tile=16)
        launch_kernel(
            join_kernel,
            (self._counts[0] * sizes.heads * triton.cdiv(sizes.value_dim, sizes.tile),),
            *(segment, self._batch, self._state, joined),
            SIZES=sizes,
            HALF=self._call.v.dtype == torch.bfloat16,
            num_warps=8,
        )


def attend_in_chunks(call: LinearAttentionCall, kernels: Kernels | None) -> None:
    """Rows of more than ``SHORT`` tokens, and zeros behind the last row. ``kernels``: in place of Triton's
    two."""
    tile = tiles(call) if kernels is None else tiles(call, kernels.cut, kernels.segments)
    call = call._replace(q=even(call.q), k=even(call.k), v=even(call.v))
    launches = _Launches(call, tile)
    run_pass: Callable[[Tensor | None, int, bool], None]
    if kernels is None:
        run_pass = partial(launches.pass_chunks, launches.relate_tokens())
    elif kernels.pass_chunks is None:
        run_pass = partial(launches.pass_chunks, kernels.relate_tokens(call, SHORT))
    else:
        run_pass = partial(kernels.pass_chunks, call, kernels.relate_tokens(call, SHORT), SHORT)
    (num_tokens, num_heads, value_dim), key_dim = call.v.shape, call.q.shape[2]
    joined, segment = None, tile.segment or num_tokens
    if tile.segment is not None:
        places = call.state_slots.shape[0] + num_tokens // segment
        joined = call.v.new_empty(places, num_heads, key_dim, value_dim + key_dim, dtype=torch.float32)
        run_pass(joined, segment, True)
        launches.join(joined, segment)
    run_pass(joined, segment, False)
