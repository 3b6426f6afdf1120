"""A backend around torch's FlexAttention, for tests on a CPU: its op is no op but a function, whose
higher-order op stands in the trace.

The plan is a BlockMask of the batch over the whole pool, and three tables that turn a slot of the pool into a
position of a request. `_plan` writes them into tensors that never move, and the function builds the mask from
these in the trace: what differs from batch to batch are their values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from torchpaged.backends import (
    AttentionSpec,
    Backend,
    Capabilities,
    GraphSupport,
    HostLengths,
    Planning,
    Session,
    assert_planned,
)
from torchpaged.backends.features import COMMON_FEATURES
from torchpaged.backends.session import PlannedBatch

TILE_Q = 128


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    chunk_size: int = 0,
    planned_lens: Tensor,
    planned_table: Tensor,
    logical_block: Tensor,
    request_of_token: Tensor,
    position_of_token: Tensor,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
) -> None:
    """``paged_attention`` of the contract. Pools must be finite where nothing was written: the unfused
    products multiply masked values by 0."""
    assert_planned((planned_lens, planned_table), (seq_lens, block_table))
    num_tokens, (num_blocks, block_size) = q.shape[0], k_cache.shape[:2]

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, slot: Tensor) -> Tensor:
        request, query = request_of_token[q_index], position_of_token[q_index]
        block = logical_block[request, slot // block_size]
        key = block * block_size + slot % block_size
        seen = (block >= 0) & (query >= 0) & (key < planned_lens[request])
        if causal:
            seen = seen & (key <= query)
        if window_left >= 0:
            seen = seen & (key >= query - window_left)
        if window_right >= 0:
            seen = seen & (key <= query + window_right)
        return seen

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, slot: Tensor) -> Tensor:
        return logits_soft_cap * torch.tanh(score / logits_soft_cap) if logits_soft_cap else score

    tiles = -(-num_tokens // TILE_Q)
    mask = BlockMask.from_kv_blocks(
        kv_num_blocks[..., :tiles],
        kv_indices[:, :, :tiles],
        BLOCK_SIZE=(TILE_Q, block_size),
        mask_mod=mask_mod,
        seq_lengths=(num_tokens, num_blocks * block_size),
        compute_q_blocks=False,
    )
    # Inductor's CPU lowering takes no view of another rank
    query = q.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format)
    keys, values = (cache.flatten(0, 1).transpose(0, 1)[None] for cache in (k_cache, v_cache))
    y: Any = flex_attention(
        query,
        keys,
        values,
        score_mod,
        mask,
        scale,
        enable_gqa=q.shape[1] != k_cache.shape[2],
        return_lse=lse is not None,
    )
    if lse is not None:
        y, lse_of_heads = y
        lse.copy_(lse_of_heads[0].transpose(0, 1))
    out.copy_(y[0].transpose(0, 1))


class FlexSession(Session):
    """Plan buffers of the largest batch."""

    def _open(self, specs: Any) -> None:
        rows, tokens, width, self.num_blocks, self.block_size = self.limits.need(
            "max_num_reqs", "max_num_tokens", "max_blocks_per_req", "num_blocks", "block_size"
        )
        tiles, ints = -(-tokens // TILE_Q), {"dtype": torch.int32, "device": self.device}
        with torch.inference_mode(False):
            self._held = {
                "planned_lens": torch.full((rows,), -1, **ints),
                "planned_table": torch.zeros(rows, width, **ints),
                "logical_block": torch.full((rows, self.num_blocks), -1, **ints),
                "request_of_token": torch.zeros(tokens, **ints),
                "position_of_token": torch.full((tokens,), -1, **ints),
                "kv_num_blocks": torch.zeros(1, 1, tiles, **ints),
                "kv_indices": torch.zeros(1, 1, tiles, self.num_blocks, **ints),
            }
        for tensor in self._held.values():
            torch._dynamo.mark_static_address(tensor, guard=False)
        self.plans_made = 0

    def _make_workspace(self, spec: AttentionSpec) -> dict[str, Tensor]:
        return self._held

    def _plan(self, batch: PlannedBatch, host: HostLengths | None) -> None:
        held, rows = self._held, batch.seq_lens.shape[0]
        with torch.inference_mode():
            held["planned_lens"][:rows].copy_(batch.seq_lens)
            held["planned_table"][:rows, : batch.block_table.shape[1]].copy_(batch.block_table)
            # on a GPU a kernel of its own would do this
            lens, starts = (batch.seq_lens.tolist(), batch.query_start_loc.tolist())
            for name in ("logical_block", "position_of_token"):
                held[name].fill_(-1)
            for row, (length, start, end) in enumerate(zip(lens, starts, starts[1:], strict=False)):
                blocks = batch.block_table[row, : -(-length // self.block_size)].long()
                held["logical_block"][row, blocks] = torch.arange(len(blocks), dtype=torch.int32)
                held["request_of_token"][start:end] = row
                held["position_of_token"][start:end] = torch.arange(length - (end - start), length)
            used = (held["logical_block"] >= 0).any(0).nonzero().flatten()
            held["kv_num_blocks"].fill_(len(used))
            held["kv_indices"].zero_()
            held["kv_indices"][..., : len(used)] = used
        self.plans_made += 1

    def tensors(self) -> dict[str, Tensor]:
        return self._held


FLEX = Backend(
    "flex",
    Capabilities(
        ("cpu",),
        (torch.float32,),
        (torch.float32,),
        GraphSupport.ALWAYS,
        features=COMMON_FEATURES - {"alibi", "sinks", "chunked"},
        planning=Planning.EVERY_STEP,
    ),
    {"paged_attention": attend},
    lambda: None,
    FlexSession,
)
