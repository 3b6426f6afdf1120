"""Mamba 1 mixers over the states of a paged cache: those of Jamba, Mamba and Falcon Mamba. A channel is
a head of one value column, and each number of its state has a decay.

Source: Gu, Dao, "Mamba" (arXiv:2312.00752), algorithm 2. The modules' fields are not public;
``tests/engine/test_states.py`` runs the class under each supported transformers.
"""

from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from torchpaged.custom_ops.state.channels import scan_results, scan_steps
from torchpaged.hf.families import Family, register_family
from torchpaged.hf.packed_mixers import packed_functions, state_of, state_of_attached


def forward_mamba1(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Of a mixer, in the place of its class's, which runs with any other cache."""
    layer = state_of(self, options)
    if layer is None:
        plain: Tensor = type(self).forward(self, hidden_states, **options)
        return plain
    x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
    x = layer.convolve(x, self.conv1d, self.activation)
    sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
    dt, b, c = self.x_proj(x).split(sizes, dim=-1)
    if hasattr(self, "dt_layernorm"):  # Jamba's
        dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
    dt = linear(dt, self.dt_proj.weight)
    if x.device.type == "cpu":
        tokens = {"x": x, "dt": dt, "b": b, "c": c, "gate": gate}
        parameters = {"a_log": self.A_log, "dt_bias": self.dt_proj.bias, "skip_weight": self.D}
        out = layer.over_channels("selective_scan", tokens, self.ssm_state_size, parameters)
        layer.complete()
        scanned: Tensor = self.out_proj(out)
        return scanned
    step, g = scan_steps(dt, self.dt_proj.bias, self.A_log)
    q, k = c[:, :, None], b[:, :, None]
    out = layer.attend(q, k, x[..., None], g, step, scale=1.0, delta_rule=False)
    layer.complete()
    y = scan_results(out[..., 0], x, self.D, gate)
    projected: Tensor = self.out_proj(y.to(hidden_states.dtype))
    return projected


register_family(
    Family(
        ("jamba",),
        packed={"JambaMambaMixer": forward_mamba1},
        functions=packed_functions,
        layer=state_of_attached,
    )
)
