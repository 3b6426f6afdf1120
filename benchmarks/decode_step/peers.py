"""The peers of the decode-step benchmark: HuggingFace's own two ways to decode fast, on the same
model object.

``hf_static``: ``generate()`` with a static cache, whose decode transformers compiles by itself on a GPU.
``hf_cb``: continuous batching (``generate_batch``) with FlashAttention-3 where transformers finds it, else
SDPA. Both receive random prompts of ``context`` tokens, once to compile, capture and warm up, once to be
timed. A step is the time from token to token on the host while all requests decode, so that prefill and
set-up stay out: ``hf_static`` waits for each token, and of ``hf_cb`` these are transformers' own timestamps.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

_LEAST_STEPS = 4


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def common_steps_ms(stamps: Sequence[Sequence[float]]) -> list[float]:
    """Milliseconds between the tokens of the request that began last, up to the first end of any.

    Args:
        stamps: seconds at which each request's tokens came.

    Raises:
        RuntimeError: hardly any step had all requests in it.
    """
    last = max(stamps, key=lambda times: times[0])
    ended = min(times[-1] for times in stamps)
    steps = [(after - before) * 1e3 for before, after in itertools.pairwise(last) if after <= ended]
    if len(steps) < _LEAST_STEPS:
        raise RuntimeError(f"{len(steps)} steps with all requests in them: raise new_tokens")
    return steps


def _figures(steps: list[float], first_run_s: float) -> dict[str, Any]:
    cuts = statistics.quantiles(steps, n=5, method="inclusive")
    return {
        "ms": statistics.median(steps),
        "p20_ms": cuts[0],
        "p80_ms": cuts[3],
        "samples": len(steps),
        "first_run_s": first_run_s,
    }


def hf_static(model: Any, batch: int, context: int, new_tokens: int) -> dict[str, Any]:
    """``generate()`` with ``cache_implementation="static"``."""
    from transformers import LogitsProcessorList

    device = model.device
    model.set_attn_implementation("sdpa")
    prompts = torch.randint(1, model.config.vocab_size, (batch, context), device=device)
    stamps: list[float] = []

    def stamp(_: Any, scores: Any) -> Any:
        stamps.append(time.perf_counter())
        return scores

    def run() -> Any:
        stamps.clear()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
            logits_processor=LogitsProcessorList([stamp]),
        )

    try:
        first = _seconds(run, device)
        run()
        entry = _figures(common_steps_ms([stamps]), first)
        return entry | {
            "new_tokens": new_tokens,
            "attention": "sdpa",
            "compiled_by": "generate()" if device.type == "cuda" else "no compiler",
        }
    finally:
        # the next batch size gets static shapes of its own, and the CUDA graphs' memory comes back
        torch.compiler.reset()


def hf_cb(model: Any, batch: int, context: int, new_tokens: int) -> dict[str, Any]:
    """``generate_batch()``, transformers' continuous batching; its cache holds twice what the
    requests need."""
    from transformers.utils import is_flash_attn_3_available

    has_fa3 = model.device.type == "cuda" and is_flash_attn_3_available()
    attention, block_size = ("flash_attention_3", 256) if has_fa3 else ("sdpa", 32)
    return generate_batch(model, batch, context, new_tokens, attention, block_size)


def generate_batch(
    model: Any, batch: int, context: int, new_tokens: int, attention: str, block_size: int, **config: Any
) -> dict[str, Any]:
    """A step of ``generate_batch()`` by the attention of that name; ``config``: more of
    ``ContinuousBatchingConfig``."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model.set_attn_implementation(attention)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.config.vocab_size, (batch, context), generator=generator).tolist()
    batching = ContinuousBatchingConfig(
        block_size=block_size,
        num_blocks=2 * batch * -(-(context + new_tokens) // block_size),
        max_batch_tokens=min(8192, batch * context),
        **config,
    )
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0, use_cache=False
    )
    stamps: list[list[float]] = []

    def run() -> None:
        out = model.generate_batch(
            inputs=prompts,
            persistent_manager=True,
            continuous_batching_config=batching,
            generation_config=generation,
            record_timestamps=True,
        )
        produced = sum(len(request.generated_tokens) for request in out.values())
        if produced != batch * new_tokens:
            raise RuntimeError(f"generate_batch gave {produced} of {batch * new_tokens} tokens")
        stamps[:] = [request.timestamps for request in out.values()]

    try:
        first = _seconds(run, model.device)
        run()
    finally:
        model.destroy_cached_continuous_batching_manager()
    return _figures(common_steps_ms(stamps), first) | {"new_tokens": new_tokens, "attention": attention}


PEERS: dict[str, Callable[[Any, int, int, int], dict[str, Any]]] = {"hf_static": hf_static, "hf_cb": hf_cb}
