"""States that single tokens' kernels read ahead of their wait, of a new step: graphs of several steps give
the bits that they give without."""

from functools import partial
from typing import Any

import pytest
import torch
from op_inputs.delta_step import SIZES, make_delta_step_inputs
from op_inputs.mamba2_step import MAMBA2_SIZES, make_mamba2_step_inputs
from op_inputs.state import Rows
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

pytestmark = pytest.mark.gpu
STEPS = 12
MAKE: dict[str, Any] = {
    "delta_step": partial(make_delta_step_inputs, **SIZES["qwen3_next"]),
    "mamba2_step": partial(make_mamba2_step_inputs, **MAMBA2_SIZES["granite"]),
}


@pytest.mark.parametrize("op", MAKE)
@pytest.mark.parametrize("requests", [1, 3, 8, 40])
def test_states_of_new_steps(op: str, requests: int) -> None:
    """Between two steps nothing but the writer of lengths waits before it lets others begin. A product of one
    long CTA is ahead of each op, so that what begins early does so long before the step before it could have
    been noticed. Slots are shuffled, one of several requests is void, another begins."""
    ops = BACKEND_OPS["cuda"]
    rows = Rows(
        tuple((n % 4, 1) for n in range(requests)), void=(1,) if requests > 1 else (), padded_tokens=2
    )
    given = MAKE[op](rows, dtype=torch.bfloat16, num_slots=2 * requests + 2)
    given = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}
    for name in ("conv_state", "state"):
        given[name].normal_()
    whole = torch.empty_like(given["x"], memory_format=torch.contiguous_format)
    inputs = torch.randn(STEPS, whole.shape[0], 8192, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(whole.shape[1], 8192, dtype=torch.bfloat16, device="cuda") * 8192**-0.5
    lengths = given["seq_lens"] - 1

    def made(new_step: bool) -> list[Tensor]:
        state = {name: given[name].clone() for name in ("conv_state", "state")}
        given["seq_lens"].copy_(lengths)
        outs = [torch.full_like(given["out"], float("nan")) for _ in range(STEPS)]

        def run() -> None:
            for step in range(STEPS):
                given["seq_lens"].add_(1)
                ops.linear(inputs[step], weight, whole)
                getattr(ops, op)(**given | state | {"x": whole, "out": outs[step], "new_step": new_step})

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for name, pool in state.items():
            pool.copy_(given[name])
        given["seq_lens"].copy_(lengths)
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        return [*outs, *state.values()]

    for got, want in zip(made(True), made(False), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert got.isfinite().any()
