// SIMD in the compiler's own vector extensions: one source, compiled per instruction set (see kernel_*.cpp).
// VEC_WIDTH floats per register; every translation unit that includes this file defines its own, in its own
// namespace.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

typedef float vf __attribute__((vector_size(VEC_WIDTH * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(VEC_WIDTH * 4), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(VEC_WIDTH * 2), aligned(2)));
typedef uint32_t vu __attribute__((vector_size(VEC_WIDTH * 4), aligned(4)));
// In memory. A memcpy of 32 bytes GCC makes two moves of 16, which the load of all 32 behind them waits for:
// attention with AVX2 took 15 times as long.
typedef float vf_there __attribute__((vector_size(VEC_WIDTH * 4), aligned(4), may_alias));
typedef uint16_t vh_there __attribute__((vector_size(VEC_WIDTH * 2), aligned(2), may_alias));

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline float to_float(fp16 x) {
  // Exponent rebias by multiplication also turns subnormals into normals; infinities and NaN are restored
  // after it.
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  if (rest >= 0x0f800000) return bits_to_float(sign | 0x7f800000 | (rest & 0x007fffff));
  return bits_to_float(sign | float_to_bits(bits_to_float(rest) * bits_to_float(0x77800000)));
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, bf16* out) {
  const uint32_t u = float_to_bits(x);
  out->bits = (u & 0x7fffffff) > 0x7f800000 ? uint16_t((u >> 16) | 0x40)
                                            : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline void from_float(float x, fp16* out) {
  const uint32_t u = float_to_bits(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a >= 0x7f800000) { out->bits = uint16_t(sign | 0x7c00 | (a > 0x7f800000 ? 0x200 : 0)); return; }
  if (a >= 0x477ff000) { out->bits = uint16_t(sign | 0x7c00); return; }
  if (a < 0x38800000) {  // subnormal half: adding 0.5 aligns the mantissa, with the hardware's rounding
    out->bits = uint16_t(sign | (float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000));
    return;
  }
  out->bits = uint16_t(sign | ((a + 0xc8000fff + ((a >> 13) & 1)) >> 13));
}

// A number of e4m3: what is beyond 448 is 448, NaN stays NaN.
inline uint8_t to_e4m3(float x) {
  const uint32_t u = float_to_bits(x), sign = (u >> 24) & 0x80, a = u & 0x7fffffff;
  if (a > 0x7f800000) return uint8_t(sign | 0x7f);
  if (a >= 0x43e00000) return uint8_t(sign | 0x7e);
  if (a < 0x3c800000)  // subnormal: adding 2^14 aligns the mantissa, with the hardware's rounding
    return uint8_t(sign | (float_to_bits(bits_to_float(a) + 16384.0f) - 0x46800000));
  return uint8_t(sign | (((a + 0x7ffff + ((a >> 20) & 1)) >> 20) - (120 << 3)));
}

inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) { return *reinterpret_cast<const vf_there*>(p); }
inline vf load(const bf16* p) {
  return (vf)(__builtin_convertvector(*reinterpret_cast<const vh_there*>(p), vu) << 16);
}
inline vf load(const fp16* p) {
#if VEC_WIDTH == 16 && defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif VEC_WIDTH == 8 && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf v;
  for (int i = 0; i < VEC_WIDTH; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}
// The first n < VEC_WIDTH numbers at p, zeros after them; never reads past p + n.
template <typename T>
inline vf load_tail(const T* p, int n) {
  T buffer[VEC_WIDTH] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
inline void store(float* p, vf v) { *reinterpret_cast<vf_there*>(p) = v; }

inline float sum(vf v) {
  float s = 0;
  for (int i = 0; i < VEC_WIDTH; ++i) s += v[i];
  return s;
}
// Sums of four vectors at once: far fewer shuffles than four separate reductions.
inline void sum4(vf a, vf b, vf c, vf d, float* out) {
#if VEC_WIDTH >= 8 && defined(__AVX__)
  auto half = [](vf v) -> __m128 {
#if VEC_WIDTH == 16
    const __m512 w = (__m512)v;
    const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(w), _mm512_extractf32x8_ps(w, 1));
#else
    const __m256 x = (__m256)v;
#endif
    return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  };
  _mm_storeu_ps(out, _mm_hadd_ps(_mm_hadd_ps(half(a), half(b)), _mm_hadd_ps(half(c), half(d))));
#else
  out[0] = sum(a); out[1] = sum(b); out[2] = sum(c); out[3] = sum(d);
#endif
}

// exp(x) to about 1 ulp for x <= 0 (Cephes' expf: Cody-Waite reduction, degree-6 polynomial); 0 below -87.3,
// NaN of NaN.
inline vf exp_vec(vf x) {
  const vi alive = ~(x <= splat(-87.3f));
  const vf clipped = (vf)(((vi)x & alive) | ((vi)splat(-87.3f) & ~alive));
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const vf shifted = clipped * 1.44269504088896341f + magic, n = shifted - magic;
  const vf r = (clipped - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
  const vf e = p * r * r + r + 1.0f;
  const vi scale = (__builtin_convertvector(n, vi) + 127) << 23;
  return (vf)((vi)(e * (vf)scale) & alive);
}

}  // namespace
