"""The tensors of a case, and the float32 oracle that every contender has to meet before it is timed.

    inputs = make_inputs(case, device)
    worst = relative_error(case, inputs, layer=0, out=contender_output)

KV caches come in as many copies ("layers") as it takes for a round over them to leave nothing in the L2
cache. Blocks are shuffled, but for a few cases; block 0 is the null block and stays out of every table. Table
tails are 0, because peers may load them.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_peers.cases import AttentionCase
from torchpaged.custom_ops.pools import KVScales
from torchpaged.metadata import AttentionMetadata

L2_BYTES = 60e6  # of an H200; smaller ones are covered too
MIN_LAYERS, MAX_LAYERS = 2, 24
FP8_K_SCALE = (
    0.5  # not 1, so that a kernel that drops it is found out; folded into the softmax scale by peers
)
_MAX_ORACLE_ROWS = 256  # query rows of a request that the oracle computes
_ORACLE_ELEMENTS = 1 << 26  # float32 elements of one slice of the oracle's temporaries

#: Largest relative error ||out - exact|| / ||exact|| of any checked request, by the dtype that limits it.
ERROR_LIMITS = {
    torch.float32: 1e-4,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-2,
    torch.float8_e4m3fn: 5e-2,
    torch.float8_e5m2: 5e-2,
}


@dataclass
class Inputs:
    """One attention call over several layers' caches; a batch that a session can plan.

    Attributes:
        q: ``[num_tokens, num_heads, head_dim]``.
        k_caches, v_caches: one ``[num_blocks, block_size, num_kv_heads, head_dim]`` per layer, the
            case's ``kv_dtype``.
        block_table: ``[num_reqs, max_blocks_per_req]`` int32.
        seq_lens: ``[num_reqs]`` int32.
        query_start_loc: ``[num_reqs + 1]`` int32.
        max_query_len: of the longest query.
        scale: softmax scale.
        scales: float32 ``[1]``, of fp8 caches.
        heads_first: whether the caches lie in memory as ``[num_blocks, num_kv_heads, block_size, head_dim]``,
            behind the same shape.
    """

    q: Tensor
    k_caches: list[Tensor]
    v_caches: list[Tensor]
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    scale: float
    scales: KVScales
    heads_first: bool = False

    @property
    def num_layers(self) -> int:
        """Distinct KV caches."""
        return len(self.k_caches)

    def poisoned_out(self) -> Tensor:
        """An output of NaN, so that a row that is not written is seen."""
        return torch.full_like(self.q, float("nan"))

    def dense(self, layer: int, request: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a request in order, two tensors ``[length, num_kv_heads, head_dim]``."""
        k_cache, v_cache = self.k_caches[layer], self.v_caches[layer]
        blocks = self.block_table[request, : -(-length // k_cache.shape[1])].long()
        return k_cache[blocks].flatten(0, 1)[:length], v_cache[blocks].flatten(0, 1)[:length]


def num_layers(case: AttentionCase) -> int:
    """Copies of the KV cache that together exceed 3.5 times the L2 cache, 2 to 24 of them."""
    return max(MIN_LAYERS, min(MAX_LAYERS, int(3.5 * L2_BYTES / case.useful_bytes()) + 1))


def needed_bytes(case: AttentionCase) -> int:
    """Device memory of a case: caches, their dense copies for the contiguous contenders, one more layer and 1
    GiB of workspaces."""
    pool = (
        2
        * (case.num_blocks + 1)
        * case.block_size
        * case.num_kv_heads
        * case.head_dim
        * case.kv_dtype.itemsize
    )
    workspaces = 1 << 30 if case.useful_bytes() > 1 << 26 else 0
    return (
        pool * (2 * num_layers(case) + 1)
        + 4 * case.num_tokens * case.num_heads * case.head_dim * 4
        + workspaces
    )


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on ``device``; None where the system doesn't say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not os.path.exists("/proc/meminfo"):
        return None
    with open("/proc/meminfo") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def make_inputs(
    case: AttentionCase, device: torch.device, heads_first: bool = False, seed: int = 0
) -> Inputs:
    """Random inputs of ``case``, made on ``device`` in their own dtype; ``heads_first``: see `Inputs`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    used = [-(-length // case.block_size) for length in case.seq_lens]
    order = (
        torch.randperm(case.num_blocks, generator=generator, device=device)
        if case.shuffled
        else torch.arange(case.num_blocks, device=device)
    )
    ids = (order + 1).int()
    tables = [blocks.tolist() for blocks in ids.split(used)]
    batch = AttentionMetadata.from_lists(
        case.query_lens, case.seq_lens, tables, block_size=case.block_size, device=device
    )
    inner = (case.num_kv_heads, case.block_size) if heads_first else (case.block_size, case.num_kv_heads)
    shape = (case.num_blocks + 1, *inner, case.head_dim)
    fp8 = case.kv_dtype.itemsize == 1

    def pool() -> Tensor:
        cache = torch.randn(shape, generator=generator, device=device, dtype=case.dtype)
        cache = cache.to(case.kv_dtype) if fp8 else cache
        return cache.transpose(1, 2) if heads_first else cache

    layers = num_layers(case)
    numbers = (torch.full((1,), x, device=device) for x in ((FP8_K_SCALE, 1.0) if fp8 else ()))
    return Inputs(
        q=torch.randn(
            case.num_tokens,
            case.num_heads,
            case.head_dim,
            generator=generator,
            device=device,
            dtype=case.dtype,
        ),
        k_caches=[pool() for _ in range(layers)],
        v_caches=[pool() for _ in range(layers)],
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        max_query_len=max(case.query_lens),
        scale=case.head_dim**-0.5,
        scales=KVScales(*numbers),
        heads_first=heads_first,
    )


def _oracle(case: AttentionCase, inputs: Inputs, layer: int, request: int, rows: Tensor) -> Tensor:
    """Attention of query ``rows`` of a request in float32, densely: ``[len(rows), num_heads, head_dim]``."""
    length, query_len = case.seq_lens[request], case.query_lens[request]
    k, v = inputs.dense(layer, request, length)
    start = sum(case.query_lens[:request])
    group = case.num_heads // case.num_kv_heads
    k_scale, v_scale = (1.0 if scale is None else float(scale) for scale in inputs.scales[:2])
    out = torch.empty(len(rows), case.num_heads, case.head_dim, dtype=torch.float32, device=rows.device)
    position = torch.arange(length, device=rows.device)
    step = max(1, _ORACLE_ELEMENTS // (length * group))
    for head in range(case.num_kv_heads):
        keys, values = k[:, head].float() * k_scale, v[:, head].float() * v_scale
        heads = torch.arange(head * group, (head + 1) * group, device=rows.device)[:, None]
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            q = inputs.q[start + part, head * group : (head + 1) * group].float()
            scores = torch.einsum("qgd,nd->qgn", q, keys) * inputs.scale
            seen = case.mask.sees((length - query_len + part)[:, None, None], position, heads)
            scores.masked_fill_(~seen, float("-inf"))
            out[at : at + step, head * group : (head + 1) * group] = torch.einsum(
                "qgn,nd->qgd", scores.softmax(-1), values
            )
    return out


def checked_requests(case: AttentionCase) -> list[int]:
    """The requests that the oracle computes: the first, the longest and the last, and the longest query."""
    longest = max(range(len(case.seq_lens)), key=case.seq_lens.__getitem__)
    longest_query = max(range(len(case.query_lens)), key=case.query_lens.__getitem__)
    return sorted({0, longest, longest_query, len(case.seq_lens) - 1})


def exact_outputs(case: AttentionCase, inputs: Inputs, layer: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Request -> (query rows, their exact outputs); of a long query an even choice of rows, the first and the
    last included."""
    exact: dict[int, tuple[Tensor, Tensor]] = {}
    for request in checked_requests(case):
        count = min(case.query_lens[request], _MAX_ORACLE_ROWS)
        rows = (
            torch.linspace(0, case.query_lens[request] - 1, count, dtype=torch.float64)
            .round()
            .long()
            .to(inputs.q.device)
        )
        exact[request] = (rows, _oracle(case, inputs, layer, request, rows))
    return exact


def relative_error(case: AttentionCase, out: Tensor, exact: dict[int, tuple[Tensor, Tensor]]) -> float:
    """The worst ``||out - exact|| / ||exact||`` over the checked requests; infinite if any row of ``out`` is
    not finite."""
    out = out.reshape(case.num_tokens, case.num_heads, case.head_dim)
    if not bool(out.isfinite().all()):
        return float("inf")
    starts = [sum(case.query_lens[:request]) for request in exact]
    return max(
        float((out[start + rows].float() - reference).norm() / reference.norm())
        for start, (rows, reference) in zip(starts, exact.values(), strict=True)
    )


def error_limit(case: AttentionCase) -> float:
    """The relative error over which a contender counts as wrong."""
    return max(ERROR_LIMITS[case.dtype], ERROR_LIMITS[case.kv_dtype])
