// gelu(x) and its backward, exact and by tanh: each tensor read once, each result written once.
#include "gelu.h"

using namespace isotype;

namespace {

template <bool TANH>
void run_forward(int64_t dtype, const void* x, void* out, int64_t rows, int64_t columns, int64_t x_stride, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)x + row * x_stride + start;
      T* y = (T*)out + row * columns + start;
      each_vector(count, [=](int64_t i, auto left) { store(y + i, gelu<TANH>(load(g + i, left, 0.0f)).value, left); });
    });
  });
}

template <bool TANH>
void run_backward(int64_t dtype, const void* x, const void* dy, void* dx, int64_t rows, int64_t columns, int64_t x_stride,
                  int64_t dy_stride, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)x + row * x_stride + start;
      const T* d = (const T*)dy + row * dy_stride + start;
      T* out = (T*)dx + row * columns + start;
      each_vector(count, [=](int64_t i, auto left) {
        store(out + i, load(d + i, left, 0.0f) * gelu<TANH>(load(g + i, left, 0.0f)).slope, left);
      });
    });
  });
}

}  // namespace

extern "C" void forward(int64_t dtype, const void* x, void* out, int64_t rows, int64_t columns, int64_t x_stride, int64_t tanh, int threads) {
  (tanh ? run_forward<true> : run_forward<false>)(dtype, x, out, rows, columns, x_stride, threads);
}

extern "C" void backward(int64_t dtype, const void* x, const void* dy, void* dx, int64_t rows, int64_t columns, int64_t x_stride,
                         int64_t dy_stride, int64_t tanh, int threads) {
  (tanh ? run_backward<true> : run_backward<false>)(dtype, x, dy, dx, rows, columns, x_stride, dy_stride, threads);
}
