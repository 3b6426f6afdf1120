"""FlexAttention on the seam: torch's own higher-order op in the trace, a BlockMask planned per step in
tensors that never move."""

from __future__ import annotations

import pytest
import torch
from flex_backend import FLEX, FlexSession
from small_gpt import (
    BLOCK,
    BLOCKS,
    GPT,
    STEPS,
    TABLES,
    TOKENS,
    WIDTH,
    batch,
    close_to_dense,
    decode_runner,
    fed,
)

from torchpaged import Limits, PlanError
from torchpaged.graphs.capture import EagerCapture


@pytest.fixture
def gpt() -> GPT:
    return GPT(FLEX.open([], Limits(4, 32, WIDTH, BLOCKS, BLOCK), "cpu"))


@torch.no_grad()
def test_eagerly(gpt: GPT) -> None:
    with pytest.raises(PlanError):
        gpt(fed(*STEPS[0]), batch(*STEPS[0]))
    for step in STEPS:
        metadata = batch(*step)
        gpt.session.plan(metadata)
        close_to_dense(gpt, gpt(fed(*step), metadata), *step)


@pytest.mark.slow_cases("inductor")
@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_one_trace_for_all_batches(gpt: GPT, backend: str) -> None:
    """The higher-order op stands in the graph of every layer. Inductor's CPU kernels are made for the first
    shape: a minute of compilation."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph if backend == "eager" else torch._inductor.compile(graph, inputs)

    compiled = torch.compile(gpt, fullgraph=True, dynamic=backend == "eager", backend=compiler)
    for step in STEPS if backend == "eager" else STEPS[:1]:
        metadata = batch(*step)
        metadata.max_query_len = 9  # an upper bound: a constant of the trace
        gpt.session.plan(metadata)
        close_to_dense(gpt, compiled(fed(*step), metadata), *step)
    (graph,) = graphs
    assert sum("flex_attention" in str(node.target) for node in graph.graph.nodes) == len(gpt.layers)
    with pytest.raises(RuntimeError, match="plan: expected one for this batch"):
        compiled(fed(*STEPS[0]), batch([5, 4], [6, 5]))


def test_a_runner_plans_every_step(gpt: GPT) -> None:
    session = gpt.session
    assert isinstance(session, FlexSession)
    runner = decode_runner(gpt, num_blocks=BLOCKS, buckets=[4], capture=EagerCapture())
    runner.capture()
    for length in range(1, 8):
        logits = runner.run(TOKENS[:2, length - 1], [length] * 2, TABLES[:2])
        close_to_dense(gpt, logits, [1, 1], [length] * 2)
    assert session.plans_made == 1 + 7
