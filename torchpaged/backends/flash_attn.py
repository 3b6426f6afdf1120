"""The ``flash_attn`` backend: FlashAttention-3 over the paged pool, by whichever wheel provides
``flash_attn_interface``.

Prompts, decode steps and mixed batches are one call, ``flash_attn_with_kvcache`` with packed queries and a
page table. Its schedule is made once per step and kind of layer by ``get_scheduler_metadata``, a kernel, and
kept in a tensor that never moves and whose tail is zeroed; the number of splits follows from shapes alone, so
that one graph serves all lengths. Nothing waits for the device.

Where a spec asks for batch invariance, no request's keys are split: a request's sums then run in one order,
with blocks of up to 32 tokens, which the library reads in one way whatever the queries are.

The library's own fake kernel refuses what is needed here, and its call declares no schema for a trace; the op
around it does. Its result is copied once, since its public function takes no ``out``.
"""

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning, further_reasons
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.library_op import Held, attention_op
from torchpaged.backends.package import Package
from torchpaged.backends.planned_batch import Kind, PlannedBatchBuffers, not_planned
from torchpaged.backends.session import PlannedBatch, Session
from torchpaged.backends.spec import AttentionSpec, GraphSupport
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.errors import PlanError
from torchpaged.metadata import HostLengths

MODULE = "flash_attn_interface"
INSTALL = "pip install tokenspeed-fa3 (Hopper, CUDA 13), or build FlashAttention's hopper/ folder"
NEEDED = {
    "flash_attn_with_kvcache": (
        "cache_seqlens",
        "page_table",
        "cu_seqlens_q",
        "max_seqlen_q",
        "scheduler_metadata",
        "num_splits",
        "return_softmax_lse",
    ),
    "get_scheduler_metadata": (),
}
_MOST_SPLITS = 32
_MOST_BYTES = 1 << 28  # of partial results, which the library allocates for every call
_DTYPES = (torch.bfloat16, torch.float16)


def _scheduled(kind: Kind) -> Kind:
    """As its schedule asks: whether there is a cap, and nothing of the scale."""
    return kind._replace(soft_cap=float(kind.soft_cap > 0), scale=0.0)


