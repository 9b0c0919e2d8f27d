// Exports the products of `ops/low_rank.h` for one layer.
#include "low_rank.h"

#include <omp.h>

#include <atomic>
#include <type_traits>

extern "C" void shrink(const uint16_t* x, const uint16_t* a, uint16_t* out, int64_t tokens, int64_t n, int64_t ranks, int64_t x_step,
                       int64_t a_rank_step, int64_t a_step, int64_t out_step, float scale, int threads) {
#ifdef NATIVE
  low_rank::shrink(x, a, out, tokens, n, ranks, x_step, a_rank_step, a_step, out_step, scale, threads);
#endif
}

extern "C" void expand(uint16_t* y, const uint16_t* l, const uint16_t* b, int64_t tokens, int64_t n, int64_t ranks, int64_t y_step,
                       int64_t l_step, int64_t b_rank_step, int64_t b_step, float scale, int threads) {
#ifdef NATIVE
  low_rank::expand(y, l, b, tokens, n, ranks, y_step, l_step, b_rank_step, b_step, scale, threads);
#endif
}

extern "C" void gradient(const uint16_t* x, const uint16_t* l, float* grad, int64_t tokens, int64_t n, int64_t ranks, int64_t x_step,
                         int64_t l_step, int64_t grad_rank_step, int64_t grad_step, float scale, int threads) {
#ifdef NATIVE
  low_rank::gradient(x, l, grad, tokens, n, ranks, x_step, l_step, grad_rank_step, grad_step, scale, threads);
#endif
}

// --- x Wᵀ for a few rows of x, as in the generation of tokens: [T K] by [N K] -> [T N]. W is read once, and reading it takes most of
// the time. PyTorch's product reads 7.5 GB/s of W on a core that can read 12.9.

#ifdef NATIVE
namespace row_products {

using low_rank::as_bf16;
using low_rank::first32;

// columns of the output, which are rows of W, per tile
constexpr int COLUMNS = 4;

// Returns the sums of four registers.
inline __m128 sum_each(const __m512 s[COLUMNS]) {
  __m128 quarter[COLUMNS];
#pragma GCC unroll 4
  for (int c = 0; c < COLUMNS; ++c) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s[c]), _mm512_extractf32x8_ps(s[c], 1));
    quarter[c] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  return _mm_hadd_ps(_mm_hadd_ps(quarter[0], quarter[1]), _mm_hadd_ps(quarter[2], quarter[3]));
}

// Adds the products of ROWS rows of x with `columns` rows of W.
template <int ROWS, bool PREFETCH>
inline void add_products(const uint16_t* x, int64_t x_step, const uint16_t* w, int64_t w_step, int64_t count, int columns,
                         __m512 sums[ROWS][COLUMNS]) {
  for (int64_t k = 0; k < count; k += 32) {
    const __mmask32 mask = first32(count - k);
    __m512i wv[COLUMNS];
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; ++c) {
      const uint16_t* row = w + (c < columns ? c : 0) * w_step + k;
      if (PREFETCH) _mm_prefetch((const char*)(row + COLUMNS * w_step), _MM_HINT_T0);
      wv[c] = _mm512_maskz_loadu_epi16(mask, row);
    }
#pragma GCC unroll 4
    for (int t = 0; t < ROWS; ++t) {
      const __m512i xv = _mm512_maskz_loadu_epi16(mask, x + t * x_step + k);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c) sums[t][c] = _mm512_dpbf16_ps(sums[t][c], as_bf16(wv[c]), as_bf16(xv));
    }
  }
}

struct Operands {
  const uint16_t *x, *w, *bias, *l, *b;
  uint16_t* y;
  int64_t features, ranks, x_step, w_step, l_step, b_step, y_step;
  float scale;
};

