"""Mamba 2 mixers over the states of a paged cache: those of Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba 2
and Mamba 2 itself.

The modules' fields are not public; ``tests/engine/test_states.py`` runs every class under each supported
transformers.
"""

from typing import Any

from torch import Tensor
from torch.nn import Identity
from torch.nn.functional import silu, softplus

from torchpaged.custom_ops.plain_torch import exact
from torchpaged.hf.families import Family, register_family
from torchpaged.hf.packed_mixers import packed_functions, state_of, state_of_attached


def forward_mamba2(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Of a mixer, in the place of its class's, which runs with any other cache."""
    layer = state_of(self, options)
    if layer is None:
        plain: Tensor = type(self).forward(self, hidden_states, **options)
        return plain
    sizes = [self.intermediate_size, self.conv_dim, self.num_heads]
    if hasattr(self, "mup_vector"):  # Falcon-H1
        whole = self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector
    else:
        whole = self.in_proj(hidden_states)
    gate, mixed, dt = whole.split(sizes, dim=-1)
    mixed = layer.convolve(mixed, self.conv1d, self.activation)
    groups = self.n_groups * self.ssm_state_size
    x, b, c = mixed.split([self.intermediate_size, groups, groups], dim=-1)
    x = x.unflatten(-1, (self.num_heads, self.head_dim))
    # As prompts have it in transformers, whose single tokens are not clamped.
    dt = exact(softplus(dt + self.dt_bias).clamp(*self.time_step_limit))
    out = layer.attend(
        c.unflatten(-1, (self.n_groups, self.ssm_state_size)),
        b.unflatten(-1, (self.n_groups, self.ssm_state_size)),
        x,
        -exact(self.A_log).exp() * dt,
        dt,
        scale=1.0,
        delta_rule=False,
    )
    layer.complete()
    out, gate = (exact(out) + self.D[:, None] * exact(x)).flatten(2).flatten(0, 1), gate.flatten(0, 1)
    gated = out * silu(gate) if isinstance(self.norm, Identity) else self.norm(out, gate)
    projected: Tensor = self.out_proj(gated.to(hidden_states.dtype).view(*hidden_states.shape[:2], -1))
    return projected


_CLASSES = (
    "BambaMixer",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "NemotronHMamba2Mixer",
    "Zamba2MambaMixer",
)
register_family(
    Family(
        ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
        packed=dict.fromkeys(_CLASSES, forward_mamba2),
        functions=packed_functions,
        layer=state_of_attached,
    )
)
