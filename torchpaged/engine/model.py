"""What the engine needs of a model: `torchpaged.hf.PagedModel` is one, anything of this shape will do. And
whose its cache's blocks are: one engine's at a time."""

import weakref
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchpaged.backends import Choice, Session
from torchpaged.cache import PagedKVCache
from torchpaged.custom_ops.errors import TorchpagedError
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


_OWNERS: "WeakKeyDictionary[Any, weakref.ref[CacheOwner]]" = WeakKeyDictionary()


class CacheOwner:
    """One engine's claim on a cache. A new one takes the cache; later it goes to one that has requests.

    Every engine hands out blocks by its own books. Two that ran requests over one cache would write into each
    other's blocks: silently wrong tokens.

    Args:
        cache: of the paged model.
        requests: of the engine, those that wait or run.
    """

    def __init__(self, cache: Any, requests: dict[int, Any]) -> None:
        self._cache, self._requests, self._evicted = cache, requests, False
        before = self._owner()
        if before is not None and before._requests:
            before._evicted = True
        _OWNERS[cache] = weakref.ref(self)

    def _owner(self) -> "CacheOwner | None":
        owner = _OWNERS.get(self._cache)
        return None if owner is None else owner()

    def require(self) -> bool:
        """Claim the cache for a new request or a step; whether another engine had it since.

        Raises:
            TorchpagedError: another engine runs requests in it, or was made while this one did.
        """
        owner = self._owner()
        if self._evicted and not self._requests:
            self._evicted = False
        if self._evicted or (owner is not self and owner is not None and owner._requests):
            raise TorchpagedError(
                "another Generator runs requests over the same PagedModel, or was made while this one's ran: "
                "their blocks are the same; expected one Generator at a time, or a PagedModel for each"
            )
        if owner is self:
            return False
        _OWNERS[self._cache] = weakref.ref(self)
        return True
