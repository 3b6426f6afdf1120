"""transformers' ``generate_batch`` of models whose layers keep a state per request, run by the engine.

    model.set_attn_implementation("torchpaged")
    outputs = model.generate_batch(inputs, generation_config=...)       # as before

transformers' cache has places for keys and values alone. Its manager keeps what callers see: threads, queues,
request ids, streaming, pauses, ``GenerationOutput``. The batch processor, which has the cache, the scheduler
and the steps, is one over a `Generator` here, with the methods that the manager's loop calls.
"""

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torchpaged.custom_ops.errors import ArgumentError, TorchpagedError
from torchpaged.engine.call_options import PlainSteps, drawing
from torchpaged.engine.generator import Generator
from torchpaged.engine.outputs import TokenEvent
from torchpaged.engine.sampling import SamplingParams

#: Requests that run at once where no number is given: each has a slot in every layer that keeps states.
DEFAULT_MAX_BATCH_SIZE = 64
#: Fields of transformers' ``ContinuousBatchingConfig`` that stand for something which the engine has not, or
#: decides itself, and the values by which they ask for nothing.
_NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    "max_memory_percent": (None,),
    "use_async_batching": (None, False),
    "q_padding_interval_size": (0,),
    "kv_padding_interval_size": (0,),
    "varlen_compile_config": (None,),
    "decode_compile_config": (None,),
    "default_compile_level": (0,),
    "use_default_compile_configs": (None, False),
    "max_cached_graphs": (None, 0),
    "scheduler_type": ("fifo",),
    "safety_margin": (None,),
    "cpu_offload_space": (0, 0.0),
}
_INSTEAD = {
    "max_memory_percent": "give num_blocks, max_requests_per_batch",
    "cpu_offload_space": "states have no copies on the host; leave it out",
}
#: transformers' own default, which says nothing about a cache that is not its own.
_DEFAULT_PAGE_SIZE = 256


