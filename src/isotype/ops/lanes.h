// A vector of fp32 lanes in the portable vector types of GCC and clang, with loads and stores of fp32, bf16 and fp16, and the functions
// that the ops need. Values are widened to fp32 where they are loaded, and narrowed once, to nearest even, where they are stored.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace isotype {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using f32 = float __attribute__((vector_size(LANES * 4)));
using i32 = int32_t __attribute__((vector_size(LANES * 4)));
using u32 = uint32_t __attribute__((vector_size(LANES * 4)));
using u16 = uint16_t __attribute__((vector_size(LANES * 2)));

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline f32 broadcast(float x) { return f32{} + x; }
inline u32 bits_of(f32 x) { return (u32)x; }
inline f32 float_of(u32 x) { return (f32)x; }

// --- widening and narrowing

// GCC 12 converts each half of a vector of 8 by itself, which takes five instructions instead of one or two
#if defined(__AVX2__) && !defined(__AVX512F__)
inline u32 widen_bits(u16 x) { return (u32)_mm256_cvtepu16_epi32((__m128i)x); }
inline u16 narrow_bits(u32 x) { return (u16)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1)); }
#else
inline u32 widen_bits(u16 x) { return __builtin_convertvector(x, u32); }
inline u16 narrow_bits(u32 x) { return __builtin_convertvector(x, u16); }
#endif

template <class T>
struct Narrow;

template <>
struct Narrow<float> {
  using V = f32;
  static f32 widen(V x) { return x; }
  static V narrow(f32 x) { return x; }
};

template <>
struct Narrow<bf16> {
  using V = u16;
  static f32 widen(V x) { return float_of(widen_bits(x) << 16); }
  static V narrow(f32 x) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    // one instruction, which treats subnormals as zero: vectors with subnormals take the code below
    const u32 magnitude = bits_of(x) & 0x7fffffff;
    if (!_mm512_cmplt_epu32_mask((__m512i)(magnitude - 1), _mm512_set1_epi32(0x7fffff))) return (V)_mm512_cvtneps_pbh((__m512)x);
#endif
    const u32 u = bits_of(x);
    const u32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return narrow_bits(x == x ? rounded : (u >> 16) | 0x40);
  }
};

template <>
struct Narrow<fp16> {
  using V = u16;
  static f32 widen(V x) {
    const u32 h = __builtin_convertvector(x, u32), magnitude = h & 0x7fff;
    // the exponents' biases differ by 112; the product is exact, also for subnormals
    const u32 finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
    const u32 infinite_or_nan = (magnitude << 13) | 0x7f800000;
    return float_of((magnitude >= 0x7c00 ? infinite_or_nan : finite) | ((h & 0x8000) << 16));
  }
  static V narrow(f32 x) {
    const u32 u = bits_of(x), magnitude = u & 0x7fffffff;
    const u32 normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
    // adding 0.5 leaves multiples of 2^-24, fp16's subnormals, rounded, in the low bits
    const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    u32 h = magnitude < 0x38800000 ? subnormal : normal;
    h = magnitude >= 0x47800000 ? u32{} + 0x7c00 : h;
    h = magnitude > 0x7f800000 ? u32{} + 0x7e00 : h;
    return __builtin_convertvector(h | ((u >> 16) & 0x8000), u16);
  }
};

// p may have any alignment. Only `count` values exist at p; the other lanes get the value `rest`
template <class T>
inline f32 load(const T* p) {
  typename Narrow<T>::V v;
  std::memcpy(&v, p, sizeof v);
  return Narrow<T>::widen(v);
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline __mmask16 first_lanes(int64_t count) { return count >= LANES ? (__mmask16)-1 : (__mmask16)((1u << count) - 1); }
inline f32 load_first(const float* p, __mmask16 mask) { return (f32)_mm512_maskz_loadu_ps(mask, p); }
template <class T>
inline f32 load_first(const T* p, __mmask16 mask) {
  return Narrow<T>::widen((u16)_mm256_maskz_loadu_epi16(mask, p));
}
inline void store_first(float* p, f32 x, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, (__m512)x); }
template <class T>
inline void store_first(T* p, f32 x, __mmask16 mask) {
  _mm256_mask_storeu_epi16(p, mask, (__m256i)Narrow<T>::narrow(x));
}
#endif

