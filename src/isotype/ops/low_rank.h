// Matrix products of bf16 with fp32 sums, in which one dimension is an adapter's rank. Each large
// operand is read once, row by row. PyTorch's products of these shapes take up to three times as
// long, and an fp32 result takes two of them.
//
// T tokens, N features, R ranks. The operands of an instruction are pairs: two bf16 are multiplied
// with two others, and the products are summed in fp32.
#pragma once
#include <algorithm>
#include <vector>

#include "lanes.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#include <omp.h>
#define NATIVE 1
#endif

// Whether this processor multiplies bf16. Exactly one source of a library includes this header
extern "C" void native(int64_t* answer, int) {
#ifdef NATIVE
  *answer = 1;
#else
  *answer = 0;
#endif
}

#ifdef NATIVE
namespace low_rank {

using Pairs = uint32_t;
// Tokens per block of a gradient. A tile of sums is loaded and stored once per block
constexpr int64_t GRADIENT_TOKENS = 128;
// The largest number of sums of a gradient that are computed at a time: 128 KB, which stay in a
// core's cache while all tokens are added
constexpr int64_t SUMS = 32768;

// memory that lives as long as its thread, since every step needs the same sizes
struct Scratch {
  std::vector<char> bytes;
  template <class T>
  T* take(int64_t count) {
    const size_t required = count * sizeof(T) + 64;
    if (bytes.size() < required) bytes.resize(required);
    return (T*)(((uintptr_t)bytes.data() + 63) & ~(uintptr_t)63);
  }
};

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
inline __mmask16 first16(int64_t n) { return n >= 16 ? (__mmask16)-1 : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
inline __mmask32 first32(int64_t n) { return n >= 32 ? (__mmask32)-1 : n <= 0 ? 0 : (__mmask32)((1ull << n) - 1); }
inline __m512bh as_bf16(__m512i x) { return (__m512bh)x; }
inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline const __m512i COUNT = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);

inline Pairs pair_at(const uint16_t* p) {
  Pairs x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// Transposes 16 rows of 16 values.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 16; i += 8)
#pragma GCC unroll 4
    for (int k = i; k < i + 4; ++k) {
      t[k] = _mm512_shuffle_i32x4(r[k], r[k + 4], 0x88);
      t[k + 4] = _mm512_shuffle_i32x4(r[k], r[k + 4], 0xdd);
    }
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) {
    r[k] = _mm512_shuffle_i32x4(t[k], t[k + 8], 0x88);
    r[k + 8] = _mm512_shuffle_i32x4(t[k], t[k + 8], 0xdd);
  }
}

// Copies a matrix of [count, lanes] into pairs along `count`: out[count / 2][width], padded with
// zeros. `step` or `lane_step` must be 1.
inline void pack(const uint16_t* from, int64_t count, int64_t step, int64_t lanes, int64_t lane_step, Pairs* out, int64_t width) {
  const int64_t pairs = (count + 1) / 2;
  for (int64_t l = 0; l < width; l += 16) {
    if (lane_step != 1) {
      // 16 pairs of 16 lanes at once
      for (int64_t p = 0; p < pairs; p += 16) {
        __m512i rows[16];
        for (int i = 0; i < 16; ++i)
          rows[i] = l + i < lanes ? _mm512_maskz_loadu_epi16(first32(count - 2 * p), from + (l + i) * lane_step + 2 * p) : _mm512_setzero_si512();
        transpose(rows);
        for (int64_t i = 0; i < 16 && p + i < pairs; ++i) _mm512_storeu_si512(out + (p + i) * width + l, rows[i]);
      }
      continue;
    }
    const __mmask16 mask = first16(lanes - l);
    for (int64_t p = 0; p < pairs; ++p) {
      const uint16_t* low = from + 2 * p * step;
      __m512i pair_lanes = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, low + l));
      if (2 * p + 1 < count) pair_lanes = _mm512_or_si512(pair_lanes, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, low + step + l)), 16));
      _mm512_storeu_si512(out + p * width + l, pair_lanes);
    }
  }
}

