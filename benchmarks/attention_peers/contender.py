"""`Contender`: a name, the reasons why it can't run, and a way to prepare its calls for a case; `Prepared`:
these calls. Those of torchpaged's backends:

    for contender in own_backends(device):
        if contender.unavailable() is None and contender.why_not(case, device) is None:
            prepared = contender.prepare(case, inputs)
            out = prepared.calls[0]()       # one call per KV cache; returns [num_tokens, num_heads, head_dim]
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attention_peers.cases import AttentionCase
from attention_peers.inputs import Inputs
from torchpaged.backends import (
    AttentionSpec,
    Backend,
    HostLengths,
    Limits,
    Session,
    attention_spec,
    get_backend,
    list_backends,
)
from torchpaged.backends.choose.route import is_route

#: Backends around other libraries: a peer each, so that they run where they are named alone.
_AROUND_LIBRARIES = (
    "flash_attn",
    "flash_attn_4",
    "flashinfer",
    "flashinfer_xqa",
    "flex",
    "torch_sdpa",
    "torch_varlen",
)
_PLAN_REPEATS = 5


@dataclass(frozen=True)
class Prepared:
    """What a contender runs: one call per KV cache, and the host microseconds of its plan, which no
    timing includes."""

    calls: list[Callable[[], Tensor]]
    plan_us: float | None = None


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Attributes:
        name: as tables show it and ``--skip`` matches it.
        own: whether it is one of torchpaged's backends.
        unavailable: why it can't run on this machine at all, or None.
        why_not: why it can't run a case on a device, or None.
        prepare: ``(case, inputs)`` to its calls; whatever it needs besides the inputs is made here, outside
            every timing.
    """

    name: str
    own: bool
    unavailable: Callable[[], str | None]
    why_not: Callable[[AttentionCase, torch.device], str | None]
    prepare: Callable[[AttentionCase, Inputs], Prepared]


def own_backends(device: torch.device, names: Sequence[str] | None = None) -> list[Contender]:
    """torchpaged's backends by name; None = those for the device's type that have an attention of their own,
    without the reference and those around other libraries.

    Raises:
        BackendUnavailableError: a backend is unknown.
    """
    if names is None:
        names = [
            name
            for name in list_backends()
            if name not in ("reference", *_AROUND_LIBRARIES)
            and "paged_attention" in get_backend(name).serves
            and device.type in get_backend(name).capabilities.device_types
        ]
    return [own_backend(name) for name in names]


def own_backend(name: str) -> Contender:
    """The own backend of that name, or the route, called as a layer calls it: the op handle with all checks
    on, and a semaphore per layer, or what a session planned for all layers."""
    backend = get_backend(name)
    in_session = name in _AROUND_LIBRARIES or is_route(name)

    def spec_of(case: AttentionCase, device: torch.device) -> AttentionSpec:
        return attention_spec(
            device=device,
            dtype=case.dtype,
            head_dim=case.head_dim,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            block_size=case.block_size,
            kv_dtype=case.kv_dtype,
            block_sparse=case.block_sparse,
        )

    def why_not(case: AttentionCase, device: torch.device) -> str | None:
        return "; ".join(backend.capabilities.reject(spec_of(case, device))) or None

    def prepare(case: AttentionCase, inputs: Inputs) -> Prepared:
        out = inputs.poisoned_out()
        session: Session | None = None  # lives as long as the calls
        of_plan: float | None = None
        if in_session:
            session, of_plan = _planned(backend, spec_of(case, inputs.q.device), case, inputs)
            kept = [session.workspace(spec_of(case, inputs.q.device))] * inputs.num_layers
        else:
            ints: Any = {"dtype": torch.int32, "device": inputs.q.device}
            count = len(case.seq_lens) * case.num_kv_heads
            kept = [{"semaphore": torch.zeros(count, **ints)} for _ in range(inputs.num_layers)]

        def call(layer: int) -> Tensor:
            assert session is None or session.planned is not None or not session.plans
            backend.ops.paged_attention(
                inputs.q,
                inputs.k_caches[layer],
                inputs.v_caches[layer],
                inputs.block_table,
                inputs.seq_lens,
                inputs.query_start_loc,
                out,
                None,
                max_query_len=inputs.max_query_len,
                scale=inputs.scale,
                **inputs.scales.by_name,
                block_sparse=case.block_sparse,
                **kept[layer],
            )
            return out

        return Prepared([partial(call, layer) for layer in range(inputs.num_layers)], of_plan)

    # the library itself may be among the peers, by its own name
    shown = f"{name}_backend" if name in _AROUND_LIBRARIES else name
    return Contender(shown, True, backend.unavailable, why_not, prepare)


def _planned(
    backend: Backend, spec: AttentionSpec, case: AttentionCase, inputs: Inputs
) -> tuple[Session, float | None]:
    """A session that has planned the batch, and the host microseconds of a plan where it makes any."""
    rows, width = inputs.block_table.shape
    limits = Limits(rows, len(inputs.q), width, *inputs.k_caches[0].shape[:2])
    session = backend.open([spec], limits, inputs.q.device)
    plan = partial(session.plan, inputs, HostLengths(case.query_lens, case.seq_lens))
    plan()  # compiles
    return session, plan_us(plan, inputs.q.device) if session.plans else None


def plan_us(plan: Callable[[], Any], device: torch.device) -> float:
    """Host microseconds of a plan, until the device has what it copied: the pinned buffer is not fenced."""
    times = []
    for _ in range(_PLAN_REPEATS):
        start = time.perf_counter()
        plan()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)
