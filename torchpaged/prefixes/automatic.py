"""AutomaticPrefixes: the groups of each batch, where they pay, in buffers that graphs know; RowPrefixes:
those of a cache's rows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from torchpaged.backends import AttentionSpec, Session
from torchpaged.custom_ops.checks import check_sizes
from torchpaged.custom_ops.words import one_line
from torchpaged.metadata import AttentionMetadata
from torchpaged.prefixes.attention import can_read_once
from torchpaged.prefixes.buffers import SharedPrefixes, StepPrefixes
from torchpaged.prefixes.costs import CascadeCosts, LayerShape, check_cascade, costs_of, groups_that_pay


class AutomaticPrefixes:
    """Finds on the host which requests of a batch share blocks, and whether to read these once.

    Args:
        num_heads, num_kv_heads, head_dim: of the layers.
        head_dim_v: default ``head_dim``.
        kv_dtype: of the pools.
        max_num_groups: groups of a batch at most.
        max_blocks_per_req: columns of the block table.
        block_size: tokens per block.
        device: where the batches are.
        costs: when it pays; default: `costs_of` the device.

    Attributes:
        costs, max_blocks_per_req: as given.

    Raises:
        ArgumentError: a size below 1.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        kv_dtype: torch.dtype,
        max_num_groups: int = 8,
        max_blocks_per_req: int,
        block_size: int,
        device: torch.device | str = "cpu",
        costs: CascadeCosts | None = None,
    ) -> None:
        width = head_dim if head_dim_v is None else head_dim_v
        self._layer = LayerShape(num_heads, num_kv_heads, head_dim, width, kv_dtype.itemsize)
        sizes = {"max_num_groups": max_num_groups, "max_blocks_per_req": max_blocks_per_req}
        check_sizes(**self._layer._asdict(), **sizes, block_size=block_size)
        self.costs = costs_of(device) if costs is None else costs
        self.max_blocks_per_req = max_blocks_per_req
        self._sizes, self.block_size, self._device = sizes, block_size, torch.device(device)
        self._buffers: dict[tuple[int, int], SharedPrefixes] = {}

    @classmethod
    def of_layer(
        cls, spec: AttentionSpec, cascade: bool | CascadeCosts, *, max_blocks_per_req: int, block_size: int
    ) -> "AutomaticPrefixes":
        """For layers of ``spec``, on its device.

        Args:
            spec: the attention.
            cascade: True: where it pays by the device's own costs; or those costs.
            max_blocks_per_req, block_size: as above.
        """
        return cls(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            kv_dtype=spec.kv_dtype or spec.dtype,
            max_blocks_per_req=max_blocks_per_req,
            block_size=block_size,
            device=spec.device,
            costs=cascade if isinstance(cascade, CascadeCosts) else None,
        )

    def __repr__(self) -> str:
        sizes = {**self._sizes, "block_size": self.block_size, "device": str(self._device)}
        return one_line(self, *(f"{name}={size!r}" for name, size in sizes.items()))

    def buffers(self, num_reqs: int, num_tokens: int) -> SharedPrefixes:
        """The groups of batches of exactly these sizes, padding included; the same tensors each time."""
        if (num_reqs, num_tokens) not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[num_reqs, num_tokens] = SharedPrefixes.allocate(
                    **self._sizes,
                    num_reqs=num_reqs,
                    num_tokens=num_tokens,
                    block_size=self.block_size,
                    device=self._device,
                )
        return self._buffers[num_reqs, num_tokens]

    def update(
        self,
        num_reqs: int,
        num_tokens: int,
        block_tables: Sequence[Sequence[int]],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
    ) -> SharedPrefixes | None:
        """The groups of a batch, in the buffers of its size; None where none pays, and nothing is written.

        Args:
            num_reqs, num_tokens: sizes of the batch, padding included.
            block_tables, query_lens, seq_lens: of its requests, without padding.

        Raises:
            ArgumentError: lists that don't fit together, or are longer than the batch.
        """
        groups = groups_that_pay(
            block_tables,
            query_lens,
            seq_lens,
            self._layer,
            block_size=self.block_size,
            costs=self.costs,
            max_num_groups=self._sizes["max_num_groups"],
        )
        if not groups:
            return None
        shared = self.buffers(num_reqs, num_tokens)
        shared.set(groups, block_tables, query_lens, seq_lens)
        return shared

    def prepare(
        self,
        metadata: AttentionMetadata,
        block_tables: Sequence[Sequence[int]],
        seq_lens: Sequence[int] | None = None,
    ) -> AttentionMetadata:
        """The batch with its groups, if they pay; else as it is.

        Args:
            metadata: with ``query_lens``, or lengths that the host may read.
            block_tables: of its requests.
            seq_lens: of its requests, as the host knows them; None: read from ``metadata``, which on a GPU
                waits for it.

        Raises:
            ArgumentError: as `update`.
        """
        lens = metadata.query_lens or metadata.query_start_loc.diff().tolist()
        sizes = metadata.num_reqs, metadata.num_tokens
        seq_lens = metadata.seq_lens.tolist() if seq_lens is None else seq_lens
        shared = self.update(*sizes, block_tables, lens, seq_lens)
        return metadata if shared is None else shared.prepare(metadata)


