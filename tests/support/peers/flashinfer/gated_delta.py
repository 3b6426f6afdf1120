"""FlashInfer's prompts of gated delta nets, on Hopper (0.7.4): states are ``[num_heads, value, key]``."""

import itertools

import torch
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    use_cp: bool | str = "auto",
    state_indices: Tensor | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    output_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``g`` is a factor. Rows that are not split read and write slots, -1 for none."""
    assert None not in (g, beta, initial_state, cu_seqlens, output, output_state)
    assert output_final_state
    assert backend == "flashinfer"
    if not scale:
        scale = q.shape[2] ** -0.5
    for x in (q, k, v, g, beta, cu_seqlens, output):
        assert x.is_contiguous()
    assert q.dtype == k.dtype == v.dtype == output.dtype == torch.bfloat16
    assert g.dtype == beta.dtype == torch.float32
    assert cu_seqlens.data_ptr() % 8 == 0
    num_reqs, rows = len(cu_seqlens) - 1, cu_seqlens.tolist()
    if use_cp:
        assert state_indices is None
        assert output_state_indices is None
        assert initial_state.is_contiguous()
        assert initial_state.data_ptr() != output_state.data_ptr()
        assert max(b - a for a, b in itertools.pairwise(rows)) <= max_seqlen <= len(q)
        assert max_seqlen * num_reqs >= len(q)
        reads = writes = list(range(num_reqs))
    else:
        assert state_indices.dtype == output_state_indices.dtype == torch.int32
        reads, writes = state_indices.tolist(), output_state_indices.tolist()
    q, k = (x.double().repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    v, g, beta = v.double(), g.double(), beta.double()
    for row, (begin, end) in enumerate(itertools.pairwise(rows)):
        read = reads[row]
        state = torch.zeros_like(initial_state[0]) if read < 0 else initial_state[read]
        state = state.double()
        for t in range(begin, end):
            state = state * g[t, :, None, None]
            u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + u[:, :, None] * k[t, :, None, :]
            output[t] = (scale * torch.einsum("hvk,hk->hv", state, q[t])).to(output.dtype)
        if writes[row] >= 0 and (end > begin or use_cp):
            output_state[writes[row]] = state.to(output_state.dtype)
    return output, output_state
