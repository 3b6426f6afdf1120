"""Decode of layers with a state on a CPU, and of two families without: ours beside transformers', a family
at a time.

    PYTHONPATH=. python benchmarks/bench_cpu_states.py [--threads 1] [--batches 1 8] [--families gdn kda ...]
        [--new 24] [--repeats 3] [--dtype float32] [--fused] [--output FILE]

Models of a few layers with random weights, the same memory for all; heads and states have sizes of published
models. ``op_us`` is of one step of the last such layer (a forward's first one also moves a cache's rows on):
its mixer without the ``nn.Linear`` modules; ``mixer_us`` with them. Both are medians over steps of
`generate()`, with transformers' own cache and with a `PagedCache` of the attached model. ``step_us``: one
more token of every request, the difference of two runs with ``--new`` + 1 and 1 new tokens, also of the
engine, and with ``--fused`` of one whose model is fused. Contenders take turns; of steps the fastest is
taken. Of one thread times are its own, so that waiting for a core doesn't count. Tokens are compared first.
The last line is one JSON document.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from documents import command_line, need_native, write_rows
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from model_coverage.architectures import OPTIONS, config_of, with_random_weights

from torchpaged.engine import Generator, SamplingParams
from torchpaged.hf import PagedCache, attach, detach
from torchpaged.hf.families import family_of
from torchpaged.hf.packed_mixers import mixers_of

_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "vocab_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
_ALONE: dict[str, Any] = {"hidden_size": 1024, "vocab_size": 4096, "num_hidden_layers": 4}
#: Family -> model type, and what its config has besides what tests give it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gdn": (
        "qwen3_5_text",
        {
            **_SIZES,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    "kda": (
        "kimi_linear",
        {**_SIZES, "num_key_value_heads": 8, "linear_num_heads": 16, "linear_head_dim": 128},
    ),
    "mamba2": (
        "bamba",
        {**_SIZES, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2},
    ),
    "mamba1": ("mamba", {**_ALONE, "intermediate_size": None, "state_size": 16, "time_step_rank": 64}),
    "lightning": (
        "minimax",
        {**_SIZES, "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
    "short conv": ("lfm2", {**_SIZES, "conv_L_cache": 3}),
    "llama": ("llama", {**_SIZES, "num_hidden_layers": 4}),
    "qwen3": ("qwen3", {**_SIZES, "intermediate_size": 3072, "num_hidden_layers": 6}),
    "rg-lru": ("recurrent_gemma", {**_SIZES, "num_key_value_heads": 1, "lru_width": 2560}),
}
PROMPT = 16


def make(family: str, dtype: torch.dtype) -> Any:
    """The model, as transformers has it."""
    name, sizes = FAMILIES[family]
    config = config_of(name, OPTIONS.get(name, {}) | sizes)
    torch.manual_seed(0)  # of vectors, which `with_random_weights` leaves
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return with_random_weights(model)


@contextlib.contextmanager
def timed_mixer(model: Any, clock: Callable[[], float]) -> Iterator[list[tuple[float, float]]]:
    """Seconds of each call of the last mixer with single tokens: of all, and of its ``nn.Linear`` modules."""
    found: list[tuple[float, float]] = []
    begun: dict[nn.Module, float] = {}
    linears = 0.0

    def start(module: nn.Module, *_: Any) -> None:
        nonlocal linears
        if not isinstance(module, nn.Linear):
            linears = 0.0
        begun[module] = clock()

    def end(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal linears
        spent = clock() - begun[module]
        if isinstance(module, nn.Linear):
            linears += spent
        elif (out[0] if isinstance(out, tuple) else out).shape[1] == 1:
            found.append((spent, linears))

    mixer = [mixer for mixer in mixers_of(model) if hasattr(mixer, "layer_idx")][-1]
    hooks = []
    for module in (mixer, *(part for part in mixer.modules() if isinstance(part, nn.Linear))):
        hooks.append(module.register_forward_pre_hook(start))
        hooks.append(module.register_forward_hook(end, with_kwargs=True))
    yield found
    for hook in hooks:
        hook.remove()


def times_of_mixers(
    plain: Any,
    attached: Any,
    contenders: dict[str, Callable[[int], Any]],
    args: argparse.Namespace,
    clock: Any,
) -> dict[str, Any]:
    """Of the last mixer, what a row says of it."""
    row: dict[str, Any] = {}
    mixers: dict[str, list[tuple[float, float]]] = {"transformers": [], "paged_cache": []}
    for _ in range(args.repeats):
        for (name, found), model in zip(mixers.items(), (plain, attached), strict=True):
            with timed_mixer(model, clock) as spent_in:
                contenders[name](args.new + 1)
            found += spent_in
    for name, found in mixers.items():
        row.setdefault("mixer_us", {})[name] = round(statistics.median(a for a, _ in found) * 1e6, 1)
        row.setdefault("op_us", {})[name] = round(statistics.median(a - b for a, b in found) * 1e6, 1)
    row["op_ratio"] = round(row["op_us"]["transformers"] / row["op_us"]["paged_cache"], 2)
    row["mixer_ratio"] = round(row["mixer_us"]["transformers"] / row["mixer_us"]["paged_cache"], 2)
    return row


def measure(family: str, batch: int, args: argparse.Namespace, clock: Callable[[], float]) -> dict[str, Any]:
    """One row: every contender, in turns."""
    dtype = getattr(torch, args.dtype)
    plain, attached, served = (make(family, dtype) for _ in range(3))
    for other in (attached, served):  # where weights lie makes 10 % and more
        for mine, its in zip(plain.parameters(), other.parameters(), strict=True):
            its.data = mine.data
    attach(attached)
    caches_latents = family_of(served.config.model_type).caches_latents
    if caches_latents:
        served = attach(served)
    vocab = plain.config.vocab_size
    ids = torch.randint(5, vocab, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
    length = PROMPT + args.new + 1
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options["disable_compile"] = True
    sizes: dict[str, Any] = {"max_batch_size": batch, "max_seq_len": length, "share_prefixes": False}
    engines = {"engine": Generator(served, **sizes)}
    if args.fused:  # its weights lie elsewhere: it stacks them
        with torch.inference_mode(False):
            other = make(family, dtype)
            engines["fused"] = Generator(attach(other) if caches_latents else other, fuse=True, **sizes)

    def of_transformers(new: int) -> list[list[int]]:
        return plain.generate(ids, max_new_tokens=new, **options)[:, PROMPT:].tolist()

    def of_cache(new: int) -> list[list[int]]:
        cache = PagedCache(attached.config, batch, length)
        out = attached.generate(ids, max_new_tokens=new, past_key_values=cache, **options)
        return out[:, PROMPT:].tolist()

    def of_engine(engine: Generator, new: int) -> list[list[int]]:
        outs = engine.generate(ids.tolist(), SamplingParams(max_new_tokens=new, ignore_eos=True))
        return [out.token_ids for out in outs]

    contenders = {"transformers": of_transformers, "paged_cache": of_cache}
    contenders |= {name: partial(of_engine, engine) for name, engine in engines.items()}
    want = of_transformers(args.new + 1)
    same = {name: run(args.new + 1) == want for name, run in contenders.items()}
    if dtype == torch.float32 and not all(same.values()):
        raise AssertionError(f"{family}, {batch}: other tokens: {same}")
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    row: dict[str, Any] = {"family": family, "model": plain.config.model_type, "batch": batch}
    row |= {"dtype": args.dtype, "threads": args.threads, "same_tokens": all(same.values())}
    for _ in range(args.repeats):
        for name, run in contenders.items():
            spent = []
            for new in (1, args.new + 1):
                begin = clock()
                run(new)
                spent.append(clock() - begin)
            steps[name].append((spent[1] - spent[0]) / args.new * 1e6)
    row["step_us"] = {name: round(min(each), 1) for name, each in steps.items()}
    row["step_ratio"] = round(row["step_us"]["transformers"] / row["step_us"]["engine"], 2)
    if args.fused:
        row["fused_ratio"] = round(row["step_us"]["transformers"] / row["step_us"]["fused"], 2)
    if mixers_of(plain):
        row |= times_of_mixers(plain, attached, contenders, args, clock)
    for engine in engines.values():
        engine.close()
    detach(attached)
    return row


def main() -> None:
    args = command_line(
        __doc__,
        threads=1,
        batches=[1, 8],
        families={"nargs": "+", "default": list(FAMILIES), "choices": FAMILIES},
        new=24,
        repeats=3,
        dtype={"default": "float32", "choices": ("float32", "bfloat16")},
        fused=False,
        output=str,
    )
    torch.set_num_threads(args.threads)
    need_native()
    clock = time.process_time if args.threads == 1 else time.perf_counter
    rows = []
    with torch.inference_mode():
        for family in args.families:
            for batch in args.batches:
                rows.append(measure(family, batch, args, clock))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    write_rows(rows, args.output, "cpu")


if __name__ == "__main__":
    main()
