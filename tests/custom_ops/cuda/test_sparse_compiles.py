"""The CUDA C++ kernels of sparse latent attention and of its indexer without a GPU: which calls they take,
how work is cut; nvcc compiles their specialisations."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_sources import compiled, kernels_of, needs_nvcc, registers

from torchpaged.custom_ops.cuda import gpu
from torchpaged.custom_ops.cuda.config import Config
from torchpaged.custom_ops.indexer.call import IndexCall
from torchpaged.custom_ops.indexer.cuda import index_logits, top_k_indices
from torchpaged.custom_ops.indexer.cuda.index_logits import LogitsSpec
from torchpaged.custom_ops.indexer.cuda.top_k_indices import top_k_config
from torchpaged.custom_ops.mla.call import LatentCall
from torchpaged.custom_ops.mla.cuda import latent_selected, mla_attention, selected
from torchpaged.custom_ops.mla.cuda.selected import SelectedSpec

DECODE = SelectedSpec(512, 64, 16, 64, False, True, True, 1, 16, 16)
LOGITS = {
    "logits, e4m3": LogitsSpec(64, 64, False, True, True),
    "logits, bf16": LogitsSpec(64, 64, False, False, True),
    "logits, fp16, 20 heads": LogitsSpec(20, 16, True, False, False),
}
CONFIGS: dict[str, Config] = {
    **{name: spec.config() for name, spec in LOGITS.items()},
    "16 heads": DECODE.config(),
    "64 heads, fp16": DECODE._replace(num_heads=64, m_tiles=2, half=True, cluster=4).config(),
    "128 + 64, not causal": DECODE._replace(rank=128, causal=False, lse=False, cluster=1).config(),
    "4 rows of 131,072": top_k_config(4, 131072, 132),
    "64 rows of 8,192": top_k_config(64, 8192, 132),
    "8 rows of 262,144": top_k_config(8, 262144, 132),
}


#: Bytes of shared memory as the launchers give them.
SHARED_BYTES: dict[tuple[str, str], int] = {
    ("16 heads", "selected.cu"): selected.shared_bytes(DECODE),
    ("16 heads", "selected_few.cu"): selected.few_shared_bytes(DECODE),
    ("128 + 64, not causal", "selected.cu"): selected.shared_bytes(DECODE._replace(rank=128, cluster=1)),
    ("128 + 64, not causal", "selected_few.cu"): selected.few_shared_bytes(
        DECODE._replace(rank=128, cluster=1)
    ),
    **{(name, "index_logits.cu"): spec.shared_bytes for name, spec in LOGITS.items()},
}


@needs_nvcc
@pytest.mark.parametrize("name", CONFIGS)
def test_no_spills_and_no_serialised_products(tmp_path: Path, name: str) -> None:
    """32 logits of 1,024 threads each leave 32 registers for the rest, which is a few too few. Shared memory
    and threads are what the sources say."""
    config = CONFIGS[name]
    for file in kernels_of(config.table.header):
        constants = {}
        if (said := SHARED_BYTES.get((name, file))) is not None:
            threads = config["WARPGROUPS"] * 128 if file == "index_logits.cu" else selected.THREADS
            constants = {"PART_BYTES" if file == "selected_few.cu" else "SHARED_BYTES": said}
            constants["THREADS"] = threads
        _, report = compiled(tmp_path, file, config, constants=constants)
        assert not re.findall(r"C75\d\d|serialized", report), report
        (spilled,) = map(int, re.findall(r"(\d+) bytes spill stores", report))
        assert spilled <= (40 if name == "8 rows of 262,144" else 0), report


def test_a_merge_fits_beside(tmp_path: Path) -> None:
    """Registers of a quarter of a multiprocessor: two warps of a part, one of the merge. Shared memory: a CTA
    of each, but not five of the merge. Without room its CTAs stand where the next call's should begin."""
    config, sm = DECODE.config(), 228 * 1024
    few, merge = (
        compiled(tmp_path, file, config)[1] for file in ("selected_few.cu", "selected_few_merge.cu")
    )
    assert (-(-registers(few) // 8) * 2 + -(-registers(merge) // 8)) * 8 * 32 <= 16384
    found = re.search(r"(\d+) bytes smem", merge)
    assert found and "smem" not in few, few + merge
    of_merge = selected.merge_shared_bytes(DECODE, sm) + int(found[1]) + 1024
    assert selected.few_shared_bytes(DECODE) + 1024 + of_merge <= sm < of_merge * 5


def test_how_work_is_cut() -> None:
    """As many CTAs as fill the device, but not more than have work, and enough for all of it."""
    cut = {
        (4, 131072): (4, 8),
        (1, 131072): (4, 8),
        (64, 8192): (1, 2),
        (200, 8192): (2, 1),
        (1, 40): (1, 1),
        (300, 200000): (8, 8),
    }
    for (rows, columns), (vectors, cluster) in cut.items():
        config = top_k_config(rows, columns, 132)
        assert (config["VECTORS"], config["CLUSTER"]) == (vectors, cluster), (rows, columns)
        assert vectors * cluster * 4 * top_k_indices.THREADS >= columns
    for (tokens, heads, top_k), (m_tiles, cluster) in {
        (8, 16, 2048): (1, 16),
        (16, 16, 2048): (1, 8),
        (128, 16, 2048): (1, 2),
        (1, 5, 100): (1, 2),
        (64, 16, 2048): (1, 2),
        (64, 128, 2048): (2, 1),
        (64, 128, 4096): (2, 2),
    }.items():
        spec = SelectedSpec.of(sparse_call(tokens=tokens, heads=heads, top_k=top_k), 132)
        assert (spec.m_tiles, spec.cluster) == (m_tiles, cluster), (tokens, heads, top_k)


def test_when_all_parts_run_at_once() -> None:
    for (tokens, heads, top_k), parts in {
        (8, 16, 2048): 16,
        (1, 5, 100): 1,
        (1, 16, 16384): 128,
        (1, 16, 16385): 0,
        (9, 16, 2048): 0,
        (9, 16, 1800): 0,
        (8, 16, 2049): 0,
    }.items():
        assert selected.few_parts(sparse_call(tokens=tokens, heads=heads, top_k=top_k), 132) == parts


def sparse_call(**changed: Any) -> LatentCall:
    tokens, heads, rank, width, top_k = (
        changed.pop(name, n)
        for name, n in (("tokens", 2), ("heads", 16), ("rank", 512), ("width", 576), ("top_k", 2048))
    )
    make: dict[str, Any] = {"dtype": changed.pop("dtype", torch.bfloat16), "device": "meta"}
    ints = {"dtype": torch.int32, "device": "meta"}
    return LatentCall(
        q=changed.pop("q", torch.empty(tokens, heads, width, **make)),
        kv_cache=changed.pop("kv_cache", torch.empty(5, 64, 1, width, **make)),
        block_table=torch.empty(2, 3, **ints),
        seq_lens=torch.empty(2, **ints),
        query_start_loc=torch.empty(3, **ints),
        out=torch.empty(tokens, heads, rank, **make),
        lse=None,
        max_query_len=1,
        scale=1.0,
        indices=torch.empty(tokens, top_k, **ints),
        **changed,
    )


def index_call(**changed: Any) -> IndexCall:
    tokens, heads, block_size = (changed.pop(n, d) for n, d in (("tokens", 2), ("heads", 64), ("block", 64)))
    make: dict[str, Any] = {"dtype": changed.pop("dtype", torch.bfloat16), "device": "meta"}
    ints = {"dtype": torch.int32, "device": "meta"}
    keys = torch.empty(5, block_size, 1, 128, **make)
    scales = torch.empty(5, block_size, device="meta") if changed.pop("fp8", False) else None
    return IndexCall(
        q=torch.empty(tokens, heads, changed.pop("width", 128), **make),
        weights=torch.empty(tokens, heads, device="meta"),
        k_cache=changed.pop("k_cache", keys if scales is None else keys.to(torch.float8_e4m3fn)),
        block_table=torch.empty(2, 3, **ints),
        seq_lens=torch.empty(2, **ints),
        query_start_loc=torch.empty(3, **ints),
        logits=torch.empty(tokens, 3 * block_size, device="meta"),
        max_query_len=1,
        k_scale=changed.pop("k_scale", scales),
        **changed,
    )


SPARSE_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "torch.float32 and torch.float32, not bfloat16 or float16"),
    "another rank": ({"width": 320, "rank": 192}, "192 + 128 columns"),
    "e4m3 out": ({"output_scale": torch.empty(1, device="meta")}, "output_scale"),
    "many positions": ({"top_k": 40000}, "40000 positions: at most 16384"),
    "q apart": (
        {"q": torch.empty(2, 16, 580, dtype=torch.bfloat16, device="meta")[..., :576]},
        "q with strides (9280, 580, 1)",
    ),
}
INDEX_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "torch.float32, not bfloat16"),
    "e4m3 for float16": ({"dtype": torch.float16, "fp8": True}, "torch.float16, not bfloat16"),
    "many tokens": ({"tokens": 600}, "600 tokens x 64 heads of 128"),
    "many heads": ({"heads": 128}, "2 tokens x 128 heads of 128"),
    "odd blocks": ({"block": 48}, "blocks of 48 tokens"),
    "scales apart": (
        {"fp8": True, "k_scale": torch.empty(5, 65, device="meta")[:, :64]},
        "k_scale with strides (65, 1)",
    ),
}


