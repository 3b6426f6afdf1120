"""Mamba 2's step beside the attention in front of it, both over columns of one product: graphs of several
layers give the bits that they give one after the other."""

from typing import Any

import pytest
import torch
from op_inputs.mamba2_step import make_mamba2_step_inputs
from op_inputs.state import Rows
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS

pytestmark = pytest.mark.gpu
LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 8, 8, 2, 128, 16


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("context", [40, 2000])
@pytest.mark.parametrize("requests", [1, 3, 8])
def test_mamba2_step_beside_attention(requests: int, context: int, backend: str) -> None:
    """Each layer's product overwrites that of the layer before it. Of several requests one is void, and rows
    of padding are behind them."""
    ops, options = BACKEND_OPS[backend], {"device": "cuda", "dtype": torch.bfloat16}
    void = (1,) if requests > 1 else ()
    padding = 2 * len(void)
    rows = Rows(((context, 1),) * requests, padded_tokens=padding, void=void)
    sizes = {"heads": 48, "groups": 1, "key_dim": 256, "value_dim": 64, "num_slots": requests + 2}
    given = make_mamba2_step_inputs(rows, dtype=torch.bfloat16, **sizes)
    given = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}
    for name in ("conv_state", "state"):
        given[name].normal_()
    widths = [48 * 64, given["x"].shape[1], 48, HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    inputs = torch.randn(LAYERS, requests + padding, 512, **options)
    weight = torch.randn(sum(widths), 512, **options) * 512**-0.5
    whole = torch.empty(requests + padding, sum(widths), **options)
    gate, x, dt, q, k, v = whole.split(widths, dim=1)
    q, k, v = (each.unflatten(1, (-1, DIM)) for each in (q, k, v))
    blocks = context // BLOCK + 1
    pools = torch.randn(2, requests * blocks + 1, BLOCK, KV_HEADS, DIM, **options)
    table = (torch.randperm(requests * blocks, device="cuda") + 1).int().view(requests, blocks)
    last = given["seq_lens"].long() - 1
    slots = table.gather(1, (last // BLOCK)[:, None]).long()[:, 0] * BLOCK + last % BLOCK
    slots = torch.cat([slots, slots.new_full((padding,), -1)])
    semaphores = [torch.zeros(64, dtype=torch.int32, device="cuda") for _ in range(2)]
    metadata = table, given["seq_lens"], given["query_start_loc"]

    def made(beside: bool) -> list[Tensor]:
        state = {name: given[name].clone() for name in ("conv_state", "state")}
        caches = [pool.clone() for pool in pools]
        outs = torch.empty(LAYERS, *given["out"].shape, **options)
        attended = torch.empty(LAYERS, *q.shape, **options)
        mixer: dict[str, Any] = {**given, **state, "x": x, "dt": dt, "semaphore": semaphores[0]}
        mixer |= {"gate": gate.unflatten(1, (48, 64)), "beside": beside}

        def run() -> None:
            for layer in range(LAYERS):
                ops.linear(inputs[layer], weight, whole)
                ops.write_kv(k, v, *caches, slots, are_query_tokens=True)
                own = {"max_query_len": 1, "scale": DIM**-0.5, "semaphore": semaphores[1]}
                ops.paged_attention(q, *caches, *metadata, attended[layer], **own)
                ops.mamba2_step(**mixer | {"out": outs[layer]})

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(20):
            for name, pool in state.items():
                pool.copy_(given[name])
            graph.replay()
        torch.cuda.synchronize()
        return [outs, attended, *state.values(), *caches]

    for got, want in zip(made(True), made(False), strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert not any(bool(semaphore.any()) for semaphore in semaphores)
