"""sample_tokens: Gumbel-max in two launches, with a search for the threshold instead of a sort where a row
is truncated.

The first kernel cuts the vocabulary into tiles, one or a few per program, and reads every logit once; of a
plainly drawn row again those that may win (sample_scan.py, sample_draw.py). For a greedy or a plainly drawn
row each program leaves its best token. For a row with top_k, top_p or min_p it leaves each tile's largest
logit and mass, and the largest logit of each group of 64 tokens. The second kernel, a program per row, merges
the tiles. A truncated row goes on there:

1. The groups' maxima bound the threshold from below: k groups that reach a value hold k tokens that do; the
   same with masses.
2. Groups that reach the bound are listed. For usual distributions they fit one chunk, which then stays in the
   first-level cache.
3. The threshold is the largest listed logit at and above which lie k tokens (top_k) or the mass p (top_p):
   bisection over the ordered integer images of floats, in which both ends always jump to logits that occur.
4. The kept tokens of the listed groups are scored with their noise. Of tokens equal to the threshold the
   first are kept.

Which of this a row needs is read from its parameters on the device. Sums run in a fixed order, so that
replays agree bit for bit. Semantics and noise: `torchpaged.custom_ops.step_end.reference`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from torchpaged.custom_ops.step_end.call import SampleCall
from torchpaged.custom_ops.step_end.check import check_sample_tokens
from torchpaged.custom_ops.step_end.triton.sample_draw import NO_TOKEN, scan_drawn
from torchpaged.custom_ops.step_end.triton.sample_rows import GROUP, LogitRows, is_truncated, load_parameters
from torchpaged.custom_ops.step_end.triton.sample_scan import scan_greedy, scan_truncated
from torchpaged.custom_ops.step_end.triton.sample_search import draw_truncated, likelihood, row_of
from torchpaged.custom_ops.triton.kernel_store import launch_kernel
from torchpaged.custom_ops.triton.launching import (
    INTERPRET,
    early_launch,
    next_power_of_2,
    require_launchable,
)


class SampleTiles(NamedTuple):
    """Sizes of both launches.

    Attributes:
        tile: logits of a tile.
        tile_warps: warps of a program of the first launch.
        tiles_each: tiles of such a program.
        chunk: listed logits that the second launch reads at once.
        chunk_warps: its warps.
    """

    tile: int
    tile_warps: int
    tiles_each: int
    chunk: int
    chunk_warps: int


def sample_tiles(num_rows: int, vocab_size: int) -> SampleTiles:
    """Small tiles while large ones would leave multiprocessors idle; several for a program once there are
    more programs than fit."""
    if INTERPRET:
        return SampleTiles(256, 4, 1 if num_rows <= 4 else 2, 256, 4)
    if num_rows * vocab_size <= 2**21:
        return SampleTiles(1024, 4, 1 if num_rows * vocab_size <= 2**20 else 3, 4096, 16)
    if num_rows * vocab_size <= 2**23:
        return SampleTiles(2048, 8, 4, 4096, 16)
    if num_rows * vocab_size <= 2**24:
        return SampleTiles(1024, 4, 8, 4096, 16)
    return SampleTiles(1024, 4, 16, 4096, 16)


class Tiles(NamedTuple):
    """What the first launch leaves of each row: pointers to numbers and to tokens, their strides of a row,
    and how many programs, tiles and groups of tokens there were."""

    parts: Any
    indices: Any
    parts_row: Any
    indices_row: Any
    num_programs: Any
    num_tiles: Any
    num_groups: Any


class MergeSizes(NamedTuple):
    """What the second kernel is compiled for: powers of two of at least a row's tiles and groups; listed
    logits that it reads at once."""

    tiles: int
    groups: int
    chunk: int


class Parts(NamedTuple):
    """What the first launch left of a row, as the second has it: pointers, and sizes."""

    at: Any
    list_at: Any
    num_programs: Any
    num_tiles: Any
    num_groups: Any


@triton.jit
def parts_of(row, tiles):
    """`Parts` of a row, of `Tiles`."""
    wide = row.to(tl.int64)
    at, list_at = tiles.parts + wide * tiles.parts_row, tiles.indices + wide * tiles.indices_row
    return Parts(at, list_at, tiles.num_programs, tiles.num_tiles, tiles.num_groups)


@triton.jit
def sample_tiles_kernel(
    rows,
    tiles,
    TILE: tl.constexpr,
    TILES_EACH: tl.constexpr,
    READS_EARLY: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Records: `LogitRows`, `Tiles`. Grid: (programs, rows), of TILES_EACH tiles each. READS_EARLY: of a
    row's parameters, before the kernels ahead have finished.

    Row of parts: best of each program, of a truncated row of each tile; there also the mass of each tile and
    the maximum of each group. Row of indices: token of each program.
    """
    program, row = tl.program_id(0), tl.program_id(1)
    num_tiles = tl.num_programs(0) * TILES_EACH
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if not READS_EARLY:
            tl.extra.cuda.gdc_wait()
    parameters = load_parameters(row, rows)
    if PDL and READS_EARLY:
        tl.extra.cuda.gdc_wait()
    parts = parts_of(row, tiles)
    logits = row_of(row, rows, parameters.penalty)
    temperature = parameters.temperature
    if is_truncated(parameters, rows.vocab_size):
        scan_truncated(logits, temperature, parts.at, program, num_tiles, TILE, TILES_EACH)
    elif temperature > 0.0:
        scan_drawn(logits, parameters, parts.at, parts.list_at, program, TILE, TILES_EACH, PTX)
    else:
        scan_greedy(logits, parts.at, parts.list_at, program, TILE, TILES_EACH)


