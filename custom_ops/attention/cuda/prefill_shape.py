"""How ``prefill.cu`` is cut for a call: tiles, stages, parts and constants, from shapes and dtypes alone."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda.call_params import call_constants
from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.pools import FP8

PREFILL = Table.of_file("attention/cuda/prefill/prefill_config.cuh")
MAX_DIM = 256
#: Widths of keys and values that fp8 queries go with.
FP8_QUERY_WIDTHS = ((64, 64), (128, 128), (256, 256))
_SHARED_BYTES = 226 << 10
_MOST_RAW_STAGES = 8
_WORTH_STEPS = 8  # SPLIT_WORTH_STEPS of prefill_scheduler.cuh
MAX_CTA_SPLITS = 5  # of cascade_scheduler.cuh
#: CTA_PARTS of prefill_scheduler.cuh: splits for each CTA that there is room for.
CTA_PARTS = 3


@dataclass(frozen=True)
class PrefillShape:
    """How the prefill kernel is cut, from the widths of keys and values alone.

    Attributes:
        groups: consumer warpgroups of 64 packed query rows; 2, or 3 where a row's state is small.
        keys: of a step.
        k_stages, v_stages: steps of keys and of values that are on their way or in use.
        q_stages: tiles of queries; 2 where there is room.
        raw_stages: steps of keys or of values of an fp8 cache that are on their way or being converted.
    """

    groups: int
    keys: int
    k_stages: int
    v_stages: int
    q_stages: int
    raw_stages: int = 0

    @property
    def rows(self) -> int:
        """Packed query rows of a tile."""
        return self.groups * 64

    @property
    def threads(self) -> int:
        """Of a CTA; one warpgroup is the producer's."""
        return (self.groups + 1) * 128


@functools.cache
def prefill_shape(dim: int, dim_v: int, wide: bool = True) -> PrefillShape:
    """The cut for keys of ``dim`` and values of ``dim_v`` columns; not ``wide``: two warpgroups at most."""
    groups = 3 if wide and max(dim, dim_v) <= 64 else 2
    keys = 128 if dim <= 192 and dim_v <= 128 else 64
    for q_stages in (2, 1):
        left, k_stages, v_stages = _SHARED_BYTES - q_stages * groups * 64 * dim * 2, 0, 0
        # in turns: keys are asked for first
        while left >= (need := keys * 2 * (dim if k_stages == v_stages else dim_v)):
            left -= need
            k_stages, v_stages = (
                (k_stages + 1, v_stages) if k_stages == v_stages else (k_stages, v_stages + 1)
            )
        if k_stages >= 3 and v_stages >= 2:
            break
    return PrefillShape(groups, keys, k_stages, v_stages, q_stages)


@functools.cache
def prefill_shape_fp8(dim: int, dim_v: int) -> PrefillShape:
    """The same over an fp8 cache, whose numbers come as they are and are converted into the stages: two of
    each, and as many more that still come."""
    for keys in (128, 64) if dim <= 192 and dim_v <= 128 else (64,):
        left = _SHARED_BYTES - keys * 4 * (dim + dim_v)
        for q_stages in (2, 1):
            raw = (left - q_stages * 128 * dim * 2) // (keys * max(dim, dim_v))
            if raw >= 3 or (keys == 64 and q_stages == 1):
                return PrefillShape(2, keys, 2, 2, q_stages, min(raw, _MOST_RAW_STAGES))
    raise AssertionError("the last cut is taken")