def num_splits(num_reqs: int, max_query_len: int, num_heads: int, head_dim: int) -> int:
    """The most parts of one request's keys: a number of shapes alone, the same in the schedule and in the
    call."""
    partial = num_reqs * max_query_len * num_heads * (head_dim + 1) * 4
    return max(1, min(_MOST_SPLITS, _MOST_BYTES // partial))


# ----------------------------------------------------------------------------------------------- the session
class FlashAttnSession(Session):
    """Schedules of the kinds of layers that came, for the batch that was planned last."""

    def _open(self, specs: Sequence[AttentionSpec]) -> None:
        self._library = PACKAGE.load()
        self.batch = PlannedBatchBuffers(self.limits, self.device)
        self._handle = _SESSIONS.add(self)
        self._most_splits = _MOST_SPLITS
        self._schedules: dict[Kind, Tensor] = {}
        # of a schedule, by kind, requests, columns, query length
        self._lengths: dict[tuple[Kind, int, int, int], int] = {}

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        kind = _scheduled(Kind.of_spec(spec))
        if spec.batch_invariant:
            self._most_splits = 1  # for all layers of the session: a schedule and its call must agree
        if kind not in self._schedules:
            rows = self.limits.need("max_num_reqs")[0]
            # a head and four numbers for each request, rounded up, with room for later versions
            with torch.inference_mode(False):
                self._schedules[kind] = torch.zeros(
                    64 + 8 * (-(-rows // 4) * 4), dtype=torch.int32, device=self.device
                )
        return {"handle": self._handle}

    def _plan(self, batch: PlannedBatch, host: HostLengths | None) -> None:
        self.batch.write(batch)
        rows, width = batch.block_table.shape
        block_size = self.limits.need("block_size")[0]
        for kind, schedule in self._schedules.items():
            with torch.inference_mode():
                made = self._library.get_scheduler_metadata(
                    rows,
                    batch.max_query_len,
                    width * block_size,
                    kind.num_heads,
                    kind.num_kv_heads,
                    kind.head_dim,
                    self.batch.lens[:rows],
                    qkv_dtype=kind.dtype,
                    headdim_v=kind.head_dim,
                    cu_seqlens_q=self.batch.starts[: rows + 1],
                    page_size=block_size,
                    causal=kind.causal,
                    window_size=kind.window,
                    has_softcap=kind.soft_cap > 0,
                    num_splits=self._splits(rows, batch.max_query_len, kind.num_heads, kind.head_dim),
                )
                length = made.numel()
                if length > schedule.numel():
                    raise PlanError(
                        f"plan: expected a schedule of at most {schedule.numel()} numbers, "
                        f"got {length} from {MODULE}; this version is not supported"
                    )
                schedule[:length].copy_(made.flatten())
                schedule[length:].zero_()  # what is left of a larger batch would be worked off, too
            self._lengths[kind, rows, width, batch.max_query_len] = length

    def _splits(self, num_reqs: int, max_query_len: int, num_heads: int, head_dim: int) -> int:
        return min(self._most_splits, num_splits(num_reqs, max_query_len, num_heads, head_dim))

    def tensors(self) -> dict[str, Tensor]:
        """Batch and schedules."""
        return self.batch.tensors() | {
            f"schedule[{i}]": schedule for i, schedule in enumerate(self._schedules.values())
        }

    def attend(self, call: AttentionCall) -> None:
        """One layer."""
        q, rows, width = call.q, *call.block_table.shape
        kind = _scheduled(Kind.of_call(call))
        length = self._lengths.get((kind, rows, width, call.max_query_len))
        if length is None:
            raise not_planned(self.name, call)
        self.batch.check(call)
        y, y_lse, *_ = self._library.flash_attn_with_kvcache(
            q,
            call.k_cache,
            call.v_cache,
            cache_seqlens=self.batch.lens[:rows],
            page_table=self.batch.table[:rows, :width],
            cu_seqlens_q=self.batch.starts[: rows + 1],
            max_seqlen_q=call.max_query_len,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=kind.window,
            softcap=call.logits_soft_cap,
            scheduler_metadata=self._schedules[kind][:length],
            num_splits=self._splits(rows, call.max_query_len, q.shape[1], q.shape[2]),
            return_softmax_lse=True,
        )
        self.batch.finish(call, y, y_lse.transpose(0, 1), call.sinks)  # its own is [H, T]

    def close(self) -> None:
        """Give everything back."""
        super().close()
        self._schedules, self._lengths = {}, {}


_SESSIONS: Held[FlashAttnSession] = Held("session")


def _attend(call: AttentionCall, handle: Tensor | None) -> None:
    _SESSIONS.of(handle).attend(call)


# ----------------------------------------------------------------------------------------------- the package
def _missing() -> str | None:
    if importlib.util.find_spec(MODULE) is None:
        return f"the package of {MODULE} (FlashAttention-3) is not installed; {INSTALL}"
    if "PAGEDKV" in _built_without():
        return f"{MODULE} was built without paged keys and values; {INSTALL}"
    return None


PACKAGE = Package("flash_attn", MODULE, INSTALL, _missing, NEEDED)
_DISABLE = "FLASHATTENTION_DISABLE_"


def _built_without() -> set[str]:
    """What the wheel was built without, as its ``flash_attn_config`` names it behind `_DISABLE`; nothing if
    it does not say, or is not here."""
    if importlib.util.find_spec(MODULE) is None or importlib.util.find_spec("flash_attn_config") is None:
        return set()
    flags = importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    return {name.removeprefix(_DISABLE) for name, is_off in flags.items() if is_off}


# ----------------------------------------------------------------------------------------------- the backend
def _further(spec: AttentionSpec) -> list[str]:
    reasons = further_reasons(spec, width=8, majors=(9,), gpus="not (9, 0), which its kernels are made for")
    if spec.kv_dtype not in (None, spec.dtype):
        reasons[0] += ": FlashAttention-3 reads fp8 keys with fp8 queries alone"
    if spec.batch_invariant and (spec.block_size is None or spec.block_size > 32):
        reasons.append(
            f"batch_invariant with blocks of {spec.block_size or 'unknown size'}: above 32 tokens the "
            "library reads short and long queries' keys in different ways"
        )
    without = _built_without()
    asked = {
        "SOFTCAP": ("logits_soft_cap", bool(spec.logits_soft_cap)),
        "LOCAL": ("window", "window" in spec.features),
        "FP16": ("float16", spec.dtype == torch.float16),
    }
    for flag, (name, is_asked) in asked.items():
        if is_asked and flag in without:
            reasons.append(f"{name} is not in this wheel ({_DISABLE}{flag})")
    widest = max((size for size in (64, 96, 128, 192, 256) if f"HDIM{size}" not in without), default=0)
    if spec.head_dim > widest and importlib.util.find_spec(MODULE) is not None:
        reasons.append(f"head_dim {spec.head_dim} is over the widest of this wheel, {widest}")
    return reasons


CAPABILITIES = Capabilities(
    device_types=("cuda",),
    dtypes=_DTYPES,
    kv_dtypes=_DTYPES,
    graph_support=GraphSupport.ALWAYS,
    max_head_dim=256,
    different_head_dim_v=False,
    features=COMMON_FEATURES - {"alibi", "chunked"},
    planning=Planning.EVERY_STEP,
    batch_invariant=True,
    further=_further,
)
BACKEND = Backend(
    name="flash_attn",
    capabilities=CAPABILITIES,
    ops=attention_op("torchpaged_flash_attn", _attend, CAPABILITIES, "flash_attn", handle="Tensor?"),
    unavailable=PACKAGE.unavailable,
    session=FlashAttnSession,
)
