"""The ``flashinfer_gdn`` backend: prompts of gated delta nets by FlashInfer on Hopper, everything else by
the device's own kernels.

    Generator(model, tokenizer, backend="flashinfer_gdn")

The ops ``linear_attention`` and ``delta_step`` in a namespace of their own give the library the calls that it
was proved for. The choice follows from shapes, dtypes, strides and addresses, never from lengths.

The library's kernel reads rows' starts and slots on the device, goes from the pool's states to the pool's
and leaves rows of slot -1 alone, so that one graph serves all lengths and nothing is planned. Few heads of
long rows it splits along the tokens, from and to states that lie side by side. A kernel of ours makes the
rows that it wants (custom_ops/state/triton/library_rows.py); in fused layers the convolution gives them. Its
kernels compile at first use, some seconds each."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchpaged.backends import triton_kernels
from torchpaged.backends.base import Backend
from torchpaged.backends.library_op import defined
from torchpaged.backends.package import FLASHINFER, at_least
from torchpaged.backends.semaphore import SemaphoreSession
from torchpaged.backends.spec import AttentionSpec
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.callers_modes import apart_from_modes
from torchpaged.custom_ops.registry import FAKES
from torchpaged.custom_ops.state.call import DeltaStepCall, LinearAttentionCall
from torchpaged.custom_ops.state.check import check_linear_attention
from torchpaged.custom_ops.state.check_steps import check_delta_step
from torchpaged.custom_ops.state.schema import SCHEMAS

if TYPE_CHECKING:
    from torchpaged.custom_ops.state.triton.library_rows import LibraryRows

NAME, PROVED = "flashinfer_gdn", (9, 0)
WIDTH, MIN_TOKENS = 128, 64  # of keys and values; of a row: below them chunks are mostly padding
#: Tokens of a row in the mean: from which on it is split, and up to which few heads are the library's.
SPLIT_TOKENS, FEW_TOKENS = 2048, 512
PACKAGE = FLASHINFER._replace(
    backend=NAME,
    missing=at_least((0, 7, 4)),
    needed={"chunk_gated_delta_rule": ("output_state_indices", "state_indices", "use_cp", "max_seqlen")},
)


def why_own(call: LinearAttentionCall) -> str | None:
    """Why a call, not checked yet, runs the device's own kernels, or None. The last reason as measured on an
    H200 (docs/log/state_prompts.md)."""
    q, v, state, out = call.q, call.v, call.state, call.out
    if call.g.dim() != 2:
        return "a decay for each key's column"
    if out.dtype != v.dtype:
        return f"results of {out.dtype} over values of {v.dtype}"
    if not state.is_contiguous() or state.data_ptr() % 16:
        return "states that are not contiguous"
    if any(x.dim() != 3 for x in (q, call.k, v, out)) or state.dim() != 4:
        return "shapes that the check refuses"
    if min(call.max_query_len, v.shape[0]) < MIN_TOKENS or not call.state_slots.numel():
        return f"rows of fewer than {MIN_TOKENS} tokens"
    if not call.delta_rule:
        return "no delta rule"
    if v.dtype != torch.bfloat16:
        return f"values of {v.dtype}"
    if (q.shape[2], v.shape[2]) != (WIDTH, WIDTH):
        return f"keys of {q.shape[2]} and values of {v.shape[2]}"
    if _programs(call, 8) and FEW_TOKENS < _mean_tokens(call) < SPLIT_TOKENS:
        return "few heads, of rows too short to be split"
    return None


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

    run = PACKAGE.loaded().chunk_gated_delta_rule
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


# ----------------------------------------------------------------------------------------------- the backend
def _launch(*tensors: Any, **options: Any) -> None:
    call = LinearAttentionCall(*tensors, **options)
    if why_own(call) is not None:
        BACKEND_OPS["default"].linear_attention(*tensors, **options)
        return
    check_linear_attention(call)
    with _on(call.v.device):
        _attend(call)


def _launch_step(*tensors: Any, **options: Any) -> None:
    call = DeltaStepCall(*tensors, **options)
    if call.max_query_len > 1:
        check_delta_step(call)
        with _on(call.x.device):
            if why_own(call.parts()[2]) is None:
                return _step(call)
    BACKEND_OPS["default"].delta_step(*tensors, **options)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What kernels of Python are launched within."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class _Session(SemaphoreSession):
    """Loads the library, so that one that can't be used is refused here."""

    def _open(self, specs: Sequence[AttentionSpec]) -> None:
        PACKAGE.load()
        super()._open(specs)


def _further(spec: AttentionSpec) -> list[str]:
    """What Triton's kernels say; and GPUs on which the library was not proved."""
    reasons = triton_kernels.further(spec)
    if spec.device.type == "cuda" and torch.cuda.is_available():
        have = torch.cuda.get_device_capability(spec.device)
        if have > PROVED:
            reasons = [*reasons, f"compute capability {have} is not {PROVED}, where its library was proved"]
    return reasons


BACKEND = Backend(
    name=NAME,
    capabilities=replace(
        triton_kernels.CAPABILITIES, device_types=("cuda",), min_compute_capability=PROVED, further=_further
    ),
    ops=defined(
        "torchpaged_flashinfer_gdn",
        **{
            op: (SCHEMAS[op], apart_from_modes(run), FAKES[op])
            for op, run in (("linear_attention", _launch), ("delta_step", _launch_step))
        },
    ),
    unavailable=lambda: PACKAGE.unavailable() or triton_kernels.unavailable(),
    session=_Session,
)
