"""StepCache: transformers' view of a packed step, whose blocks and lengths somebody else owns, such as the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from torchpaged.backends import AttentionSpec, Limits
from torchpaged.custom_ops.errors import UnsupportedModelError
from torchpaged.hf.chosen_backend import ChoosesBackend, config_spec
from torchpaged.hf.layer import PagedLayer, StepBatch
from torchpaged.hf.masks import is_causal
from torchpaged.hf.template import HybridPagedLayer, paged_layers
from torchpaged.metadata import AttentionMetadata


class StepCache(ChoosesBackend, Cache):
    """A cache whose step is set from outside: the engine owns blocks and lengths."""

    dense = False
    keys_of_queries = True

    def __init__(self, config: Any, limits: Limits, max_seq_len: int, backend: str) -> None:
        super().__init__(layers=paged_layers(config, max_seq_len, self))
        self.name = str(config.model_type)
        self._config, self._backend = config, backend
        self.num_blocks, self.block_size = limits.need("num_blocks", "block_size")
        self.limits, self.max_seq_len, self.paged = limits, max_seq_len, self.layers
        self.metadata: AttentionMetadata | None = None
        self.ready, self.specs = False, {}
        self._causal: bool | None = None
        self._mask_token = torch.zeros((), dtype=torch.int64)
        self._mask_token._torchpaged_cache = self  # type: ignore[attr-defined]
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, PagedLayer) or isinstance(layer, HybridPagedLayer):
                raise UnsupportedModelError(
                    f"{config.model_type}: layer {index} keeps a recurrent state ({type(layer).__name__}), which the packed batches of the "
                    "engine do not carry yet; use generate() with torchpaged.hf.PagedCache"
                )

    def prepare(self, key_states: Tensor, head_dim_v: int | None = None) -> None:
        """Choose the backend, when the first keys show device and dtype."""
        specs = [config_spec(self._config, x, key_states, head_dim_v, self.block_size) for x in self.layers]
        self.prepare_for(specs)
        for layer, spec in zip(self.layers, specs, strict=True):
            self.give_workspace(layer, spec)

    def prepare_for(self, specs: Iterable[AttentionSpec]) -> None:
        """Choose the backend for what the layers are known to ask."""
        self.choose_backend(specs)
        self.ready = True

    def first_use(self, layer: PagedLayer) -> None:
        """Every layer is used: `torchpaged.hf.paged_model` probed it."""

    def written(self, layer: PagedLayer) -> None:
        """A step that raises is nobody's state: the engine sets lengths anew for each one."""

    def slots(self, layer: PagedLayer, batch: int, query_len: int) -> Tensor:
        """The step's: ``[num_tokens]`` int64, the same for every layer."""
        assert self.metadata is not None
        return self.metadata.slot_mapping

    def step(self, batch: int, query_len: int) -> StepBatch:
        """The step's tensors, as ``metadata`` has them."""
        m = self.metadata
        assert m is not None
        return StepBatch(m.block_table, m.seq_lens, m.query_start_loc, m.max_query_len)

    def mask_sizes(self, layer: PagedLayer, query_length: int) -> tuple[int, Any]:
        """As many keys as fit, and the tensor by which the mask function finds this cache."""
        return self.max_seq_len, self._mask_token

    def observe_mask(self, mask: Tensor | None, batch: int, query_length: int, mask_function: Any, *_: Any) -> None:
        """Note whether the model is causal; raises UnsupportedModelError if it has a mask of its own."""
        self._causal = is_causal(mask_function)
        if mask is not None:
            raise UnsupportedModelError("the packed path takes no attention mask")

    def length(self, layer: PagedLayer) -> int:
        """0: positions are given, none is counted."""
        return 0

    def causality(self) -> bool | None:
        """What `observe_mask` saw; None before."""
        return self._causal

    def require_kind(self, layer: PagedLayer, window: int | None) -> None:
        """Nothing is required: a packed row is longer than any request in it, so that its masks say nothing."""

    def gather(self, pool: Tensor, batch: int) -> Tensor:
        """Raises UnsupportedModelError."""
        raise UnsupportedModelError("the packed path has no dense mode")


def padding_step(device: torch.device) -> AttentionMetadata:
    """One token that belongs to nobody: nothing is written, attention gives zeros."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    longs: dict[str, Any] = {"dtype": torch.int64, "device": device}
    return AttentionMetadata(
        torch.zeros(1, 1, **ints), torch.zeros(1, **ints), torch.tensor([0, 1], **ints), torch.full((1,), -1, **longs),
        torch.zeros(1, **longs), max_query_len=1,
    )  # fmt: skip
