"""Backends: one file each, behind one selector."""

from torchpaged.backends.base import AttentionSpec, Backend, Capabilities, GraphSupport
from torchpaged.backends.selector import Choice, get_backend, list_backends, register_backend, select_backend, use_backend

__all__ = [
    "AttentionSpec",
    "Backend",
    "Capabilities",
    "Choice",
    "GraphSupport",
    "get_backend",
    "list_backends",
    "register_backend",
    "select_backend",
    "use_backend",
]
