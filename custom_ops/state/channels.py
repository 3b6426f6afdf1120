"""Calls of ``selective_scan`` and ``rg_lru`` as records, and what of them is torch around a
``linear_attention`` whose heads are channels; shapes, dtypes and meanings: schema.py.

Sources: Gu, Dao, "Mamba" (arXiv:2312.00752), algorithm 2; De, Smith and others, "Griffin" (arXiv:2402.19427),
section 2.4.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.custom_ops.state.call import LinearAttentionCall, Rows


class SelectiveScanCall(NamedTuple):
    """The arguments of ``selective_scan``, with the schema's defaults."""

    x: Tensor
    dt: Tensor
    a_log: Tensor
    dt_bias: Tensor
    b: Tensor
    c: Tensor
    skip_weight: Tensor
    state: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    gate: Tensor | None = None
    max_query_len: int = 1

    def attention(self) -> LinearAttentionCall:
        """The recurrence, into new memory."""
        step, g = scan_steps(self.dt, self.dt_bias, self.a_log)
        return _over_channels(self, self.c[:, None], self.b[:, None], self.x, g, step)

    def end(self, attended: LinearAttentionCall) -> None:
        """Skip and gate of what the recurrence gave."""
        y = scan_results(attended.out[..., 0], self.x, self.skip_weight, self.gate)
        self.out.copy_(torch.where(_tokens(self)[0], y, 0))


def scan_steps(dt: Tensor, dt_bias: Tensor, a_log: Tensor) -> tuple[Tensor, Tensor]:
    """Steps ``[..., channels]`` and their decays ``[..., channels, key_dim]``, in the dtype of states."""
    exact = exact_dtype(dt.dtype)
    step = softplus(dt.to(exact) + dt_bias.to(exact))
    return step, -a_log.to(exact).exp() * step[..., None]


def scan_results(attended: Tensor, x: Tensor, skip_weight: Tensor, gate: Tensor | None) -> Tensor:
    """What the recurrence gave, ``[..., channels]``, with skip and gate, in the dtype of states."""
    exact = exact_dtype(x.dtype)
    y = attended.to(exact) + skip_weight.to(exact) * x.to(exact)
    return y if gate is None else y * silu(gate.to(exact))


class RgLruCall(NamedTuple):
    """The arguments of ``rg_lru``, with the schema's defaults."""

    x: Tensor
    input_weight: Tensor
    input_bias: Tensor
    recurrent_weight: Tensor
    recurrent_bias: Tensor
    recurrent_param: Tensor
    state: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    gate: Tensor | None = None
    max_query_len: int = 1

    def attention(self) -> LinearAttentionCall:
        """The recurrence of gated inputs, into new memory."""
        exact = exact_dtype(self.x.dtype)
        blocks = self.x.to(exact).reshape(-1, *self.input_bias.shape).transpose(0, 1)

        def gate(weight: Tensor, bias: Tensor) -> Tensor:
            product = torch.baddbmm(bias.to(exact)[:, None], blocks, weight.to(exact))
            # where blocks have one channel each, `flatten` gives a view
            return product.transpose(0, 1).flatten(1).contiguous().sigmoid()

        recurrent = gate(self.recurrent_weight, self.recurrent_bias)
        g, norm = lru_decays(recurrent, self.recurrent_param, _tokens(self)[1])
        v = (self.x * gate(self.input_weight, self.input_bias) * norm).to(self.x.dtype)
        ones = self.x.new_ones(self.x.shape[0], 1, 1)
        return _over_channels(self, ones, ones, v, g)

    def end(self, attended: LinearAttentionCall) -> None:
        """Gate of what the recurrence gave."""
        y = attended.out[..., 0]
        y = y if self.gate is None else y * self.gate
        self.out.copy_(torch.where(_tokens(self)[0], y, 0))


def lru_decays(gate: Tensor, recurrent_param: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Logarithms of the decays of a recurrent ``gate [..., channels]``, and by what inputs are multiplied,
    both in the dtype of states. ``begins [..., 1]`` bool: tokens whose state was zero."""
    exact = exact_dtype(gate.dtype)
    g = gate.to(exact) * softplus(recurrent_param.to(exact)) * -8.0
    return g, torch.where(begins, 1, (-torch.expm1(2 * g)).sqrt())


def _over_channels(
    call: SelectiveScanCall | RgLruCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
) -> LinearAttentionCall:
    made = torch.empty(*v.shape, 1, dtype=exact_dtype(v.dtype), device=v.device)
    rows = call.state_slots, call.seq_lens, call.query_start_loc
    return LinearAttentionCall(q, k, v[..., None], g, call.state, *rows, made, beta, call.max_query_len)


def _tokens(call: SelectiveScanCall | RgLruCall) -> tuple[Tensor, Tensor]:
    """``[T, 1]`` bool: tokens of rows that write, padding not among them, and requests' first ones."""
    rows, places = Rows.of(call), torch.arange(call.x.shape[0], device=call.x.device)[:, None]
    first = rows.starts + rows.first
    writes = (places >= first) & (places < rows.starts + rows.lens) & (rows.slots > 0)
    return writes.any(1, keepdim=True), (writes & rows.begins & (places == first)).any(1, keepdim=True)
