"""linear_attention on a CPU: prompts in chunks by matrix products, row by row; short rows, and states of
one value column, by the reference, all together.

Sources: Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length" (arXiv:2406.06484), section 3, and "Gated Delta Networks" (arXiv:2412.06464), section 3.3. Of a
chunk's tokens, u solves a triangular system of the products of their keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchpaged.custom_ops.state.call import NORM_EPS, LinearAttentionCall, Rows
from torchpaged.custom_ops.state.check import check_linear_attention

#: Tokens of a row up to which the reference takes it, of a chunk, and of one where every row of the state has
#: a decay: a pair of its tokens has as many then.
SHORT, CHUNK, CHUNK_BY_KEY = 8, 64, 16


def linear_attention(call: LinearAttentionCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_linear_attention(call)
    rows = Rows.of(call)
    if call.max_query_len <= SHORT or call.v.shape[2] == 1 or not rows.slots.shape[0]:
        _reference(call)
        return
    call.out.zero_()
    short: list[int] = []
    for row, (slot, start, count, first, begins) in enumerate(zip(*(x.tolist() for x in rows), strict=True)):
        if 0 < count <= SHORT:
            short.append(row)
        elif slot:
            _row(call, slice(start + first, start + count), slot, begins)
    if short:
        _together(call, rows, torch.tensor(short, device=call.out.device))


def _reference(call: LinearAttentionCall) -> None:
    names = ("max_query_len", "scale", "delta_rule", "normalize")
    options = {name: getattr(call, name) for name in names}
    torch.ops.torchpaged.linear_attention.reference(*call[: -len(names)], **options)


def _together(call: LinearAttentionCall, rows: Rows, short: Tensor) -> None:
    """Some rows as a batch of their own."""
    lens = rows.lens[short]
    ends = lens.cumsum(0)
    offsets = (rows.starts[short] - ends + lens).repeat_interleave(lens)
    tokens = torch.arange(int(ends[-1]), device=ends.device) + offsets
    starts = torch.cat((ends.new_zeros(1), ends)).int()
    out = call.out.new_empty(tokens.shape[0], *call.out.shape[1:])
    part = call._replace(
        **{name: getattr(call, name)[tokens] for name in ("q", "k", "v", "g")},
        beta=None if call.beta is None else call.beta[tokens],
        state_slots=call.state_slots[short],
        seq_lens=call.seq_lens[short],
        query_start_loc=starts,
        out=out,
        max_query_len=SHORT,
    )
    _reference(part)
    call.out[tokens] = out


def _row(call: LinearAttentionCall, tokens: slice, slot: int, begins: bool) -> None:
    """One row's tokens, chunk by chunk."""
    exact = torch.float64 if call.v.dtype == torch.float64 else torch.float32
    num_heads = call.v.shape[1]
    q, k, v = (x[tokens].to(exact).transpose(0, 1) for x in (call.q, call.k, call.v))  # [heads, tokens, *]
    if call.normalize:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    q, k = (x.repeat_interleave(num_heads // x.shape[0], 0) for x in (q * call.scale, k))
    # [heads, tokens, 1 or key_dim]; sums of a chunk's decays are subtracted from each other
    g = call.g[tokens].double().view(v.shape[1], num_heads, -1).transpose(0, 1)
    beta = None if call.beta is None else call.beta[tokens].to(exact).T[..., None]
    state = torch.zeros_like(call.state[slot], dtype=exact) if begins else call.state[slot].to(exact)
    size = CHUNK if call.g.dim() == 2 else CHUNK_BY_KEY
    for begin in range(0, v.shape[1], size):
        part = slice(begin, begin + size)
        gates = g[:, part], None if beta is None else beta[:, part]
        out, state = _chunk(state, q[:, part], k[:, part], v[:, part], *gates, call.delta_rule)
        call.out[tokens][part] = out.transpose(0, 1).to(call.out.dtype)
    call.state[slot] = state.to(call.state.dtype)


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, delta_rule: bool
) -> tuple[Tensor, Tensor]:
    """``out [heads, tokens, value_dim]`` of a chunk, and the state behind it. ``g [heads, tokens, 1 or
    key_dim]``: float64."""
    total = g.cumsum(1)
    since = total.exp().to(v.dtype)
    u = v - (since * k) @ state if delta_rule else v
    u = u if beta is None else u * beta
    if delta_rule:
        system = _products(k, k, total)
        system = system if beta is None else system * beta
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    out = (since * q) @ state + _products(q, k, total) @ u
    left = (total[:, -1:] - total).exp().to(v.dtype)
    return out, since[:, -1, :, None] * state + (k * left).mT @ u


def _products(x: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """``[heads, tokens, tokens]``: of each token's ``x`` and the keys up to its own, with what the decays
    between the two leave of a key."""
    apart = (total[:, :, None] - total[:, None]).movedim(-1, 1).tril()
    decay = apart.exp().tril().to(x.dtype)  # [heads, 1 or key_dim, tokens, tokens]
    return decay[:, 0] * (x @ k.mT) if total.shape[2] == 1 else torch.einsum("htd,hsd,hdts->hts", x, k, decay)