def why_not(kernel: ModuleType, call: LatentCall) -> str | None:
    found: str | None = selected.why_none(call, (9, 0)) or kernel.why_not(call)
    return found


def test_what_is_left_to_other_kernels() -> None:
    for changed, said in SPARSE_REFUSED.values():
        assert (why_not(selected, sparse_call(**changed)) or "").startswith(said), said
    for changed, said in INDEX_REFUSED.values():
        assert (index_logits.why_not(index_call(**changed), (9, 0)) or "").startswith(said), said
    rows, found = torch.empty(3, 300001, device="meta"), torch.empty(3, 5, device="meta")
    assert (top_k_indices.why_not(rows, found, (9, 0)) or "").startswith("rows of 300001 logits")
    assert (top_k_indices.why_not(rows[:, :201], found, (9, 0)) or "").startswith("logits with strides")
    for capability in ((8, 0), (10, 0)):
        said = f"compute capability {capability[0]}.0, not 9.0"
        assert selected.why_none(sparse_call(), capability) == said
        assert index_logits.why_not(index_call(), capability) == said
        assert top_k_indices.why_not(rows, found, capability) == said


def test_many_heads_of_few_tokens_and_logits_of_few_are_left_to_triton() -> None:
    for tokens, heads in ((8, 16), (300, 5), (128, 32), (32, 64), (16, 128)):
        assert selected.why_slower(sparse_call(tokens=tokens, heads=heads)) is None
    for tokens, heads in ((8, 17), (100, 32), (31, 64), (15, 128)):
        assert selected.why_slower(sparse_call(tokens=tokens, heads=heads)) is not None
    for tokens, columns, fewer in ((1, 16384, True), (1, 16385, False), (2, 64, False)):
        call = index_call(tokens=tokens)._replace(logits=torch.empty(tokens, columns, device="meta"))
        assert (index_logits.why_slower(call) is not None) == fewer


