// residual + gate * x, where all rows of a picture have one gate, and the gradients of x and of the gate. The gate comes in fp32.
#include "lanes.h"

using namespace isotype;

namespace {

template <class X>
void add(const X* residual, const X* x, const float* gate, X* y, int64_t rows, int64_t columns, int64_t residual_stride, int64_t x_stride,
         int64_t rows_each, int threads) {
#pragma omp parallel for schedule(dynamic, share(columns)) num_threads(team(rows * columns, threads))
  for (int64_t r = 0; r < rows; ++r) {
    const float* factors = gate + r / rows_each * columns;
    each_vector(columns, [=](int64_t i, auto left) {
      const f32 added = load(factors + i, left, 0.0f) * load(x + r * x_stride + i, left, 0.0f);
      store(y + r * columns + i, load(residual + r * residual_stride + i, left, 0.0f) + added, left);
    });
  }
}

// partial[block][columns]: the gate's gradient, summed over a block of rows of one picture; blocks follow from the shape, not from the
// threads, so that a run repeats on any number of them
template <class X>
void gradients(const X* x, const float* gate, const X* dy, X* dx, float* partial, int64_t rows, int64_t columns, int64_t x_stride,
               int64_t dy_stride, int64_t rows_each, int64_t block_rows, int threads) {
  const int64_t blocks_each = (rows_each + block_rows - 1) / block_rows, blocks = rows / rows_each * blocks_each;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team(rows * columns, threads))
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

extern "C" void forward(int64_t dtype, const void* residual, const void* x, const float* gate, void* y, int64_t rows, int64_t columns,
                        int64_t residual_stride, int64_t x_stride, int64_t rows_each, int threads) {
  with_dtype(dtype, [&](auto t) {
    using X = decltype(t);
    add((const X*)residual, (const X*)x, gate, (X*)y, rows, columns, residual_stride, x_stride, rows_each, threads);
  });
}

// partial may be null: no gradient of the gate
extern "C" void backward(int64_t dtype, const void* x, const float* gate, const void* dy, void* dx, float* partial, int64_t rows,
                         int64_t columns, int64_t x_stride, int64_t dy_stride, int64_t rows_each, int64_t block_rows, int threads) {
  with_dtype(dtype, [&](auto t) {
    using X = decltype(t);
    gradients((const X*)x, gate, (const X*)dy, (X*)dx, partial, rows, columns, x_stride, dy_stride, rows_each, block_rows, threads);
  });
}
