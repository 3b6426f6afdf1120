"""PagedLayer: one attention layer of a paged HuggingFace cache.

``update()`` writes the new keys and values and returns *the pools themselves*; they carry the layer they
belong to, so that the attention function knows a paged call by its key and value alone: no global state, no
layer index, no wrapper around generate().
"""

from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.attention.call import AttentionCall
from torchpaged.custom_ops.checks import refuse_grad
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.cache_rows import CacheRows
from torchpaged.hf.call import LayerCall, brings_mask, in_autocast, kind_of, looks_alike
from torchpaged.hf.layer_pools import LayerPools
from torchpaged.hf.owner import PagedOwner
from torchpaged.hf.row_refusals import require_new, require_no_weights
from torchpaged.hf.row_table import incomplete
from torchpaged.hf.watched_pool import WatchedPool, watch
from torchpaged.metadata import AttentionMetadata
from torchpaged.prefixes.attention import attend_with_prefixes
from torchpaged.profiling.ranges import is_on as is_profiling
from torchpaged.profiling.ranges import ranged_attention


def layer_of(tensor: Any) -> "PagedLayer | None":
    """The layer whose pool ``tensor`` is, or None. The pool itself says it: transformers tells an attention
    function neither cache nor layer; ``tests/hf/test_call_mask.py`` notices if it does."""
    return getattr(tensor, "_torchpaged_layer", None)


def gathered_from(tensor: Any) -> CacheRows | None:
    """The rows whose keys or values a dense cache gathered into ``tensor``, which says it; None: another
    one's, or a trace's."""
    return getattr(tensor, "_torchpaged_rows", None)