def test_which_calls_the_kernel_of_many_heads_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a CTA, 64, and CTAs that are worth it; it has no most positions."""
    monkeypatch.setattr(gpu, "capability", lambda _: (9, 0))
    fp8 = {"kv_cache": torch.empty(5, 64, 1, 656, dtype=torch.float8_e4m3fn, device="meta")}
    for changed in (
        {},
        {"tokens": 24, **fp8},
        {"dtype": torch.float16},
        {"heads": 33},
        {"tokens": 8, "heads": 65},
        {"top_k": 40000},
    ):
        call = sparse_call(**({"tokens": 64, "heads": 64} | changed))
        assert latent_selected.why_not(call) is None and mla_attention.route(call) is None
    for changed, said in (
        ({"tokens": 15}, "15 tokens of 64 heads"),
        ({"tokens": 23, **fp8}, "23 tokens of 64 heads"),
        ({"heads": 32}, "64 tokens of 32 heads"),
        ({"rank": 256, "width": 320}, "256 + 64 columns"),
        (
            {"kv_cache": torch.empty(5, 128, 1, 576, dtype=torch.bfloat16, device="meta")},
            "blocks of 128 tokens",
        ),
        ({"dtype": torch.float16, **fp8}, "queries of torch.float16 over rows of torch.float8_e4m3fn"),
        ({"output_scale": torch.empty(1, device="meta")}, "output_scale"),
    ):
        call = sparse_call(**({"tokens": 64, "heads": 64} | changed))
        assert (why_not(latent_selected, call) or "").startswith(said), said


def test_what_they_take() -> None:
    for changed in ({}, {"heads": 128}, {"dtype": torch.float16, "tokens": 300}, {"rank": 512, "top_k": 3}):
        assert why_not(selected, sparse_call(**changed)) is None
    for changed in ({}, {"fp8": True, "block": 16}, {"dtype": torch.float16, "block": 128, "heads": 3}):
        assert index_logits.why_not(index_call(**changed), (9, 0)) is None
    rows, found = torch.empty(3, 131072, device="meta"), torch.empty(3, 2048, device="meta")
    assert top_k_indices.why_not(rows, found, (9, 0)) is None
