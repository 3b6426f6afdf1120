"""Blocks on a disk: bytes per second there and back, and a prompt that is found there next to one that is
computed.

    PYTHONPATH=. python benchmarks/bench_disk.py [--folder FOLDER] [--mib 1024] [--shape NAME] [--prompt 1024]
        [--output FILE]

Rates: of blocks of three sizes, checksums included. ``write``: into the memory of the system, ``synced``:
until the disk has them; ``cold``: after the system was told to forget them, ``cached``: once more. Hits:
seconds to the first token of a prompt of a small model in float32 on a CPU, or of ``--shape`` of
`decode_step.cases` in bfloat16 on a GPU, fused; of each the median. Break-even: the disk's rate below which a
model computes a prompt faster than it comes back, from bytes and products per token alone. The last line is
one JSON document.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from decode_step.cases import build_model, select_shapes
from documents import command_line, finish
from measuring import conditions

from torchpaged.cache.disk_blocks import DiskBlocks
from torchpaged.cache.disk_tier import DiskTier
from torchpaged.engine import Generator, SamplingParams

#: Bytes of a block of 16 tokens, 16 bit: of Llama 8B, of Llama 1B, of one layer of 8 heads of 128.
ROWS = {"8B": 2**21, "1B": 2**19, "one layer": 2**16}
#: Parameters, layers, kv heads, head_dim.
MODELS = {
    "Llama 1B": (1.24e9, 16, 8, 64),
    "Qwen3 0.6B": (0.6e9, 28, 8, 128),
    "Llama 8B": (8.03e9, 32, 8, 128),
    "Llama 70B": (70.6e9, 80, 8, 128),
}
PRODUCTS = 700e12  # per second, 16 bit, of an H200
OUT, PROMPTS, REPEATS = SamplingParams(max_new_tokens=1, ignore_eos=True), 12, 3


def rates(folder: str, size: int) -> dict[str, dict[str, float]]:
    """GB/s by block size."""
    found = {}
    for name, row_bytes in ROWS.items():
        disk = DiskBlocks(folder, size, row_bytes)
        data = torch.randint(256, (64 * 2**20 // row_bytes, row_bytes), dtype=torch.uint8)
        rows = [(slot, data[slot % len(data)]) for slot in range(disk.num_slots)]
        into = [(slot, torch.empty(row_bytes, dtype=torch.uint8)) for slot, _ in rows]
        for _, row in into:
            row.zero_()  # its memory is there
        bytes_, seconds = disk.num_slots * row_bytes, {}
        began = time.perf_counter()
        checksums: Any = disk.write(rows, lambda: None).wait()
        seconds["write"] = time.perf_counter() - began
        disk.forget_cached()
        seconds["synced"] = time.perf_counter() - began
        for how in ("cold", "cached"):
            began = time.perf_counter()
            assert not any(disk.read(into, checksums, lambda: None).wait())
            seconds[how] = time.perf_counter() - began
        found[name] = {how: bytes_ / value / 1e9 for how, value in seconds.items()}
        disk.close()
        print(name, found[name], file=sys.stderr)
    return found


def small_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
        )
    ).eval()


def hits(folder: str, shape: str | None, tokens: int) -> dict[str, float]:
    """Seconds to the first token of prompts of ``tokens``."""
    model = small_model()
    if shape is not None:
        model = build_model(select_shapes([shape])[0], torch.device("cuda"), torch.bfloat16)
    blocks, config = tokens // 16 + 2, model.config
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    options: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": tokens + 16, "num_blocks": 2 * blocks}
    options["disk_cache_size"] = PROMPTS * blocks * 16 * elements * model.dtype.itemsize
    generator = Generator(model, **options, disk_cache_path=folder, fuse=shape is not None)
    assert generator.prefix_cache is not None
    tier, stats = generator.prefix_cache.host, generator.stats.prefix_cache
    assert isinstance(tier, DiskTier)
    tier.recompute_seconds = None  # whatever is found there comes back, so that both ways are seen
    draws = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 1000, (PROMPTS, tokens), generator=draws).tolist()
    found: dict[str, list[float]] = {}

    def first_token(prompt: list[int]) -> tuple[str, float]:
        before = stats.host_tokens, stats.disk_tokens, stats.hit_tokens
        began = time.perf_counter()
        generator.generate([prompt], OUT)
        seconds = time.perf_counter() - began
        tier._settle_writes()
        host, disk, hit = stats.host_tokens, stats.disk_tokens, stats.hit_tokens
        if disk > before[1]:
            return "disk", seconds
        return "host" if host > before[0] else "pool" if hit > before[2] else "computed", seconds

    first_token(prompts[0])
    for _ in range(REPEATS):
        generator.reset_prefix_cache()
        for prompt in prompts:
            kind, seconds = first_token(prompt)
            found.setdefault(kind, []).append(seconds)
        for prompt in (prompts[-1], prompts[-2], prompts[-3]):
            kind, seconds = first_token(prompt)
            found.setdefault(kind, []).append(seconds)
        for cold in (True, False):
            for prompt in prompts[:4]:
                if cold:
                    tier.disk.forget_cached()
                kind, seconds = first_token(prompt)
                name = f"{kind}, cold" if cold and kind == "disk" else kind
                found.setdefault(name, []).append(seconds)
    result = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    result["bytes_per_token"] = generator.model.kv_cache.bytes_per_block / 16
    generator.close()
    return result


def break_even() -> dict[str, dict[str, float]]:
    """GB/s of a disk that is as fast as computing, at `PRODUCTS`; attention itself left out, so that longer
    prompts need less."""
    found = {}
    for name, (parameters, layers, heads, dim) in MODELS.items():
        bytes_per_token, per_second = 2 * 2 * layers * heads * dim, PRODUCTS / (2 * parameters)
        found[name] = {
            "kib_per_token": bytes_per_token / 1024,
            "tokens_per_s": per_second,
            "gb_per_s": bytes_per_token * per_second / 1e9,
        }
    return found


def main() -> None:
    args = command_line(
        __doc__,
        folder=(str, "on the disk; default: a temporary one"),
        mib=(1024, "written and read for each rate"),
        output=Path,
        shape=(str, "of the model on a GPU; default: a small one on a CPU"),
        prompt=(1024, "tokens of a prompt of the hits"),
    )
    device = torch.device("cuda" if args.shape else "cpu")
    document: dict[str, Any] = {"prompt": args.prompt, "conditions": conditions.collect(device)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        document["gb_per_s"] = rates(folder, args.mib * 2**20)
        document["first_token_s"] = hits(folder, args.shape, args.prompt)
    document["break_even"] = break_even()
    print(document["first_token_s"], document["break_even"], file=sys.stderr)
    finish(document, args.output)


if __name__ == "__main__":
    main()
