"""Every kernel compiles for sm_80, sm_90, sm_100 and gfx942 on a machine without a GPU; the default tiles
spill nothing."""

import re
from typing import Any

import aot
import launched
import pytest
import torch

from torchpaged import BlockSparse
from torchpaged.custom_ops import BACKEND_OPS
from torchpaged.custom_ops.block_ops.triton.packing import pack_blocks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tree, window, alibi": {"tree": True, "window_left": 100, "alibi": True},
    # Phi-3-small's; of 3 heads each kv head sees others, of 8 all blocks
    "blocks": {"block_sparse": BlockSparse(64, 4, 8, head_step=1)},
    "narrow blocks, window": {"block_sparse": BlockSparse(8, 4, 8), "window_left": 100, "alibi": True},
    "everything": {
        "window_left": 100,
        "chunk_size": 256,
        "logits_soft_cap": 30.0,
        "alibi": True,
        "sinks": True,
        "lse": True,
    },
}
EARLY = ("sm_90", "sm_100")  # programmatic dependent launch


CASES = [
    ("bf16", 128, 4, "plain"),
    ("bf16", 64, 3, "plain"),
    ("bf16", 128, 4, "everything"),
    ("fp16", 80, 8, "plain"),
    ("fp32", 64, 3, "plain"),
    ("bf16", 256, 8, "plain"),
    ("bf16", 128, 4, "blocks"),
    ("bf16", 256, 8, "blocks"),
    ("fp32", 64, 3, "narrow blocks, window"),
]


def compile_decode(
    target: str, case: tuple[str, int, int, str], query_lens: tuple[int, ...] = (1,) * 100, **changed: Any
) -> Any:
    dtype, dim, group, options = case
    (launch,) = launched.attention_launches(
        target, dtype, dim, group, query_lens, 1024, **OPTIONS[options], **changed
    )
    assert launch.name == "decode_kernel"
    return launched.compile_launch(launch, target)


@pytest.mark.slow_cases(but=("sm_90-bf16-128-4-plain", "gfx942-bf16-64-3-plain"))
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("target", aot.TARGETS)
def test_decode_compiles(target: str, case: tuple[str, int, int, str]) -> None:
    dtype, _, _, options = case
    compiled = compile_decode(target, case)
    if target == "sm_90" and options == "plain" and dtype != "fp32":
        aot.check_spills(compiled)
    if target != "gfx942" and dtype == "bf16" and options == "plain":
        assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "16-byte copies of keys and values"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [{"query_lens": (1,) * 1025}, {"block_size": 8}, {"block_size": 64}], ids=("scans", "8", "64")
)
def test_decode_options_compile(changed: dict[str, Any]) -> None:
    aot.check_spills(compile_decode("sm_90", CASES[0], **changed))


def test_decode_of_few_blocks_spills_nothing() -> None:
    aot.check_spills(compile_decode("sm_90", ("bf16", 128, 4, "blocks"), (2,) * 100))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_decode_of_trees_compiles(target: str) -> None:
    compiled = compile_decode(target, ("bf16", 128, 4, "tree, window, alibi"), (2,) * 100)
    if target == "sm_90":
        aot.check_spills(compiled)


def innermost_loop(ptx: str) -> str:
    """The loop around the matrix products."""
    lines = ptx.split("\n")
    products = [i for i, line in enumerate(lines) if "mma.sync" in line]
    label = next(i for i in range(products[0], 0, -1) if lines[i].startswith("$L__BB"))
    name = lines[label].split(":")[0]
    end = next(i for i in range(products[-1], len(lines)) if "bra" in lines[i] and name in lines[i])
    return "\n".join(lines[label:end])


