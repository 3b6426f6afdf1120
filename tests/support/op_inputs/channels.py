"""Inputs and the oracle of ``selective_scan`` and ``rg_lru``: slices of one product."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from op_inputs.state import NAN, Rows, assert_op_close, batch_tensors, poisoned, tokens_of
from torchpaged.custom_ops import BackendOps
from torchpaged.testing.batches import on_host

#: Sizes: Mamba's states of 16, several tiles of channels, and odd ones; RecurrentGemma's blocks, one of them
#: wider than a tile, and rows that are no whole number of four; blocks of one channel.
CHANNEL_SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("selective_scan", {"channels": 300, "key_dim": 16}),
    "odd": ("selective_scan", {"channels": 7, "key_dim": 21, "gated": False}),
    "gemma": ("rg_lru", {"blocks": 3, "width": 144}),
    "narrow": ("rg_lru", {"blocks": 2, "width": 7, "gated": False}),
    "diagonal": ("rg_lru", {"blocks": 5, "width": 1}),
}


def make_channel_inputs(
    op: str,
    batch: Rows,
    *,
    channels: int = 40,
    key_dim: int = 1,
    blocks: int = 4,
    width: int = 10,
    gated: bool = True,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    seed: int = 0,
    num_slots: int = 9,
) -> dict[str, Any]:
    """Arguments of ``op``; ``out`` and what no row goes on from hold NaN. Decays from next to 1 to next to
    0."""
    torch.manual_seed(seed)
    given = batch_tensors(batch, num_slots)
    tokens = int(given["query_start_loc"][-1]) + batch.padded_tokens
    wide, exact = weight_dtype or dtype, torch.float64 if dtype == torch.float64 else torch.float32
    channels = blocks * width if op == "rg_lru" else channels
    sizes = [channels, channels, channels, key_dim, key_dim]
    whole = torch.randn(tokens, sum(sizes) + 5, dtype=dtype)[:, : sum(sizes)]
    x, gate, dt, b, c = whole.split(sizes, dim=1)
    state = torch.randn(num_slots, channels, key_dim, 1, dtype=state_dtype or exact)
    poisoned(state, batch, given["state_slots"])
    if op == "selective_scan":
        parameters = {
            "dt": dt,
            "a_log": torch.rand(channels, key_dim, dtype=wide) * 4,
            "dt_bias": torch.randn(channels, dtype=wide) - 2,
            "b": b,
            "c": c,
            "skip_weight": torch.randn(channels, dtype=wide),
        }
    else:
        weights = torch.randn(2, blocks, width, width, dtype=wide) / width**0.5
        biases = torch.randn(2, blocks, width, dtype=wide)
        parameters = {
            "input_weight": weights[0],
            "input_bias": biases[0],
            "recurrent_weight": weights[1],
            "recurrent_bias": biases[1],
            "recurrent_param": torch.randn(channels, dtype=wide) * 3 - 3,
        }
    longest = {"max_query_len": given.pop("max_query_len")}
    out = torch.full((tokens, channels), NAN, dtype=dtype)
    rows = {"state": state, **given, "out": out, "gate": gate if gated else None}
    return {"x": x, **parameters, **rows, **longest}


def _exact_channels(op: str, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The oracle: ``out`` and ``state`` in float64, a request at a time, all channels of a token at once."""
    at = {name: t.double() for name, t in inputs.items() if isinstance(t, Tensor) and t.is_floating_point()}
    out, state = torch.zeros_like(at["x"]), at["state"]
    for slot, begins, tokens in tokens_of(inputs):
        if begins and tokens:
            state[slot] = 0
        for t in tokens:
            x, h = at["x"][t], state[slot, ..., 0]
            if op == "selective_scan":
                step = torch.log1p((at["dt"][t] + at["dt_bias"]).exp())
                h = h * torch.exp(-at["a_log"].exp() * step[:, None]) + (step * x)[:, None] * at["b"][t]
                y = h @ at["c"][t] + at["skip_weight"] * x
                y = y if inputs["gate"] is None else y * at["gate"][t] / (1 + torch.exp(-at["gate"][t]))
            else:
                blocks = x.view(at["input_bias"].shape)
                gates = [
                    (torch.einsum("bi,bij->bj", blocks, at[f"{name}_weight"]) + at[f"{name}_bias"]).flatten()
                    for name in ("input", "recurrent")
                ]
                log_a = -8 * softplus(at["recurrent_param"]) / (1 + torch.exp(-gates[1]))
                root = 1.0 if begins and t == tokens[0] else (1 - torch.exp(2 * log_a)).sqrt()
                h = (h[:, 0] * torch.exp(log_a) + root * x / (1 + torch.exp(-gates[0])))[:, None]
                y = h[:, 0] if inputs["gate"] is None else h[:, 0] * at["gate"][t]
            state[slot, ..., 0], out[t] = h, y
    return {"out": out, "state": state}


@on_host()
def assert_channels_close(ops: BackendOps, reference: BackendOps, op: str, inputs: dict[str, Any]) -> None:
    """`assert_op_close`."""
    exact = _exact_channels(op, inputs)
    assert_op_close(ops, reference, op, inputs, exact, products=inputs["x"].dtype)
