"""Generator: requests in, tokens out, continuously batched.

    generator = Generator(model, tokenizer, max_batch_size=8)
    first = generator.submit("Once upon a time")
    for event in generator.stream():
        print(event.text, end="")

With graphs, each step starts a launch of whole decode steps for all running requests (`DecodeLoop`), prefills a chunk of the
waiting ones, and reads the tokens of the launch before. Without, it decodes, samples and reads, one step at a time. Tokens are the
same. Not thread-safe: submit and cancel between steps (from the loop that iterates, for instance).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchpaged.backends import Choice, GraphSupport
from torchpaged.cache import BlockPool
from torchpaged.custom_ops.errors import ArgumentError, BackendUnavailableError
from torchpaged.engine.decode_loop import DecodeLoop
from torchpaged.engine.model import PagedModelProtocol
from torchpaged.engine.sampling import SamplingParams, sample, seen_tokens
from torchpaged.engine.scheduler import Scheduler, Step
from torchpaged.engine.sequence import RequestOutput, Sequence, TokenEvent
from torchpaged.engine.text import TextStream
from torchpaged.graphs import CaptureBackend, DecodeGraphRunner
from torchpaged.metadata import AttentionMetadata, make_semaphore
from torchpaged.profiling import range as profile_range

DEFAULT_MAX_SEQ_LEN = 2048
_LOOKAHEAD = 128  # tokens


@dataclass
class GeneratorStats:
    """Counters since construction. Seconds are of prefill and of decode; a mixed step is split by its parts' time."""

    num_blocks: int
    peak_blocks_used: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    preemptions: int = 0
    steps: int = 0


