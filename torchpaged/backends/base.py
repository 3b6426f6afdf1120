"""What a backend is: what it declares, the ops that it serves, and the sessions that it opens."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from torchpaged.backends.capabilities import Capabilities
from torchpaged.backends.session import Session
from torchpaged.backends.spec import AttentionSpec, Limits
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import one_line


class Backend:
    """One way to run the ops.

    Args:
        name: as users type it.
        capabilities: what it declares.
        ops: handles of all ops, or of those that it serves by name: ``{"paged_attention": mine}`` is enough,
            and the device's own serve the rest.
        unavailable: returns why the backend can't run on this machine at all, or None.
        session: makes its sessions: a class, or anything called as one; `Session` keeps and plans nothing.
        route: says which of its kernels would serve prompts of a spec, and why where that is not the first
            choice; None = nothing to say.

    Attributes:
        ops: handles of all ops.
        serves: names of the ops that are its own.

    Raises:
        ValueError: a name in ``ops`` that no op has.
    """

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        ops: BackendOps | Mapping[str, Any],
        unavailable: Callable[[], str | None],
        session: Callable[..., Session] = Session,
        route: Callable[[AttentionSpec], str] | None = None,
    ) -> None:
        given = ops._asdict() if isinstance(ops, BackendOps) else dict(ops)
        unknown = [op for op in given if op not in BackendOps._fields]
        if unknown:
            raise ArgumentError("ops", f"names of {', '.join(BackendOps._fields)}", ", ".join(unknown))
        self.name, self.capabilities, self.unavailable = name, capabilities, unavailable
        self.session, self.route = session, route
        self.ops = ops if isinstance(ops, BackendOps) else BACKEND_OPS["default"]._replace(**given)
        self.serves = tuple(given)

    def __repr__(self) -> str:
        return one_line(self, repr(self.name), self.unavailable() or "available")

    def reject(self, spec: AttentionSpec) -> list[str]:
        """Every reason why ``spec`` can't run on this backend here; empty if it can."""
        missing = self.unavailable()
        return ([missing] if missing else []) + self.capabilities.reject(spec)

    def open(self, specs: Iterable[AttentionSpec], limits: Limits, device: torch.device | str) -> Session:
        """A session for layers of these specs. Call it at construction, never inside a traced call.

        Args:
            specs: what the layers ask for; `Session.workspace` takes more later.
            limits: the largest batches to come.
            device: where they run.

        Raises:
            BackendUnavailableError: the backend can't run one of the specs here; with all reasons.
            ArgumentError: ``limits`` are none, or a limit that this backend's sessions need was not said.
        """
        if not isinstance(limits, Limits):
            raise ArgumentError("limits", "Limits", repr(limits))
        return self.session(self.name, self.capabilities, self.ops, list(specs), limits, torch.device(device))
