// LayerNorm of rows with a scale and a shift, and residual + gate * x, with their gradients. All
// rows of a picture share the vectors scale, shift and gate. These vectors are passed in fp32, with
// 1 already added to the scale. Backward computes the mean and deviation of a row again, since the
// row is in the cache anyway.
#include "lanes.h"

using namespace isotype;

namespace {

struct Row {
  float mean, factor;
};

template <class X>
Row row_statistics(const X* row, int64_t columns, float eps) {
  f32 totals = {};
  each_vector(columns, [=, &totals](int64_t i, auto left) { totals += load(row + i, left, 0.0f); });
  const float mean = sum(totals) / columns;
  f32 squares = {};
  each_vector(columns, [=, &squares](int64_t i, auto left) {
    const f32 v = load(row + i, left, mean) - mean;
    squares += v * v;
  });
  return {mean, 1.0f / std::sqrt(sum(squares) / columns + eps)};
}

template <class X, class Y>
void norm(const X* x, const float* scale, const float* shift, Y* y, int64_t rows, int64_t columns, int64_t x_stride, int64_t rows_each,
          float eps, int threads) {
#pragma omp parallel for schedule(dynamic, items_per_turn(columns)) num_threads(thread_count(rows * columns, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const X* row = x + r * x_stride;
    const Row m = row_statistics(row, columns, eps);
    const float *factors = scale + r / rows_each * columns, *added = shift + r / rows_each * columns;
    each_vector(columns, [=](int64_t i, auto left) {
      const f32 normed = (load(row + i, left, 0.0f) - m.mean) * m.factor;
      store(y + r * columns + i, normed * load(factors + i, left, 0.0f) + load(added + i, left, 0.0f), left);
    });
  }
}

// partial[block][2][columns] holds the gradients of scale and shift, summed over a block of rows of
// one picture. Blocks depend on the shape and not on the number of threads, so that results are
// reproducible with any number of threads
template <class X, class Y>
void gradients(const X* x, const float* scale, const Y* dy, X* dx, float* partial, int64_t rows, int64_t columns, int64_t x_stride,
               int64_t dy_stride, int64_t rows_each, int64_t block_rows, float eps, int threads) {
  const int64_t blocks_each = (rows_each + block_rows - 1) / block_rows, blocks = rows / rows_each * blocks_each;
#pragma omp parallel for schedule(dynamic, 1) num_threads(thread_count(rows * columns, threads))
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t picture = block / blocks_each, first = block % blocks_each * block_rows;
    const int64_t stop = first + block_rows < rows_each ? first + block_rows : rows_each;
    const float* factors = scale + picture * columns;
    float *dscale = partial ? partial + 2 * block * columns : nullptr, *dshift = partial ? dscale + columns : nullptr;
    if (partial) std::memset(dscale, 0, 2 * columns * sizeof(float));
    for (int64_t r = picture * rows_each + first; r < picture * rows_each + stop; ++r) {
      const X* row = x + r * x_stride;
      const Y* slopes = dy + r * dy_stride;
      const Row m = row_statistics(row, columns, eps);
      f32 totals = {}, products = {};
      each_vector(columns, [=, &totals, &products](int64_t i, auto left) {
        const f32 normed = (load(row + i, left, m.mean) - m.mean) * m.factor, d = load(slopes + i, left, 0.0f);
        const f32 g = d * load(factors + i, left, 0.0f);
        totals += g;
        products += g * normed;
        if (dscale) {
          store(dscale + i, load(dscale + i, left, 0.0f) + d * normed, left);
          store(dshift + i, load(dshift + i, left, 0.0f) + d, left);
        }
      });
      const float mean = sum(totals) / columns, slope = sum(products) / columns;
      each_vector(columns, [=](int64_t i, auto left) {
        const f32 normed = (load(row + i, left, 0.0f) - m.mean) * m.factor;
        const f32 g = load(slopes + i, left, 0.0f) * load(factors + i, left, 0.0f);
        store(dx + r * columns + i, m.factor * (g - mean - normed * slope), left);
      });
    }
  }
}

