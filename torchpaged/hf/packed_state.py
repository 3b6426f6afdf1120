"""PackedState: a layer of a paged cache that keeps a state per request, in pools with a slot for each.

transformers' mixers are written for rows of one length, and keep their states as tensors of a whole batch. A
mixer that `torchpaged.hf.models` knows gets a forward over this layer's `convolve` and `attend` instead
(`torchpaged.hf.packed_mixers`). It runs in the packed steps of the engine, where one row holds all requests'
tokens, and in a `PagedCache` of an attached model, where a row is a request.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchpaged.cache import LayerStates
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.hf.state_pools import StatePools
from torchpaged.metadata import AttentionMetadata


class PackedState(StatePools):
    """`StatePools` and the ops over them, which a mixer's forward calls between `begin` and `complete`."""

    def convolve(
        self,
        x: Tensor,
        conv: Any,
        activation: str = "none",
        gates: tuple[Tensor, ...] = (),
        step: AttentionMetadata | None = None,
    ) -> Tensor:
        """``[batch, query_len, channels]`` through ``conv``, a depthwise ``nn.Conv1d``; a new tensor.
        ``gates``: none, or factors of the inputs and of what comes out, like ``x``. ``step``: what `begin`
        gave; default: it is called here."""
        weight, bias = _of_conv(conv, x)
        step = self.begin(x, weight.shape[1], x.shape[2]) if step is None else step
        tokens = tuple(each.flatten(0, 1) for each in (x, *gates))
        run = partial(self._convolve, options=(weight, bias, activation))
        return self.over_rows(self.pools.conv_state, run, tokens, x.shape, step).view(x.shape)

    def _convolve(
        self,
        tokens: Tensor,
        *gates: Tensor,
        options: tuple[Tensor, Tensor | None, str],
        rows: tuple[Tensor, Tensor, Tensor],
        max_query_len: int,
    ) -> Tensor:
        weight, bias, activation = options
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        sizes: dict[str, Any] = {"max_query_len": max_query_len, "activation": activation}
        sizes |= dict(zip(("in_gate", "out_gate"), gates, strict=False))
        self._ops.causal_conv(tokens, weight, self.pools.conv_state, *rows, out, bias, **sizes)
        return out

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None,
        *,
        scale: float,
        delta_rule: bool,
    ) -> Tensor:
        """The op ``linear_attention`` over ``[batch, query_len, ...]``, keys normalised with the delta rule;
        ``[batch, query_len, num_heads, value_dim]`` in v's dtype. Behind `convolve` or `begin`."""
        if self.pools.state is None:
            self._make_matrices((v.shape[2], q.shape[3], v.shape[3]), v)
        assert self.pools.state is not None
        step = self.cache.metadata_of(self, v.shape[0], v.shape[1])
        given = (q, k, v, g.to(exact_dtype(v.dtype)), *(() if beta is None else (beta,)))
        tokens = tuple(x.flatten(0, 1) for x in given)
        run = partial(self._attend, scale=scale, delta_rule=delta_rule)
        return self.over_rows(self.pools.state, run, tokens, v.shape, step).view(v.shape)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor | None = None,
        *,
        scale: float,
        delta_rule: bool,
        rows: tuple[Tensor, Tensor, Tensor],
        max_query_len: int,
    ) -> Tensor:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        rule: dict[str, Any] = {"scale": scale, "delta_rule": delta_rule, "normalize": delta_rule}
        self._ops.linear_attention(
            q, k, v, g, self.pools.state, *rows, out, beta, max_query_len=max_query_len, **rule
        )
        return out

    def over_channels(
        self, op: str, tokens: dict[str, Tensor], key_dim: int, parameters: dict[str, Tensor]
    ) -> Tensor:
        """The op ``selective_scan`` or ``rg_lru``, whose states have ``key_dim`` numbers per channel;
        ``[batch, query_len, channels]``. ``tokens``: its arguments ``[batch, query_len, *]``, x first. Behind
        `convolve`."""
        x = tokens["x"]
        if self.pools.state is None:
            self._make_matrices((x.shape[2], key_dim, 1), x)
        assert self.pools.state is not None
        step = self.cache.metadata_of(self, x.shape[0], x.shape[1])
        run = partial(self._over_channels, op, tuple(tokens), parameters)
        flat = tuple(each.flatten(0, 1) for each in tokens.values())
        return self.over_rows(self.pools.state, run, flat, x.shape, step).view(x.shape)

    def _over_channels(
        self,
        op: str,
        names: tuple[str, ...],
        parameters: dict[str, Tensor],
        *tokens: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        max_query_len: int,
    ) -> Tensor:
        given = dict(zip(("state_slots", "seq_lens", "query_start_loc"), rows, strict=True))
        given |= dict(zip(names, tokens, strict=True)) | parameters
        out = torch.empty_like(tokens[0], memory_format=torch.contiguous_format)
        run = getattr(self._ops, op)
        run(state=self.pools.state, out=out, max_query_len=max_query_len, **given)
        return out

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
        """The op ``gated_rms_norm`` over all of a token's numbers: ``x`` and the result of as many as ``gate
        [batch, query_len, width]``. Behind `attend`."""
        sizes = -1, 1, gate.shape[2]
        x = x.view(sizes)
        out = torch.empty_like(x)
        self._ops.gated_rms_norm(x, gate.view(sizes), weight, out, eps=eps, **options)
        return out.view(gate.shape)

    @property
    def takes_whole_steps(self) -> bool:
        """Whether `delta_step` takes a step, and `mamba2_step` one of single tokens: if none of its tokens
        can be taken back."""
        return torch.compiler.is_compiling() or not self.records_past

    def delta_step(
        self,
        step: AttentionMetadata,
        x: Tensor,
        conv: Any,
        gates: tuple[Tensor, Tensor, Tensor, Tensor],
        gate: Tensor,
        norm_weight: Tensor,
        sizes: tuple[int, int, int],
        **options: Any,
    ) -> Tensor:
        """The op ``delta_step`` over ``x [T, channels]`` of a step that `begin` gave; ``[T, num_heads,
        value_dim]``. ``gates``: a, b, a_log and dt_bias. ``sizes``: heads, key_dim and value_dim."""
        (inputs, state), rows = self._of_step(step, x, sizes)
        weight, bias = _of_conv(conv, x)
        out = x.new_empty(x.shape[0], sizes[0], sizes[2])
        options |= {"max_query_len": step.max_query_len, "new_step": True}
        self._ops.delta_step(x, weight, inputs, *gates, state, gate, norm_weight, *rows, out, bias, **options)
        return out

    def mamba2_step(
        self,
        step: AttentionMetadata,
        x: Tensor,
        conv: Any,
        steps: tuple[Tensor, Tensor, Tensor],
        skip_weight: Tensor,
        sizes: tuple[int, int, int],
        groups: int,
        out: Tensor,
        beside: bool,
        **options: Any,
    ) -> None:
        """The op ``mamba2_step`` over ``x [T, channels]`` of a step that `begin` gave. ``steps``: dt, a_log
        and dt_bias. ``sizes``: heads, key_dim and value_dim; ``groups`` of heads; ``out [T, num_heads,
        value_dim]``. ``beside``: the op's."""
        (inputs, state), rows = self._of_step(step, x, sizes)
        weight, bias = _of_conv(conv, x)
        semaphore, most = self.cache.backend.semaphore, self.cache.backend.limits.max_num_reqs
        if semaphore is None or most is None or 2 * most * groups > semaphore.shape[0]:
            semaphore, beside = None, False  # zeros are made right in front, behind attention
        elif beside:  # attention counts in the first half meanwhile
            semaphore = semaphore[semaphore.shape[0] // 2 :]
        options |= {"semaphore": semaphore, "new_step": True, "beside": beside}
        self._ops.mamba2_step(x, weight, inputs, *steps, state, skip_weight, *rows, out, bias, **options)

    def _of_step(
        self, step: AttentionMetadata, x: Tensor, sizes: tuple[int, int, int]
    ) -> tuple[LayerStates, tuple[Tensor, Tensor, Tensor]]:
        """Pools, and slots, lengths and starts of a whole step."""
        rows = self.rows_of(step)
        if self.pools.state is None:
            self._make_matrices(sizes, x)
        return self.pools, rows


def _of_conv(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight ``[channels, width]`` and bias of a depthwise ``nn.Conv1d`` in x's dtype."""
    weight, bias, dtype = conv.weight.squeeze(1), conv.bias, x.dtype
    weight = weight if weight.dtype == dtype else weight.to(dtype)
    return weight, bias if bias is None or bias.dtype == dtype else bias.to(dtype)
