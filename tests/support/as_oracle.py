"""A backend's ``paged_attention`` against the float64 oracle."""

from typing import Any

from torchpaged.custom_ops import BackendOps
from torchpaged.testing import Batch, assert_attention_close, run_paged_attention


def assert_as_oracle(ops: BackendOps, batch: Batch, **options: Any) -> None:
    """Run it on ``batch`` and compare; ``options``: of the op."""
    assert_attention_close(*run_paged_attention(ops, batch, **options), batch, **options)
