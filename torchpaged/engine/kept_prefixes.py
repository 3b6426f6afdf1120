"""What a `Generator` keeps of requests that ended, for those to come: forgotten, written to a file, read."""

import os
from collections.abc import Sequence as Seq
from typing import Any

import torch

from torchpaged.cache import BlockPool, PagedKVCache, Pin, PrefixCache
from torchpaged.cache.checkpoints import CheckpointedPrefixCache
from torchpaged.cache.disk_blocks import DiskBlocks
from torchpaged.cache.disk_tier import DiskTier
from torchpaged.cache.host_blocks import HostBlocks
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.snapshots import load_prefixes, save_prefixes
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.calls import Calls
from torchpaged.engine.decisions import Decisions
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.options import GeneratorOptions
from torchpaged.engine.prompts import encoded, token_ids
from torchpaged.engine.sequence import Sequence
from torchpaged.engine.stepper import Stepper
from torchpaged.model_state import fingerprint

#: Bytes of host memory at most that blocks pass through on their way to a disk and back, if nothing was said.
_STAGING = 2**30
#: Arguments of what keeps copies -> the options that they come from.
_OPTIONS = {"memory_budget": "host_cache_memory", "folder": "disk_cache_path", "size": "disk_cache_size"}


def make_prefix_cache(
    pool: BlockPool,
    options: GeneratorOptions,
    decided: Decisions,
    cache: PagedKVCache,
    max_seq_len: int,
    rings: Any,
) -> PrefixCache | None:
    """By which requests share blocks, those of ``cache``, or None if they do not; ``rings``: of the model.

    Raises:
        ArgumentError: ``host_cache_memory`` or ``disk_cache_size`` holds no block, or nothing can be written
            to ``disk_cache_path``.
        ArgumentError: ``checkpoint_every`` is no multiple of the block size.
    """
    block_size, every = cache.block_size, options.checkpoint_every
    if every is not None and every % block_size:
        expected = f"None, or a multiple of the block size, {block_size}"
        raise ArgumentError("checkpoint_every", expected, str(every))
    if not decided.shares:
        return None
    if rings is None:
        try:
            host = _host_tier(options, cache, max_seq_len)
        except ArgumentError as error:
            argument, *rest = error.args
            raise ArgumentError(_OPTIONS.get(argument, argument), *rest) from error
        return PrefixCache(pool, block_size, keep=decided.keeps, eviction=options.eviction, host=host)
    if every is None:
        every = max(min(options.prefill_chunk_size, max_seq_len) // block_size, 1) * block_size
    count = rings.num_checkpoints
    kept: dict[str, Any] = {"keep": decided.keeps, "eviction": options.eviction}
    return CheckpointedPrefixCache(pool, block_size, num_checkpoints=count, every=every, **kept)


def _host_tier(options: GeneratorOptions, cache: PagedKVCache, max_seq_len: int) -> HostTier | None:
    """Where copies go."""
    memory, folder = options.host_cache_memory, options.disk_cache_path
    if folder is None or options.disk_cache_size is None:
        return None if memory is None else HostTier(HostBlocks(cache, memory))
    if memory is None:  # a half is for what comes and goes: the longest text, twice
        text = -(-max_seq_len // cache.block_size) * cache.bytes_per_block
        memory = max(min(4 * text, _STAGING), 2 * cache.bytes_per_block)
    host = HostBlocks(cache, memory)
    return DiskTier(host, DiskBlocks(folder, options.disk_cache_size, host.bytes_per_block))


class KeptPrefixes:
    """What `Generator` has of it."""

    model: PagedModelProtocol
    tokenizer: Any
    prefix_cache: PrefixCache | None
    prefix_cache_reason: str
    _calls: Calls
    _requests: dict[int, Sequence]
    _stepper: Stepper

    def reset_prefix_cache(self) -> None:
        """Forget what is known of earlier requests; those that run keep their blocks. For changes of the
        model that torch does not count, of ``parameter.data`` for instance."""
        with self._calls.entered():
            self._stepper.forget_prefixes("reset_prefix_cache()")

    def pin(
        self,
        prompt: str | Seq[int],
        *,
        cache_salt: str | None = None,
        ttl: float | None = None,
        priority: int = 0,
    ) -> Pin:
        """Keep what is known of the first tokens of ``prompt``, of earlier requests, until a request could
        not run at all without these blocks; others wait.

            generator.generate([system], SamplingParams(max_new_tokens=1))
            pin = generator.pin(system, ttl=3600)
            print(pin.num_tokens, "tokens are pinned")

        Args:
            prompt: text, or token ids.
            cache_salt: of the requests that may find it.
            ttl, priority: as of `torchpaged.cache.PrefixCache.pin`.

        Raises:
            ArgumentError: no prompt, a ``ttl`` or ``priority`` that can't be, or nothing is kept
                (`prefix_cache_reason`).
        """
        prompt = encoded(prompt, self.tokenizer)
        with self._calls.entered():
            ids = token_ids(prompt, self.model.vocab_size)
            self._stepper.require_cache()
            self._stepper.look()
            return self._kept_prefixes().pin(ids, cache_salt, ttl=ttl, priority=priority)

    def unpin(self, pin: Pin) -> None:
        """End a pin; nothing if it has ended."""
        with self._calls.entered():
            self._kept_prefixes().unpin(pin)

    def snapshot(self, path: str | os.PathLike[str]) -> int:
        """Write what the prefix cache knows to a safetensors file, for `restore` in another process.

        Returns:
            Tokens that it holds.

        Raises:
            ArgumentError: nothing is kept (`prefix_cache_reason`), or layers keep states or rings.
            OSError: it can't be written; a file of before stays as it was.
            ImportError: safetensors is not installed.
        """
        with self._calls.entered():
            self._stepper.require_cache()
            self._stepper.look()
            return save_prefixes(path, self._kept_prefixes(), self.model.kv_cache, self._identity())

    def restore(self, path: str | os.PathLike[str]) -> int:
        """Know what a `snapshot` of the same model knew: requests to come find it.

        Returns:
            Tokens that were not known before.

        Raises:
            ArgumentError: the file is truncated, altered or no snapshot, or of another model, dtype, block
                size or other scales: says what differs. Or nothing is kept, or requests run. Nothing is
                changed then.
            BlockPoolExhaustedError: it holds more than the pool; nothing is changed then.
            OSError: it can't be read.
            ImportError: safetensors is not installed.
        """
        with self._calls.entered():
            if self._requests:
                raise ArgumentError("path", "given when no request runs", "requests that have not ended")
            if getattr(self.model, "needs_scales", False):
                raise ArgumentError(
                    "kv_scales",
                    "scales of an fp8 cache",
                    "none yet",
                    "give the Generator those of the snapshot's",
                )
            self._stepper.require_cache()
            self._stepper.look()
            return load_prefixes(path, self._kept_prefixes(), self.model.kv_cache, self._identity())

    def _kept_prefixes(self) -> PrefixCache:
        if self.prefix_cache is None or not self.prefix_cache.keeps:
            raise ArgumentError("prefix_cache", "one that keeps blocks", self.prefix_cache_reason)
        return self.prefix_cache

    def _identity(self) -> dict[str, str]:
        """Whose keys and values the pools hold."""
        model = getattr(self.model, "model", self.model)
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        weights = fingerprint(model) if isinstance(model, torch.nn.Module) else type(model).__name__
        scales = [[x.tolist() for x in pair] for pair in getattr(self.model, "kv_scales", ())]
        return {"model_type": str(kind), "weights": weights, "kv_scales": str(scales)}
