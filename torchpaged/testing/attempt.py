"""A batch in a session of its own: what every check of a backend runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec, Backend, GraphSupport, HostLengths, Limits
from torchpaged.backends.choose.kind import Kind
from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.graphs import CaptureBackend, CudaCapture, TapeCapture
from torchpaged.testing.batches import Batch


def device_of(backend: Backend, device: torch.device | str | None) -> torch.device:
    """``device``; None: a GPU if there is one and the backend runs on it, else the CPU."""
    on_gpu = torch.cuda.is_available() and "cuda" in backend.capabilities.device_types
    return torch.device(device or ("cuda" if on_gpu else "cpu"))


def capture_of(device: torch.device, capture: CaptureBackend | None) -> CaptureBackend:
    """``capture``; None: CUDA graphs on a GPU, on a CPU the recorded tape of a step's ops."""
    return capture or (CudaCapture(device) if device.type == "cuda" else TapeCapture())


def spec_of_call(batch: Batch, lse: bool, options: Mapping[str, Any]) -> AttentionSpec:
    """What a layer that attends to ``batch`` with these options of the op asks for."""
    tensors, named = batch.arguments(*batch.outputs(lse), **options)
    spec = Kind.of(AttentionCall.of(*tensors, **named)).spec()
    return replace(spec, max_query_len=batch.max_query_len)


class Attempt:
    """A session for one batch, its workspace, and outputs.

    Args:
        backend: whose session; it may refuse to open it.
        batch: what is attended to; its tensors may change between steps.
        spec: of the session, as `spec_of_call` makes it.
        options: of the op.
    """

    def __init__(
        self, backend: Backend, batch: Batch, spec: AttentionSpec, options: Mapping[str, Any]
    ) -> None:
        rows, width = batch.block_table.shape
        self.batch, self.spec, self.options = batch, spec, options
        self.limits = Limits(rows, max(len(batch.q), 1), width, *batch.k_cache.shape[:2])
        self.session = backend.open([spec], self.limits, batch.q.device)
        self.attend, self.workspace = self.session.ops.paged_attention, self.session.workspace(spec)
        self.out, self.lse = batch.outputs("lse" in spec.uses)

    def plan(self) -> None:
        """Plan the batch with its lengths on the host, if the session plans at all."""
        if self.session.plans:
            batch = self.batch
            host = HostLengths(batch.query_start_loc.diff().tolist(), batch.seq_lens.tolist())
            self.session.plan(batch, host)

    def step(self) -> Tensor:
        """The call; returns ``out``."""
        tensors, named = self.batch.arguments(self.out, self.lse, **self.options)
        self.attend(*tensors, **named, **self.workspace)
        return self.out


def graph_support_for(query_lens: tuple[int, ...]) -> GraphSupport:
    """The graph support that a batch of these queries needs."""
    if max(query_lens) == 1:
        return GraphSupport.SINGLE_TOKEN_DECODE
    return GraphSupport.UNIFORM_BATCH if len(set(query_lens)) == 1 else GraphSupport.ALWAYS
