"""The CUDA C++ kernel of latent attention on the host (latent_on_host.h): its own sources, launched by its
own launcher, against the oracle."""

import contextlib
import ctypes
from pathlib import Path
from typing import Any

import kernels_on_host
import pytest
import torch
from cuda_sources import needs_gxx
from kernels_on_host import HostKernel, assert_no_races, host_map
from op_inputs.latent import as_fp8, assert_latent_close, latent_tensors, make_latent_batch

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import latent, shape
from torchpaged.custom_ops.mla.cuda.pool_map import pool_box
from torchpaged.custom_ops.mla.cuda.shape import LatentSpec, kernel_of, latent_config
from torchpaged.testing import Batch, BatchSpec

pytestmark = needs_gxx
CTAS = 6  # of the device: few, so that requests are cut and CTAs go from one to the next
CLUSTERED_CTAS = 64  # so that few short requests are shared by clusters


def compiled(folder: Path, file: str, name: str, config: Config) -> ctypes.CDLL:
    replaced = ("bulk.cuh", "wgmma.cuh", "latent_instructions.cuh")
    return kernels_on_host.compiled(folder, file, name, config, "latent_on_host.h", replaced)


def pool_map(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], squares: int
) -> Any:
    box = pool_box(sizes, strides, squares)
    assert box is not None
    return host_map(address, list(box.sizes), list(box.strides), list(box.box)), box.block_group


CASES: dict[str, tuple[dict[str, Any], BatchSpec]] = {
    "8 rows": ({"num_heads": 5}, BatchSpec("a", (1, 64, 65, 700, 0, 130), (1,) * 6, padded_tokens=2)),
    "16 rows": (
        {"num_heads": 16, "block_size": 16, "ctas": 2},
        BatchSpec("b", (1000, 3, 70), (1, 1, 1), padded_reqs=1),
    ),
    "32 rows, fp16": (
        {"num_heads": 10, "dtype": torch.float16, "block_size": 32},
        BatchSpec("c", (300, 2, 5, 129), (3, 3, 2, 1)),
    ),
    "one length": ({"num_heads": 5}, BatchSpec("k", (300, 290, 0, 320, 257), (1,) * 5)),
    "equal parts": ({"num_heads": 5}, BatchSpec("l", (700, 690), (1, 1))),
    # more than the merge has units for, so that CTAs share these
    "many parts": ({"num_heads": 5, "ctas": 12}, BatchSpec("s", (1300,), (1,))),
    "64 rows": ({"num_heads": 64, "rank": 512}, BatchSpec("d", (500, 0, 90), (1, 1, 1))),
    "128 rows": ({"num_heads": 128, "rank": 512}, BatchSpec("e", (200, 330), (1, 1), padded_tokens=1)),
    # a pair of CTAs has a request, or two pairs, whose results are merged
    "pairs": ({"num_heads": 64, "rank": 512}, BatchSpec("t", (500, 0, 490), (1, 1, 1))),
    "pairs, merged": (
        {"num_heads": 40, "rank": 512, "ctas": 8},
        BatchSpec("u", (470,), (2,), padded_tokens=1),
    ),
    "own borders": (
        {"num_heads": 40, "rank": 512, "ctas": 8},
        BatchSpec("v", (60, 900, 0, 70), (1, 1, 1, 1), padded_tokens=1),
    ),
    "drafts": (
        {"num_heads": 20, "block_size": 16, "rank": 512},
        BatchSpec("f", (400, 7, -2, 64), (4, 4, 3, 1)),
    ),
    "not causal": ({"num_heads": 4, "causal": False}, BatchSpec("g", (100, 3), (4, 4))),
    "512 + 64": ({"num_heads": 16, "rank": 512}, BatchSpec("h", (300,), (1,))),
    "fp8": ({"num_heads": 5, "rank": 512, "fp8": True}, BatchSpec("i", (300, 1, 0, 65), (1,) * 4)),
    "clusters": (
        {"num_heads": 12, "clusters": True},
        BatchSpec("o", (1100, 64, 0, 130), (1,) * 4, padded_tokens=2),
    ),
    "fp8, clusters": (
        {"num_heads": 5, "rank": 512, "fp8": True, "clusters": True},
        BatchSpec("p", (700, 3, 0), (1,) * 3, padded_tokens=1),
    ),
    "fp8, two tiles of rows, clusters": (
        {"num_heads": 12, "rank": 512, "fp8": True, "clusters": True, "block_size": 16},
        BatchSpec("q", (300, 70), (2, 1)),
    ),
    "fp8, four tiles of rows": (
        {"num_heads": 16, "rank": 512, "fp8": True, "tokens": 9999, "block_size": 32},
        BatchSpec("r", (900, 130), (2, 1)),
    ),
    "fp8, 64 rows": (
        {"num_heads": 64, "rank": 512, "fp8": True, "block_size": 16},
        BatchSpec("t", (500, 0, 90, 64, 130, 70), (1,) * 6, padded_tokens=1),
    ),
    "fp8, 128 rows": (
        {"num_heads": 40, "rank": 512, "fp8": True},
        BatchSpec("u", (200, 330, 3, -1), (3, 1, 2, 2)),
    ),
    # numbers of keys, of each 128 columns, and of queries far apart
    "fp8, uneven": (
        {"num_heads": 16, "rank": 512, "fp8": True, "uneven": 12.0, "block_size": 32},
        BatchSpec("m", (900, 130), (2, 1)),
    ),
    "fp8, uneven, fp16": (
        {"num_heads": 8, "rank": 512, "fp8": True, "uneven": 4.0, "dtype": torch.float16},
        BatchSpec("n", (300, 130), (1, 1)),
    ),
    "fp8, fp16, drafts": (
        {"num_heads": 10, "rank": 512, "fp8": True, "dtype": torch.float16, "block_size": 16},
        BatchSpec("j", (200, 70, -2), (3, 2, 3), padded_tokens=2),
    ),
}


