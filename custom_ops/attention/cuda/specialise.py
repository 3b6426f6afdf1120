"""Which specialisation of ``decode.cu`` serves a call: constants and launch shape, from shapes and dtypes.

The same for every length, so that a graph serves all of them. Figures behind the choices: docs/log/decode.md.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.cuda.call_params import call_constants, refuse_sinks
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.pools import FP8

DECODE = Table.of_file("attention/cuda/decode/decode_config.cuh")
_FLOATS = (torch.bfloat16, torch.float16)
MAX_ROWS = 32  # query rows of a pair: 4 n-tiles of 8


def _padded(chunks: int) -> int:
    """16-byte chunks of a key in shared memory; as ``padded`` in decode_params.cuh."""
    return -(-chunks // 8) * 8 if chunks >= 8 else 8 if chunks > 4 else 4 if chunks > 2 else 2


@dataclass(frozen=True)
class DecodeShape:
    """How the decode kernel is cut.

    Attributes:
        warps: per CTA; each owns a part of a tile's keys.
        keys: of one warp per tile, a multiple of 16.
        stages: tiles on their way or in use, per warp.
        ctas_per_sm: CTAs on one multiprocessor; the grid is that times the multiprocessors.
        min_tiles: least tiles of a CTA's run; shorter runs cost more to merge than they save.
        cluster: CTAs that can write into each other's shared memory, a power of two; 1 where there are none.
        prefetch: stages that may be filled with keys before the query tokens' own while the kernels ahead
            still run.
        prefetch_l2: tiles behind these that are asked for into L2 meanwhile.
        pair_heads: kv heads of a pair, 1 or 2.
        max_registers: most registers of a thread; 0: as many as leave room for ``ctas_per_sm``.
        near: tiles that a border of two runs may move to an end of a pair.
        grouped: pairs may have so many splits that they are merged in two steps.
        ask_early: a run's next queries are asked for while the warps' states of the last pair meet.
    """

    warps: int
    keys: int
    stages: int
    ctas_per_sm: int
    min_tiles: int
    cluster: int = 1
    prefetch: int = 2
    prefetch_l2: int = 1
    pair_heads: int = 1
    max_registers: int = 0
    near: int = 0
    ask_early: bool = False
    grouped: bool = False

    def stage_bytes(self, dim: int, dim_v: int, kv_bytes: int) -> int:
        """Shared memory of one warp's stage; as ``STAGE_BYTES`` in decode_params.cuh."""
        return (
            self.keys * 16 * sum(_padded(self.pair_heads * width * kv_bytes // 16) for width in (dim, dim_v))
        )

    def shared_bytes(self, dim: int, dim_v: int, kv_bytes: int, rows: int) -> int:
        """Dynamic shared memory of a CTA: the stages, and what others of the cluster send."""
        stages = self.warps * self.stages * self.stage_bytes(dim, dim_v, kv_bytes)
        return stages + (self.cluster - 1) * rows * (dim_v + 2) * 4


#: Splits of a pair from which they are merged in two steps; as ``SplitGroups::FROM`` in decode_requests.cuh.
_GROUPED_FROM = 17

#: Query rows of a pair times bytes of a key from which they are: partials that take one CTA long to read. 8
#: rows of 128 in 16 bits gained, 3 rows of 64 lost.
_GROUPED_BYTES = 2048
#: What a CTA needs besides its stages (the warps' states), and what the hardware keeps per CTA.
_OTHER_SHARED = 2304 + 1024


def _preferred(width: int, kv_bytes: int, rows: int, pairs: int, sms: int, heads: int) -> DecodeShape:
    if rows > 16:  # many accumulators: registers for one CTA of 8 warps
        return DecodeShape(warps=8, keys=32 if width <= 128 else 16, stages=3, ctas_per_sm=1, min_tiles=1)
    if heads == 2:
        if pairs * 2 <= sms:
            return DecodeShape(warps=4, keys=16, stages=3, ctas_per_sm=2, min_tiles=2)
        return DecodeShape(warps=8, keys=16, stages=3, ctas_per_sm=1, min_tiles=1)
    # two CTAs to a pair meet in shared memory; more gain nothing by it
    cluster = 2 if pairs and sms // pairs in (2, 3) else 1
    if kv_bytes == 1:
        return DecodeShape(warps=8, keys=32, stages=2, ctas_per_sm=1, min_tiles=1, cluster=cluster)
    # larger tiles where keys are narrow, unless so few pairs had too few tiles to share out among all
    if pairs <= sms:
        keys = 32 if width <= 128 and cluster == 1 and pairs * 8 > sms else 16
        # One request of a small model: attention is so short that it must begin while the products ahead
        # run, which need the other registers. NVRTC 13.0 takes 220 here. With 3 pairs this gained nothing;
        # wider heads and more pairs were not measured in whole layers (docs/log/decode.md).
        most = 168 if width <= 128 and 8 <= pairs <= sms // 8 and rows <= 4 else 0
        return DecodeShape(
            warps=8,
            keys=keys,
            stages=3,
            ctas_per_sm=1,
            min_tiles=1,
            cluster=cluster,
            max_registers=most,
            grouped=pairs * _GROUPED_FROM <= sms and rows * width >= _GROUPED_BYTES,
        )
    if width <= 128:
        return DecodeShape(warps=3, keys=32, stages=2, ctas_per_sm=4, min_tiles=1)
    # runs of several pairs: fewer of them shared, and no wait for queries between them
    if pairs <= 4 * sms:
        return DecodeShape(warps=4, keys=16, stages=3, ctas_per_sm=2, min_tiles=2, near=1, ask_early=True)
    return DecodeShape(warps=4, keys=16, stages=2, ctas_per_sm=3, min_tiles=2, near=1, ask_early=True)


def pair_heads(spec: Specialisation, head_rows: int, head_pairs: int, sms: int) -> int:
    """Kv heads of a pair: two where many narrow heads lie side by side, so that twice the bytes are read in
    one piece.

    Their query rows must share the 8 columns of a tensor core's tile, or fill a tile each. ``head_rows``:
    query rows of a kv head; ``head_pairs``: (request, kv head) pairs; ``sms``: multiprocessors.
    """
    together = spec.k_strides[2] == spec.dim and spec.v_strides[2] == spec.dim_v
    fits = spec.num_kv_heads % 2 == 0 and (head_rows <= 4 or head_rows == 8)
    narrow = spec.kv_dtype.itemsize == 2 and max(spec.dim, spec.dim_v) <= 64
    return 2 if together and fits and narrow and head_pairs * 3 >= sms else 1


def shape_for(
    spec: Specialisation, max_query_len: int, pairs: int, sms: int, shared_per_sm: int
) -> DecodeShape:
    """The shape of a specialisation; arguments as in `decode_config`."""
    rows = spec.group * _power_of_2(max_query_len)
    heads = pair_heads(spec, rows, pairs, sms)
    widths = spec.dim, spec.dim_v, spec.kv_dtype.itemsize
    return decode_shape(*widths, rows, pairs, sms, shared_per_sm, heads)


@functools.cache
def decode_shape(
    dim: int,
    dim_v: int,
    kv_bytes: int,
    head_rows: int,
    head_pairs: int,
    sms: int,
    shared_per_sm: int,
    heads: int = 1,
) -> DecodeShape:
    """The shape for these widths (in numbers), bytes per cached number, query rows per kv head, (request, kv
    head) pairs, multiprocessors.

    The preferred shape, cut down until its CTAs fit the shared memory of a multiprocessor (bytes). ``heads``:
    `pair_heads`.
    """
    rows, pairs = heads * head_rows, head_pairs // heads
    shape = dataclasses.replace(
        _preferred(heads * max(dim, dim_v) * kv_bytes, kv_bytes, rows, pairs, sms, heads), pair_heads=heads
    )
    # a warp's state meets the others in a stage
    while rows * dim_v * 4 > shape.stage_bytes(dim, dim_v, kv_bytes):
        shape = dataclasses.replace(shape, keys=shape.keys * 2, warps=max(shape.warps // 2, 2))
    while (
        shape.ctas_per_sm * (shape.shared_bytes(dim, dim_v, kv_bytes, rows) + _OTHER_SHARED) > shared_per_sm
    ):
        if shape.cluster > 1:
            shape = dataclasses.replace(shape, cluster=shape.cluster // 2)
        elif shape.stages > 2:
            shape = dataclasses.replace(shape, stages=shape.stages - 1)
        elif shape.ctas_per_sm > 1:
            shape = dataclasses.replace(shape, ctas_per_sm=shape.ctas_per_sm - 1)
        else:
            shape = dataclasses.replace(shape, warps=shape.warps // 2)
    return shape


def team(pairs: int, ctas: int) -> int:
    """CTAs that read the pairs of a request in step: the largest divisor of its ``pairs`` that idles at most
    a twentieth of ``ctas``.

    Device memory reads neighbouring heads of a block faster at one time than at different times.
    """
    return max(
        size for size in range(1, pairs + 1) if pairs % size == 0 and ctas // size * size * 20 >= ctas * 19
    )


def one_warp_schedules(num_reqs: int, ctas_per_sm: int) -> bool:
    """Whether one warp finds the run for its CTA, instead of each for itself: where so many ask for the same
    lengths that L2 is slow to answer. Up to 64 requests a warp can do it by itself."""
    return num_reqs > 64 or ctas_per_sm >= 3


def asked(num_reqs: int) -> int:
    """Requests of a lane whose lengths are asked for before the first is looked at: all of up to 256."""
    return max(2, min(8, _power_of_2(-(-num_reqs // 32))))


def refuse(spec: Specialisation, rows: int, compute: tuple[int, int], keys: int = 0) -> str | None:
    """Why the decode kernel can't take these numbers, or None. ``rows``: query rows of a kv head;
    ``compute``: the device's compute capability; ``keys``: of a warp, as `decode_shape` chose them."""
    dim, dim_v, block_size = spec.dim, spec.dim_v, spec.block_size
    if spec.dtype not in _FLOATS or spec.kv_dtype not in (spec.dtype, *FP8):
        return f"dtypes {spec.dtype} and {spec.kv_dtype}"
    if spec.kv_dtype in FP8 and compute < (8, 9):
        return f"fp8 conversions at compute capability {compute}"
    if spec.fp8_results and compute < (8, 9):
        return f"fp8 results at compute capability {compute}"
    if dim % 16 or dim_v % 16 or max(dim, dim_v) > 256 or block_size & (block_size - 1):
        return f"head_dim {dim}/{dim_v} or block_size {block_size}"
    if _too_many(rows, dim_v):
        return f"{rows} query rows per kv head"
    if keys > 32 * block_size:
        return f"block_size {block_size}: a warp's {keys} keys would lie in more than 32 blocks"
    return None


def _too_many(rows: int, dim_v: int) -> bool:
    return rows > MAX_ROWS or -(-rows // 8) * dim_v > 512


def too_many_rows(spec: Specialisation, max_query_len: int) -> bool:
    """Whether the decode kernel has no registers for the query rows of a kv head."""
    return _too_many(spec.group * _power_of_2(max_query_len), spec.dim_v)


def many_rows(spec: Specialisation, max_query_len: int) -> bool:
    """Whether its registers hold so few keys beside the query rows that prefill's kernel, for which they are
    a quarter of a tile, is the faster one (docs/log/random_batches.md)."""
    return spec.group * _power_of_2(max_query_len) > 24 and spec.dim_v > 64


def unsupported(call: AttentionCall, spec: Specialisation, max_query_len: int, num_reqs: int) -> str | None:
    """Why the decode kernel can't take this call, or None. Checked arguments; shapes, dtypes, strides and
    addresses only. ``max_query_len``: of the requests that it is to take."""
    if call.q.device.type != "cuda":
        return f"device {call.q.device.type}"
    reason = _refused(spec, max_query_len, num_reqs, call.q.device.index or 0) or refuse_sinks(call, spec)
    if reason is not None:
        return reason
    aligned = not (call.k_cache.data_ptr() % 16 or call.v_cache.data_ptr() % 16)
    for rows in (call.q, call.out):  # four numbers at once
        aligned = aligned and not any(x % 4 for x in (*rows.stride()[:2], rows.data_ptr() // rows.itemsize))
    if not aligned:
        return _UNALIGNED
    return None


@functools.cache
def _refused(spec: Specialisation, max_query_len: int, num_reqs: int, index: int) -> str | None:
    """What of `unsupported` a specialisation tells, asked once."""
    rows, compute = spec.group * _power_of_2(max_query_len), gpu.capability(index)
    reason = refuse(spec, rows, compute)
    if reason is not None:
        return reason
    sms, shared_per_sm = gpu.num_sms(index), gpu.shared_per_sm(index)
    shape = shape_for(spec, max_query_len, num_reqs * spec.num_kv_heads, sms, shared_per_sm)
    reason = refuse(spec, rows, compute, shape.keys)
    strides, itemsize = spec.k_strides + spec.v_strides, spec.kv_dtype.itemsize
    if reason is None and any(stride * itemsize % 16 for stride in strides):
        reason = _UNALIGNED
    return reason


_UNALIGNED = "strides or addresses that are not multiples of 16 bytes (cache) or 4 numbers (q, out)"


_STRIDES = ("K_BLOCK", "K_SLOT", "K_HEAD", "V_BLOCK", "V_SLOT", "V_HEAD")


def decode_config(
    spec: Specialisation,
    max_query_len: int,
    pairs: int,
    *,
    early: bool,
    sms: int,
    shared_per_sm: int,
    longest: int = 0,
) -> tuple[Config, DecodeShape]:
    """The constants of ``decode.cu`` for a call, and its shape.

    ``max_query_len``: of the requests that it is to take; ``pairs``: requests times kv heads; ``early``:
    whether kernels begin while the one ahead runs; ``longest``: requests with more query tokens are left to
    the prefill launch ahead; 0: there is none.
    """
    query_len, num_reqs = _power_of_2(max_query_len), pairs // spec.num_kv_heads
    shape = shape_for(spec, max_query_len, pairs, sms, shared_per_sm)
    if not early:  # compute capability 9.0 brought clusters, and kernels that begin while the one ahead runs
        shape = dataclasses.replace(shape, cluster=1, max_registers=0)
    cut = {name.upper(): value for name, value in vars(shape).items()}
    cut["WARP_KEYS"] = cut.pop("KEYS")
    num_pairs = spec.num_kv_heads // shape.pair_heads  # of a request
    values = {
        **call_constants(spec),
        **cut,
        **dict(zip(_STRIDES, spec.k_strides + spec.v_strides, strict=True)),
        "QUERY_LEN": query_len,
        "KV_BYTES": spec.kv_dtype.itemsize,
        "Q_HALF": spec.dtype == torch.float16,
        "HALF": spec.dtype == torch.float16 or spec.kv_dtype in FP8,
        "TREE": spec.tree and query_len > 1,
        "SAME_MASK": query_len == 1,
        "SCALES": spec.scales,
        "PDL": early,
        "DECODE_LEN": longest,
        "ONE_WARP_SCHEDULES": one_warp_schedules(num_reqs, shape.ctas_per_sm),
        "ASKED": asked(num_reqs),
        "PREFETCH": min(shape.prefetch, shape.stages - 1),
        "TEAM": 1 if shape.cluster > 1 else team(num_pairs, shape.ctas_per_sm * sms),
    }
    return DECODE.config(values), shape


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
