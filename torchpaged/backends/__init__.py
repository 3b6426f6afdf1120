"""Backends: one file each, behind one selector; what one keeps open between calls is a `Session`.

`list_backends` names them, and `get_backend` gives one by its name; `HostLengths` are a batch's lengths where
the host knows them, for plans."""

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning
from torchpaged.backends.choose.names import get_backend, list_backends, register_backend, use_backend
from torchpaged.backends.choose.route import Route
from torchpaged.backends.choose.select import Choice, open_session, select_backend
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.session import Session, assert_planned
from torchpaged.backends.spec import AttentionSpec, GraphSupport, Limits, attention_spec
from torchpaged.metadata import HostLengths

__all__ = [
    "AttentionSpec",
    "Backend",
    "Capabilities",
    "Choice",
    "GraphSupport",
    "HostLengths",
    "Limits",
    "Planning",
    "Route",
    "SemaphoreSession",
    "Session",
    "assert_planned",
    "attention_spec",
    "get_backend",
    "list_backends",
    "open_session",
    "register_backend",
    "select_backend",
    "use_backend",
]
