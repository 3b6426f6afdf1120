"""Fake kernels: what ``torch.compile`` runs in place of the ops, to learn shapes and to refuse what can't fit.

All ops return ``()``, so that there is nothing to compute. Sizes may be symbols without values: ``torch._check`` states facts,
an ``if`` would need to decide them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.early_launch import refuse_inductors_for


def _pools(k_cache: Tensor, v_cache: Tensor) -> None:
    torch._check(k_cache.dim() == 4 and v_cache.dim() == 4, lambda: "k_cache, v_cache: expected 4 dimensions")
    torch._check(k_cache is not v_cache, lambda: "v_cache: expected memory apart from k_cache's, got the same tensor")
    torch._check(k_cache.dtype.is_floating_point, lambda: f"k_cache: expected a floating point dtype, got {k_cache.dtype}")
    torch._check(k_cache.dtype == v_cache.dtype, lambda: f"v_cache: expected {k_cache.dtype}, got {v_cache.dtype}")


def _write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
              k_scale: Tensor | None = None, v_scale: Tensor | None = None, **_: Any) -> None:  # fmt: skip
    torch._check(k.dim() == 3 and v.dim() == 3, lambda: f"k, v: expected 3 dimensions, got {k.dim()} and {v.dim()}")
    _pools(k_cache, v_cache)
    for name, x in (("k", k), ("v", v)):  # a view's `_base` is the tensor that owns its memory
        views = x._base is not None and any(x._base is cache or x._base is cache._base for cache in (k_cache, v_cache))
        torch._check(not views, lambda name=name: f"{name}: expected memory apart from the pools', got a view of one; pass a copy")
    torch._check(slot_mapping.dtype == torch.int64, lambda: f"slot_mapping: expected int64, got {slot_mapping.dtype}")
    torch._check(k.shape[0] == slot_mapping.shape[0], lambda: "k, slot_mapping: expected as many slots as tokens")
    torch._check(k.shape[1] == k_cache.shape[2], lambda: f"k: expected {k_cache.shape[2]} heads, got {k.shape[1]}")
    torch._check(k.shape[2] == k_cache.shape[3], lambda: f"k: expected head_dim {k_cache.shape[3]}, got {k.shape[2]}")
    torch._check(v.shape[2] == v_cache.shape[3], lambda: f"v: expected head_dim {v_cache.shape[3]}, got {v.shape[2]}")


def _rope_write_kv(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, slot_mapping: Tensor, q_out: Tensor,
                   k_cache: Tensor, v_cache: Tensor, **_: Any) -> None:  # fmt: skip
    _write_kv(k, v, k_cache, v_cache, slot_mapping)
    torch._check(q.dim() == 3 and q_out.dim() == 3, lambda: f"q, q_out: expected 3 dimensions, got {q.dim()}, {q_out.dim()}")
    torch._check(cos_sin.dim() == 2, lambda: f"cos_sin: expected 2 dimensions, got {cos_sin.dim()}")
    torch._check(positions.dtype == torch.int64, lambda: f"positions: expected int64, got {positions.dtype}")
    torch._check(q.shape[0] == k.shape[0], lambda: "q, k: expected as many tokens")
    torch._check(q.shape[0] == positions.shape[0], lambda: "q, positions: expected as many positions as tokens")
    torch._check(q.shape[2] == k.shape[2], lambda: f"q: expected head_dim {k.shape[2]}, got {q.shape[2]}")
    for d in range(3):
        torch._check(q_out.shape[d] == q.shape[d], lambda: "q_out: expected the shape of q")


def _paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
                     query_start_loc: Tensor, out: Tensor, lse: Tensor | None = None, **_: Any) -> None:  # fmt: skip
    refuse_inductors_for(q)
    torch._check(q.dim() == 3 and out.dim() == 3, lambda: f"q, out: expected 3 dimensions, got {q.dim()}, {out.dim()}")
    _pools(k_cache, v_cache)
    torch._check(q.dtype == out.dtype, lambda: f"out: expected {q.dtype}, got {out.dtype}")
    torch._check(block_table.dim() == 2, lambda: f"block_table: expected 2 dimensions, got {block_table.dim()}")
    for name, t in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        torch._check(t.dtype == torch.int32, lambda name=name, t=t: f"{name}: expected int32, got {t.dtype}")
    torch._check(q.shape[2] == k_cache.shape[3], lambda: f"q: expected head_dim {k_cache.shape[3]}, got {q.shape[2]}")
    torch._check(q.shape[0] == out.shape[0], lambda: "out: expected as many rows as q")
    torch._check(block_table.shape[0] == seq_lens.shape[0], lambda: "seq_lens: expected one length per table row")


def _embedding(input_ids: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(input_ids.dim() == 1, lambda: f"input_ids: expected 1 dimension, got {input_ids.dim()}")
    torch._check(input_ids.dtype == torch.int64, lambda: f"input_ids: expected int64, got {input_ids.dtype}")
    torch._check(weight.dim() == 2 and out.dim() == 2, lambda: f"weight, out: expected 2 dimensions, got {weight.dim()}, {out.dim()}")
    torch._check(out.shape[0] == input_ids.shape[0], lambda: "out: expected as many rows as input_ids")
    torch._check(out.shape[1] == weight.shape[1], lambda: f"out: expected {weight.shape[1]} columns, got {out.shape[1]}")


def _rms_norm(x: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(x.dim() == 2 and out.dim() == 2, lambda: f"x, out: expected 2 dimensions, got {x.dim()}, {out.dim()}")
    torch._check(x.shape[0] == out.shape[0], lambda: "out: expected as many rows as x")
    torch._check(x.shape[1] == out.shape[1], lambda: f"out: expected {x.shape[1]} columns, got {out.shape[1]}")
    torch._check(x.shape[1] == weight.shape[0], lambda: f"weight: expected {x.shape[1]} numbers, got {weight.shape[0]}")


def _act_and_mul(gate_up: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(gate_up.dim() == 2 and out.dim() == 2, lambda: f"gate_up, out: expected 2 dimensions, got {gate_up.dim()}, {out.dim()}")
    torch._check(gate_up.shape[0] == out.shape[0], lambda: "out: expected as many rows as gate_up")
    torch._check(gate_up.shape[1] == 2 * out.shape[1], lambda: f"out: expected half of {gate_up.shape[1]} columns, got {out.shape[1]}")


def _linear(x: Tensor, weight: Tensor, out: Tensor, *, activation: str = "none", **_: Any) -> None:
    torch._check(x.dim() == 2 and weight.dim() == 2, lambda: f"x, weight: expected 2 dimensions, got {x.dim()}, {weight.dim()}")
    torch._check(out.dim() == 2, lambda: f"out: expected 2 dimensions, got {out.dim()}")
    torch._check(x.shape[0] == out.shape[0], lambda: "out: expected as many rows as x")
    torch._check(x.shape[1] == weight.shape[1], lambda: f"weight: expected {x.shape[1]} columns, got {weight.shape[1]}")
    width = out.shape[1] if activation == "none" else 2 * out.shape[1]
    torch._check(weight.shape[0] == width, lambda: f"out: expected a row of {weight.shape[0]} numbers (half with an activation)")


def _sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, repetition_penalty: Tensor,
                   seen: Tensor, seeds: Tensor, counters: Tensor, out: Tensor) -> None:  # fmt: skip
    torch._check(logits.dim() == 2 and seen.dim() == 2, lambda: "logits, seen: expected 2 dimensions")
    torch._check(seen.dtype == torch.int32, lambda: f"seen: expected int32, got {seen.dtype}")
    torch._check(out.dtype == torch.int64, lambda: f"out: expected int64, got {out.dtype}")
    for name, t in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p), ("seen", seen),
                    ("repetition_penalty", repetition_penalty), ("seeds", seeds), ("counters", counters), ("out", out)):  # fmt: skip
        torch._check(t.shape[0] == logits.shape[0], lambda name=name: f"{name}: expected as many rows as logits")


def _accept_tokens(sampled_token_ids: Tensor, block_table: Tensor, stop_token_ids: Tensor, *state: Tensor, **_: Any) -> None:
    torch._check(block_table.dim() == 2, lambda: f"block_table: expected 2 dimensions, got {block_table.dim()}")
    torch._check(stop_token_ids.dim() == 2, lambda: f"stop_token_ids: expected 2 dimensions, got {stop_token_ids.dim()}")
    for t in (sampled_token_ids, stop_token_ids, *state):
        torch._check(t.shape[0] == block_table.shape[0], lambda: "expected as many rows as block_table in every argument")


def _finish_step(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, repetition_penalty: Tensor, seeds: Tensor,
                 block_table: Tensor, stop_token_ids: Tensor, input_ids: Tensor, positions: Tensor, seq_lens: Tensor, slot_mapping: Tensor,
                 counters: Tensor, remaining: Tensor, seen: Tensor, tokens_out: Tensor, **_: Any) -> None:  # fmt: skip
    refuse_inductors_for(logits)
    _sample_tokens(logits, temperature, top_k, top_p, min_p, repetition_penalty, seen, seeds, counters, tokens_out)
    _accept_tokens(
        tokens_out, block_table, stop_token_ids, input_ids, positions, seq_lens, slot_mapping, counters, remaining, seen, tokens_out
    )


def _nothing(*_: Any, **__: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., None]] = {
    "write_kv": _write_kv, "rope_write_kv": _rope_write_kv, "paged_attention": _paged_attention,
    "embedding": _embedding, "rms_norm": _rms_norm, "act_and_mul": _act_and_mul, "linear": _linear,
    "sample_tokens": _sample_tokens, "accept_tokens": _accept_tokens,
    "finish_step": _finish_step,
}  # fmt: skip


def fake_of(op: str) -> Callable[..., None]:
    """The fake kernel of an op, by its name; one without facts to state has an empty one."""
    return _FAKES.get(op, _nothing)