// --- x aT: [T N] by [R N] -> [T R]

template <int ROWS, int GROUPS>
inline void shrink_tile(const uint16_t* x, int64_t x_step, int64_t n, const Pairs* a, int64_t width, float scale, uint16_t* out,
                        int64_t out_step, int64_t ranks) {
  __m512 sum[ROWS][GROUPS];
#pragma GCC unroll 32
  for (int t = 0; t < ROWS; ++t)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) sum[t][g] = _mm512_setzero_ps();
  const auto step = [&](int64_t p, auto value) __attribute__((always_inline)) {
    __m512i av[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) av[g] = _mm512_loadu_si512(a + p * width + 16 * g);
#pragma GCC unroll 32
    for (int t = 0; t < ROWS; ++t) {
      const __m512i xv = _mm512_set1_epi32((int)value(x + t * x_step + 2 * p));
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) sum[t][g] = _mm512_dpbf16_ps(sum[t][g], as_bf16(xv), as_bf16(av[g]));
    }
  };
  int64_t p = 0;
  for (; p + 16 <= n / 2; p += 16) {
    // fetches a cache line of every row of the next tile: the rows are too many and too short for
    // the processor's own prefetching
    for (int t = 0; t < ROWS; ++t) _mm_prefetch((const char*)(x + (t + ROWS) * x_step + 2 * p), _MM_HINT_T1);
    for (int64_t q = p; q < p + 16; ++q) step(q, pair_at);
  }
  for (; p < n / 2; ++p) step(p, pair_at);
  if (n % 2) step(n / 2, [](const uint16_t* p) { return (Pairs)*p; });
#pragma GCC unroll 32
  for (int t = 0; t < ROWS; ++t)
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) {
      const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(sum[t][g], _mm512_set1_ps(scale)));
      _mm256_mask_storeu_epi16(out + t * out_step + 16 * g, first16(ranks - 16 * g), narrow);
    }
}

template <int ROWS, int GROUPS>
inline int64_t shrink_rows(int64_t t, int64_t tokens, const uint16_t* x, int64_t x_step, int64_t n, const Pairs* a, int64_t width,
                           float scale, uint16_t* out, int64_t out_step, int64_t ranks) {
  for (; t + ROWS <= tokens; t += ROWS)
    shrink_tile<ROWS, GROUPS>(x + t * x_step, x_step, n, a, width, scale, out + t * out_step, out_step, ranks);
  return t;
}

inline void shrink_block(const uint16_t* x, int64_t x_step, int64_t tokens, int64_t n, const Pairs* a, int64_t width, float scale, uint16_t* out,
                  int64_t out_step, int64_t ranks) {
  for (int64_t r = 0; r < ranks;) {
    const int64_t left = ranks - r;
    // enough sums in registers to hide an instruction's latency
    if (left > 32) {
      int64_t t = shrink_rows<8, 3>(0, tokens, x, x_step, n, a + r, width, scale, out + r, out_step, left);
      shrink_rows<1, 3>(t, tokens, x, x_step, n, a + r, width, scale, out + r, out_step, left);
      r += 48;
    } else if (left > 16) {
      int64_t t = shrink_rows<8, 2>(0, tokens, x, x_step, n, a + r, width, scale, out + r, out_step, left);
      shrink_rows<1, 2>(t, tokens, x, x_step, n, a + r, width, scale, out + r, out_step, left);
      r += 32;
    } else {
      int64_t t = shrink_rows<16, 1>(0, tokens, x, x_step, n, a + r, width, scale, out + r, out_step, left);
      shrink_rows<1, 1>(t, tokens, x, x_step, n, a + r, width, scale, out + r, out_step, left);
      r += 16;
    }
  }
}

