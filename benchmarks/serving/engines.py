"""The engines under load, behind one interface: ours and vLLM 0.26 by its public `LLM` and `LLMEngine`.

Both get models of the same shape, normal weights, bf16 on a GPU, as many rows, as much memory for keys and
values, and a prefix cache. Everything else is what each takes by default, but for the number of tokens of a
step, which vLLM leaves to its user. Text is neither made nor read.
"""

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from decode_step.cases import ModelShape, build_model, model_config

from serving.loads import TEMPERATURE, Request, arrivals_of, spread
from serving.steps import Steps
from torchpaged.engine import Generator, SamplingParams

#: `max_num_batched_tokens` of vLLM.
TOKENS_PER_STEP = 8192
#: Of our engine's statistics.
COUNTED = (
    "prefill_seconds",
    "decode_seconds",
    "prefill_tokens",
    "steps",
    "passes",
    "mixed_steps",
    "late_compiles",
    "preemptions",
)


def sampling_of(request: Request) -> SamplingParams:
    """How our engine goes on with a request."""
    return SamplingParams(request.new_tokens, temperature=TEMPERATURE, ignore_eos=True, seed=request.seed)


class Engine(Protocol):
    """What `serve` and the cases call."""

    start: dict[str, Any]  # seconds of the start, and what was decided

    @property
    def has_unfinished(self) -> bool: ...

    def submit(self, request: Request) -> Any:
        """Queue a request; its name in `step`."""

    def step(self) -> Iterable[Any]:
        """The names of the requests that got a token, once for each token."""

    def finish(self, load: list[Request]) -> None:
        """All of ``load`` at once, to the end."""

    def counters(self) -> dict[str, float]:
        """Counts since the start, of those that the engine keeps."""


class OwnEngine:
    """A `Generator`."""

    def __init__(self, shape: ModelShape, rows: int, max_seq_len: int, options: dict[str, Any]) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        begun = time.perf_counter()
        model = build_model(shape, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        built = time.perf_counter()
        options = {"max_batch_size": rows, "max_seq_len": max_seq_len, "fuse": True, **options}
        self.generator = Generator(model, **options)
        phases = self.generator.start_report.phases
        self.start = {
            "options": options,
            "model_s": built - begun,
            "start_s": time.perf_counter() - built,
            "phases": {phase.name: round(phase.seconds, 2) for phase in phases},
            "backend": self.generator.choice.name,
            "kv_tokens": self.generator.pool.num_blocks * self.generator.model.kv_cache.block_size,
        }

    @property
    def has_unfinished(self) -> bool:
        return self.generator.has_unfinished

    def submit(self, request: Request) -> int:
        return self.generator.submit(request.prompt, sampling_of(request))

    def step(self) -> Iterable[int]:
        return [event.request_id for event in self.generator.step()]

    def finish(self, load: list[Request]) -> None:
        outputs = self.generator.generate(
            [request.prompt for request in load], [sampling_of(request) for request in load]
        )
        made = sum(len(output.token_ids) for output in outputs)
        if made != (asked := sum(request.new_tokens for request in load)):
            raise RuntimeError(f"the engine made {made} tokens of {asked}")

    def counters(self) -> dict[str, float]:
        stats = self.generator.stats
        return {name: getattr(stats, name) for name in COUNTED}


def fill_normal(model: torch.nn.Module) -> int:
    """Weights as `build_model` makes them, in place; the number of their elements."""
    deviation = 0.9 * model.config.hidden_size**-0.5
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, deviation) if weight.dim() > 1 else weight.fill_(1)
    return sum(weight.numel() for weight in model.parameters())