@functools.cache
def prefill_shape_fp8_queries(dim: int, dim_v: int, wide: bool) -> PrefillShape:
    """The same with fp8 queries: keys are read as they come, values are turned on their way. ``raw_stages``
    are of values alone; ``wide``: steps of 192 keys where a head is 128 wide."""
    if wide and dim == dim_v == 128:
        return PrefillShape(2, 192, 3, 2, 2, 2)
    groups, keys = 2, 128 if max(dim, dim_v) <= 128 else 64
    left = _SHARED_BYTES - 2 * groups * 64 * dim
    stages = min(left // (keys * (dim + 2 * dim_v)), 4)
    return PrefillShape(groups, keys, stages, stages, 2, stages)


def shape_for(spec: Specialisation) -> PrefillShape:
    """The cut of a specialisation: masks or scores that cost registers narrow it."""
    if spec.fp8_queries:
        # blocks are whole in the steps of either cut, and at most one for each of 16 lanes
        wide = spec.plain and spec.block_size in (16, 32, 64)
        return prefill_shape_fp8_queries(spec.dim, spec.dim_v, wide)
    if spec.kv_dtype in FP8:
        return prefill_shape_fp8(spec.dim, spec.dim_v)
    return prefill_shape(spec.dim, spec.dim_v, wide=spec.plain)


def refuse(spec: Specialisation, compute: tuple[int, int], *, scale: float = 1.0) -> str | None:
    """Why the kernel can't take these numbers, or None. ``compute``: the device's compute capability."""
    dtype, kv_dtype, fp8_queries = spec.dtype, spec.kv_dtype, spec.fp8_queries
    widths, block_size = (spec.dim, spec.dim_v), spec.block_size
    if compute != (9, 0):
        return f"compute capability {compute[0]}.{compute[1]}: the kernel is written for 9.0"
    if dtype not in (torch.bfloat16, torch.float16) or kv_dtype not in (dtype, *FP8):
        return f"dtypes {dtype} and {kv_dtype}"
    if fp8_queries and kv_dtype != torch.float8_e4m3fn:
        return f"fp8 queries over a cache of {kv_dtype}: both are e4m3"
    if fp8_queries and widths not in FP8_QUERY_WIDTHS:
        return f"fp8 queries of head_dim {spec.dim}/{spec.dim_v}"
    if any(width % (32 if width > 128 else 16) or not 32 <= width <= MAX_DIM for width in widths):
        return f"head_dim {spec.dim}/{spec.dim_v}"
    keys = shape_for(spec.without_features()).keys
    if block_size % 8 or keys % block_size:
        return f"block_size {block_size}: not a divisor of {keys} that is a multiple of 8"
    if not 1 <= spec.group <= prefill_shape(spec.dim, spec.dim_v, wide=False).rows:
        return f"{spec.group} query heads per kv head"
    if not scale > 0:
        return f"scale {scale}: a row's largest score is sought before it is scaled"
    return None


def is_slower(call: AttentionCall, spec: Specialisation, programs: int) -> str | None:
    """Why Triton's kernel is the faster one for these shapes, or None. ``programs``: CTAs."""
    capacity = call.capacity
    shape = prefill_shape(spec.dim, spec.dim_v)
    tiles = most_tiles(call.q.shape[0], call.num_reqs, shape.rows // spec.group) * spec.num_kv_heads
    if capacity <= shape.keys and tiles * 2 <= programs:
        return (
            f"at most {capacity} keys and {tiles} tiles: the kernel takes longer to begin and end than "
            "Triton's for all"
        )
    return None


def is_even(call: AttentionCall, spec: Specialisation, programs: int) -> bool:
    """Whether the CTAs of one launch end at about one time however lengths differ: long tiles may be cut, two
    multiprocessors for each, or the block table has no room for any."""
    if call.capacity // shape_for(spec).keys < _WORTH_STEPS:
        return True
    return not spec.fp8_results and _tiles(spec, call.q.shape[0], call.num_reqs) * 2 <= programs


class Mode(NamedTuple):
    """What a launch is compiled for besides the call's `Specialisation`.

    Attributes:
        short: requests of up to so many query tokens are left to a decode launch behind this one; 0: none.
        split: few tiles may be cut into parts, for ``paged_prefill_merge`` behind this one.
        cascade: the requests are groups' prefixes, merged with what a decode launch behind leaves.
        every_lane: for tests: all lanes of a warp arrive at barriers, where one does for its warp, so that
            racecheck, which follows each lane for itself, sees the order.
    """

    short: int = 0
    split: bool = False
    cascade: bool = False
    every_lane: bool = False


#: One launch of whole tiles.
WHOLE = Mode()


def prefill_config(spec: Specialisation, mode: Mode = WHOLE) -> Config:
    """The constants of ``prefill.cu``."""
    shape = shape_for(spec)
    values = {
        **call_constants(spec),
        "HALF": spec.dtype == torch.float16,
        "KV_BYTES": spec.kv_dtype.itemsize,
        "SCALES": spec.scales,
        "Q_FP8": spec.fp8_queries,
        "WARPGROUPS": shape.groups,
        "TILE_KV": shape.keys,
        "K_STAGES": shape.k_stages,
        "V_STAGES": shape.v_stages,
        "Q_STAGES": shape.q_stages,
        "RAW_STAGES": shape.raw_stages,
        "DECODE_LEN": mode.short,
        "SPLIT": mode.split,
        "CASCADE": mode.cascade,
        "EVERY_LANE": mode.every_lane,
    }
    return PREFILL.config(values, exact=True)


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory of a CTA: the stages, the tiles of queries and what waits to be converted."""
    stages = config["TILE_KV"] * (config["K_STAGES"] * config["DIM"] + config["V_STAGES"] * config["DIM_V"])
    widest = config["DIM_V"] if config["Q_FP8"] else max(config["DIM"], config["DIM_V"])
    raw = config["RAW_STAGES"] * config["TILE_KV"] * widest
    multiplied = stages + config["Q_STAGES"] * config["WARPGROUPS"] * 64 * config["DIM"]
    return multiplied * (1 if config["Q_FP8"] else 2) + raw


def most_tiles(num_tokens: int, num_reqs: int, tokens: int) -> int:
    """Tiles of ``tokens`` query tokens of one kv head that so many query tokens of so many requests take at
    most."""
    begun = min(num_reqs, num_tokens)
    return (num_tokens - begun) // tokens + begun


def may_split(call: AttentionCall, spec: Specialisation, short: int, programs: int) -> bool:
    """Whether a call's tiles may be worth cutting, by shapes: the block table has room for some steps, and
    tiles are not so many that whole ones give all ``programs`` work to the end.

    Of queries that a decode could have, 4 for each of the programs may be; of chunks 1; of prompts that the
    table has no context for, a half. With decodes no more than 4 requests are thought to be long, and a half
    is the bound, since `late_ctas` serve others better. There are decodes if more than half of the room for
    query tokens is empty. Whatever there is, results are right. Results of fp8 are never cut: their merge has
    not run on a GPU.
    """
    num_reqs, num_tokens, longest = call.num_reqs, call.q.shape[0], call.max_query_len
    if spec.fp8_results or call.capacity // shape_for(spec).keys < _WORTH_STEPS:
        return False
    decodes = short > 0 and num_tokens * 2 < num_reqs * longest
    tiles = _tiles(spec, num_tokens, min(num_reqs, 4) if decodes else num_reqs)
    if longest <= MAX_DECODE_QUERY_LEN and not decodes:
        return tiles <= programs * 4
    return tiles * (2 if decodes or call.capacity < 2 * longest else 1) <= programs


def _tiles(spec: Specialisation, num_tokens: int, num_reqs: int) -> int:
    """Tiles of all kv heads at most."""
    return most_tiles(num_tokens, num_reqs, shape_for(spec).rows // spec.group) * spec.num_kv_heads


def partial_numbers(shape: PrefillShape, dim_v: int, programs: int, tiles: int = 0) -> int:
    """Numbers of 4 bytes that splits' partial results take, and what is said of the splits: PARTIAL_FLOATS
    and struct SplitTiles of prefill_params.cuh. ``tiles``: with suffixes, tiles of all kv heads at most; 0:
    without."""
    part = (dim_v // 8 + 1) * (shape.threads - 128) * 4
    parts = programs * (MAX_CTA_SPLITS if tiles else CTA_PARTS)
    return parts * part + 16 + (tiles or parts) * 8


def merge_items(shape: PrefillShape, dim_v: int) -> int:
    """CTAs of the merge launch that a tile in parts keeps busy: ITEMS of prefill_merge.cu."""
    return shape.groups * -(-dim_v // 32)


def late_ctas(programs: int, short: int, split: bool) -> int:
    """How many of the ``programs`` CTAs are launched behind decode, where there is one (``short``: as in
    `prefill_config`): a third. So decode has multiprocessors from its start, whatever the lengths are, and
    prefill takes them when decode no longer needs them. Parts of tiles do not wait for that."""
    return programs // 3 if short and not split else 0
