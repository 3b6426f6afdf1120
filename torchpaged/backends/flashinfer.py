"""The ``flashinfer`` backend: FlashInfer's wrappers over the paged pool, one plan per step for all layers.

    decode steps      BatchDecodeWithPagedKVCacheWrapper on tensor cores (fa2), one for each number of
                      requests, which is fixed in what a graph captures
    prompts, mixed    BatchPrefillWithPagedKVCacheWrapper, eagerly: fa3 on Hopper where it has the width

Its plan runs on the host and needs lengths there: a caller that knows them passes them to ``session.plan``,
else they are read from the device, which waits. The page table as FlashInfer wants it, one request's pages
after the other's, is made on the device in buffers that never move. A second plan of a wrapper takes its
short way, ``fast_decode_plan``.

Integers of a plan are baked into a captured launch, so that a replay whose plan has other ones is refused. A
wrapper's staging memory is one pinned buffer, reused: the next plan waits until the last one's copy has
ended. The log-sum-exp comes in base 2. Scales of fp8 pools go into queries and results, since the library
takes them as host numbers.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning, unable
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.flashinfer_plans import (
    Decoder,
    Pages,
    baked_integers,
    cumulated,
    host_pages,
    prefill_kernels,
)
from torchpaged.backends.library_op import Held, attention_op
from torchpaged.backends.package import DECODE, FLASHINFER
from torchpaged.backends.planned_batch import Kind, PlannedBatchBuffers, is_capturing, not_planned
from torchpaged.backends.session import PlannedBatch, Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import PlanError
from torchpaged.custom_ops.pools import FP8
from torchpaged.metadata import HostLengths

_EAGER_WRAPPERS = 8  # decode wrappers that no graph captured and that are kept; each has 8 MiB of its own
#: Of partial results, one for all wrappers of a session: their calls follow one another.
WORKSPACE_BYTES = 256 << 20
_FLOATS = (torch.bfloat16, torch.float16)


# ----------------------------------------------------------------------------------------------- the session
class FlashInferSession(Session):
    """Wrappers of the kinds of layers that came, and the page table of the batch that was planned last."""

    def _open(self, specs: Sequence[AttentionSpec]) -> None:
        self._library, self._decode = FLASHINFER.load(), DECODE.load()
        self.batch = PlannedBatchBuffers(self.limits, self.device)
        rows, width = self.limits.need("max_num_reqs", "max_blocks_per_req")
        ints: Any = {"dtype": torch.int32, "device": self.device}
        with torch.inference_mode(False):
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
            self._indptr, self._last = torch.zeros(rows + 1, **ints), torch.zeros(rows, **ints)
            self._indices = torch.zeros(rows * width + 1, **ints)  # the last one: where unused columns go
        self._handle = _SESSIONS.add(self)
        self._kinds: list[Kind] = []
        self._decoders: dict[tuple[Kind, int], Decoder] = {}
        self._prefills: dict[Kind, Any] = {}
        self._planned_rows = 0

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        kind = Kind.of_spec(spec)
        if kind not in self._kinds:
            self._kinds.append(kind)
        return {"handle": self._handle}

    def _plan(self, batch: PlannedBatch, host: HostLengths | None) -> None:
        self.batch.write(batch)
        rows = batch.block_table.shape[0]
        self._write_pages(rows)
        if host is None:  # waits
            lens, query_lens = batch.seq_lens.tolist(), batch.query_start_loc.diff().tolist()
        else:
            lens, query_lens = list(host.seq_lens), list(host.query_lens)
        pages = host_pages(lens, self.batch.block_size, self.device)
        for kind in self._kinds:
            if batch.max_query_len == 1:
                self._plan_decode(kind, rows, pages, query_lens)
            else:
                self._plan_prefill(kind, rows, pages, lens, query_lens)

    def _write_pages(self, rows: int) -> None:
        """The page table of the planned batch, on the device: rows of different lengths, one after the
        other."""
        block_size, width = self.batch.block_size, self.batch.table.shape[1]
        with torch.inference_mode():
            lens, table = self.batch.lens[:rows], self.batch.table[:rows]
            count = (lens + block_size - 1) // block_size
            self._indptr[1 : rows + 1].copy_(count.cumsum(0))
            self._last[:rows].copy_(torch.where(lens > 0, (lens - 1) % block_size + 1, 0))
            unused, column = self._indices.numel() - 1, torch.arange(width, device=self.device)
            at = torch.where(column < count[:, None], self._indptr[:rows, None] + column, unused)
            self._indices.scatter_(0, at.flatten().long(), table.flatten())

    def _plan_decode(self, kind: Kind, rows: int, pages: Pages, query_lens: list[int]) -> None:
        queries = sum(query_lens)
        if query_lens != [1] * queries + [0] * (rows - queries):
            raise PlanError(
                "metadata: expected requests without a query token behind all others in a decode batch for "
                f"backend {self.name!r}, got query lengths {query_lens}; sort them, or state max_query_len=2"
            )
        decoder = self._decoder(kind, rows)
        if decoder.copied is not None:
            decoder.copied.synchronize()
        arguments = self._arguments(kind)
        arguments.update(
            indptr=pages.indptr,
            indices=self._indices[: pages.total],
            last_page_len=pages.last,
            head_dim=kind.head_dim,
        )
        fast = getattr(self._decode, "fast_decode_plan", None) if decoder.planned else None
        if fast is None:
            decoder.wrapper.plan(**arguments)
        else:  # the buffers on the device have this batch's pages already
            fast(decoder.wrapper, **arguments, global_override_indptr_cpu=pages.indptr)
        decoder.planned = True
        if self.device.type == "cuda":
            decoder.copied = torch.cuda.Event()
            decoder.copied.record()
        if decoder.captured is not None and decoder.captured != baked_integers(decoder.wrapper):
            raise PlanError(
                f"plan: expected the integers that the graph of {rows} requests was captured with, "
                f"{decoder.captured}, got {baked_integers(decoder.wrapper)}; capture it again"
            )

    def _plan_prefill(
        self, kind: Kind, rows: int, pages: Pages, lens: list[int], query_lens: list[int]
    ) -> None:
        if any(query > max(length, 0) for query, length in zip(query_lens, lens, strict=True)):
            raise PlanError(
                f"metadata: expected no more query tokens than keys for backend {self.name!r}, got "
                f"query lengths {query_lens} of {lens} keys; it has no left padding"
            )
        if kind not in self._prefills:
            self._prefills[kind] = self._library.BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend=prefill_kernels(kind.head_dim, kind.kv_dtype, self.device)
            )
        arguments = self._arguments(kind)
        arguments.update(
            qo_indptr=cumulated(query_lens, self.device),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=self._indices[: pages.total],
            paged_kv_last_page_len=pages.last,
            head_dim_qk=kind.head_dim,
            causal=kind.causal,
        )
        self._prefills[kind].plan(**arguments)
        self._planned_rows = sum(query_lens)

    def _arguments(self, kind: Kind) -> dict[str, Any]:
        """What every plan takes."""
        return {
            "num_qo_heads": kind.num_heads,
            "num_kv_heads": kind.num_kv_heads,
            "page_size": self.batch.block_size,
            "pos_encoding_mode": "NONE",
            "window_left": kind.window[0],
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": kind.dtype,
            "kv_data_type": kind.kv_dtype,
            "sm_scale": kind.scale,
            "non_blocking": True,
        }

    def _decoder(self, kind: Kind, rows: int) -> Decoder:
        """The wrapper of so many requests; of those that no graph knows, the ones that were planned last are
        kept."""
        decoder = self._decoders.pop((kind, rows), None)
        if decoder is None:
            eager = [key for key, known in self._decoders.items() if known.captured is None]
            for key in eager[: max(len(eager) - _EAGER_WRAPPERS * len(self._kinds) + 1, 0)]:
                del self._decoders[key]
            decoder = Decoder(
                self._decode.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=True,
                    paged_kv_indptr_buffer=self._indptr[: rows + 1],
                    paged_kv_indices_buffer=self._indices[:-1],
                    paged_kv_last_page_len_buffer=self._last[:rows],
                    backend="fa2",
                )
            )
        self._decoders[kind, rows] = decoder  # behind all others
        return decoder

    def tensors(self) -> dict[str, Tensor]:
        """The batch, its pages and the workspace of partial results."""
        pages = {"indptr": self._indptr, "indices": self._indices, "last_page_len": self._last}
        return self.batch.tensors() | pages | {"workspace": self._workspace}

    def close(self) -> None:
        """Give wrappers and buffers back."""
        super().close()
        self._decoders, self._prefills = {}, {}

    # ------------------------------------------------------------------------------------------- one layer
    def attend(self, call: AttentionCall) -> None:
        """The planned batch's attention; ``call.q`` may have padding behind the batch's tokens."""
        q, k_cache, v_cache, rows = call.q, call.k_cache, call.v_cache, call.block_table.shape[0]
        kind, capturing = Kind.of_call(call), is_capturing(q.device)
        if call.max_query_len == 1:
            decoder = self._decoders.get((kind, rows))
            if decoder is None:
                raise not_planned(self.name, call)
            if capturing:
                decoder.captured = baked_integers(decoder.wrapper)
            wrapper, tokens = decoder.wrapper, rows
        else:
            if capturing:
                raise PlanError(
                    f"backend {self.name!r}: graph support is SINGLE_TOKEN_DECODE; a plan for longer queries "
                    "would be frozen in the graph. Capture decode batches alone (max_query_len=1)"
                )
            wrapper, tokens = self._prefills.get(kind), self._planned_rows
            if wrapper is None:
                raise not_planned(self.name, call)
        self.batch.check(call)
        with_lse = call.lse is not None or call.sinks is not None
        given = _scaled(q, call.scales.k_scale, k_cache.shape[2])
        if tokens == len(q) and not with_lse and call.scales.v_scale is None:
            wrapper.run(given, (k_cache, v_cache), out=call.out)
            self.batch.finish(call, call.out, None)
            return
        if len(q) < tokens:
            given = torch.cat([given, given.new_zeros(tokens - len(q), *q.shape[1:])])
        y, y_lse = wrapper.run(given[:tokens], (k_cache, v_cache), return_lse=True)
        y = _scaled(y, call.scales.v_scale, k_cache.shape[2])
        if tokens < len(q):
            y = torch.cat([y, y.new_zeros(len(q) - tokens, *y.shape[1:])])
            y_lse = torch.cat([y_lse, y_lse.new_zeros(len(q) - tokens, y_lse.shape[1])])
        natural = y_lse[: len(q)] * math.log(2.0)
        self.batch.finish(call, y[: len(q)], natural, call.sinks)


def _scaled(x: Tensor, scale: Tensor | None, num_kv_heads: int) -> Tensor:
    """``x [T, H, D]`` times the scale of its kv head, ``[1]`` or ``[num_kv_heads]``."""
    if scale is None:
        return x
    of_head = scale.float().expand(num_kv_heads).repeat_interleave(x.shape[1] // num_kv_heads)
    return (x.float() * of_head[:, None]).to(x.dtype)


_SESSIONS: Held[FlashInferSession] = Held("session")


def _attend(call: AttentionCall, handle: Tensor | None) -> None:
    if not call.causal and call.window_right >= 0:
        raise unable("flashinfer", "a window to the right is not supported")
    _SESSIONS.of(handle).attend(call)


def _further(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.head_dim == 96:
        reasons.append(
            "head_dim 96: FlashInfer's decode kernel reads memory that is not its own (0.7.2, sm_90)"
        )
    if spec.kv_dtype in _FLOATS and spec.kv_dtype != spec.dtype:
        reasons.append(f"kv dtype {spec.kv_dtype} is neither the queries' {spec.dtype} nor fp8")
    if not spec.causal and spec.window_size[1] >= 0:
        reasons.append("a window to the right is not supported")
    return reasons


CAPABILITIES = Capabilities(
    device_types=("cuda",),
    dtypes=_FLOATS,
    kv_dtypes=(*_FLOATS, *FP8),
    graph_support=GraphSupport.SINGLE_TOKEN_DECODE,
    min_compute_capability=(8, 0),
    head_dims=(64, 128, 256),
    different_head_dim_v=False,
    features=COMMON_FEATURES - {"alibi", "chunked"},
    planning=Planning.EVERY_STEP,
    further=_further,
)
BACKEND = Backend(
    name="flashinfer",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_flashinfer", _attend, CAPABILITIES, "flashinfer", handle="Tensor?"),
    unavailable=FLASHINFER.unavailable,
    session=FlashInferSession,
)
