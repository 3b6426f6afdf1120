"""Calls of the state ops as records; shapes, dtypes and meanings: schema.py."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchpaged.custom_ops.plain_torch import exact_dtype

#: Added to the squared norm of a key or query that is normalised.
NORM_EPS = 1e-6


class ConvCall(NamedTuple):
    """The arguments of ``causal_conv``, with the schema's defaults."""

    x: Tensor
    weight: Tensor
    conv_state: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    bias: Tensor | None = None
    max_query_len: int = 1
    activation: str = "none"
    in_gate: Tensor | None = None
    out_gate: Tensor | None = None


class LinearAttentionCall(NamedTuple):
    """The arguments of ``linear_attention``, with the schema's defaults."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    state: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    beta: Tensor | None = None
    max_query_len: int = 1
    scale: float = 1.0
    delta_rule: bool = False
    normalize: bool = False


class GatesCall(NamedTuple):
    """The arguments of ``delta_gates``, with the schema's defaults."""

    a: Tensor
    b: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    g: Tensor
    beta: Tensor
    beta_scale: float = 1.0
    min_step: float = 0.0
    max_step: float | None = None
    bound: float | None = None


class GatedNormCall(NamedTuple):
    """The arguments of ``gated_rms_norm``, with the schema's defaults."""

    x: Tensor
    gate: Tensor
    weight: Tensor
    out: Tensor
    eps: float = 1e-6
    gate_first: bool = False
    skip: Tensor | None = None
    skip_weight: Tensor | None = None
    activation: str = "silu"


class DeltaStepCall(NamedTuple):
    """The arguments of ``delta_step``, with the schema's defaults."""

    x: Tensor
    weight: Tensor
    conv_state: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    state: Tensor
    gate: Tensor
    norm_weight: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    bias: Tensor | None = None
    max_query_len: int = 1
    scale: float = 1.0
    beta_scale: float = 1.0
    bound: float | None = None
    eps: float = 1e-6
    activation: str = "silu"
    new_step: bool = False

    @property
    def by_key(self) -> bool:
        """Whether rows of the state decay one by one."""
        return self.a.shape[1] * self.a.shape[2] != self.state.shape[1]

    @property
    def num_key_heads(self) -> int:
        """Of what x is beside its values."""
        _, num_heads, key_dim, value_dim = self.state.shape
        return (self.x.shape[1] - num_heads * value_dim) // (2 * key_dim)

    def parts(self) -> tuple[ConvCall, GatesCall, LinearAttentionCall, GatedNormCall]:
        """The calls that one after the other are this one, over new memory between them."""
        _, num_heads, key_dim, value_dim = self.state.shape
        keys = self.num_key_heads * key_dim
        exact = exact_dtype(self.x.dtype)
        mixed, made = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.x, self.out))
        q, k, v = mixed.split([keys, keys, num_heads * value_dim], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, n)) for each, n in ((q, key_dim), (k, key_dim), (v, value_dim)))
        decays = num_heads * key_dim if self.by_key else num_heads
        g, beta = (self.x.new_empty(self.x.shape[0], n, dtype=exact) for n in (decays, num_heads))
        log_decay = g.unflatten(1, (num_heads, -1)) if self.by_key else g
        rows = self.state_slots, self.seq_lens, self.query_start_loc
        longest: dict[str, Any] = {"max_query_len": self.max_query_len}
        rule = {"scale": self.scale, "delta_rule": True, "normalize": True, **longest}
        conv = self.x, self.weight, self.conv_state, *rows, mixed, self.bias
        return (
            ConvCall(*conv, **longest, activation="silu"),
            GatesCall(self.a, self.b, self.a_log, self.dt_bias, g, beta, self.beta_scale, bound=self.bound),
            LinearAttentionCall(q, k, v, log_decay, self.state, *rows, made, beta, **rule),
            GatedNormCall(made, self.gate, self.norm_weight, self.out, self.eps, activation=self.activation),
        )


class Mamba2StepCall(NamedTuple):
    """The arguments of ``mamba2_step``, with the schema's defaults."""

    x: Tensor
    weight: Tensor
    conv_state: Tensor
    dt: Tensor
    a_log: Tensor
    dt_bias: Tensor
    state: Tensor
    skip_weight: Tensor
    state_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    out: Tensor
    bias: Tensor | None = None
    gate: Tensor | None = None
    min_step: float = 0.0
    max_step: float | None = None
    semaphore: Tensor | None = None
    new_step: bool = False
    beside: bool = False

    @property
    def num_groups(self) -> int:
        """Of heads that share a key and a query."""
        _, num_heads, key_dim, value_dim = self.state.shape
        return (self.x.shape[1] - num_heads * value_dim) // (2 * key_dim)

    def parts(self) -> tuple[ConvCall, GatesCall, LinearAttentionCall]:
        """The calls that one after the other are this one but for skip and gate, over new memory between
        them; ``v`` of the last is what is skipped."""
        _, num_heads, key_dim, value_dim = self.state.shape
        keys = self.num_groups * key_dim
        exact = exact_dtype(self.x.dtype)
        mixed = torch.empty_like(self.x, memory_format=torch.contiguous_format)
        v, k, q = mixed.split([num_heads * value_dim, keys, keys], dim=-1)
        v, k, q = (each.unflatten(-1, (-1, n)) for each, n in ((v, value_dim), (k, key_dim), (q, key_dim)))
        g, beta = (torch.empty_like(self.dt, dtype=exact) for _ in range(2))
        made = torch.empty_like(self.out, dtype=exact)
        rows = self.state_slots, self.seq_lens, self.query_start_loc
        steps: dict[str, Any] = {"min_step": self.min_step, "max_step": self.max_step}
        return (
            ConvCall(self.x, self.weight, self.conv_state, *rows, mixed, self.bias, activation="silu"),
            GatesCall(self.dt[:, None], None, self.a_log, self.dt_bias, g, beta, **steps),
            LinearAttentionCall(q, k, v, g, self.state, *rows, made, beta),
        )

    def end(self, attended: LinearAttentionCall) -> None:
        """In torch: skip and gate of what the last of the parts gave."""
        y, skip = attended.out, attended.v
        y = y + self.skip_weight.to(y.dtype)[:, None] * skip.to(y.dtype)
        self.out.copy_(y if self.gate is None else y * torch.nn.functional.silu(self.gate.to(y.dtype)))


class Rows(NamedTuple):
    """What a batch's rows mean to a state.

    Attributes:
        slots: ``[B]`` int64; 0 where a row writes nothing.
        starts: ``[B]`` int64, first token of each row.
        lens: ``[B]``, tokens of each row; ``first``: of these, the first one that is no padding.
        begins: ``[B]``, whether the row begins from zeros.
    """

    slots: Tensor
    starts: Tensor
    lens: Tensor
    first: Tensor
    begins: Tensor

    @classmethod
    def of(cls, call: Any) -> Self:
        """The rows of a call that has slots, lengths and starts."""
        lens = call.query_start_loc.diff()
        first = torch.minimum((lens - call.seq_lens).clamp_min(0), lens)
        slots = torch.where(first < lens, call.state_slots, 0).long()
        return cls(slots, call.query_start_loc[:-1].long(), lens, first, call.seq_lens <= lens)
