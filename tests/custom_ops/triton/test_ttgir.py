"""Copies to memory that products still read are found in TTGIR (`launched.compile_launch` looks for them)."""

import pytest
import ttgir

#: What Triton 3.6 and 3.7.1 made of keys whose products and norms were one loop's: two buffers, two rounds
#: ahead, while the products of a round may run on into the next one.
RACE = """
    %keys = ttg.local_alloc : () -> !ttg.memdesc<2x64x64xbf16, #shared, #smem, mutable>
    %a = ttg.memdesc_index %keys[%c0] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    %b = ttg.async_copy_global_to_local %ptrs, %a mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
    %c = ttg.memdesc_index %keys[%c1] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
    %d = ttg.async_copy_global_to_local %ptrs, %c mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
    %e:2 = scf.for %n = %c0 to %c128 step %c64 iter_args(%x = %zero, %y = %zero) : i32 {
      %w = ttg.async_wait %t {num = 2 : i32}
      %f = ttg.memdesc_index %keys[%next] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %g = ttg.memdesc_trans %f {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16>
      %h = ttng.warp_group_dot %q, %g, %x {inputPrecision = 0 : i32, isAsync = true} : !ttg.memdesc<64x64>
      %i = ttng.warp_group_dot %f, %g, %y {inputPrecision = 0 : i32, isAsync = true} : !ttg.memdesc<64x64>
      %j:2 = ttng.warp_group_dot_wait %h, %i {pendings = 2 : i32} : tensor<64x64xf32>, tensor<64x64xf32>
      %k = ttg.memdesc_index %keys[%last] : !ttg.memdesc<2x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %l = ttg.async_copy_global_to_local %more, %k mask %m : tensor<64x64x!tt.ptr<bf16>> -> <64x64xbf16>
      scf.yield %j#0, %j#1 : tensor<64x64xf32>, tensor<64x64xf32>
    }
"""


def test_the_race_is_found() -> None:
    (copy,) = ttgir.overwritten(RACE)
    assert copy.startswith("%l = ttg.async_copy_global_to_local %more, %k")


@pytest.mark.parametrize("pendings", [0, 1])
def test_who_is_waited_for(pendings: int) -> None:
    """With one product pending it is the later one, which reads the keys as well."""
    found = ttgir.overwritten(RACE.replace("pendings = 2", f"pendings = {pendings}"))
    assert len(found) == pendings


def test_a_third_buffer_is_enough() -> None:
    """Products of the round before are waited for in this one."""
    assert ttgir.overwritten(RACE.replace("memdesc<2x", "memdesc<3x")) == []
    assert (
        len(
            ttgir.overwritten(
                RACE.replace("memdesc<2x", "memdesc<3x").replace("= 2 : i32} : ten", "= 4 : i32} : ten")
            )
        )
        == 1
    )


def test_names_are_those_of_their_region() -> None:
    """A later loop's memory has an earlier one's name, and its copies ahead of it are not added up."""
    first = RACE.replace("memdesc<2x", "memdesc<3x")
    assert ttgir.overwritten(first + first) == []
    assert len(ttgir.overwritten(first + RACE)) == 1


def test_what_is_no_ttgir_is_no_proof() -> None:
    with pytest.raises(ValueError, match="not TTGIR"):
        ttgir.overwritten("ret;")