template <int ROWS, bool PREFETCH>
inline void tile(const Operands& o, int64_t t, int64_t n, int columns) {
  __m512 sums[ROWS][COLUMNS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; ++c) sums[r][c] = _mm512_setzero_ps();
  // the branch first: its sums are scaled, and the products with W are then added
  if (o.ranks) {
    add_products<ROWS, false>(o.l + t * o.l_step, o.l_step, o.b + n * o.b_step, o.b_step, o.ranks, columns, sums);
    const __m512 scale = _mm512_set1_ps(o.scale);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] = _mm512_mul_ps(sums[r][c], scale);
  }
  add_products<ROWS, PREFETCH>(o.x + t * o.x_step, o.x_step, o.w + n * o.w_step, o.w_step, o.features, columns, sums);
  const __mmask8 mask = (__mmask8)((1u << columns) - 1);
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    __m128 total = sum_each(sums[r]);
    if (o.bias) {
      const __m128i bits = _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(mask, o.bias + n)), 16);
      total = _mm_add_ps(total, _mm_castsi128_ps(bits));
    }
    _mm_mask_storeu_epi16(o.y + (t + r) * o.y_step + n, mask, (__m128i)_mm_cvtneps_pbh(total));
  }
}

}  // namespace row_products
#endif

// y = x Wᵀ + bias + scale l bᵀ, rounded once; bias may be null, and ranks may be 0. l is [T R] and b is [N R]. Every row of an operand
// is adjacent in memory. A row of y does not depend on the other rows of x or on the number of threads.
#ifdef NATIVE
extern "C" void few_rows(const uint16_t* x, const uint16_t* w, const uint16_t* bias, const uint16_t* l, const uint16_t* b, uint16_t* y,
                         int64_t tokens, int64_t features, int64_t columns, int64_t ranks, int64_t x_step, int64_t w_step,
                         int64_t l_step, int64_t b_step, int64_t y_step, float scale, int threads) {
  using namespace row_products;
  const Operands o{x, w, bias, l, b, y, features, ranks, x_step, w_step, l_step, b_step, y_step, scale};
  const int used = isotype::thread_count(features * columns, threads);
#pragma omp parallel num_threads(used)
  {
    const auto range = low_rank::thread_range(columns, COLUMNS, omp_get_thread_num(), omp_get_num_threads());
    for (int64_t n = range.first; n < range.last; n += COLUMNS) {
      const int width = (int)std::min<int64_t>(COLUMNS, range.last - n);
      int64_t t = 0;
      if (tokens >= 4) {
        tile<4, true>(o, 0, n, width);
        for (t = 4; t + 4 <= tokens; t += 4) tile<4, false>(o, t, n, width);
      } else {
        tile<1, true>(o, 0, n, width);
        t = 1;
      }
      for (; t < tokens; ++t) tile<1, false>(o, t, n, width);
    }
  }
}
#endif

// --- the same product on any processor. x and y are fp32 or bf16, and W has the dtype of x, or is bf16 beside an fp32 x. Values are
// widened to fp32 where they are loaded

namespace portable_rows {

using isotype::bf16;
using isotype::f32;
using isotype::LANES;

// the sums of ROWS rows of x with COLUMNS rows of W, and the values of one step, fill 16 registers, or 25 of AVX512
constexpr int ROWS = 4, COLUMNS = LANES == 16 ? 4 : 3;
// a single row needs more columns, because each sum waits for its previous multiply-add: 4096 x 4096 in bf16 take 2.2 ms with 8 columns
// and 3.7 ms with 3
constexpr int COLUMNS_OF_ONE_ROW = 8;
constexpr int CACHE_LINE = 64;

// The sums of a tile. They stay in registers, so no index of `values` may be a variable: GCC keeps the array in memory otherwise, and 8
// rows of 576 by 1536 x 576 then take 0.82 instead of 0.54 ms.
template <int R, int C>
struct Sums {
  f32 values[R][C] = {};
};

// Adds the products of R rows of x with C rows of W, for the elements from k.
template <int R, int C, class X, class W, class Count>
inline __attribute__((always_inline)) void add_step(const X* x, int64_t x_step, const W* const rows[C], int64_t k, Count count,
                                                    Sums<R, C>& sums) {
  f32 wv[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) wv[c] = isotype::load(rows[c] + k, count, 0.0f);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const f32 xv = isotype::load(x + r * x_step + k, count, 0.0f);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums.values[r][c] += wv[c] * xv;
  }
}

