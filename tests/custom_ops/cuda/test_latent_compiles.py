"""The CUDA C++ kernel of latent attention without a GPU: which calls it takes; nvcc compiles its
specialisations, without serialised products."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_sources import compiled, needs_nvcc, registers

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.errors import BackendUnavailableError
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import latent, latent_selected, mla_attention, shape
from torchpaged.custom_ops.mla.cuda.shape import (
    LatentSpec,
    kernel_of,
    latent_config,
    rows_of,
    shared_bytes,
    threads_of,
)
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE

HEADS = {8: 8, 16: 16, 32: 32, 64: 128}  # rows -> heads


def spec(rows: int, **changed: Any) -> LatentSpec:
    return LatentSpec(512, 64, HEADS[rows], 64, False, False, True, True, rows, 132, 1)._replace(**changed)


SPECS = {
    **{f"{rows} rows": spec(rows) for rows in HEADS},
    "fp16, blocks of 16": spec(16, half=True, block_size=16),
    "256 + 64": spec(32, rank=256, block_size=32),
    "5 heads x 8, without lse": spec(64, num_heads=5, lse=False),
    "not causal": spec(16, causal=False),
    "fp8, 8 rows": spec(8, fp8=True),
    **{f"{rows} rows in a cluster": spec(rows, cluster=8) for rows in (8, 16, 32)},
    **{f"{rows} rows in a cluster of 16": spec(rows, cluster=16) for rows in (8, 16)},
    "fp8, 16 rows in a cluster": spec(16, fp8=True, cluster=8),
    "fp8, 16 rows": spec(16, fp8=True),
    "fp8, two tiles of rows": spec(16, fp8=True, num_heads=32, block_size=16),
    "fp8, fp16": spec(8, fp8=True, half=True),
    "fp8, 64 rows": spec(64, fp8=True),
}


@needs_nvcc
@pytest.mark.parametrize("name", ["16 bits", "16 bits in a cluster", "fp8", "fp8 in a cluster"])
def test_selected_keys(tmp_path: Path, name: str) -> None:
    """Rows of fp8 are converted on their way: there, too, stand 16-bit numbers."""
    selected = spec(64, max_groups=1, fp8="fp8" in name, cluster=2 if "cluster" in name else 1)
    keys, config = latent_config(spec(64, max_groups=1)), latent_config(selected)
    constants = {"SHARED_BYTES": shared_bytes(keys), "THREADS": latent_selected.threads_of(selected)}
    _, report = compiled(tmp_path / "k", "latent_selected.cu", config, constants=constants)
    assert not re.findall(r"C75\d\d|serialized", report), report
    (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", report))
    assert spilled <= (4 if name == "fp8 in a cluster" else 0), report
    assert registers(report) <= (128 if selected.fp8 else 168), report


@needs_nvcc
@pytest.mark.parametrize("name", SPECS)
def test_no_spills_in_the_loop_and_no_serialised_products(tmp_path: Path, name: str) -> None:
    """Some numbers are kept in memory over rows of fp8, in a cluster or with 64 rows. Shared memory and
    threads are what the sources say. A CTA of the merge fits beside one of up to 16 rows that are not of
    fp8: a quarter of a multiprocessor has two warps of this and four of the merge."""
    config = latent_config(SPECS[name])
    main = kernel_of(config)[0]
    constants = {
        main: {"SHARED_BYTES": shared_bytes(config), "THREADS": threads_of(config)},
        "latent_merge.cu": {"SLOT_FLOATS": shape.slot_floats(config), "MERGE_THREADS": latent.MERGE_THREADS},
    }
    used = {}
    for file, values in constants.items():
        _, report = compiled(tmp_path / file, file, config, constants=values)
        assert not re.findall(r"C75\d\d|serialized", report), report
        (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", report))
        most = 16 if config["FP8"] and (config["CLUSTER"] > 1 or config["ROWS"] == 64) else 0
        assert spilled <= most, report
        used[file] = -(-registers(report) // 8) * 8 * 32
        assert registers(report) <= (168 if threads_of(config) == 384 else 255)
    if main == "latent.cu" and config["ROWS"] <= 16 and config["CLUSTER"] == 1:
        assert used[main] * 2 + used["latent_merge.cu"] * 4 <= 16384


def call(**changed: Any) -> LatentCall:
    heads, width, rank, tokens = (
        changed.pop(name, n) for name, n in (("heads", 16), ("width", 576), ("rank", 512), ("tokens", 2))
    )
    make: dict[str, Any] = {"dtype": changed.pop("dtype", torch.bfloat16), "device": "meta"}
    pool = changed.pop("kv_cache", torch.empty(5, changed.pop("block_size", 64), 1, width, **make))
    ints = {"dtype": torch.int32, "device": "meta"}
    return LatentCall(
        q=changed.pop("q", torch.empty(tokens, heads, width, **make)),
        kv_cache=pool,
        block_table=torch.empty(2, 3, **ints),
        seq_lens=torch.empty(2, **ints),
        query_start_loc=torch.empty(3, **ints),
        out=torch.empty(tokens, heads, rank, **make),
        lse=None,
        max_query_len=changed.pop("max_query_len", 1),
        scale=changed.pop("scale", 1.0),
        **changed,
    )


@pytest.mark.parametrize(
    ("requests", "columns", "heads", "sms", "cluster"),
    [
        (1, 32, 16, 132, 16),
        (2, 32, 16, 132, 16),
        (2, 32, 16, 66, 16),
        (2, 32, 16, 64, 16),
        (2, 32, 17, 132, 8),
        (3, 32, 16, 132, 8),
        (1, 33, 16, 132, 1),
        (8, 64, 32, 132, 8),
        (8, 65, 32, 132, 1),
        (9, 1, 16, 132, 1),
        (2, 3, 33, 132, 1),
        (2, 3, 16, 60, 1),
    ],
)
def test_clusters_share_few_short_requests(
    requests: int, columns: int, heads: int, sms: int, cluster: int
) -> None:
    made = call(heads=heads)
    table = made.block_table.new_empty(requests, columns)
    assert LatentSpec.of(made._replace(block_table=table), sms).cluster == cluster


@pytest.mark.parametrize("fits", [True, False])
def test_clusters_are_narrower_where_wide_ones_do_not_fit(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no part of a chip has 16 multiprocessors."""

    class Kernel:
        def resident(self, threads: int, cluster: int, wanted: int) -> int:
            if not fits:
                raise BackendUnavailableError(f"no cluster of {cluster} CTAs fits the device")
            return wanted

    monkeypatch.setattr(latent.jit, "kernel", lambda *_, **__: Kernel())
    monkeypatch.setattr(latent, "_specialised", functools.cache(latent._specialised.__wrapped__))
    _, merge, config = latent._specialised(0, spec(16, cluster=16))
    assert config["CLUSTER"] == (16 if fits else 8) and merge is None


