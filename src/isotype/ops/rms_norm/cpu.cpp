// RMSNorm of rows, and a backward that computes both gradients in one pass. The weight is passed in
// fp32, with Gemma's 1 already added.
#include "lanes.h"

using namespace isotype;

namespace {

// residual may be null. Otherwise x + residual is rounded to X and written to total, and the norm
// of total is computed. scale may be null, if no backward follows
template <class X, class Y>
void norm(const X* x, const X* residual, const float* weight, Y* y, float* scale, X* total, int64_t rows, int64_t columns, int64_t x_stride,
          int64_t residual_stride, float eps, int threads) {
#pragma omp parallel for schedule(dynamic, items_per_turn(columns)) num_threads(thread_count(rows * columns, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const X* row = x + r * x_stride;
    if (residual) {
      X* sums = total + r * columns;
      each_vector(columns, [=](int64_t i, auto left) {
        store(sums + i, load(row + i, left, 0.0f) + load(residual + r * residual_stride + i, left, 0.0f), left);
      });
      row = sums;
    }
    f32 squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= columns; i += 2 * LANES)
      for (int k = 0; k < 2; ++k) {
        const f32 v = load(row + i + k * LANES);
        squares[k] += v * v;
      }
    for (; i < columns; i += LANES) {
      const f32 v = load(row + i, columns - i, 0.0f);
      squares[0] += v * v;
    }
    const float s = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / columns + eps);
    if (scale) scale[r] = s;
    each_vector(columns, [=](int64_t i, auto left) {
      store(y + r * columns + i, load(row + i, left, 0.0f) * s * load(weight + i, left, 0.0f), left);
    });
  }
}

// partial[block] is the weight's gradient, summed over a block of rows. Blocks depend on the shape
// and not on the number of threads, so that results are reproducible with any number of threads.
// added_grad may be null; otherwise it is another gradient of x, which is added to dx
template <class X, class Y>
void gradients(const X* x, const float* weight, const float* scale, const Y* dy, const X* added_grad, X* dx, float* partial, int64_t rows,
               int64_t columns, int64_t x_stride, int64_t dy_stride, int64_t added_grad_stride, int64_t block_rows, int threads) {
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
#pragma omp parallel for schedule(dynamic, 1) num_threads(thread_count(rows * columns, threads))
  for (int64_t block = 0; block < blocks; ++block) {
    float* dweight = partial ? partial + block * columns : nullptr;
    if (dweight) std::memset(dweight, 0, columns * sizeof(float));
    const int64_t stop = (block + 1) * block_rows < rows ? (block + 1) * block_rows : rows;
    for (int64_t r = block * block_rows; r < stop; ++r) {
      const X* row = x + r * x_stride;
      const Y* slopes = dy + r * dy_stride;
      const float s = scale[r];
      f32 products = {};
      each_vector(columns, [=, &products](int64_t i, auto left) {
        const f32 normed = load(row + i, left, 0.0f) * s, d = load(slopes + i, left, 0.0f);
        products += d * load(weight + i, left, 0.0f) * normed;
        if (dweight) store(dweight + i, load(dweight + i, left, 0.0f) + d * normed, left);
      });
      const float mean = sum(products) / columns;
      each_vector(columns, [=](int64_t i, auto left) {
        const f32 normed = load(row + i, left, 0.0f) * s, g = load(slopes + i, left, 0.0f) * load(weight + i, left, 0.0f);
        const f32 gradient = s * (g - normed * mean);
        store(dx + r * columns + i, added_grad ? gradient + load(added_grad + r * added_grad_stride + i, left, 0.0f) : gradient, left);
      });
    }
  }
}

}  // namespace

extern "C" void forward(int64_t x_dtype, int64_t y_dtype, const void* x, const void* residual, const float* weight, void* y, float* scale,
                        void* total, int64_t rows, int64_t columns, int64_t x_stride, int64_t residual_stride, float eps, int threads) {
  with_dtype(x_dtype, [&](auto a) {
    with_dtype(y_dtype, [&](auto b) {
      using X = decltype(a);
      using Y = decltype(b);
      norm((const X*)x, (const X*)residual, weight, (Y*)y, scale, (X*)total, rows, columns, x_stride, residual_stride, eps, threads);
    });
  });
}

// partial may be null: the weight's gradient is then not computed
extern "C" void backward(int64_t x_dtype, int64_t dy_dtype, const void* x, const float* weight, const float* scale, const void* dy,
                         const void* added_grad, void* dx, float* partial, int64_t rows, int64_t columns, int64_t x_stride, int64_t dy_stride,
                         int64_t added_grad_stride, int64_t block_rows, int threads) {
  with_dtype(x_dtype, [&](auto a) {
    with_dtype(dy_dtype, [&](auto b) {
      using X = decltype(a);
      using Y = decltype(b);
      gradients((const X*)x, weight, scale, (const Y*)dy, (const X*)added_grad, (X*)dx, partial, rows, columns, x_stride, dy_stride, added_grad_stride,
                block_rows, threads);
    });
  });
}