template <class T>
inline f32 load(const T* p, int64_t count, float rest) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 mask = first_lanes(count);
  const f32 first = load_first(p, mask);
  return rest == 0.0f ? first : (f32)_mm512_mask_mov_ps(_mm512_set1_ps(rest), mask, (__m512)first);
#endif
  if (count >= LANES) return load(p);
  typename Narrow<T>::V v = {};
  std::memcpy(&v, p, count * sizeof(T));
  f32 x = Narrow<T>::widen(v);
  for (int64_t i = count; i < LANES; ++i) x[i] = rest;
  return x;
}

template <class T>
inline void store(T* p, f32 x) {
  const auto v = Narrow<T>::narrow(x);
  std::memcpy(p, &v, sizeof v);
}

template <class T>
inline void store(T* p, f32 x, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return store_first(p, x, first_lanes(count));
#endif
  if (count >= LANES) return store(p, x);
  const auto v = Narrow<T>::narrow(x);
  std::memcpy(p, &v, count * sizeof(T));
}

template <class T>
inline float load_one(const T* p) {
  return load(p, 1, 0.0f)[0];
}

// Calls f(first, count) for each vector of a row. For a full vector the count has the type Full, so
// that its loads and stores have no branch. This halves the time of silu_mul.
struct Full {};

template <class T>
inline f32 load(const T* p, Full, float) {
  return load(p);
}

template <class T>
inline void store(T* p, f32 x, Full) {
  store(p, x);
}

template <class F>
inline void each_vector(int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) f(i, Full{});
  if (i < count) f(i, count - i);
}

// --- pairs of neighbouring lanes 2k and 2k + 1

struct Lanes {
  i32 swapped = {}, lower = {}, upper = {};
  f32 sign = {};
  Lanes() {
    for (int k = 0; k < LANES; ++k) {
      swapped[k] = k ^ 1;
      lower[k] = k / 2;
      upper[k] = LANES / 2 + k / 2;
      sign[k] = k % 2 ? 1.0f : -1.0f;
    }
  }
};

// x with its lanes in the order of `indices`
inline f32 permute(f32 x, i32 indices) {
#if defined(__clang__)
  f32 y;
  for (int k = 0; k < LANES; ++k) y[k] = x[indices[k]];
  return y;
#else
  return __builtin_shuffle(x, indices);
#endif
}

// --- functions

inline float sum(f32 x) {
  float s = 0;
  for (int i = 0; i < LANES; ++i) s += x[i];
  return s;
}

