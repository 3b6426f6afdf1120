"""Backends: one file each, behind one selector; what one keeps open between calls is a `Session`."""

from torchpaged.backends.base import Backend
from torchpaged.backends.capabilities import Capabilities, Planning
from torchpaged.backends.platforms import PLATFORMS, Platform, platform_of
from torchpaged.backends.ranking import Ranking
from torchpaged.backends.route import Route, parse_route
from torchpaged.backends.routed import route_of
from torchpaged.backends.selector import (
    ALIASES,
    Choice,
    backend_of,
    get_backend,
    list_backends,
    open_session,
    ranking,
    register_backend,
    select_backend,
    use_backend,
)
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.session import Limits, PlannedBatch, Session, assert_planned
from torchpaged.backends.spec import AttentionSpec, GraphSupport, attention_spec
from torchpaged.backends.tuned import Tuned, TunedFileWarning
from torchpaged.metadata import HostLengths

__all__ = [
    "ALIASES",
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
