"""Batches, runs and the oracle of ``causal_conv`` and ``linear_attention``."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from torchpaged import ArgumentError
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.state.call import LinearAttentionCall
from torchpaged.testing.batches import on_host
from torchpaged.testing.oracle import assert_within_budget

NAN = float("nan")
#: Options of `make_linear_inputs`: gated delta net, Mamba 2, a decay alone, a decay per key with and without
#: the delta rule.
FAMILIES: dict[str, dict[str, Any]] = {
    "delta": {},
    "ssd": {"delta": False, "key_heads": 1},
    "decay": {"delta": False, "beta": False, "key_heads": 4},
    "kda": {"by_key": True, "key_heads": 4},
    "by_key": {"by_key": True, "delta": False},
}


class Rows(NamedTuple):
    """A batch: ``(context, query_len)`` of each row, tokens behind the last row, tokens of left padding of
    each row, and rows without a slot."""

    rows: tuple[tuple[int, int], ...]
    padded_tokens: int = 0
    left: tuple[int, ...] = ()
    void: tuple[int, ...] = ()


#: Named batches. In ``void`` rows the slot is 0, as in padded rows of a graph.
STATE_BATCHES = {
    "decode": Rows(((5, 1), (1, 1), (300, 1))),
    "decode_begins": Rows(((0, 1), (2, 1), (0, 1))),
    "decode_padded": Rows(((5, 1), (0, 1), (7, 1), (0, 1)), padded_tokens=2, left=(0, 1, 0, 1), void=(1, 3)),
    "verify": Rows(((5, 8), (0, 8), (1, 3), (9, 2))),
    "prompts": Rows(((0, 33), (0, 1), (0, 17))),
    "chunks": Rows(((16, 16), (1, 18), (2, 2), (40, 5))),
    "mixed_empty": Rows(((4, 0), (0, 21), (9, 1), (0, 0), (3, 1)), padded_tokens=3, void=(3,)),
    "left_padding": Rows(((0, 6), (0, 6), (0, 6), (0, 6)), left=(0, 2, 5, 6)),
    "long": Rows(((0, 150), (7, 1), (70, 65), (0, 3), (1, 9)), padded_tokens=1, left=(20, 0, 0, 0, 0)),
    "no_tokens": Rows(((4, 0), (0, 0))),
    "all_void": Rows(((0, 2), (5, 1)), padded_tokens=1, void=(0, 1)),
}
#: Rows that end at a chunk's border or a token off it; a chunk of left padding; a long row without a slot.
LONG_BATCHES = {
    "borders": Rows(((0, 64), (3, 65), (0, 130), (1, 17), (5, 16), (9, 129)), 70, left=(0, 0, 65, 0, 0, 0)),
    "void_row": Rows(((7, 40), (0, 70), (2, 1), (1, 33)), void=(1,)),
}


def batch_tensors(batch: Rows, num_slots: int) -> dict[str, Any]:
    """``state_slots`` (shuffled, 0 in void rows), ``seq_lens``, ``query_start_loc``, ``max_query_len``."""
    lens = [count for _, count in batch.rows]
    left = batch.left or (0,) * len(lens)
    seq_lens = [context + count - pad for (context, count), pad in zip(batch.rows, left, strict=True)]
    slots = (torch.randperm(num_slots - 1)[: len(lens)] + 1).tolist()
    return {
        "state_slots": torch.tensor(
            [0 if row in batch.void else slot for row, slot in enumerate(slots)], dtype=torch.int32
        ),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
        "max_query_len": max(*lens, 1),
    }


def poisoned(pool: Tensor, batch: Rows, slots: Tensor) -> Tensor:
    """NaN wherever no row goes on from: in slot 0, in free slots, and where a request begins."""
    kept = pool.clone()
    pool.fill_(NAN)
    for (context, _), slot in zip(batch.rows, slots.tolist(), strict=True):
        if context and slot:
            pool[slot] = kept[slot]
    return pool


def make_conv_inputs(
    batch: Rows,
    *,
    channels: int = 40,
    width: int = 4,
    bias: bool = True,
    activation: str = "silu",
    gated: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_slots: int = 9,
) -> dict[str, Any]:
    """Arguments of ``causal_conv``; ``out`` holds NaN. ``gated``: inputs and results have gates, slices of
    one product."""
    torch.manual_seed(seed)
    given = batch_tensors(batch, num_slots)
    num_tokens = int(given["query_start_loc"][-1]) + batch.padded_tokens
    pool = torch.randn(num_slots, width - 1, channels, dtype=dtype)
    return {
        "x": torch.randn(num_tokens, channels + 8, dtype=dtype)[:, :channels],
        "weight": torch.randn(channels, width, dtype=dtype) / width,
        "conv_state": poisoned(pool, batch, given["state_slots"]),
        **{name: given[name] for name in ("state_slots", "seq_lens", "query_start_loc")},
        "out": torch.full((num_tokens, channels), NAN, dtype=dtype),
        "bias": torch.randn(channels, dtype=dtype) if bias else None,
        "max_query_len": given["max_query_len"],
        "activation": activation,
        **_gates(num_tokens, channels, dtype, gated),
    }


def _gates(num_tokens: int, channels: int, dtype: torch.dtype, gated: bool) -> dict[str, Tensor | None]:
    whole = torch.randn(num_tokens, 2 * channels + 8, dtype=dtype) if gated else None
    return {
        "in_gate": None if whole is None else whole[:, 8 : channels + 8],
        "out_gate": None if whole is None else whole[:, channels + 8 :],
    }


def make_linear_inputs(
    batch: Rows,
    *,
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 24,
    delta: bool = True,
    beta: bool = True,
    by_key: bool = False,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    out_dtype: torch.dtype | None = None,
    seed: int = 0,
    num_slots: int = 9,
) -> dict[str, Any]:
    """Arguments of ``linear_attention``; ``out`` holds NaN. With the delta rule keys are normalised, as
    gated delta nets do; without, as Mamba 2 has it, not."""
    torch.manual_seed(seed)
    given = batch_tensors(batch, num_slots)
    num_tokens = int(given["query_start_loc"][-1]) + batch.padded_tokens
    pool = torch.randn(num_slots, heads, key_dim, value_dim, dtype=state_dtype)
    packed = torch.randn(num_tokens, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype)
    q, k, v = packed.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], dim=-1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "q": q.unflatten(-1, (key_heads, key_dim)),
        "k": k.unflatten(-1, (key_heads, key_dim)),
        "v": v.unflatten(-1, (heads, value_dim)),
        "g": -torch.rand(num_tokens, heads, *((key_dim,) if by_key else ()), dtype=wide) * 2,
        "state": poisoned(pool, batch, given["state_slots"]),
        **{name: given[name] for name in ("state_slots", "seq_lens", "query_start_loc")},
        "out": torch.full((num_tokens, heads, value_dim), NAN, dtype=out_dtype or dtype),
        "beta": torch.rand(num_tokens, heads, dtype=dtype) if beta else None,
        "max_query_len": given["max_query_len"],
        "scale": key_dim**-0.5,
        "delta_rule": delta,
        "normalize": delta,
    }


def with_odd_strides(inputs: dict[str, Any], extra: int = 5) -> dict[str, Any]:
    """The same with q, k and v in rows that are ``extra`` numbers longer, of NaN, behind one number more."""

    def moved(x: Tensor) -> Tensor:
        width = x.shape[1] * x.shape[2]
        rows = x.new_full((x.shape[0] * (width + extra) + 1,), NAN)[1:].view(x.shape[0], width + extra)
        return rows[:, :width].unflatten(-1, x.shape[1:]).copy_(x)

    return inputs | {name: moved(inputs[name]) for name in "qkv"}


def with_nan_in_padding(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with NaN in all that tokens without a state give: padding, and rows without a slot."""
    away = torch.ones(len(inputs["v"]), dtype=torch.bool)
    for _, _, tokens in tokens_of(inputs):
        away[tokens.start : tokens.stop] = False
    for name in ("q", "k", "v", "g", "beta"):
        if inputs[name] is not None:
            inputs[name][away] = NAN
    return inputs