@pytest.mark.slow_cases("8")
@pytest.mark.parametrize("group", [4, 8])
def test_decode_loop_stays_in_registers(group: int) -> None:
    """Scores become probabilities without a trip through shared memory; 8 queries fill a product; loads of 16
    bytes only."""
    loop = innermost_loop(compile_decode("sm_90", ("bf16", 128, group, "plain")).asm["ptx"])
    assert "st.shared" not in loop
    assert "ld.shared" not in loop
    assert loop.count("mma.sync") == loop.count("cp.async.cg") == loop.count("ldmatrix.sync") == 2 * 128 // 16
    assert loop.count("bar.sync") == 2


@pytest.mark.slow_cases(but=("sm_90-bf16-128-4-plain",))
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3]], ids=lambda c: "-".join(map(str, c)))
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_decode_with_e4m3_results_compiles(target: str, case: tuple[str, int, int, str]) -> None:
    compiled = compile_decode(target, case, fp8_results=True)
    if case == CASES[0]:
        aot.check_spills(compiled)


def test_fp8_caches_compile_for_sm_90() -> None:
    aot.check_spills(compile_decode("sm_90", CASES[0], kv_dtype="fp8e4nv", scales=True))


def early_steps(compiled: Any) -> list[str]:
    """What orders a cache write and its neighbours in the launch, in the order of the code; each once per run
    of the same."""
    found = re.findall(r"griddepcontrol\.\w+|st\.global|fence\.acq_rel\.gpu", compiled.asm["ptx"])
    return [step for i, step in enumerate(found) if i == 0 or step != found[i - 1]]


LETS_READ_EARLY = ["griddepcontrol.launch_dependents", "griddepcontrol.wait", "st.global"]
READ_WHEN_WRITTEN = ["griddepcontrol.wait", "st.global", "fence.acq_rel.gpu"]


def compile_op(op: str, *arguments: Any, target: str = "sm_90", **options: Any) -> Any:
    """What an op's first launch compiles to."""
    with launched.recorded(target) as launches:
        getattr(BACKEND_OPS["triton"], op)(*arguments, **options)
    return launched.compile_launch(launches[0], target)


def compile_write(target: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    """``write_kv`` into pools of a dtype, with scales of one number where they are of fp8."""
    k, v = torch.zeros(2, 32, 8, 128, dtype=torch.bfloat16)
    pools = torch.zeros(2, 4, 16, 8, 128).to(dtype)
    scales = [torch.ones(1), torch.ones(1)] if dtype != k.dtype else []
    return compile_op("write_kv", k, v, *pools, torch.arange(32), *scales, target=target, **options)


@pytest.mark.slow_cases(but=("sm_90",))
@pytest.mark.parametrize("target", aot.TARGETS)
def test_small_kernels_compile(target: str) -> None:
    for are_query_tokens in (False, True):
        written = compile_write(target, are_query_tokens=are_query_tokens)
        aot.check_spills(written)
        if target in EARLY:
            assert early_steps(written) == (LETS_READ_EARLY if are_query_tokens else READ_WHEN_WRITTEN)
    out_a, out_b, out = torch.zeros(3, 32, 8, 128, dtype=torch.bfloat16)
    lse_a, lse_b, lse = torch.zeros(3, 32, 8)
    merged = compile_op("merge_attn_states", out_a, lse_a, out_b, lse_b, out, lse, target=target)
    aot.check_spills(merged)
    pools = torch.zeros(2, 4, 16, 8, 128, dtype=torch.bfloat16)
    copied = compile_op("copy_blocks", *pools, torch.tensor([[1, 2]]), target=target)
    aot.check_spills(copied)
    if target in EARLY:
        assert early_steps(copied) == ["st.global", "fence.acq_rel.gpu"]
    with launched.recorded(target) as launches:
        for unpack in (False, True):
            bases, sizes, blocks = torch.zeros(3, 4, dtype=torch.int64)
            pack_blocks(bases, sizes, blocks, 0, torch.zeros(4, 64, dtype=torch.int64), unpack)
    for launch in launches:
        aot.check_spills(launched.compile_launch(launch, target))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["fp8e4nv", "fp8e5"])
