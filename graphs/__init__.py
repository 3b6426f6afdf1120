"""Graph capture of decode and prefill steps: static buffers, buckets, capture backends, and the runners that tie them.

Import as ``torchpaged.graphs``. It knows buffers and callables, never a backend or a model.
"""

if __name__ != "torchpaged.graphs":
    raise ImportError(f"import torchpaged.graphs, not {__name__!r}")

from torchpaged.graphs.buckets import bucket_for, buckets_by_cost, default_buckets, default_prefill_buckets
from torchpaged.graphs.buffers import DecodeBuffers
from torchpaged.graphs.capture import CaptureBackend, CudaCapture, EagerCapture, TapeCapture
from torchpaged.graphs.launch_ring import LaunchRing
from torchpaged.graphs.packed_buffers import PackedBuffers
from torchpaged.graphs.packed_runner import PackedGraphRunner
from torchpaged.graphs.report import BucketReport, bucket_table
from torchpaged.graphs.ring import RingFullError, TokenRing
from torchpaged.graphs.row_state import MAX_STOP_TOKEN_IDS, RowState, token_bits
from torchpaged.graphs.rows import DecodeRows, StepOps
from torchpaged.graphs.runner import DecodeGraphRunner

__all__ = [
    "MAX_STOP_TOKEN_IDS",
    "BucketReport",
    "CaptureBackend",
    "CudaCapture",
    "DecodeBuffers",
    "DecodeGraphRunner",
    "DecodeRows",
    "EagerCapture",
    "LaunchRing",
    "PackedBuffers",
    "PackedGraphRunner",
    "RingFullError",
    "RowState",
    "StepOps",
    "TapeCapture",
    "TokenRing",
    "bucket_for",
    "bucket_table",
    "buckets_by_cost",
    "default_buckets",
    "default_prefill_buckets",
    "token_bits",
]