// Adds the products of R rows of x with `columns` rows of W. A missing row is read as the first one.
template <int R, int C, bool PREFETCH, class X, class W>
inline __attribute__((always_inline)) void add_products(const X* x, int64_t x_step, const W* w, int64_t w_step, int64_t count,
                                                        int columns, Sums<R, C>& sums) {
  constexpr int64_t LINE = CACHE_LINE / sizeof(W);
  const W* rows[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) rows[c] = w + (c < columns ? c : 0) * w_step;
  int64_t k = 0;
  for (; k + LINE <= count; k += LINE) {
    if (PREFETCH) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) __builtin_prefetch(rows[c] + C * w_step + k);
    }
    for (int64_t step = 0; step < LINE; step += LANES) add_step<R, C>(x, x_step, rows, k + step, isotype::Full{}, sums);
  }
  for (; k + LANES <= count; k += LANES) add_step<R, C>(x, x_step, rows, k, isotype::Full{}, sums);
  if (k < count) add_step<R, C>(x, x_step, rows, k, count - k, sums);
}

// Returns the sum of the lanes, by halves.
inline float sum(f32 x) {
  using quarter = float __attribute__((vector_size(16)));
  quarter parts[LANES / 4];
  std::memcpy(parts, &x, sizeof x);
  quarter total = parts[0];
  for (int i = 1; i < LANES / 4; ++i) total += parts[i];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

template <class X, class W>
struct Operands {
  const X* x;
  const W* w;
  const X *bias, *l, *b;
  X* y;
  int64_t features, ranks, x_step, w_step, l_step, b_step, y_step;
  float scale;
};

template <int R, int C, bool PREFETCH, class X, class W>
inline void tile(const Operands<X, W>& o, int64_t t, int64_t n, int columns) {
  Sums<R, C> sums;
  if (o.ranks) {
    add_products<R, C, false>(o.l + t * o.l_step, o.l_step, o.b + n * o.b_step, o.b_step, o.ranks, columns, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums.values[r][c] *= o.scale;
  }
  add_products<R, C, PREFETCH>(o.x + t * o.x_step, o.x_step, o.w + n * o.w_step, o.w_step, o.features, columns, sums);
  float totals[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) totals[r][c] = sum(sums.values[r][c]);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < columns; ++c) {
      const float bias = o.bias ? isotype::load_one(o.bias + n + c) : 0.0f;
      isotype::store(o.y + (t + r) * o.y_step + n + c, isotype::broadcast(totals[r][c] + bias), 1);
    }
}

// Computes columns of y in tiles of C columns, from `first` to `last`.
template <int C, class X, class W>
inline void product_of_columns(const Operands<X, W>& o, int64_t tokens, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n += C) {
    const int width = (int)std::min<int64_t>(C, last - n);
    int64_t t = 0;
    if (C == COLUMNS && tokens >= ROWS) {
      tile<ROWS, COLUMNS, true>(o, 0, n, width);
      for (t = ROWS; t + ROWS <= tokens; t += ROWS) tile<ROWS, COLUMNS, false>(o, t, n, width);
    } else {
      tile<1, C, true>(o, 0, n, width);
      t = 1;
    }
    for (; t < tokens; ++t) tile<1, C, false>(o, t, n, width);
  }
}

// as `few_rows`
template <class X, class W>
inline void product(const Operands<X, W>& o, int64_t tokens, int64_t columns, int threads) {
#pragma omp parallel num_threads(isotype::thread_count(o.features * columns, threads))
  {
    const int64_t width = tokens < ROWS ? COLUMNS_OF_ONE_ROW : COLUMNS;
    const int64_t tiles = (columns + width - 1) / width, thread = omp_get_thread_num(), used = omp_get_num_threads();
    const int64_t first = tiles * thread / used * width, last = std::min(columns, tiles * (thread + 1) / used * width);
    if (tokens < ROWS)
      product_of_columns<COLUMNS_OF_ONE_ROW>(o, tokens, first, last);
    else
      product_of_columns<COLUMNS>(o, tokens, first, last);
  }
}

#ifdef NATIVE
inline void product(const Operands<bf16, bf16>& o, int64_t tokens, int64_t columns, int threads) {
  const auto bits = [](const bf16* values) { return (const uint16_t*)values; };
  few_rows(bits(o.x), bits(o.w), bits(o.bias), bits(o.l), bits(o.b), (uint16_t*)o.y, tokens, o.features, columns, o.ranks, o.x_step,
           o.w_step, o.l_step, o.b_step, o.y_step, o.scale, threads);
}
#endif

}  // namespace portable_rows

