"""paged_attention: chooses between the decode and the prefill kernel by shapes and launches it.

The fields of an arguments' record are the kernel's parameters in their order, since passing by keyword takes
twice as long. Constants are ``SPEC``, the call's `Specialisation`, and ``TILING``.
"""

from typing import Any, NamedTuple, Self

import torch

from torchpaged.custom_ops.attention.call import AttentionCall, Specialisation
from torchpaged.custom_ops.attention.check import check_paged_attention
from torchpaged.custom_ops.attention.limits import MAX_DECODE_QUERY_LEN
from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.pools import head_stride
from torchpaged.custom_ops.triton import launching
from torchpaged.custom_ops.triton.compile_together import compile_together
from torchpaged.custom_ops.triton.kernel_store import Launch
from torchpaged.custom_ops.triton.records import Batch, Results
from torchpaged.custom_ops.triton.stored_kernel import KernelRef

_PREFILL = KernelRef(
    "attention.triton.prefill",
    "prefill_kernel",
    unspecialised=("num_reqs", "num_tokens", "num_single", "num_sms"),
)
_DECODE = KernelRef(
    "attention.triton.decode", "decode_kernel", unspecialised=("num_reqs", "num_tokens", "table_row")
)


class Inputs(NamedTuple):
    """Pointers to what is attended, as `AttentionCall` orders them, their strides, and numbers; None where
    the call has none. ``k_head``,
    ``v_head``: None where `Specialisation` says them."""

    q: Any
    k: Any
    v: Any
    slopes: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    tree: Any
    scale: Any
    soft_cap: Any
    q_token: Any
    q_head: Any
    ks_head: Any
    vs_head: Any
    k_head: Any = None
    v_head: Any = None

    @classmethod
    def of(cls, call: AttentionCall) -> Self:
        """Those of a call."""
        q, k, v = call[:3]
        slopes, sinks, *_, tree = call.optional
        scales = call.scales.k_scale, call.scales.v_scale
        strides = q.stride(0), q.stride(1), *map(head_stride, scales)
        return cls(q, k, v, slopes, sinks, *scales, tree, call.scale, call.logits_soft_cap, *strides)


class Parts(NamedTuple):
    """Pointers to the decode kernel's partial results, and to the semaphores of (request, kv head) pairs."""

    acc: Any
    state: Any
    semaphore: Any


class DecodeArguments(NamedTuple):
    """Of the decode kernel."""

    num_reqs: int
    num_tokens: int
    table_row: int
    batch: Batch
    inputs: Inputs
    results: Results
    parts: Parts


class DecodeTiling(NamedTuple):
    """How the decode kernel cuts its work.

    Attributes:
        tile_m, tile_kv: rows and keys of a tile.
        dim_pad, dim_v_pad: columns of a tile of keys and of one of values.
        query_len: no request has more query tokens.
        rows: rows of a tile that are real: group times ``query_len``, padded to a power of two.
        slices: slices of a tile of keys; 0: none.
        reqs: requests scanned at once; ``one_scan``: these are all.
        min_tiles: least tiles of a run.
        parts: partial results merged at once.
        longest: over 0: requests with more query tokens are left to another launch, their rows untouched.
        verticals: with a mask that hides blocks, in each stride those that some head of a kv head sees; tiles
            that none sees are left out. 0: tiles are gone through one after the other.
        holes: tiles may hold keys that no row sees, whose values may be NaN.
    """

    tile_m: int
    tile_kv: int
    dim_pad: int
    dim_v_pad: int
    query_len: int
    rows: int
    slices: int
    reqs: int
    one_scan: bool
    min_tiles: int
    parts: int
    longest: int
    verticals: int
    holes: bool


class PrefillArguments(NamedTuple):
    """Of the prefill kernel."""

    num_reqs: int
    num_tokens: int
    num_single: int
    num_sms: int
    num_kv_heads: int
    batch: Batch
    inputs: Inputs
    results: Results


class PrefillTiling(NamedTuple):
    """How the prefill kernel cuts its work.

    Attributes:
        tile_m, tile_kv, dim_pad, dim_v_pad: as in `DecodeTiling`.
        tokens: query tokens of a tile; times the group at most ``tile_m``.
        skip_decodes: requests with at most so many query tokens are left to a launch of the decode kernel.
        verticals, holes: as in `DecodeTiling`.
        sharing: 1; with a tile for each query head, the query heads that share a kv head. The kernel's kv
            heads, and ``SPEC.group``, are then query heads, and 1.
    """

    tile_m: int
    tile_kv: int
    dim_pad: int
    dim_v_pad: int
    tokens: int
    skip_decodes: int
    verticals: int
    holes: bool
    sharing: int


def paged_attention(call: AttentionCall) -> None:
    """Launch; arguments as in ``custom_ops/attention/schema.py``. Every choice here depends on shapes, never
    on lengths."""
    launching.require_launchable(call.q)
    check_paged_attention(call)
    attend(call)


