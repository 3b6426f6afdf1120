"""StatePools: a layer of a paged cache that keeps a state per request, in pools with a slot for each, and its
place in a forward. What its mixer computes over them is `torchpaged.hf.packed_state.PackedState`'s.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchpaged.cache import LayerStates, StateLayerSpec
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.custom_ops.plain_torch import exact_dtype
from torchpaged.custom_ops.words import counted, of_bytes
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.row_table import other_layout
from torchpaged.hf.state_layer import StateLayer, TakesBack
from torchpaged.metadata import AttentionMetadata

_SET_UP = (
    "PagedCache: the pools of states can't be made inside compiled code; run the first forward eagerly, as "
    "generate() does"
)


class StatePools(TakesBack, StateLayer):
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

    def adopt_as(self, probed: "StatePools", pools: LayerStates) -> None:
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
            words = ("{} channels, {} on {}".format(*each) for each in (takes, got))
            raise other_layout("x", self.index, *words)

    @torch.compiler.disable(reason=_SET_UP)
    def _make_matrices(self, sizes: tuple[int, int, int], x: Tensor) -> None:
        """``sizes``: heads, rows and columns of a request's matrices."""
        pool = _zeros((self.cache.num_states, *sizes), exact_dtype(x.dtype), x.device)
        self.pools = self.pools._replace(state=pool)

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
        """Refuse: a mixer that runs as transformers has it would take all tokens for one request's."""
        raise self.unknown()

    update_recurrent_state = update_conv_state


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A pool; an inference tensor could not be written under no_grad later."""
    with torch.inference_mode(False):
        pool = torch.zeros(sizes, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(pool, guard=False)  # guard=False: a new cache must not recompile
    return pool


def slots_of_rows(max_rows: int, device: torch.device) -> Tensor:
    """``[max_rows]`` int32: row ``i`` has slot ``i + 1`` in every layer; slot 0 belongs to none."""
    with torch.inference_mode(False):
        slots = torch.arange(1, max_rows + 1, dtype=torch.int32, device=device)
    torch._dynamo.mark_static_address(slots, guard=False)  # guard=False: a new cache must not recompile
    return slots


def keys_like(config: Any, x: Tensor) -> Tensor:
    """What a text config says of the keys of tokens ``x [batch, query_len, *]``: no values, but their shape
    ``[batch, num_kv_heads, query_len, head_dim]``, dtype and device. Of a model without attention one head
    of 64, for a choice by dtype and device."""
    num_heads, head_dim = 1, 64
    if getattr(config, "num_attention_heads", None):
        num_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return x.new_empty(()).expand(x.shape[0], num_heads, x.shape[1], head_dim)


def describe_states(states: Sequence[StatePools]) -> list[str]:
    """Of a cache's states: of how many layers, and their memory; empty where there are none."""
    size = sum(layer.num_bytes for layer in states)
    text = f"{counted(len(states), 'layer')} with a state per row, "
    return [text + (of_bytes(size) if size else "made with the first tokens")] if states else []
