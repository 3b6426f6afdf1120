"""What the engine needs of a model: `torchpaged.hf.PagedModel` is one, anything of this shape will do."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from torchpaged.backends import Choice, Session
from torchpaged.cache import PagedKVCache
from torchpaged.metadata import AttentionMetadata


@runtime_checkable
class PagedModelProtocol(Protocol):
    """A causal language model over packed tokens and a paged cache."""

    kv_cache: PagedKVCache
    choice: Choice
    device: torch.device
    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def session(self) -> Session:
        """What the backend keeps open for the layers; the engine drives it: plans, resets and checks."""

    def __call__(
        self, input_ids: Tensor, metadata: AttentionMetadata, logits_indices: Tensor | None = None
    ) -> Tensor:
        """``input_ids [num_tokens]`` int64 -> logits of ``logits_indices [num_reqs]``, or of every token."""
        ...
