// gelu(gate) * up and its backward, exact and by tanh: each tensor read once, each result written once.
#include "gelu.h"

using namespace isotype;

namespace {

template <bool TANH>
void run_forward(int64_t dtype, const void* gate, const void* up, void* out, int64_t rows, int64_t columns, int64_t gate_stride,
                 int64_t up_stride, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)gate + row * gate_stride + start;
      const T* u = (const T*)up + row * up_stride + start;
      T* y = (T*)out + row * columns + start;
      each_vector(count, [=](int64_t i, auto left) {
        store(y + i, gelu<TANH>(load(g + i, left, 0.0f)).value * load(u + i, left, 0.0f), left);
      });
    });
  });
}

template <bool TANH>
void run_backward(int64_t dtype, const void* gate, const void* up, const void* dy, void* dgate, void* dup, void* product, int64_t rows,
                  int64_t columns, int64_t gate_stride, int64_t up_stride, int64_t dy_stride, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    each_block(rows, columns, threads, [=](int64_t row, int64_t start, int64_t count) {
      const T* g = (const T*)gate + row * gate_stride + start;
      const T* u = (const T*)up + row * up_stride + start;
      const T* d = (const T*)dy + row * dy_stride + start;
      T* dg = (T*)dgate + row * columns + start;
      T* du = (T*)dup + row * columns + start;
      T* out = product ? (T*)product + row * columns + start : nullptr;
      each_vector(count, [=](int64_t i, auto left) {
        const Gelu y = gelu<TANH>(load(g + i, left, 0.0f));
        const f32 slopes = load(d + i, left, 0.0f), other = load(u + i, left, 0.0f);
        store(dg + i, slopes * other * y.slope, left);
        store(du + i, slopes * y.value, left);
        if (out) store(out + i, y.value * other, left);
      });
    });
  });
}

}  // namespace

extern "C" void forward(int64_t dtype, const void* gate, const void* up, void* out, int64_t rows, int64_t columns, int64_t gate_stride,
                        int64_t up_stride, int64_t tanh, int threads) {
  (tanh ? run_forward<true> : run_forward<false>)(dtype, gate, up, out, rows, columns, gate_stride, up_stride, threads);
}

// `product` may be null; else gelu(gate) * up is written there again, for a caller that did not keep it.
extern "C" void backward(int64_t dtype, const void* gate, const void* up, const void* dy, void* dgate, void* dup, void* product,
                         int64_t rows, int64_t columns, int64_t gate_stride, int64_t up_stride, int64_t dy_stride, int64_t tanh, int threads) {
  (tanh ? run_backward<true> : run_backward<false>)(dtype, gate, up, dy, dgate, dup, product, rows, columns, gate_stride, up_stride,
                                                    dy_stride, threads);
}
