"""Latent attention's Triton kernels compile at DeepSeek's sizes for GPUs that are not here; and the
indexer's."""

import re

import aot
import launched
import pytest
import torch
from op_inputs.latent_writes import make_latent_writes
from op_inputs.up_projections import make_up_projections

from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.mla.fp8_rows import ROW_DTYPE, row_bytes
from torchpaged.custom_ops.mla.triton import config

#: Bytes per thread that Hopper's may keep in local memory: its sums take half of 255 registers.
HOPPERS_SPILLS = 512


def latent_launches(
    target: str,
    dtype: torch.dtype,
    heads: int,
    split: bool,
    rope: int = 64,
    sparse: bool = False,
    fp8: bool = False,
    output_scale: torch.Tensor | None = None,
) -> list[launched.Launch]:
    """Of ``mla_attention`` for one token; ``split``: its context is long enough for parts; ``sparse``: it
    selects as many keys; ``fp8``: rows of the pool are."""
    columns = 64 if split else 1
    positions = torch.zeros(1, 16 * columns, dtype=torch.int32) if sparse else None
    pool = torch.zeros(columns + 1, 16, 1, 512 + rope, dtype=dtype)
    if fp8:
        pool = torch.zeros(columns + 1, 16, 1, row_bytes(512, rope), dtype=torch.uint8).view(ROW_DTYPE)
    with launched.recorded(target) as launches:
        BACKEND_OPS["triton"].mla_attention(
            torch.zeros(1, heads, 512 + rope, dtype=dtype),
            pool,
            torch.arange(1, columns + 1, dtype=torch.int32)[None],
            torch.tensor([9], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.zeros(1, heads, 512, dtype=dtype if output_scale is None else ROW_DTYPE),
            max_query_len=1,
            scale=0.1,
            indices=positions,
            output_scale=output_scale,
        )
    names = ["selected_kernel" if sparse else "mla_kernel", "merge_kernel"]
    assert [launch.name for launch in launches] == names[: 1 + split]
    return launches


@pytest.mark.slow_cases(but=("*-sm_90-bf16-128",))
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [(torch.bfloat16, 128), (torch.bfloat16, 16), (torch.float32, 128)],
    ids=("bf16-128", "bf16-16", "fp32-128"),
)
@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_attend_compiles(sparse: bool, target: str, dtype: torch.dtype, heads: int) -> None:
    for split in (True, False):
        launch = latent_launches(target, dtype, heads, split, sparse=sparse)[0]
        found = aot.resources(launched.compile_launch(launch, target))
        assert found["spilled"] <= (HOPPERS_SPILLS if target == "sm_90" and dtype != torch.float32 else 0), (
            found
        )


@pytest.mark.slow_cases(but=("dense-sm_90-16",))
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("target", [target for target in aot.TARGETS if target != "sm_80"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_rows_of_fp8_compile(sparse: bool, target: str, heads: int) -> None:
    """What they are converted to goes through shared memory once: nothing there is read by single bytes."""
    launch = latent_launches(target, torch.bfloat16, heads, True, sparse=sparse, fp8=True)[0]
    compiled = launched.compile_launch(launch, target)
    found = aot.resources(compiled)
    assert found["spilled"] <= (0 if target == "gfx942" else 64), found
    assert re.search(r"ld\.shared\.[bsu]8", compiled.asm.get("ptx", "")) is None


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in aot.TARGETS if target != "sm_80"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_output_scale_compiles(sparse: bool, target: str) -> None:
    for split in (True, False):
        options = {"sparse": sparse, "output_scale": torch.ones(1)}
        for launch in latent_launches(target, torch.bfloat16, 16, split, **options):
            assert aot.resources(launched.compile_launch(launch, target))["spilled"] <= 8


@pytest.mark.slow_cases("sm_100", "gfx942")
@pytest.mark.parametrize("target", [target for target in aot.TARGETS if target != "sm_80"])
def test_write_of_fp8_rows_compiles(target: str) -> None:
    rows = torch.zeros(2, 16, 1, 656, dtype=torch.uint8).view(ROW_DTYPE)
    kv_c, k_pe = torch.zeros(3, 512, dtype=torch.bfloat16), torch.zeros(3, 64, dtype=torch.bfloat16)
    inputs = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": rows, "slot_mapping": torch.tensor([3, 4, 5])}
    (compiled,) = launched.check_without_spills("write_latent", inputs, target)
    assert compiled.metadata.name == "write_fp8_kernel"


@pytest.mark.slow_cases(but=("sm_90-*-False",))
@pytest.mark.parametrize("fp8", [False, True], ids=str)
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_rope_write_latent_compiles(target: str, dtype: torch.dtype, tokens: int, fp8: bool) -> None:
    """At the sizes of DeepSeek-V2-Lite, and of GLM-4.7-Flash, whose heads are 192 wide."""
    if fp8 and target == "sm_80":
        pytest.skip("rows of fp8 need compute capability 8.9")
    for nope in (128, 192):
        sizes = {"nope": nope, "rank": 512, "rope": 64, "rotation": "pairs_to_halves", "normed": True}
        inputs = make_latent_writes(
            num_tokens=tokens, num_heads=16, block_size=16, dtype=dtype, fp8=fp8, **sizes
        )
        launched.check_without_spills("rope_write_latent", inputs, target)


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_up_project_values_compiles(target: str, tokens: int) -> None:
    sizes = {"num_tokens": tokens, "num_heads": 16, "rank": 512, "width": 128}
    launched.check_without_spills(
        "up_project_values", make_up_projections(**sizes, dtype=torch.bfloat16), target
    )


@pytest.mark.slow
def test_the_widest_rotated_keys_fit() -> None:
    launched.compile_launch(latent_launches("sm_90", torch.bfloat16, 128, True, rope=config.MAX_ROPE)[0])


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_merge_compiles(target: str) -> None:
    launch = latent_launches(target, torch.bfloat16, 128, True)[1]
    assert aot.resources(launched.compile_launch(launch, target))["spilled"] == 0


#: e4m3fn is no type of theirs.
NO_E4M3 = ("sm_80", "gfx942")


@pytest.mark.slow_cases(but=("sm_90-fp8", "sm_80-bf16"))
@pytest.mark.parametrize("keys", ["bf16", "fp8", "fp32"])
@pytest.mark.parametrize("target", aot.TARGETS)
def test_compiles(target: str, keys: str) -> None:
    if keys == "fp8" and target in NO_E4M3:
        pytest.skip("no e4m3")
    dtype = torch.float32 if keys == "fp32" else torch.bfloat16
    pool, scales = torch.zeros(9, 64, 1, 128, dtype=dtype), None
    if keys == "fp8":
        pool, scales = pool.to(torch.float8_e4m3fn), torch.ones(9, 64)
    table, lens = torch.arange(1, 9, dtype=torch.int32)[None], torch.tensor([400], dtype=torch.int32)
    starts, logits = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 512)
    ops = BACKEND_OPS["triton"]
    with launched.recorded(target) as launches:
        ops.write_index_keys(torch.zeros(1, 128, dtype=dtype), pool, torch.tensor([70]), scales)
        q, weights = torch.zeros(1, 64, 128, dtype=dtype), torch.zeros(1, 64)
        ops.index_logits(q, weights, pool, table, lens, starts, logits, max_query_len=1, k_scale=scales)
    assert len(launches) == 2
    for launch in launches:
        assert aot.resources(launched.compile_launch(launch, target))["spilled"] == 0
