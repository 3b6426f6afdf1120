"""The CUDA C++ kernels of sparse latent attention and of its indexer on the host (sparse_on_host.h): their
own sources, launched by their own launchers, against the oracles."""

import ctypes
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels_on_host
import pytest
import torch
from cuda_sources import needs_gxx
from kernels_on_host import HostKernel, assert_no_races
from op_inputs.indexer import exact_logits, make_index_batch, weights_of
from op_inputs.latent import assert_sparse_close, latent_tensors, make_latent_batch, selected
from torch import Tensor

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.cuda.params import struct_of
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.cuda import index_logits, top_k_indices
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import selected as sparse
from torchpaged.testing import BatchSpec

pytestmark = needs_gxx


def compiled(folder: Path, file: str, name: str, config: Config) -> ctypes.CDLL:
    replaced = ("wgmma.cuh", "logits_instructions.cuh")
    return kernels_on_host.compiled(folder, file, name, config, "sparse_on_host.h", replaced)


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "num_sms", lambda _: 6)
    monkeypatch.setattr(gpu, "launches_early", lambda _: True)


def rows_of_logits(columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    logits = torch.randn(6, columns, generator=generator)
    logits[1, ::3] = float("-inf")
    logits[2] = logits[2].round()  # most are equal
    logits[3, columns // 3 :] = float("-inf")
    logits[4, 5:9] = torch.tensor([float("nan"), float("inf"), -float("nan"), -0.0])
    logits[5] = logits[5].sign() * 0.0
    return logits


@pytest.mark.slow_cases(but=("2-1-5001",))
@pytest.mark.parametrize(("vectors", "cluster", "columns"), [(2, 1, 5001), (1, 2, 7000), (1, 4, 16000)])
def test_top_k(vectors: int, cluster: int, columns: int, tmp_path: Path) -> None:
    """Those of the reference, of equal ones the first, in ascending order."""
    config = top_k_indices.TOP_K.config({"VECTORS": vectors, "CLUSTER": cluster})
    library = compiled(tmp_path / "k", "top_k_indices.cu", "top_k_indices", config)
    logits = rows_of_logits(columns)
    rows = torch.full((6, -(-columns // 4) * 4), 9.0)
    rows[:, :columns] = logits
    for top_k in (1, 300, 2048, columns + 7):
        indices = torch.full((6, top_k), -7, dtype=torch.int32)
        sizes = rows.stride(0), top_k, columns, top_k
        params = struct_of("top_k_indices.cu")(rows.data_ptr(), indices.data_ptr(), *sizes)
        HostKernel(library, cluster).launch(6 * cluster, top_k_indices.THREADS, params, early=True)
        want = torch.empty_like(indices)
        BACKEND_OPS["reference"].top_k_indices(logits, want)
        for got, expected in zip(indices, want, strict=True):
            taken = got[got >= 0]
            assert torch.equal(taken, expected[expected >= 0].sort().values)
            assert (got[len(taken) :] == -1).all()


LOGITS: dict[str, tuple[dict[str, Any], BatchSpec, bool]] = {
    "e4m3": ({"num_heads": 64}, BatchSpec("a", (1, 64, 65, 700, 0), (1,) * 5, padded_tokens=2), True),
    "e4m3, 20 heads": ({"num_heads": 20, "block_size": 16}, BatchSpec("b", (900, 3), (2, 1)), True),
    "bf16": ({"num_heads": 64}, BatchSpec("c", (1300, 2, 90), (1, 1, 1), padded_reqs=1), False),
    "fp16, 5 heads": (
        {"num_heads": 5, "block_size": 32, "dtype": torch.float16},
        BatchSpec("d", (200, -2, 5), (4, 3, 5)),
        False,
    ),
    "blocks of 128": ({"num_heads": 12, "block_size": 128}, BatchSpec("e", (300, 129), (1, 1)), True),
}


@pytest.mark.slow_cases(but=("blocks of 128",))
@pytest.mark.parametrize("name", LOGITS)
def test_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, spec, fp8 = LOGITS[name]
    causal = name != "fp16, 5 heads"
    options = {"width": 128, "block_size": 64, "dtype": torch.bfloat16} | options
    batch, scales = make_index_batch(spec, **options), None
    keys = batch.k_cache
    if fp8:
        keys = keys.float().to(torch.float8_e4m3fn)
        scales = torch.rand(keys.shape[:2]) + 0.5
    logits = torch.full(
        (batch.q.shape[0], batch.block_table.shape[1] * keys.shape[1]), float("nan"), dtype=torch.float32
    )
    tensors = keys, batch.block_table, batch.seq_lens, batch.query_start_loc
    call = IndexCall(
        batch.q, weights_of(batch), *tensors, logits, batch.max_query_len, causal=causal, k_scale=scales
    )
    assert index_logits.why_not(call, (9, 0)) is None
    kernels_on_host.launched_on_host(monkeypatch, tmp_path / "host")
    index_logits.launch(call)
    want = exact_logits(replace(batch, k_cache=keys), causal, scales)
    torch.testing.assert_close(logits.double(), want, rtol=1e-4, atol=1e-4)


SPARSE: dict[str, tuple[dict[str, Any], BatchSpec, str, int]] = {
    "16 heads": ({"num_heads": 16}, BatchSpec("a", (700, 3, 0), (1, 1, 1), padded_tokens=1), "some", 300),
    "5 heads, drafts": ({"num_heads": 5, "block_size": 16}, BatchSpec("b", (90, 8), (3, 2)), "beyond", 90),
    "40 heads": ({"num_heads": 40, "dtype": torch.float16}, BatchSpec("c", (500,), (1,)), "twice", 200),
    "none": ({"num_heads": 8}, BatchSpec("d", (70, 30), (1, 1)), "none", 70),
    "5 heads, drafts, 256 + 64": (
        {"num_heads": 5, "block_size": 16, "rank": 256},
        BatchSpec("b", (390, 8, 0), (3, 2, 1)),
        "beyond",
        390,
    ),
    "512 + 64": ({"num_heads": 16, "rank": 512}, BatchSpec("e", (400,), (1,)), "all", 333),
    "a large key": ({"num_heads": 16}, BatchSpec("f", (300,), (1,)), "all", 300),
    # most lie behind the blocks that have room in shared memory
    "many blocks": (
        {"num_heads": 5, "block_size": 1},
        BatchSpec("h", (2 * sparse.TABLE_ROOM + 90,), (1,)),
        "some",
        200,
    ),
}
LATE = 9  # a position in the second half of a warp's, whose weights are relative to the first one's maxima


def few_on_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.cache
    def specialised(_: int, spec: sparse.SelectedSpec) -> tuple[HostKernel, HostKernel]:
        few = compiled(folder / "f", "selected_few.cu", "attend_few", spec.config())
        merge = compiled(folder / "m", "selected_few_merge.cu", "merge_few", spec.config())
        return HostKernel(few), HostKernel(merge)

    monkeypatch.setattr(sparse, "_specialised_few", specialised)


@pytest.mark.slow_cases(
    but=("few-5 heads, drafts", "many-5 heads, drafts", "few-a large key", "few-many blocks")
)
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("kernel", ["few", "many"])
def test_selected(name: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, in other orders of the threads: the same bits."""
    options, batch_spec, kind, top_k = SPARSE[name]
    options = {"rank": 128, "rope": 64, "dtype": torch.bfloat16, "block_size": 64} | options
    batch = make_latent_batch(batch_spec, **options)
    indices = selected(batch, kind, top_k)
    if name == "a large key":
        position, block_size = int(indices[0, LATE]), options["block_size"]
        batch.k_cache[int(batch.block_table[0, position // block_size]), position % block_size] *= 16
    shapes, results = (*batch.q.shape[:2], batch.v_cache.shape[-1]), []

    @functools.cache
    def specialised(_: int, spec: sparse.SelectedSpec) -> HostKernel:
        library = compiled(tmp_path / "s", "selected.cu", "attend_selected", spec.config())
        return HostKernel(library, spec.cluster)

    monkeypatch.setattr(sparse, "_specialised", specialised)
    few_on_host(tmp_path, monkeypatch)
    if kernel == "many":
        monkeypatch.setattr(sparse, "few_parts", lambda *_: 0)
    for _ in range(2):
        out = torch.full(shapes, float("nan"), dtype=batch.q.dtype)
        lse = torch.full(shapes[:2], float("nan"))
        call = LatentCall(*latent_tensors(batch), out, lse, batch.max_query_len, batch.scale, True, indices)
        assert (sparse.why_none(call, (9, 0)) or sparse.why_not(call)) is None
        sparse.attend(call, 132 if kernel == "few" else 8)
        assert_sparse_close(out, lse, batch, indices)
        results.append((out, lse))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_rows_of_17_parts_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than the merge reads at once: a head whose query is NaN leaves the others as they are."""
    sizes: dict[str, Any] = {"rank": 128, "rope": 64, "dtype": torch.bfloat16, "block_size": 64}
    batch = make_latent_batch(BatchSpec("g", (2200,), (1,)), num_heads=5, **sizes)
    indices = selected(batch, "all", 2150)

    few_on_host(tmp_path, monkeypatch)
    outs = []
    for value in (1.0, float("nan")):
        batch.q[0, 2] *= value
        out = torch.empty(*batch.q.shape[:2], 128, dtype=batch.q.dtype)
        call = LatentCall(*latent_tensors(batch), out, None, 1, batch.scale, True, indices)
        sparse.attend(call, 132)
        outs.append(out)
    assert outs[1][0, 2].isnan().all()
    assert torch.equal(outs[0][0, [0, 1, 3, 4]], outs[1][0, [0, 1, 3, 4]])


LENGTHS = "seq_lens", "starts"  # what kernels here read ahead of their wait, and the table


@pytest.mark.slow
@pytest.mark.long
def test_no_races_of_top_k(tmp_path: Path) -> None:
    assert_no_races((), test_top_k, 1, 2, 7000, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["blocks of 128", "bf16"])
def test_no_races_of_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_no_races(LENGTHS, test_logits, name, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kernel", ["few", "many"])
def test_no_races_of_selected(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = *LENGTHS, "table"
    assert_no_races(early, test_selected, "5 heads, drafts, 256 + 64", kernel, tmp_path, monkeypatch)
