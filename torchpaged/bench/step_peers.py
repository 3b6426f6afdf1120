"""The peers of the decode-step benchmark: HuggingFace's own two ways to decode fast, on the same model object.

``hf_static``: ``generate()`` with a static cache, whose decode transformers compiles by itself on a GPU. ``hf_cb``: continuous batching
(``generate_batch``) with FlashAttention-3 where it is installed, else SDPA. A step is ``(t(N new tokens) - t(1 new token)) / (N - 1)``,
so that prefill and set-up cancel. Both receive random prompts of ``context`` tokens.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _result(run: Callable[[int], Any], new_tokens: int, device: torch.device) -> dict[str, Any]:
    """Warm up with the long run, which makes caches and graphs of the final size, then time both."""
    first = _seconds(lambda: run(new_tokens), device)
    samples = []
    for _ in range(3):
        one = _seconds(lambda: run(1), device)
        samples.append((_seconds(lambda: run(new_tokens), device) - one) / (new_tokens - 1) * 1e3)
    samples.sort()
    return {"ms": samples[1], "p20_ms": samples[0], "p80_ms": samples[2], "samples": 3, "first_run_s": first, "new_tokens": new_tokens}


def hf_static(model: Any, batch: int, context: int, new_tokens: int) -> dict[str, Any]:
    """``generate()`` with ``cache_implementation="static"``."""
    device = model.device
    model.set_attn_implementation("sdpa")
    prompts = torch.randint(1, model.config.vocab_size, (batch, context), device=device)

    def run(count: int) -> Any:
        return model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            cache_implementation="static", pad_token_id=0,
        )  # fmt: skip

    try:
        return _result(run, new_tokens, device) | {"attention": "sdpa", "compiled_by": "generate()" if device.type == "cuda" else "nobody"}
    finally:
        torch.compiler.reset()  # the next batch size gets static shapes of its own, and the CUDA graphs' memory comes back


def hf_cb(model: Any, batch: int, context: int, new_tokens: int) -> dict[str, Any]:
    """``generate_batch()``, transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    has_fa3 = model.device.type == "cuda" and importlib.util.find_spec("flash_attn_interface") is not None
    attention = "flash_attention_3" if has_fa3 else "sdpa"
    model.set_attn_implementation(attention)
    prompts = torch.randint(1, model.config.vocab_size, (batch, context)).tolist()
    produced = [0]

    def run(count: int) -> None:
        out = model.generate_batch(
            inputs=prompts, persistent_manager=True, continuous_batching_config=ContinuousBatchingConfig(block_size=256 if has_fa3 else 32),
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=-1, pad_token_id=0, use_cache=False),
        )  # fmt: skip
        produced[0] = sum(len(request.generated_tokens) for request in out.values())

    try:
        entry = _result(run, new_tokens, model.device)
    finally:
        model.destroy_cached_continuous_batching_manager()
    if produced[0] != batch * new_tokens:
        raise RuntimeError(f"generate_batch gave {produced[0]} of {batch * new_tokens} tokens")
    return entry | {"attention": attention}


PEERS: dict[str, Callable[[Any, int, int, int], dict[str, Any]]] = {"hf_static": hf_static, "hf_cb": hf_cb}
