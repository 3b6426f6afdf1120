"""Graph capture of decode steps: static buffers, batch buckets, capture backends, and the runner that ties them.

Import as ``torchpaged.graphs``. It knows buffers and callables, never a backend or a model.
"""

if __name__ != "torchpaged.graphs":
    raise ImportError(f"import torchpaged.graphs, not {__name__!r}")

from torchpaged.graphs.buckets import bucket_for, default_buckets
from torchpaged.graphs.buffers import DecodeBuffers
from torchpaged.graphs.capture import CaptureBackend, CudaCapture, EagerCapture, TapeCapture
from torchpaged.graphs.runner import BucketReport, DecodeGraphRunner

__all__ = [
    "BucketReport",
    "CaptureBackend",
    "CudaCapture",
    "DecodeBuffers",
    "DecodeGraphRunner",
    "EagerCapture",
    "TapeCapture",
    "bucket_for",
    "default_buckets",
]
