"""`check_graph_support`: whether a backend holds the graph support that it declares.

report = check_graph_support(MY_BACKEND)            # raises where it declares more than it holds
print(report)                                       # my_backend: ALWAYS, proved by 45 replays of 5 cases
...
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from torchpaged.backends import AttentionSpec, Backend, GraphSupport, Planning
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.graphs import CaptureBackend
from torchpaged.testing.conformance import capture_of, device_of
from torchpaged.testing.graph_conformance import (
    Case,
    check_eager,
    check_forgotten_plan,
    check_replays,
    conformance_cases,
)


@dataclass
class GraphSupportReport:
    """What was proved.

    Attributes:
        backend: its name.
        declared: its graph support.
        replays: how many replays were compared, by case and dtype.
        eager: how many batches beyond the declared support were compared, without a graph.
        forgotten_plans: whether replays without a plan were tried, too.
    """

    backend: str
    declared: GraphSupport
    replays: dict[str, int] = field(default_factory=dict)
    eager: int = 0
    forgotten_plans: bool = False

    def __str__(self) -> str:
        if not self.replays:
            return f"{self.backend}: {self.declared.name}; {self.eager} batches right without a graph"
        also = "; a forgotten plan is noticed" if self.forgotten_plans else ""
        return (
            f"{self.backend}: {self.declared.name}, proved by {sum(self.replays.values())} replays of "
            f"{', '.join(self.replays)}{also}"
        )


def check_graph_support(
    backend: Backend,
    *,
    device: torch.device | str | None = None,
    capture: CaptureBackend | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    **shape: Any,
) -> GraphSupportReport:
    """Capture one step of each declared kind at its bucket's maximum, and replay it with other lengths, block
    tables, padding, windows of the pool, and with an empty batch; every replay is compared with the
    float64 oracle. What is beyond the declared support runs without a graph and is compared likewise, and no
    session may be opened for it.

    Args:
        backend: sessions of it are opened.
        device: where; None = a GPU if there is one and the backend runs on it, else the CPU.
        capture: how a step becomes a graph; None = CUDA graphs on a GPU, on a CPU the recorded tape of its
            ops.
        dtypes: of queries and pools; those that the backend does not take are left out.
        shape: further arguments of `torchpaged.testing.make_batch`: ``num_heads``, ``num_kv_heads``,
            ``head_dim``, ``block_size`` ...

    Returns:
        What was proved. On a GPU a forgotten plan is not tried, since the assertion ends the process's use of
        it: call `torchpaged.testing.graph_conformance.check_forgotten_plan` in a process of its own.

    Raises:
        AssertionError: the backend declares more than it holds; with the level that it does hold.
        BackendUnavailableError: it can't run here at all; with all reasons.
    """
    device = device_of(backend, device)
    capture = capture_of(device, capture)
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64} | shape
    taken = [dtype for dtype in dtypes if not _reasons(backend, device, dtype, sizes)]
    if not taken:
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot run this attention: "
            f"{'; '.join(_reasons(backend, device, dtypes[0], sizes))}"
        )
    declared = backend.capabilities.graph_support
    report = GraphSupportReport(backend.name, declared)
    held = GraphSupport.NEVER
    for level in (level for level in GraphSupport if GraphSupport.NEVER < level <= declared):
        new = [case for case in _cases(backend, level) if case not in conformance_cases(held)]
        for case, dtype in product(new, taken):
            with _failing_as(backend, f" and holds {held.name}", case, dtype):
                done = check_replays(backend, case, capture, device, dtype=dtype, **sizes)
                if device.type == "cpu" and backend.capabilities.planning == Planning.EVERY_STEP:
                    check_forgotten_plan(backend, case, capture, device, dtype=dtype, **sizes)
                    report.forgotten_plans = True
            report.replays[f"{case.name}[{str(dtype).removeprefix('torch.')}]"] = done
        held = level
    beyond = [
        case for case in _cases(backend, GraphSupport.ALWAYS) if case not in conformance_cases(declared)
    ]
    for case, dtype in product(beyond, taken):
        with _failing_as(backend, ", and is wrong without a graph", case, dtype):
            report.eager += check_eager(backend, case, device, dtype=dtype, **sizes)
    return report


@contextlib.contextmanager
def _failing_as(backend: Backend, what: str, case: Case, dtype: torch.dtype) -> Iterator[None]:
    """Whatever a case raises, as an AssertionError that says ``what`` failed."""
    try:
        yield
    except Exception as error:
        declared = backend.capabilities.graph_support.name
        raise AssertionError(
            f"backend {backend.name!r} declares graph support {declared}{what}: case {case.name!r} in "
            f"{str(dtype).removeprefix('torch.')}: {error}"
        ) from error


def _cases(backend: Backend, level: GraphSupport) -> list[Case]:
    """Of `conformance_cases`, those whose features the backend declares."""
    windows = "window" in backend.capabilities.features
    return [case for case in conformance_cases(level) if windows or "window_left" not in case.options]


def _reasons(backend: Backend, device: torch.device, dtype: torch.dtype, sizes: dict[str, Any]) -> list[str]:
    wanted = {name: sizes[name] for name in ("num_heads", "num_kv_heads", "head_dim")}
    wanted["max_query_len"] = backend.capabilities.max_query_len
    return backend.reject(
        AttentionSpec(device=device, dtype=dtype, block_size=sizes.get("block_size", 16), **wanted)
    )
