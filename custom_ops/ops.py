"""The op contract: every schema, fake kernel and op handle of the ``torchpaged`` namespace, in one place.

Each op has one *overload* per backend, all with the same schema and the same meaning::

    torch.ops.torchpaged.paged_attention            # the device's own kernel: CPU -> native C++, CUDA -> Triton
    torch.ops.torchpaged.paged_attention.reference  # plain torch, any device: the specification
    torch.ops.torchpaged.paged_attention.cpu        # native C++ kernel
    torch.ops.torchpaged.paged_attention.triton     # Triton kernel
    torch.ops.torchpaged.paged_attention.cuda       # CUDA C++ kernel for decode (NVRTC), Triton kernels for the rest

So a backend is chosen by holding another handle (``BACKEND_OPS["triton"].paged_attention``), never inside a traced call.

Rules every kernel keeps (``B`` requests, ``T`` tokens):

* ops return ``()`` and write into arguments declared ``Tensor(a!)``; no output aliases an input;
* slot -1 skips the write; block 0 is the null block; table entries past ``ceil(seq_len / block_size)`` are never read;
* query ``i`` of a request sits at position ``seq_len - query_len + i``; positions below 0 (left padding) see nothing, so
  seq_len may be below query_len, and even negative;
* a query row that sees no key, and every token row at or after ``query_start_loc[-1]``, gives zeros and LSE -inf;
* LSE is the natural logarithm of the softmax denominator (the sink's term included), float32, ``[T, num_heads]``.

The reasons for void ops, for ``Library.define`` rather than ``custom_op`` and for explicit tensors: docs/ops.md.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops import native

LIBRARY = torch.library.Library("torchpaged", "DEF")  # kept for the life of the process: dropping it deregisters the ops
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

#: Overload names, i.e. the backends that have kernels of their own. "" is the device's default kernel.
OVERLOADS = ("", "reference", "cpu", "triton", "cuda")

SCHEMAS = {
    # k [T, num_kv_heads, head_dim], v [T, num_kv_heads, head_dim_v], caches [num_blocks, block_size, num_kv_heads, .],
    # slot_mapping [T] int64 = block * block_size + offset, -1 = skip; k_scale, v_scale: float32 scalars of fp8 caches
    "write_kv": """(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,
        Tensor? k_scale=None, Tensor? v_scale=None) -> ()""",
    # q [T, num_heads, head_dim], k, v, caches, slot_mapping and scales as in write_kv, positions [T] int64, cos_sin
    # [max_position, rotary_dim] float32 or q's dtype (cosines in the first half, sines in the second), q_out like q: also
    # written where the slot is -1. q_norm, k_norm [head_dim]: RMSNorm of each head, before the rotation.
    "rope_write_kv": """(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor slot_mapping, Tensor(a!) q_out,
        Tensor(b!) k_cache, Tensor(c!) v_cache, *, Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps=1e-6,
        float norm_offset=0.0, bool interleaved=False, Tensor? k_scale=None, Tensor? v_scale=None) -> ()""",
    # q [T, num_heads, head_dim], block_table [B, max_blocks_per_req] int32, seq_lens [B] int32 (this step's tokens
    # included), query_start_loc [B + 1] int32, out [T, num_heads, head_dim_v], lse [T, num_heads] float32.
    # max_query_len: upper bound of query_len, known to the host (1 selects the decode kernels).
    # window_left/right: keys visible beside the own one, -1 = open. chunk_size: keys of the own chunk only, 0 = off.
    # seq_lens, query_start_loc and block_table may be read before the kernels ahead on the stream have finished (programmatic dependent
    # launch); a kernel that writes them must not call griddepcontrol.launch_dependents. Those of torch and of this library don't.
    # semaphore: int32 zeros, at least B * num_kv_heads, zeros again afterwards; calls that may overlap need one each.
    # Without it a kernel that needs one makes its own, which costs a memset.
    "paged_attention": """(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
        Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? lse=None, *, SymInt max_query_len, float scale,
        bool causal=True, int window_left=-1, int window_right=-1, float logits_soft_cap=0.0,
        Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None,
        int chunk_size=0, Tensor(c!)? semaphore=None) -> ()""",
    # out_a, out_b, out [T, num_heads, head_dim_v]; lse_a, lse_b, lse [T, num_heads] float32
    "merge_attn_states": """(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out,
        Tensor(b!)? lse=None) -> ()""",
    # block_mapping [N, 2] int64: (source, destination) block ids; a negative id skips the pair; no block may be both
    "copy_blocks": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_mapping) -> ()",
    # sampled_token_ids, input_ids, positions, slot_mapping [B] int64; seq_lens [B] int32. Rows with seq_len 0 (padding)
    # and rows whose table is full stay as they are and get slot -1.
    "advance_step": """(Tensor sampled_token_ids, Tensor block_table, Tensor(a!) input_ids, Tensor(b!) positions,
        Tensor(c!) seq_lens, Tensor(d!) slot_mapping, *, int block_size) -> ()""",
    # logits [B, vocab_size]; temperature (0 = greedy), top_p, min_p, repetition_penalty [B] float32; top_k [B] int32, 0 = all;
    # seen [B, ceil(vocab_size / 32)] int32: bit v % 32 of word v // 32 says that token v occurred; seeds, counters [B] int64:
    # row's draw is Philox of (seed, counter, token) and nothing else; out [B] int64.
    "sample_tokens": """(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor repetition_penalty,
        Tensor seen, Tensor seeds, Tensor counters, Tensor(a!) out) -> ()""",
    # The end of a decode step: sampled_token_ids [B] int64 -> tokens_out [B] int64 (-1 in rows of seq_len 0), counters + 1,
    # remaining [B] int32 - 1, seen bit set; a row whose token is one of stop_token_ids [B, S] int64 (-1 = none), whose remaining
    # is 0 or whose table is full ends: seq_len 0, slot -1. Other rows move on as in advance_step.
    "accept_tokens": """(Tensor sampled_token_ids, Tensor block_table, Tensor stop_token_ids, Tensor(a!) input_ids,
        Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) slot_mapping, Tensor(e!) counters, Tensor(f!) remaining,
        Tensor(g!) seen, Tensor(h!) tokens_out, *, int block_size) -> ()""",
    # x, out [T, hidden_size], weight [hidden_size]; out = x / rms(x) * (weight + offset). With residual [T, hidden_size]: residual += x
    # first, and the sum is normed. With post_residual [T, hidden_size]: added to the normed x (Gemma's norms after a block).
    "rms_norm": """(Tensor x, Tensor weight, Tensor(a!) out, *, float eps=1e-6, float offset=0.0, Tensor(b!)? residual=None,
        Tensor? post_residual=None) -> ()""",
    # gate_up [T, 2 * I], gate in the first half; out [T, I] = activation(gate) * up. activation: "silu", "gelu_tanh" or "gelu"
    "act_and_mul": """(Tensor gate_up, Tensor(a!) out, *, str activation="silu") -> ()""",
    # x [T, K], weight [N, K], out [T, N] = x' @ weight.T + bias [N] + residual [T, N]. x' = rms_norm(x, norm_weight [K]) if given, else x.
    # activation not "none": weight holds gate rows, then as many up rows, and out [T, N / 2] = activation(gate) * up, then + residual.
    # weight and norm_weight are constants: they, too, may be read before the kernels ahead have finished, so no op of a step may write them.
    "linear": """(Tensor x, Tensor weight, Tensor(a!) out, *, Tensor? bias=None, Tensor? residual=None, Tensor? norm_weight=None,
        float norm_eps=1e-6, float norm_offset=0.0, str activation="none") -> ()""",
}

#: Ops with a native C++ kernel. The others run their reference on a CPU, as the default and as the .cpu overload.
NATIVE_OPS = frozenset({"write_kv", "paged_attention", "merge_attn_states", "copy_blocks", "advance_step"})


class BackendOps(NamedTuple):
    """The op handles of one backend; hold these, call these (a handle is bound once and traces as itself)."""

    write_kv: Any
    paged_attention: Any
    merge_attn_states: Any
    copy_blocks: Any
    advance_step: Any
    rope_write_kv: Any
    sample_tokens: Any
    accept_tokens: Any
    rms_norm: Any
    act_and_mul: Any
    linear: Any


# ---------------------------------------------------------------------------------------------------------- fakes
# Sizes may be symbols without values: torch._check states facts, an `if` would need to decide them.


def _fake_write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
                   k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> None:  # fmt: skip
    torch._check(k.dim() == 3 and v.dim() == 3, lambda: f"k, v: expected 3 dimensions, got {k.dim()} and {v.dim()}")
    torch._check(k_cache.dim() == 4 and v_cache.dim() == 4, lambda: "k_cache, v_cache: expected 4 dimensions")
    torch._check(slot_mapping.dtype == torch.int64, lambda: f"slot_mapping: expected int64, got {slot_mapping.dtype}")
    torch._check(k.shape[0] == slot_mapping.shape[0], lambda: "k, slot_mapping: expected as many slots as tokens")
    torch._check(k.shape[1] == k_cache.shape[2], lambda: f"k: expected {k_cache.shape[2]} heads, got {k.shape[1]}")
    torch._check(k.shape[2] == k_cache.shape[3], lambda: f"k: expected head_dim {k_cache.shape[3]}, got {k.shape[2]}")
    torch._check(v.shape[2] == v_cache.shape[3], lambda: f"v: expected head_dim {v_cache.shape[3]}, got {v.shape[2]}")


def _fake_rope_write_kv(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, slot_mapping: Tensor, q_out: Tensor,
                        k_cache: Tensor, v_cache: Tensor, **_: Any) -> None:  # fmt: skip
    _fake_write_kv(k, v, k_cache, v_cache, slot_mapping)
    torch._check(q.dim() == 3 and q_out.dim() == 3, lambda: f"q, q_out: expected 3 dimensions, got {q.dim()}, {q_out.dim()}")
    torch._check(cos_sin.dim() == 2, lambda: f"cos_sin: expected 2 dimensions, got {cos_sin.dim()}")
    torch._check(positions.dtype == torch.int64, lambda: f"positions: expected int64, got {positions.dtype}")
    torch._check(q.shape[0] == k.shape[0], lambda: "q, k: expected as many tokens")
    torch._check(q.shape[0] == positions.shape[0], lambda: "q, positions: expected as many positions as tokens")
    torch._check(q.shape[2] == k.shape[2], lambda: f"q: expected head_dim {k.shape[2]}, got {q.shape[2]}")
    for d in range(3):
        torch._check(q_out.shape[d] == q.shape[d], lambda: "q_out: expected the shape of q")


def _fake_paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
                          query_start_loc: Tensor, out: Tensor, lse: Tensor | None = None, **_: Any) -> None:  # fmt: skip
    torch._check(q.dim() == 3 and out.dim() == 3, lambda: f"q, out: expected 3 dimensions, got {q.dim()}, {out.dim()}")
    torch._check(k_cache.dim() == 4 and v_cache.dim() == 4, lambda: "k_cache, v_cache: expected 4 dimensions")
    torch._check(block_table.dim() == 2, lambda: f"block_table: expected 2 dimensions, got {block_table.dim()}")
    for name, t in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        torch._check(t.dtype == torch.int32, lambda name=name, t=t: f"{name}: expected int32, got {t.dtype}")
    torch._check(q.shape[2] == k_cache.shape[3], lambda: f"q: expected head_dim {k_cache.shape[3]}, got {q.shape[2]}")
    torch._check(q.shape[0] == out.shape[0], lambda: "out: expected as many rows as q")
    torch._check(block_table.shape[0] == seq_lens.shape[0], lambda: "seq_lens: expected one length per table row")


def _fake_rms_norm(x: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(x.dim() == 2 and out.dim() == 2, lambda: f"x, out: expected 2 dimensions, got {x.dim()}, {out.dim()}")
    torch._check(x.shape[0] == out.shape[0], lambda: "out: expected as many rows as x")
    torch._check(x.shape[1] == out.shape[1], lambda: f"out: expected {x.shape[1]} columns, got {out.shape[1]}")
    torch._check(x.shape[1] == weight.shape[0], lambda: f"weight: expected {x.shape[1]} numbers, got {weight.shape[0]}")


def _fake_act_and_mul(gate_up: Tensor, out: Tensor, **_: Any) -> None:
    torch._check(gate_up.dim() == 2 and out.dim() == 2, lambda: f"gate_up, out: expected 2 dimensions, got {gate_up.dim()}, {out.dim()}")
    torch._check(gate_up.shape[0] == out.shape[0], lambda: "out: expected as many rows as gate_up")
    torch._check(gate_up.shape[1] == 2 * out.shape[1], lambda: f"out: expected half of {gate_up.shape[1]} columns, got {out.shape[1]}")


def _fake_linear(x: Tensor, weight: Tensor, out: Tensor, *, activation: str = "none", **_: Any) -> None:
    torch._check(x.dim() == 2 and weight.dim() == 2, lambda: f"x, weight: expected 2 dimensions, got {x.dim()}, {weight.dim()}")
    torch._check(out.dim() == 2, lambda: f"out: expected 2 dimensions, got {out.dim()}")
    torch._check(x.shape[0] == out.shape[0], lambda: "out: expected as many rows as x")
    torch._check(x.shape[1] == weight.shape[1], lambda: f"weight: expected {x.shape[1]} columns, got {weight.shape[1]}")
    width = out.shape[1] if activation == "none" else 2 * out.shape[1]
    torch._check(weight.shape[0] == width, lambda: f"out: expected a row of {weight.shape[0]} numbers (half with an activation)")


def _fake_sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, repetition_penalty: Tensor,
                        seen: Tensor, seeds: Tensor, counters: Tensor, out: Tensor) -> None:  # fmt: skip
    torch._check(logits.dim() == 2 and seen.dim() == 2, lambda: "logits, seen: expected 2 dimensions")
    torch._check(seen.dtype == torch.int32, lambda: f"seen: expected int32, got {seen.dtype}")
    torch._check(out.dtype == torch.int64, lambda: f"out: expected int64, got {out.dtype}")
    for name, t in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p), ("seen", seen),
                    ("repetition_penalty", repetition_penalty), ("seeds", seeds), ("counters", counters), ("out", out)):  # fmt: skip
        torch._check(t.shape[0] == logits.shape[0], lambda name=name: f"{name}: expected as many rows as logits")


def _fake_accept_tokens(sampled_token_ids: Tensor, block_table: Tensor, stop_token_ids: Tensor, *state: Tensor, block_size: int) -> None:
    torch._check(block_table.dim() == 2, lambda: f"block_table: expected 2 dimensions, got {block_table.dim()}")
    torch._check(stop_token_ids.dim() == 2, lambda: f"stop_token_ids: expected 2 dimensions, got {stop_token_ids.dim()}")
    for t in (sampled_token_ids, stop_token_ids, *state):
        torch._check(t.shape[0] == block_table.shape[0], lambda: "expected as many rows as block_table in every argument")


def _fake_nothing(*_: Any, **__: Any) -> None:
    return None


_FAKES = {
    "write_kv": _fake_write_kv, "rope_write_kv": _fake_rope_write_kv, "paged_attention": _fake_paged_attention,
    "rms_norm": _fake_rms_norm, "act_and_mul": _fake_act_and_mul, "linear": _fake_linear,
    "sample_tokens": _fake_sample_tokens, "accept_tokens": _fake_accept_tokens,
}  # fmt: skip


# ----------------------------------------------------------------------------------------------- implementations
def _lazy(module: str, function: str) -> Any:
    """A kernel whose module is imported at its first launch, so that importing torchpaged stays light."""
    cached: Any = None

    def launch(*args: Any, **kwargs: Any) -> None:
        nonlocal cached
        if cached is None:
            cached = getattr(importlib.import_module(module), function)
        device = args[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Python kernels get no device guard from the dispatcher
                cached(*args, **kwargs)
            return
        cached(*args, **kwargs)

    launch.__name__ = function
    return launch


#: Where an op's reference is, if not in reference.py.
_REFERENCE_MODULES = {
    "sample_tokens": "reference_sampling", "accept_tokens": "reference_sampling", "rms_norm": "reference_layers",
    "act_and_mul": "reference_layers", "linear": "reference_layers",
}  # fmt: skip
_CUDA_OPS = frozenset({"paged_attention", "linear"})


def _reference(op: str) -> Any:
    return _lazy(f"torchpaged.custom_ops.{_REFERENCE_MODULES.get(op, 'reference')}", op)


def _register() -> None:
    for op, schema in SCHEMAS.items():
        for overload in OVERLOADS:
            name = f"{op}.{overload}" if overload else op
            LIBRARY.define(name + schema, tags=_TAGS)
            torch.library.register_fake(f"torchpaged::{name}", _FAKES.get(op, _fake_nothing), lib=LIBRARY)
        reference = _reference(op)
        triton = _lazy(f"torchpaged.custom_ops.triton.{op}", op)
        LIBRARY.impl(f"{op}.reference", reference, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{op}.triton", triton, "CompositeExplicitAutograd")
        cuda = _lazy(f"torchpaged.custom_ops.cuda.{op}", op) if op in _CUDA_OPS else triton
        LIBRARY.impl(f"{op}.cuda", cuda, "CompositeExplicitAutograd")
        LIBRARY.impl(op, triton, "CUDA")
    loaded = native.load()  # registers the default and the .cpu overload of NATIVE_OPS for the CPU key
    for op in SCHEMAS:
        reference = _reference(op)
        if not loaded:
            LIBRARY.impl(op, reference, "CPU")
            LIBRARY.impl(f"{op}.cpu", native.raise_absent, "CompositeExplicitAutograd")
        elif op not in NATIVE_OPS:
            LIBRARY.impl(op, reference, "CPU")
            LIBRARY.impl(f"{op}.cpu", reference, "CPU")


_register()


def _handles(overload: str) -> BackendOps:
    return BackendOps(*(getattr(getattr(torch.ops.torchpaged, op), overload or "default") for op in BackendOps._fields))


#: Backend name -> its op handles; "default" dispatches by device.
BACKEND_OPS: dict[str, BackendOps] = {overload or "default": _handles(overload) for overload in OVERLOADS}


def native_status() -> tuple[bool, str]:
    """Whether the native CPU kernels are loaded, and from where or why not."""
    return native.status()
