"""Backends: one file each, behind one selector; what one keeps open between calls is a `Session`."""

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning
from torchpaged.backends.choose.names import (
    ALIASES,
    backend_of,
    get_backend,
    list_backends,
    register_backend,
    use_backend,
)
from torchpaged.backends.choose.order import PLATFORMS, Platform, Ranking, platform_of
from torchpaged.backends.choose.route import Route, parse_route, route_of
from torchpaged.backends.choose.select import Choice, open_session, ranking, select_backend
from torchpaged.backends.choose.tuned import Tuned, TunedFileWarning
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.session import Limits, PlannedBatch, Session, assert_planned
from torchpaged.backends.spec import COMMON_FEATURES, FEATURES, AttentionSpec, GraphSupport, attention_spec
from torchpaged.metadata import HostLengths

__all__ = [
    "ALIASES",
    "COMMON_FEATURES",
    "FEATURES",
    "PLATFORMS",
    "AttentionSpec",
    "Backend",
    "Capabilities",
    "Choice",
    "GraphSupport",
    "HostLengths",
    "Limits",
    "PlannedBatch",
    "Planning",
    "Platform",
    "Ranking",
    "Route",
    "SemaphoreSession",
    "Session",
    "Tuned",
    "TunedFileWarning",
    "assert_planned",
    "attention_spec",
    "backend_of",
    "get_backend",
    "list_backends",
    "open_session",
    "parse_route",
    "platform_of",
    "ranking",
    "register_backend",
    "route_of",
    "select_backend",
    "use_backend",
]
