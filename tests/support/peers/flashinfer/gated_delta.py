"""FlashInfer's prompts of gated delta nets, on Hopper (0.7.4): states are ``[num_heads, value, key]``."""

import itertools

import torch
from signatures import takes


@takes(
    "q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, "
    "output=None, output_state=None, use_cp='auto', state_indices=None, backend='auto', max_seqlen=None, *, "
    "output_state_indices=None"
)
def chunk_gated_delta_rule(given):
    """``g`` is a factor. Rows that are not split read and write slots, -1 for none."""
    q, k, v, g, beta, cu_seqlens = given.q, given.k, given.v, given.g, given.beta, given.cu_seqlens
    initial_state, output, output_state = given.initial_state, given.output, given.output_state
    assert None not in (g, beta, initial_state, cu_seqlens, output, output_state)
    assert given.output_final_state
    assert given.backend == "flashinfer"
    scale = given.scale or q.shape[2] ** -0.5
    for x in (q, k, v, g, beta, cu_seqlens, output):
        assert x.is_contiguous()
    assert q.dtype == k.dtype == v.dtype == output.dtype == torch.bfloat16
    assert g.dtype == beta.dtype == torch.float32
    assert cu_seqlens.data_ptr() % 8 == 0
    num_reqs, rows = len(cu_seqlens) - 1, cu_seqlens.tolist()
    if given.use_cp:
        assert given.state_indices is given.output_state_indices is None
        assert initial_state.is_contiguous()
        assert initial_state.data_ptr() != output_state.data_ptr()
        assert max(b - a for a, b in itertools.pairwise(rows)) <= given.max_seqlen <= len(q)
        assert given.max_seqlen * num_reqs >= len(q)
        reads = writes = list(range(num_reqs))
    else:
        assert given.state_indices.dtype == given.output_state_indices.dtype == torch.int32
        reads, writes = given.state_indices.tolist(), given.output_state_indices.tolist()
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
        if writes[row] >= 0 and (end > begin or given.use_cp):
            output_state[writes[row]] = state.to(output_state.dtype)
    return output, output_state
