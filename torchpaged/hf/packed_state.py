"""PackedState: a layer of a paged cache that keeps a state per request, in pools with a slot for each.

transformers' mixers are written for rows of one length, and keep their states as tensors of a whole batch. A
mixer that `torchpaged.hf.models` knows gets a forward over this layer's `convolve` and `attend` instead
(`torchpaged.hf.packed_mixers`). It runs in the packed steps of the engine, where one row holds all requests'
tokens, and in a `PagedCache` of an attached model, where a row is a request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.cache import LayerStates, StateLayerSpec
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import ArgumentError, UnsupportedModelError
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.state_layer import StateLayer
from torchpaged.metadata import AttentionMetadata

_SET_UP = (
    "PagedCache: the pools of states can't be made inside compiled code; run the first forward eagerly, as "
    "generate() does"
)


class PackedState(StateLayer):
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
    is_croppable = False

    def __init__(self, cache: PagedOwner, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = self.is_first = self.is_last = self.has_written = False

    @property
    def stored(self) -> StateLayerSpec:
        """What the pools hold."""
        inputs, state = self.pools
        sizes = (inputs.shape[1] + 1, inputs.shape[2])
        if state is None:
            return StateLayerSpec(*sizes)
        num_heads, key_dim, value_dim = state.shape[1:]
        return StateLayerSpec(*sizes, num_heads, key_dim, value_dim, state.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that the pools take; 0 before there are any."""
        if not self.is_initialized:
            return 0
        return sum(tensor.nbytes for tensor in self.stored.block_tensors(self.pools).values())

    def adopt_as(self, probed: PackedState, pools: LayerStates) -> None:
        """Take pools that were made by what ``probed`` stores."""
        self.pools, self.is_initialized = pools, True

    @torch.compiler.disable(reason=_SET_UP)
    def _prepare(self, x: Tensor, weight: Tensor) -> None:
        """Before the first states of a batch; makes the pool of inputs, once."""
        if self.is_initialized:
            self._require_own(x)
        self.cache.prepare_states(self, x)
        if not self.is_initialized:
            sizes = self.cache.num_states, weight.shape[1] - 1, weight.shape[0]
            self.pools, self.is_initialized = LayerStates(_zeros(sizes, x.dtype, x.device), None), True

    def _require_own(self, x: Tensor) -> None:
        """Refuse what the pools were not made for, before rows begin."""
        pool = self.pools.conv_state
        takes, got = (pool.shape[2], pool.dtype, pool.device), (x.shape[2], x.dtype, x.device)
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
    def _make_matrices(self, num_heads: int, key_dim: int, v: Tensor) -> None:
        sizes = self.cache.num_states, num_heads, key_dim, v.shape[-1]
        self.pools = self.pools._replace(state=_zeros(sizes, _exact(v), v.device))

    # ------------------------------------------------------------------------- what a mixer's forward calls
    def convolve(self, x: Tensor, conv: Any, activation: str = "none") -> Tensor:
        """``[batch, query_len, channels]`` through ``conv``, a depthwise ``nn.Conv1d``; a new tensor. First
        of what a mixer calls: the first layer of a forward moves the rows on."""
        refuse_grad(x=x)
        weight, bias = conv.weight[:, 0].to(x.dtype), conv.bias
        if not self.is_initialized or not self.cache.ready:
            self._prepare(x, weight)
        slots, step = self._slots_of(self.cache.advance(self, x.shape[0], x.shape[1]))
        tokens = x.flatten(0, 1)
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        self._ops.causal_conv(
            tokens,
            weight,
            self.pools.conv_state,
            slots,
            step.seq_lens,
            step.query_start_loc,
            out,
            None if bias is None else bias.to(x.dtype),
            max_query_len=step.max_query_len,
            activation=activation,
        )
        return out.view(x.shape)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, delta_rule: bool
    ) -> Tensor:
        """The op ``linear_attention`` over ``[batch, query_len, ...]``, keys normalised with the delta rule;
        ``[batch, query_len, num_heads, value_dim]`` in v's dtype. Behind `convolve`."""
        if self.pools.state is None:
            self._make_matrices(v.shape[2], q.shape[3], v)
        assert self.pools.state is not None
        slots, step = self._slots_of(self.cache.metadata_of(self, v.shape[0], v.shape[1]))
        q, k, tokens, g, beta = (x.flatten(0, 1) for x in (q, k, v, g.to(_exact(v)), beta))
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        self._ops.linear_attention(
            q,
            k,
            tokens,
            g,
            self.pools.state,
            slots,
            step.seq_lens,
            step.query_start_loc,
            out,
            beta,
            max_query_len=step.max_query_len,
            scale=scale,
            delta_rule=delta_rule,
            normalize=delta_rule,
        )
        return out.view(v.shape)

    def complete(self) -> None:
        """Say that this forward's states are written, last of what a mixer calls; the last layer's word
        completes the forward."""
        self.cache.written(self)

    @property
    def _ops(self) -> BackendOps:
        """The session's; before there is one, as while a model is looked at, the reference."""
        return self.cache.backend.ops if self.cache.ready else BACKEND_OPS["reference"]

    def _slots_of(self, step: AttentionMetadata) -> tuple[Tensor, AttentionMetadata]:
        """Slots of a step's requests, and the step."""
        slots = self.cache.state_slots
        assert slots is not None
        if step.features:
            raise UnsupportedModelError(
                f"{self.cache.name}: layer {self.index} keeps a state, which goes from token to token, and "
                f"the batch has a {step.features[0]}; run its branches as requests of their own"
            )
        return slots[: step.num_reqs], step

    # ----------------------------------------------------------------------------- between a cache's forwards
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` goes on from the states of row ``beam_idx[i]``, in place."""
        if not self.is_initialized:
            return
        for pool in self.stored.block_tensors(self.pools).values():
            chosen = pool.index_select(0, beam_idx.to(pool.device) + 1)
            pool[1 : 1 + chosen.shape[0]].copy_(chosen)

    def require_croppable(self) -> None:
        """Refuse to take tokens back: a state is that of its last token alone.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"{self.cache.name}: layer {self.index} keeps a state per row, that of its last token alone, so "
            "that no token can be taken back (crop, assisted decoding); generate without an assistant and "
            "without prompt_lookup_num_tokens, or call cache.reset() and run the tokens that stay"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do for no token, else refused, see `require_croppable`."""
        if tokens_to_remove:
            self.require_croppable()

    def activate_past_recording(self) -> None:
        """Refuse assisted decoding, see `require_croppable`, before it begins."""
        self.require_croppable()

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


def _exact(v: Tensor) -> torch.dtype:
    """Of states and decays, over values of ``v``'s dtype."""
    return torch.float64 if v.dtype == torch.float64 else torch.float32


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool; an inference tensor could not be written under no_grad later."""
    with torch.inference_mode(False):
        pool = torch.zeros(sizes, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(pool, guard=False)  # guard=False: a new cache must not recompile
    return pool
