"""``generate()`` of a transformers model, run by the engine.

    torchpaged.hf.accelerate(model, max_batch_size=8, max_seq_len=4096)
    out = model.generate(**inputs, max_new_tokens=128)      # as before

transformers prepares the call as it always does (`generation_config`, padding, stopping criteria) and hands
the loop over; a `Generator` that belongs to the model runs it. What its loop can't do runs in transformers'
own, step by step over a PagedCache, with a warning that says why.
"""

import functools
import inspect
import warnings
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchpaged.custom_ops.checks import switch
from torchpaged.custom_ops.errors import ArgumentError, NotCopyableError, UnsupportedModelError
from torchpaged.engine.call_options import PlainSteps, call_sampling, require_plain_call, without_padding
from torchpaged.engine.generator import Generator
from torchpaged.engine.numbers import shown
from torchpaged.engine.replayed_steps import ReplayedSteps
from torchpaged.engine.sampling import SamplingParams

_PREPARES = "prepare_inputs_for_generation"


class _Generate:
    """``model.generate`` of an accelerated model; its ``generator`` runs the loop."""

    def __init__(self, model: Any, generator: Generator) -> None:
        self._model, self.generator = model, generator
        self.before = vars(model).get("generate")  # of the instance; normally none
        self._accelerated_as = _facts(model)
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.before or functools.partial(type(self._model).generate, self._model)
        # By name: what is refused, and a streamer, may come as positional arguments.
        bound = inspect.signature(type(self._model).generate).bind(self._model, *args, **kwargs)
        call = {**bound.arguments, **kwargs}
        if call.get("custom_generate") is not None:  # the caller brings a loop
            return own(*args, **kwargs)
        require_plain_call(call)
        self._require_unchanged()
        # transformers hands a streamer on to its own loops only.
        bound.arguments["custom_generate"] = _Loop(self.generator, call.get("streamer")).run
        try:
            self._require_no_tokenizer(call)
            return own(*bound.args[1:], **bound.kwargs)
        except PlainSteps as reason:
            said = reason
        warnings.warn(
            "torchpaged: this call of an accelerated model runs step by step in transformers' own loop, "
            f"which is slower: the engine's can't do {said}",
            stacklevel=2,
        )
        for name in ("self", "kwargs", "custom_generate"):
            call.pop(name, None)
        if call.get("streamer") is not None:
            call["streamer"] = _BehindPrompt(call["streamer"])
        from torchpaged.hf import PagedCache  # transformers is optional
        from torchpaged.hf.support import has_paged_cache

        replayed = None
        if has_paged_cache(self._model.config):  # else generate() makes one of transformers'
            loop = self.generator.loop if said.has_beams and self.before is None else None
            cache = PagedCache(self._model.config, said.rows, said.tokens, cascade=loop is None)
            call["past_key_values"] = cache
            if loop is not None:
                replayed = ReplayedSteps(self._model, cache, loop.runner.capture_backend)
                own = functools.partial(type(self._model).generate, replayed.model)
        try:
            with self.generator._calls.held():  # forwards of a fused model must not overlap
                return own(**call)
        finally:
            if replayed is not None:
                replayed.close()

    def _require_no_tokenizer(self, call: dict[str, Any]) -> None:
        """Raise `PlainSteps` for options that need the call's tokenizer, which transformers drops ahead of a
        caller's loop."""
        from torchpaged.hf.call_sizes import option_of, sizes_of_call  # transformers is optional

        for name in ("stop_strings", "token_healing"):
            if call.get("tokenizer") is not None and option_of(self._model, call, name):
                said = PlainSteps(name)
                said.rows, said.tokens = sizes_of_call(self._model, call)
                raise said

    def _require_unchanged(self) -> None:
        """Refuse a model that no longer fits the pools and rows made for it."""
        for name, now in _facts(self._model).items():
            if now != self._accelerated_as[name]:
                raise ArgumentError(
                    "model",
                    f"{name} {self._accelerated_as[name]!r}, as accelerate() found it",
                    repr(now),
                    "call torchpaged.hf.unaccelerate(model) and accelerate it again",
                )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotCopyableError(
            "an accelerated model can't be copied or pickled: its graphs, rows and pools are places in this "
            "process's memory; call torchpaged.hf.unaccelerate(model) first, or save its state_dict()"
        )


