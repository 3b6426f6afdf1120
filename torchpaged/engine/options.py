"""GeneratorOptions: what a `Generator` takes besides its model, declared once, checked where it is made."""

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Concatenate, ParamSpec

import torch

from torchpaged.backends import Route
from torchpaged.backends.choose.names import check_backend
from torchpaged.cache.eviction import EvictionPolicy, check_policy
from torchpaged.custom_ops.checks import switch
from torchpaged.custom_ops.errors import ArgumentError
from torchpaged.engine.device.logits_stage import LogitsProcessor, LogitsStage
from torchpaged.engine.numbers import as_float, as_integer, shown
from torchpaged.graphs import CaptureBackend
from torchpaged.graphs.capture_options import check_capture, check_progress
from torchpaged.prefixes import CascadeCosts
from torchpaged.prefixes.costs import check_cascade

P = ParamSpec("P")
#: Times ``prefill_chunk_size``: tokens of a step in which nothing decodes.
_ALONE = 4
#: What happens to keys and values of requests that are put back.
PREEMPTIONS = ("auto", "recompute", "swap")


@dataclass(frozen=True)
class GeneratorOptions:
    """As `Generator` documents them.

    Raises:
        ArgumentError: one of another type or out of range, or two that exclude each other; what depends on
            the model is refused by `torchpaged.engine.decisions` and `torchpaged.engine.paged`.
    """

    tokenizer: Any = None
    _: KW_ONLY
    max_batch_size: int = 8
    max_seq_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    backend: str | Route | None = "auto"
    kv_dtype: str | torch.dtype | None = None
    kv_scales: Any = "head"
    rolling: bool | str = "auto"
    prefill_chunk_size: int = 2048
    mixed_steps: bool | str = "auto"
    max_decode_wait: float | None = None
    fuse: bool = False
    compile: bool | str = "auto"
    graphs: bool | str = "auto"
    buckets: Sequence[int] | None = None
    prefill_buckets: Sequence[int] | str | None = "auto"
    steps_per_launch: int = 1
    capture_ahead: bool | str = "auto"
    warm_up: bool | str = "auto"
    lookahead: int | None = None
    capture: str | CaptureBackend = "auto"
    share_prefixes: bool | str = "auto"
    prefix_cache: bool | str = "auto"
    eviction: EvictionPolicy | None = None
    host_cache_memory: int | None = None
    disk_cache_path: str | os.PathLike[str] | None = None
    disk_cache_size: int | None = None
    preemption: str = "auto"
    num_checkpoints: int | None = None
    checkpoint_every: int | None = None
    cascade: bool | CascadeCosts = True
    batch_invariant: bool = False
    logits_processor: LogitsProcessor | None = None
    max_extra_args: int = 0
    max_logit_bias: int = 0
    max_logprobs: int | None = None
    progress: Callable[[int, int, str], None] | None = None

    def __post_init__(self) -> None:
        self._check_tokenizer()
        for name in ("max_batch_size", "prefill_chunk_size", "block_size", "steps_per_launch"):
            self._check_size(name)
        self._check_size("checkpoint_every")
        for name in ("num_checkpoints", "lookahead", "max_extra_args", "max_logit_bias", "max_logprobs"):
            self._check_size(name, 0)
        for name in (
            "compile",
            "graphs",
            "capture_ahead",
            "warm_up",
            "share_prefixes",
            "prefix_cache",
            "rolling",
            "mixed_steps",
        ):
            switch(name, getattr(self, name), "auto")
        switch("fuse", self.fuse)
        switch("batch_invariant", self.batch_invariant)
        check_capture(self.capture)
        check_progress(self.progress)
        check_cascade(self.cascade)
        check_backend(self.backend)
        check_policy(self.eviction)
        self._check_host()
        self._check_wait()
        self._check_memory()
        self._check_prefill_buckets()
        self._check_processor()
        if self.prefix_cache is True and self.share_prefixes is False:
            raise ArgumentError("prefix_cache", "'auto' or False with share_prefixes=False", "True")
        if self.rolling is True and self.shall_share is not None and self.checkpoints == 0:
            raise ArgumentError(
                self.shall_share,
                "False or 'auto' with rolling=True and num_checkpoints=0",
                "True",
                "layers with a window keep nothing of a prefix that another request could take; give "
                "rolling=False to share",
            )

    def _check_tokenizer(self) -> None:
        decodes = callable(self.tokenizer) and callable(getattr(self.tokenizer, "decode", None))
        if self.tokenizer is not None and not decodes:
            raise ArgumentError(
                "tokenizer",
                'a tokenizer, for tokenizer(text)["input_ids"] and tokenizer.decode(ids), or None',
                shown(self.tokenizer),
                "without one prompts are token ids",
            )

    def _check_processor(self) -> None:
        given = self.logits_processor
        if given is not None and not callable(given):
            raise ArgumentError("logits_processor", "a callable of (logits, rows), or None", shown(given))
        if given is None and self.max_extra_args:
            raise ArgumentError(
                "max_extra_args",
                "0 without a logits_processor, which alone reads them",
                str(self.max_extra_args),
            )

    def _check_size(self, name: str, least: int = 1) -> None:
        """Refuse what is no integer of at least ``least``; None where it is the default."""
        given = getattr(self, name)
        number = as_integer(given)
        if given is None and getattr(GeneratorOptions, name) is None:
            return
        if number is None or number < least:
            kind = "" if number is not None else "an integer of "
            raise ArgumentError(name, f"{kind}at least {least}", shown(given))

    def _check_wait(self) -> None:
        given = self.max_decode_wait
        seconds = None if given is None else as_float(given)
        if given is not None and (seconds is None or not 0 < seconds < math.inf):
            raise ArgumentError("max_decode_wait", "None or seconds above 0", shown(given))
        if given is not None and self.batch_invariant:
            wants = "with batch_invariant=True: chunks would follow the clock"
            raise ArgumentError("max_decode_wait", f"None {wants}", shown(given))

    def _check_memory(self) -> None:
        blocks, memory = self.num_blocks, self.kv_cache_memory
        if blocks is not None and (as_integer(blocks) is None or blocks < 2):
            raise ArgumentError(
                "num_blocks", "None or an integer of at least 2 (block 0 is the null block)", repr(blocks)
            )
        if memory is not None and (as_integer(memory) is None or blocks is not None):
            raise ArgumentError(
                "kv_cache_memory",
                "None or bytes as an integer, and no num_blocks with it",
                repr(memory) if blocks is None else f"{memory!r} and {blocks} blocks",
                "for 1 GiB give 2**30",
            )

    def _check_host(self) -> None:
        self._check_size("host_cache_memory")
        self._check_disk()
        if self.preemption not in PREEMPTIONS:
            expected = " or ".join(map(repr, PREEMPTIONS))
            raise ArgumentError("preemption", expected, shown(self.preemption))
        if self.preemption == "swap" and self.host_cache_memory is None and self.disk_cache_path is None:
            expected = "'auto' or 'recompute' without host_cache_memory, where blocks would go"
            raise ArgumentError("preemption", expected, "'swap'")

    def _check_disk(self) -> None:
        self._check_size("disk_cache_size")
        path, size = self.disk_cache_path, self.disk_cache_size
        if (path is None) is not (size is None):
            expected = "a folder with disk_cache_size, and bytes with disk_cache_path"
            missing = "disk_cache_path" if path is None else "disk_cache_size"
            raise ArgumentError(missing, expected, "None", "for 100 GiB give disk_cache_size=100 * 2**30")
        if path is not None and not (isinstance(path, str | os.PathLike) and os.path.isdir(path)):
            raise ArgumentError("disk_cache_path", "None or a folder that exists", shown(path))

    def _check_prefill_buckets(self) -> None:
        given, most = self.prefill_buckets, self.prompt_tokens
        if given is None or given == "auto":
            return
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise ArgumentError("prefill_buckets", "numbers of tokens, None or 'auto'", repr(given))
        if any(as_integer(bucket) is None or not 1 <= bucket <= most for bucket in given):
            raise ArgumentError(
                "prefill_buckets",
                f"numbers of tokens from 1 to {most}, {most // self.prefill_chunk_size} x prefill_chunk_size",
                str(list(given)),
            )

    @property
    def shall_share(self) -> str | None:
        """The option by which requests shall share blocks; None: they may or may not."""
        return next((n for n in ("share_prefixes", "prefix_cache") if getattr(self, n) is True), None)

    @property
    def checkpoints(self) -> int | None:
        """As `torchpaged.hf.PagedModel` takes ``num_checkpoints``."""
        return 0 if self.share_prefixes is False or self.batch_invariant else self.num_checkpoints

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a step in which nothing decodes, at most: see `Scheduler`."""
        return self.prefill_chunk_size * (1 if self.batch_invariant else _ALONE)

    @property
    def step_tokens(self) -> int:
        """Tokens of a step at most: see `Scheduler`, whose chunks leave the decodes room."""
        chunk, rows = self.prefill_chunk_size, self.max_batch_size
        return max(chunk, rows if self.mixed_steps is False else -(-chunk // 2) + rows)

    @property
    def logits_stage(self) -> LogitsStage:
        """A new one, of what was asked for."""
        return LogitsStage(self.logits_processor, self.max_extra_args, self.max_logit_bias, self.max_logprobs)

    @property
    def rolls(self) -> bool:
        """Whether layers with a window may keep rings of blocks."""
        return self.shall_share is None if self.rolling == "auto" else self.rolling is True


def taking(
    make: Callable[P, GeneratorOptions],
) -> Callable[[Callable[[Any, Any, GeneratorOptions], None]], Callable[Concatenate[Any, Any, P], None]]:
    """An ``__init__(self, model, options)`` that takes the options by their names instead."""

    def of(init: Callable[[Any, Any, GeneratorOptions], None]) -> Callable[Concatenate[Any, Any, P], None]:
        before = list(inspect.signature(init).parameters.values())[:2]
        taken = inspect.signature(make)
        signature = taken.replace(parameters=[*before, *taken.parameters.values()])

        @functools.wraps(init)
        def made(self: Any, model: Any, *args: P.args, **kwargs: P.kwargs) -> None:
            try:  # an unknown name is the caller's, not the record's
                signature.bind(self, model, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}() {error}") from None
            init(self, model, make(*args, **kwargs))

        made.__signature__ = signature  # type: ignore[attr-defined]
        return made

    return of