def batch_options(model: Any, generation_config: Any, config: Any, hints: Any = None) -> dict[str, Any]:
    """Options of the `Generator` for a call of ``generate_batch``.

    Args:
        model: of transformers.
        generation_config: its ``GenerationConfig``.
        config: its ``ContinuousBatchingConfig``, as the caller gave it.
        hints: transformers' ``WorkloadHints``, which ``generate_batch`` gives.

    Raises:
        ArgumentError: something in them that the engine has not; by the field's name.
    """
    if getattr(model, "_device_mesh", None) is not None:
        raise ArgumentError("model", "one on a single device, where layers keep states", "a device mesh")
    for name, nothing in _NOTHING_ASKED.items():
        got = getattr(config, name, nothing[0])
        if got not in nothing:
            wants = f"{nothing[0]!r} for a model whose layers keep states, which the engine runs"
            raise ArgumentError(name, wants, repr(got), _INSTEAD.get(name, "leave it out"))
    mode = generation_config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        raise ArgumentError("generation_config", "greedy decoding or sampling in a batch", mode)
    for name in ("stop_strings", "max_time"):
        got = getattr(generation_config, name, None)
        if got is not None:
            raise ArgumentError(name, "None in a batch", repr(got), "leave it out")
    page = config.page_size if hasattr(config, "page_size") else config.block_size
    options = {"max_batch_size": _rows(config, hints), "max_seq_len": _tokens(config, hints, page)}
    if page != _DEFAULT_PAGE_SIZE:
        options["block_size"] = page
    if config.num_blocks is not None:  # and the null block
        options["num_blocks"] = -(-config.num_blocks * page // options.get("block_size", 16)) + 1
    if config.max_batch_tokens is not None:
        options["prefill_chunk_size"] = config.max_batch_tokens
    if not config.allow_block_sharing:
        options["share_prefixes"] = False
    if config.return_logprobs:
        options["max_logprobs"] = 0
    return options | _graphs(config.use_cuda_graph)


def run_by_engine(manager: Any, options: dict[str, Any]) -> None:
    """Give a new ``ContinuousBatchingManager`` a batch processor over a `Generator`.

    Args:
        manager: transformers' manager.
        options: of the `Generator`, from `batch_options`.

    Raises:
        ArgumentError, UnsupportedModelError: the engine can't run the model, or its sampling.
    """
    this = weakref.ref(manager)

    def create() -> Any:
        """In the place of ``_create_batch_processor``, which is not public: a new one behind ``stop``, but
        that of a persistent manager."""
        manager = this()
        assert manager is not None
        return manager.batch_processor or EngineBatches(manager, options)

    manager._create_batch_processor = create
    manager.batch_processor = create()


def _rows(config: Any, hints: Any) -> int:
    """Requests that run at once."""
    asked: int | None = config.max_requests_per_batch
    if asked is not None:
        return asked
    return min(getattr(hints, "num_requests", 0) or DEFAULT_MAX_BATCH_SIZE, DEFAULT_MAX_BATCH_SIZE)


def _tokens(config: Any, hints: Any, page: int) -> int | None:
    """Of a request, prompt and output; None: the engine's default."""
    table = (config.max_blocks_per_request or 0) * page
    if hints is None or not hints.max_generated_length:  # as many as there is room for
        return table or None
    return max(hints.max_prompt_length + hints.max_generated_length, table)


def _graphs(asked: bool | tuple[bool, bool] | None) -> dict[str, Any]:
    """Of steps that compute prompts, and of decodes."""
    if asked is None:
        return {}
    prompts, decodes = (asked, asked) if isinstance(asked, bool) else asked
    if prompts and not decodes:
        raise ArgumentError("use_cuda_graph", "graphs of decodes where prompts have some", repr(asked))
    return {"graphs": decodes, "prefill_buckets": "auto" if prompts else None}


class EngineBatches:
    """What ``ContinuousBatchingManager``'s loop calls of its batch processor, over a `Generator`.

    Args:
        manager: whose queues, router and status it shares.
        options: of the `Generator`, which is closed with the last reference to this; not by the garbage
            collector, which may come in the middle of the capture of another one.

    Attributes:
        generator: runs the requests.
        use_async_batching, inputs_and_outputs: no steps are in flight behind the loop's back.
    """

    use_async_batching = False
    inputs_and_outputs = None

    def __init__(self, manager: Any, options: dict[str, Any]) -> None:
        self._input, self._cancel = manager.input_queue, manager.cancel_queue
        self._router, self._status = manager.output_router, manager.background_thread_status
        self._processors, config = manager.logit_processor, manager.continuous_batching_config
        self._sampling = _sampling(manager.generation_config, self._processors, config.return_logprobs)
        self._seeds = random.Random(config.seed)
        self.generator = Generator(manager.model, **options)
        self._states: dict[int, Any] = {}  # transformers' RequestState by the engine's ids
        self._waiting: dict[int, Any] = {}  # those of them that wait for a row
        self._events: list[TokenEvent] = []

    # ----------------------------------------------------------------------------- what the loop calls
    def prepare_next_batch(self) -> bool:
        """Take new requests and cancellations; whether a step would do anything."""
        status = self._status
        status.update_with_tp_status(status.local_status)  # of one process, which has no group to ask
        if status.tp_status == status.HARD_STOP:
            return False
        if hasattr(status, "is_pause_requested") and status.is_pause_requested():  # not in transformers 5.17
            status.pause_and_wait()
        cancelled = list(_emptied(self._cancel))  # first: of each of these the request has come, too
        for state in _emptied(self._input):
            self._add(state)
        for name in cancelled:
            self._drop(name)
        return bool(self._states)

    def _generation_step(self, model: Any) -> None:
        self._events = self.generator.step()

    def update_batch(self) -> None:
        """Hand out what the step gave."""
        self._mark_started()
        outputs = []
        for event in self._events:
            state = self._states.get(event.request_id)
            if state is None:  # cancelled
                continue
            self._take(event, state)
            if event.finish_reason is not None:
                del self._states[event.request_id]
            if state.streaming or event.finish_reason is not None:
                outputs.append(state.to_generation_output())
        self._events = []
        if outputs:
            self._router.deliver_batch(outputs)

    def has_pending_requests(self) -> bool:
        """Whether any has not ended."""
        return bool(self._states)

    def fail_all_requests(self, error: Exception) -> None:
        """End all requests with ``error``."""
        for request_id, state in self._states.items():
            self.generator.cancel(request_id)
            self._handle_request_error(error, state)
        self._states, self._waiting = {}, {}

    def _handle_request_error(self, error: Exception, state: Any) -> None:
        self._router.fail_and_deliver(state, error)

    def warmup(self, model: Any) -> None:
        """Nothing: the `Generator` warms up when it is made."""

    # ------------------------------------------------------------------------------------- requests
    def _add(self, state: Any) -> None:
        """Queue a request and its children; one that is refused fails alone."""
        try:
            self._processors.check_kwargs(state.logit_processor_kwargs)
            params = self._params(state)
            names = [f"{state.request_id}__child#{i}" for i in range(state.num_children)]
            for one in (state, *map(state.fork, names)):
                seeded = replace(params, seed=self._seeds.getrandbits(63))
                request_id = self.generator.submit(state.initial_tokens, seeded)
                self._states[request_id] = self._waiting[request_id] = one
        except (TorchpagedError, TypeError, ValueError) as error:
            self._handle_request_error(error, state)

    def _params(self, state: Any) -> SamplingParams:
        generator, prompt = self.generator, len(state.initial_tokens)
        most = max(generator._room - prompt, 1)
        new = most if state.max_new_tokens is None else state.max_new_tokens
        if new > most:
            raise ArgumentError(
                "max_new_tokens",
                f"at most {most} for a prompt of {prompt} tokens, by the manager's sizes",
                str(new),
                "give max_blocks_per_request, num_blocks, or a new manager",
            )
        ends = state.eos_token_id
        stops = tuple(t for t in ([ends] if isinstance(ends, int) else ends or ()) if t >= 0)
        own = {
            name: state.logit_processor_kwargs[name]
            for name in ("temperature", "top_k", "top_p")
            if name in state.logit_processor_kwargs
        }
        return replace(self._sampling, max_new_tokens=new, stop_token_ids=stops, **own)

    def _drop(self, name: str) -> None:
        """End the request of that name, of which nothing more is heard."""
        for request_id, state in list(self._states.items()):
            if state.request_id == name:
                del self._states[request_id]
                self._waiting.pop(request_id, None)
                self.generator.cancel(request_id)

    def _mark_started(self) -> None:
        """From here on a request's ``lifespan`` counts."""
        from transformers.generation.continuous_batching import RequestStatus

        if not self._waiting:
            return
        waits = {sequence.request_id for sequence in self.generator.scheduler.waiting}
        for request_id in [n for n in self._waiting if n not in waits]:
            self._waiting.pop(request_id).status = RequestStatus.PREFILLING

    def _take(self, event: TokenEvent, state: Any) -> None:
        from transformers.generation.continuous_batching import RequestStatus

        if event.token_id is not None:
            state.status = RequestStatus.DECODING
            state.update_and_check_completion(
                event.token_id, None if event.logprobs is None else event.logprobs[event.token_id]
            )
        if event.finish_reason is not None and state.status != RequestStatus.FINISHED:
            state.status = RequestStatus.FAILED
            state.error = str(event.error or f"no room for further tokens ({event.finish_reason})")


def _emptied(queue: Any) -> Iterator[Any]:
    """What is in a queue; this thread alone takes from it."""
    while not queue.empty():
        yield queue.get_nowait()


def _sampling(config: Any, processors: Any, return_logprobs: bool) -> SamplingParams:
    """How tokens of all requests are drawn, by the processors that transformers has left in its list.

    Raises:
        ArgumentError: one of them is not known to the engine, or log probabilities are asked for of other
            logits than the model's.
    """
    from transformers.generation.continuous_batching import cb_logits_processors as known

    given = list(processors.logits_processor)
    if given and return_logprobs:
        raise ArgumentError(
            "return_logprobs",
            "False where logits are processed: the engine's are of the model's own logits",
            f"True with {type(given[0]).__name__}",
            "leave out what processes them (top_k, for one), or read scores of generate()",
        )
    per_request = {ours: theirs for theirs, ours in known.CLASSIC_TO_CB_PROCESSORS_MAP.items()}
    try:
        drawn = drawing(given, None, per_request)
    except PlainSteps as said:
        raise ArgumentError("generation_config", "what the engine can do in a batch", str(said)) from None
    if config.do_sample:
        drawn.setdefault("temperature", 1.0)
    elif extra := [name for name in drawn if name != "repetition_penalty"]:
        raise ArgumentError("generation_config", "do_sample=True with it", extra[0])
    return SamplingParams(ignore_eos=True, logprobs=0 if return_logprobs else None, **drawn)
