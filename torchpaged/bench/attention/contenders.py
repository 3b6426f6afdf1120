"""Who is measured: the list of every `Contender`, and those of torchpaged and of plain PyTorch.

    for contender in contenders(device, backends=None, peers=True):
        if contender.unavailable() is None and contender.why_not(case, device) is None:
            prepared = contender.prepare(case, inputs)
            out = prepared.calls[0]()       # one call per KV cache; returns [num_tokens, num_heads, head_dim]

Own backends come by their names; plain PyTorch (SDPA, FlexAttention) reads contiguous KV that is gathered
before the clock starts, which is an easier task than the paged one; FlashInfer and FlashAttention-3 are
in ``peers.py``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchpaged.backends import (
    AttentionSpec,
    Backend,
    HostLengths,
    Limits,
    Session,
    get_backend,
    list_backends,
)
from torchpaged.backends.choose.route import is_route
from torchpaged.bench.attention.cases import AttentionCase
from torchpaged.bench.attention.contender import Contender, Prepared
from torchpaged.bench.attention.inputs import Inputs
from torchpaged.bench.attention.peers import PEERS, plan_us
from torchpaged.custom_ops.errors import ArgumentError

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


def contenders(
    device: torch.device, backends: Sequence[str] | None = None, peers: bool = True, skip: Sequence[str] = ()
) -> list[Contender]:
    """Who runs on ``device``.

    Args:
        device: where.
        backends: names of own backends; None = those made for the device's type, without the reference and
            those around other libraries, which are peers.
        peers: whether to list the peers, absent ones included.
        skip: names to leave out.

    Raises:
        BackendUnavailableError: a backend is unknown.
        ArgumentError: a name in ``skip`` is unknown, or nobody is left.
    """
    if backends is None:
        backends = [
            n
            for n in list_backends()
            if n not in ("reference", *_AROUND_LIBRARIES)
            and device.type in get_backend(n).capabilities.device_types
        ]
    everybody = [*(own_backend(name) for name in backends), *((SDPA, FLEX, *PEERS) if peers else ())]
    names = [contender.name for contender in everybody]
    unknown = [name for name in skip if name not in names]
    if unknown:
        raise ArgumentError("skip", f"one of {', '.join(names)}", repr(unknown[0]))
    left = [contender for contender in everybody if contender.name not in skip]
    if not left:
        raise ArgumentError("skip", "at least one contender left", f"all of {', '.join(names)}")
    return left


# ----------------------------------------------------------------------------------------------- own backends
def own_backend(name: str, shown: str = "") -> Contender:
    """The own backend of that name, or the route, called as a layer calls it: the op handle with all checks
    on, and a semaphore per layer, or what a session planned for all layers. ``shown``: its name in tables."""
    backend = get_backend(name)
    in_session = name in _AROUND_LIBRARIES or is_route(name)

    def spec_of(case: AttentionCase, device: torch.device) -> AttentionSpec:
        return AttentionSpec(
            device=device,
            dtype=case.dtype,
            head_dim=case.head_dim,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            block_size=case.block_size,
            kv_dtype=case.kv_dtype,
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
                max_query_len=max(case.query_lens),
                scale=inputs.scale,
                k_scale=inputs.k_scale,
                v_scale=inputs.v_scale,
                **kept[layer],
            )
            return out

        return Prepared([partial(call, layer) for layer in range(inputs.num_layers)], of_plan)

    # the library itself may be among the peers, by its own name
    shown = shown or (f"{name}_backend" if name in _AROUND_LIBRARIES else name)
    return Contender(shown, True, backend.unavailable, why_not, prepare)


class _Planned(NamedTuple):
    """A batch as a session plans it."""

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int


def _planned(
    backend: Backend, spec: AttentionSpec, case: AttentionCase, inputs: Inputs
) -> tuple[Session, float | None]:
    """A session that has planned the batch, and the host microseconds of a plan where it makes any."""
    rows, width = inputs.block_table.shape
    num_blocks, block_size = inputs.k_caches[0].shape[:2]
    session = backend.open(
        [spec], Limits(rows, len(inputs.q), width, num_blocks, block_size), inputs.q.device
    )
    batch = _Planned(inputs.block_table, inputs.seq_lens, inputs.query_start_loc, max(case.query_lens))
    plan = partial(session.plan, batch, HostLengths(case.query_lens, case.seq_lens))
    plan()  # compiles
    return session, plan_us(plan, inputs.q.device) if session.plans else None


# ------------------------------------------------------------------------------- plain PyTorch, contiguous KV
def _not_dense(case: AttentionCase) -> str | None:
    """Why a dense batch can't hold the case; None if it can."""
    if len(set(case.seq_lens)) > 1 or len(set(case.query_lens)) > 1:
        return "the lengths differ, and a dense batch has one length"
    if case.kv_dtype != case.dtype:
        return f"reads no {str(case.kv_dtype).removeprefix('torch.')} keys and values"
    return None


def _dense_layers(case: AttentionCase, inputs: Inputs) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per layer q, k, v as ``[num_reqs, heads, tokens, head_dim]``; keys and values are copies in order."""
    num_reqs, length = len(case.seq_lens), case.seq_lens[0]
    q = inputs.q.view(num_reqs, -1, case.num_heads, case.head_dim).transpose(1, 2)
    layers = []
    for layer in range(inputs.num_layers):
        pairs = [inputs.dense(layer, request, length) for request in range(num_reqs)]
        k, v = (torch.stack(tensors).transpose(1, 2) for tensors in zip(*pairs, strict=True))
        layers.append((q, k, v))
    return layers


def _sdpa_why_not(case: AttentionCase, device: torch.device) -> str | None:
    if not case.is_decode and set(case.query_lens) != set(case.seq_lens):
        return (
            _not_dense(case)
            or "a chunk needs a mask tensor, with which SDPA has no fused kernel for grouped heads"
        )
    return _not_dense(case)


def _sdpa_prepare(case: AttentionCase, inputs: Inputs) -> Prepared:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=not case.is_decode, scale=inputs.scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    return Prepared([partial(call, *tensors) for tensors in _dense_layers(case, inputs)])


def _flex_unavailable() -> str | None:
    return None if importlib.util.find_spec("triton") else "the triton package is not installed"


def _flex_why_not(case: AttentionCase, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"measured on CUDA devices, not on {device.type}"
    return _not_dense(case)


def _flex_prepare(case: AttentionCase, inputs: Inputs) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query_len, length = case.query_lens[0], case.seq_lens[0]

    def causal(batch: Any, head: Any, q_index: Any, kv_index: Any) -> Any:
        return kv_index <= q_index + (length - query_len)

    torch.compiler.reset()  # one case's graphs must not count against the next one's recompile limit
    mask = (
        None
        if case.is_decode
        else create_block_mask(causal, None, None, query_len, length, device=inputs.q.device)
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(q, k, v, block_mask=mask, scale=inputs.scale, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return Prepared([partial(call, *tensors) for tensors in _dense_layers(case, inputs)])


SDPA = Contender("sdpa", False, lambda: None, _sdpa_why_not, _sdpa_prepare)
FLEX = Contender("flex", False, _flex_unavailable, _flex_why_not, _flex_prepare)