#ifndef NATIVE
extern "C" void few_rows(const uint16_t* x, const uint16_t* w, const uint16_t* bias, const uint16_t* l, const uint16_t* b, uint16_t* y,
                         int64_t tokens, int64_t features, int64_t columns, int64_t ranks, int64_t x_step, int64_t w_step,
                         int64_t l_step, int64_t b_step, int64_t y_step, float scale, int threads) {
  using isotype::bf16;
  const auto values = [](const uint16_t* bits) { return (const bf16*)bits; };
  const portable_rows::Operands<bf16, bf16> o{values(x), values(w), values(bias), values(l), values(b), (bf16*)y,    features, ranks,
                                        x_step,    w_step,    l_step,       b_step,    y_step,    scale};
  portable_rows::product(o, tokens, columns, threads);
}
#endif

// --- all linear layers that have the same input x, each with its adapter

// has_bf16_weight says that W is bf16 beside an fp32 x. The widened values are those of an fp32 weight with the same values, so that the
// results are equal, and half as many bytes are read
struct Layer {
  int64_t w, w_step, bias, columns, a, a_step, b, b_step, ranks, has_bf16_weight;
};

template <class W, class X>
static void project(const X* x, const Layer& layer, float scale, X* y, int64_t tokens, int64_t features, int threads) {
  static thread_local std::vector<X> xa;
  if ((int64_t)xa.size() < tokens * layer.ranks) xa.resize(tokens * layer.ranks);
  if (layer.ranks) {
    portable_rows::Operands<X, X> o{};
    o.x = x;
    o.x_step = o.features = features;
    o.w = (const X*)layer.a;
    o.w_step = layer.a_step;
    o.y = xa.data();
    o.y_step = layer.ranks;
    portable_rows::product(o, tokens, layer.ranks, threads);
  }
  portable_rows::Operands<X, W> o{};
  o.x = x;
  o.x_step = o.features = features;
  o.w = (const W*)layer.w;
  o.w_step = layer.w_step;
  o.bias = (const X*)layer.bias;
  o.l = xa.data();
  o.b = (const X*)layer.b;
  o.l_step = o.ranks = layer.ranks;
  o.b_step = layer.b_step;
  o.scale = scale;
  o.y = y;
  o.y_step = layer.columns;
  portable_rows::product(o, tokens, layer.columns, threads);
}

// y = x Wᵀ + bias + scale (x Aᵀ) Bᵀ of each layer, for a few rows of x; bias may be null, and ranks may be 0. x Aᵀ is rounded to the
// dtype of x. Rows of x and y have no gaps.
extern "C" void project_rows(int64_t is_fp32, const void* x, const Layer* layers, const float* scales, int64_t count, void* y0, void* y1,
                             void* y2, int64_t tokens, int64_t features, int threads) {
  using isotype::bf16;
  void* const outputs[] = {y0, y1, y2};
  for (int64_t i = 0; i < count; ++i)
    if (!is_fp32)
      project<bf16>((const bf16*)x, layers[i], scales[i], (bf16*)outputs[i], tokens, features, threads);
    else if (layers[i].has_bf16_weight)
      project<bf16>((const float*)x, layers[i], scales[i], (float*)outputs[i], tokens, features, threads);
    else
      project<float>((const float*)x, layers[i], scales[i], (float*)outputs[i], tokens, features, threads);
}

// --- a norm and the layers that read its output, and the second half of a decoder layer

// `forward` of ops/rms_norm and ops/gated
using NormForward = void (*)(int64_t x_dtype, int64_t y_dtype, const void* x, const void* residual, const float* weight, void* y, float* scale,
                             void* total, int64_t rows, int64_t columns, int64_t x_stride, int64_t residual_stride, float eps, int threads);
using GatedForward = void (*)(int64_t dtype, const void* x, const void* up, void* out, int64_t rows, int64_t columns, int64_t x_stride,
                              int64_t up_stride, int64_t activation, int threads);

// the numbers of the dtypes in cpp.py
enum Dtype { FP32, BF16 };

