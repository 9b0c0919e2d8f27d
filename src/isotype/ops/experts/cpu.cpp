// Kernels for stacked experts: products with an adapter's rank for each expert's rows, the
// activation between an expert's two layers, and sums over a token's experts. A Python loop over 32
// experts would take 1 ms per product with a rank; here it is one call.
#include "activation.h"
#include "low_rank.h"

using namespace isotype;

// `ends` is the end of each expert's rows. Strides are in elements.

// Multiplies x [rows, n] by the matrix of each row's expert, [n, columns] with strides (w_step,
// w_column_step), one of which is 1. A matrix is transposed at most once per call.
extern "C" void multiply(const uint16_t* x, const uint16_t* w, uint16_t* out, const int64_t* ends, int64_t experts, int64_t n,
                         int64_t columns, int64_t x_step, int64_t w_expert_step, int64_t w_step, int64_t w_column_step, int64_t out_step,
                         int threads) {
#ifdef NATIVE
  constexpr int64_t BLOCK = 48;
  const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic) num_threads(thread_count(ends[experts - 1] * n * columns, threads))
  for (int64_t item = 0; item < experts * blocks; ++item) {
    static thread_local low_rank::Scratch scratch;
    const int64_t e = item / blocks, column = item % blocks * BLOCK, row = e ? ends[e - 1] : 0, wide = std::min(BLOCK, columns - column);
    if (ends[e] == row) continue;
    low_rank::Pairs* packed = scratch.take<low_rank::Pairs>((n + 1) / 2 * BLOCK);
    low_rank::pack(w + e * w_expert_step + column * w_column_step, n, w_step, wide, w_column_step, packed, BLOCK);
    low_rank::shrink_block(x + row * x_step, x_step, ends[e] - row, n, packed, BLOCK, 1.0f, out + row * out_step + column, out_step, wide);
  }
#endif
}

extern "C" void shrink(const uint16_t* x, const uint16_t* a, uint16_t* out, const int64_t* ends, int64_t experts, int64_t n, int64_t ranks,
                       int64_t x_step, int64_t a_expert_step, int64_t a_rank_step, int64_t a_step, int threads) {
#ifdef NATIVE
  for (int64_t e = 0, row = 0; e < experts; row = ends[e++])
    if (ends[e] > row)
      low_rank::shrink(x + row * x_step, a + e * a_expert_step, out + row * ranks, ends[e] - row, n, ranks, x_step, a_rank_step, a_step,
                       ranks, 1.0f, threads);
#endif
}

extern "C" void expand(uint16_t* y, const uint16_t* l, const uint16_t* b, const int64_t* ends, int64_t experts, int64_t n, int64_t ranks,
                       int64_t y_step, int64_t l_step, int64_t b_expert_step, int64_t b_rank_step, int64_t b_step, float scale,
                       int threads) {
#ifdef NATIVE
  for (int64_t e = 0, row = 0; e < experts; row = ends[e++])
    if (ends[e] > row)
      low_rank::expand(y + row * y_step, l + row * l_step, b + e * b_expert_step, ends[e] - row, n, ranks, y_step, l_step, b_rank_step,
                       b_step, scale, threads);
#endif
}

extern "C" void gradient(const uint16_t* x, const uint16_t* l, float* grad, const int64_t* ends, int64_t experts, int64_t n, int64_t ranks,
                         int64_t x_step, int64_t l_step, int64_t grad_expert_step, int64_t grad_rank_step, int64_t grad_step, float scale,
                         int threads) {
#ifdef NATIVE
  for (int64_t e = 0, row = 0; e < experts; row = ends[e++])
    if (ends[e] > row)
      low_rank::gradient(x + row * x_step, l + row * l_step, grad + e * grad_expert_step, ends[e] - row, n, ranks, x_step, l_step,
                         grad_rank_step, grad_step, scale, threads);
#endif
}

