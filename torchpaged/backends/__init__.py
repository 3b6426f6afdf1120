"""Backends: one file each, behind one selector; what one keeps open between calls is a `Session`."""

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning
from torchpaged.backends.selector import (
    ALIASES,
    Choice,
    backend_of,
    get_backend,
    list_backends,
    open_session,
    register_backend,
    select_backend,
    use_backend,
)
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.session import Limits, PlannedBatch, Session, assert_planned
from torchpaged.backends.spec import AttentionSpec, GraphSupport, attention_spec
from torchpaged.metadata import HostLengths

__all__ = [
    "ALIASES",
    "AttentionSpec",
    "Backend",
    "Capabilities",
    "Choice",
    "GraphSupport",
    "HostLengths",
    "Limits",
    "PlannedBatch",
    "Planning",
    "SemaphoreSession",
    "Session",
    "assert_planned",
    "attention_spec",
    "backend_of",
    "get_backend",
    "list_backends",
    "open_session",
    "register_backend",
    "select_backend",
    "use_backend",
]