def make_uneven(batch: Batch, most: float) -> None:
    """Multiplies each 128 columns of each key, and each row of queries, by a power of two of its own, up to
    ``most`` of them up or down."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = batch.k_cache, batch.q
    groups = torch.rand(*keys.shape[:3], keys.shape[3] // 128 + 1, generator=generator)
    by = (groups.repeat_interleave(128, 3)[..., : keys.shape[3]] * 2 - 1) * most
    keys.mul_(torch.exp2(by.round() - most))
    rows = torch.rand(*queries.shape[:2], 1, generator=generator) * 2 - 1
    queries.mul_(torch.exp2((rows * most).round()))


@pytest.mark.slow_cases(
    but=(
        "8 rows",
        "many parts",
        "128 rows",
        "pairs, merged",
        "drafts",
        "fp8, fp16, drafts",
        "clusters",
        "not causal",
    )
)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_oracle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, in other orders of the threads: the same bits."""
    options, batch_spec = CASES[name]
    options = {"rank": 128, "rope": 64, "dtype": torch.bfloat16, "block_size": 64, "causal": True} | options
    causal, fp8, uneven = options.pop("causal"), options.pop("fp8", False), options.pop("uneven", 0.0)
    monkeypatch.setattr(shape, "FP8_TOKENS", options.pop("tokens", 0))
    ctas: int = options.pop("ctas", CLUSTERED_CTAS if options.pop("clusters", False) else CTAS)
    batch = make_latent_batch(batch_spec, **options)
    if uneven:
        make_uneven(batch, uneven)
    batch = as_fp8(batch) if fp8 else batch
    shapes, results = (*batch.q.shape[:2], batch.v_cache.shape[-1]), []
    libraries: dict[str, ctypes.CDLL] = {}
    seeds = []

    def specialised(_: int, spec: LatentSpec) -> tuple[HostKernel, HostKernel | None, Config]:
        config = latent_config(spec)
        assert (spec.cluster > 1) == (ctas == CLUSTERED_CTAS)
        names = [kernel_of(config), ("latent_merge.cu", "latent_merge")][: 2 if spec.cluster == 1 else 1]
        for file, entry in names:
            if file not in libraries:
                libraries[file] = compiled(tmp_path / file, file, entry, config)
        clusters = 2 if spec.rows == 64 and not spec.fp8 else spec.cluster, 1
        kernel, *merge = (
            HostKernel(libraries[file], cluster, seeds[-1])
            for (file, _), cluster in zip(names, clusters, strict=False)
        )
        return kernel, merge[0] if merge else None, config

    monkeypatch.setattr(latent, "_specialised", specialised)
    monkeypatch.setattr(latent, "pool_map", pool_map)
    monkeypatch.setattr(gpu, "num_sms", lambda _: ctas)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)
    for seed in (1, 2):
        seeds.append(seed)
        out = torch.full(shapes, float("nan"), dtype=batch.q.dtype)
        lse = torch.full(shapes[:2], float("nan"))
        call = LatentCall(*latent_tensors(batch), out, lse, batch.max_query_len, batch.scale, causal)
        latent.attend(call, LatentSpec.of(call, ctas))
        assert_latent_close(out, lse, batch, causal=causal)
        results.append((out, lse))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


#: What kernels here read before they wait for those ahead (stream_order.py): lengths, the table, keys of the
#: context.
EARLY = "seq_lens", "starts", "table", "kv", "rows"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["16 rows", "fp8, uneven", "128 rows", "pairs, merged", "fp8, 128 rows", "clusters", "fp8, clusters"],
)
def test_no_races(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are used again, but in clusters."""
    assert_no_races(EARLY, test_matches_the_oracle, name, tmp_path, monkeypatch)


#: A case, a text and what stands in its place, and what is found.
MISTAKES = {  # the first, which the gate has, takes a third of the time of the others
    "a stage let go while products read it": (
        "16 rows",
        (
            "      wgmma_wait<0>();\n      if (lane == 0) mbarrier_arrive(shared + EMPTY_AT + stage * 8);",
            "      if (lane == 0) mbarrier_arrive(shared + EMPTY_AT + stage * 8);\n      wgmma_wait<0>();",
        ),
        "read by a product",
    ),
    "a stage let go before all lanes have read it": (
        "fp8, uneven",
        (
            "        __syncwarp();\n        if (lane == 0) mbarrier_arrive",
            "        if (lane == 0) mbarrier_arrive",
        ),
        "read by a lane latent_fp8_mainloop.cuh",
    ),
    "scores written over weights that are read": (
        "fp8, uneven",
        ("    barrier<CONSUMER_THREADS>(ALL_CONSUMERS);  // weights of the step before were read\n", ""),
        "write by a lane latent_fp8_mainloop.cuh",
    ),
    "queries written over those that products read": (
        "fp8, 128 rows",
        ("    mbarrier_wait(shared + Q_EMPTY_AT, queries);\n", ""),
        "read by a product",
    ),
    "weights that products may not see": (
        "128 rows",
        ("    fence_async();\n    barrier_arrive", "    barrier_arrive"),
        "write by a lane latent_pairs_mainloop.cuh",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_races_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, changed, said = MISTAKES[name]
    with kernels_on_host.races(EARLY, changed) as watched, contextlib.suppress(AssertionError):
        test_matches_the_oracle(case, tmp_path, monkeypatch)
    assert any(said in line for line in watched.found), watched.found