def tokens_of(inputs: dict[str, Any]) -> list[tuple[int, bool, range]]:
    """Of each row its slot, whether it begins, and its tokens that are no padding."""
    starts, found = inputs["query_start_loc"].tolist(), []
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        seq_len, slot = int(inputs["seq_lens"][row]), int(inputs["state_slots"][row])
        first = begin + max(end - begin - seq_len, 0)
        found.append((slot, seq_len <= end - begin, range(first, end) if slot else range(0)))
    return found


def exact_conv(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The oracle: ``out`` and ``conv_state`` in float64, a request at a time."""
    x, weight, state = (inputs[name].double() for name in ("x", "weight", "conv_state"))
    if inputs["in_gate"] is not None:  # rounded, as the state keeps it
        x = (inputs["in_gate"].double() * x).to(inputs["x"].dtype).double()
    out, width = torch.zeros_like(x), weight.shape[1]
    for slot, begins, tokens in tokens_of(inputs):
        if tokens:
            past = torch.zeros_like(state[slot]) if begins else state[slot]
            line = torch.cat((past, x[tokens.start : tokens.stop]))
            y = (line.unfold(0, width, 1) * weight).sum(-1)
            y = y if inputs["bias"] is None else y + inputs["bias"]
            y = y * y.sigmoid() if inputs["activation"] == "silu" else y
            part = slice(tokens.start, tokens.stop)
            out[part] = y if inputs["out_gate"] is None else y * inputs["out_gate"][part]
            state[slot] = line[1 - width :]
    return out, state


def exact_linear(inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The oracle: ``out`` and ``state`` in float64, a token at a time."""
    q, k, v, g, state = (inputs[name].double() for name in ("q", "k", "v", "g", "state"))
    beta = torch.ones(g.shape[:2]) if inputs["beta"] is None else inputs["beta"].double()
    if inputs["normalize"]:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
    out, decay = torch.zeros_like(v), g.exp()[..., None] if g.dim() == 3 else g.exp()[..., None, None]
    for slot, begins, tokens in tokens_of(inputs):
        matrix = torch.zeros_like(state[slot]) if begins else state[slot].clone()
        for t in tokens:
            matrix *= decay[t]
            seen = (k[t, :, None] @ matrix)[:, 0] if inputs["delta_rule"] else 0.0
            matrix += k[t, :, :, None] * (beta[t, :, None] * (v[t] - seen))[:, None]
            out[t] = inputs["scale"] * (q[t, :, None] @ matrix)[:, 0]
        if tokens:
            state[slot] = matrix
    return out, state


def clone(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in memory of their own."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}


def assert_refused(op: str, given: dict[str, Any], name: str, *backends: str) -> None:
    """By each, naming the argument, before anything is written; by native kernels as a RuntimeError."""
    before = clone(given)
    for backend in backends:
        error, begin = (ArgumentError, "^") if backend == "reference" else (RuntimeError, "(^|, )")
        with pytest.raises(error, match=f"{begin}{name}: expected"):
            getattr(BACKEND_OPS[backend], op)(**given)
    for each, x in before.items():
        if isinstance(x, Tensor):
            torch.testing.assert_close(given[each], x, rtol=0, atol=0, equal_nan=True)


def assert_threads_agree(op: str, inputs: dict[str, Any], threads: Any, *written: str) -> None:
    """One thread and three give the same bits."""
    again = clone(inputs)
    for count, given in ((1, inputs), (3, again)):
        threads(count)
        getattr(BACKEND_OPS["cpu"], op)(**given)
    for name in written:
        torch.testing.assert_close(inputs[name], again[name], rtol=0, atol=0, equal_nan=True)


def chunks_of(call: LinearAttentionCall, chunk: int, short: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Of each chunk of rows of more than ``short`` tokens those tokens that a state sees, their columns in
    it, and its number among all."""
    for row, (begin, end) in enumerate(itertools.pairwise(call.query_start_loc.tolist())):
        count = end - begin
        first = max(count - int(call.seq_lens[row]), 0)
        if first < count > short and int(call.state_slots[row]):
            for base in range(first // chunk * chunk, count, chunk):
                tokens = torch.arange(max(base, first), min(base + chunk, count)) + begin
                yield tokens, tokens - begin - base, begin // chunk + row + base // chunk


def assert_zeros(call: LinearAttentionCall, live: Tensor, short: int) -> int:
    """What the first kernel of long rows leaves in ``out``, which held 7: zeros for their tokens
    that no state sees and for padding, and all else as it was. Gives the number of such tokens.

    Args:
        call: the call.
        live: ``[num_tokens]`` bool, tokens that a state sees in rows of more than ``short`` tokens.
        short: tokens up to which a row is another kernel's.
    """
    starts, long = call.query_start_loc.tolist(), torch.ones(len(live) + 1, dtype=torch.bool)
    for begin, end in itertools.pairwise(starts):
        long[begin:end] = end - begin > short
    zeros = ~live & long[:-1]
    assert (call.out[zeros] == 0).all()
    assert (call.out[~zeros] == 7.0).all()
    return int(zeros.sum())


def assert_op_close(
    ops: BackendOps,
    reference: BackendOps,
    op: str,
    inputs: dict[str, Any],
    exact: dict[str, Tensor],
    products: torch.dtype | None = None,
    factor: float | None = None,
) -> None:
    """Run one backend's op: what it writes against ``exact``, the oracle's, within the error budget of their
    dtypes; NaN where no row wrote. ``products``: the dtype to which the backend rounds what it multiplies,
    where that is coarser than its results: then their budget is that of this dtype. ``factor``: of the
    reference's error; default: 6 in float32, where nothing hides the order of sums, else 2."""
    host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in clone(inputs).items()}
    getattr(reference, op)(**host)
    getattr(ops, op)(**inputs)
    for name, want in exact.items():
        dtype = products or inputs[name].dtype
        times = factor or (6.0 if dtype == torch.float32 else 2.0)
        assert_within_budget(f"{op} {name}", inputs[name], host[name], want, dtype, times)


@on_host()
def assert_state_close(
    ops: BackendOps, reference: BackendOps, op: str, inputs: dict[str, Any], *budget: Any, **options: Any
) -> None:
    """`assert_op_close` of ``causal_conv`` or ``linear_attention``: ``out``, and the pool it leaves."""
    pool, oracle = ("conv_state", exact_conv) if op == "causal_conv" else ("state", exact_linear)
    exact = dict(zip(("out", pool), oracle(inputs), strict=True))
    assert_op_close(ops, reference, op, inputs, exact, *budget, **options)
