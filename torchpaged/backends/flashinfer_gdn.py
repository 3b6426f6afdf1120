"""The ``flashinfer_gdn`` backend: prompts of gated delta nets by FlashInfer on Hopper, everything else by
the device's own kernels.

    Generator(model, tokenizer, backend="flashinfer_gdn")

The library's kernel reads rows' starts and slots on the device, goes from the pool's states to the pool's
and leaves rows of slot -1 alone, so that one graph serves all lengths and nothing is planned. Few heads of
long rows it splits along the tokens, from and to states that lie side by side. A kernel of ours makes the
rows that it wants (custom_ops/state/triton/library_rows.py); in fused layers the convolution gives them. Its
kernels compile at first use, some seconds each.
"""

from typing import TYPE_CHECKING, Any

import torch

from torchpaged.backends.package import FLASHINFER, at_least, parameters_lacking
from torchpaged.backends.state_library import loaded, state_backend, why_own_rows
from torchpaged.custom_ops.state.call import DeltaStepCall, LinearAttentionCall

if TYPE_CHECKING:
    from torchpaged.custom_ops.state.triton.library_rows import LibraryRows

NAME = "flashinfer_gdn"
MIN_TOKENS = 64  # of a row: below them chunks are mostly padding
#: Tokens of a row in the mean: from which on it is split, and up to which few heads are the library's.
SPLIT_TOKENS, FEW_TOKENS = 2048, 512
_NEEDED = ("output_state_indices", "state_indices", "use_cp", "max_seqlen")


def _lacks(library: Any) -> str | None:
    lacking = parameters_lacking(getattr(library, "chunk_gated_delta_rule", None), _NEEDED)
    return f"flashinfer.chunk_gated_delta_rule does not take {lacking}" if lacking else None


PACKAGE = FLASHINFER._replace(backend=NAME, missing=at_least((0, 7, 4)), lacks=_lacks)


def why_own(call: LinearAttentionCall) -> str | None:
    """Why a call runs the device's own kernels, or None. The last reason as measured on an H200
    (docs/log/state_prompts.md)."""
    if call.g.dim() != 2:
        return "a decay for each key's column"
    if call.out.dtype != call.v.dtype:
        return f"results of {call.out.dtype} over values of {call.v.dtype}"
    if not call.state.is_contiguous() or call.state.data_ptr() % 16:
        return "states that are not contiguous"
    reason = why_own_rows(call, MIN_TOKENS)
    if reason is None and _programs(call, 8) and FEW_TOKENS < _mean_tokens(call) < SPLIT_TOKENS:
        return "few heads, of rows too short to be split"
    return reason


def splits_rows(call: LinearAttentionCall) -> bool:
    """Whether rows are split along their tokens, which takes several kernels: where they are long, and heads
    few for the GPU."""
    return _programs(call, 3) and _mean_tokens(call) >= SPLIT_TOKENS


def _programs(call: LinearAttentionCall, times: int) -> bool:
    """Whether so many times the heads of all rows are no more than there are multiprocessors."""
    device = call.v.device
    if device.type != "cuda":
        return False
    from torchpaged.custom_ops.cuda import gpu

    return times * call.state_slots.shape[0] * call.v.shape[1] <= gpu.num_sms(device.index or 0)


def _mean_tokens(call: LinearAttentionCall) -> int:
    return call.v.shape[0] // call.state_slots.shape[0]


def _attend(call: LinearAttentionCall) -> None:
    from torchpaged.custom_ops.state.triton.library_rows import library_rows

    out = call.out
    if not out.is_contiguous() or out.data_ptr() % 16:
        out = torch.empty_like(out, memory_format=torch.contiguous_format)
    call_out = call._replace(out=out)
    _run(call_out, library_rows(call_out))  # zeros behind the last row, too
    if out is not call.out:
        call.out.copy_(out)


def _step(call: DeltaStepCall) -> None:
    """No copies: the convolution gives what the library wants."""
    from torchpaged.custom_ops.state.triton.causal_conv import convolve_apart
    from torchpaged.custom_ops.state.triton.delta_gates import delta_gates
    from torchpaged.custom_ops.state.triton.gated_rms_norm import gated_rms_norm
    from torchpaged.custom_ops.state.triton.library_rows import rows_of_parts

    conv, gates, attention, norm = call.parts()
    q, k, v = convolve_apart(conv, *attention.q.shape[1:])
    delta_gates(gates)
    attention = attention._replace(q=q, k=k, v=v)
    _run(attention, rows_of_parts(attention))
    gated_rms_norm(norm)


def _run(call: LinearAttentionCall, rows: "LibraryRows") -> None:
    """The library over rows of a call whose ``out`` it can write."""
    from torchpaged.custom_ops.state.triton.library_rows import gather_states, scatter_states

    run = loaded(PACKAGE).chunk_gated_delta_rule
    state, starts = call.state, call.query_start_loc
    if starts.data_ptr() % 8:
        starts = starts.clone()
    num_tokens, num_reqs = rows.v.shape[0], rows.reads.shape[0]
    common: dict[str, Any] = {
        "scale": call.scale,
        "output_final_state": True,
        "cu_seqlens": starts,
        "output": call.out,
        "backend": "flashinfer",
    }
    if splits_rows(call):
        packed = gather_states(rows.reads, state)
        longest = min(num_tokens, max(call.max_query_len, -(-num_tokens // num_reqs)))
        run(
            *rows[:5],
            initial_state=packed,
            output_state=(final := torch.empty_like(packed)),
            use_cp=True,
            max_seqlen=longest,
            **common,
        )
        scatter_states(final, rows.writes, state)
    else:
        pool = state.transpose(2, 3)  # the library's states are [num_heads, value_dim, key_dim]
        run(
            *rows[:5],
            initial_state=pool,
            output_state=pool,
            state_indices=rows.reads,
            output_state_indices=rows.writes,
            use_cp=False,
            **common,
        )


BACKEND = state_backend(NAME, PACKAGE, _attend, _step, why_own)