// The norm of x + residual, and the layers that read it. residual may be null, and the norm is then that of x; otherwise the sum is
// written to total. Rows of all tensors have no gaps.
extern "C" void project_normed_rows(int64_t is_fp32, NormForward norm, const float* norm_weight, const void* x, const void* residual,
                                    void* total, void* normed, const Layer* layers, const float* scales, int64_t count, void* y0, void* y1,
                                    void* y2, int64_t tokens, int64_t features, float eps, int threads) {
  const Dtype dtype = is_fp32 ? FP32 : BF16;
  norm(dtype, dtype, x, residual, norm_weight, normed, nullptr, total, tokens, features, features, features, eps, threads);
  project_rows(is_fp32, normed, layers, scales, count, y0, y1, y2, tokens, features, threads);
}

template <class T>
static void mlp_half(const T* x, const T* residual, T* y, NormForward norm, const float* norm_weight, GatedForward gated, int64_t activation,
                     const Layer* inner, const float* inner_scales, int64_t inner_count, const Layer* down, const float* down_scale,
                     int64_t tokens, float eps, int threads) {
  constexpr bool IS_FP32 = std::is_same_v<T, float>;
  const int64_t features = down->columns, elements = tokens * features;
  // gate and up are two layers, or the halves of one
  const int64_t width = inner_count == 2 ? inner[0].columns : inner[0].columns / 2, up_start = inner_count == 2 ? tokens * width : width;
  static thread_local std::vector<T> memory;
  memory.resize(2 * elements + 3 * tokens * width);
  T *total = memory.data(), *normed = total + elements, *gate = normed + elements, *product = gate + 2 * tokens * width;
  project_normed_rows(IS_FP32, norm, norm_weight, x, residual, total, normed, inner, inner_scales, inner_count, gate, gate + up_start, nullptr,
                      tokens, features, eps, threads);
  const int64_t step = inner[0].columns;
  gated(IS_FP32 ? FP32 : BF16, gate, gate + up_start, product, tokens, width, step, step, activation, threads);
  project_rows(IS_FP32, product, down, down_scale, 1, y, nullptr, nullptr, tokens, width, threads);
  isotype::each_vector(elements, [=](int64_t i, auto count) {
    isotype::store(y + i, isotype::load(total + i, count, 0.0f) + isotype::load(y + i, count, 0.0f), count);
  });
}

// y = (x + residual) + down(activation(gate(n)) * up(n)) with n = norm(x + residual). The sum is rounded as each layer's output is.
extern "C" void decode_mlp_half(int64_t is_fp32, const void* x, const void* residual, void* y, NormForward norm, const float* norm_weight,
                                GatedForward gated, int64_t activation, const Layer* inner, const float* inner_scales, int64_t inner_count,
                                const Layer* down, const float* down_scale, int64_t tokens, float eps, int threads) {
  using isotype::bf16;
  if (is_fp32)
    mlp_half((const float*)x, (const float*)residual, (float*)y, norm, norm_weight, gated, activation, inner, inner_scales, inner_count, down,
             down_scale, tokens, eps, threads);
  else
    mlp_half((const bf16*)x, (const bf16*)residual, (bf16*)y, norm, norm_weight, gated, activation, inner, inner_scales, inner_count, down,
             down_scale, tokens, eps, threads);
}

// Writes the values of an fp32 weight in bf16, and whether each of them is a bf16 number. Stops at the first block with another one.
extern "C" void narrow_weight(const float* w, uint16_t* narrow, int64_t count, int64_t* is_exact, int threads) {
  constexpr int64_t BLOCK = 4096;
  std::atomic<bool> exact{true};
#pragma omp parallel for num_threads(isotype::thread_count(count, threads))
  for (int64_t start = 0; start < count; start += BLOCK) {
    if (!exact.load(std::memory_order_relaxed)) continue;
    const int64_t stop = std::min(count, start + BLOCK);
    isotype::u32 lost_bits = {};
    isotype::each_vector(stop - start, [=, &lost_bits](int64_t i, auto count) {
      const isotype::f32 values = isotype::load(w + start + i, count, 0.0f);
      lost_bits |= isotype::bits_of(values) << 16;
      isotype::store((isotype::bf16*)narrow + start + i, values, count);
    });
    for (int lane = 0; lane < isotype::LANES; ++lane)
      if (lost_bits[lane]) exact.store(false, std::memory_order_relaxed);
  }
  *is_exact = exact.load();
}
