"""Backends: one file each, behind one selector; what one keeps open between calls is a `Session`."""

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning
from torchpaged.backends.choose.names import get_backend, list_backends, register_backend, use_backend
from torchpaged.backends.choose.route import Route
from torchpaged.backends.choose.select import Choice, open_session, select_backend
from torchpaged.backends.choose.tuned import TunedFileWarning
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.session import Limits, PlannedBatch, Session, assert_planned
from torchpaged.backends.spec import COMMON_FEATURES, FEATURES, AttentionSpec, GraphSupport, attention_spec
from torchpaged.metadata import HostLengths

__all__ = [
    "COMMON_FEATURES",
    "FEATURES",
    "AttentionSpec",
    "Backend",
    "Capabilities",
    "Choice",
    "GraphSupport",
    "HostLengths",
    "Limits",
    "PlannedBatch",
    "Planning",
    "Route",
    "SemaphoreSession",
    "Session",
    "TunedFileWarning",
    "assert_planned",
    "attention_spec",
    "get_backend",
    "list_backends",
    "open_session",
    "register_backend",
    "select_backend",
    "use_backend",
]
