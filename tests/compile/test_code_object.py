"""Copies of a function compile apart: more of them than dynamo's recompile limit, each as one graph."""

import pytest
import torch
from torch import Tensor

from torchpaged.compile.compile_cache import with_own_code


@pytest.mark.slow
def test_more_copies_than_the_recompile_limit() -> None:
    """fullgraph, and sizes as constants: with one shared code object the compile past the limit
    is refused."""

    def scaled(x: Tensor) -> Tensor:
        return x * factor

    factor, limit = 3, torch._dynamo.config.recompile_limit
    copies = [with_own_code(scaled, f"scaled_{n}") for n in range(limit + 2)]
    assert len({copy.__code__ for copy in copies}) == len(copies)
    assert copies[1].__name__ == "scaled_1"
    torch._dynamo.reset()
    for n, copy in enumerate(copies, 2):
        compiled = torch.compile(copy, fullgraph=True, dynamic=False, backend="eager")
        assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 3.0))
