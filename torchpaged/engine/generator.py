"""Generator: requests in, tokens out, continuously batched.

    generator = Generator(model, tokenizer, max_batch_size=8)
    first = generator.submit("Once upon a time")
    for event in generator.stream():
        print(event.text, end="")

With graphs, each step starts a launch of whole decode steps for all running requests (`DecodeLoop`), prefills
a chunk of the waiting ones, and reads the tokens of the launch before. Without, it decodes, samples and
reads, one step at a time. Tokens are the same.

Several threads may use one Generator: one lock lets one call in at a time, and every step moves the requests
of all of them. Each call gets the events of its own requests; one that breaks off, by an error, Ctrl-C or a
``break``, cancels its own and leaves the others running.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchpaged.cache import BlockPool
from torchpaged.custom_ops.errors import ArgumentError, NotCopyableError, TorchpagedError
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.device import WholeStepRunner
from torchpaged.engine.inbox import HandOut, Inbox
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.numbers import shown
from torchpaged.engine.options import (
    check_options,
    decide_compile,
    decide_graphs,
    decide_prefill_buckets,
    paged_model,
    tokens_per_request,
)
from torchpaged.engine.prefill_graphs import PrefillGraphs
from torchpaged.engine.prompts import list_prompts, list_sampling, token_ids
from torchpaged.engine.sampling import SamplingParams
from torchpaged.engine.scheduler import Scheduler
from torchpaged.engine.sequence import RequestOutput, Sequence, TokenEvent
from torchpaged.engine.stats import GeneratorStats
from torchpaged.engine.stepper import Stepper
from torchpaged.engine.text import TextStream
from torchpaged.graphs import CaptureBackend, PackedGraphRunner

if TYPE_CHECKING:
    from torchpaged.fuse import FusionReport

_LOOKAHEAD = 128  # tokens
_GIVE_WAY_SECONDS = (
    1e-4  # for threads that wait for the lock: without it the one that steps would take it again and again
)


class Generator:
    """Continuous batching over one model.

    Args:
        model: a HuggingFace causal LM, or anything like `PagedModelProtocol`.
        tokenizer: for string prompts, text and stop strings; None works with token ids.
        max_batch_size: requests that run at once; more wait.
        max_seq_len: tokens of prompt and output per request; default: the model's, at most 2048.
        block_size: tokens per block; default 16. This, the next two and ``backend`` shape the cache of a
            transformers model; with a model that is paged already they are refused.
        num_blocks: blocks of the pool; default: enough for ``max_batch_size`` requests of ``max_seq_len``.
        kv_cache_memory: bytes for the pool instead.
        backend: attention backend, or "auto".
        prefill_chunk_size: prompt tokens per step.
        fuse: call `torchpaged.hf.fuse` on the model first (docs/fusion.md); for transformers models. One that
            is fused already is taken as it is; the model stays fused afterwards,
            until `torchpaged.hf.unfuse`.
        compile: run the decode step through torch.compile, with graphs; "auto": on a GPU, unless the model is
            fully fused.
        graphs: decode through the graph runner (CUDA graphs on a GPU, the same code run eagerly on a CPU);
            "auto": if the backend can; `graph_reason` says what was decided.
        buckets: batch sizes to capture, the largest of them ``max_batch_size``; default:
            `torchpaged.graphs.default_buckets`, on a CPU every size (no padding).
        steps_per_launch: decode steps in one graph, with graphs. More cost the host less per token; a
            request's tokens come in groups, and one that ends inside a group leaves its row idle until
            the next.
        prefill_buckets: numbers of prompt tokens, of all requests of a step together, for which prefills are
            captured as well; none above ``prefill_chunk_size``. A step of more tokens or of more than 8
            requests is launched from Python. None or []: all are; "auto": on a GPU with graphs, up to 1024
            tokens (`torchpaged.graphs.default_prefill_buckets`), unless the model's prefill can't be captured
            or the backend's graphs are for decodes only; `prefill_graph_reason` says what was decided.
        capture_ahead: capture every bucket now; False: each on first need, in the middle of serving; "auto":
            now on a GPU.
        lookahead: tokens ahead of need that a decoding request gets blocks for while the pool is mostly free;
            default: 128 on a GPU, none on a CPU.
        capture: how steps become graphs, as in `torchpaged.graphs.DecodeGraphRunner`.
        progress: called with ``(done, total, text)`` while buckets are captured.

    Attributes:
        choice: which backend runs and why.
        loop: the decode loop over the device's rows; None without graphs.
        graph_reason, compile_reason: why there are graphs or not, and whether decode steps are compiled.
        fusion_report: what `torchpaged.hf.fuse` did to the model; None if it is not fused.
        stats: counters.

    Raises:
        ArgumentError, BackendUnavailableError, UnsupportedModelError: what was asked can't be had; nothing
            stays allocated then.
        CaptureError: a bucket could not be captured ahead; names the bucket and the op.
        NotCopyableError: it is copied or pickled: its graphs and rows are places in this process's memory.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_batch_size: int = 8,
        max_seq_len: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        backend: str = "auto",
        prefill_chunk_size: int = 512,
        fuse: bool = False,
        compile: bool | str = "auto",
        graphs: bool | str = "auto",
        buckets: Seq[int] | None = None,
        prefill_buckets: Seq[int] | str | None = "auto",
        steps_per_launch: int = 1,
        capture_ahead: bool | str = "auto",
        lookahead: int | None = None,
        capture: str | CaptureBackend = "auto",
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        check_options(
            {
                "max_batch_size": max_batch_size,
                "prefill_chunk_size": prefill_chunk_size,
                "block_size": 1 if block_size is None else block_size,
                "steps_per_launch": steps_per_launch,
                "lookahead": 1 if lookahead is None else lookahead + 1,
            },
            {"compile": compile, "graphs": graphs, "capture_ahead": capture_ahead},
        )
        self.max_seq_len = tokens_per_request(model, max_seq_len)
        self.model: PagedModelProtocol = paged_model(
            model,
            fuse=fuse,
            num_blocks=num_blocks,
            kv_cache_memory=kv_cache_memory,
            block_size=block_size,
            backend=backend,
            max_batch_size=max_batch_size,
            max_seq_len=self.max_seq_len,
            prefill_chunk_size=prefill_chunk_size,
        )
        self.tokenizer, self.choice, self.device = (
            tokenizer,
            self.model.choice,
            torch.device(self.model.device),
        )
        self.fusion_report: FusionReport | None = getattr(self.model, "fusion_report", None)
        cache, on_gpu = self.model.kv_cache, self.device.type == "cuda"
        use_graphs, self.graph_reason = decide_graphs(graphs, self.choice, on_gpu)
        use_compile, self.compile_reason = decide_compile(
            compile, on_gpu, use_graphs, self.graph_reason, self.fusion_report
        )
        if not use_graphs and steps_per_launch != 1:
            raise ArgumentError(
                "steps_per_launch", "1 without graphs", str(steps_per_launch), f"graphs: {self.graph_reason}"
            )
        if steps_per_launch != 1 and self.model.session.plans_every_step:
            raise ArgumentError(
                "steps_per_launch",
                f"1 with backend {self.choice.name!r}, which plans every step on the host",
                str(steps_per_launch),
            )
        prefills, self._prefill_graph_reason = decide_prefill_buckets(
            prefill_buckets,
            prefill_chunk_size,
            on_gpu,
            use_graphs,
            self.graph_reason,
            self.choice.backend.capabilities.graph_support,
        )
        self.pool = BlockPool(cache.num_blocks)
        self.loop: DecodeLoop | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        if use_graphs:
            shared: dict[str, Any] = {
                "max_batch_size": max_batch_size,
                "max_blocks_per_req": -(-self.max_seq_len // cache.block_size),
                "progress": progress,
                "watch": cache.tensors(),
            }
            self.loop = DecodeLoop(
                self.model,
                steps_per_launch=steps_per_launch,
                capture=capture,
                compile=use_compile,
                buckets=buckets if buckets is not None or on_gpu else range(1, max_batch_size + 1),
                **shared,
            )
            ahead = on_gpu if capture_ahead == "auto" else bool(capture_ahead)
            if ahead:
                self.loop.runner.capture()
            if prefills:
                runner = self.loop.runner
                self._prefill_graphs = PrefillGraphs(
                    self.model,
                    prefills,
                    required=prefill_buckets != "auto",
                    reason=self._prefill_graph_reason,
                    capture=runner.capture_backend,
                    pool=runner.pool if ahead else None,
                    **shared,
                )  # a pool outlives a failed capture only if it holds another graph
                if ahead:
                    self._prefill_graphs.capture()
        if lookahead is None:
            lookahead = _LOOKAHEAD if on_gpu and use_graphs else 0
        self.scheduler = Scheduler(
            self.pool,
            cache.block_size,
            max_batch_size,
            prefill_chunk_size,
            steps_per_launch if use_graphs else 0,
            lookahead,
        )
        self._stepper = Stepper(self.model, self.scheduler, self.loop, self._prefill_graphs)
        self._requests, self._next_id = self._stepper.requests, 0
        self.stats: GeneratorStats = self._stepper.stats
        self._lock, self._holder = (
            threading.RLock(),
            0,
        )  # the thread that is inside: a little less long than it has the lock
        self._queue: dict[int, None] = {}  # threads that wait for the lock
        self._inbox = Inbox()
        self._stream_of_all: object | None = None  # the mark of the open stream over all requests
        self._left: deque[list[Sequence] | Inbox] = (
            deque()
        )  # requests of calls that broke off, to be cancelled; of an inbox all

    # ----------------------------------------------------------------------------------------------- requests
    def submit(self, prompt: str | Seq[int], sampling: SamplingParams | None = None) -> int:
        """Queue a request; returns its id. Its events come from `stream` or `step`.

        Args:
            prompt: text, or token ids: integers in a list, an array or a tensor of one dimension.
            sampling: default: `SamplingParams()`.

        Raises:
            ArgumentError: an empty prompt, ids that are no integers or outside the vocabulary, a prompt that
                does not fit ``max_seq_len`` or the pool, or strings without a tokenizer. Nothing else
                is touched.
        """
        sequence = None
        try:
            with self._entered():
                sequence = self._sequence(prompt, sampling, self._inbox)
                self._stepper.add(sequence)
            return sequence.request_id
        except BaseException:
            if sequence is not None:  # interrupted: nobody knows its id
                self._leave([sequence])
            raise

    def cancel(self, request_id: int) -> None:
        """End a request now; its blocks are free at once, its event comes to its owner. Unknown and finished
        ids are refused."""
        with self._entered():
            self._stepper.cancel(request_id)

    def stream(self, request_ids: Seq[int] | None = None) -> Iterator[TokenEvent]:
        """Step until every request is done, giving events as they come.

        Left early, by an error, Ctrl-C, ``break`` or ``close()``, it cancels its requests; to only pause,
        keep the iterator.

        Args:
            request_ids: of submitted requests, which then belong to this stream; default: all that were
                submitted and belong to no other stream, those submitted while it runs included. There can be
                one such stream at a time; threads name their requests.

        Raises:
            ArgumentError: an id that is unknown, finished, or another stream's.
            TorchpagedError: a second stream over all requests.
        """
        if request_ids is None:
            return self._stream(None)
        with self._entered():
            stream = self._stream(self._claim(list(request_ids)), begin=True)
            next(stream)
        return stream

    def generate(
        self, prompts: str | Seq[str | Seq[int]], sampling: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Run ``prompts`` to their ends, in one continuous batch; results in their order.

        Args:
            prompts: strings or lists of token ids. One string is one prompt, as if it stood in a list.
            sampling: for all of them, or one each.

        Returns:
            One result per prompt. A request that failed alone, of NaN logits for instance, has
            ``finish_reason`` "error" and an ``error``.

        Raises:
            ArgumentError: a prompt or parameter that `submit` refuses; then none of them runs.
        """
        texts = list_prompts(prompts)
        each = list_sampling(sampling, len(texts))
        inbox = Inbox()
        with self._entered():
            sequences = [
                self._sequence(text, params, inbox) for text, params in zip(texts, each, strict=True)
            ]
        try:
            with self._entered():
                for sequence in sequences:
                    self._stepper.add(sequence)
            while inbox.live:
                with self._entered():
                    if inbox.live:  # nobody else finished them meanwhile
                        self._stepper.step()
                self._give_way()
        except BaseException:
            self._leave(sequences)
            raise
        return [sequence.result() for sequence in sequences]

    def step(self) -> list[TokenEvent]:
        """One step of the whole batch; returns the events of submitted requests, those of open streams over
        some of them left out.

        If it is interrupted, the next call or stream gives the events that this one did not return.
        """
        handed: HandOut | None = None
        try:
            with self._entered():
                self._stepper.step()
                handed = self._inbox.hand_out()
                handed.take()
            return handed.events
        except BaseException:
            if handed is not None:
                with self._entered():
                    handed.give_back()
            raise

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._inbox.ready)

    # ----------------------------------------------------------------------------------------- whose requests
    def _sequence(self, prompt: Any, sampling: SamplingParams | None, inbox: Inbox) -> Sequence:
        """A request that fits, not queued yet."""
        params = SamplingParams() if sampling is None else sampling
        if not isinstance(params, SamplingParams):
            raise ArgumentError("sampling", "SamplingParams", shown(params))
        if (isinstance(prompt, str) or params.stop) and self.tokenizer is None:
            raise ArgumentError("tokenizer", "a tokenizer for string prompts and stop strings", "None")
        ids = token_ids(
            self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt, self.model.vocab_size
        )
        params.check_vocabulary(self.model.vocab_size)
        room = min(self.max_seq_len, self.pool.num_usable * self.scheduler.block_size)
        if len(ids) >= room:
            raise ArgumentError(
                "prompt",
                f"at most {room - 1} tokens (max_seq_len {self.max_seq_len}, {self.pool.num_usable} blocks "
                "of "
                f"{self.scheduler.block_size})",
                str(len(ids)),
                "raise max_seq_len or num_blocks, or shorten the prompt",
            )
        request_id, self._next_id = self._next_id, self._next_id + 1
        seed = secrets.randbits(63) if params.seed is None else params.seed
        max_len = min(
            len(ids) + params.max_new_tokens, self.max_seq_len, room + 1
        )  # the last token is not stored
        return Sequence(
            request_id, ids, params, seed, TextStream(self.tokenizer, params.stop), max_len, inbox
        )

    def _claim(self, request_ids: list[int]) -> Inbox:
        """An inbox for these submitted requests alone."""
        known = {s.request_id: s for s in (*self._inbox.live, *self._inbox.ready)}
        for request_id in request_ids:
            if request_id not in known:
                raise ArgumentError(
                    "request_ids",
                    "submitted requests that are not done and belong to no other stream",
                    repr(request_id),
                )
        inbox = Inbox()
        for sequence in (known[request_id] for request_id in request_ids):
            for old, new in ((self._inbox.live, inbox.live), (self._inbox.ready, inbox.ready)):
                if sequence in old:
                    new[sequence] = old.pop(sequence)
            sequence.inbox = inbox
        return inbox

    def _stream(self, inbox: Inbox | None, begin: bool = False) -> Iterator[TokenEvent]:
        """``begin``: the first ``next`` gives nothing. From then on it cancels its requests if it is dropped:
        nobody else will take their events."""
        mark = object()
        try:
            if begin:
                yield  # type: ignore[misc]
            if inbox is None:
                with self._entered():
                    if self._stream_of_all is not None:
                        raise TorchpagedError(
                            "stream(): another stream over all requests is open; close() it, or name the "
                            "requests: stream(request_ids)"
                        )
                    self._stream_of_all, inbox = mark, self._inbox
            while inbox.live or inbox.ready:
                with self._entered():
                    if not inbox.ready:
                        self._stepper.step()
                    events = inbox.take()
                self._give_way()
                yield from events
        except BaseException:
            if inbox is not None:
                self._leave(inbox)
            raise
        finally:
            if self._stream_of_all is mark:
                self._stream_of_all = None

    def _leave(self, requests: list[Sequence] | Inbox) -> None:
        """Cancel the requests of a call that broke off."""
        self._left.append(requests)
        if not self._is_inside():  # else, collected as garbage within a step, the next call does it
            with self._entered():
                pass

    def _cancel_left(self) -> None:
        """What `_leave` was told; may be interrupted, and called again. Only under the lock: a `submit` may
        be on its way into an inbox."""
        while self._left:
            requests = self._left[0]
            if requests is self._inbox:
                self._inbox = Inbox()  # what was not taken is of no use to a later call
            for sequence in list(requests.live if isinstance(requests, Inbox) else requests):
                if sequence.request_id in self._requests:
                    self._stepper.cancel(sequence.request_id)
            self._left.popleft()

    # ------------------------------------------------------------------------------------- one call at a time
    def _is_inside(self) -> bool:
        # _is_owned is not public; threading.Condition relies on it. The note alone is not enough: Ctrl-C may
        # leave an old one behind.
        return bool(self._lock._is_owned()) and self._holder == threading.get_ident()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """Hold the lock, and find nothing half done.

        The lock may be taken again by its thread: the garbage collector may close a stream between the lock
        and the note of its holder, where nothing is half done either.
        """
        if self._is_inside():
            raise TorchpagedError(
                "a Generator was called from inside one of its own steps (a callback of the model, "
                "tokenizer or progress)"
            )
        thread = threading.get_ident()
        self._queue[thread] = None
        try:
            with self._lock:
                self._queue.pop(thread, None)
                self._holder = thread
                try:
                    self._stepper.settle()
                    self._cancel_left()
                    yield
                finally:
                    self._holder = 0
        finally:
            self._queue.pop(thread, None)  # interrupted while it waited

    def _give_way(self) -> None:
        if self._queue:
            time.sleep(_GIVE_WAY_SECONDS)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotCopyableError(
            "a Generator can't be copied or pickled: its graphs, rows and pools are places in this "
            "process's memory; copy or "
            "pickle the model, and make a Generator of it where you need one"
        )

    # --------------------------------------------------------------------------------------- what was decided
    @property
    def runner(self) -> WholeStepRunner | None:
        """The graph runner; None without graphs."""
        return None if self.loop is None else self.loop.runner

    @property
    def prefill_runner(self) -> PackedGraphRunner | None:
        """The graph runner of prefills; None without."""
        return None if self._prefill_graphs is None else self._prefill_graphs.runner

    @property
    def prefill_graph_reason(self) -> str:
        """Why prefills have graphs or not."""
        return self._prefill_graph_reason if self._prefill_graphs is None else self._prefill_graphs.reason
