"""Pages as FlashInfer's plans take them, and its two-level cascade: one prefix of all requests."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpaged.backends.package import FLASHINFER
from torchpaged.custom_ops.errors import ArgumentError

#: Of partial results, one for all wrappers of a session: their calls follow one another.
WORKSPACE_BYTES = 256 << 20


class Pages(NamedTuple):
    """The page table's host part: ``indptr [B + 1]``, ``last [B]``, int32, and the number of pages."""

    indptr: Tensor
    last: Tensor
    total: int


def host_pages(lens: list[int], block_size: int, device: torch.device) -> Pages:
    """Of requests with ``lens`` keys each; for copies to ``device``."""
    count = [-(-max(length, 0) // block_size) for length in lens]
    indptr = cumulated(count, device)
    last = [(length - 1) % block_size + 1 if length > 0 else 0 for length in lens]
    return Pages(
        indptr,
        torch.tensor(last, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu"),
        sum(count),
    )


def cumulated(numbers: list[int], device: torch.device) -> Tensor:
    """``[len(numbers) + 1]`` int32 on the host, from 0; pinned by torch's allocator, which waits for
    copies."""
    sums = [0]
    for number in numbers:
        sums.append(sums[-1] + number)
    return torch.tensor(sums, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")


def shared_prefix_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_blocks: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of one query token per request, all of whose sequences begin with the same blocks, by
    FlashInfer's two-level cascade (arXiv:2501.01005): the prefix once for all, each rest alone. Eager; reads
    lengths on the host.

    Args:
        q: ``[B, num_heads, head_dim]``, bf16 or fp16.
        k_cache, v_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        prefix_blocks: ``[n]`` int32, the full blocks of the prefix, in order.
        block_table: ``[B, width]`` int32, the blocks behind the prefix.
        seq_lens: ``[B]`` int32, keys behind the prefix; at least 1.
        scale: softmax scale; None = ``head_dim ** -0.5``.

    Returns:
        ``[B, num_heads, head_dim]`` in q's dtype.

    Raises:
        ArgumentError: an empty prefix, or a request without keys of its own.
        BackendUnavailableError: FlashInfer is not usable here.
    """
    library, lens, block_size = FLASHINFER.load(), seq_lens.tolist(), k_cache.shape[1]
    if not len(prefix_blocks):
        raise ArgumentError("prefix_blocks", "at least one block", "none")
    if min(lens, default=0) < 1:
        raise ArgumentError("seq_lens", "at least one key behind the prefix for every request", str(lens))
    device, rows = q.device, len(lens)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    pages = host_pages(lens, block_size, torch.device("cpu"))
    own = torch.cat([block_table[row, : -(-length // block_size)] for row, length in enumerate(lens)])
    prefix = [
        torch.tensor(numbers, dtype=torch.int32, device="cpu")
        for numbers in ([0, rows], [0, len(prefix_blocks)], [block_size])
    ]
    wrapper.plan(
        [prefix[0].to(device), torch.arange(rows + 1, dtype=torch.int32, device=device)],
        [prefix[1].to(device), pages.indptr.to(device)],
        [prefix_blocks, own],
        [prefix[2].to(device), pages.last.to(device)],
        q.shape[1],
        k_cache.shape[2],
        q.shape[2],
        block_size,
        causal=True,
        sm_scale=q.shape[2] ** -0.5 if scale is None else scale,
        q_data_type=q.dtype,
        kv_data_type=k_cache.dtype,
    )
    result: Tensor = wrapper.run(q, (k_cache, v_cache))
    return result