// --- lT x: [T R] by [T N] -> fp32 [R N], added to sums that last over blocks of tokens

// Sorts 32 sums by column. The instruction leaves the sums of 32 columns interleaved within
// quarters of two registers.
inline void sort_sums(__m512 even, __m512 odd, __m512& first, __m512& second) {
  first = _mm512_permutex2var_ps(even, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), odd);
  second = _mm512_permutex2var_ps(even, _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31), odd);
}

constexpr int RANKS = 8, AHEAD = 128;

inline void gradient_tile(const uint16_t* x, int64_t x_step, int64_t tokens, __mmask32 mask, const Pairs* l, int64_t l_step, float* sums,
                          int64_t sums_step, const uint16_t* next) {
  __m512 even[RANKS], odd[RANKS];
#pragma GCC unroll 8
  for (int r = 0; r < RANKS; ++r) {
    even[r] = _mm512_loadu_ps(sums + r * sums_step);
    odd[r] = _mm512_loadu_ps(sums + r * sums_step + 16);
  }
  for (int64_t t = 0; t < tokens; t += 2) {
    const __m512i low = _mm512_maskz_loadu_epi16(mask, x + t * x_step);
    const __m512i high = t + 1 < tokens ? _mm512_maskz_loadu_epi16(mask, x + (t + 1) * x_step) : _mm512_setzero_si512();
    if (next) {
      _mm_prefetch((const char*)(next + t * x_step), _MM_HINT_T0);
      _mm_prefetch((const char*)(next + (t + 1) * x_step), _MM_HINT_T0);
    }
    const __m512i some = _mm512_unpacklo_epi16(low, high), others = _mm512_unpackhi_epi16(low, high);
#pragma GCC unroll 8
    for (int r = 0; r < RANKS; ++r) {
      const __m512i lv = _mm512_set1_epi32((int)l[t / 2 * l_step + r]);
      even[r] = _mm512_dpbf16_ps(even[r], as_bf16(some), as_bf16(lv));
      odd[r] = _mm512_dpbf16_ps(odd[r], as_bf16(others), as_bf16(lv));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < RANKS; ++r) {
    _mm512_storeu_ps(sums + r * sums_step, even[r]);
    _mm512_storeu_ps(sums + r * sums_step + 16, odd[r]);
  }
}

// sums: [R up to 8][N up to 32]
inline void gradient_block(const uint16_t* x, int64_t x_step, int64_t tokens, int64_t n, const Pairs* l, int64_t l_step, int64_t ranks, float* sums,
                    int64_t sums_step) {
  for (int64_t column = 0; column < n; column += 32) {
    const int64_t later = column + AHEAD;
    const uint16_t* next = x + (later < n ? later : GRADIENT_TOKENS * x_step + later - n);
    for (int64_t r = 0; r < ranks; r += RANKS)
      gradient_tile(x + column, x_step, tokens, first32(n - column), l + r, l_step, sums + r * sums_step + column, sums_step,
                    r ? nullptr : next);
  }
}

// Writes the sums, scaled and sorted, to [R N] or [N R].
inline void store_sums(const float* sums, int64_t sums_step, int64_t ranks, int64_t n, float scale, float* out, int64_t rank_step,
            int64_t column_step) {
  const __m512i index = _mm512_mullo_epi32(COUNT, _mm512_set1_epi32((int)column_step));
  for (int64_t column = 0; column < n; column += 32)
    for (int64_t r = 0; r < ranks; ++r) {
      __m512 half[2];
      sort_sums(_mm512_loadu_ps(sums + r * sums_step + column), _mm512_loadu_ps(sums + r * sums_step + column + 16), half[0], half[1]);
      for (int h = 0; h < 2; ++h) {
        const __mmask16 mask = first16(n - column - 16 * h);
        float* to = out + r * rank_step + (column + 16 * h) * column_step;
        const __m512 value = _mm512_mul_ps(half[h], _mm512_set1_ps(scale));
        if (column_step == 1)
          _mm512_mask_storeu_ps(to, mask, value);
        else
          _mm512_mask_i32scatter_ps(to, mask, index, value, 4);
      }
    }
}

// --- y += l b: [T R] by [R N] onto [T N]

template <int ROWS>
inline void expand_tile(uint16_t* y, int64_t y_step, __mmask16 mask0, __mmask16 mask1, const uint16_t* l, int64_t l_step, int64_t pairs,
                        const Pairs* b, int64_t width, __m512 scale) {
  __m512 sum[ROWS][2];
#pragma GCC unroll 8
  for (int t = 0; t < ROWS; ++t) {
    _mm_prefetch((const char*)(y + (t + ROWS) * y_step), _MM_HINT_T1);
    sum[t][0] = sum[t][1] = _mm512_setzero_ps();
  }
  for (int64_t p = 0; p < pairs; ++p) {
    const __m512i b0 = _mm512_loadu_si512(b + p * width), b1 = _mm512_loadu_si512(b + p * width + 16);
#pragma GCC unroll 8
    for (int t = 0; t < ROWS; ++t) {
      const __m512i lv = _mm512_set1_epi32((int)pair_at(l + t * l_step + 2 * p));
      sum[t][0] = _mm512_dpbf16_ps(sum[t][0], as_bf16(lv), as_bf16(b0));
      sum[t][1] = _mm512_dpbf16_ps(sum[t][1], as_bf16(lv), as_bf16(b1));
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < ROWS; ++t) {
    uint16_t* to = y + t * y_step;
    const __m512 y0 = widen(_mm256_maskz_loadu_epi16(mask0, to)), y1 = widen(_mm256_maskz_loadu_epi16(mask1, to + 16));
    _mm256_mask_storeu_epi16(to, mask0, (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(sum[t][0], scale, y0)));
    _mm256_mask_storeu_epi16(to + 16, mask1, (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(sum[t][1], scale, y1)));
  }
}

template <int ROWS>
inline void expand_rows(uint16_t* y, int64_t y_step, int64_t n, const uint16_t* l, int64_t l_step, int64_t pairs, const Pairs* b,
                        int64_t width, __m512 scale) {
  for (int64_t column = 0; column < n; column += 32)
    expand_tile<ROWS>(y + column, y_step, first16(n - column), first16(n - column - 16), l, l_step, pairs, b + column, width, scale);
}

struct Range {
  int64_t first, last;
};

// A thread's share of `count` in multiples of `unit`.
inline Range thread_range(int64_t count, int64_t unit, int thread, int threads) {
  const int64_t units = (count + unit - 1) / unit;
  return {std::min(count, units * thread / threads * unit), std::min(count, units * (thread + 1) / threads * unit)};
}

// Strides are in elements. The strides of a are (rank, feature), and one of them is 1. Rows of x,
// y, l and out are adjacent in memory.

inline void shrink(const uint16_t* x, const uint16_t* a, uint16_t* out, int64_t tokens, int64_t n, int64_t ranks, int64_t x_step,
                       int64_t a_rank_step, int64_t a_step, int64_t out_step, float scale, int threads) {
  static thread_local Scratch scratch;
  const int64_t width = round_up(ranks, 16);
  Pairs* packed = scratch.take<Pairs>((n + 1) / 2 * width);
  pack(a, n, a_step, ranks, a_rank_step, packed, width);
  const int used = isotype::thread_count(tokens * n, threads);
#pragma omp parallel num_threads(used)
  {
    const Range rows = thread_range(tokens, 16, omp_get_thread_num(), omp_get_num_threads());
    shrink_block(x + rows.first * x_step, x_step, rows.last - rows.first, n, packed, width, scale, out + rows.first * out_step, out_step,
                 ranks);
  }
}

// y += scale l b; b is [R N] with strides (b_rank_step, b_step)
inline void expand(uint16_t* y, const uint16_t* l, const uint16_t* b, int64_t tokens, int64_t n, int64_t ranks, int64_t y_step,
                       int64_t l_step, int64_t b_rank_step, int64_t b_step, float scale, int threads) {
  static thread_local Scratch scratch, even;
  const int64_t width = round_up(n, 32), pairs = (ranks + 1) / 2;
  Pairs* packed = scratch.take<Pairs>(pairs * width);
  pack(b, ranks, b_rank_step, n, b_step, packed, width);
  if (ranks % 2) {
    // a pair must not reach into the next column, since its value times zero may be NaN
    uint16_t* copy = even.take<uint16_t>(tokens * (ranks + 1));
    for (int64_t t = 0; t < tokens; ++t) {
      std::memcpy(copy + t * (ranks + 1), l + t * l_step, ranks * 2);
      copy[t * (ranks + 1) + ranks] = 0;
    }
    l = copy;
    l_step = ranks + 1;
  }
  const __m512 factor = _mm512_set1_ps(scale);
  const int used = isotype::thread_count(tokens * n, threads);
#pragma omp parallel num_threads(used)
  {
    const Range rows = thread_range(tokens, 8, omp_get_thread_num(), omp_get_num_threads());
    int64_t t = rows.first;
    for (; t + 8 <= rows.last; t += 8) expand_rows<8>(y + t * y_step, y_step, n, l + t * l_step, l_step, pairs, packed, width, factor);
    for (; t < rows.last; ++t) expand_rows<1>(y + t * y_step, y_step, n, l + t * l_step, l_step, pairs, packed, width, factor);
  }
}

// grad = scale lT x as fp32 with strides (grad_rank_step, grad_step). The columns are divided among
// threads, so that no sum depends on the number of threads.
inline void gradient(const uint16_t* x, const uint16_t* l, float* grad, int64_t tokens, int64_t n, int64_t ranks, int64_t x_step,
                         int64_t l_step, int64_t grad_rank_step, int64_t grad_step, float scale, int threads) {
  const int used = isotype::thread_count(tokens * n, threads);
#pragma omp parallel num_threads(used)
  {
    static thread_local Scratch pairs, scratch;
    const Range columns = thread_range(n, 32, omp_get_thread_num(), omp_get_num_threads());
    const int64_t width = round_up(ranks, 16), sum_rows = round_up(ranks, RANKS);
    const int64_t block_pairs = GRADIENT_TOKENS / 2 * width, blocks = (tokens + GRADIENT_TOKENS - 1) / GRADIENT_TOKENS;
    if (columns.first < columns.last) {
      Pairs* packed = pairs.take<Pairs>(blocks * block_pairs);
      for (int64_t block = 0, t = 0; block < blocks; ++block, t += GRADIENT_TOKENS)
        pack(l + t * l_step, std::min(GRADIENT_TOKENS, tokens - t), l_step, ranks, 1, packed + block * block_pairs, width);
      const int64_t widest = std::max<int64_t>(32, SUMS / sum_rows / 32 * 32);
      for (int64_t first = columns.first; first < columns.last; first += widest) {
        const int64_t count = std::min(widest, columns.last - first), sums_step = round_up(count, 32);
        float* sums = scratch.take<float>(sum_rows * sums_step);
        std::fill(sums, sums + sum_rows * sums_step, 0.0f);
        for (int64_t block = 0, t = 0; block < blocks; ++block, t += GRADIENT_TOKENS)
          gradient_block(x + t * x_step + first, x_step, std::min(GRADIENT_TOKENS, tokens - t), count, packed + block * block_pairs, width, ranks,
                         sums, sums_step);
        store_sums(sums, sums_step, ranks, count, scale, grad + first * grad_step, grad_rank_step, grad_step);
      }
    }
  }
}

}  // namespace low_rank
#endif
