"""The reader of machine code: spills inside innermost loops are found, those before, behind, beside and
around them are not."""

import pytest
import sass
import torch

#: Two loops, one in the other, a block of the inner one behind the end of the kernel, and the trap that ends
#: every kernel.
CODE = """
\t.headerflags\t@"EF_CUDA_SM90"
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   {before} ;
.L_x_0:
        /*0020*/                   {outer} ;
.L_x_1:
        /*0030*/              @!P0 BRA `(.L_x_4) ;
        /*0040*/                   BSSY B0, `(.L_x_2) ;
.L_x_2:
        /*0050*/                   {inner} ;
        /*0060*/                   ISETP.NE.AND P1, PT, R2, RZ, PT ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   BRA P2, `(.L_x_0) ;
        /*0090*/                   BRA `(.L_x_3) ;
        /*00a0*/                   {dead} ;
.L_x_3:
        /*00b0*/                   {behind} ;
        /*00c0*/              @!P4 EXIT ;
        /*00d0*/                   STG.E desc[UR4][R2.64], R5 ;
        /*00e0*/                   EXIT ;
.L_x_4:
        /*00f0*/                   {far} ;
        /*0100*/                   BRA `(.L_x_2) ;
.L_x_5:
        /*0110*/                   BRA `(.L_x_5);
"""
PLACES = ("before", "outer", "inner", "dead", "behind", "far")


def code(**instructions: str) -> str:
    return CODE.format(**(dict.fromkeys(PLACES, "NOP") | instructions))


@pytest.mark.parametrize(
    "instruction",
    ["STL [R1+0x8], R7", "LDL.LU.64 R4, [R1]", "@P3 LDL R4, [R1+0x4]", "@!UP0 STL.128 [R1], R8"],
)
@pytest.mark.parametrize("place", PLACES)
def test_spills_in_inner_loops(place: str, instruction: str) -> None:
    inside = place in ("inner", "far")
    assert sass.loop_spills(code(**{place: instruction})) == ([instruction] if inside else [])


@pytest.mark.parametrize(
    "instruction",
    [
        "LDG.E R4, desc[UR4][R2.64]",
        "LDSM.16.M88.4 R4, [R8]",
        "STS [R1], R7",
        "LDGSTS.E.128 [R9], desc[UR4][R2.64]",
    ],
)
def test_other_memory_is_no_spill(instruction: str) -> None:
    assert sass.loop_spills(code(inner=instruction)) == []


@pytest.mark.parametrize(
    "text", ["", "kernel:\n", code(inner="BRX R4 -0x50"), code(inner="BRA `(.L_x_9)"), code(inner="BRA 0x40")]
)
def test_what_cannot_be_followed_is_no_proof(text: str) -> None:
    with pytest.raises(ValueError, match="machine code|branch"):
        sass.loop_spills(text)


def test_descriptors_made_of_a_parameter_are_found() -> None:
    lines = (
        "ULDC UR6, c[0x0][0x280]",
        "UIADD3 UR4, UP0, UR6, 0x40, URZ",
        "R2UR UR6, R81",
        "UMOV UR7, 0x80000020",
        "HGMMA.64x32x16.F32 R56, R24, gdesc[UR4].tnspB, R56",
        "UMOV UR6, UR4",
        "HGMMA.64x32x16.F32 R56, R28, gdesc[UR4].tnspB, R56, gsb0",
    )
    code = "\n".join(f"        /*{n:04x}*/                   {line} ;" for n, line in enumerate(lines))
    code = "        /*fff0*/                   S2R R81, SR_CgaCtaId ;\n" + code
    assert sass.strange_descriptors(code) == [lines[-1]]


@pytest.mark.parametrize(("origin", "lost"), [("S2R R4, SR_CgaCtaId", 0), ("LDC R4, c[0x0][0x230]", 1)])
def test_spilled_descriptors_come_back_as_they_were(origin: str, lost: int) -> None:
    lines = (
        origin,
        "STL.64 [R1+0x8], R4",
        "LDL.LU R9, [R1+0x8]",
        "R2UR UR6, R9",
        "UMOV UR7, 0x40000040",
        "HGMMA.64x64x16.F32 R152, R184, gdesc[UR4], R152",
    )
    code = "\n".join(f"        /*{n:04x}*/                   {line} ;" for n, line in enumerate(lines))
    assert len(sass.strange_descriptors(code)) == lost


@pytest.mark.slow_cases(but_every=2)
@pytest.mark.parametrize("widths", [(96, 32), (64, 32), (128, 16), (32, 64), (32, 32)], ids=str)
def test_values_beside_wider_keys_are_read_where_they_lie(widths: tuple[int, int]) -> None:
    """ptxas 12.8 lost the base of the values behind the first 16 keys of a tile, over fp8 and from 64 query
    rows on, where values were 32 wide and keys wider: outputs were wrong and the LSE was right."""
    import launched

    from torchpaged.custom_ops import BACKEND_OPS
    from torchpaged.testing import BatchSpec, make_batch, run_paged_attention

    dim, dim_v = widths
    batch = make_batch(
        BatchSpec("suffixes", (71, 34, 24), (1, 8, 4)),
        num_heads=5,
        num_kv_heads=1,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        scales="per_head",
    )
    with launched.recorded() as launches:
        run_paged_attention(BACKEND_OPS["triton"], batch)
    (launch,) = launches
    code = sass.machine_code(launched.compile_launch(launch))
    assert "HGMMA" in code
    assert not sass.strange_descriptors(code)
