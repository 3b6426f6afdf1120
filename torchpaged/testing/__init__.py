"""What a kernel author needs to prove a backend: named batch specs, poisoned inputs, error budgets, an
opcheck table.

    spec = BATCH_SPECS["mixed_small"]
    batch = make_batch(spec, num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    out, lse = run_paged_attention(BACKEND_OPS["triton"], batch, causal=True)
    assert_attention_close(out, lse, batch, causal=True)

    check_conformance(MY_BACKEND)  # right or refused: batches, features, eager, compiled and captured
    check_graph_support(MY_BACKEND)  # it holds what it declares, or an AssertionError says what it does hold
    check_batch_invariance(MY_BACKEND)  # a request has the same bits in any company, or an AssertionError

``layers``, ``sampling`` and ``rope`` have the inputs of the other ops, ``graph_conformance`` the proof of a
declared graph support.
Nothing in the library imports this package.
"""

from torchpaged.testing.batch_invariance import (
    COMPANIES,
    BatchInvarianceReport,
    Company,
    check_batch_invariance,
)
from torchpaged.testing.batches import BATCH_SPECS, GARBAGE, Batch, BatchSpec, make_batch
from torchpaged.testing.conformance import Check, ConformanceReport, check_conformance, conformance_checks
from torchpaged.testing.graph_support import GraphSupportReport, check_graph_support
from torchpaged.testing.latent import assert_latent_close, make_latent_batch, run_mla_attention
from torchpaged.testing.oracle import (
    ATTENTION_VARIANTS,
    assert_attention_close,
    assert_rope_close,
    assert_within_budget,
    opcheck_cases,
    oracle,
    run_paged_attention,
)
from torchpaged.testing.rope import ROPE_CASES, make_rope_inputs
from torchpaged.testing.trees import (
    TREE_SPECS,
    TreeSpec,
    branches_of,
    make_tree_batch,
    random_parents,
    tree_spec,
)

__all__ = [
    "ATTENTION_VARIANTS",
    "BATCH_SPECS",
    "COMPANIES",
    "GARBAGE",
    "ROPE_CASES",
    "TREE_SPECS",
    "Batch",
    "BatchInvarianceReport",
    "BatchSpec",
    "Check",
    "Company",
    "ConformanceReport",
    "GraphSupportReport",
    "TreeSpec",
    "assert_attention_close",
    "assert_latent_close",
    "assert_rope_close",
    "assert_within_budget",
    "branches_of",
    "check_batch_invariance",
    "check_conformance",
    "check_graph_support",
    "conformance_checks",
    "make_batch",
    "make_latent_batch",
    "make_rope_inputs",
    "make_tree_batch",
    "opcheck_cases",
    "oracle",
    "random_parents",
    "run_mla_attention",
    "run_paged_attention",
    "tree_spec",
]
