"""Host launches pass up to 37 tensors, numbers and strides to a Triton kernel by position, since by keyword
an eager call takes twice as long. So each place is checked against the name that the kernel gives it.

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

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.attention.triton import config
from torchpaged.custom_ops.attention.triton.merge_attn_states import merge_attn_states
from torchpaged.custom_ops.attention.triton.paged_attention import paged_attention
from torchpaged.custom_ops.block_ops.triton.copy_blocks import copy_blocks
from torchpaged.custom_ops.cache_write.triton.rope_write_kv import rope_write_kv
from torchpaged.custom_ops.cache_write.triton.write_kv import write_kv
from torchpaged.custom_ops.layers.triton.act_and_mul import act_and_mul
from torchpaged.custom_ops.layers.triton.embedding import embedding
from torchpaged.custom_ops.layers.triton.rms_norm import rms_norm
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.triton.mla_attention import mla_attention
from torchpaged.custom_ops.step_end.triton.accept_tokens import accept_tokens
from torchpaged.custom_ops.step_end.triton.advance_step import advance_step
from torchpaged.custom_ops.step_end.triton.finish_step import finish_step
from torchpaged.custom_ops.step_end.triton.sample_tokens import sample_tokens

OPS = Path(__file__).parents[2] / "custom_ops"
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


def attention(query_lens: tuple[int, ...]) -> Case:
    starts = [0, *itertools.accumulate(query_lens)]
    tokens, heads, kv_heads = starts[-1], 6, 2
    q, out = floats(tokens, heads, 64), floats(tokens, heads, 48)
    lse = spread(torch.zeros(tokens, heads), 7)
    k_cache = spread(torch.zeros(40, 16, kv_heads, 64).to(torch.float8_e4m3fn))
    v_cache = spread(torch.zeros(40, 16, kv_heads, 48).to(torch.float8_e4m3fn))
    table = spread(torch.arange(1, 40, dtype=torch.int32).view(3, 13))
    seq_lens, query_start_loc = ints(200, 19, 22), ints(*starts)
    slopes, sinks = torch.rand(heads), torch.rand(heads).to(torch.bfloat16)
    k_scale, v_scale = spread(torch.ones(kv_heads), 11), spread(torch.ones(kv_heads), 13)
    semaphore, tree_mask = torch.zeros(64, dtype=torch.int32), torch.ones(tokens, dtype=torch.int64)
    both: Expected = {
        "q_ptr": q,
        "k_ptr": k_cache,
        "v_ptr": v_cache,
        "table_ptr": table,
        "seq_lens_ptr": seq_lens,
        "starts_ptr": query_start_loc,
        "out_ptr": out,
        "lse_ptr": lse,
        "slopes_ptr": slopes,
        "sinks_ptr": sinks,
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        "tree_ptr": tree_mask,
        "scale": 0.11,
        "soft_cap": 31.0,
        "num_reqs": 3,
        "num_tokens": tokens,
        **strides(q, "q_token", "q_head"),
        **strides(out, "o_token", "o_head"),
        **strides(lse, "l_token", "l_head"),
        "table_row": table.stride(0),
        "ks_head": 11,
        "vs_head": 13,
    }
    decode = both | {
        "part_acc_ptr": lambda x: x.numel() > 16 * 1056,
        "part_state_ptr": lambda x: x.numel() <= 4 * 16 * 1056,
        "semaphore_ptr": semaphore,
        **strides(k_cache, "K_BLOCK", "K_SLOT", "K_HEAD"),
        **strides(v_cache, "V_BLOCK", "V_SLOT", "V_HEAD"),
    }
    prefill = both | {
        "num_kv_heads": kv_heads,
        "num_single": config.most_tiles_of_longer(3, tokens, 2, 64 // 3),
        "num_sms": 132,
        **strides(k_cache, "k_block", "k_slot", "k_head"),
        **strides(v_cache, "v_block", "v_slot", "v_head"),
    }

    def call() -> None:
        paged_attention(
            AttentionCall(
                q,
                k_cache,
                v_cache,
                table,
                seq_lens,
                query_start_loc,
                out,
                lse,
                max_query_len=max(query_lens),
                scale=0.11,
                logits_soft_cap=31.0,
                alibi_slopes=slopes,
                sinks=sinks,
                k_scale=k_scale,
                v_scale=v_scale,
                tree_mask=tree_mask,
                semaphore=semaphore,
            )
        )

    if max(query_lens) <= config.MAX_DECODE_QUERY_LEN:
        return call, [("decode_kernel", decode)]
    return call, [("prefill_kernel", prefill), ("decode_kernel", decode)]


def latent() -> Case:
    """Parts of each context, and their merge."""
    tokens, heads, rank = 25, 6, 64
    q, out, lse = (
        floats(tokens, heads, 80),
        floats(tokens, heads, rank),
        spread(torch.zeros(tokens, heads), 7),
    )
    pool, table = floats(130, 16, 1, 80), spread(torch.arange(1, 121, dtype=torch.int32).view(3, 40))
    seq_lens, query_start_loc = ints(600, 19, 22), ints(0, 20, 23, 25)
    result: Expected = {
        "part_acc_ptr": lambda x: x.numel() == tokens * heads * 4 * rank,
        "part_state_ptr": lambda x: x.numel() == tokens * heads * 4 * 2,
        "starts_ptr": query_start_loc,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_reqs": 3,
        "parts": 4,
        **strides(out, "o_token", "o_head"),
        **strides(lse, "l_token", "l_head"),
    }
    attend: Expected = result | {
        "q_ptr": q,
        "kv_ptr": pool,
        "table_ptr": table,
        "seq_lens_ptr": seq_lens,
        "scale": 0.11,
        "num_tokens": tokens,
        "num_tiles": tokens // 8 + 3,
        "tiles_per_req": 0,  # fewer tiles by tokens than by requests
        **strides(q, "q_token", "q_head"),
        **strides(pool, "kv_block", "kv_slot"),
        "table_row": table.stride(0),
    }

    def call() -> None:
        mla_attention(LatentCall(q, pool, table, seq_lens, query_start_loc, out, lse, 20, 0.11))

    return call, [("mla_kernel", attend), ("merge_kernel", result)]


def states() -> Case:
    a, b, out = (floats(7, 6, 64) for _ in range(3))
    lse_a, lse_b, lse = (spread(torch.zeros(7, 6), last) for last in (3, 5, 7))
    expected: Expected = {
        "a_ptr": a,
        "lse_a_ptr": lse_a,
        "b_ptr": b,
        "lse_b_ptr": lse_b,
        "out_ptr": out,
        "lse_ptr": lse,
        **strides(a, "a_token", "a_head"),
        **strides(lse_a, "la_token", "la_head"),
        **strides(b, "b_token", "b_head"),
        **strides(lse_b, "lb_token", "lb_head"),
        **strides(out, "o_token", "o_head"),
        **strides(lse, "l_token", "l_head"),
    }
    return lambda: merge_attn_states(a, lse_a, b, lse_b, out, lse), [("merge_attn_states_kernel", expected)]


def blocks() -> Case:
    k_cache, v_cache = floats(9, 16, 2, 64), floats(9, 16, 2, 48)
    mapping = spread(torch.tensor([[1, 2], [3, 4]]), 5)
    shared = {"mapping_ptr": mapping, **strides(mapping, "map_pair", "map_side")}
    each = [
        shared | {"cache_ptr": pool, **strides(pool, "c_block", "c_slot", "c_head")}
        for pool in (k_cache, v_cache)
    ]
    return lambda: copy_blocks(k_cache, v_cache, mapping), [("copy_blocks_kernel", x) for x in each]


def pools_of(kv_heads: int) -> tuple[Tensor, ...]:
    """Pools of fp8, and a scale per head for each."""
    k_cache, v_cache = (spread(torch.zeros(9, 16, kv_heads, dim).to(torch.float8_e4m3fn)) for dim in (64, 48))
    return k_cache, v_cache, spread(torch.ones(kv_heads), 11), spread(torch.ones(kv_heads), 13)


def writes() -> Case:
    k, v, slots = floats(3, 2, 64), floats(3, 2, 48), longs(17, 18, 40)
    k_cache, v_cache, k_scale, v_scale = pools_of(2)
    expected: Expected = {
        "k_ptr": k,
        "v_ptr": v,
        "k_cache_ptr": k_cache,
        "v_cache_ptr": v_cache,
        "slot_ptr": slots,
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        **strides(k, "k_token", "k_head"),
        **strides(v, "v_token", "v_head"),
        **strides(k_cache, "kc_block", "kc_slot", "kc_head"),
        **strides(v_cache, "vc_block", "vc_slot", "vc_head"),
        "ks_head": 11,
        "vs_head": 13,
    }
    return lambda: write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale), [("write_kv_kernel", expected)]


def rotated_writes() -> Case:
    q, k, v = floats(3, 6, 64), floats(3, 2, 64), floats(3, 2, 48)
    slots, positions, cos_sin = longs(17, 18, 40), longs(1, 2, 8), floats(90, 64)
    q_out, q_norm, k_norm = floats(3, 6, 64), floats(64), floats(64)
    k_cache, v_cache, k_scale, v_scale = pools_of(2)
    expected: Expected = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "positions_ptr": positions,
        "cos_sin_ptr": cos_sin,
        "slot_ptr": slots,
        "q_out_ptr": q_out,
        "k_cache_ptr": k_cache,
        "v_cache_ptr": v_cache,
        "q_norm_ptr": q_norm,
        "k_norm_ptr": k_norm,
        "k_scale_ptr": k_scale,
        "v_scale_ptr": v_scale,
        "norm_eps": 0.25,
        "norm_offset": 0.75,
        **strides(q, "q_token", "q_head"),
        **strides(k, "k_token", "k_head"),
        **strides(v, "v_token", "v_head"),
        "cos_row": cos_sin.stride(0),
        **strides(q_out, "out_token", "out_head"),
        **strides(k_cache, "kc_block", "kc_slot", "kc_head"),
        **strides(v_cache, "vc_block", "vc_slot", "vc_head"),
        "ks_head": 11,
        "vs_head": 13,
    }

    def call() -> None:
        rope_write_kv(
            q,
            k,
            v,
            positions,
            cos_sin,
            slots,
            q_out,
            k_cache,
            v_cache,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=0.25,
            norm_offset=0.75,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    return call, [("rope_write_kv_kernel", expected)]


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
        lambda: advance_step(sampled, table, ids, positions, lens, slots, block_size=16),
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
        lambda: accept_tokens(**{name: row[name] for name in taken}, block_size=16),
        [("accept_tokens_kernel", expected)],
    )


def finished() -> Case:
    row = rows()
    taken = {name: tensor for name, tensor in row.items() if name != "sampled_token_ids"}
    return (
        lambda: finish_step(**taken, block_size=16),
        [("sample_tiles_kernel", tiles_of(row)), ("finish_step_kernel", tiles_of(row) | TILES | end_of(row))],
    )


def sampled() -> Case:
    row = rows()
    taken = ("logits", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seen", "seeds")
    merge = tiles_of(row) | TILES | {"out_ptr": row["tokens_out"]}
    return (
        lambda: sample_tokens(**{name: row[name] for name in (*taken, "counters")}, out=row["tokens_out"]),
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
        lambda: rms_norm(x, weight, out, eps=0.25, offset=0.75, residual=residual, post_residual=post),
        [("rms_norm_kernel", expected)],
    )


def embedded() -> Case:
    ids, weight, scale, out = longs(1, 2, 3), floats(90, 64), torch.tensor(2.0), floats(3, 64)
    expected: Expected = {
        "ids_ptr": ids,
        "weight_ptr": weight,
        "scale_ptr": scale,
        "out_ptr": out,
        "vocab_size": 90,
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


CASES: dict[str, Callable[[], Case]] = {
    "decode": lambda: attention((2, 1, 1)),
    "mixed": lambda: attention((60, 1, 1)),
    "mla": latent,
    "merge_attn_states": states,
    "copy_blocks": blocks,
    "write_kv": writes,
    "rope_write_kv": rotated_writes,
    "advance_step": advance,
    "accept_tokens": accepted,
    "finish_step": finished,
    "sample_tokens": sampled,
    "rms_norm": norms,
    "embedding": embedded,
    "act_and_mul": activated,
}


def is_same(got: Any, expected: Any) -> bool:
    if callable(expected):
        return bool(expected(got))
    return (
        got is expected if isinstance(expected, Tensor) else type(got) is type(expected) and got == expected
    )


def key(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("case", CASES)
def test_each_place_gets_what_the_kernel_calls_so(case: str) -> None:
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


def launched_by_sources() -> set[str]:
    """Names of the kernels that our sources launch: ``NAME[grid](...)`` or a `KernelRef`."""
    names = set()
    for path in OPS.glob("*/triton/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name):
                names.add(node.func.value.id)
            elif isinstance(node.func, ast.Name) and node.func.id == "KernelRef":
                names.add(ast.literal_eval(node.args[1]))
    return names


def test_every_launch_has_a_case() -> None:
    checked = {name for case in CASES.values() for name, _ in case()[1]}
    assert launched_by_sources() == checked and len(checked) >= 16
