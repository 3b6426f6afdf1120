"""The ops of torchpaged: the registry, and a folder per family of ops with contract, checks, fakes, reference
and kernels.

Import as ``torchpaged.custom_ops``. This package imports torch only. `BACKEND_OPS` has the handles of each
backend, as `BackendOps`; `native_status` says whether the library of CPU kernels was loaded.
"""

if __name__ != "torchpaged.custom_ops":
    raise ImportError(
        f"import torchpaged.custom_ops, not {__name__!r}: a second copy of this package would register "
        "every op schema twice"
    )

from torchpaged.custom_ops.registry import BACKEND_OPS, BackendOps, native_status

__all__ = ["BACKEND_OPS", "BackendOps", "native_status"]
