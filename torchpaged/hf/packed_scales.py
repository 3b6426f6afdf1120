"""Scales of the fp8 pools behind a `PagedModel`: tensors that graphs hold, filled once.

They are made before any step, so that a captured or compiled step has their addresses. Those that are not
given are found in the first prompt's keys and values, by a forward over pools of the keys' own dtype: no
layer reads rounded keys in it, while a `PagedCache` finds a layer's scales behind layers that do.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchpaged.backends import Limits, Route
from torchpaged.cache import KVLayerSpec, LatentLayerSpec, LayerSpec
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.custom_ops.pools import KVScales
from torchpaged.hf.kv_scales import KVQuantization, Scales, require_paged, static
from torchpaged.hf.layer import PagedLayer
from torchpaged.hf.layer_pools import scaled
from torchpaged.hf.step_cache import StepCache
from torchpaged.metadata import AttentionMetadata

_MOST_TOKENS = 2048  # of the first prompt: enough to find scales in


class PackedScales(KVQuantization):
    """Scales of a `StepCache`'s layers.

    Args:
        kv_dtype, kv_scales: as for `torchpaged.hf.PagedCache`.
        stored: what each layer stores.
        name: of the model's type, for messages.

    Attributes:
        missing: whether scales are still to be found.

    Raises:
        ArgumentError: as `KVQuantization`.
        UnsupportedModelError: a layer stores something else than keys and values, or latents.
    """

    def __init__(
        self,
        kv_dtype: str | torch.dtype | None,
        kv_scales: str | Scales,
        stored: Sequence[LayerSpec],
        name: str,
    ) -> None:
        others = [spec for spec in stored if not isinstance(spec, KVLayerSpec)]
        count = len(stored) - len(others)
        super().__init__(kv_dtype, kv_scales, count)
        self.missing = self.dtype is not None and isinstance(kv_scales, str) and count > 0
        self._layers: list[PagedLayer] = []
        if self.dtype is not None:
            kinds = {type(spec).__name__ for spec in others if not isinstance(spec, LatentLayerSpec)}
            require_paged(name, kinds)

    def give(self, layers: Iterable[PagedLayer]) -> None:
        """Give ``layers``, which have their pools, their scales; 1 where they are still to be found."""
        self._layers = scaled(layers)
        for position, layer in enumerate(self._layers if self.dtype is not None else ()):
            assert layer.keys is not None
            heads, device = layer.keys.shape[2], layer.keys.device
            if self.missing:
                count = heads if self._by_head else 1
                with torch.inference_mode(False):  # filled later, perhaps outside of it
                    ones = (torch.ones(count, dtype=torch.float32, device=device) for _ in KVScales._fields)
                    layer.scales = KVScales(*map(static, ones)).by_name
            else:
                empty = torch.empty(1, heads, 0, 1, dtype=torch.float32, device=device)
                layer.scales = self.of(position, empty, empty).by_name

    def find(self, filled: Iterable[PagedLayer], num_tokens: int) -> None:
        """Fill the scales from pools of the keys' dtype. Keys or values that are not finite say nothing:
        then the scales stay missing, for the next prompt; a request of such tokens ends by its NaN logits.

        Args:
            filled: as many layers, whose tokens stand from slot ``block_size`` on, behind the null block.
            num_tokens: of them.
        """
        found = []
        for position, source in enumerate(scaled(filled)):
            assert source.keys is not None and source.values is not None
            first = source.keys.shape[1]
            states = [
                pool.flatten(0, 1)[first : first + num_tokens].transpose(0, 1)[None]
                for pool in (source.keys, source.values)
            ]
            if not all(bool(x.isfinite().all()) for x in states):
                return
            found.append(self.of(position, *states))
        for layer, scales in zip(self._layers, found, strict=True):
            for name, scale in scales.by_name.items():
                layer.scales[name].copy_(scale)
        self.missing = False


def run_once(
    model: Any, config: Any, token_ids: Sequence[int], block_size: int, backend: str | Route | None
) -> tuple[StepCache, int]:
    """A forward over a prompt's first tokens, into pools of the keys' own dtype in blocks 1, 2 and so on.

    Args:
        model: the model of transformers, attached.
        config: of its text part.
        token_ids: the prompt.
        block_size: tokens per block.
        backend: as for `PagedModel`.

    Returns:
        The cache with its pools, and the number of tokens in them.

    Raises:
        ArgumentError: no token.
    """
    ids = list(token_ids)[:_MOST_TOKENS]
    if not ids:
        raise ArgumentError("token_ids", "at least one token", "none")
    blocks = -(-len(ids) // block_size)
    limits = Limits(1, len(ids), blocks, num_blocks=blocks + 1, block_size=block_size)
    cache = StepCache(config, limits, blocks * block_size, backend)
    metadata = AttentionMetadata.from_lists(
        [len(ids)], [len(ids)], [list(range(1, blocks + 1))], block_size=block_size, device=model.device
    )
    tokens = torch.tensor(ids, dtype=torch.int64, device=model.device)
    cache.state_slots = torch.ones(1, dtype=torch.int32, device=model.device)
    with torch.no_grad():
        cache.run(model, tokens, metadata)
    return cache, len(ids)
