"""Launches of ``delta_pass.cu``, which goes from chunk to chunk of long rows of gated delta nets and of Kimi
delta attention, in place of Triton's kernel; which calls it takes, by shapes, dtypes, strides and
addresses."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.cuda import gpu, specialised
from torchpaged.custom_ops.cuda.config import Config, Table
from torchpaged.custom_ops.cuda.loaded_kernel import address
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.cuda.routes import not_hopper, unaligned
from torchpaged.custom_ops.cuda.tensor_map import tensor_map
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.custom_ops.state.cuda.delta_chunks import KEY_DIM

if TYPE_CHECKING:
    from torchpaged.custom_ops.state.triton.records import Chunks

VALUE_DIMS = (64, 128)
#: Tokens of the longest row from which on few heads are cut into segments, as measured on an H200
#: (docs/log/state_hopper.md).
CUT = 3072
#: Segments of keys that decay one by one that must fit side by side (docs/log/state_keys.md).
SEGMENTS = 4


class PassSpec(NamedTuple):
    """What a kernel is compiled for; the constants of the same names."""

    value_dim: int
    num_heads: int
    group: int
    groups: int
    short: int
    state_float: bool
    joined: bool = False
    ends: bool = False
    by_key: bool = False

    @property
    def shared_bytes(self) -> int:
        """Stages of rows, squares of tokens, factors and barriers; results, twice."""
        squares, results = (3 + self.groups, 0) if self.ends else (6 + self.groups, 2 * self.groups)
        stages, factors = (2, 2 * 8192 + 2048) if self.by_key else (3, 1024)
        return stages * (squares * 8192 + factors) + results * 8192

    @property
    def tiles(self) -> int:
        """CTAs of a row or segment and head."""
        return (self.value_dim + (KEY_DIM if self.ends else 0)) // (64 * self.groups)

    def config(self) -> Config:
        """The constants."""
        return DELTA_PASS.of(self, exact=True, SHARED_BYTES=self.shared_bytes)


DELTA_PASS = Table.of_file("state/cuda/delta_pass_config.cuh")


def why_not(call: LinearAttentionCall, capability: tuple[int, int]) -> str | None:
    """Why the kernel for Hopper can't take the long rows of a call, or None."""
    if reason := not_hopper(capability):
        return reason
    if not call.delta_rule or not call.normalize:
        return "no delta rule, or keys that are not normalised"
    if call.q.shape[2] != KEY_DIM or call.v.shape[2] not in VALUE_DIMS:
        return f"states of {call.q.shape[2]} x {call.v.shape[2]}"
    if any(x.dtype != torch.bfloat16 for x in (call.v, call.out)):
        return f"{call.v.dtype}, out of {call.out.dtype}"
    if call.state.dtype not in (torch.bfloat16, torch.float32):
        return f"states of {call.state.dtype}"
    return unaligned(("out", call.out, 2))


def launch(
    call: LinearAttentionCall,
    made: Tensor | Chunks,
    short: int,
    joined: Tensor | None = None,
    segment: int | None = None,
    ends: bool = False,
) -> None:
    """Launch for a call that `why_not` lets pass, whose keys, queries and values are read 16 bytes at a time.
    ``made``: by `delta_chunks.launch`, or, of keys that decay one by one, by `key_chunks.launch`; the last
    arguments are those of Triton's kernel."""
    q, k, v, state, out = call.q, call.k, call.v, call.state, call.out
    by_key = not isinstance(made, Tensor)
    rows, given = {"v": v, "out": out}, {}
    if isinstance(made, Tensor):
        given["records"] = made.data_ptr()
    else:
        q, k, rows["known"] = (x.transpose(0, 1) for x in (made.queries, made.keys, made.known))
        rows |= {"scores": made.scores.transpose(0, 1), "solved": made.solved.transpose(0, 1)}
        given |= {name: getattr(made, name).data_ptr() for name in ("since", "left", "decay")}
        given |= {name: rows[name].data_ptr() for name in ("known", "scores", "solved")}
    rows |= {"q": q, "k": k}
    num_tokens, num_heads, value_dim = v.shape
    num_reqs = call.state_slots.shape[0]
    places = num_reqs if joined is None else joined.shape[0]
    index = out.device.index or 0
    parts = places if joined is None or segment is None else max(num_tokens // segment, num_reqs)
    wide = value_dim == 128 and (ends or 2 * parts * num_heads > gpu.num_sms(index))
    spec = PassSpec(
        value_dim=value_dim,
        num_heads=num_heads,
        group=num_heads // q.shape[1],
        groups=2 if wide else 1,
        short=short,
        state_float=state.dtype == torch.float32,
        joined=joined is not None,
        ends=ends,
        by_key=by_key,
    )
    if value_dim == 128 and not ends:  # other numbers of rows take the other form: both are compiled at once
        specialised.kernel("delta_pass.cu", "delta_pass", spec._replace(groups=3 - spec.groups), index)
    params = struct_of("delta_pass.cu")(
        **{f"of_{name}": _map(x.data_ptr(), tuple(x.shape), x.stride()[:2]) for name, x in rows.items()},
        **{name: x.data_ptr() for name, x in (("q", q), ("k", k), ("v", v), ("state", state), ("out", out))},
        **given,
        joined=address(joined),
        slots=call.state_slots.data_ptr(),
        lens=call.seq_lens.data_ptr(),
        starts=call.query_start_loc.data_ptr(),
        **{f"{name}_token": x.stride(0) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))},
        **{f"{name}_head": x.stride(1) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))},
        **{f"state_{name}": state.stride(n) for n, name in enumerate(("slot", "head", "row"))},
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        segment=segment or num_tokens,
    )
    grid = places * num_heads * spec.tiles
    threads = 128 * spec.groups + 128
    specialised.launch("delta_pass.cu", "delta_pass", spec, index, grid, threads, params)


@functools.lru_cache(maxsize=1024)
def _map(address: int, shape: tuple[int, int, int], strides: tuple[int, int]) -> ctypes.Array[Any]:
    """The tensor map of ``[tokens, heads, columns]``: boxes of 64 tokens and columns."""
    tokens, heads, columns = shape
    sizes, steps = [columns, heads, tokens], [strides[1], strides[0]]
    return tensor_map(address, torch.bfloat16, sizes, steps, [64, 1, 64], swizzle=128)
