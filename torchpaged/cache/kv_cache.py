"""PagedKVCache: the block pools of every layer, sized by count or by a memory budget.

    cache = PagedKVCache.uniform(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, num_blocks=512,
                                 dtype=torch.bfloat16)
    print(cache.describe())          # 512 blocks of 16 tokens = 8176 tokens in 30 layers, 180.00 MiB ...
    k_cache, v_cache = cache[0][:2]  # [num_blocks, block_size, num_kv_heads, head_dim]

What a layer stores is its spec's business (`torchpaged.cache.kinds`); `KVLayerSpec`, keys and values in two
pools, is the usual one. Build it outside ``torch.inference_mode()``: an inference tensor cannot be written
under plain ``no_grad``.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchpaged.cache.block_pool import BlockPool, check_num_blocks
from torchpaged.cache.kinds import LayerSpec, kind_of, memory_of
from torchpaged.cache.kv import KVLayerSpec
from torchpaged.cache.requests import CacheRequests
from torchpaged.custom_ops import BACKEND_OPS, BackendOps
from torchpaged.custom_ops.checks import check_is_dtype, check_sizes, device_here, is_int
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.words import counted, of_bytes, one_line
from torchpaged.metadata.host import to_device


class PagedKVCache:
    """The KV pools of a model.

    >>> cache = PagedKVCache.uniform(2, 2, 64, num_blocks=8, dtype=torch.float32)
    >>> cache.describe()
    '8 blocks of 16 tokens = 112 tokens in 2 layers, 256.00 KiB (2048 bytes per token, float32)'

    Args:
        layers: one spec per layer, each of a registered kind; `KVLayerSpec` for attention.
        block_size: tokens per block. (Some projects call the context length "block size"; here it is
            the page.)
        num_blocks: blocks per layer, the null block 0 included. Give this or ``memory_budget``.
        memory_budget: bytes that all pools together may take.
        dtype: of the pools; those of an fp8 dtype carry scales of 1.0; others are given to the layers with
            the pools (docs/howto/fp8_cache.md).
        device: where the pools live.
        blocks_of: blocks of layers that have a number of their own, by layer; ids of their blocks are theirs
            alone (`RollingBlocks`).
        max_num_reqs: requests at once, for layers whose specs are `per_request <LayerSpec>`.

    Raises:
        ArgumentError: neither or both sizes given, the budget holds fewer than 2 blocks, pools that do not
            fit into the device's memory, or a spec of no registered kind.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_budget: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        blocks_of: Mapping[int, int] | None = None,
        max_num_reqs: int | None = None,
    ) -> None:
        if not isinstance(layers, Sequence) or not layers:
            raise ArgumentError("layers", "a list of specs, at least one", repr(layers))
        for spec in layers:
            kind_of(spec)
        check_sizes(block_size=block_size)
        check_is_dtype(dtype=dtype)
        if not dtype.is_floating_point:
            raise ArgumentError("dtype", "a floating point dtype", str(dtype))
        for name, size in (("num_blocks", num_blocks), ("memory_budget", memory_budget)):
            if size is not None and not is_int(size):
                raise ArgumentError(name, "None or an integer", repr(size), "for 1 GiB give 2**30")
        if (num_blocks is None) == (memory_budget is None):
            raise ArgumentError(
                "num_blocks",
                "exactly one of num_blocks and memory_budget",
                f"{num_blocks} and {memory_budget}",
            )
        self.layers, self.block_size, self.dtype, self.device = (
            tuple(layers),
            block_size,
            dtype,
            device_here(device),
        )
        self.per_request = [layer for layer, spec in enumerate(self.layers) if spec.per_request]
        if self.per_request:
            check_sizes(max_num_reqs=max_num_reqs)
        self.blocks_of = dict(blocks_of or {}) | dict.fromkeys(self.per_request, 1 + (max_num_reqs or 0))
        if num_blocks is None:
            assert memory_budget is not None
            num_blocks = self._blocks_within(memory_budget)
        check_num_blocks(num_blocks)
        self.num_blocks = num_blocks
        memory = memory_of(self.device)
        if memory is not None and self.num_bytes > memory:
            raise self._too_large(f"the {memory / 2**30:,.1f} GiB of {self.device}")
        self._pool: BlockPool | None = None
        pools = self._make_layers()
        if pools is None:
            raise self._too_large(f"what is free of {self.device}")
        self._pools = pools
        self._mark_static()

    def _too_large(self, place: str) -> ArgumentError:
        return ArgumentError(
            "num_blocks",
            f"pools that fit into {place}",
            f"{self.num_blocks} blocks of {self.bytes_per_block:,} bytes, {self.num_bytes / 2**30:,.1f} GiB",
            "take fewer blocks, or a smaller kv dtype",
        )

    def _blocks_within(self, memory_budget: int) -> int:
        if not self.bytes_per_block:
            raise ArgumentError(
                "num_blocks", "given where every layer has blocks of its own", "a memory_budget"
            )
        num_blocks = (memory_budget - self._bytes_apart) // self.bytes_per_block
        if num_blocks < 2:
            raise ArgumentError(
                "memory_budget",
                f"at least {2 * self.bytes_per_block + self._bytes_apart} bytes (2 blocks)",
                str(memory_budget),
            )
        return num_blocks

    def _mark_static(self) -> None:
        """Tell torch.compile that the addresses never move, so that its CUDA graphs need no copies."""
        for tensor in self.tensors().values():
            # guard=False: a new cache object must not recompile the model
            torch._dynamo.mark_static_address(tensor, guard=False)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, with all that is stored: pools as bytes, since pickle knows no fp8."""
        held = [self._blocks(layer) for layer in range(len(self))]
        dtypes = [{name: tensor.dtype for name, tensor in tensors.items()} for tensors in held]
        stored = [
            pools._replace(**{name: tensor.detach().view(torch.uint8) for name, tensor in tensors.items()})
            for pools, tensors in zip(self._pools, held, strict=True)
        ]
        return self.__dict__ | {"_pools": stored, "_dtypes": dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes = state.pop("_dtypes")
        self.__dict__.update(state)
        self._pools = [
            pools._replace(**{name: getattr(pools, name).view(dtype) for name, dtype in of_layer.items()})
            for pools, of_layer in zip(state["_pools"], dtypes, strict=True)
        ]
        self.device = next(iter(self.tensors().values())).device  # torch.load may have moved it
        if self._pool is not None:
            self._pool.is_alone = False
            self._tell(self._pool)
        self._mark_static()

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None, **options: Any
    ) -> "PagedKVCache":
        """A cache whose layers are all alike; ``options``: those of the class, behind ``layers``."""
        check_sizes(num_layers=num_layers)
        return cls([KVLayerSpec(num_kv_heads, head_dim, head_dim_v)] * num_layers, **options)

    def _make_layers(self) -> list[Any] | None:
        """None: the device has no room; an error of the caller's then holds none of those that were made."""
        with contextlib.suppress(torch.OutOfMemoryError):
            return [self._make_layer(layer) for layer in range(len(self.layers))]
        return None

    def _make_layer(self, layer: int) -> Any:
        num_blocks = self.blocks_of.get(layer, self.num_blocks)
        with torch.inference_mode(False):
            return self.layers[layer].make_pools(num_blocks, self.block_size, self.dtype, self.device)

    @property
    def pool(self) -> BlockPool:
        """Which blocks are free, as far as `allocate` gave them out; one for the life of the cache. A caller
        that keeps another `BlockPool` for these pools must not use both."""
        if self._pool is None:
            self._pool = BlockPool(self.num_blocks)
            self._tell(self._pool)
        return self._pool

    def _tell(self, pool: BlockPool) -> None:
        """Requests may fork where a block is all that its tokens have. A shallow copy of a cache has its
        pool, which stays with the first of them."""
        if not self.blocks_of and pool.copier is None:
            pool.copied_by(self._copy_pairs)

    def _copy_pairs(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, ``(source, destination)``, in every layer, by the device's own kernels; nothing waits
        for a GPU."""
        numbers = [block for pair in pairs for block in pair]
        mapping = to_device(numbers, torch.int64, self.device).view(-1, 2)
        self.copy_blocks(mapping, BACKEND_OPS["default"])

    def allocate(self, num_reqs: int, max_seq_len: int | None = None) -> CacheRequests:
        """Requests that take their blocks as they grow.

            rows = cache.allocate(2)
            metadata = rows.append([7, 3])

        Args:
            num_reqs: how many.
            max_seq_len: tokens of a request at most, and with that the width of the block tables.

        Raises:
            ArgumentError: a number below 1.
        """
        return CacheRequests(self.pool, num_reqs, self.block_size, max_seq_len, self.device)

    def __getitem__(self, layer: int) -> Any:
        """The pools of a layer, of its kind: a `LayerKVCache` where its spec is a `KVLayerSpec`.

        Raises:
            IndexError: there is no such layer.
        """
        if is_int(layer) and not -len(self._pools) <= layer < len(self._pools):
            raise IndexError(f"layer: expected one of {counted(len(self._pools), 'layer')}, got {layer}")
        return self._pools[layer]

    def __len__(self) -> int:
        return len(self._pools)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pools)

    def _blocks(self, layer: int) -> dict[str, Tensor]:
        return self.layers[layer].block_tensors(self._pools[layer])

    def tensors(self) -> dict[str, Tensor]:
        """All that hold blocks, by name: ``k_cache[0]``, ``v_cache[0]`` and so on."""
        return {
            f"{name}[{layer}]": tensor
            for layer in range(len(self))
            for name, tensor in self._blocks(layer).items()
        }

    def copy_blocks(self, block_mapping: Tensor, ops: BackendOps) -> None:
        """Copy whole blocks in every layer that has no blocks of its own; arguments as in
        `LayerSpec.copy_blocks`."""
        for layer, spec in enumerate(self.layers):
            if layer not in self.blocks_of:
                spec.copy_blocks(self._pools[layer], block_mapping, ops)

    def copy_requests(self, request_mapping: Tensor, ops: BackendOps) -> None:
        """Copy what requests keep in `per_request <LayerSpec>` layers: ``[n, 2]`` int64, source and
        destination; no request is both."""
        for layer in self.per_request:
            self.layers[layer].copy_blocks(self._pools[layer], request_mapping, ops)

    @property
    def bytes_per_block(self) -> int:
        """Bytes one block takes in all layers together, those with blocks of their own left out."""
        specs = [spec for layer, spec in enumerate(self.layers) if layer not in self.blocks_of]
        return sum(spec.bytes_per_block(self.block_size, self.dtype) for spec in specs)

    @property
    def _bytes_apart(self) -> int:
        sizes = {n: self.layers[n].bytes_per_block(self.block_size, self.dtype) for n in self.blocks_of}
        return sum(count * sizes[layer] for layer, count in self.blocks_of.items())

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers together, rounded down where a layer's blocks are not made
        of tokens."""
        return self.bytes_per_block // self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes all pools take."""
        return self.num_blocks * self.bytes_per_block + self._bytes_apart

    @property
    def num_tokens(self) -> int:
        """Tokens that fit (the null block holds none)."""
        return (self.num_blocks - 1) * self.block_size

    def describe(self) -> str:
        """The memory arithmetic in one line."""
        blocks = f"{counted(self.num_blocks, 'block')} of {counted(self.block_size, 'token')}"
        tokens, dtype = counted(self.num_tokens, "token"), str(self.dtype).removeprefix("torch.")
        layers, size = counted(len(self), "layer"), of_bytes(self.num_bytes)
        if len(self.per_request) == len(self):
            count = self.blocks_of[0] - 1
            each = f"{self._bytes_apart // (count + 1)} bytes per request, {dtype}"
            return f"states of {counted(count, 'request')} in {layers}, {size} ({each}); {blocks} = {tokens}"
        return f"{blocks} = {tokens} in {layers}, {size} ({self.bytes_per_token} bytes per token, {dtype})"

    def __repr__(self) -> str:
        what = f"{counted(self.num_blocks, 'block')} of {counted(self.block_size, 'token')}"
        if len(self.per_request) == len(self):
            what = f"states of {counted(self.blocks_of[0] - 1, 'request')}"
        layers, dtype = counted(len(self), "layer"), str(self.dtype).removeprefix("torch.")
        return one_line(self, f"{what} in {layers}", of_bytes(self.num_bytes), dtype, f"on {self.device}")

    if not TYPE_CHECKING:  # type checkers know the attributes by their names

        def __getattr__(self, name: str) -> Any:
            """What transformers asks of a cache first is answered by where its caches are."""
            fix = ""
            if name in ("is_compileable", "get_seq_length", "get_mask_sizes", "update"):
                fix = "; models of transformers take a torchpaged.hf.PagedCache(model.config, ...)"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{fix}")
