// AdamW in one pass: each tensor is read once and written once. The arithmetic is fp32. Values that
// become bf16 are rounded stochastically or to nearest.
#include "lanes.h"

#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

using namespace isotype;

namespace {

struct Numbers {
  float decay_rate, step_size, correction, beta1, rest1, beta2, rest2, eps, gradient_scale;
};

// three keys that the host derives from the seed
struct Keys {
  uint32_t index, low, high;
};

// A permutation of 32-bit numbers in which each output bit depends on all input bits.
// Source: the constants are those of lowbias32, C. Wellons 2018, "Prospecting for hash functions".
inline u32 mix(u32 x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  return x ^ x >> 16;
}

// std::sqrt sets errno, so that compilers call it for each lane
inline f32 square_root(f32 x) {
#if defined(__AVX512F__)
  return (f32)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (f32)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (f32)_mm_sqrt_ps((__m128)x);
#else
  for (int k = 0; k < LANES; ++k) x[k] = std::sqrt(x[k]);
  return x;
#endif
}

// Adds 16 random bits to the 16 bits that bf16 drops, and drops them. Infinity and nan stay: the
// addition would turn an infinity into nan
inline f32 round_up_or_down(f32 x, u32 noise) {
  const u32 bits = bits_of(x);
  const u32 rounded = (bits + noise) & 0xffff0000U;
  return float_of((bits & 0x7f800000U) == 0x7f800000U ? bits : rounded);
}

template <class T, class Count>
inline void store_rounded(T* p, f32 x, u32 noise, Count count, std::true_type) {
  store(p, std::is_same<T, bf16>::value ? round_up_or_down(x, noise) : x, count);
}

template <class T, class Count>
inline void store_rounded(T* p, f32 x, u32, Count count, std::false_type) {
  store(p, x, count);
}

template <class W, class G, class S, class Stochastic>
void update(W* weight, const G* gradient, S* mean, S* square, int64_t n, int64_t first_index, Keys keys, Numbers h, int threads, Stochastic stochastic) {
  u32 lane = {};
  for (int k = 0; k < LANES; ++k) lane[k] = k;
  each_block(1, n, threads, [=](int64_t, int64_t start, int64_t length) {
    each_vector(length, [=](int64_t offset, auto left) {
      const int64_t i = start + offset;
      const f32 g = load(gradient + i, left, 0.0f) * h.gradient_scale;
      const f32 m_before = load(mean + i, left, 0.0f);
      const f32 m = m_before * h.beta1 + g * h.rest1;
      const f32 v = load(square + i, left, 0.0f) * h.beta2 + g * g * h.rest2;
      const f32 w = load(weight + i, left, 0.0f);
      const f32 denominator = square_root(v * h.correction) + h.eps;
      const f32 w_new = w - (w * h.decay_rate + m * h.step_size / denominator);
      u32 noise_low = {}, noise_high = {};
      if constexpr (Stochastic::value) {
        const u32 hashed = mix((uint32_t)(first_index + i) + lane + keys.index);
        noise_low = mix(hashed ^ keys.low);
        noise_high = mix(hashed ^ keys.high);
      }
      store_rounded(mean + i, m, noise_low >> 16, left, stochastic);
      store_rounded(square + i, v, noise_high & 0xffffU, left, stochastic);
      store_rounded(weight + i, w_new, noise_low & 0xffffU, left, stochastic);
    });
  });
}

}  // namespace

// The arithmetic and the noise are those of `adamw_reference_`. `weight`, `mean` and `square` are
// updated in place. With `is_stochastic` 0, bf16 values are rounded to nearest.
extern "C" void update(int64_t weight_dtype, int64_t gradient_dtype, int64_t state_dtype, void* weight, const void* gradient, void* mean,
                       void* square, int64_t n, int64_t first_index, int64_t is_stochastic, int64_t index_key, int64_t low_key, int64_t high_key,
                       float decay_rate, float step_size, float correction, float beta1, float rest1, float beta2, float rest2, float eps,
                       float gradient_scale, int threads) {
  const Keys keys = {(uint32_t)index_key, (uint32_t)low_key, (uint32_t)high_key};
  const Numbers numbers = {decay_rate, step_size, correction, beta1, rest1, beta2, rest2, eps, gradient_scale};
  with_dtype(weight_dtype, [&](auto a) {
    with_dtype(gradient_dtype, [&](auto b) {
      with_dtype(state_dtype, [&](auto c) {
        using W = decltype(a);
        using G = decltype(b);
        using S = decltype(c);
        const auto run = [&](auto stochastic) {
          update((W*)weight, (const G*)gradient, (S*)mean, (S*)square, n, first_index, keys, numbers, threads, stochastic);
        };
        constexpr bool has_bf16 = std::is_same<W, bf16>::value || std::is_same<S, bf16>::value;
        if constexpr (has_bf16) {
          if (is_stochastic) return run(std::true_type{});
        }
        run(std::false_type{});
      });
    });
  });
}
