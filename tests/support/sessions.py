"""Backends whose sessions keep something, for tests on a CPU: a semaphore, as the GPU's do, or a plan that
every step needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import (
    AttentionSpec,
    Backend,
    Capabilities,
    GraphSupport,
    HostLengths,
    Limits,
    Planning,
    SemaphoreSession,
    Session,
    assert_planned,
    attention_spec,
    get_backend,
)
from torchpaged.backends.session import PlannedBatch
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.attention.schema import SCHEMAS

KEPT = Backend(
    "kept",
    get_backend("reference").capabilities,
    BackendOps(*BACKEND_OPS["reference"]),
    lambda: None,
    SemaphoreSession,
)


def kept_session(
    max_num_reqs: int = 8, num_kv_heads: int = 2, num_heads: int = 4, head_dim: int = 16
) -> Session:
    """A session with a semaphore; its kernels are the reference's, which look whether it is zero."""
    spec = attention_spec(
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    return KEPT.open([spec], Limits(max_num_reqs=max_num_reqs), "cpu")


def semaphore_of(session: Session) -> Tensor:
    """The only one."""
    (semaphore,) = session.tensors().values()
    return semaphore


# --------------------------------------------------------------------------------------- a backend that plans
def planned_op(namespace: str, attend: Callable[..., None], *tensors: str) -> Any:
    """``paged_attention`` with further tensors that a session plans, in a namespace of its own."""
    library = torch.library.Library(namespace, "DEF")
    taken = SCHEMAS["paged_attention"].replace(", Tensor? tree_mask=None, Tensor(c!)? semaphore=None", "")
    further = "".join(f", Tensor {name}" for name in tensors)
    library.define(
        f"paged_attention{taken.replace(') -> ()', f'{further}) -> ()')}",
        tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
    )
    library.impl("paged_attention", attend, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::paged_attention", lambda *args, **options: None, lib=library)
    LIBRARIES.append(library)  # its ops live as long as it
    return getattr(torch.ops, namespace).paged_attention.default


LIBRARIES: list[torch.library.Library] = []


def _attend(*tensors: Any, planned_table: Tensor, planned_lens: Tensor, **options: Any) -> None:
    """Attends over the blocks of the plan, not over those of the call."""
    q, k_cache, v_cache, block_table, seq_lens, *rest = tensors
    assert_planned((planned_lens, planned_table), (seq_lens, block_table))
    planned = planned_table[: len(seq_lens)], planned_lens[: len(seq_lens)]
    BACKEND_OPS["default"].paged_attention(q, k_cache, v_cache, *planned, *rest, **options)


class PlanningSession(Session):
    """Copies block table and lengths; counts its plans, and how many of them had the host's lengths."""

    def _open(self, specs: Any) -> None:
        rows, width = self.limits.need("max_num_reqs", "max_blocks_per_req")
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=self.device)
        self.lens = torch.full((rows,), -1, dtype=torch.int32, device=self.device)
        for tensor in (self.table, self.lens):
            torch._dynamo.mark_static_address(tensor, guard=False)
        self.plans_made, self.plans_from_host = 0, 0

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        return {"planned_table": self.table, "planned_lens": self.lens}

    def _plan(self, batch: PlannedBatch, host: HostLengths | None) -> None:
        assert not torch.compiler.is_compiling()
        rows, width = batch.block_table.shape
        self.table[:rows, :width].copy_(batch.block_table)
        self.lens[:rows].copy_(batch.seq_lens)
        self.plans_made += 1
        if host is not None:
            self.plans_from_host += 1
            if self.device.type == "cpu":
                assert list(host.seq_lens) == batch.seq_lens.tolist()
                assert list(host.query_lens) == batch.query_start_loc.diff().tolist()

    def tensors(self) -> dict[str, Tensor]:
        return {"planned_table": self.table, "planned_lens": self.lens}


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Serves attention alone; the device's own ops do the rest.
PLANNING = Backend(
    "planning",
    Capabilities(("cpu", "cuda"), _FLOATS, _FLOATS, GraphSupport.ALWAYS, planning=Planning.EVERY_STEP),
    {"paged_attention": planned_op("torchpaged_planning", _attend, "planned_table", "planned_lens")},
    lambda: None,
    PlanningSession,
)
