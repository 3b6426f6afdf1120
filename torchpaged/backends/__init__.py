"""Backends: one file each, behind one selector."""

from torchpaged.backends.base import Backend, Capabilities
from torchpaged.backends.selector import Choice, backend_of, get_backend, list_backends, register_backend, select_backend, use_backend
from torchpaged.backends.spec import AttentionSpec, GraphSupport, attention_spec

__all__ = [
    "AttentionSpec",
    "Backend",
    "Capabilities",
    "Choice",
    "GraphSupport",
    "attention_spec",
    "backend_of",
    "get_backend",
    "list_backends",
    "register_backend",
    "select_backend",
    "use_backend",
]