inline float max(f32 x) {
  float m = x[0];
  for (int i = 1; i < LANES; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// Relative error below 1.5e-7; 0 where the result is below 2.4e-38 (also for -inf), inf above fp32's range, nan for nan.
// exp(x) = 2^n exp(r), |r| <= ln(2) / 2, with 1 + r + r^2 q(r) fitted to exp(r) (minimax, relative error 3.5e-9 before rounding).
inline f32 exp(f32 x) {
  const f32 clamped = x < -86.6f ? broadcast(-86.6f) : x > 89.0f ? broadcast(89.0f) : x;
  // after 1.5 x 2^23 is added, the low bits hold the nearest integer
  const f32 shifted = clamped * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const f32 r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  f32 q = broadcast(1.3811663e-3f);
  q = q * r + 8.3701350e-3f;
  q = q * r + 4.1668527e-2f;
  q = q * r + 1.6666509e-1f;
  q = q * r + 4.9999994e-1f;
  const f32 p = (q * r) * r + r + 1.0f;
  // in two steps, since 2^128 is not an fp32 number although 2^128 exp(r) may be one
  const f32 half = float_of((bits_of(shifted) + 126) << 23);
  return x < -86.6f ? f32{} : p * half * 2.0f;
}

inline f32 sigmoid(f32 x) { return 1.0f / (1.0f + exp(-x)); }

// Relative error below 3e-7: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel (minimax, 4.4e-9 before rounding).
inline f32 tanh(f32 x) {
  const f32 s = x * x;
  f32 q = broadcast(-5.7049221e-3f);
  q = q * s + 2.0639032e-2f;
  q = q * s - 5.3739700e-2f;
  q = q * s + 1.3331442e-1f;
  q = q * s - 3.3333281e-1f;
  const f32 near = (q * s) * x + x, far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return s < 0.390625f ? near : far;
}

// For positive, normal x. Relative error below 2e-7. log(x) = e ln 2 + log(1 + f), sqrt(1/2) <= 1 +
// f < sqrt(2), with f - f^2/2 + f^3 q(f) fitted to log(1 + f) (minimax, relative error 6e-9 before
// rounding).
inline f32 log(f32 x) {
  // after the bits of sqrt(1/2) are subtracted, the exponent of 1 + f is above the mantissa
  const i32 e = (i32)(bits_of(x) - 0x3f3504f3) >> 23;
  const f32 n = __builtin_convertvector(e, f32), f = float_of(bits_of(x) - ((u32)e << 23)) - 1.0f;
  f32 q = broadcast(-7.6344810e-2f);
  q = q * f + 1.2761571e-1f;
  q = q * f - 1.3160185e-1f;
  q = q * f + 1.4201759e-1f;
  q = q * f - 1.6623357e-1f;
  q = q * f + 2.0001227e-1f;
  q = q * f - 2.5000821e-1f;
  q = q * f + 3.3333332e-1f;
  return n * 0.693145752f + (n * 1.42860677e-6f + (f - (0.5f - f * q) * (f * f)));
}

// The normal distribution's P(X <= x), and its density: one exp and one division serve both.
// P(X <= -|x|) = e^(-x^2/2) erfcx(|x|/sqrt 2) / 2, with erfcx(u) as a polynomial in 1 / (1 + 0.3 u) (minimax, relative error 2e-8 before
// rounding, for u <= 10), so that the tail keeps its relative accuracy where (1 + erf) / 2 has none.
inline f32 normal_cdf(f32 x, f32& density) {
  const f32 magnitude = x < 0.0f ? -x : x, e = exp(-0.5f * x * x);
  const f32 t = 1.0f / (1.0f + 0.212132034f * magnitude);
  f32 q = broadcast(-1.2952207e-1f);
  q = q * t + 4.8555928e-1f;
  q = q * t - 5.1227021e-1f;
  q = q * t + 5.4771125e-1f;
  q = q * t - 9.4644800e-2f;
  q = q * t + 2.1492359e-1f;
  q = q * t + 1.4833979e-1f;
  q = q * t + 1.7071514e-1f;
  q = q * t + 1.6918801e-1f;
  const f32 tail = 0.5f * e * (q * t);
  density = 0.39894228f * e;
  return x < 0.0f ? tail : 1.0f - tail;
}

// --- dtypes as numbers, in the order of DTYPES in cpp.py

template <class F>
inline void with_dtype(int64_t dtype, F&& f) {
  if (dtype == 0) f(float{});
  if (dtype == 1) f(bf16{});
  if (dtype == 2) f(fp16{});
}

// --- sharing work among threads

// The number of items that a thread takes at once: about 16k elements. Taking work then costs
// little, and work is still shared on a busy machine.
inline int64_t items_per_turn(int64_t elements_per_item) { return elements_per_item >= 16384 ? 1 : 16384 / (elements_per_item > 0 ? elements_per_item : 1); }

// The number of threads for this many elements. Waking threads costs some microseconds, which is
// more than a small tensor takes.
inline int thread_count(int64_t elements, int threads) { return elements < 32768 ? 1 : threads; }

// calls f(row, first column, number of columns) for all of [rows, columns], in blocks that fit into
// a core's cache
template <class F>
inline void each_block(int64_t rows, int64_t columns, int threads, F&& f) {
  constexpr int64_t BLOCK = 16384;
  const int64_t blocks = (columns + BLOCK - 1) / BLOCK, widest = columns < BLOCK ? columns : BLOCK;
#pragma omp parallel for schedule(dynamic, items_per_turn(widest)) num_threads(thread_count(rows * columns, threads))
  for (int64_t item = 0; item < rows * blocks; ++item) {
    const int64_t start = item % blocks * BLOCK;
    f(item / blocks, start, start + BLOCK < columns ? BLOCK : columns - start);
  }
}

}  // namespace isotype
