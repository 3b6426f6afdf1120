"""Backends around FlashInfer and FlashAttention-3 on a CPU: the files of the package, the stand-ins of
tests/support/peers behind them. And one call of any backend as a layer makes it."""

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from torchpaged import Limits
from torchpaged.backends import (
    AttentionSpec,
    Backend,
    HostLengths,
    Session,
    flashinfer,
    flashinfer_xqa,
    get_backend,
)
from torchpaged.testing import Batch
from torchpaged.testing.conformance import spec_of_call

PEERS = Path(__file__).parent / "peers"
LIBRARIES = {
    "flash_attn": ("flash_attn_interface", "flash_attn_config"),
    "flash_attn_4": ("flash_attn",),
    "flashinfer": ("flashinfer",),
    "flashinfer_gdn": ("flashinfer",),
    "flashinfer_xqa": ("flashinfer",),
}


@contextmanager
def stand_in(name: str) -> Iterator[Backend]:
    """The backend of that name with its library's stand-in, declared for CPUs."""
    real = get_backend(name)
    capabilities = dataclasses.replace(real.capabilities, device_types=("cpu",), min_compute_capability=None)
    modules = [key for key in sys.modules if key.split(".")[0] in LIBRARIES[name]]
    kept = {key: sys.modules.pop(key) for key in modules}
    sys.path.insert(0, str(PEERS))
    sized: tuple[Any, ...] = (flashinfer, flashinfer_xqa)
    room = [module.WORKSPACE_BYTES for module in sized]
    for module in sized:
        module.WORKSPACE_BYTES = 1 << 10
    try:
        yield Backend(name, capabilities, real.ops, lambda: None, real.session)
    finally:
        sys.path.remove(str(PEERS))
        for module, size in zip(sized, room, strict=True):
            module.WORKSPACE_BYTES = size
        for key in [key for key in sys.modules if key.split(".")[0] in LIBRARIES[name]]:
            del sys.modules[key]
        sys.modules.update(kept)


def host_of(batch: Batch) -> HostLengths:
    return HostLengths(batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist())


def spec_of(batch: Batch, lse: bool = True, **options: Any) -> AttentionSpec:
    """What a layer that attends with these options of the op asks for."""
    return spec_of_call(batch, lse, options)


def limits_of(batch: Batch) -> Limits:
    rows, width = batch.block_table.shape
    return Limits(rows, max(len(batch.q), 1), width, *batch.k_cache.shape[:2])


def attend(session: Session, batch: Batch, lse: bool = True, **options: Any) -> tuple[Tensor, Tensor | None]:
    """One planned call; the outputs start as NaN."""
    spec = spec_of(batch, lse, **options)
    workspace = session.workspace(spec)
    if session.plans:
        session.plan(batch, host_of(batch))
    out, total = batch.outputs(lse)
    tensors, named = batch.arguments(out, total, **options)
    session.ops.paged_attention(*tensors, **named, **workspace)
    return out, total