def test_fp8_writes_keep_nan(dtype: torch.dtype) -> None:
    """The clamp into an fp8 dtype's range must not be the kind of minimum and maximum that drops NaN."""
    ptx = compile_write("sm_90", dtype).asm["ptx"]
    clamps = re.findall(r"\b(?:min|max)[.\w]*f32", ptx)
    assert clamps, set(clamps)
    assert all("NaN" in clamp for clamp in clamps), set(clamps)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_e5m2_is_written_by_our_own_rounding(target: str) -> None:
    """Not by Triton's conversion, which under 3.6 on sm_80 makes -0 of NaN;
    tests/custom_ops/test_fp8_writes.py checks what ours gives."""
    ptx = compile_write(target, torch.float8_e5m2).asm["ptx"]
    assert re.findall(r"\bcvt\.f32\.bf16", ptx)
    assert not re.findall(r"\bcvt[.\w]*(?:f16x?2?\.f32|e5m2)", ptx)


ROPE = {  # (num_heads, num_kv_heads, head_dim, rotary_dim), num_tokens, options
    "one_token": ((32, 8, 128, 128), 1, {}),
    "many_tokens": ((32, 8, 128, 128), 512, {}),
    "smollm2": ((9, 3, 64, 64), 8, {}),
    "qwen3": ((32, 8, 128, 128), 8, {"norms": True}),
    "gptj": ((16, 16, 256, 64), 8, {"interleaved": True}),
    "phi": ((32, 32, 80, 32), 8, {"norms": True}),
    "one_norm": ((32, 32, 80, 32), 8, {"norms": True, "without": "k_norm"}),
    "fp8": ((32, 8, 128, 128), 8, {"fp8": True}),
}


@pytest.mark.slow_cases(but=("sm_90-*",))
@pytest.mark.parametrize("case", ROPE)
@pytest.mark.parametrize("target", aot.TARGETS)
def test_rope_write_kv_compiles(target: str, case: str) -> None:
    (heads, kv_heads, dim, rotary), num_tokens, options = ROPE[case]
    fp8 = options.get("fp8", False)
    if fp8 and target in ("sm_80", "gfx942"):
        pytest.skip("float8_e4m3fn needs compute capability 8.9")
    q = torch.zeros(num_tokens, heads, dim, dtype=torch.bfloat16)
    k, v = torch.zeros(2, num_tokens, kv_heads, dim, dtype=torch.bfloat16)
    pools = torch.zeros(2, num_tokens // 16 + 2, 16, kv_heads, dim).to(
        torch.float8_e4m3fn if fp8 else torch.bfloat16
    )
    given: dict[str, Any] = {"interleaved": options.get("interleaved", False)}
    if options.get("norms"):
        given["q_norm"], given["k_norm"] = torch.ones(2, dim, dtype=torch.bfloat16)
        given.pop(options.get("without"), None)
    if fp8:
        given["k_scale"], given["v_scale"] = torch.ones(1), torch.ones(1)
    compiled = compile_op(
        "rope_write_kv",
        q,
        k,
        v,
        torch.arange(num_tokens),
        torch.zeros(num_tokens, rotary),
        torch.arange(16, num_tokens + 16),
        torch.empty_like(q),
        *pools,
        are_query_tokens=case != "many_tokens",
        target=target,
        **given,
    )
    aot.check_spills(compiled)
    if target in EARLY:
        branches = [*LETS_READ_EARLY, *LETS_READ_EARLY[1:]]  # programs of q, and of k and v, wait apart
        assert early_steps(compiled) == (READ_WHEN_WRITTEN if case == "many_tokens" else branches)
    if target != "gfx942":
        assert "ld.global.v4" in compiled.asm["ptx"], "16-byte accesses"
        assert "st.global.v4" in compiled.asm["ptx"], "16-byte accesses"
        narrow = re.findall(r"st\.global\.(?:b8|b16|b32)", compiled.asm["ptx"])
        # a small part of a head does not fill a warp with 16-byte accesses
        assert rotary < dim or not narrow, narrow
