"""Host launches pass up to 37 tensors, numbers and strides to a Triton kernel by position, since by keyword
an eager call takes twice as long. So each place is checked against the name that the kernel gives it.

Kernels of attention and of cache writes take records, whose fields have names on both sides.

Every tensor of a call has strides that nothing else in it has, the launch is recorded instead of done, and
each parameter that is no constexpr must have received just what its name says. No two of them are alike, so
that a swap can't pass.
"""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from launched import recorded

from torchpaged.custom_ops.layers.call import NormCall
from torchpaged.custom_ops.layers.triton.act_and_mul import act_and_mul
from torchpaged.custom_ops.layers.triton.embedding import embedding
from torchpaged.custom_ops.layers.triton.rms_norm import rms_norm
from torchpaged.custom_ops.mla.call import LatentWriteCall
from torchpaged.custom_ops.mla.triton.rope_write_latent import LatentNorm, rope_write_latent
from torchpaged.custom_ops.state.call import ConvCall, LinearAttentionCall
from torchpaged.custom_ops.state.triton.causal_conv import causal_conv
from torchpaged.custom_ops.state.triton.linear_attention import linear_attention
from torchpaged.custom_ops.state.triton.records import Batch, Gate, State
from torchpaged.custom_ops.step_end.call import AcceptCall, AdvanceCall, FinishCall, SampleCall
from torchpaged.custom_ops.step_end.triton.accept_tokens import accept_tokens
from torchpaged.custom_ops.step_end.triton.advance_step import advance_step
from torchpaged.custom_ops.step_end.triton.finish_step import finish_step
from torchpaged.custom_ops.step_end.triton.sample_tokens import sample_tokens
from torchpaged.custom_ops.triton.records import KeyPool, Pool, Results, Tokens

OPS = Path(__file__).parents[3] / "custom_ops"
_extra = itertools.count(3)


def spread(tensor: Tensor, last: int = 1) -> Tensor:
    """The same values with strides that no other tensor has; ``last``: of the last dimension."""
    strides, extent = [last], tensor.shape[-1] * last
    for size in reversed(tensor.shape[:-1]):
        strides.insert(0, extent + next(_extra))
        extent = strides[0] * size
    spread = tensor.new_empty(extent + 1).as_strided(tensor.shape, strides)
    return spread.copy_(tensor)


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return spread(torch.rand(shape).to(dtype))


def longs(*values: int) -> Tensor:
    return torch.tensor(values)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def strides(tensor: Tensor, *names: str) -> dict[str, int]:
    return dict(zip(names, tensor.stride(), strict=False))


#: What a kernel must receive, by its names for it: a value, or a test of memory that the launcher makes.
Expected = dict[str, Any]
#: A call of an op, and its launches in their order.
Case = tuple[Callable[[], None], list[tuple[str, Expected]]]


def advance() -> Case:
    sampled, ids, positions, slots = longs(5, 6), longs(1, 2), longs(7, 8), longs(17, 18)
    table, lens = spread(torch.ones(2, 19, dtype=torch.int32)), ints(9, 9)
    expected: Expected = {
        "sampled_ptr": sampled,
        "table_ptr": table,
        "ids_ptr": ids,
        "positions_ptr": positions,
        "lens_ptr": lens,
        "slots_ptr": slots,
        "num_reqs": 2,
        "capacity": 19 * 16,
        "table_row": table.stride(0),
    }
    return (
        lambda: advance_step(AdvanceCall(sampled, table, ids, positions, lens, slots, block_size=16)),
        [("advance_step_kernel", expected)],
    )


#: So many that a program of `sample_tiles_kernel` has three tiles.
VOCABULARY = 600_000


