"""PackedState: a layer of a paged cache that keeps a state per request, in pools with a slot for each.

transformers' mixers are written for rows of one length, and keep their states as tensors of a whole batch. A
mixer that `torchpaged.hf.models` knows gets a forward over this layer's `convolve` and `attend` instead
(`torchpaged.hf.packed_mixers`). It runs in the packed steps of the engine, where one row holds all requests'
tokens, and in a `PagedCache` of an attached model, where a row is a request.
"""

from typing import Any

import torch
from torch import Tensor

from torchpaged.cache import LayerStates
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.hf.state_pools import StatePools
from torchpaged.metadata import AttentionMetadata

#: Of a step's requests, in the words of the ops.
_ROWS = ("state_slots", "seq_lens", "query_start_loc")


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
        tokens = dict(zip(("x", "in_gate", "out_gate"), (x, *gates), strict=False))
        pool = {"conv_state": self.pools.conv_state}
        options = {"weight": weight, "bias": bias, "activation": activation}
        return self._over_tokens("causal_conv", pool, tokens, "x", step, options)

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
        tokens = {"q": q, "k": k, "v": v, "g": g.to(exact_dtype(v.dtype))}
        tokens |= {} if beta is None else {"beta": beta}
        options = {"scale": scale, "delta_rule": delta_rule, "normalize": delta_rule}
        sizes = v.shape[2], q.shape[3], v.shape[3]
        return self._over_matrices("linear_attention", tokens, "v", sizes, options)

    def over_channels(
        self, op: str, tokens: dict[str, Tensor], key_dim: int, parameters: dict[str, Tensor]
    ) -> Tensor:
        """The op ``selective_scan`` or ``rg_lru``, whose states have ``key_dim`` numbers per channel;
        ``[batch, query_len, channels]``. ``tokens``: its arguments ``[batch, query_len, *]``. Behind
        `convolve`."""
        return self._over_matrices(op, tokens, "x", (tokens["x"].shape[2], key_dim, 1), parameters)

    def _over_matrices(
        self,
        op: str,
        tokens: dict[str, Tensor],
        like: str,
        sizes: tuple[int, int, int],
        options: dict[str, Any],
    ) -> Tensor:
        """`_over_tokens` of a request's matrices, of these ``sizes``."""
        x = tokens[like]
        if self.pools.state is None:
            self._make_matrices(sizes, x)
        assert self.pools.state is not None
        step = self.cache.metadata_of(self, x.shape[0], x.shape[1])
        return self._over_tokens(op, {"state": self.pools.state}, tokens, like, step, options)

    def _over_tokens(
        self,
        op: str,
        pool: dict[str, Tensor],
        tokens: dict[str, Tensor],
        like: str,
        step: AttentionMetadata,
        options: dict[str, Any],
    ) -> Tensor:
        """``op`` over a pool and ``tokens [batch, query_len, *]``, by its names of them; a new tensor, of the
        shape of the one that it is ``like``."""
        place, launch = list(tokens).index(like), getattr(self._ops, op)

        def run(*each: Tensor, rows: tuple[Tensor, Tensor, Tensor], max_query_len: int) -> Tensor:
            out = torch.empty_like(each[place], memory_format=torch.contiguous_format)
            given = dict(zip((*tokens, *_ROWS), (*each, *rows), strict=True))
            launch(**given, **pool, out=out, max_query_len=max_query_len, **options)
            return out

        flat, sizes = tuple(x.flatten(0, 1) for x in tokens.values()), tokens[like].shape
        (state,) = pool.values()
        return self.over_rows(state, run, flat, sizes, step).view(sizes)

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
