"""AttentionMetadata: one batch of requests as tensors, in vLLM's words.

    metadata = AttentionMetadata.from_lists(query_lens=[1, 5], seq_lens=[33, 5],
                                            block_tables=[[4, 7, 2], [9]], block_size=16)

``seq_lens`` counts the KV tokens of a request *including* the ones this step adds, so the new tokens of
request ``r`` sit at positions ``seq_lens[r] - query_lens[r] ... seq_lens[r] - 1``. The tensors may be slices
of static buffers (graphs/).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import check_sizes, device_here, given
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted, one_line, repr_of_fields
from torchpaged.metadata.checks import check_batch
from torchpaged.metadata.fields import ALL_METADATA_FIELDS, FIELDS, BatchSizes
from torchpaged.metadata.host import host_block_table, host_numbers, to_device


@dataclass(repr=False)
class AttentionMetadata:
    """What one attention step needs to know about its batch; every layer shares it.

    Attributes:
        block_table: ``[num_reqs, max_blocks_per_req]`` int32; entries past a request's last block may
            be garbage.
        seq_lens: ``[num_reqs]`` int32, KV tokens including this step's; 0 = padding row.
        query_start_loc: ``[num_reqs + 1]`` int32, first token of each request in the packed batch
            (``cu_seqlens_q`` elsewhere); the tail repeats the last value.
        slot_mapping: ``[num_tokens]`` int64, ``block * block_size + offset`` of every token; -1 = write
            nothing. None where attention alone is described: a `torchpaged.hf.PagedCache` gives each write
            its slots.
        positions: ``[num_tokens]`` int64, each token's position in its sequence; None likewise.
        max_query_len: host int, an upper bound of the query lengths; 1 marks a decode batch.
        block_size: host int, the tokens per block that ``slot_mapping`` and ``block_table`` were made for;
            None = unknown. A cache of another block size is refused (`check_block_size`).
        query_lens: the query length of each request as the host knows it; None = the host does not,
            and groups of shared prefixes read the device for them.
        tree_mask: ``[num_tokens]`` int64, bit j of a token's word: it sees query token j of its request, one
            before it, as `torchpaged.tree_mask_from_parents` gives it. None: every query token sees all those
            before it.
        prefixes: a `torchpaged.prefixes.buffers.StepPrefixes`: groups of requests whose first blocks are the
            same ones, read once for a group by layers that can. None: each request is read alone. Copies
            elsewhere have none.
        state_slots: ``[num_reqs]`` int32, which slots of layers with a state the requests have. None: a
            `torchpaged.hf.PagedModel` looks them up by the first blocks. Copies elsewhere have none.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    slot_mapping: Tensor | None
    positions: Tensor | None
    max_query_len: int
    block_size: int | None = None
    query_lens: tuple[int, ...] | None = None
    tree_mask: Tensor | None = None
    prefixes: Any = None
    state_slots: Tensor | None = None

    def __repr__(self) -> str:
        """Sizes and what the host knows; no values of tensors, which would wait for the device."""
        tokens = [] if self.slot_mapping is None else [f"num_tokens={self.slot_mapping.shape[0]}"]
        more = [f"with {name}" for name in ("tree_mask", "prefixes") if getattr(self, name) is not None]
        return one_line(
            self,
            f"num_reqs={self.num_reqs}",
            *tokens,
            f"max_query_len={self.max_query_len}",
            *more,
            f"block_size={self.block_size}",
            f"device={str(self.block_table.device)!r}",
        )

    @property
    def num_reqs(self) -> int:
        """Requests in the batch, padding rows included."""
        return self.block_table.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens in the batch, padding included; raises `ArgumentError` where there
        is no ``slot_mapping``."""
        if self.slot_mapping is None:
            raise ArgumentError(
                "slot_mapping",
                "the slots of the batch's tokens",
                "None: this batch describes attention alone",
            )
        return self.slot_mapping.shape[0]

    @property
    def features(self) -> tuple[str, ...]:
        """What the batch itself asks of a backend: names in `torchpaged.backends.features.FEATURES`."""
        return () if self.tree_mask is None else ("tree_mask",)

    def tensors(self) -> dict[str, Tensor]:
        """Those of its tensors that are there, by their names in `FIELDS`."""
        return given(**{name: getattr(self, name) for name in ALL_METADATA_FIELDS})

    def slots_of(self, written: str, unwritten: str) -> Tensor:
        """``slot_mapping``, where there is one.

        Args:
            written: what is to be written, for the message.
            unwritten: how a caller says that nothing is.

        Raises:
            ArgumentError: this batch describes attention alone.
        """
        if self.slot_mapping is None:
            raise ArgumentError(
                "metadata", f"a slot_mapping, since {written} are written", "None", f"or pass {unwritten}"
            )
        return self.slot_mapping

    def to(self, device: torch.device | str) -> "AttentionMetadata":
        """The same batch on ``device``; copies from pinned memory do not block."""
        moved: Any = {name: x.to(device, non_blocking=True) for name, x in self.tensors().items()}
        return replace(self, **moved, prefixes=None, state_slots=None)

    @classmethod
    def view(
        cls, tensors: Mapping[str, Tensor], sizes: BatchSizes, *, max_query_len: int, block_size: int | None
    ) -> "AttentionMetadata":
        """The batch that the first requests and tokens of static ``tensors`` hold, a ``tree_mask`` among them
        or not; slices, no copies."""
        names = [name for name in ALL_METADATA_FIELDS if name in tensors]
        fields: Any = {name: FIELDS[name].view(tensors[name], sizes) for name in names}
        return cls(**fields, max_query_len=max_query_len, block_size=block_size)

    def check_block_size(self, block_size: int) -> None:
        """Refuse a cache whose blocks hold ``block_size`` tokens if the batch was made for another size. Host
        ints only: it may be traced.

        Raises:
            ArgumentError: they differ.
        """
        if self.block_size is not None and self.block_size != block_size:
            raise ArgumentError(
                "kv_cache",
                f"blocks of {self.block_size} tokens, as this batch's slots and tables were made for",
                f"blocks of {block_size}",
                "build the metadata with the cache's block_size",
            )

    @classmethod
    def from_lists(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        num_blocks: int | None = None,
        max_blocks_per_req: int | None = None,
        max_query_len: int | None = None,
        tree_parents: Sequence[Sequence[int] | None] | None = None,
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """Build the batch on the host, check it, and move it to ``device`` in one go.

        >>> batch = AttentionMetadata.from_lists([1, 3], [18, 3], [[4, 7], [2]], block_size=16)
        >>> batch.slot_mapping.tolist(), batch.positions.tolist()
        ([113, 32, 33, 34], [17, 0, 1, 2])

        Args:
            query_lens: new tokens of each request.
            seq_lens: KV tokens of each request, the new ones included.
            block_tables: the blocks each request owns, in order; at least ``ceil(seq_len / block_size)``
                each.
            block_size: tokens per block.
            num_blocks: blocks in the pool, to check ids against; None skips that check.
            max_blocks_per_req: width of the table; default: the longest row.
            max_query_len: upper bound to state; default: the longest query of this batch.
            tree_parents: of each request, the parents of its new tokens, as
                `torchpaged.tree_mask_from_parents` has them, or None where each continues the one before it.
                Then positions are those of branches: the context's length plus a token's depth. Slots stay in
                the order of the tokens.
            device: where the tensors go.

        Raises:
            ArgumentError: lengths, blocks or ids do not fit together.
        """
        check_batch(query_lens, seq_lens, block_tables, block_size, num_blocks)
        check_sizes(**given(max_query_len=max_query_len, max_blocks_per_req=max_blocks_per_req))
        numbers = host_numbers(query_lens, seq_lens, block_tables, block_size, tree_parents)
        longest = max(1, *query_lens, 1)
        if max_query_len is not None and max_query_len < longest:
            raise ArgumentError(
                "max_query_len", f"at least the longest query ({longest})", str(max_query_len)
            )
        width = _width(block_tables, max_blocks_per_req)
        device = device_here(device)
        pin = device.type == "cuda"  # a copy from other memory waits for everything before it
        fields: Any = {
            name: to_device(values, FIELDS[name].dtype, device) for name, values in numbers.items()
        }
        return cls(
            host_block_table(block_tables, len(seq_lens), width, pin).to(device, non_blocking=True),
            **fields,
            max_query_len=longest if max_query_len is None else max_query_len,
            block_size=block_size,
            query_lens=tuple(int(n) for n in query_lens),
        )


# For `torch.export`: tensors are inputs, numbers are guarded. A saved program holds an example.
torch.export.register_dataclass(AttentionMetadata, serialized_type_name="torchpaged.AttentionMetadata")
torch.serialization.add_safe_globals([AttentionMetadata])


def _width(block_tables: Sequence[Sequence[int]], asked: int | None) -> int:
    """Columns of the table: as many as asked for, or those of the longest row."""
    width = max((len(row) for row in block_tables), default=1) or 1
    if asked is not None and width > asked:
        raise ArgumentError("block_tables", f"at most {counted(asked, 'block')} per request", str(width))
    return width if asked is None else asked


class HostLengths(NamedTuple):
    """Lengths of a batch as the host knows them, for a backend that plans there: without them it would have
    to read the device."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]

    def __repr__(self) -> str:
        return repr_of_fields(self)
