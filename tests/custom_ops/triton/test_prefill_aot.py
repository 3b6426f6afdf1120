"""The prefill kernel compiles for every target with the tiles that config.py chooses; on Hopper it is the
kernel it is meant to be.

Checked in the code for sm_90: no spills, wgmma, keys and values by cp.async, and products that are not
serialised: ptxas puts a wait behind every wgmma when it can't prove the registers free, which costs half the
speed and shows nowhere else.
"""

import itertools
import os
import re
import subprocess
import sys
from typing import Any

import aot
import launched
import pytest
import sass
import triton

from torchpaged import BlockSparse

EVERYTHING = {
    "window_left": 100,
    "chunk_size": 256,
    "logits_soft_cap": 30.0,
    "alibi": True,
    "sinks": True,
    "lse": True,
}
#: name -> dtype, head_dim, group, block size, max_query_len, max_seq_len, options
CASES: dict[str, tuple[str, int, int, int, int, int, dict[str, Any]]] = {
    "long_128": ("bf16", 128, 4, 16, 16384, 16384, {}),
    "short_128": ("bf16", 128, 4, 16, 512, 512, {}),
    "chunk_fp16": ("fp16", 128, 7, 16, 512, 32768, {"lse": True}),
    "long_64": ("bf16", 64, 3, 16, 4096, 4096, {}),
    "long_80": ("fp16", 80, 8, 16, 4096, 4096, {}),
    "window_128": ("bf16", 128, 4, 16, 4096, 4096, {"window_left": 100, "sinks": True}),
    "everything_128": ("bf16", 128, 4, 16, 4096, 4096, EVERYTHING),
    "short_everything_128": ("bf16", 128, 4, 16, 512, 512, EVERYTHING),
    "tree_128": ("bf16", 128, 4, 16, 64, 4096, {"tree": True}),
    "tree_window_128": (
        "bf16",
        128,
        4,
        16,
        64,
        4096,
        {"tree": True, "window_left": 9, "alibi": True, "sinks": True},
    ),
    "tree_everything_128": ("bf16", 128, 4, 16, 64, 4096, {"tree": True, **EVERYTHING}),
    "tree_everything_256": ("bf16", 256, 8, 16, 64, 4096, {"tree": True, **EVERYTHING}),
    "long_256": ("bf16", 256, 8, 16, 4096, 4096, {}),
    "long_192": ("bf16", 192, 1, 128, 4096, 4096, {}),
    "blocks_128": ("bf16", 128, 4, 16, 4096, 4096, {"block_sparse": BlockSparse(64, 4, 8, head_step=1)}),
    "narrow_blocks_128": (
        "bf16",
        128,
        4,
        16,
        512,
        512,
        {"block_sparse": BlockSparse(8, 4, 8), "window_left": 100, "sinks": True},
    ),
    "fp32_64": ("fp32", 64, 3, 16, 4096, 4096, {}),
}


def compile_prefill(
    target: str, case: str, mixed: bool = False, block_size: int | None = None, **changed: Any
) -> Any:
    """``mixed``: two decodes stand behind the prefill."""
    dtype, dim, group, block_size_of_case, max_query_len, max_seq_len, options = CASES[case]
    (launch, *decode) = launched.attention_launches(
        target,
        dtype,
        dim,
        group,
        (max_query_len, 1, 1) if mixed else (max_query_len,),
        max_seq_len,
        block_size or block_size_of_case,
        **options,
        **changed,
    )
    assert launch.name == "prefill_kernel"
    assert len(decode) == mixed
    return launched.compile_launch(launch, target)


def main_loop(code: str) -> str:
    """The instructions of the first loop with products that stands in no other: that of a program's
    one tile."""
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[range] = []
    for line in code.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.search(r"/\*[0-9a-f]{4,5}\*/", line):
            lines.append(line)
            back = re.search(r"\bBRA\b.*\.(L_x_\d+)", line)
            if back and back[1] in labels:
                loops.append(range(labels[back[1]], len(lines)))
    alone = [
        loop
        for loop in loops
        if not any(loop != other and loop[0] in other and loop[-1] in other for other in loops)
    ]
    return next(body for loop in alone if "HGMMA" in (body := "\n".join(lines[loop.start : loop.stop])))


def repeated_addresses(loop: str) -> int:
    """Asynchronous copies that take their address from the register of the copy before."""
    addresses = re.findall(r"LDGSTS\S* \[\S+\], desc\[\w+\]\[(R\d+)\.64", loop)
    assert len(addresses) == 16
    return sum(a == b for a, b in itertools.pairwise(addresses))


OTHER_TARGETS = [
    (target, case)
    for target in ("sm_80", "sm_100", "gfx942")
    for case in ("long_128", "everything_128", "long_256", "blocks_128", "fp32_64")
]


@pytest.mark.slow_cases(but=("sm_90-long_128", "sm_90-long_64"))
@pytest.mark.parametrize(("target", "case"), [("sm_90", case) for case in CASES] + OTHER_TARGETS)
def test_compiles(target: str, case: str) -> None:
    compiled = compile_prefill(target, case)
    if target == "sm_90" and not case.startswith("fp32"):
        aot.check_spills(compiled)


@pytest.mark.slow_cases(but=("long_128",))
@pytest.mark.parametrize("case", ["long_128", "short_128", "long_64", "long_80", "window_128"])
def test_hopper_code(case: str) -> None:
    compiled = compile_prefill("sm_90", case)
    ptx, code = compiled.asm["ptx"], sass.machine_code(compiled)
    assert "wgmma.mma_async" in ptx
    assert "mma.sync" not in ptx
    assert "cp.async.cg.shared.global" in ptx, "16-byte asynchronous loads of keys and values"
    waits, products = code.count("WARPGROUP.DEPBAR"), len(re.findall(r"\bHGMMA\.", code))
    assert 0 < waits < products / 3, f"{waits} waits for {products} products: they are serialised"


