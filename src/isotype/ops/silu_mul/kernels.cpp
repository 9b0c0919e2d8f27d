// silu(gate) * up and its backward: each tensor read once, each result written once.
#include "lanes.h"

using namespace isotype;

extern "C" void forward(int64_t dtype, const void* gate, const void* up, void* out, int64_t rows, int64_t columns, int64_t gate_stride,
                        int64_t up_stride, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)gate + row * gate_stride + start;
      const T* u = (const T*)up + row * up_stride + start;
      T* y = (T*)out + row * columns + start;
      each_vector(count, [=](int64_t i, auto left) {
        const f32 x = load(g + i, left, 0.0f);
        store(y + i, x * sigmoid(x) * load(u + i, left, 0.0f), left);
      });
    });
  });
}

// `product` may be null; else silu(gate) * up is written there again, for a caller that did not keep it.
extern "C" void backward(int64_t dtype, const void* gate, const void* up, const void* dy, void* dgate, void* dup, void* product,
                         int64_t rows, int64_t columns, int64_t gate_stride, int64_t up_stride, int64_t dy_stride, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)gate + row * gate_stride + start;
      const T* u = (const T*)up + row * up_stride + start;
      const T* d = (const T*)dy + row * dy_stride + start;
      T* dg = (T*)dgate + row * columns + start;
      T* du = (T*)dup + row * columns + start;
      T* y = product ? (T*)product + row * columns + start : nullptr;
      each_vector(count, [=](int64_t i, auto left) {
        const f32 x = load(g + i, left, 0.0f), slopes = load(d + i, left, 0.0f), s = sigmoid(x);
        const f32 other = load(u + i, left, 0.0f);
        store(dg + i, slopes * other * s * (1.0f + x * (1.0f - s)), left);
        store(du + i, slopes * (x * s), left);
        if (y) store(y + i, x * s * other, left);
      });
    });
  });
}