template <class X>
void add(const X* residual, const X* x, const float* gate, X* y, int64_t rows, int64_t columns, int64_t residual_stride, int64_t x_stride,
         int64_t rows_each, int threads) {
#pragma omp parallel for schedule(dynamic, items_per_turn(columns)) num_threads(thread_count(rows * columns, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const float* factors = gate + r / rows_each * columns;
    each_vector(columns, [=](int64_t i, auto left) {
      const f32 added = load(factors + i, left, 0.0f) * load(x + r * x_stride + i, left, 0.0f);
      store(y + r * columns + i, load(residual + r * residual_stride + i, left, 0.0f) + added, left);
    });
  }
}

// partial[block][columns] holds the gate's gradient, summed over a block of rows of one picture.
// Blocks depend on the shape and not on the number of threads, so that results are reproducible
// with any number of threads
template <class X>
void gate_gradients(const X* x, const float* gate, const X* dy, X* dx, float* partial, int64_t rows, int64_t columns, int64_t x_stride,
               int64_t dy_stride, int64_t rows_each, int64_t block_rows, int threads) {
  const int64_t blocks_each = (rows_each + block_rows - 1) / block_rows, blocks = rows / rows_each * blocks_each;
#pragma omp parallel for schedule(dynamic, 1) num_threads(thread_count(rows * columns, threads))
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t picture = block / blocks_each, first = block % blocks_each * block_rows;
    const int64_t stop = first + block_rows < rows_each ? first + block_rows : rows_each;
    const float* factors = gate + picture * columns;
    float* dgate = partial ? partial + block * columns : nullptr;
    if (dgate) std::memset(dgate, 0, columns * sizeof(float));
    for (int64_t r = picture * rows_each + first; r < picture * rows_each + stop; ++r) {
      each_vector(columns, [=](int64_t i, auto left) {
        const f32 d = load(dy + r * dy_stride + i, left, 0.0f);
        store(dx + r * columns + i, d * load(factors + i, left, 0.0f), left);
        if (dgate) store(dgate + i, load(dgate + i, left, 0.0f) + d * load(x + r * x_stride + i, left, 0.0f), left);
      });
    }
  }
}

}  // namespace

extern "C" void norm_forward(int64_t x_dtype, int64_t y_dtype, const void* x, const float* scale, const float* shift, void* y, int64_t rows,
                        int64_t columns, int64_t x_stride, int64_t rows_each, float eps, int threads) {
  with_dtype(x_dtype, [&](auto a) {
    with_dtype(y_dtype, [&](auto b) {
      using X = decltype(a);
      using Y = decltype(b);
      norm((const X*)x, scale, shift, (Y*)y, rows, columns, x_stride, rows_each, eps, threads);
    });
  });
}

// partial may be null: the gradients of scale and shift are then not computed
extern "C" void norm_backward(int64_t x_dtype, int64_t dy_dtype, const void* x, const float* scale, const void* dy, void* dx, float* partial,
                         int64_t rows, int64_t columns, int64_t x_stride, int64_t dy_stride, int64_t rows_each, int64_t block_rows, float eps,
                         int threads) {
  with_dtype(x_dtype, [&](auto a) {
    with_dtype(dy_dtype, [&](auto b) {
      using X = decltype(a);
      using Y = decltype(b);
      gradients((const X*)x, scale, (const Y*)dy, (X*)dx, partial, rows, columns, x_stride, dy_stride, rows_each, block_rows, eps, threads);
    });
  });
}

extern "C" void gate_forward(int64_t dtype, const void* residual, const void* x, const float* gate, void* y, int64_t rows, int64_t columns,
                        int64_t residual_stride, int64_t x_stride, int64_t rows_each, int threads) {
  with_dtype(dtype, [&](auto t) {
    using X = decltype(t);
    add((const X*)residual, (const X*)x, gate, (X*)y, rows, columns, residual_stride, x_stride, rows_each, threads);
  });
}

// partial may be null: the gate's gradient is then not computed
extern "C" void gate_backward(int64_t dtype, const void* x, const float* gate, const void* dy, void* dx, float* partial, int64_t rows,
                         int64_t columns, int64_t x_stride, int64_t dy_stride, int64_t rows_each, int64_t block_rows, int threads) {
  with_dtype(dtype, [&](auto t) {
    using X = decltype(t);
    gate_gradients((const X*)x, gate, (const X*)dy, (X*)dx, partial, rows, columns, x_stride, dy_stride, rows_each, block_rows, threads);
  });
}
