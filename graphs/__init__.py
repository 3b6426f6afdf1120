"""Graph capture of decode and prefill steps: static buffers, buckets, capture backends, and the runners that
tie them.

Import as ``torchpaged.graphs``. It knows buffers and callables, never a backend, a model or sampling:
`CaptureBackend` is how a step is captured: `CudaCapture`, or `TapeCapture` on a CPU. `BucketedGraphs`
captures any callable over static inputs, the two runners load batches from the host into theirs, and the
engine derives one for requests that stay on the device.
"""

if __name__ != "torchpaged.graphs":
    raise ImportError(f"import torchpaged.graphs, not {__name__!r}")

from torchpaged.graphs.bucketed import BucketedGraphs
from torchpaged.graphs.buckets import buckets_by_cost
from torchpaged.graphs.capture import CaptureBackend, CudaCapture, TapeCapture
from torchpaged.graphs.packed_buffers import PackedBuffers
from torchpaged.graphs.packed_runner import PackedGraphRunner
from torchpaged.graphs.report import bucket_table
from torchpaged.graphs.runner import DecodeGraphRunner

__all__ = [
    "BucketedGraphs",
    "CaptureBackend",
    "CudaCapture",
    "DecodeGraphRunner",
    "PackedBuffers",
    "PackedGraphRunner",
    "TapeCapture",
    "bucket_table",
    "buckets_by_cost",
]