namespace {

// gpt-oss's activation, with interleaved columns; its number comes after the numbers of Activation
constexpr int64_t CLAMPED = 3;

struct Gate {
  f32 value, by_gate, by_up;
};

template <class A>
inline Gate gated(A, f32 gate, f32 up, float, float) {
  const Activated result = activate<A::value>(gate);
  return {result.value * up, result.slope * up, result.value};
}

struct Clamped {};

inline Gate gated(Clamped, f32 gate, f32 up, float alpha, float limit) {
  const f32 g = gate > limit ? broadcast(limit) : gate, u = up > limit ? broadcast(limit) : up < -limit ? broadcast(-limit) : up;
  const f32 s = sigmoid(alpha * g), value = g * s;
  const f32 slope = s * (1.0f + alpha * g * (1.0f - s)) * (u + 1.0f);
  return {(u + 1.0f) * value, gate > limit ? f32{} : slope, up > limit || up < -limit ? f32{} : value};
}

// `count` pairs of a row, from its two halves, or (Clamped) from even and odd columns
template <class A, class T>
inline void load_pair(A, const T* row, int64_t inner, int64_t i, int64_t count, f32& gate, f32& up) {
  gate = load(row + i, count, 0.0f);
  up = load(row + inner + i, count, 0.0f);
}

template <class T>
inline void load_pair(Clamped, const T* row, int64_t, int64_t i, int64_t count, f32& gate, f32& up) {
  const f32 first = load(row + 2 * i, 2 * count, 0.0f), second = 2 * count > LANES ? load(row + 2 * i + LANES, 2 * count - LANES, 0.0f) : f32{};
  for (int k = 0; k < LANES / 2; ++k) {
    gate[k] = first[2 * k];
    up[k] = first[2 * k + 1];
    gate[LANES / 2 + k] = second[2 * k];
    up[LANES / 2 + k] = second[2 * k + 1];
  }
}

template <class A, class T>
inline void store_pair(A, T* row, int64_t inner, int64_t i, int64_t count, f32 gate, f32 up) {
  store(row + i, gate, count);
  store(row + inner + i, up, count);
}

template <class T>
inline void store_pair(Clamped, T* row, int64_t, int64_t i, int64_t count, f32 gate, f32 up) {
  f32 first, second;
  for (int k = 0; k < LANES / 2; ++k) {
    first[2 * k] = gate[k];
    first[2 * k + 1] = up[k];
    second[2 * k] = gate[LANES / 2 + k];
    second[2 * k + 1] = up[LANES / 2 + k];
  }
  store(row + 2 * i, first, 2 * count);
  if (2 * count > LANES) store(row + 2 * i + LANES, second, 2 * count - LANES);
}

template <class F>
void with_gate(int64_t dtype, int64_t kind, F&& f) {
  with_dtype(dtype, [&](auto t) {
    if (kind == SILU) f(t, std::integral_constant<Activation, SILU>{});
    if (kind == GELU) f(t, std::integral_constant<Activation, GELU>{});
    if (kind == GELU_TANH) f(t, std::integral_constant<Activation, GELU_TANH>{});
    if (kind == CLAMPED) f(t, Clamped{});
  });
}

}  // namespace

// computes h [rows, inner] from g [rows, 2 inner]
extern "C" void activate(int64_t dtype, const void* g, void* h, int64_t rows, int64_t inner, int64_t kind, float alpha, float limit,
                         int threads) {
  with_gate(dtype, kind, [&](auto t, auto a) {
    using T = decltype(t);
#pragma omp parallel for num_threads(thread_count(rows * inner, threads))
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < inner; i += LANES) {
        f32 gate, up;
        load_pair(a, (const T*)g + row * 2 * inner, inner, i, inner - i, gate, up);
        store((T*)h + row * inner + i, gated(a, gate, up, alpha, limit).value, inner - i);
      }
  });
}

// Computes dg from dh times each row's weight, h again if it is needed, and the inner product of h
// and dh without the weight.
extern "C" void backward(int64_t dtype, const void* g, const void* dh, const float* weights, void* dg, void* h, float* products,
                         int64_t rows, int64_t inner, int64_t kind, float alpha, float limit, int threads) {
  with_gate(dtype, kind, [&](auto t, auto a) {
    using T = decltype(t);
#pragma omp parallel for num_threads(thread_count(rows * inner, threads))
    for (int64_t row = 0; row < rows; ++row) {
      f32 product{};
      const float w = weights[row];
      for (int64_t i = 0; i < inner; i += LANES) {
        f32 gate, up;
        load_pair(a, (const T*)g + row * 2 * inner, inner, i, inner - i, gate, up);
        const f32 d = load((const T*)dh + row * inner + i, inner - i, 0.0f);
        const Gate result = gated(a, gate, up, alpha, limit);
        product += result.value * d;
        store_pair(a, (T*)dg + row * 2 * inner, inner, i, inner - i, d * w * result.by_gate, d * w * result.by_up);
        if (h) store((T*)h + row * inner + i, result.value, inner - i);
      }
      products[row] = sum(product);
    }
  });
}

// Adds each row, times its weight if there are weights, to the fp32 sums of its token. The columns
// are divided among threads, so that each sum has a fixed order.
extern "C" void scatter(int64_t dtype, const void* y, const int64_t* tokens, const float* weights, float* total, int64_t rows,
                        int64_t columns, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t block = 16 * LANES, blocks = (columns + block - 1) / block;
    const int used = thread_count(rows * columns, threads);
    const int64_t share = (blocks + used - 1) / used * block;
#pragma omp parallel for num_threads(used) schedule(static, 1)
    for (int part = 0; part < used; ++part)
      for (int64_t row = 0; row < rows; ++row) {
        const float w = weights ? weights[row] : 1.0f;
        const int64_t first = part * share, count = (first + share < columns ? first + share : columns) - first;
        const T* from = (const T*)y + row * columns + first;
        float* to = total + tokens[row] * columns + first;
        if (count > 0) each_vector(count, [=](int64_t i, auto left) { store(to + i, load(to + i, left, 0.0f) + w * load(from + i, left, 0.0f), left); });
      }
  });
}
