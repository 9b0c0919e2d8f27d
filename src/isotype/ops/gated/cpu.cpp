// An activation, alone or multiplied by `up`, and its backward. Each tensor is read once, and each
// result is written once.
#include "activation.h"

using namespace isotype;

namespace {

// calls f(dtype, activation, whether there is an `up`); each argument is a constant in the compiled
// code
template <class F>
void with_kind(int64_t dtype, int64_t activation, bool gated, F&& f) {
  with_dtype(dtype, [&](auto t) {
    const auto with = [&](auto a) { gated ? f(t, a, std::true_type{}) : f(t, a, std::false_type{}); };
    if (activation == SILU) with(std::integral_constant<Activation, SILU>{});
    if (activation == GELU) with(std::integral_constant<Activation, GELU>{});
    if (activation == GELU_TANH) with(std::integral_constant<Activation, GELU_TANH>{});
  });
}

}  // namespace

// up may be null; then only the activation is computed
extern "C" void forward(int64_t dtype, const void* x, const void* up, void* out, int64_t rows, int64_t columns, int64_t x_stride,
                        int64_t up_stride, int64_t activation, int threads) {
  with_kind(dtype, activation, up, [&](auto t, auto a, auto gated) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)x + row * x_stride + start;
      const T* u = gated ? (const T*)up + row * up_stride + start : nullptr;
      T* y = (T*)out + row * columns + start;
      each_vector(count, [=](int64_t i, auto left) {
        const f32 value = activate<decltype(a)::value>(load(g + i, left, 0.0f)).value;
        if constexpr (decltype(gated)::value)
          store(y + i, value * load(u + i, left, 0.0f), left);
        else
          store(y + i, value, left);
      });
    });
  });
}

// `product` may be null. Otherwise the result of the forward is written there again, for a caller
// that did not save it.
extern "C" void backward(int64_t dtype, const void* x, const void* up, const void* dy, void* dx, void* dup, void* product, int64_t rows,
                         int64_t columns, int64_t x_stride, int64_t up_stride, int64_t dy_stride, int64_t activation, int threads) {
  with_kind(dtype, activation, up, [&](auto t, auto a, auto gated) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const int64_t to = row * columns + start;
      const T *g = (const T*)x + row * x_stride + start, *d = (const T*)dy + row * dy_stride + start;
      const T* u = gated ? (const T*)up + row * up_stride + start : nullptr;
      T *dg = (T*)dx + to, *du = gated ? (T*)dup + to : nullptr, *out = product ? (T*)product + to : nullptr;
      each_vector(count, [=](int64_t i, auto left) {
        const Activated y = activate<decltype(a)::value>(load(g + i, left, 0.0f));
        const f32 slopes = load(d + i, left, 0.0f);
        if constexpr (decltype(gated)::value) {
          const f32 up_value = load(u + i, left, 0.0f);
          store(dg + i, slopes * up_value * y.slope, left);
          store(du + i, slopes * y.value, left);
          if (out) store(out + i, y.value * up_value, left);
        } else {
          store(dg + i, slopes * y.slope, left);
          if (out) store(out + i, y.value, left);
        }
      });
    });
  });
}
