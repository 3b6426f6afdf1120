"""Memory and time of layers with a sliding window, whose blocks roll, against the same layers keeping every
token.

    PYTHONPATH=. python benchmarks/bench_sliding.py --shape gemma3-1b --lengths 2048 10240 32768 \\
        --output sliding.json
    # any machine
    PYTHONPATH=. python benchmarks/bench_sliding.py --shape tiny --lengths 512 10240 --dtype fp32

Random weights. For each length, through the engine and a `PagedCache`: bytes of the pools for one
request of so many tokens, blocks of the first layer that hold tokens at its end, milliseconds per token of
the last 64 decode steps (the host's clock) and of the prompt. Fused layers. The last line is the document.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from documents import command_line

import torchpaged.hf
from torchpaged.engine import Generator, SamplingParams

NEW = 64
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": (
        "Gemma3Text",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": 64,
            "vocab_size": 512,
        },
    ),
    "gemma3-1b": (
        "Gemma3Text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "vocab_size": 32768,
        },
    ),
    "mistral-1b": (
        "Mistral",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "vocab_size": 32768,
        },
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make(shape: str, dtype: torch.dtype, device: str, longest: int) -> Any:
    """A model with random weights."""
    name, sizes = SHAPES[shape]
    config = getattr(transformers, f"{name}Config")(
        **sizes, max_position_embeddings=longest + NEW + 1, eos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).to(dtype)
    return model.eval()


def filled(pool: torch.Tensor) -> int:
    """Blocks that hold tokens."""
    return int((pool.flatten(1) != 0).any(1).sum())


def engine(model: Any, length: int, rolling: bool) -> dict[str, Any]:
    """One request of ``length`` tokens, the last `NEW` of them decoded."""
    sizes = {"max_batch_size": 1, "max_seq_len": length, "prefill_buckets": None}
    generator = Generator(model, fuse=True, rolling=rolling, share_prefixes=False, **sizes)
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    prompt = torch.randint(5, model.config.vocab_size, (length - NEW,)).tolist()
    generator.generate([prompt[:32]], params)
    request, begin, times = generator.submit(prompt, params), time.perf_counter(), []
    for _ in generator.stream([request]):
        times.append(time.perf_counter())
    cache = generator.model.kv_cache
    return {
        "pool_bytes": cache.num_bytes,
        "blocks_filled": filled(cache[0].k_cache),
        "prompt_ms": 1e3 * (times[0] - begin),
        "decode_ms": 1e3 * (times[-1] - times[0]) / (len(times) - 1),
    }


def generate(model: Any, length: int, rolling: bool) -> dict[str, Any]:
    """``generate()`` with a `PagedCache`, not compiled."""
    model.set_attn_implementation("torchpaged")
    step = {} if rolling else {"sliding_step": length}
    cache = torchpaged.hf.PagedCache(model.config, 1, length, **step)
    prompt = torch.randint(5, model.config.vocab_size, (1, length - NEW), device=model.device)
    times = []
    for new in (1, NEW):
        cache.reset()
        begin = time.perf_counter()
        call = {"do_sample": False, "max_new_tokens": new, "disable_compile": True}
        model.generate(prompt, past_key_values=cache, **call)[0, -1].item()
        times.append(time.perf_counter() - begin)
    return {
        "pool_bytes": sum(layer.num_bytes for layer in cache.paged),
        "blocks_filled": filled(cache.paged[0].keys),
        "prompt_ms": 1e3 * times[0],
        "decode_ms": 1e3 * (times[1] - times[0]) / (NEW - 1),
    }


def main() -> None:
    """Parse, measure, print."""
    given = command_line(
        __doc__,
        shape={"choices": SHAPES, "default": "tiny"},
        lengths=[512, 10240],
        dtype={"choices": DTYPES, "default": "bf16"},
        output=Path,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    document = {"shape": given.shape, "dtype": given.dtype, "device": where, "torch": torch.__version__}
    model, rows = make(given.shape, DTYPES[given.dtype], device, max(given.lengths)), []
    for length in given.lengths:
        for door in (engine, generate):
            for rolling in (True, False):
                row = {"door": door.__name__, "length": length, "rolling": rolling}
                rows.append(row | door(model, length, rolling))
                text = json.dumps(document | {"new_tokens": NEW, "rows": rows})
                if given.output:
                    given.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