def find_prefixes(
    session: Session,
    cascade: bool | CascadeCosts,
    share_prefixes: bool,
    *,
    max_blocks_per_req: int,
    block_size: int,
) -> tuple[AutomaticPrefixes | None, str]:
    """What finds the groups of decode steps, and why; None: requests are read one by one.

    Args:
        session: its specs say what the layers ask for. What pays is counted for the first layer that can read
            prefixes once; layers that can't read each request alone within the same steps.
        cascade: True: where it pays by the device's own `CascadeCosts`; False: never; or those costs.
        share_prefixes: whether any requests share blocks.
        max_blocks_per_req: columns of the block tables.
        block_size: tokens per block.
    """
    if cascade is False:
        return None, "switched off by cascade=False"
    if not share_prefixes:
        return None, (
            "no requests share their first blocks: share_prefixes=False, batch_invariant=True, rolling "
            "layers, or layers with a state"
        )
    if session.plans:
        return None, f"backend {session.name!r} plans its batches, which two passes have no plan for"
    able = [spec for spec in session.specs if can_read_once(spec, session)]
    if not able:
        return None, f"no layer's attention on backend {session.name!r} can be read in two passes"
    sizes = {"max_blocks_per_req": max_blocks_per_req, "block_size": block_size}
    prefixes = AutomaticPrefixes.of_layer(able[0], cascade, **sizes)
    return prefixes, f"where it pays: {prefixes.costs.evidence}"


class Rows(Protocol):
    """Rows of blocks whose tables and lengths move on in place.

    Attributes:
        blocks: has ``rows``, the blocks of each row, on the host.
        block_table: ``[max_rows, blocks_per_row]`` int32.
        seq_lens: ``[max_rows]`` int32.
    """

    blocks: Any
    block_table: Tensor
    seq_lens: Tensor
    block_size: int
    blocks_per_row: int


class RowPrefixes:
    """Which rows of a cache share blocks, so that its decode steps read these once.

        prefixes = RowPrefixes(rows, layers, cascade=True)
        prefixes.find(lengths)  # on the host, whenever rows came to share blocks
        prefixes.advance(1)  # in each forward, once its lengths have moved on; may be traced
        metadata = prefixes.prepare(metadata)  # for each layer of it

    Which rows share what is found by the blocks' identity; it stays true while rows grow. A compiled forward
    is traced once with groups and once without, for all of them.

    Args:
        rows: the rows.
        layers: the cache's paged layers, whose ``spec`` says what each asks of attention, None until that is
            known, and ``reads_once`` whether it `can_read_once`: those that can do.
        cascade: True: where it pays by the device's own `CascadeCosts`; False: never; or those costs.

    Attributes:
        active: whether decode steps have groups.

    Raises:
        ArgumentError: another ``cascade``.
    """

    def __init__(self, rows: Rows, layers: Sequence[Any], cascade: bool | CascadeCosts) -> None:
        check_cascade(cascade)
        self._rows, self._layers, self._cascade = rows, layers, cascade
        self._made_for: AttentionSpec | None = None
        self._prefixes: AutomaticPrefixes | None = None
        self._step: StepPrefixes | None = None  # in tensors that stay where they are
        self.active = False

    def forget(self) -> None:
        """Rows are read one by one, until `find`."""
        self.active = False

    def find(self, lengths: Sequence[int]) -> None:
        """Find the groups of the rows as they are now.

        Args:
            lengths: tokens of each row without padding, of which forwards add more.
        """
        self.active = False
        prefixes = self._finder() if len(lengths) > 1 else None
        if prefixes is None:
            return
        rows, count = self._rows, len(lengths)
        with_next = [length + 1 for length in lengths]
        shared = prefixes.update(count, count, rows.blocks.rows, [1] * count, with_next)
        if shared is None:
            return
        if self._step is None or shared is not self._step.shared:
            with torch.inference_mode(False):
                self._step = StepPrefixes(
                    shared,
                    torch.zeros_like(rows.block_table[:count]),
                    torch.zeros_like(rows.seq_lens[:count]),
                )
            for tensor in (*shared.tensors().values(), *self._step[1:]):
                torch._dynamo.mark_static_address(tensor, guard=False)
        self.active = True

    def _finder(self) -> AutomaticPrefixes | None:
        """Made for the first layer that can read prefixes once; None if none can."""
        specs = [layer.spec for layer in self._layers if layer.reads_once and layer.spec is not None]
        if self._cascade is False or not specs:
            return None
        if specs[0] != self._made_for:
            self._made_for, rows = specs[0], self._rows
            self._prefixes = AutomaticPrefixes.of_layer(
                specs[0], self._cascade, max_blocks_per_req=rows.blocks_per_row, block_size=rows.block_size
            )
        return self._prefixes

    def advance(self, query_len: int) -> None:
        """While `active`, the lengths moved on by ``query_len`` tokens per row: what of each row no group
        has, for all layers of the forward; in the graph."""
        if query_len == 1:
            assert self._step is not None
            shared, *kept = self._step
            count = kept[1].shape[0]
            now = shared.suffix(self._rows.block_table[:count], self._rows.seq_lens[:count])
            for tensor, new in zip(kept, now, strict=True):
                tensor.copy_(new)

    def prepare(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """While `active`, the forward's batch with its groups; as it is, if it is no decode step."""
        return replace(metadata, prefixes=self._step) if metadata.max_query_len == 1 else metadata
