"""PagedCache: a HuggingFace ``Cache`` whose layers are block pools and whose metadata lives on the device.

    cache = PagedCache(model.config, max_batch_size=4, max_seq_len=512)
    model.generate(**inputs, past_key_values=cache)

A decode step needs nothing from the host: the first layer's ``update()`` advances lengths and slots in place,
inside the compiled graph. Left padding is read once from the 2-D attention mask; any other hole is refused.
For another, unrelated conversation call ``cache.reset()``. The layers share one session of the backend, so
forwards on one cache must not overlap on two streams.

A forward begins with the first layer that writes and is complete with the last one. One that raised in
between leaves rows of which some layers hold more tokens than others: the cache refuses to go on
until ``reset()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import Limits
from torchpaged.cache import BlockPool, RowBlocks
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError, NotCopyableError
from torchpaged.hf.cache_masks import CacheMasks
from torchpaged.hf.chosen_backend import ChoosesBackend
from torchpaged.hf.forward_order import ForwardOrder
from torchpaged.hf.layer import SET_UP, PagedLayer
from torchpaged.hf.pending_padding import PendingPadding
from torchpaged.hf.query_starts import fill_query_starts
from torchpaged.hf.support import require_made_by_user, require_paged_layers, require_supported_config
from torchpaged.hf.template import paged_layers
from torchpaged.metadata import AttentionMetadata, BatchSizes, host_block_table, make_batch_tensors, slots_at

# tokens per row that the decode kernels take at most:
# custom_ops/attention/triton/config.py, MAX_DECODE_QUERY_LEN
_SHORT_QUERY_LEN = 8


class PagedCache(ChoosesBackend, CacheMasks):
    """A paged KV cache for ``generate()`` and direct forwards.

    Args:
        config: the model's config (``model.config``).
        max_batch_size: rows at most; with beams or several return sequences, all of them.
        max_seq_len: tokens per row at most, prompt and new ones, padding included.
        block_size: tokens per block.
        num_blocks: blocks per layer, the null block included; default: enough for ``max_batch_size`` full
            rows. A row takes its ``ceil(max_seq_len / block_size)`` blocks when its batch arrives.
        backend: a name or "auto"; chosen when the first keys arrive (device and dtype are known then).
        dense: gather keys and values and let SDPA attend: slower, for models that change cached values
            before attention.

    Attributes:
        choice: which backend runs and why; set with the first keys. An automatic choice may change while the
            layers make their first calls, which say what a config does not (soft cap, sinks, causality).
        session: what that backend keeps open for the layers.

    The pools have the dtype of the keys; fp8 pools are for `torchpaged.PagedAttention` and the checked
    functions so far.

    Raises:
        ArgumentError: a size below 1.
        UnsupportedModelError: the config's model ignores the attention interface.
    """

    def __new__(cls, *args: Any, **options: Any) -> PagedCache:
        """Refuse to be made by transformers, see `require_made_by_user`."""
        require_made_by_user(options)
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_seq_len: int,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        backend: str = "auto",
        dense: bool = False,
    ) -> None:
        for name, size in (
            ("max_batch_size", max_batch_size),
            ("max_seq_len", max_seq_len),
            ("block_size", block_size),
        ):
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        require_supported_config(config)
        text_config = config.get_text_config(decoder=True)
        super().__init__(layers=paged_layers(text_config, max_seq_len, self))
        self.paged = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        require_paged_layers(text_config, self.paged)
        self._config, self._text_config, self._backend = config, text_config, backend
        self.max_rows, self.max_seq_len, self.block_size, self.dense = (
            max_batch_size,
            max_seq_len,
            block_size,
            dense,
        )
        # An encoder's keys, in a cache for cross attention, are context of the first query and must be
        # complete before attention begins.
        crosses = any(
            getattr(c, name, False)
            for c in (config, text_config)
            for name in ("is_encoder_decoder", "add_cross_attention")
        )
        self.keys_of_queries = not dense and not crosses
        self.name = str(text_config.model_type)
        self.order = ForwardOrder(self.name, self.paged, crosses)
        self.blocks_per_row = -(-max_seq_len // block_size)
        self.num_blocks = max_batch_size * self.blocks_per_row + 1 if num_blocks is None else num_blocks
        self.pool = BlockPool(self.num_blocks)
        self.blocks = RowBlocks(self.pool, block_size, self.blocks_per_row)
        self.limits = Limits(
            max_batch_size, max_batch_size * max_seq_len, self.blocks_per_row, self.num_blocks, block_size
        )
        self._mask_token = torch.zeros(
            (), dtype=torch.int64
        )  # a kv_offset of 0 that carries this cache to the mask function
        self._mask_token._torchpaged_cache = self  # type: ignore[attr-defined]
        self.ready = False
        self._padding, self._bound, self._cut_padding = None, 0, False
        self._is_open, self._num_forwards = False, 0
        self.specs = {}
        self._forget_masks()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of an unused cache.

        Raises:
            NotCopyableError: it has pools: they are places in this process's memory that layers, masks and
                compiled code know.
        """
        if self.ready or any(layer.is_initialized for layer in self.paged):
            raise NotCopyableError(
                "a PagedCache that was used can't be copied or pickled: its pools are places in this "
                "process's memory, known to "
                "compiled code; make a new PagedCache, and run the prompt through it"
            )
        return {**self.__dict__, "_pending": PendingPadding(self.name)}

    # ------------------------------------------------------------------------------------------------ set-up
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`PagedLayer.update` of layer ``layer_idx``.

        Raises:
            ArgumentError: the cache was made for fewer layers, or for others than this one.
        """
        if layer_idx >= len(self.layers):
            raise ArgumentError(
                "past_key_values",
                f"a PagedCache of at least {layer_idx + 1} layers",
                f"one of {len(self.layers)}",
                "make a new PagedCache of the model's config",
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable(reason=SET_UP)
    def prepare(self, key_states: Tensor, head_dim_v: int | None = None) -> None:
        """Choose the backend, give each row its blocks, make the metadata tensors; once per batch,
        never traced."""
        if self.ready:
            return
        batch = key_states.shape[0]
        padding = self._pending.take()  # a refusal below forgets it
        if batch > self.max_rows:
            raise ArgumentError(
                "max_batch_size",
                f"at least the batch ({batch} rows, beams included)",
                str(self.max_rows),
                "build a larger PagedCache",
            )
        implementation = self._text_config._attn_implementation
        if implementation != "torchpaged" and not self.dense:
            raise ArgumentError(
                "attn_implementation",
                "'torchpaged' for a model with a PagedCache",
                repr(implementation),
                "call model.set_attn_implementation('torchpaged')",
            )
        specs = [layer.attention_spec(self._text_config, key_states, head_dim_v) for layer in self.paged]
        known = [
            s for s in self.specs if (s.device, s.dtype) == (key_states.device, key_states.dtype)
        ]  # asked before a reset
        self.choose_backend([*specs, *known])
        for layer, spec in zip(self.paged, specs, strict=True):
            if layer.asked is None:
                self.give_workspace(layer, spec)
        self.blocks.allocate(batch)
        if not hasattr(self, "total") or self.total.device != key_states.device:
            self._make_metadata(key_states.device)
        with torch.inference_mode(False):
            self.seq_lens.zero_()
            self.total.zero_()
            self.session.reset()  # a forward that was cut short may have left it in any state
            self.written_total.zero_()
            self._upload_rows()
            if padding is not None:
                self.seq_lens[:batch] -= torch.tensor(padding, dtype=torch.int32).to(key_states.device)
        self._padding = padding
        self.ready = True

    def _make_metadata(self, device: torch.device) -> None:
        with torch.inference_mode(
            False
        ):  # an inference tensor could not be advanced under plain no_grad later
            names = (
                "block_table",
                "seq_lens",
                "slot_mapping",
            )  # lengths without padding, slots of a decode step
            tensors = make_batch_tensors(
                names, BatchSizes(self.max_rows, self.max_rows, self.blocks_per_row), device
            )
            self.block_table, self.seq_lens, self.decode_slots = tensors.values()
            self.row_starts = torch.arange(self.max_rows + 1, dtype=torch.int32, device=device)
            self.query_starts = torch.zeros(
                self.max_rows + 1, dtype=torch.int32, device=device
            )  # of a forward of more tokens than below
            # Query starts of short forwards, by tokens per row, made once: attention reads them before the
            # kernels ahead have ended, so that none may write them right in front of it, in compiled code
            # either. Rows of whole 16 bytes.
            width = -(-(self.max_rows + 1) // 4) * 4
            counts, rows = (
                torch.arange(n, dtype=torch.int32, device=device) for n in (_SHORT_QUERY_LEN + 1, width)
            )
            self.short_starts = counts[:, None] * rows[None]
            self.total = torch.zeros((), dtype=torch.int64, device=device)  # with padding
            self.written_total = torch.zeros(
                (), dtype=torch.int64, device=device
            )  # of the last forward that was complete
            self.limit = torch.full((), self.max_seq_len, dtype=torch.int64, device=device)
        static = (
            self.block_table,
            self.seq_lens,
            self.decode_slots,
            self.row_starts,
            self.query_starts,
            self.short_starts,
            self.total,
            self.written_total,
            self.limit,
        )
        for tensor in static:
            torch._dynamo.mark_static_address(tensor, guard=False)

    def _upload_rows(self) -> None:
        self.block_table[: len(self.blocks)].copy_(
            host_block_table(self.blocks.rows, len(self.blocks), self.blocks_per_row)
        )

    # ------------------------------------------------------------------------------------------- one forward
    def advance(self, layer: PagedLayer, batch: int, query_len: int) -> Tensor:
        """The slots of this forward's tokens; the first layer moves the lengths on (in place, in
        the graph)."""
        if self.dense:
            self.require_mask_of_own()
        self.order.enter(layer, query_len)
        if not torch.compiler.is_compiling() and not layer.has_written:
            self.first_use(layer)
        if layer.is_first:
            self._advance_lengths(batch, query_len)
            if self.session.plans:
                self._plan(batch, query_len)
        self.order.leave(layer, query_len)
        if query_len == 1:
            return self.decode_slots[:batch]
        return self._slots_of(batch, query_len)

    def _slots_of(self, batch: int, query_len: int) -> Tensor:
        positions = (
            self.seq_lens[:batch, None].long()
            - query_len
            + torch.arange(query_len, device=self.seq_lens.device)[None]
        )
        return slots_at(positions, self.block_table[:batch], self.block_size).reshape(-1)

    def _advance_lengths(self, batch: int, query_len: int) -> None:
        if not torch.compiler.is_compiling():
            if batch != len(self.blocks):
                raise ArgumentError(
                    "input_ids",
                    f"{len(self.blocks)} rows, as in this cache's first batch",
                    f"{batch} rows",
                    "call cache.reset() before another batch",
                )
            self._require_room(query_len)
            self._require_complete()
            self._is_open = True
            self._num_forwards += 1
        # Compiled by hand, a step has no host hook at all; there this assertion fires instead (on a GPU:
        # device-side). torch has no public asynchronous assertion; tests/hf/test_refusals.py notices if this
        # one goes.
        fits = (self.total + query_len <= self.limit) & (self.total == self.written_total)
        torch._assert_async(
            fits,
            (
                "PagedCache: more tokens than max_seq_len, or a forward before did not complete; call "
                "cache.reset()"
            ),
        )
        self.total.add_(query_len)
        self.seq_lens[:batch].add_(query_len)
        if query_len == 1:
            self.decode_slots[:batch].copy_(self._slots_of(batch, 1))
        elif query_len > _SHORT_QUERY_LEN:
            fill_query_starts(self.query_starts, self.row_starts, query_len)

    def _plan(self, batch: int, query_len: int) -> None:
        """For a backend that plans: compiled code has no place for it."""
        if torch.compiler.is_compiling():
            raise BackendUnavailableError(
                f"backend {self.choice.name!r} plans every step outside compiled code, and a compiled "
                "forward moves the lengths on inside; "
                "run the model eagerly, through torchpaged.engine.Generator, or on another backend"
            )
        self.session.plan(self.metadata_of(batch, query_len))

    def written(self, layer: PagedLayer) -> None:
        """The last layer's word completes the forward: on the device, which compiled steps look at, and on
        the host."""
        if layer.is_last:
            self.written_total.copy_(self.total)
            if not torch.compiler.is_compiling():
                self._is_open = False

    def first_use(self, layer: PagedLayer) -> None:
        """A layer gets pools, or writes for the first time. After the first forward it is one that an
        incomplete first forward did not reach."""
        if self._num_forwards > 1:
            raise self._incomplete()
        self.order.use(layer)

    def _require_complete(self) -> None:
        """Refuse a cache whose last forward raised between two layers. On a GPU a compiled one is found by
        `_advance_lengths`' assertion."""
        lost = self.ready and self.total.device.type == "cpu" and int(self.total) != int(self.written_total)
        if self._is_open or lost:
            raise self._incomplete()

    @staticmethod
    def _incomplete() -> ArgumentError:
        return ArgumentError(
            "past_key_values",
            "a PagedCache whose forwards all completed",
            "one whose last forward raised, or still runs, between two layers",
            "its layers hold different tokens: call cache.reset() and start from the prompt",
        )

    def metadata_of(self, batch: int, query_len: int) -> AttentionMetadata:
        """This forward as a batch of ``batch`` requests of ``query_len`` queries each, for
        attention alone."""
        if query_len == 1:
            starts = self.row_starts
        elif query_len <= _SHORT_QUERY_LEN:
            starts = self.short_starts[query_len]
        else:
            starts = self.query_starts
            if (
                not self.keys_of_queries
            ):  # cross attention: what `advance` was told of are the encoder's tokens
                fill_query_starts(starts, self.row_starts, query_len)
        return AttentionMetadata(
            self.block_table[:batch], self.seq_lens[:batch], starts[: batch + 1], None, None, query_len
        )

    def gather(self, pool: Tensor, batch: int) -> Tensor:
        """Dense mode: every row's tokens by position (padding included), ``[batch, num_kv_heads,
        max_seq_len, head_dim]``."""
        rows = pool[self.block_table[:batch].long()].flatten(1, 2)[:, : self.max_seq_len]
        padding = (self.total - self.seq_lens[:batch]).long()
        index = torch.arange(self.max_seq_len, device=pool.device)[None] - padding[:, None]
        index = index.clamp_min(0)[:, :, None, None].expand_as(rows)
        return rows.gather(1, index).transpose(1, 2)

    # ------------------------------------------------------------------------------------- the mask machinery
    def mask_sizes(self, layer: PagedLayer, query_length: int) -> tuple[int, Any]:
        """Runs right before the mask function; outside compiled code it is also where overlong rows
        are refused."""
        self.order.announce(query_length)
        if not torch.compiler.is_compiling() and layer is self.paged[0]:
            self._require_room(query_length)
        return self.max_seq_len, self._mask_token

    def _require_room(self, query_length: int) -> None:
        """Refuse tokens past ``max_seq_len``.

        Every call counts its tokens, so that compiled steps, which do not count on the host, stay covered by
        the hook before them. A step may be counted twice: then the bound passes the limit early, and one read
        of ``total`` settles it.
        """
        exact = self.ready and self.total.device.type == "cpu"
        if exact or self._bound + query_length > self.max_seq_len:
            self._bound = int(self.total) if self.ready else 0
        self._bound += query_length
        if self._bound > self.max_seq_len:
            need, self._bound = self._bound, self._bound - query_length
            raise ArgumentError(
                "max_seq_len",
                f"room for {need} tokens per row (padding included)",
                str(self.max_seq_len),
                "build a PagedCache with a larger max_seq_len, or generate fewer tokens",
            )

    def length(self, layer: PagedLayer) -> Tensor | int:
        """Tokens per row that ``layer`` has written, padding included: 0, or a 0-d tensor once there is one;
        never ``total`` itself, which moves on."""
        if not self.ready:
            return 0
        return self.total - self.order.query_len if self.order.is_behind(layer) else self.total.clone()

    def describe(self) -> str:
        """The memory arithmetic in one line; pools count once they exist."""
        num_bytes = sum(layer.num_bytes for layer in self.paged)
        tokens = self.pool.num_usable * self.block_size
        per_token = num_bytes // (self.num_blocks * self.block_size)
        return (
            f"{self.num_blocks} blocks of {self.block_size} tokens = {tokens} tokens in {len(self.paged)} "
            "paged layers, "
            f"{num_bytes / 2**30:.3f} GiB ({per_token} bytes per token)"
        )