def rows() -> dict[str, Tensor]:
    """Two rows of a decode batch, by the names of the ops' arguments."""
    names = ("seeds", "input_ids", "positions", "slot_mapping", "counters", "sampled_token_ids", "tokens_out")
    return {
        **{name: longs(17, 18) for name in names},
        **{name: ints(9, 9) for name in ("seq_lens", "remaining", "top_k")},
        **{name: torch.rand(2) for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
        "logits": floats(2, VOCABULARY),
        "seen": spread(torch.zeros(2, -(-VOCABULARY // 32), dtype=torch.int32)),
        "block_table": spread(torch.ones(2, 19, dtype=torch.int32)),
        "stop_token_ids": spread(torch.ones(2, 21, dtype=torch.int64)),
        "ring": spread(torch.zeros(6, 4, 8, dtype=torch.int64)),
        "launches": torch.zeros(2, dtype=torch.int64),
    }


def end_of(row: dict[str, Tensor]) -> Expected:
    """What the kernels that end a step receive of their rows."""
    return {
        "table_ptr": row["block_table"],
        "stop_ptr": row["stop_token_ids"],
        "ids_ptr": row["input_ids"],
        "positions_ptr": row["positions"],
        "lens_ptr": row["seq_lens"],
        "slots_ptr": row["slot_mapping"],
        "counters_ptr": row["counters"],
        "remaining_ptr": row["remaining"],
        "seen_ptr": row["seen"],
        "tokens_ptr": row["tokens_out"],
        "ring_ptr": row["ring"],
        "launches_ptr": row["launches"],
        "num_stops": 21,
        "num_words": -(-VOCABULARY // 32),
        "capacity": 19 * 16,
        "table_row": row["block_table"].stride(0),
        "stop_row": row["stop_token_ids"].stride(0),
        "seen_row": row["seen"].stride(0),
        **strides(row["ring"], "ring_slot", "ring_step"),
        "num_slots": 5,
    }


def tiles_of(row: dict[str, Tensor]) -> Expected:
    """What the kernels that sample receive."""
    return {
        "logits_ptr": row["logits"],
        "temperature_ptr": row["temperature"],
        "top_k_ptr": row["top_k"],
        "top_p_ptr": row["top_p"],
        "min_p_ptr": row["min_p"],
        "penalty_ptr": row["repetition_penalty"],
        "seen_ptr": row["seen"],
        "seeds_ptr": row["seeds"],
        "counters_ptr": row["counters"],
        "parts_ptr": lambda x: x.dtype == torch.float32,
        "indices_ptr": lambda x: x.dtype == torch.int32,
        "vocab_size": VOCABULARY,
        "logits_row": row["logits"].stride(0),
        "seen_row": row["seen"].stride(0),
        "parts_row": 2 * 588 + 9408,
        "indices_row": 9408,
    }


#: Tiles of 1024 tokens, in groups of 64.
TILES = {"num_programs": 196, "num_tiles": 588, "num_groups": 9408}
#: The same number by what they are: a row of indices has one per group.
ALIKE = ("num_groups", "indices_row")


def accepted() -> Case:
    row = rows()
    taken = ("sampled_token_ids", "block_table", "stop_token_ids", "input_ids", "positions", "seq_lens")
    taken += ("slot_mapping", "counters", "remaining", "seen", "tokens_out", "ring", "launches")
    expected = end_of(row) | {"sampled_ptr": row["sampled_token_ids"], "num_reqs": 2}
    return (
        lambda: accept_tokens(AcceptCall(**{name: row[name] for name in taken}, block_size=16)),
        [("accept_tokens_kernel", expected)],
    )


def finished() -> Case:
    row = rows()
    own = {name: row[name] for name in row.keys() & set(SampleCall._fields)}
    rest = {name: row[name] for name in row.keys() & set(AcceptCall._fields) - {"sampled_token_ids"}}
    call = FinishCall(
        SampleCall(**own, out=row["tokens_out"]),
        AcceptCall(sampled_token_ids=None, **rest, block_size=16),  # type: ignore[arg-type]
    )
    return (
        lambda: finish_step(call),
        [("sample_tiles_kernel", tiles_of(row)), ("finish_step_kernel", tiles_of(row) | TILES | end_of(row))],
    )


def sampled() -> Case:
    row = rows()
    taken = ("logits", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seen", "seeds")
    merge = tiles_of(row) | TILES | {"out_ptr": row["tokens_out"]}
    return (
        lambda: sample_tokens(
            SampleCall(*(row[name] for name in (*taken, "counters")), out=row["tokens_out"])
        ),
        [("sample_tiles_kernel", tiles_of(row)), ("merge_tiles_kernel", merge)],
    )


def norms() -> Case:
    x, weight, out, residual, post = floats(3, 64), floats(64), floats(3, 64), floats(3, 64), floats(3, 64)
    expected: Expected = {
        "x_ptr": x,
        "weight_ptr": weight,
        "out_ptr": out,
        "residual_ptr": residual,
        "post_ptr": post,
        "eps": 0.25,
        "offset": 0.75,
        "x_row": x.stride(0),
        "out_row": out.stride(0),
        "residual_row": residual.stride(0),
        "post_row": post.stride(0),
    }
    return (
        lambda: rms_norm(NormCall(x, weight, out, 0.25, 0.75, residual, post)),
        [("rms_norm_kernel", expected)],
    )


def embedded() -> Case:
    ids, weight, scale, out = longs(1, 2, 3), floats(997, 64), torch.tensor(2.0), floats(3, 64)
    expected: Expected = {
        "ids_ptr": ids,
        "weight_ptr": weight,
        "scale_ptr": scale,
        "out_ptr": out,
        "vocab_size": 997,
        "weight_row": weight.stride(0),
        "out_row": out.stride(0),
    }
    return lambda: embedding(ids, weight, out, scale=scale), [("embedding_kernel", expected)]


def activated() -> Case:
    gate_up, out = floats(3, 128), floats(3, 64)
    expected: Expected = {
        "gate_up_ptr": gate_up,
        "out_ptr": out,
        "gate_up_row": gate_up.stride(0),
        "out_row": out.stride(0),
    }
    return lambda: act_and_mul(gate_up, out), [("act_and_mul_kernel", expected)]


def state_batch() -> tuple[tuple[Tensor, ...], Expected]:
    """Slots, lengths and starts of three rows, and what a kernel calls them."""
    batch = ints(5, 2, 7), ints(9, 19, 29), ints(0, 1, 2, 3)
    return batch, dict(zip(("slots_ptr", "lens_ptr", "starts_ptr"), batch, strict=True)) | {"num_reqs": 3}


def convolved() -> Case:
    x, weight, state, out, bias = floats(4, 64), floats(64, 5), floats(9, 4, 64), floats(4, 64), floats(64)
    batch, expected = state_batch()
    expected |= {
        "num_tokens": 4,
        "x_ptr": x,
        "weight_ptr": weight,
        "state_ptr": state,
        "out_ptr": out,
        "bias_ptr": bias,
        "x_token": x.stride(0),
        "weight_channel": weight.stride(0),
        **strides(state, "state_slot", "state_row"),
        "out_token": out.stride(0),
    }
    return (
        lambda: causal_conv(ConvCall(x, weight, state, *batch, out, bias)),
        [("causal_conv_kernel", expected)],
    )


def attended_linearly(max_query_len: int) -> Case:
    q, k, v, out = floats(4, 2, 64), floats(4, 2, 64), floats(4, 6, 32), floats(4, 6, 32)
    g, beta, state = floats(4, 6, 64, dtype=torch.float32), floats(4, 6), floats(9, 6, 64, 32)
    batch, expected = state_batch()
    expected = {
        "num_reqs": expected["num_reqs"],
        "num_tokens": 4,
        "scale": 0.25,
        **{name: Tokens.of(x) for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("out", out))},
        "beta": Gate(beta, beta.stride(0)),
        "batch": Batch(*batch),
        "state": State.of(state),
    }
    call = LinearAttentionCall(q, k, v, g, state, *batch, out, beta, max_query_len, scale=0.25)
    kernel = "linear_decode_kernel" if max_query_len == 1 else "recurrent_kernel"
    return lambda: linear_attention(call), [(kernel, expected)]


def latent_written() -> Case:
    q, kv_c, k_pe, up_keys = floats(3, 2, 24), floats(3, 136), floats(3, 8), floats(2, 16, 136)
    q_out, pool, cos_sin, norm = floats(3, 2, 144), floats(9, 4, 1, 144), floats(19, 8), floats(136)
    positions, slots = longs(5, 6, 7), longs(17, 18, 19)
    expected: Expected = {
        "q": Tokens.of(q),
        "kv_c": Tokens.of(kv_c[:, None]),
        "k_pe": Tokens.of(k_pe[:, None]),
        "up_keys": Tokens.of(up_keys),
        "q_out": Tokens.of(q_out),
        "pool": KeyPool.of(pool, None),
        "norm": LatentNorm(norm, 0.25),
        "positions_ptr": positions,
        "cos_sin_ptr": cos_sin,
        "cos_row": cos_sin.stride(0),
        "slot_ptr": slots,
        "num_tokens": 3,
    }
    call = LatentWriteCall(q, kv_c, k_pe, positions, cos_sin, slots, up_keys, q_out, pool, norm, 0.25)
    return lambda: rope_write_latent(call), [("rope_write_latent_kernel", expected)]


CASES: dict[str, Callable[[], Case]] = {
    "advance_step": advance,
    "accept_tokens": accepted,
    "finish_step": finished,
    "sample_tokens": sampled,
    "rms_norm": norms,
    "embedding": embedded,
    "act_and_mul": activated,
    "causal_conv": convolved,
    "rope_write_latent": latent_written,
    "linear_attention": lambda: attended_linearly(4),
    "linear_attention of single tokens": lambda: attended_linearly(1),
}


def is_same(got: Any, expected: Any) -> bool:
    if callable(expected):
        return bool(expected(got))
    return type(got) is type(expected) and key(got) == key(expected)


def key(value: Any) -> Any:
    """A value that compares: of tensors, a record's too, where they begin, since launchers make views."""
    if isinstance(value, tuple):
        return tuple(map(key, value))
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("case", CASES)
def test_each_place_gets_what_the_kernel_calls_so(case: str) -> None:
    global _extra
    _extra = itertools.count(3)  # whichever cases ran before: a few beginnings make two strides alike
    call, expected = CASES[case]()
    with recorded() as launches:
        call()
    assert [launch.name for launch in launches] == [name for name, _ in expected]
    for launch, (_, wanted) in zip(launches, expected, strict=True):
        parameters = launch.kernel.params
        by_place = {p.name for p in parameters if not p.is_constexpr}
        assert by_place <= set(wanted) <= {p.name for p in parameters}, "an argument this test does not know"
        assert set(launch.arguments) == {p.name for p in parameters}, "a place too many or too few"
        got = launch.arguments
        assert not {name: got[name] for name, value in wanted.items() if not is_same(got[name], value)}
        values = [key(got[name]) for name in wanted if name != ALIKE[0]]
        assert len(set(values)) == len(values), f"a swap that would not show: {sorted(map(str, values))}"


def test_records_hold_what_their_fields_say() -> None:
    """What is made of tensors; all else of a launch has names at its making."""
    q, lse, cache = floats(3, 6, 64), spread(torch.zeros(3, 6), 7), floats(9, 16, 2, 64)
    scales = spread(torch.ones(2), 11)
    assert Tokens.of(q)._asdict() == {"ptr": q, **strides(q, "token", "head")}
    in_blocks = strides(cache, "block", "slot", "head")
    assert Pool.of(cache, scales)._asdict() == {
        "ptr": cache,
        **in_blocks,
        "scale": scales,
        "scale_head": 11,
    }
    results = {**strides(q, "o_token", "o_head"), **strides(lse, "l_token", "l_head")}
    assert Results.of(q, lse)._asdict() == {"out": q, "lse": lse, **results, "scale": None}
    assert Results.of(q, lse, scales).scale is scales


def launched_by_sources() -> set[str]:
    """Names of the kernels that our sources launch by place: ``launch_kernel(NAME, grid, ...)``."""
    names = set()
    for path in OPS.glob("*/triton/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            assert not isinstance(node.func, ast.Subscript), f"{path}: a launch around launch_kernel"
            if isinstance(node.func, ast.Name) and node.func.id == "launch_kernel":
                names.add(node.args[0].id)  # type: ignore[attr-defined]
    return names


#: Kernels that take records, a few of one kind at most; and one whose results differ when two change places.
TAKE_RECORDS = {
    "write_kv_kernel",
    "rope_write_kv_kernel",
    "merge_attn_states_kernel",
    "copy_blocks_kernel",
    "pack_blocks_kernel",
    "write_index_keys_kernel",
    "write_fp8_kernel",
    "index_logits_kernel",
    "chunk_kernel",
    "pass_kernel",
}


def test_every_launch_has_a_case() -> None:
    checked = {name for case in CASES.values() for name, _ in case()[1]}
    assert launched_by_sources() == checked | TAKE_RECORDS
    assert len(checked) >= 8
