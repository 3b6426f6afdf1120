"""Calls of the state ops as records; shapes, dtypes and meanings: schema.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    def of(cls, call: ConvCall | LinearAttentionCall) -> Rows:
        """The rows of a call."""
        lens = call.query_start_loc.diff()
        first = torch.minimum((lens - call.seq_lens).clamp_min(0), lens)
        slots = torch.where(first < lens, call.state_slots, 0).long()
        return cls(slots, call.query_start_loc[:-1].long(), lens, first, call.seq_lens <= lens)
