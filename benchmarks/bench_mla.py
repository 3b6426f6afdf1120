"""mla_attention's decode on a GPU, at DeepSeek's sizes: both backends, FlashMLA and TileOps where installed.

    PYTHONPATH=. python benchmarks/bench_mla.py [--heads 128,16] [--batches 8,64] [--context 4096]
        [--block-size 64] [--tiles 64x32x8x2x1,...] [--seconds 60] [--output FILE]

A correctness gate runs before every timing. Each round is one CUDA graph over several pools, together larger
than the L2 cache; contenders are replayed in turns: the backends "cuda" and "triton", the latter with tiles
of ``--tiles`` too (rows x keys x warps x stages x programs per multiprocessor), "flash_mla" (the package
sgl-flash-mla: blocks of 64, its schedule made outside of the timing) and "tileops" (the package tileops on
TileLang). Figures are microseconds per call; ``gb_per_s`` counts every cached row once, ``tflop_per_s`` both
products. The last line is one JSON document.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from documents import command_line, write_rows
from measuring.timing import Call, CudaSampler, interleave

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.triton import config

Run = Callable[[dict[str, Any]], torch.Tensor]  # of a set of inputs, to what comes out
RANK, ROPE = 512, 64
ROUND_BYTES, CALLS = 256 << 20, 8


def inputs_of(num_reqs: int, num_heads: int, context: int, block_size: int, seed: int) -> dict[str, Any]:
    """One decode step of bf16 latents; blocks are shuffled."""
    generator = torch.Generator("cuda").manual_seed(seed)
    columns = -(-context // block_size)
    num_blocks = num_reqs * columns + 1
    make = {"dtype": torch.bfloat16, "device": "cuda", "generator": generator}
    blocks = torch.randperm(num_blocks - 1, device="cuda", generator=generator).to(torch.int32) + 1
    return {
        "q": torch.randn(num_reqs, num_heads, RANK + ROPE, **make),
        "kv_cache": torch.randn(num_blocks, block_size, 1, RANK + ROPE, **make),
        "block_table": blocks.view(num_reqs, columns),
        "seq_lens": torch.full((num_reqs,), context, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda"),
        "out": torch.empty(num_reqs, num_heads, RANK, dtype=torch.bfloat16, device="cuda"),
    }


SCALE = 192**-0.5


def attend(inputs: dict[str, Any], backend: str = "triton") -> torch.Tensor:
    BACKEND_OPS[backend].mla_attention(**inputs, max_query_len=1, scale=SCALE)
    return inputs["out"]


def flash_mla(sets: list[dict[str, Any]]) -> Run:
    """FlashMLA over batches of the same lengths; raises what its import raises."""
    import flash_mla as package  # type: ignore[import-not-found]

    lens, num_heads = sets[0]["seq_lens"], sets[0]["q"].shape[1]
    plan, _ = package.get_mla_metadata()
    plan.tile_scheduler_metadata, plan.num_splits = package.get_mla_decoding_metadata(
        lens, num_heads, 1, num_heads, use_legacy=True
    )
    plan.have_initialized = True

    def run(inputs: dict[str, Any]) -> torch.Tensor:
        out, _ = package.flash_mla_with_kvcache(
            inputs["q"][:, None],
            inputs["kv_cache"],
            inputs["block_table"],
            inputs["seq_lens"],
            RANK,
            plan,
            softmax_scale=SCALE,
            causal=True,
            use_legacy=True,
        )
        return out[:, 0]

    return run


def tileops(sets: list[dict[str, Any]]) -> Run:
    """TileOps' paged kernel; raises what its import raises."""
    from tileops.attention import MLAPagedFwdOp  # type: ignore[import-not-found]

    op = MLAPagedFwdOp(RANK, is_causal=True, sm_scale=SCALE)

    def run(inputs: dict[str, Any]) -> torch.Tensor:
        cache = inputs["kv_cache"][:, :, 0]
        out, _ = op(inputs["q"][:, None], cache, inputs["block_table"], inputs["seq_lens"])
        return out[:, 0]

    return run


def dense(inputs: dict[str, Any]) -> torch.Tensor:
    """What comes out of the first request, in float32."""
    count = int(inputs["seq_lens"][0])
    rows = inputs["kv_cache"][inputs["block_table"][0].long()].flatten(0, 2)[:count].float()
    weights = torch.softmax(inputs["q"][0].float() @ rows.T * SCALE, dim=-1)
    return weights @ rows[:, :RANK]


def with_tiles(tiles: config.Tiles | None, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """``call`` with tiles in place of the kernel's own choice."""

    def changed() -> torch.Tensor:
        own = config.tiles
        config.tiles = own if tiles is None else lambda *_: tiles  # type: ignore[assignment]
        try:
            return call()
        finally:
            config.tiles = own

    return changed


def measure(
    num_reqs: int, num_heads: int, tiles: dict[str, config.Tiles | None], options: Any
) -> dict[str, Any]:
    """Microseconds of every contender for one batch."""
    row_bytes = num_reqs * options.context * (RANK + ROPE) * 2
    sets = [
        inputs_of(num_reqs, num_heads, options.context, options.block_size, seed)
        for seed in range(max(1, -(-ROUND_BYTES // row_bytes)))
    ]
    samplers, failed = {}, {}
    contenders: dict[str, tuple[config.Tiles | None, Callable[[], Run]]] = {
        "cuda": (None, lambda: lambda inputs: attend(inputs, "cuda")),
        "flash_mla": (None, lambda: flash_mla(sets)),
        "tileops": (None, lambda: tileops(sets)),
        **{name: (chosen, lambda: attend) for name, chosen in tiles.items()},
    }
    for name, (chosen, made) in contenders.items():
        try:
            run = made()
            out = with_tiles(chosen, lambda run=run: run(sets[0]))()
            error = float((out[0].float() - dense(sets[0])).abs().max())
            if not error < 2e-2:
                raise AssertionError(f"off by {error}")
            calls: list[Call] = [
                with_tiles(chosen, lambda i=i, run=run: run(sets[i % len(sets)]))
                for i in range(max(CALLS, len(sets)))
            ]
            samplers[name] = CudaSampler(calls)
        except Exception as error:  # too much shared memory, for one
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    found = interleave(samplers, options.repeats)
    flops = num_reqs * options.context * num_heads * 2 * (2 * RANK + ROPE)
    return {
        "requests": num_reqs,
        "heads": num_heads,
        "context": options.context,
        "block_size": options.block_size,
        "us": {name: round(timing.median_us, 1) for name, timing in found.items()},
        "gb_per_s": {name: round(row_bytes / timing.median_us / 1e3) for name, timing in found.items()},
        "tflop_per_s": {name: round(flops / timing.median_us / 1e6, 1) for name, timing in found.items()},
        "failed": failed,
    }


def main() -> None:
    options = command_line(
        __doc__,
        heads=[128, 16],
        batches=[8, 64],
        tiles=[str],
        output=str,
        context=4096,
        block_size=64,
        repeats=20,
        seconds=(1e9, "after which no further case begins"),
    )
    tiles: dict[str, config.Tiles | None] = {"triton": None}
    tiles |= {text: config.Tiles(*map(int, text.split("x"))) for text in options.tiles}
    begin, rows = time.monotonic(), []
    for num_heads in options.heads:
        for num_reqs in options.batches:
            if time.monotonic() - begin < options.seconds:
                rows.append(measure(num_reqs, num_heads, tiles, options))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    write_rows(rows, options.output)


if __name__ == "__main__":
    main()