def attend(call: AttentionCall) -> None:
    """The launches of a checked call."""
    launching.require_fp8(call.k_cache)
    launching.require_fp8(call.out, "output")
    if not call.num_reqs:
        call.empty()
        return
    if not call.q.shape[0]:
        return
    call = call.for_launch()
    spec, longest = Specialisation.of(call), call.max_query_len
    if longest <= MAX_DECODE_QUERY_LEN and longest * call.group <= config.MAX_DECODE_ROWS:
        _decode(call, spec, longest)()
        return
    skip = config.decode_len_in_mixed(call.group, call.num_reqs, call.q.shape[0], longest)
    # prepared ahead: the launch must follow that of the other queries with no kernel between them
    decode = _decode(call, spec, skip, skip) if skip else None
    prefill = _prefill(call, spec, skip)
    if decode is not None:
        key = (call.q.device, call.q.dtype, call.q.shape[1], spec, longest, skip)
        compile_together(key, call.q.device, prefill, decode)
    prefill()
    if decode is not None:
        decode()


def _prefill(call: AttentionCall, spec: Specialisation, skip: int) -> Launch:
    """What launches the prefill kernel; ``skip``: longest query that is left to a decode launch behind it."""
    device, num_reqs, num_tokens = call.q.device, call.num_reqs, call.q.shape[0]
    sharing = spec.group if config.heads_apart(spec, call.max_query_len) else 1
    spec = spec._replace(group=spec.group // sharing, num_kv_heads=spec.num_kv_heads * sharing)
    tiles = config.prefill_tiles(
        max(spec.dim, spec.dim_v),
        spec.group,
        call.q.element_size(),
        call.max_query_len,
        call.capacity,
        config.has_large_tiles(device),
        spec.tree and (spec.low or spec.alibi),
    )
    if spec.block_sparse is not None:
        tiles = tiles._replace(keys=config.keys_of_a_block(spec.block_sparse.block_size, tiles.keys))
    tokens = tiles.rows // spec.group
    if skip:
        single, shared = config.programs_for_longer(num_reqs, num_tokens, skip, tokens)
    else:
        single, shared = num_tokens // tokens + num_reqs, 0
    (*k_strides, k_head), (*v_strides, v_head) = spec.k_strides, spec.v_strides
    arguments = PrefillArguments(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_single=single,
        num_sms=launching.num_sms(device),
        num_kv_heads=spec.num_kv_heads,
        batch=Batch(*call[3:6], table_row=call.block_table.stride(0)),
        inputs=Inputs.of(call)._replace(k_head=k_head, v_head=v_head),
        results=Results.of(call),
    )
    verticals, holes = config.hidden_tiles(spec, tiles.keys)
    tiling = PrefillTiling(
        tile_m=tiles.rows,
        tile_kv=tiles.keys,
        **config.padded_widths(spec.dim, spec.dim_v, spec.kv_dtype.itemsize),
        tokens=tokens,
        skip_decodes=skip,
        verticals=verticals,
        holes=holes,
        sharing=sharing,
    )
    options = {
        # one compile for any number of heads, and their stride
        "SPEC": spec._replace(num_kv_heads=0, k_strides=tuple(k_strides), v_strides=tuple(v_strides)),
        "TILING": tiling,
        **launching.early_launch(device),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    return Launch(_PREFILL, ((single + shared) * spec.num_kv_heads,), arguments, options)


def _decode(call: AttentionCall, spec: Specialisation, max_query_len: int, longest: int = 0) -> Launch:
    """What launches the decode kernel; every allocation is made here, ahead of the launch. ``longest``:
    requests with more query tokens are left to the prefill launch ahead; 0: there is none."""
    device, num_reqs = call.q.device, call.num_reqs
    query_len = launching.next_power_of_2(max_query_len)
    rows = launching.next_power_of_2(query_len * spec.group)
    tiles = config.decode_tiles(
        max(spec.dim, spec.dim_v), rows, spec.kv_dtype.itemsize, call.q.element_size()
    )
    programs = config.num_programs(device, tiles)
    reqs = next((size for size in config.SCANS if num_reqs <= size), config.SCANS[-1])
    verticals, holes = config.hidden_tiles(spec, tiles.keys)
    tiling = DecodeTiling(
        tile_m=tiles.rows,
        tile_kv=tiles.keys,
        **config.padded_widths(spec.dim, spec.dim_v, spec.kv_dtype.itemsize),
        query_len=query_len,
        rows=rows,
        slices=tiles.slices,
        reqs=reqs,
        one_scan=num_reqs <= reqs,
        min_tiles=tiles.min_tiles,
        parts=config.merged_parts(spec.dim_v),
        longest=longest,
        verticals=verticals,
        holes=holes,
    )
    arguments = DecodeArguments(
        num_reqs=num_reqs,
        num_tokens=call.q.shape[0],
        table_row=call.block_table.stride(0),
        batch=Batch(*call[3:6]),
        inputs=Inputs.of(call),
        results=Results.of(call),
        parts=Parts(
            acc=torch.empty(programs * 2 * rows * tiling.dim_v_pad, dtype=torch.float32, device=device),
            state=torch.empty(programs * 4 * rows, dtype=torch.float32, device=device),
            semaphore=call.with_semaphore().semaphore,
        ),
    )
    options = {"SPEC": spec, "TILING": tiling, "PDL": launching.launches_early(device)}
    return Launch(_DECODE, (programs,), arguments, options | config.decode_options(device, tiles))
