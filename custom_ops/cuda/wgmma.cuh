// Hopper's warpgroup products, and what orders them. Needs sm_90a. FP16: numbers are float16, else bfloat16.
#pragma once

#include "machine.cuh"

// One instruction; `shape` and what follows the types, operands included. A macro, since its text must be a
// literal.
#define WGMMA(FP16, shape, ...)                                                                    \
  do {                                                                                             \
    if constexpr (FP16)                                                                            \
      asm volatile("wgmma.mma_async.sync.aligned." shape ".f32.f16.f16 " __VA_ARGS__);             \
    else                                                                                           \
      asm volatile("wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 " __VA_ARGS__);           \
  } while (0)
#define WGMMA8(shape, ...) asm volatile("wgmma.mma_async.sync.aligned." shape ".f32.e4m3.e4m3 " __VA_ARGS__)

// The sums of an instruction, which are its first operands, and what its text calls them: F of float d[N], D
// of float d[N][4], R of either. A4: 64 rows in registers.
#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F8(i) F4(i), F4(i + 4)
#define F16(i) F8(i), F8(i + 8)
#define F32(i) F16(i), F16(i + 16)
#define F64(i) F32(i), F32(i + 32)
#define D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define D16(n) D4(n), D4(n + 1), D4(n + 2), D4(n + 3)
#define A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define R4 "%0,%1,%2,%3"
#define R8 R4 ",%4,%5,%6,%7"
#define R16 R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define R24 R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R40 R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define R48 R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define R56 R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define R64 R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R80 R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define R96 R80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define R112 R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define R128 R112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// Descriptor of lines of 128 bytes, 16-byte columns swizzled by the line modulo 8. `at`: a multiple of 1024
// plus the k's offset; `groups`: bytes from 8 lines to the next 8; `columns`: from a square of 64 columns to
// the next one, where the instruction takes several. `layout`: 1, or 2 for lines of 64 bytes, 3 of 32, 0
// without a swizzle, where `columns` are those of 8 numbers.
__device__ __forceinline__ u64 operand(u32 at, int groups = 1024, int columns = 16, int layout = 1) {
  return (u64)(at >> 4 & 0x3fff) | (u64)(columns >> 4) << 16 | (u64)(groups >> 4) << 32 | (u64)layout << 62;
}
// The same so many bytes behind, a multiple of 16: one addition.
__device__ __forceinline__ u64 behind(u64 operand, int bytes) { return operand + (bytes >> 4); }

// A warpgroup takes registers, or gives them to those of its CTA that take.
template <int N> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// d += a @ b.T for 16 k of 64 rows, both from shared memory; d[n] is the fragment of b's rows n * 8 .. n * 8
// + 7, as mma.m16n8k16 has it, warp w of the four with rows w * 16 ... of a.
#define WGMMA_OF(n, groups, behind_d, ...) \
  template <bool FP16> __device__ __forceinline__ void wgmma(float (&d)[groups][4], u64 a, u64 b) { \
    WGMMA(FP16, "m64n" #n "k16", "{" behind_d ", 1, 1, 1, 0, 0;" : __VA_ARGS__ : "l"(a), "l"(b)); \
  }
WGMMA_OF(8, 1, R4 "}, %4, %5", D4(0))
WGMMA_OF(16, 2, R8 "}, %8, %9", D4(0), D4(1))
WGMMA_OF(32, 4, R16 "}, %16, %17", D16(0))
WGMMA_OF(64, 8, R32 "}, %32, %33", D16(0), D16(4))
#undef WGMMA_OF
// The same for 80 to 256 rows of b in steps of 16. The descriptors stand first, so that a size's registers
// are those of the size before it and eight more.
#define R_64 "%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19," \
  "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33"
#define D_64 D16(0), D16(4)
#define R_80 R_64 ",%34,%35,%36,%37,%38,%39,%40,%41"
#define R_96 R_80 ",%42,%43,%44,%45,%46,%47,%48,%49"
#define R_112 R_96 ",%50,%51,%52,%53,%54,%55,%56,%57"
#define R_128 R_112 ",%58,%59,%60,%61,%62,%63,%64,%65"
#define R_144 R_128 ",%66,%67,%68,%69,%70,%71,%72,%73"
#define R_160 R_144 ",%74,%75,%76,%77,%78,%79,%80,%81"
#define R_176 R_160 ",%82,%83,%84,%85,%86,%87,%88,%89"
#define R_192 R_176 ",%90,%91,%92,%93,%94,%95,%96,%97"
#define R_208 R_192 ",%98,%99,%100,%101,%102,%103,%104,%105"
#define R_224 R_208 ",%106,%107,%108,%109,%110,%111,%112,%113"
#define R_240 R_224 ",%114,%115,%116,%117,%118,%119,%120,%121"
#define R_256 R_240 ",%122,%123,%124,%125,%126,%127,%128,%129"
#define D_80 D_64, D4(8), D4(9)
#define D_96 D_80, D4(10), D4(11)
#define D_112 D_96, D4(12), D4(13)
#define D_128 D_112, D4(14), D4(15)
#define D_144 D_128, D4(16), D4(17)
#define D_160 D_144, D4(18), D4(19)
#define D_176 D_160, D4(20), D4(21)
#define D_192 D_176, D4(22), D4(23)
#define D_208 D_192, D4(24), D4(25)
#define D_224 D_208, D4(26), D4(27)
#define D_240 D_224, D4(28), D4(29)
#define D_256 D_240, D4(30), D4(31)
#define WGMMA_OF(n)                                                                                 \
  template <bool FP16> __device__ __forceinline__ void wgmma(float (&d)[n / 8][4], u64 a, u64 b) { \
    WGMMA(FP16, "m64n" #n "k16", "{" R_##n "}, %0, %1, 1, 1, 1, 0, 0;" : "+l"(a), "+l"(b), D_##n); \
  }
WGMMA_OF(80) WGMMA_OF(96) WGMMA_OF(112) WGMMA_OF(128)
WGMMA_OF(144) WGMMA_OF(160) WGMMA_OF(176) WGMMA_OF(192)
WGMMA_OF(208) WGMMA_OF(224) WGMMA_OF(240) WGMMA_OF(256)
#undef WGMMA_OF
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
