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
      for (int64_t i = 0; i < count; i += LANES) {
        const f32 x = load(g + i, count - i, 0.0f);
        store(y + i, x * sigmoid(x) * load(u + i, count - i, 0.0f), count - i);
      }
    });
  });
}

extern "C" void backward(int64_t dtype, const void* gate, const void* up, const void* dy, void* dgate, void* dup, int64_t rows,
                         int64_t columns, int64_t gate_stride, int64_t up_stride, int64_t dy_stride, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)gate + row * gate_stride + start;
      const T* u = (const T*)up + row * up_stride + start;
      const T* d = (const T*)dy + row * dy_stride + start;
      T* dg = (T*)dgate + row * columns + start;
      T* du = (T*)dup + row * columns + start;
      for (int64_t i = 0; i < count; i += LANES) {
        const f32 x = load(g + i, count - i, 0.0f), slopes = load(d + i, count - i, 0.0f), s = sigmoid(x);
        store(dg + i, slopes * load(u + i, count - i, 0.0f) * s * (1.0f + x * (1.0f - s)), count - i);
        store(du + i, slopes * (x * s), count - i);
      }
    });
  });
}