class Generator:
    """Continuous batching over one model.

    Args:
        model: a HuggingFace causal LM, or anything like `PagedModelProtocol`.
        tokenizer: for string prompts, text and stop strings; None works with token ids.
        max_batch_size: requests that run at once; more wait.
        max_seq_len: tokens of prompt and output per request; default: the model's, at most 2048.
        block_size: tokens per block.
        num_blocks: blocks of the pool; default: enough for ``max_batch_size`` requests of ``max_seq_len``.
        kv_cache_memory: bytes for the pool instead.
        backend: attention backend, or "auto".
        prefill_chunk_size: prompt tokens per step.
        compile: run the decode step through torch.compile; "auto": on a GPU.
        graphs: decode through the graph runner (CUDA graphs on a GPU, the same code run eagerly on a CPU); "auto": if the backend
            can; `graph_reason` says what was decided.
        buckets: batch sizes to capture; default: `torchpaged.graphs.default_buckets`, on a CPU every size (no padding).
        steps_per_launch: decode steps in one graph, with graphs. More cost the host less per token; a request's tokens come in
            groups, and one that ends inside a group leaves its row idle until the next.
        lookahead: tokens ahead of need that a decoding request gets blocks for while the pool is mostly free; default: 128 on a GPU,
            none on a CPU.
        capture: how steps become graphs, as in `DecodeGraphRunner`.
        progress: called with ``(done, total, text)`` while buckets are captured.

    Attributes:
        choice: which backend runs and why.
        loop: the decode loop over the device's rows; None without graphs.
        stats: counters.

    Raises:
        ArgumentError, BackendUnavailableError, UnsupportedModelError: what was asked can't be had; nothing is allocated then.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_batch_size: int = 8,
        max_seq_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        backend: str = "auto",
        prefill_chunk_size: int = 512,
        compile: bool | str = "auto",
        graphs: bool | str = "auto",
        buckets: Seq[int] | None = None,
        steps_per_launch: int = 1,
        lookahead: int | None = None,
        capture: str | CaptureBackend = "auto",
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        for name, size in (("max_batch_size", max_batch_size), ("prefill_chunk_size", prefill_chunk_size),
                           ("steps_per_launch", steps_per_launch), ("lookahead", 1 if lookahead is None else lookahead + 1)):  # fmt: skip
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        for name, value in (("compile", compile), ("graphs", graphs)):
            if value not in (True, False, "auto"):
                raise ArgumentError(name, "True, False or 'auto'", repr(value))
        limit = _max_positions(model)
        self.max_seq_len = min(limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
        if self.max_seq_len < 2 or (limit is not None and self.max_seq_len > limit):
            raise ArgumentError("max_seq_len", f"2 to {limit} tokens (the model's maximum)", str(max_seq_len))
        per_row = -(-self.max_seq_len // block_size)
        if num_blocks is None and kv_cache_memory is None:
            num_blocks = max_batch_size * per_row + 1
        self.model: PagedModelProtocol = _paged(model, num_blocks, kv_cache_memory, block_size, backend)
        self.tokenizer, self.choice, self.device = tokenizer, self.model.choice, torch.device(self.model.device)
        cache = self.model.kv_cache
        self.pool = BlockPool(cache.num_blocks)
        self.stats = GeneratorStats(num_blocks=self.pool.num_usable)
        self._semaphore = make_semaphore(max_batch_size, self.device)  # of steps outside the runner; steps never overlap
        self._requests: dict[int, Sequence] = {}
        self._events: list[TokenEvent] = []
        self._next_id = 0
        on_gpu = self.device.type == "cuda"
        self.loop: DecodeLoop | None = None
        use_graphs, self.graph_reason = _decide_graphs(graphs, self.choice, on_gpu)
        if use_graphs:
            self.loop = DecodeLoop(
                self.model, max_batch_size=max_batch_size, max_blocks_per_req=per_row, steps_per_launch=steps_per_launch,
                capture=capture, buckets=buckets if buckets is not None or on_gpu else range(1, max_batch_size + 1),
                compile=on_gpu if compile == "auto" else bool(compile), progress=progress,
                watch={f"{side}_cache[{i}]": t for i, pools in enumerate(cache) for side, t in zip("kv", pools[:2], strict=True)},
            )  # fmt: skip
            if on_gpu:
                self.loop.runner.capture()
        elif steps_per_launch != 1:
            raise ArgumentError("steps_per_launch", "1 without graphs", str(steps_per_launch), self.graph_reason)
        if lookahead is None:
            lookahead = _LOOKAHEAD if on_gpu and use_graphs else 0
        self.scheduler = Scheduler(
            self.pool, cache.block_size, max_batch_size, prefill_chunk_size, steps_per_launch if use_graphs else 0, lookahead
        )

    # ------------------------------------------------------------------------------------------------ requests
    def submit(self, prompt: str | Seq[int], sampling: SamplingParams | None = None) -> int:
        """Queue a request; returns its id.

        Raises:
            ArgumentError: an empty prompt, a token outside the vocabulary, a prompt that does not fit ``max_seq_len`` or the pool,
                or strings without a tokenizer. Nothing else is touched.
        """
        sampling = SamplingParams() if sampling is None else sampling
        if (isinstance(prompt, str) or sampling.stop) and self.tokenizer is None:
            raise ArgumentError("tokenizer", "a tokenizer for string prompts and stop strings", "None")
        ids = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise ArgumentError("prompt", "at least one token", "an empty prompt")
        wrong = next((token for token in ids if not 0 <= token < self.model.vocab_size), None)
        if wrong is not None:
            raise ArgumentError("prompt", f"token ids in [0, {self.model.vocab_size})", str(wrong))
        room = min(self.max_seq_len, self.pool.num_usable * self.scheduler.block_size)
        if len(ids) >= room:
            raise ArgumentError("prompt", f"at most {room - 1} tokens (max_seq_len {self.max_seq_len}, {self.pool.num_usable} blocks of "
                                f"{self.scheduler.block_size})", str(len(ids)), "raise max_seq_len or num_blocks, or shorten the prompt")  # fmt: skip
        request_id, self._next_id = self._next_id, self._next_id + 1
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        max_len = min(len(ids) + sampling.max_new_tokens, self.max_seq_len, room + 1)  # the last token is not stored
        sequence = Sequence(request_id, ids, sampling, seed, TextStream(self.tokenizer, sampling.stop), max_len)
        self._requests[request_id] = sequence
        self.scheduler.add(sequence)
        self.stats.prompt_tokens += len(ids)
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request now; its blocks are free at once. Unknown and finished ids are refused."""
        sequence = self._requests.get(request_id)
        if sequence is None or sequence.finish_reason is not None:
            raise ArgumentError("request_id", "a request that is waiting or running", str(request_id))
        self._events.append(self._finish(sequence, None, "cancelled"))

    @property
    def runner(self) -> DecodeGraphRunner | None:
        """The graph runner; None without graphs."""
        return None if self.loop is None else self.loop.runner

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._events)

    def stream(self) -> Iterator[TokenEvent]:
        """Step until every request is done, giving events as they come."""
        while self.has_unfinished:
            yield from self.step()

    def generate(self, prompts: Seq[str | Seq[int]], sampling: SamplingParams | Seq[SamplingParams] | None = None) -> list[RequestOutput]:
        """Run ``prompts`` to their ends, in one continuous batch; results in their order.

        Args:
            prompts: strings or lists of token ids.
            sampling: for all of them, or one each.
        """
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise ArgumentError("sampling", f"one SamplingParams per prompt ({len(prompts)})", str(len(each)))
        ids: list[int] = []
        try:
            ids.extend(self.submit(prompt, params) for prompt, params in zip(prompts, each, strict=True))
        except ArgumentError:
            for request_id in ids:
                self.scheduler.remove(self._requests.pop(request_id))
            raise
        sequences = [self._requests[request_id] for request_id in ids]
        while any(sequence.finish_reason is None for sequence in sequences):
            self.step()
        return [sequence.result() for sequence in sequences]

    # ------------------------------------------------------------------------------------------------- one step
    def step(self) -> list[TokenEvent]:
        """One step of the whole batch; returns what happened."""
        with profile_range("step", self.stats.steps), torch.inference_mode():
            return self._step()

    def _step(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        started = time.perf_counter()
        if self.loop is not None and self.loop.in_flight and self.scheduler.short_of_blocks():
            events += self._collect(self.loop, keep=0)  # somebody may be put back: his tokens must be known
        with profile_range("admission", waiting=len(self.scheduler.waiting)):
            plan = self.scheduler.schedule()
        if self.loop is not None:
            for sequence in plan.put_back:
                self.loop.release(sequence)
        between, decoded, prefilled = started, 0 if self.loop is None else self.loop.decoded, sum(count for _, count in plan.chunks)
        if plan.decodes or plan.chunks:
            advance = self._advance if self.loop is None else partial(self._launch, self.loop)
            more, between = advance(plan)
            events += more
        elif self.loop is not None:
            events += self._collect(self.loop, keep=0)
        decoded = len(plan.decodes) if self.loop is None else self.loop.decoded - decoded
        if decoded or prefilled:
            self._count(started, between, time.perf_counter(), decoded, prefilled)
        return events

    def _launch(self, loop: DecodeLoop, plan: Step) -> tuple[list[TokenEvent], float]:
        """Prefill, start a launch, read the one before."""
        for sequence in plan.decodes:
            if sequence.row is None:
                loop.place(sequence)
        if plan.chunks:
            done = [sequence for sequence, count in plan.chunks if count == sequence.remaining]
            logits = self._prefill(plan.chunks)
            for sequence, count in plan.chunks:
                sequence.num_computed += count
            if done:
                loop.finish_prefill(done, logits)
        between = time.perf_counter()
        launched = loop.launch()
        return self._collect(loop, keep=1 if launched else 0), between

    def _collect(self, loop: DecodeLoop, keep: int) -> list[TokenEvent]:
        events = []
        for sequence, tokens in loop.collect(keep):
            for token in tokens:
                if sequence.finish_reason is None:  # what a row produced after a stop that only the host could see is dropped
                    events.append(self._accept(sequence, token))
                    sequence.num_computed = len(sequence) - 1
        return events

    def _advance(self, plan: Step) -> tuple[list[TokenEvent], float]:
        """Decode, prefill, sample and read: a step of an engine without graphs."""
        logits, rows = [], []
        if plan.decodes:
            with profile_range("decode", batch=len(plan.decodes), tokens=len(plan.decodes)):
                logits.append(self._decode(plan.decodes))
            rows += plan.decodes
        between = time.perf_counter()
        if plan.chunks:
            rows += [sequence for sequence, count in plan.chunks if count == sequence.remaining]
            logits.append(self._prefill(plan.chunks))
        for sequence, count in [*((s, 1) for s in plan.decodes), *plan.chunks]:
            sequence.num_computed += count
        if not rows:
            return [], between
        with profile_range("sample", batch=len(rows)):
            tokens = self._sample(torch.cat(logits) if len(logits) > 1 else logits[0], rows).tolist()
        return [self._accept(sequence, token) for sequence, token in zip(rows, tokens, strict=True)], between

    def _sample(self, logits: Tensor, rows: list[Sequence]) -> Tensor:
        params = [sequence.sampling for sequence in rows]
        penalised = any(p.repetition_penalty != 1.0 for p in params)
        seen = seen_tokens([s.tokens for s in rows], logits.shape[1]) if penalised else None
        return sample(logits, params, [s.seed for s in rows], [len(s.output) for s in rows], seen, ops=self.choice.backend.ops)

    def _decode(self, sequences: list[Sequence]) -> Tensor:
        ids = [s.token_at(len(s) - 1) for s in sequences]
        metadata = self._metadata([1] * len(ids), [len(s) for s in sequences], [s.blocks for s in sequences])
        return self.model(self._longs(ids), metadata, None)

    def _prefill(self, chunks: list[tuple[Sequence, int]]) -> Tensor:
        ids = [s.token_at(i) for s, count in chunks for i in range(s.num_computed, s.num_computed + count)]
        lens = [s.num_computed + count for s, count in chunks]
        ends, last = [], -1
        for sequence, count in chunks:
            last += count
            if count == sequence.remaining:
                ends.append(last)
        with profile_range("prefill", batch=len(chunks), tokens=len(ids)):
            metadata = self._metadata([count for _, count in chunks], lens, [s.blocks for s, _ in chunks])
            return self.model(self._longs(ids), metadata, self._longs(ends))

    def _longs(self, numbers: Seq[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)

    def _metadata(self, query_lens: list[int], seq_lens: list[int], tables: list[list[int]]) -> AttentionMetadata:
        return AttentionMetadata.from_lists(
            query_lens, seq_lens, tables, block_size=self.scheduler.block_size, num_blocks=self.pool.num_blocks, device=self.device,
            semaphore=self._semaphore,
        )  # fmt: skip

    def _accept(self, sequence: Sequence, token: int) -> TokenEvent:
        """Add a sampled token; end the request if it is its last."""
        sequence.output.append(token)
        self.stats.new_tokens += 1
        params = sequence.sampling
        if token in params.stop_token_ids or (token in self.model.eos_token_ids and not params.ignore_eos):
            return self._finish(sequence, token, "stop")
        text = sequence.stream.push(token)
        sequence.text += text
        if sequence.stream.stopped:
            return self._finish(sequence, token, "stop", text)
        if len(sequence) >= sequence.max_len:
            return self._finish(sequence, token, "length", text)
        return TokenEvent(sequence.request_id, token, text)

    def _finish(self, sequence: Sequence, token: int | None, reason: str, text: str = "") -> TokenEvent:
        rest = sequence.stream.flush()
        sequence.text += rest
        sequence.finish_reason = reason
        if self.loop is not None:
            self.loop.release(sequence)
        self.scheduler.remove(sequence)
        del self._requests[sequence.request_id]
        return TokenEvent(sequence.request_id, token, text + rest, reason)

    def _count(self, started: float, between: float, ended: float, decodes: int, prefilled: int) -> None:
        stats = self.stats
        if decodes and prefilled and self.device.type == "cuda":  # launches return at once: share the step by tokens
            decode_share = (ended - started) * decodes / (decodes + prefilled)
        elif decodes and prefilled:
            decode_share = between - started
        else:
            decode_share = ended - started if decodes else 0.0
        stats.decode_seconds += decode_share
        stats.prefill_seconds += ended - started - decode_share
        stats.decode_tokens += decodes
        stats.prefill_tokens += prefilled
        stats.steps += 1
        stats.preemptions = self.scheduler.preemptions
        stats.peak_blocks_used = self.pool.peak_used


def _max_positions(model: Any) -> int | None:
    if hasattr(model, "max_position_embeddings"):
        return model.max_position_embeddings
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    return getattr(text, "max_position_embeddings", None)


def _paged(model: Any, num_blocks: int | None, memory: int | None, block_size: int, backend: str) -> PagedModelProtocol:
    if isinstance(model, PagedModelProtocol):
        return model
    from torchpaged.hf import PagedModel  # transformers is optional

    budget = None if num_blocks is not None else memory
    return PagedModel(model, num_blocks=num_blocks, memory_budget=budget, block_size=block_size, backend=backend)


def _decide_graphs(graphs: bool | str, choice: Choice, on_gpu: bool) -> tuple[bool, str]:
    """Whether decode goes through the runner, and why."""
    if graphs is False:
        return False, "switched off by graphs=False"
    support = choice.backend.capabilities.graph_support
    if on_gpu and support == GraphSupport.NEVER:
        reason = f"backend {choice.name!r} declares graph support NEVER"
        if graphs is True:
            raise BackendUnavailableError(f"graphs=True: {reason}; choose another backend or graphs='auto'")
        return False, reason
    return True, f"backend {choice.name!r} declares graph support {support.name}" if on_gpu else "eager capture on a CPU"
