"""The state ops on a CPU: the oracle, chunk borders, slots used again, what is refused, the trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import Kernels, over
from op_inputs.state import (
    FAMILIES,
    STATE_BATCHES,
    Rows,
    assert_refused,
    assert_state_close,
    assert_threads_agree,
    clone,
    exact_conv,
    exact_linear,
    make_conv_inputs,
    make_linear_inputs,
)
from op_inputs.state_fuzz import fuzz_states
from torch._dynamo.testing import CompileCounterWithBackend

from torchpaged.custom_ops import BACKEND_OPS

REFERENCE = BACKEND_OPS["reference"]
BACKENDS = ("cpu", "reference", "default")
INF = float("inf")


everywhere = over(*BACKENDS, "triton", gpu=())


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("batch", STATE_BATCHES)
@everywhere
def test_convolution_matches_the_oracle(on: Kernels, batch: str, width: int) -> None:
    bias, activation = (True, "silu") if width == 4 else (False, "none")
    inputs = make_conv_inputs(STATE_BATCHES[batch], width=width, bias=bias, activation=activation)
    assert_state_close(on.ops, REFERENCE, "causal_conv", inputs)


@pytest.mark.slow_cases("triton-cpu-long-*", but=("triton-cpu-long-ssd",))
@pytest.mark.slow_cases("triton-cpu-*", but_every=3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", STATE_BATCHES)
@everywhere
def test_linear_attention_matches_the_oracle(on: Kernels, batch: str, family: str) -> None:
    inputs = make_linear_inputs(STATE_BATCHES[batch], **FAMILIES[family])
    assert_state_close(on.ops, REFERENCE, "linear_attention", inputs)


@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=["own", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, state_dtype: torch.dtype | None) -> None:
    if dtype == torch.float64 and state_dtype is not None:
        pytest.skip("float64 is kept in float64")
    batch, dtypes = STATE_BATCHES["chunks"], {"state_dtype": state_dtype or dtype, "out_dtype": state_dtype}
    for ops in (REFERENCE, BACKEND_OPS["cpu"]):
        inputs = make_conv_inputs(batch, dtype=dtype, gated=True)
        assert_state_close(ops, REFERENCE, "causal_conv", inputs)
        inputs = make_linear_inputs(batch, dtype=dtype, **dtypes)
        assert_state_close(ops, REFERENCE, "linear_attention", inputs)


@pytest.mark.parametrize("share", [range(4), pytest.param(range(4, 150), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_random_runs_match_the_oracle(backend: str, share: range) -> None:
    assert sum(fuzz_states(BACKEND_OPS[backend], REFERENCE, seed) for seed in share) >= 4 * len(share)


def split(inputs: dict[str, Any], chunk: slice, context: int) -> dict[str, Any]:
    """The call of some tokens of a single request."""
    count = chunk.stop - chunk.start
    part = {
        name: x[chunk] if name in ("x", "q", "k", "v", "g", "beta", "out") and x is not None else x
        for name, x in inputs.items()
    }
    return part | {
        "seq_lens": torch.tensor([context + count], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, count], dtype=torch.int32),
        "max_query_len": count,
    }


@pytest.mark.parametrize("lens", [(20,), (1,) * 20, (7, 1, 8, 4), (2, 1, 16, 1), (19, 1)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("op", ["causal_conv", "linear_attention"])
def test_chunks_make_no_difference(op: str, backend: str, lens: tuple[int, ...]) -> None:
    make = make_conv_inputs if op == "causal_conv" else make_linear_inputs
    inputs = make(Rows(((0, 20),)), dtype=torch.float64)
    if op == "linear_attention":
        inputs["state"] = inputs["state"].double()
    exact, pool = (exact_conv if op == "causal_conv" else exact_linear)(inputs)
    done = 0
    for count in lens:
        getattr(BACKEND_OPS[backend], op)(**split(inputs, slice(done, done + count), done))
        done += count
    torch.testing.assert_close(inputs["out"], exact, rtol=0, atol=1e-12)
    left = inputs["conv_state" if op == "causal_conv" else "state"]
    torch.testing.assert_close(left, pool, rtol=0, atol=1e-12, equal_nan=True)


def test_keys_that_are_all_alike() -> None:
    """The system of a chunk is then as badly conditioned as it can be."""
    inputs = make_linear_inputs(STATE_BATCHES["long"])
    inputs["k"].fill_(0.3)
    inputs["beta"].fill_(1.0)
    inputs["g"].fill_(-1e-3)
    assert_state_close(BACKEND_OPS["cpu"], REFERENCE, "linear_attention", inputs)


def test_decays_that_leave_nothing() -> None:
    """As of a token that begins anew, in the middle of a chunk."""
    inputs = make_linear_inputs(STATE_BATCHES["long"])
    inputs["g"][::7] = -300.0
    assert_state_close(BACKEND_OPS["cpu"], REFERENCE, "linear_attention", inputs)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 88.7), (torch.float64, 709.7)], ids=str)
def test_exponentials_next_to_the_largest_number(dtype: torch.dtype, most: float) -> None:
    """Powers of two are infinite before the exponentials are: no NaN comes of them, in a decay or in silu."""
    x = torch.linspace(most - 2, most - 1e-3, 48, dtype=dtype)
    row = {name: torch.tensor([1], dtype=torch.int32) for name in ("state_slots", "seq_lens")}
    row |= {"query_start_loc": torch.tensor([0, 1], dtype=torch.int32)}
    out, weight = torch.empty(1, 48, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype).expand(48, 2)
    pool = torch.zeros(2, 1, 48, dtype=dtype)
    BACKEND_OPS["cpu"].causal_conv(-x[None], weight, pool, **row, out=out, max_query_len=1, activation="silu")
    torch.testing.assert_close(out[0], -x * (-x).exp(), rtol=1e-4, atol=0)

    row["seq_lens"] = row["seq_lens"] + 1  # it goes on
    one, v = torch.ones(1, 1, 1, dtype=dtype), torch.zeros(1, 48, 4, dtype=dtype)
    pool, out = torch.full((2, 48, 1, 4), 1e-9, dtype=dtype), torch.empty_like(v)
    BACKEND_OPS["cpu"].linear_attention(
        one, one, v, x[None], pool, **row, out=out, max_query_len=1, scale=1.0
    )
    torch.testing.assert_close(out[0, :, 0], 1e-9 * x.exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("batch", ["decode", "chunks"])
@pytest.mark.parametrize("value_dim", [1, 24, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_infinite_state_is_the_references(
    family: str, value_dim: int, batch: str, dtype: torch.dtype
) -> None:
    """Where it stays infinite and where it becomes NaN, with decays of 1, next to it, and of 0; and one that
    becomes infinite between two tokens."""
    inputs = make_linear_inputs(
        STATE_BATCHES[batch], **FAMILIES[family], value_dim=value_dim, dtype=dtype, state_dtype=dtype
    )
    states = inputs["state"][inputs["state_slots"][0]], inputs["state"][inputs["state_slots"][1]]
    states[0][0, 3, 0], states[0][1, 5, -1], states[1][2, 0, 0] = INF, -INF, INF
    inputs["g"][0, :2], inputs["g"][:, 2], inputs["g"][-1, 3] = 0.0, -1e-3, -300.0
    if not inputs["delta_rule"]:  # whose products of the same token may differ
        states[1][2, 0, 0] = torch.finfo(dtype).max
        inputs["g"][inputs["query_start_loc"][1], 2] = 1.0
    others = clone(inputs)
    BACKEND_OPS["cpu"].linear_attention(**inputs)
    REFERENCE.linear_attention(**others)
    assert others["delta_rule"] or inputs["state"].isinf().any()
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2}[dtype]
    for name in ("out", "state"):
        torch.testing.assert_close(inputs[name], others[name], rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("op", ["causal_conv", "linear_attention"])
def test_a_slot_is_used_again(op: str) -> None:
    """By a request that begins: what the one before left in it, NaN too, has no part in anything."""
    make = make_conv_inputs if op == "causal_conv" else make_linear_inputs
    inputs = make(STATE_BATCHES["prompts"])
    pool = "conv_state" if op == "causal_conv" else "state"
    again = clone(inputs)
    again[pool] = torch.rand_like(again[pool])
    for given in (inputs, again):
        getattr(REFERENCE, op)(**given)
    assert torch.equal(inputs["out"], again["out"])
    slots = inputs["state_slots"].long()
    assert torch.equal(inputs[pool][slots], again[pool][slots])


@pytest.mark.parametrize("batch", ["no_tokens", "all_void"])
def test_nothing_is_written_for_rows_without_tokens_or_slots(batch: str) -> None:
    for op, pool, make in (
        ("causal_conv", "conv_state", make_conv_inputs),
        ("linear_attention", "state", make_linear_inputs),
    ):
        inputs = make(STATE_BATCHES[batch])
        before = inputs[pool].clone()
        for backend in BACKENDS:
            getattr(BACKEND_OPS[backend], op)(**inputs)
            torch.testing.assert_close(inputs[pool], before, rtol=0, atol=0, equal_nan=True)
            assert not inputs["out"].any()


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "two_rows_on_a_slot": ("state_slots", lambda a: {"state_slots": torch.full_like(a["state_slots"], 3)}),
    "a_slot_that_is_none": ("state_slots", lambda a: {"state_slots": a["state_slots"] + 90}),
    "a_slot_below": ("state_slots", lambda a: {"state_slots": a["state_slots"] - 90}),
    "slots_of_int64": ("state_slots", lambda a: {"state_slots": a["state_slots"].long()}),
    "lengths_of_fewer_rows": ("seq_lens", lambda a: {"seq_lens": a["seq_lens"][:1]}),
    "starts_that_fall": ("query_start_loc", lambda a: {"query_start_loc": a["query_start_loc"].flip(0)}),
    "too_small_a_maximum": ("max_query_len", lambda a: {"max_query_len": 2}),
}
BAD_CONV: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "x_of_another_dtype": ("weight", lambda a: {"x": a["x"].half()}),
    "too_wide": ("weight", lambda a: {"weight": torch.zeros(40, 9)}),
    "weights_of_another_width": ("conv_state", lambda a: {"weight": torch.zeros(40, 3)}),
    "an_unknown_activation": ("activation", lambda a: {"activation": "gelu"}),
    "out_on_x": ("x", lambda a: {"out": a["x"]}),
    "a_short_bias": ("bias", lambda a: {"bias": torch.zeros(4)}),
}
BAD_LINEAR: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "heads_that_do_not_divide": ("q", lambda a: {"q": torch.zeros(41, 3, 16)}),
    "keys_of_another_width": ("k", lambda a: {"k": torch.zeros(41, 2, 15)}),
    "decays_of_another_dtype": ("g", lambda a: {"g": a["g"].half()}),
    "decays_of_fewer_heads": ("g", lambda a: {"g": a["g"][:, :3].contiguous()}),
    "a_pool_of_another_width": ("state", lambda a: {"state": torch.zeros(9, 4, 16, 23)}),
    "a_pool_of_another_dtype": ("state", lambda a: {"state": torch.zeros(9, 4, 16, 24).bfloat16()}),
    "out_on_v": ("v", lambda a: {"v": a["out"]}),
    "no_scale": ("scale", lambda a: {"scale": 0.0}),
    "beta_of_fewer_heads": ("beta", lambda a: {"beta": torch.zeros(41, 1)}),
}


@pytest.mark.parametrize(
    ("op", "case"),
    [("causal_conv", case) for case in (*BAD, *BAD_CONV)]
    + [("linear_attention", case) for case in (*BAD, *BAD_LINEAR)],
)
def test_what_is_refused(op: str, case: str) -> None:
    is_conv = op == "causal_conv"
    given = (make_conv_inputs if is_conv else make_linear_inputs)(STATE_BATCHES["chunks"])
    name, change = (BAD | (BAD_CONV if is_conv else BAD_LINEAR))[case]
    assert_refused(op, given | change(given), name, "reference", "cpu")


@pytest.mark.parametrize("op", ["causal_conv", "linear_attention"])
def test_threads_do_not_change_the_answer(op: str, threads: Any) -> None:
    """Rows and heads, or channels, are shared out among them; each state is one thread's."""
    batch = STATE_BATCHES["long"]
    if op == "causal_conv":
        inputs = make_conv_inputs(batch, channels=3000)
    else:
        inputs = make_linear_inputs(batch, heads=8, key_dim=64, value_dim=128)
    assert_threads_agree(op, inputs, threads, "out", "conv_state" if op == "causal_conv" else "state")


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"),
    [(1, 300, 1, 1), (150, 300, 1, 1), (1, 200, 16, 1), (3, 150, 21, 1), (1, 3, 5, 130)],
)
@pytest.mark.parametrize("by_key", [False, True])
def test_widths(key_heads: int, heads: int, key_dim: int, value_dim: int, by_key: bool) -> None:
    """Heads of one value column, taken together, and of one number; columns behind the last whole tile."""
    sizes = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    inputs = make_linear_inputs(STATE_BATCHES["decode_padded"], **sizes, delta=not by_key, by_key=by_key)
    assert_state_close(BACKEND_OPS["cpu"], REFERENCE, "linear_attention", inputs)


def test_one_graph_for_all_batches() -> None:
    """Compiled with dynamic sizes once, and no pool is copied around."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def step(conv: dict[str, Any], linear: dict[str, Any]) -> None:
        REFERENCE.causal_conv(**conv)
        REFERENCE.linear_attention(**linear)

    for batch in ("chunks", "mixed_empty"):
        conv, linear = make_conv_inputs(STATE_BATCHES[batch]), make_linear_inputs(STATE_BATCHES[batch])
        exact = exact_conv(conv)[0], exact_linear(linear)[0]
        conv["max_query_len"] = linear["max_query_len"] = 32
        for name in ("x", "q", "k", "v", "g", "beta", "out", "state_slots", "seq_lens", "query_start_loc"):
            for given in (conv, linear):
                if name in given:
                    torch._dynamo.decorators.mark_unbacked(given[name], 0)
        step(conv, linear)
        torch.testing.assert_close(conv["out"].double(), exact[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(linear["out"].double(), exact[1], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
