"""The op contract: every schema and op handle of the ``torchpaged`` namespace, in one place (fake kernels: fakes.py).

Each op has one *overload* per backend, all with the same schema and the same meaning::

    torch.ops.torchpaged.paged_attention            # the device's own kernel: CPU -> native C++, NVIDIA GPU -> .cuda, other GPU -> .triton
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
* a query row that sees a score of NaN or +inf, or nothing but -inf, gives NaN; a NaN value gives NaN in its column (docs/ops.md);
* numbers beyond an fp8 cache's range are stored as its largest, NaN as NaN;
* no two tokens have one slot (-1 and block 0 excepted), no block is twice in a row of the table (block 0 excepted);
* LSE is the natural logarithm of the softmax denominator (the sink's term included), float32, ``[T, num_heads]``.

The reasons for void ops, for ``Library.define`` rather than ``custom_op`` and for explicit tensors: docs/ops.md.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, NamedTuple

import torch

from torchpaged.custom_ops import launches, native
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.fakes import fake_of

LIBRARY = torch.library.Library("torchpaged", "DEF")  # kept for the life of the process: dropping it deregisters the ops
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

#: Overload names, i.e. the backends that have kernels of their own. "" is the device's default kernel.
OVERLOADS = ("", "reference", "cpu", "triton", "cuda")

SCHEMAS = {
    # k [T, num_kv_heads, head_dim], v [T, num_kv_heads, head_dim_v], caches [num_blocks, block_size, num_kv_heads, .],
    # slot_mapping [T] int64 = block * block_size + offset, -1 = skip; k_scale, v_scale: float32 scalars of fp8 caches.
    # are_query_tokens: promises that a paged_attention follows of which these are the query tokens, and in which no request reads them
    # as context; it may then be launched early. Changes no result.
    "write_kv": """(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,
        Tensor? k_scale=None, Tensor? v_scale=None, *, bool are_query_tokens=False) -> ()""",
    # q [T, num_heads, head_dim], k, v, caches, slot_mapping and scales as in write_kv, positions [T] int64, cos_sin
    # [max_position, rotary_dim] float32 or q's dtype (cosines in the first half, sines in the second), q_out like q: also
    # written where the slot is -1. q_norm, k_norm [head_dim]: RMSNorm of each head, before the rotation.
    "rope_write_kv": """(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor slot_mapping, Tensor(a!) q_out,
        Tensor(b!) k_cache, Tensor(c!) v_cache, *, Tensor? q_norm=None, Tensor? k_norm=None, float norm_eps=1e-6,
        float norm_offset=0.0, bool interleaved=False, Tensor? k_scale=None, Tensor? v_scale=None, bool are_query_tokens=False) -> ()""",
    # q [T, num_heads, head_dim], block_table [B, max_blocks_per_req] int32, seq_lens [B] int32 (this step's tokens
    # included), query_start_loc [B + 1] int32, out [T, num_heads, head_dim_v], lse [T, num_heads] float32.
    # max_query_len: upper bound of query_len, known to the host (1 selects the decode kernels).
    # window_left/right: keys visible beside the own one, -1 = open. chunk_size: keys of the own chunk only, 0 = off.
    # Metadata and the context's keys and values may be read before the kernels ahead on the stream have ended; stream_order.py says by whom,
    # and what that asks of whoever writes them.
    # semaphore: int32 zeros, at least B * num_kv_heads, zeros again afterwards; calls that may overlap need one each.
    # Without it a kernel that needs one makes its own, which costs a memset.
    "paged_attention": """(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens,
        Tensor query_start_loc, Tensor(a!) out, Tensor(b!)? lse=None, *, SymInt max_query_len, float scale,
        bool causal=True, int window_left=-1, int window_right=-1, float logits_soft_cap=0.0,
        Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None,
        int chunk_size=0, Tensor(c!)? semaphore=None) -> ()""",
    # out_a, out_b, out [T, num_heads, head_dim_v]; lse_a, lse_b, lse [T, num_heads] float32. LSE -inf: that side saw nothing, its out
    # is not read. NaN or +inf on either side: NaN.
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
    # row's draw is Philox of (seed, counter, token) and nothing else; out [B] int64: -2 (NO_TOKEN) where a logit of the row is NaN or all
    # are -inf.
    "sample_tokens": """(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor repetition_penalty,
        Tensor seen, Tensor seeds, Tensor counters, Tensor(a!) out) -> ()""",
    # The end of a decode step: sampled_token_ids [B] int64 -> tokens_out [B] int64 (-1 in rows of seq_len 0), counters + 1,
    # remaining [B] int32 - 1, seen bit set; a row whose token is -2 or one of stop_token_ids [B, S] int64 (-1 = none), whose remaining
    # is 0 or whose table is full ends: seq_len 0, slot -1. Other rows move on as in advance_step.
    # ring [slots + 1, steps + 1, at least B] int64 and launches [2] int64 (a count, and zero): the tokens also go to
    # ring[launches[0] % slots, step], or to the last, the scratch slot, where launches[0] is negative. The last step of a launch writes
    # launches[0] to ring[..., steps, 0], behind its tokens, and then adds 1 to it unless it is negative.
    "accept_tokens": """(Tensor sampled_token_ids, Tensor block_table, Tensor stop_token_ids, Tensor(a!) input_ids,
        Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) slot_mapping, Tensor(e!) counters, Tensor(f!) remaining,
        Tensor(g!) seen, Tensor(h!) tokens_out, *, int block_size, Tensor(i!)? ring=None, Tensor(j!)? launches=None, int step=0) -> ()""",
    # sample_tokens and accept_tokens in one, of their arguments; rows of seq_len 0 give token -1 and their logits are of no account. All but
    # logits and seen may be read early (stream_order.py).
    "finish_step": """(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor repetition_penalty, Tensor seeds,
        Tensor block_table, Tensor stop_token_ids, Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens,
        Tensor(d!) slot_mapping, Tensor(e!) counters, Tensor(f!) remaining, Tensor(g!) seen, Tensor(h!) tokens_out, *, int block_size,
        Tensor(i!)? ring=None, Tensor(j!)? launches=None, int step=0) -> ()""",
    # input_ids [T] int64, weight [vocab_size, hidden_size], out [T, hidden_size] = weight[input_ids], times scale (no dimensions, rounded to
    # weight's dtype first) if given. An id outside is an error where values are checked, else a row of NaN.
    "embedding": "(Tensor input_ids, Tensor weight, Tensor(a!) out, *, Tensor? scale=None) -> ()",
    # x, out [T, hidden_size], weight [hidden_size]; out = x / rms(x) * (weight + offset). With residual [T, hidden_size]: residual += x
    # first, and the sum is normed. With post_residual [T, hidden_size]: added to the normed x (Gemma's norms after a block).
    "rms_norm": """(Tensor x, Tensor weight, Tensor(a!) out, *, float eps=1e-6, float offset=0.0, Tensor(b!)? residual=None,
        Tensor? post_residual=None) -> ()""",
    # gate_up [T, 2 * I], gate in the first half; out [T, I] = activation(gate) * up. activation: "silu", "gelu_tanh" or "gelu"
    "act_and_mul": """(Tensor gate_up, Tensor(a!) out, *, str activation="silu") -> ()""",
    # x [T, K], weight [N, K], out [T, N] = x' @ weight.T + bias [N] + residual [T, N]. x' = rms_norm(x, norm_weight [K]) if given, else x.
    # activation not "none": weight holds gate rows, then as many up rows, and out [T, N / 2] = activation(gate) * up, then + residual.
    # weight and norm_weight are constants of a step, and read early (stream_order.py).
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
    finish_step: Any
    embedding: Any
    rms_norm: Any
    act_and_mul: Any
    linear: Any


# ----------------------------------------------------------------------------------------------- implementations
def _lazy(module: str, function: str) -> Any:
    """A kernel whose module is imported at its first launch, so that importing torchpaged stays light."""
    cached: Any = None

    def launch(*args: Any, **kwargs: Any) -> None:
        nonlocal cached
        if cached is None:
            cached = getattr(importlib.import_module(module), function)
        device = args[0].device
        foreign = device.type == "cuda" and device.index != torch.cuda.current_device()
        if foreign or launches.around is not None:
            with contextlib.ExitStack() as stack:
                if foreign:
                    stack.enter_context(torch.cuda.device(device))  # Python kernels get no device guard from the dispatcher
                if launches.around is not None:
                    stack.enter_context(launches.around(function, args))
                cached(*args, **kwargs)
            return
        cached(*args, **kwargs)

    launch.__name__ = function
    return launch


#: Where an op's reference is, if not in reference.py.
_REFERENCE_MODULES = {
    "sample_tokens": "reference_sampling", "accept_tokens": "reference_sampling", "finish_step": "reference_sampling",
    "embedding": "layers.reference",
    "rms_norm": "layers.reference", "act_and_mul": "layers.reference", "linear": "layers.reference",
}  # fmt: skip
_CUDA_OPS = frozenset({"paged_attention", "linear"})

#: The family of ops that an op belongs to: its folder.
_FAMILY = {
    "paged_attention": "attention", "merge_attn_states": "attention", "write_kv": "cache_write", "rope_write_kv": "cache_write",
    "copy_blocks": "block_ops", "sample_tokens": "step_end", "accept_tokens": "step_end", "finish_step": "step_end",
    "advance_step": "step_end", "embedding": "layers", "rms_norm": "layers", "act_and_mul": "layers", "linear": "layers",
}  # fmt: skip


def _of_this_gpu(op: str) -> Any:
    """The default kernel on a GPU: what the backend "auto" runs there, ``cuda`` if its compiler is here and ``triton`` if not."""
    kernels = {name: _lazy(f"torchpaged.custom_ops.{_FAMILY[op]}.{name}.{op}", op) for name in ("cuda", "triton")}
    chosen: Any = None

    def launch(*args: Any, **kwargs: Any) -> None:
        nonlocal chosen
        if chosen is None:
            jit = importlib.import_module("torchpaged.custom_ops.cuda.jit")
            chosen = kernels["cuda" if jit.unavailable() is None else "triton"]
        chosen(*args, **kwargs)

    launch.__name__ = op
    return launch


def _reference(op: str) -> Any:
    return _lazy(f"torchpaged.custom_ops.{_REFERENCE_MODULES.get(op, 'reference')}", op)


def _register() -> None:
    for op, schema in SCHEMAS.items():
        for overload in OVERLOADS:
            name = f"{op}.{overload}" if overload else op
            LIBRARY.define(name + schema, tags=_TAGS)
            torch.library.register_fake(f"torchpaged::{name}", fake_of(op), lib=LIBRARY)
        reference = _reference(op)
        triton = _lazy(f"torchpaged.custom_ops.{_FAMILY[op]}.triton.{op}", op)
        LIBRARY.impl(f"{op}.reference", reference, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{op}.triton", triton, "CompositeExplicitAutograd")
        cuda = _lazy(f"torchpaged.custom_ops.{_FAMILY[op]}.cuda.{op}", op) if op in _CUDA_OPS else triton
        LIBRARY.impl(f"{op}.cuda", cuda, "CompositeExplicitAutograd")
        LIBRARY.impl(op, _of_this_gpu(op) if op in _CUDA_OPS else triton, "CUDA")
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


_NATIVE_HANDLES = frozenset(getattr(BACKEND_OPS[name], op) for name in ("default", "cpu") for op in NATIVE_OPS)
_NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_native_dtype(handle: Any, **tensors: torch.Tensor) -> None:
    """Refuse, with an `ArgumentError`, dtypes that the native CPU kernel behind ``handle`` doesn't take; others pass.

    The kernel refuses them too, but as a RuntimeError: a library of the stable ABI knows no Python class.
    """
    for name, tensor in tensors.items():
        native_here = tensor.device.type == "cpu" and tensor.dtype not in _NATIVE_DTYPES and handle in _NATIVE_HANDLES
        if native_here and native.status()[0]:
            raise ArgumentError(name, " or ".join(map(str, _NATIVE_DTYPES)) + " for the cpu backend", str(tensor.dtype),
                                "the reference backend takes float64 and fp8 pools: ops=BACKEND_OPS['reference'], backend='reference'")  # fmt: skip


def native_status() -> tuple[bool, str]:
    """Whether the native CPU kernels are loaded, and from where or why not."""
    return native.status()
