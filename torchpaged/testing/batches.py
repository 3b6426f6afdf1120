"""Batches for tests of attention: named lengths, shuffled blocks, garbage table tails, NaN in memory that was
never written.

Part of `torchpaged.testing`, which gives out its names.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchpaged.custom_ops.pools import FP8, KVScales
from torchpaged.custom_ops.words import repr_of_fields

GARBAGE = 2_000_000_011  # past the end of every table row; a kernel that follows it leaves the pool


@dataclass(frozen=True)
class BatchSpec:
    """Lengths of one batch: ``seq_lens`` (KV tokens including this step's) and ``query_lens`` per request."""

    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    padded_tokens: int = 0  # token rows after the last request's, as a padded graph has them
    padded_reqs: int = 0  # requests with seq_len 0 and query_len 0

    __repr__ = repr_of_fields

    def __post_init__(self) -> None:
        if len(self.seq_lens) != len(self.query_lens):
            raise ValueError(
                f"{self.name}: {len(self.seq_lens)} seq_lens but {len(self.query_lens)} query_lens"
            )


_SPECS = (
    BatchSpec("decode_one", (1,), (1,)),
    BatchSpec("decode_edges", (1, 15, 16, 17, 31, 32, 33), (1,) * 7),
    BatchSpec("decode_skewed", (513, 3, 64, 1), (1,) * 4),
    BatchSpec("decode_padded", (40, 7, 0, 0), (1, 1, 0, 0), padded_tokens=2),
    BatchSpec("decode_empty_row", (20, 0, 33), (1, 1, 1)),
    BatchSpec("prefill_small", (5, 16, 33), (5, 16, 33)),
    BatchSpec("prefill_long", (150,), (150,)),
    BatchSpec("chunked", (40, 70), (17, 33)),
    BatchSpec("speculative", (40, 17, 8), (4, 4, 4)),
    BatchSpec("mixed_small", (32, 40, 48), (1, 1, 5)),
    BatchSpec("mixed_padded", (90, 1, 20, 17), (1, 1, 20, 3), padded_tokens=3, padded_reqs=2),
    BatchSpec("left_padded", (3, 5, 0), (5, 5, 5)),
    BatchSpec("left_padded_chunk", (-2, 4, 20), (4, 4, 4)),
)
BATCH_SPECS: dict[str, BatchSpec] = {spec.name: spec for spec in _SPECS}


@dataclass
class Batch:
    """Tensors of one attention call (shapes: ``torchpaged.custom_ops.registry``) and the dense keys/values
    behind them."""

    spec: BatchSpec
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    max_query_len: int
    scale: float
    # sinks, alibi_slopes, ...: further arguments of the op
    extras: dict[str, Any] = field(default_factory=dict)

    __repr__ = repr_of_fields

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; heads before slots stay so."""

        def move(values: dict[str, Any]) -> dict[str, Any]:
            return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in values.items()}

        return replace(self, **move(vars(self) | {"extras": move(self.extras)}))

    def outputs(self, lse: bool = True) -> tuple[Tensor, Tensor | None]:
        """NaN to write into, so that what is not written shows: of q's dtype, bfloat16 where that is fp8, and
        the log-sum-exps."""
        shape = (*self.q.shape[:2], self.v_cache.shape[-1])
        dtype = torch.bfloat16 if self.q.dtype in FP8 else self.q.dtype
        out = torch.full(shape, float("nan"), dtype=dtype, device=self.q.device)
        if not lse:
            return out, None
        return out, torch.full(shape[:2], float("nan"), dtype=torch.float32, device=self.q.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What every call takes by place: queries, pools, block table, lengths, query starts."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens, self.query_start_loc

    def arguments(self, out: Tensor, lse: Tensor | None, **options: Any) -> tuple[Any, ...]:
        """Those of ``paged_attention`` up to ``lse``, and the dictionary of the others."""
        named = {"max_query_len": self.max_query_len, "scale": self.scale, **self.extras, **options}
        return (*self.tensors, out, lse), named


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Whatever torch's default device is, what is made without naming one stands on the CPU."""
    with torch.device("cpu"):
        yield


@on_host()
def make_batch(
    spec: BatchSpec,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    extra_columns: int = 2,
    heads_first: bool = False,
    sinks: bool = False,
    alibi: bool = False,
    kv_dtype: torch.dtype | None = None,
    scales: str = "none",
    num_blocks: int | None = None,
    max_query_len: int | None = None,
) -> Batch:
    """Random queries over a shuffled, NaN-poisoned pool.

    Args:
        spec: lengths of the requests.
        num_heads, num_kv_heads, head_dim, head_dim_v, block_size: the model's and the pools' sizes;
            ``head_dim_v`` None: ``head_dim``.
        dtype: of q, and of the pools unless ``kv_dtype`` is given.
        device: where all tensors are.
        seed: of the numbers and of the order of the blocks.
        extra_columns: of the block table, beyond what the longest request needs; tails are garbage.
        heads_first: the pools lie in memory as ``[num_blocks, num_kv_heads, block_size, head_dim]``.
        sinks: one per head, of ``dtype``, in `Batch.extras`.
        alibi: slopes per head, float32, in `Batch.extras`.
        kv_dtype: of the pools: ``dtype``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scales: of an fp8 pool, as ``k_scale`` and ``v_scale`` in `Batch.extras`: "none", "one" or
            "per_head"; float32.
        num_blocks: of the pools; None: four more than are needed.
        max_query_len: what the op is told; None: the longest query.

    Raises:
        ValueError: the requests don't fit ``num_blocks`` or ``max_query_len``, or scales without an fp8
            pool.
    """
    generator = torch.Generator().manual_seed(seed)
    head_dim_v, kv_dtype = head_dim if head_dim_v is None else head_dim_v, kv_dtype or dtype
    used = [-(-max(n, 0) // block_size) for n in spec.seq_lens]
    columns = max(1, *used, 1) + extra_columns
    num_blocks = sum(used) + 4 if num_blocks is None else num_blocks
    longest = max(1, *spec.query_lens, 1)
    max_query_len = longest if max_query_len is None else max_query_len
    if max(0, *used, 0) > columns or sum(used) >= num_blocks or longest > max_query_len:
        raise ValueError(
            f"{spec} doesn't fit {columns} columns, {num_blocks} blocks of {block_size}, queries of "
            f"{max_query_len}"
        )
    if scales not in ("none", "one", "per_head") or (scales != "none" and kv_dtype not in FP8):
        raise ValueError(
            f"scales: expected 'none', or 'one' or 'per_head' for an fp8 pool, got {scales!r} for {kv_dtype}"
        )
    ids = torch.randperm(num_blocks - 1, generator=generator) + 1  # block 0 is the null block
    block_table = torch.full((len(spec.seq_lens) + spec.padded_reqs, columns), GARBAGE, dtype=torch.int32)
    for row, blocks in enumerate(ids[: sum(used)].split(used)):
        block_table[row, : used[row]] = blocks.int()
    sizes, widths = (num_blocks, block_size, num_kv_heads), (head_dim, head_dim_v)
    k_cache, v_cache = _filled_pools(
        spec.seq_lens, block_table, sizes, widths, kv_dtype, heads_first, generator
    )
    starts = torch.tensor([0, *spec.query_lens, *[0] * spec.padded_reqs]).cumsum(0).int()
    num_tokens = int(starts[-1]) + spec.padded_tokens
    q = torch.randn(num_tokens, num_heads, head_dim, generator=generator, dtype=torch.float32).to(dtype)
    extras: dict[str, Any] = {}
    if sinks:
        extras["sinks"] = torch.randn(num_heads, generator=generator, dtype=torch.float32).to(dtype)
    if alibi:
        extras["alibi_slopes"] = 2.0 ** -torch.linspace(1, 8, num_heads, dtype=torch.float32)
    for name in KVScales._fields if scales != "none" else ():
        count = num_kv_heads if scales == "per_head" else 1
        extras[name] = torch.rand(count, generator=generator, dtype=torch.float32) + 0.25
    lens = torch.tensor([*spec.seq_lens, *[0] * spec.padded_reqs], dtype=torch.int32)
    requests = block_table, lens, starts, max_query_len
    return Batch(spec, q, k_cache, v_cache, *requests, head_dim**-0.5, extras).to(device)


def _filled_pools(
    seq_lens: Sequence[int],
    block_table: Tensor,
    sizes: tuple[int, int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    heads_first: bool,
    generator: torch.Generator,
) -> list[Tensor]:
    """Pools of keys and values of these widths, random where the requests' tokens lie and NaN elsewhere."""
    # numbers can't be put into an fp8 tensor by index
    written = torch.float32 if dtype in FP8 else dtype
    num_blocks, block_size, heads = sizes
    inner = (heads, block_size) if heads_first else (block_size, heads)
    pools = [torch.full((num_blocks, *inner, width), float("nan"), dtype=written) for width in widths]
    pools = [pool.transpose(1, 2) for pool in pools] if heads_first else pools
    for row, length in enumerate(max(n, 0) for n in seq_lens):
        position = torch.arange(length)
        where = (block_table[row, position // block_size].long(), position % block_size)
        for pool, width in zip(pools, widths, strict=True):
            numbers = torch.randn(length, heads, width, generator=generator, dtype=torch.float32)
            pool[where] = numbers.to(written)
    return [pool.to(dtype) for pool in pools]