@pytest.mark.parametrize(
    ("requests", "columns", "heads", "rows"),
    [
        (8, 64, 16, 8),
        (16, 64, 16, 8),
        (17, 64, 16, 16),
        (32, 64, 5, 8),
        (1, 20, 32, 16),
        (16, 32, 32, 8),
        (32, 64, 32, 16),
    ],
)
def test_tiles_of_rows_over_rows_of_fp8(requests: int, columns: int, heads: int, rows: int) -> None:
    made = call(heads=heads, kv_cache=torch.empty(5, 64, 1, 656, device="meta").to(ROW_DTYPE))
    table = made.block_table.new_empty(requests, columns)
    assert LatentSpec.of(made._replace(block_table=table), 132).rows == rows


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "torch.float32, not bfloat16 or float16"),
    "another rank": ({"width": 320, "rank": 256}, "256 + 64 columns"),
    "odd blocks": ({"block_size": 48}, "blocks of 48 tokens"),
    "many rows of float16 over fp8": (
        {
            "heads": 64,
            "dtype": torch.float16,
            "kv_cache": torch.empty(5, 64, 1, 656, device="meta").to(ROW_DTYPE),
        },
        "rows of fp8 for 64 rows of float16 queries, not 32",
    ),
    "rows of fp8 apart": (
        {"kv_cache": torch.empty(5, 64, 1, 660, device="meta").to(ROW_DTYPE)[..., :656]},
        "kv_cache with strides (42240, 660, 660, 1)",
    ),
    "large blocks": ({"block_size": 128}, "blocks of 128 tokens"),
    "many rows": ({"heads": 128, "max_query_len": 2}, "queries of up to 2 tokens x 128 heads, not 128 rows"),
    "q apart": (
        {"q": torch.empty(2, 16, 580, dtype=torch.bfloat16, device="meta")[..., :576]},
        "q with strides (9280, 580, 1)",
    ),
    "pool apart": (
        {"kv_cache": torch.empty(5, 65, 1, 576, dtype=torch.bfloat16, device="meta")[:, :64]},
        "kv_cache with strides (37440, 576, 576, 1)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_leaves_to_triton(name: str) -> None:
    changed, said = REFUSED[name]
    reason = shape.why_not(call(**changed), (9, 0))
    assert reason is not None and reason.startswith(said)


def test_what_it_takes() -> None:
    for changed in (
        {},
        {"block_size": 16},
        {"heads": 128},
        {"dtype": torch.float16, "max_query_len": 8},
        {"causal": False, "max_query_len": 2},
    ):
        assert shape.why_not(call(**changed), (9, 0)) is None
    pool = torch.empty(5, 64, 1, 672, device="meta").to(ROW_DTYPE)[..., :656]
    for changed in ({}, {"heads": 128}, {"dtype": torch.float16, "heads": 8, "max_query_len": 4}):
        assert shape.why_not(call(**changed, kv_cache=pool), (9, 0)) is None
    for capability in ((8, 0), (10, 0), (12, 0)):
        assert (
            shape.why_not(call(), capability)
            == f"compute capability {capability[0]}.{capability[1]}, not 9.0"
        )


def test_rows_are_padded_to_eights_and_not_to_64() -> None:
    assert [rows_of(most) for most in (1, 8, 9, 16, 17, 32, 33, 64, 128)] == [
        8,
        8,
        16,
        16,
        32,
        32,
        64,
        64,
        64,
    ]


def test_rows_of_fp8_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    rows = call(kv_cache=torch.empty(5, 64, 1, 656, device="meta").to(ROW_DTYPE))
    assert mla_attention.route(rows) is None
    assert mla_attention.route(call()) is None
