"""Small launches of every attention kernel, for compute-sanitizer: python
tests/gpu/sanitize_cases.py BACKEND, "latent" for latent attention, or "sparse" for that with indices and its
indexer.

Run with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that every tensor is an allocation of its own and a step outside
it is seen. With ``every-lane`` behind the backend's name all lanes of the CUDA prefill kernel arrive at its
barriers. As it is launched otherwise, one lane arrives for its warp, behind what all lanes have read (their
values went through a shuffle) or written (behind ``__syncwarp`` or a barrier of the warpgroup); racecheck
follows each lane for itself and takes the others' reads and writes for races.
"""

import functools
import itertools
import sys
from pathlib import Path

import torch

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.attention.cuda import prefill
from torchpaged.custom_ops.mla.cuda import selected
from torchpaged.custom_ops.mla.cuda.shape import MAX_FP8_HALF_ROWS
from torchpaged.testing import BATCH_SPECS, BatchSpec, make_batch, run_paged_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from op_inputs.latent import as_fp8, make_latent_batch, run_mla_attention


def main(backend: str) -> None:
    """Decode with and without splits, several query tokens, prompts, a tile cut into parts, mixed batches,
    fp8, with fp8 queries too; writes; all on small batches."""
    ops = BACKEND_OPS[backend]
    specs = [
        BATCH_SPECS["decode_edges"],
        BATCH_SPECS["decode_padded"],
        BATCH_SPECS["speculative"],
        BATCH_SPECS["mixed_padded"],
        BatchSpec("split", (3000, 1, 0, 257), (1, 1, 1, 1)),
        BatchSpec("prefill", (300, 200, 0), (300, 150, 0), padded_tokens=3),
        BatchSpec("parts", (1500,), (40,)),
        BatchSpec("parts, a warpgroup idle", (1300,), (10,)),
        BatchSpec("mixed", (900, 700, 40, 513), (300, 1, 1, 1)),
    ]
    for shape in (
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 64},
    ):
        for spec in specs:
            batch = make_batch(spec, dtype=torch.bfloat16, device="cuda", extra_columns=0, **shape)
            batch.extras["semaphore"] = torch.zeros(
                batch.block_table.shape[0] * shape["num_kv_heads"], dtype=torch.int32, device="cuda"
            )
            run_paged_attention(ops, batch)
            if max(spec.query_lens) == 1 or backend == "cuda":  # whose prefill kernel converts fp8
                batch.k_cache, batch.v_cache = (
                    c.nan_to_num(0.0).to(torch.float8_e4m3fn) for c in (batch.k_cache, batch.v_cache)
                )
                run_paged_attention(ops, batch)
                if backend == "cuda":
                    batch.q = batch.q.to(torch.float8_e4m3fn)
                    run_paged_attention(ops, batch)
            torch.cuda.synchronize()
    k = torch.randn(5, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    ops.write_kv(k, k.clone(), cache, cache.clone(), torch.tensor([16, 17, 63, -1, 33], device="cuda"))
    torch.cuda.synchronize()
    print(f"{backend}: done")


def latent() -> None:
    """Backend cuda: 8 to 128 query rows, over rows of fp8 up to 32, whole requests, cut ones and ones without
    keys."""
    specs = [
        BatchSpec("cut", (900, 65, 0, 1), (1,) * 4, padded_tokens=1, padded_reqs=1),
        BatchSpec("one length", (130,) * 5, (1,) * 5),
        BatchSpec("drafts", (200, 3), (4, 2)),
        BatchSpec("no clusters", (7400, 65, 0, 1, 130, 130, 64, -1, 200), (1,) * 9),
    ]
    for (num_heads, dtype), spec in itertools.product(
        (
            (5, torch.bfloat16),
            (16, torch.float16),
            (32, torch.bfloat16),
            (64, torch.bfloat16),
            (128, torch.float16),
        ),
        specs,
    ):
        if num_heads * max(spec.query_lens) <= 128:
            options = {"rank": 512, "rope": 64, "dtype": dtype, "device": "cuda", "block_size": 32}
            batch = make_latent_batch(spec, num_heads=num_heads, **options)
            run_mla_attention(BACKEND_OPS["cuda"], batch)
            if dtype == torch.bfloat16 or num_heads * max(spec.query_lens) <= MAX_FP8_HALF_ROWS:
                run_mla_attention(BACKEND_OPS["cuda"], as_fp8(batch))
    torch.cuda.synchronize()
    print("latent: done")


def sparse() -> None:
    """Backend cuda: selected keys in parts, by one CTA and by a cluster, logits of both kinds of keys,
    top-k."""
    ops, bf16 = BACKEND_OPS["cuda"], {"dtype": torch.bfloat16, "device": "cuda"}
    ints = {"dtype": torch.int32, "device": "cuda"}
    tokens, columns, block = 5, 12, 64
    table = torch.randperm(tokens * columns, device="cuda").int().view(tokens, columns) + 1
    lengths, starts = torch.tensor([700, 1, 0, 64, 333], **ints), torch.arange(tokens + 1, **ints)
    batch = table, lengths, starts
    blocks = tokens * columns + 1
    latents, out = torch.randn(blocks, block, 1, 576, **bf16), torch.empty(tokens, 16, 512, **bf16)
    for top_k, few_parts in itertools.product((40, 300), (selected.few_parts, lambda *_: 0)):
        selected.few_parts = few_parts
        indices = torch.randint(-5, 700, (tokens, top_k), **ints)
        q, lse = torch.randn(tokens, 16, 576, **bf16), torch.empty(tokens, 16, device="cuda")
        ops.mla_attention(q, latents, *batch, out, lse, max_query_len=1, scale=0.1, indices=indices)
    keys, weights = torch.randn(blocks, block, 1, 128, **bf16), torch.randn(tokens, 64, device="cuda")
    scales = torch.rand(blocks, block, device="cuda")
    logits = torch.empty(tokens, columns * block, device="cuda")
    for pool, k_scale in ((keys, None), (keys.to(torch.float8_e4m3fn), scales)):
        q = torch.randn(tokens, 64, 128, **bf16)
        ops.index_logits(q, weights, pool, *batch, logits, max_query_len=1, k_scale=k_scale)
    for rows in (logits, torch.randn(3, 9000, device="cuda")):
        ops.top_k_indices(rows, torch.empty(len(rows), 100, **ints))
    torch.cuda.synchronize()
    print("sparse: done")


if __name__ == "__main__":
    if sys.argv[1] in ("latent", "sparse"):
        {"latent": latent, "sparse": sparse}[sys.argv[1]]()
        sys.exit()
    if "every-lane" in sys.argv[2:]:
        prefill.prefill = functools.partial(prefill.prefill, every_lane=True)
    main(sys.argv[1])