def _facts(model: Any) -> dict[str, Any]:
    """What pools, rows and graphs of a model depend on."""
    config, prepares = model.config.get_text_config(decoder=True), getattr(model, _PREPARES)
    return {
        "vocab_size": config.vocab_size,
        "dtype": model.dtype,
        "device": model.device,
        "attn_implementation": config._attn_implementation,
        # The engine does not call it: what one put in by a wrapper adds (a learned prompt) would be lost.
        _PREPARES: getattr(prepares, "__qualname__", type(prepares).__qualname__),
    }


class _BehindPrompt:
    """A streamer that has the prompt already: generate() gives it before each loop."""

    def __init__(self, streamer: Any) -> None:
        self._streamer, self._begun = streamer, False
        self.end = streamer.end

    def put(self, value: Tensor) -> None:
        if self._begun:
            self._streamer.put(value)
        self._begun = True


class _Loop:
    """One call's decoding loop, as transformers calls it."""

    def __init__(self, generator: Generator, streamer: Any) -> None:
        self._generator, self._streamer = generator, streamer

    def run(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers' loops give: prompts, new tokens and padding, ``[rows, length]`` int64."""
        if len(input_ids) == 0:
            raise ArgumentError("input_ids", "one row at least", "none")
        if self._streamer is not None and len(input_ids) != 1:
            raise ArgumentError("streamer", "one row", f"{len(input_ids)} rows", "stream them one by one")
        prompts = without_padding(input_ids, model_kwargs.get("attention_mask"))
        given = logits_processor, stopping_criteria, generation_config, model_kwargs, input_ids
        try:
            call = call_sampling(*given, model.config.model_type)
        except PlainSteps as said:
            ahead = generation_config.prompt_lookup_num_tokens or 0
            said.rows, said.tokens = len(input_ids), generation_config.max_length + ahead
            raise
        self._require_room(max(map(len, prompts)), call.sampling.max_new_tokens)
        # Seeds from torch's own generator: torch.manual_seed repeats a call.
        draws = call.sampling.temperature > 0
        seeds = torch.randint(2**62, (len(prompts),), device="cpu").tolist() if draws else [0] * len(prompts)
        each = [replace(call.sampling, seed=seed) for seed in seeds]
        rows = self._stream(prompts[0], each) if self._streamer is not None else self._generate(prompts, each)
        width = max(len(row) for row in rows)
        padding = call.padding_token if call.padding_token is not None else 0  # rows of one length have none
        padded = [row + [padding] * (width - len(row)) for row in rows]
        new = torch.tensor(padded, dtype=torch.int64, device=input_ids.device)
        sequences = torch.cat([input_ids, new], dim=1)
        if generation_config.return_dict_in_generate:
            from transformers.generation import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _require_room(self, prompt: int, new: int) -> None:
        generator, room = self._generator, self._generator._room
        if prompt + new <= room:
            return
        advice = generator._how_to_raise_room().replace("raise", "give accelerate() a larger")
        limit = f"(accelerate's max_seq_len: {generator.max_seq_len})"
        if prompt >= room:
            expected = f"at most {room - 1} tokens per row {limit}"
            raise ArgumentError("input_ids", expected, str(prompt), f"{advice}shorten the prompt")
        expected = f"at most {room - prompt} for a prompt of {prompt} tokens {limit}"
        raise ArgumentError("max_new_tokens", expected, str(new), f"{advice}ask for fewer")

    def _generate(self, prompts: list[list[int]], each: list[SamplingParams]) -> list[list[int]]:
        outputs = self._generator.generate(prompts, each)
        error = next((output.error for output in outputs if output.error is not None), None)
        if error is not None:
            raise error
        return [output.token_ids for output in outputs]

    def _stream(self, prompt: list[int], each: list[SamplingParams]) -> list[list[int]]:
        tokens: list[int] = []
        request = self._generator.submit(prompt, each[0])
        for event in self._generator.stream([request]):
            if event.error is not None:
                raise event.error
            if event.token_id is not None:
                tokens.append(event.token_id)
                self._streamer.put(torch.tensor([event.token_id], device="cpu"))
        self._streamer.end()
        return [tokens]


def accelerate(
    model: Any,
    *,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    fuse: bool | str = "auto",
    **options: Any,
) -> Any:
    """Let the engine run ``model.generate``, until `unaccelerate`.

    The engine keeps its own paged cache and graphs; on a GPU they are captured here, which takes seconds.
    ``generate()`` keeps its arguments: greedy decoding and sampling (temperature, top-k, top-p, min-p,
    repetition penalty), left padding, several end tokens, ``num_return_sequences``, one row's ``streamer``.
    Greedy tokens are those of transformers' own loop. Sampled ones follow the same distribution, with other
    random numbers; ``torch.manual_seed`` repeats them. Beams, prompt lookup, other logits processors and
    stopping criteria, and scores run in transformers' own loop over a PagedCache, with a warning that says
    so; steps of beams are captured at the call's second one and replayed, unless layers keep rings or states
    or modules have forward hooks. Assistants and caches of the caller are refused.

    Args:
        model: a causal LM of transformers, or a ``PeftModel`` of one, in eval mode from now on; its attention
            implementation becomes "torchpaged".
        max_batch_size: rows that run at once; a larger batch runs in turns.
        max_seq_len: tokens of prompt and output per row; default: the model's, at most 2048.
        fuse: `torchpaged.hf.fuse` the model; "auto": on a GPU.
        options: further ones of `Generator`, for instance ``steps_per_launch`` or ``backend``.

    Returns:
        The model itself.

    Raises:
        ArgumentError: it is accelerated already, or an option of `Generator` is refused.
        BackendUnavailableError, UnsupportedModelError: the engine can't run it.
    """
    from torchpaged.hf.attached import MARK  # transformers is optional
    from torchpaged.hf.model_classes import without_wrapper

    given, model = model, without_wrapper(model)
    if isinstance(getattr(model, "generate", None), _Generate):
        raise ArgumentError(
            "model",
            "a model that is not accelerated",
            "one that is",
            "call torchpaged.hf.unaccelerate(model) first",
        )
    switch("fuse", fuse, "auto")
    put_in = getattr(model, MARK, {}).get(_PREPARES)
    if (vars(model).get(_PREPARES) if put_in is None else put_in.before) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {_PREPARES} was replaced on this model, and the engine would not call "
            "it: delete the attribute, or call generate() with a torchpaged.hf.PagedCache instead"
        )
    if options.get("logits_processor") is not None:
        raise ArgumentError(
            "logits_processor",
            "None: a call may run in transformers' own loop, which would leave it out",
            shown(options["logits_processor"]),
            "give generate() a list of transformers' processors, or use torchpaged.engine.Generator",
        )
    takes = inspect.signature(type(model).generate).parameters if hasattr(type(model), "generate") else {}
    if "custom_generate" not in takes:
        raise UnsupportedModelError(
            f"{type(model).__name__}.generate takes no custom_generate, by which the engine gets the loop; "
            "use torchpaged.engine.Generator"
        )
    fuses = model.device.type == "cuda" if fuse == "auto" else fuse is True
    generator = Generator(
        model, max_batch_size=max_batch_size, max_seq_len=max_seq_len, fuse=fuses, **options
    )
    model.generate = _Generate(model, generator)
    return given


def unaccelerate(model: Any) -> None:
    """Give ``model`` its own ``generate``, attention implementation and mode back, unfuse it if `accelerate`
    fused it, and free the engine's cache and graphs.

    Raises:
        ArgumentError: the model is not accelerated.
    """
    from torchpaged.hf.model_classes import unwrapped  # transformers is optional

    model = unwrapped(model)
    generate = getattr(model, "generate", None)
    if not isinstance(generate, _Generate):
        raise ArgumentError(
            "model", "a model that accelerate() was called on", "one that it was not called on"
        )
    if generate.before is None:
        del model.generate
    else:
        model.generate = generate.before
    generate.generator.close()