class VLLMEngine:
    """vLLM: FlashAttention, graphs of whole steps and of pieces, prefix cache, asynchronous scheduling.

    All at once goes through `LLM.generate`, which has each request's tokens at its end alone, and arrivals at
    a rate through `LLMEngine`, which has them step by step. Draws have no seeds of their own, which can cost
    vLLM time.
    """

    def __init__(self, shape: ModelShape, rows: int, max_seq_len: int, options: dict[str, Any]) -> None:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for `LLM.apply_model`
        begun = time.perf_counter()
        import vllm

        imported = time.perf_counter()
        folder = Path(tempfile.mkdtemp())
        config = model_config(shape)
        config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.family]]
        config.save_pretrained(folder)
        options = {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": rows,
            "max_model_len": max_seq_len,
            "max_num_batched_tokens": TOKENS_PER_STEP,
            "gpu_memory_utilization": 0.6,
            "kv_cache_memory_bytes": rows * max_seq_len * shape.kv_bytes_per_token(2),
            "attention_backend": "FLASH_ATTN",
            **options,
        }
        self.llm = vllm.LLM(str(folder), **options)
        started = time.perf_counter()
        (weights,) = self.llm.apply_model(fill_normal)
        self._sampling = vllm.SamplingParams
        self._kinds = vllm.sampling_params.RequestOutputKind
        self._count = 0
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.start = {
            "options": options,
            "version": vllm.__version__,
            "import_s": imported - begun,
            "start_s": started - imported,
            "weights": weights,
            "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
            "prefix_cache": cache.enable_prefix_caching,
        }

    @property
    def has_unfinished(self) -> bool:
        return self.llm.llm_engine.has_unfinished_requests()

    def _params(self, request: Request, kind: str) -> Any:
        return self._sampling(
            max_tokens=request.new_tokens,
            temperature=TEMPERATURE,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._kinds[kind],
        )

    def submit(self, request: Request) -> str:
        self._count += 1
        name = f"r{self._count}"
        prompt = {"prompt_token_ids": request.prompt}
        self.llm.llm_engine.add_request(name, prompt, self._params(request, "DELTA"))
        return name

    def step(self) -> Iterable[str]:
        outputs = self.llm.llm_engine.step()
        return [output.request_id for output in outputs for _ in output.outputs[0].token_ids]

    def finish(self, load: list[Request]) -> None:
        outputs = self.llm.generate(
            [{"prompt_token_ids": request.prompt} for request in load],
            [self._params(request, "FINAL_ONLY") for request in load],
            use_tqdm=False,
        )
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != (asked := sum(request.new_tokens for request in load)):
            raise RuntimeError(f"vLLM made {made} tokens of {asked}")

    def counters(self) -> dict[str, float]:
        return {}


ENGINES = {"ours": OwnEngine, "vllm": VLLMEngine}


def serve(
    engine: Engine, load: list[Request], rate: float | None, steps: Steps | None = None
) -> dict[str, Any]:
    """Submit each request at its time (``rate`` None: all at once), read all tokens; seconds. ``steps`` is
    called at each step; what it costs is in them."""
    arrivals = arrivals_of(len(load), rate)
    came: dict[Any, float] = {}
    last: dict[Any, float] = {}
    firsts: list[float] = []
    gaps: list[float] = []
    before, start = engine.counters(), time.perf_counter()
    requests: dict[Any, Request] = {}
    ended, computed = 0.0, before.get("prefill_tokens", 0)
    while len(came) < len(load) or engine.has_unfinished:
        now = time.perf_counter() - start
        while len(came) < len(load) and arrivals[len(came)] <= now:
            request = load[len(came)]
            requests[name := engine.submit(request)] = request
            came[name] = arrivals[len(came)]
        if not engine.has_unfinished:
            time.sleep(max(0.0, arrivals[len(came)] - now))
            continue
        names = engine.step()
        now = time.perf_counter() - start
        for name in names:
            if name in last:
                gaps.append(now - last[name])
            else:
                firsts.append(now - came[name])
            last[name] = now
        if steps is not None:
            prompts = engine.counters().get("prefill_tokens", 0)
            steps.add(now - ended, names, requests, round(prompts - computed))
            ended, computed = now, prompts
    return {
        "rate": rate,
        **rates_of(engine, load, before, time.perf_counter() - start),
        "first_token": spread(firsts),
        "between_tokens": spread(gaps),
    }


def finish(engine: Engine, load: list[Request]) -> dict[str, Any]:
    """All at once, to the end, without a look at single tokens."""
    before, start = engine.counters(), time.perf_counter()
    engine.finish(load)
    return rates_of(engine, load, before, time.perf_counter() - start)


def rates_of(engine: Engine, load: list[Request], before: dict[str, float], seconds: float) -> dict[str, Any]:
    """Tokens and requests per second, and what ``engine`` counted."""
    after = engine.counters()
    return {
        "requests": len(load),
        "seconds": seconds,
        "tok_per_s": sum(request.new_tokens for request in load) / seconds,
        "prompt_tok_per_s": sum(len(request.prompt) for request in load) / seconds,
        "requests_per_s": len(load) / seconds,
        **{name: after[name] - before[name] for name in after},
    }