@triton.jit
def better(a, token_a, b, token_b):
    """For `tl.reduce`: the larger value and its token, the lower token of equal values."""
    first = (a > b) | ((a == b) & (token_a < token_b))
    return tl.where(first, a, b), tl.where(first, token_a, token_b)


@triton.jit
def merge_row(logits, parameters, parts, SIZES: tl.constexpr):
    """A row's token out of what the first launch left, NO_TOKEN if a logit is NaN or all are -inf."""
    temperature = parameters.temperature
    truncated = is_truncated(parameters, logits.vocab_size)
    tile = tl.arange(0, SIZES.tiles)
    written = tile < tl.where(truncated, parts.num_tiles, parts.num_programs)
    best = tl.load(parts.at + tile, mask=written, other=float("-inf"))
    # Of a truncated row these are no tokens yet.
    tokens = tl.load(parts.list_at + tile, mask=written, other=2147483647)
    maximum, token = tl.reduce((best, tokens), 0, better)
    if truncated:
        mass = tl.load(parts.at + parts.num_tiles + tile, mask=tile < parts.num_tiles, other=0.0)
        total = tl.sum(mass * likelihood(best, maximum, temperature), 0)
        sound = total < float("inf")  # neither infinite nor, where the tile hardly counts, NaN
        total = tl.where(sound, total, 1.0)
        token = draw_truncated(logits, parameters, parts, maximum, total, SIZES.groups, SIZES.chunk)
        token = tl.where(sound, token, NO_TOKEN)
    return tl.where(maximum == float("-inf"), NO_TOKEN, token)


@triton.jit
def merge_tiles_kernel(rows, tiles, out_ptr, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Records: `LogitRows`, `Tiles`, `MergeSizes`. Grid: (rows,)."""
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    parameters = load_parameters(row, rows)
    logits = row_of(row, rows, parameters.penalty)
    token = merge_row(logits, parameters, parts_of(row, tiles), SIZES)
    tl.store(out_ptr + row, token.to(tl.int64))


class Merge(NamedTuple):
    """What the first launch left for the second: its records, and constexprs and launch options."""

    rows: LogitRows
    tiles: Tiles
    options: dict[str, Any]


def _takes_ptx() -> bool:
    """Whether kernels may hold instructions of NVIDIA's: neither in the interpreter nor for AMD."""
    return not INTERPRET and torch.version.hip is None


def launch_tiles(call: SampleCall, reads_early: bool) -> Merge:
    """The first launch, without checks, of a call with rows. ``reads_early``: see `sample_tiles_kernel`."""
    logits = call.logits
    num_rows, vocab_size = logits.shape
    sizes = sample_tiles(num_rows, vocab_size)
    num_programs = triton.cdiv(vocab_size, sizes.tile * sizes.tiles_each)
    num_tiles = num_programs * sizes.tiles_each  # those beyond the vocabulary hold -inf
    num_groups = num_tiles * (sizes.tile // GROUP.value)
    parts = torch.empty(num_rows, 2 * num_tiles + num_groups, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
    rows = LogitRows.of(call)
    tiles = Tiles(parts, indices, parts.stride(0), indices.stride(0), num_programs, num_tiles, num_groups)
    early = early_launch(logits.device)
    launch_kernel(
        sample_tiles_kernel,
        (num_programs, num_rows),
        *(rows, tiles),
        TILE=sizes.tile,
        TILES_EACH=sizes.tiles_each,
        READS_EARLY=reads_early,
        PTX=_takes_ptx(),
        num_warps=sizes.tile_warps,
        **early,
    )
    merge = MergeSizes(next_power_of_2(num_tiles), next_power_of_2(num_groups), sizes.chunk)
    return Merge(rows, tiles, {"SIZES": merge, "num_warps": sizes.chunk_warps, **early})


def sample_tokens(call: SampleCall) -> None:
    """Launch; arguments as in ``custom_ops/step_end/schema.py``."""
    require_launchable(call.logits)
    check_sample_tokens(call)
    num_rows = call.logits.shape[0]
    if num_rows:
        merge = launch_tiles(call, reads_early=False)
        launch_kernel(merge_tiles_kernel, (num_rows,), merge.rows, merge.tiles, call.out, **merge.options)
