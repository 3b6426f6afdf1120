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

from torchpaged.cache import LayerStates, StateLayerSpec
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.state_layer import StateLayer, TakesBack
from torchpaged.metadata import AttentionMetadata

_SET_UP = (
    "PagedCache: the pools of states can't be made inside compiled code; run the first forward eagerly, as "
    "generate() does"
)


class PackedState(TakesBack, StateLayer):
    """Pools of one layer.

    Args:
        cache: the `PagedCache`, or the engine's `torchpaged.hf.step_cache.StepCache`, whose layer it is.
        index: position among the cache's layers.

    Attributes:
        pools: the `LayerStates`; made here by the first forward, until `adopt_as` gives the layer others.
        is_first, is_last, has_written: as those of a `PagedLayer`.
    """

    pools: LayerStates
    rolls = latent = False
    window: int | None = None

    def __init__(self, cache: PagedOwner, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = self.is_first = self.is_last = self.has_written = False
        self.forget_past()

    @property
    def stored(self) -> StateLayerSpec:
        """What the pools hold."""
        inputs, state = self.pools
        sizes = (inputs.shape[1] + 1, inputs.shape[2])
        if state is None:
            return StateLayerSpec(*sizes, input_dtype=inputs.dtype)
        num_heads, key_dim, value_dim = state.shape[1:]
        return StateLayerSpec(*sizes, num_heads, key_dim, value_dim, state.dtype, inputs.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that the pools take; 0 before there are any."""
        if not self.is_initialized:
            return 0
        return sum(tensor.nbytes for tensor in self.stored.block_tensors(self.pools).values())

    def adopt_as(self, probed: "PackedState", pools: LayerStates) -> None:
        """Take pools that were made by what ``probed`` stores."""
        self.pools, self.is_initialized = pools, True

    @torch.compiler.disable(reason=_SET_UP)
    def _prepare(self, x: Tensor, width: int, channels: int) -> None:
        """Before the first states of a batch; makes the pool of inputs, once."""
        if self.is_initialized:
            self._require_own(x, channels)
        self.cache.prepare_states(self, x)
        if not self.is_initialized:
            sizes = self.cache.num_states, width - 1, channels
            self.pools, self.is_initialized = LayerStates(_zeros(sizes, x.dtype, x.device), None), True

    def _require_own(self, x: Tensor, channels: int) -> None:
        """Refuse what the pools were not made for, before rows begin."""
        pool = self.pools.conv_state
        takes, got = (pool.shape[2], pool.dtype, pool.device), (channels, x.dtype, x.device)
        if got != takes:
            raise ArgumentError(
                "x",
                f"{takes[0]} channels, {takes[1]} on {takes[2]}, as this cache's layer {self.index} was made "
                "for",
                f"{got[0]} channels, {got[1]} on {got[2]}",
                "a cache keeps the layout of the model that used it first: make a new PagedCache of the "
                "model's config",
            )

    @torch.compiler.disable(reason=_SET_UP)
    def _make_matrices(self, sizes: tuple[int, int, int], x: Tensor) -> None:
        """``sizes``: heads, rows and columns of a request's matrices."""
        pool = _zeros((self.cache.num_states, *sizes), exact_dtype(x.dtype), x.device)
        self.pools = self.pools._replace(state=pool)

    # ------------------------------------------------------------------------- what a mixer's forward calls
    def begin(self, x: Tensor, width: int = 2, channels: int = 0) -> AttentionMetadata:
        """The step of tokens ``x [batch, query_len, *]``, of a mixer without a convolution or of `convolve`.
        First of what a mixer calls: the first layer of a forward moves the rows on."""
        refuse_grad(x=x)
        if not self.is_initialized or not self.cache.ready:
            self._prepare(x, width, channels)
        step = self.cache.advance(self, x.shape[0], x.shape[1])
        self.past = []  # in compiled forwards, too, or what an eager one before them left is taken back
        return step

    def prepared(self, x: Tensor, width: int, channels: int) -> BackendOps:
        """`begin` without the step: pools and a backend are there, and these are its ops."""
        if not self.is_initialized or not self.cache.ready:
            self._prepare(x, width, channels)
        return self._ops

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
        options["max_query_len"] = step.max_query_len
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
        **options: Any,
    ) -> Tensor:
        """The op ``mamba2_step`` over ``x [T, channels]`` of a step that `begin` gave; ``[T, num_heads,
        value_dim]``. ``steps``: dt, a_log and dt_bias. ``sizes``: heads, key_dim and value_dim; ``groups`` of
        heads."""
        (inputs, state), rows = self._of_step(step, x, sizes)
        weight, bias = _of_conv(conv, x)
        out, semaphore = x.new_empty(x.shape[0], sizes[0], sizes[2]), self.cache.backend.semaphore
        most = self.cache.backend.limits.max_num_reqs
        if semaphore is not None and (most is None or most * groups > semaphore.shape[0]):
            semaphore = None
        options["semaphore"] = semaphore
        self._ops.mamba2_step(x, weight, inputs, *steps, state, skip_weight, *rows, out, bias, **options)
        return out

    def _of_step(
        self, step: AttentionMetadata, x: Tensor, sizes: tuple[int, int, int]
    ) -> tuple[LayerStates, tuple[Tensor, Tensor, Tensor]]:
        """Pools, and slots, lengths and starts of a whole step."""
        rows = self.rows_of(step)
        if self.pools.state is None:
            self._make_matrices(sizes, x)
        return self.pools, rows

    def begins(self, batch: int, query_len: int) -> Tensor:
        """``[batch, query_len, 1]``: whether a token is its request's first. Behind `convolve` or `begin`."""
        step = self.cache.metadata_of(self, batch, query_len)
        if step.positions is not None:
            first = step.positions == 0
        elif query_len == 1:
            first = step.seq_lens == 1
        else:
            places = torch.arange(query_len, device=step.seq_lens.device)
            first = step.seq_lens[:, None] + places == query_len
        return first.view(batch, query_len, 1)

    def complete(self) -> None:
        """Say that this forward's states are written, last of what a mixer calls; the last layer's word
        completes the forward."""
        self.cache.written(self)

    @property
    def _ops(self) -> BackendOps:
        """The session's; before there is one, as while a model is looked at, the reference."""
        return self.cache.backend.ops if self.cache.ready else BACKEND_OPS["reference"]

    # ----------------------------------------------------------------------------- between a cache's forwards
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` goes on from the states of row ``beam_idx[i]``, in place."""
        self.past = []
        if not self.is_initialized:
            return
        for pool in self.stored.block_tensors(self.pools).values():
            chosen = pool.index_select(0, beam_idx.to(pool.device) + 1)
            pool[1 : 1 + chosen.shape[0]].copy_(chosen)

    def unknown(self) -> UnsupportedModelError:
        """Of a layer whose mixer does not call this one."""
        name = f"{self.cache.name}: layer {self.index}"
        if self.cache.rows is not None:
            return UnsupportedModelError(
                f"{name} keeps states as an attached model's mixer computes them, and its mixer runs as "
                "transformers has it; call torchpaged.hf.attach(model), or make a new PagedCache"
            )
        return UnsupportedModelError(
            f"{name} keeps a recurrent state of a kind that packed batches do not carry yet; use generate() "
            "with torchpaged.hf.PagedCache"
        )

    def update_conv_state(self, *_: Any, **__: Any) -> Tensor:
        """Refuse: a mixer that runs as transformers has it would take all tokens for one request's.

        Raises:
            UnsupportedModelError: always.
        """
        raise self.unknown()

    update_recurrent_state = update_conv_state


def _of_conv(conv: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight ``[channels, width]`` and bias of a depthwise ``nn.Conv1d`` in x's dtype."""
    weight, bias, dtype = conv.weight.squeeze(1), conv.bias, x.dtype
    weight = weight if weight.dtype == dtype else weight.to(dtype)
    return weight, bias if bias is None or bias.dtype == dtype else bias.to(dtype)


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool; an inference tensor could not be written under no_grad later."""
    with torch.inference_mode(False):
        pool = torch.zeros(sizes, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(pool, guard=False)  # guard=False: a new cache must not recompile
    return pool
