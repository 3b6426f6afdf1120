"""The specification of the state ops in plain torch: token by token, all rows at once; nothing is read on the
host. In float32, or in float64 over tensors of it.

Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), equation 10; Dao, Gu,
"Transformers are SSMs" (arXiv:2405.21060), section 3; with a decay per row of the state, Kimi Team, "Kimi
Linear" (arXiv:2510.26692), equation 1.
"""

import torch
from torch import Tensor

from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.custom_ops.state.call import (
    NORM_EPS,
    ConvCall,
    DeltaStepCall,
    GatedNormCall,
    GatesCall,
    LinearAttentionCall,
    Mamba2StepCall,
    Rows,
)
from torchpaged.custom_ops.state.channels import RgLruCall, SelectiveScanCall
from torchpaged.custom_ops.state.check import (
    check_causal_conv,
    check_delta_gates,
    check_gated_rms_norm,
    check_linear_attention,
)
from torchpaged.custom_ops.state.check_steps import (
    check_delta_step,
    check_mamba2_step,
    check_rg_lru,
    check_selective_scan,
)


def causal_conv(call: ConvCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_causal_conv(call)
    rows, exact = Rows.of(call), exact_dtype(call.x.dtype)
    num_tokens, width = call.x.shape[0], call.weight.shape[1]
    call.out.zero_()
    if not num_tokens or not rows.slots.shape[0]:
        return
    kept = call.conv_state[rows.slots]
    window = torch.where(rows.begins[:, None, None], 0, kept)
    weight = call.weight.to(exact).T  # [width, channels]
    inputs = call.x if call.in_gate is None else call.in_gate * call.x
    out = call.out.new_zeros(num_tokens + 1, call.out.shape[1])
    for i in range(call.max_query_len):
        on = (rows.slots > 0) & (i >= rows.first) & (i < rows.lens)
        token = (rows.starts + i).clamp_max(num_tokens - 1)
        seen = torch.cat((window, inputs[token][:, None]), dim=1)
        y = (seen.to(exact) * weight).sum(1)
        if call.bias is not None:
            y = y + call.bias
        if call.activation == "silu":
            y = torch.nn.functional.silu(y)
        if call.out_gate is not None:
            y = y * call.out_gate[token]
        out[torch.where(on, token, num_tokens)] = y.to(out.dtype)
        window = torch.where(on[:, None, None], seen[:, 1 - width :], window)
    call.out.copy_(out[:-1])
    call.conv_state[rows.slots] = torch.where((rows.slots > 0)[:, None, None], window, kept)


def _heads(x: Tensor, num_heads: int, normalize: bool) -> Tensor:
    """Keys or queries ``[B, num_key_heads, key_dim]``, one for each of ``num_heads``."""
    if normalize:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def linear_attention(call: LinearAttentionCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_linear_attention(call)
    rows, exact = Rows.of(call), exact_dtype(call.v.dtype)
    num_tokens, num_heads, _ = call.v.shape
    call.out.zero_()
    if not num_tokens or not rows.slots.shape[0]:
        return
    kept = call.state[rows.slots]
    state = torch.where(rows.begins[:, None, None, None], 0, kept.to(exact))
    out = call.out.new_zeros(num_tokens + 1, *call.out.shape[1:])
    for i in range(call.max_query_len):
        on = (rows.slots > 0) & (i >= rows.first) & (i < rows.lens)
        token = (rows.starts + i).clamp_max(num_tokens - 1)
        q, k = (_heads(x[token].to(exact), num_heads, call.normalize) for x in (call.q, call.k))
        u = call.v[token].to(exact)
        decay = call.g[token].exp()
        new = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
        if call.delta_rule:
            u = u - (new * k[..., None]).sum(-2)
        if call.beta is not None:
            u = u * call.beta[token].to(exact)[..., None]
        new = new + k[..., None] * u[..., None, :]
        y = (new * q[..., None]).sum(-2) * call.scale
        out[torch.where(on, token, num_tokens)] = y.to(out.dtype)
        state = torch.where(on[:, None, None, None], new, state)
    call.out.copy_(out[:-1])
    writes = (rows.slots > 0)[:, None, None, None]
    call.state[rows.slots] = torch.where(writes, state.to(kept.dtype), kept)


def delta_gates(call: GatesCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_delta_gates(call)
    exact = exact_dtype(call.a.dtype)
    x = call.a.flatten(1).to(exact) + call.dt_bias.to(exact)
    rate = call.a_log.to(exact).exp().repeat_interleave(x.shape[1] // max(call.a_log.shape[0], 1))
    step = torch.nn.functional.softplus(x).clamp(call.min_step, call.max_step)
    call.g.copy_(-rate * step if call.bound is None else call.bound * (rate * x).sigmoid())
    call.beta.copy_(step if call.b is None else call.beta_scale * call.b.flatten(1).to(exact).sigmoid())


def gated_rms_norm(call: GatedNormCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_gated_rms_norm(call)
    exact = exact_dtype(call.x.dtype)
    x, gate = call.x.to(exact), call.gate.reshape(call.x.shape).to(exact)
    factors = gate.sigmoid() if call.activation == "sigmoid" else torch.nn.functional.silu(gate)
    if call.skip is not None and call.skip_weight is not None:
        x = x + (call.skip.to(x.dtype) * call.skip_weight.to(x.dtype)[:, None]).reshape(x.shape)
    if call.gate_first:
        x = x * factors
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps) * call.weight.to(x.dtype)
    call.out.copy_(normed if call.gate_first else normed * factors)


def delta_step(call: DeltaStepCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_delta_step(call)
    conv, gates, attention, norm = call.parts()
    causal_conv(conv)
    delta_gates(gates)
    linear_attention(attention)
    gated_rms_norm(norm)


def mamba2_step(call: Mamba2StepCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_mamba2_step(call)
    conv, gates, attention = call.parts()
    causal_conv(conv)
    delta_gates(gates)
    linear_attention(attention)
    call.end(attention)


def selective_scan(call: SelectiveScanCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_selective_scan(call)
    attention = call.attention()
    linear_attention(attention)
    call.end(attention)


def rg_lru(call: RgLruCall) -> None:
    """Arguments: ``custom_ops/state/schema.py``."""
    check_rg_lru(call)
    attention = call.attention()
    linear_attention(attention)
    call.end(attention)