class PagedLayer(LayerPools):
    """`LayerPools`, and a forward's writes and attention over them; arguments are the pools' ones."""

    is_compileable = True
    is_croppable = True
    is_sliding = False  # no mask is ever built from it: every layer reports the full length

    def __init__(
        self, owner: PagedOwner, index: int, window: int | None = None, chunk: int | None = None
    ) -> None:
        super().__init__(owner, index, window, chunk)
        # Of the layers that write, in a forward: the owner's `ForwardOrder` says which.
        self.is_first = self.is_last = False
        self.has_written = False  # outside of compiled code
        # What the backend's session keeps for calls that `hold` has seen: arguments of `paged_attention`.
        self.workspace: dict[str, Tensor] = {}
        self.reads_once = False  # whether these may read shared prefixes once
        self.step: int | None = None  # tokens of a row that a ring takes at once; None: any number
        # Keys and values of a forward of more tokens than a ring takes at once, until attention takes them.
        self._waiting: tuple[Tensor, Tensor] | None = None
        self._watched = False  # whether attention was seen to take the pools as they are
        self._computes = owner.family.computes_with_keys

    # ------------------------------------------------------------------------------------------- attention
    def attend(self, call: LayerCall) -> Tensor:
        """Attention of a forward whose tokens are written, ``[batch, query_len, num_heads, head_dim_v]``.

        Raises:
            BackendUnavailableError: the cache's backend declares not to run it.
            UnsupportedModelError: this kind of layer does not.
        """
        batch, _, query_len, _ = call.query.shape
        metadata = self.owner.metadata_of(self, batch, query_len)
        made = call.over(metadata, self.own)
        self.hold(made)
        if metadata.prefixes is not None and self.reads_once and looks_alike(made):
            made = made._replace(semaphore=self.workspace.get("semaphore"))
            attend_with_prefixes(self.owner.backend.ops, made, metadata.prefixes)
        else:
            self.run(made)
        return made.out.view(batch, query_len, *made.out.shape[1:])

    def hold(self, made: AttentionCall) -> None:
        """Hold a call to what the backend declares; host facts only, and once per kind of call.

        Raises:
            BackendUnavailableError: with all reasons.
        """
        traced = torch.compiler.is_compiling()
        if brings_mask(made) or (traced and self.asked is None):
            self.owner.backend.refuse(self, made)
        if not traced and (kind := kind_of(made)) != self.asked:
            self.owner.backend.hold(self, made)
            self.asked = kind

    def run(self, call: AttentionCall, workspace: dict[str, Tensor] | None = None) -> None:
        """The backend's ``paged_attention``, in a range of its own while a profile is taken; with the layer's
        ``workspace``, unless another one is given."""
        attend = self.owner.backend.ops.paged_attention
        if not torch.compiler.is_compiling() and is_profiling():
            attend = ranged_attention(attend, self.index)
        arguments, options = call.flat()
        attend(*arguments, **options, **(self.workspace if workspace is None else workspace))

    @property
    def own(self) -> dict[str, Any]:
        """The options of a call that are the layer's and not the module's."""
        return {"chunk_size": self.chunk or 0, **self.scales}

    # ----------------------------------------------------------------------------------------------- writes
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[batch, num_kv_heads, query_len, head_dim]`` and return the pools (or dense copies, in
        dense mode)."""
        options = kwargs.get("kwargs") or {}  # from transformers 5.24 on the attention's own
        require_no_weights(options)
        pools = self.write(key_states, value_states)
        if self.owner.dense and not torch.compiler.is_compiling():
            # Any attention may come behind it.
            require_new(self.owner.rows, key_states.shape[2], written=True, options=options)
        self.complete()
        return pools

    def complete(self) -> None:
        """Say that this forward's tokens are written; the last layer's word completes the forward.

        Behind `write` in `update`. A compiled layer leaves it to the caller: being the last one would make it
        a kind of its own.
        """
        self.owner.written(self)

    def write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """`update` without `complete`."""
        refuse_grad(key_states=key_states, value_states=value_states)
        key_states, value_states = in_autocast(key_states, value_states)
        owner, traced = self.owner, torch.compiler.is_compiling()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not owner.ready:
            owner.prepare(self, key_states, value_states.shape[3])
        batch, _, query_len, _ = key_states.shape
        assert self.keys is not None and self.values is not None
        if not traced:  # a trace has the op's own check
            self._require_own("key_states", key_states, self._takes[0])
            self._require_own("value_states", value_states, self._takes[1])
            if self.lacks_scales:
                self._find_scales(key_states, value_states)
        if self._waiting is not None:
            raise incomplete()
        step = owner.advance(self, batch, query_len)
        if self.takes_at_once(query_len):
            assert step.slot_mapping is not None
            self.store(key_states, value_states, step.slot_mapping, self.writes_query_tokens(step))
        else:
            self._waiting = key_states, value_states
        if owner.dense:
            assert owner.rows is not None
            gathered = owner.rows.gather(self.keys, batch), owner.rows.gather(self.values, batch)
            if not traced:
                for tensor in gathered:
                    tensor._torchpaged_rows = owner.rows
            return gathered
        # Other models of such a type may not be attached.
        if not traced and (not self._watched or self._computes):
            return watch(self.keys, self), watch(self.values, self)
        if not self._watched:
            self._require_attended()
        return self.keys, self.values

    def writes_query_tokens(self, step: AttentionMetadata) -> bool:
        """``are_query_tokens`` of this layer's write in a forward. The first layer moves the step on right in
        front of its write, by ordinary kernels that the attention must not overtake: its write holds the
        attention back. So does the write of a layer that reads prefixes once, whose attention is several
        launches. With the mark slots are read early: a cache of rows makes those of several tokens per row
        right in front of a write, in its first forward of every one."""
        once = self.reads_once and step.prefixes is not None
        made_before = step.max_query_len == 1 or self.owner.rows is None
        return self.owner.keys_of_queries and not self.is_first and not once and made_before

    def takes_at_once(self, query_len: int) -> bool:
        """Whether it can write ``query_len`` tokens per row before the first of them attends."""
        return self.step is None or query_len <= self.step

    def take_waiting(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values that `write` left to attention, once."""
        waiting, self._waiting = self._waiting, None
        return waiting

    def _require_attended(self) -> None:
        """In a trace nothing is watched: a model that is known to compute with its keys must have
        attended."""
        if self._computes:
            raise UnsupportedModelError(
                f"{self.owner.name}: the first forward of its cache was compiled, where torchpaged can't see "
                "that attention takes the pools as they are; run it eagerly, as generate() does"
            )

    def watch_again(self) -> None:
        """The model computed with the pools: another try is refused, too."""
        self._watched = False

    def pools_of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The pools behind what `update` returned.

        Raises:
            UnsupportedModelError: keys were passed for values, or the other way round.
        """
        if torch.compiler.is_compiling() or not isinstance(key, WatchedPool):
            return key, value
        if not isinstance(value, WatchedPool):
            return key, value
        if key.pool is not self.keys or value.pool is not self.values:
            raise UnsupportedModelError(
                f"{self.owner.name}: layer {self.index} attends with other than its cached keys and values "
                "in their places; use PagedCache(..., dense=True)"
            )
        self._watched = True
        return key.pool, value.pool

    # ------------------------------------------------------------- what transformers asks; the cache answers
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Called right before the mask function: the offset returned carries the cache to it."""
        return self.owner.mask_sizes(self, query_length)

    def get_seq_length(self) -> int:
        """Tokens that this layer has seen; a 0-d tensor once initialised, so that no guard ever sees a
        changing int."""
        return self.owner.length(self)  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """Tokens a row can hold."""
        return self.owner.max_seq_len

    def _of_all_layers(self, *_: Any) -> None:
        """Nothing to do for one layer: `PagedCache` does it for all at once, as lengths and rows are its."""

    reset = crop = reorder_cache = _of_all_layers
