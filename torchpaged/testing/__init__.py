"""What a kernel author needs to prove a backend: named batch specs, poisoned inputs and error budgets.

    spec = BATCH_SPECS["mixed_small"]
    batch = make_batch(spec, num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    out, lse = run_paged_attention(BACKEND_OPS["triton"], batch, causal=True)
    assert_attention_close(out, lse, batch, causal=True)

    check_conformance(MY_BACKEND)  # right or refused: batches, features, eager, compiled and captured
    check_graph_support(MY_BACKEND)  # it holds what it declares, or an AssertionError says what it does hold
    check_batch_invariance(MY_BACKEND)  # a request has the same bits in every batch, or an AssertionError

`BATCH_SPECS` and `ATTENTION_VARIANTS` are what is run, a `BatchSpec` of your own makes another `Batch`;
`assert_within_budget` is the tolerance. `conformance_checks` gives the checks one by one; `SURROUNDINGS` are
the batches that `check_batch_invariance` puts a request into. Nothing in the library imports this package.
"""

from torchpaged.testing.batch_invariance import SURROUNDINGS, check_batch_invariance
from torchpaged.testing.batches import BATCH_SPECS, Batch, BatchSpec, make_batch
from torchpaged.testing.conformance import check_conformance, conformance_checks
from torchpaged.testing.graph_support import check_graph_support
from torchpaged.testing.oracle import (
    ATTENTION_VARIANTS,
    assert_attention_close,
    assert_within_budget,
    oracle,
    run_paged_attention,
)

__all__ = [
    "ATTENTION_VARIANTS",
    "BATCH_SPECS",
    "SURROUNDINGS",
    "Batch",
    "BatchSpec",
    "assert_attention_close",
    "assert_within_budget",
    "check_batch_invariance",
    "check_conformance",
    "check_graph_support",
    "conformance_checks",
    "make_batch",
    "oracle",
    "run_paged_attention",
]