@pytest.mark.slow_cases(but=("64",))
@pytest.mark.parametrize("block_size", [1, 16, 32, 64, 128, 256])
def test_block_sizes_on_hopper(block_size: int) -> None:
    """No block size brings spills: 17 reloads in the main loop once cost a third of the speed at block
    size 64."""
    compiled = compile_prefill("sm_90", "long_128", block_size=block_size, lse=True)
    aot.check_spills(compiled)
    assert repeated_addresses(main_loop(sass.machine_code(compiled))) <= 2, (
        "an address register of its own for each copy"
    )
    copies = re.findall(
        r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)", compiled.asm["ptx"]
    )
    assert copies, "16-byte asynchronous loads only"
    assert set(copies) == {"10"}, "16-byte asynchronous loads only"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", ["long_128", "everything_128"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_without_decodes_compiles(target: str, case: str) -> None:
    """The prefill half of a mixed batch. Surplus tiles in a branch of their own once spilled; narrower tiles
    of keys there don't."""
    compiled = compile_prefill(target, case, mixed=True)
    if target == "sm_90":
        aot.check_spills(compiled)


@pytest.mark.slow_cases(but=("long_128-4",))  # compiled for the next test, too
@pytest.mark.parametrize(("case", "copies"), [("long_128", 4), ("window_128", 6), ("everything_128", 3)])
def test_copies_of_the_loop_and_their_products(case: str, copies: int) -> None:
    """Each copy of the loop is paid for when it is compiled: with every mask six took ptxas four times as
    long as three. In the kernel for mixed batches, too, products are not serialised: the surplus tiles' loop,
    pipelined, once had ptxas do that in all of them (triton 3.6)."""
    code = sass.machine_code(compile_prefill("sm_90", case, mixed=True))
    program = sass.instructions(code)
    loops = sass._innermost_loops(program, set(range(len(program))))
    with_products = [loop for loop in loops if any(program[at].opcode == "HGMMA" for at in loop)]
    assert len(with_products) == copies
    for loop in with_products:
        waits, products = (
            sum(opcode in program[at].text for at in loop) for opcode in ("WARPGROUP.DEPBAR", "HGMMA.")
        )
        assert 0 < waits < products / 3, f"{waits} waits for {products} products: they are serialised"


@pytest.mark.parametrize("mixed", [False, True])
def test_copies_have_addresses_of_their_own(mixed: bool) -> None:
    """With a few numbers more alive across the loop ptxas made the addresses one after another in one
    register, each waiting until the copy before had read its own: 15 % slower, and no spill shows it."""
    loop = main_loop(sass.machine_code(compile_prefill("sm_90", "long_128", mixed=mixed)))
    assert repeated_addresses(loop) <= 2, loop
    assert len(re.findall(r"\bLDG\.", loop)) == 2, "eight block ids in two loads"


@pytest.mark.long
@pytest.mark.slow
def test_fp8_caches_compile_for_sm_90() -> None:
    compile_prefill("sm_90", "long_128", kv_dtype="fp8e4nv", scales=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_e4m3_results_compile(target: str) -> None:
    compiled = compile_prefill(target, "long_128", fp8_results=True)
    aot.check_spills(compiled)
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]


@pytest.mark.slow_cases("sm_80")
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_nan_in_an_e5m2_cache_stays_nan(target: str) -> None:
    """Straight to bfloat16 Triton goes by a shift and a product with 2^112, of which NaN and inf come out
    finite; by float16 they stay."""
    # a process of its own: Triton 3.6 keeps the conversions of the first target that it compiles for
    if triton.__version__.startswith("3.6.") and os.environ.get("ONE_TARGET") != target:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "slow or not slow",  # one of the two is slow
            f"{__file__}::test_nan_in_an_e5m2_cache_stays_nan[{target}]",
        ]
        done = subprocess.run(
            command, env={**os.environ, "ONE_TARGET": target}, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout[-3000:]
        assert "1 passed" in done.stdout, done.stdout[-3000:]
        return
    ptx = compile_prefill(target, "short_128", kv_dtype="fp8e5", scales=True).asm["ptx"]
    assert not re.findall(r"0x7780(?:0000|7780)", ptx)
    assert re.findall(r"cvt[.\w]*bf16", ptx)


def test_an_unchanged_maximum_scales_by_one_exactly() -> None:
    """What was summed so far is scaled by ``exp2((old - new) * c)``, which is exp2(0) = 1 while the maximum
    stays. ``old * c - new * c`` becomes one fused multiply-add of a rounded product: not 0, so that every
    tile of a long row adds the same error."""
    ptx = compile_prefill("sm_90", "fp32_64").asm["ptx"]
    made_by = {
        m[2]: (m[1], m[3].split(", "))
        for m in re.finditer(r"^\s*([a-z][\w.]*)\s+(%\w+), ([^;]*);", ptx, re.MULTILINE)
    }
    scaled = 0
    for exponent in re.findall(r"ex2\.approx\S*\s+%\w+, (%\w+);", ptx):
        opcode, operands = made_by[exponent]
        scaled += opcode.startswith("mul.") and any(
            made_by.get(name, ("",))[0].startswith("sub.") for name in operands
        )
    loops_of_one_row = len(re.findall(r"ex2\.approx", ptx))
    assert 0 < scaled < loops_of_one_row, (
        f"{scaled} of {loops_of_one_row} exponentials are of a scaled difference"
    )
