// The rotation of [batch, heads, positions, size] by fp32 tables. Strides may have any order;
// elements of the last dimension are adjacent.
#include "lanes.h"

using namespace isotype;

namespace {

struct Strides {
  int64_t batch, head, position;
};

template <class T>
void rotate_halves(const T* x, T* y, const float* cos, const float* sin, float sign, int64_t pairs) {
  each_vector(pairs, [=](int64_t i, auto left) {
    const f32 a = load(x + i, left, 0.0f), b = load(x + pairs + i, left, 0.0f);
    const f32 c = load(cos + i, left, 0.0f), s = load(sin + i, left, 0.0f) * sign;
    store(y + i, a * c - b * s, left);
    store(y + pairs + i, b * c + a * s, left);
  });
}

template <class T>
void rotate_neighbours(const T* x, T* y, const float* cos, const float* sin, float sign, int64_t pairs) {
  const Lanes lanes;
  int64_t i = 0;
  for (; i + LANES <= pairs; i += LANES) {
    const f32 c = load(cos + i), s = load(sin + i) * sign;
    const f32 first = load(x + 2 * i), second = load(x + 2 * i + LANES);
    store(y + 2 * i, first * permute(c, lanes.lower) + permute(first, lanes.swapped) * (permute(s, lanes.lower) * lanes.sign));
    store(y + 2 * i + LANES, second * permute(c, lanes.upper) + permute(second, lanes.swapped) * (permute(s, lanes.upper) * lanes.sign));
  }
  // pairs that do not fill a vector are copied to fp32 buffers: the compiler vectorises the strided
  // loop over plain floats
  float in[2 * LANES], out[2 * LANES];
  for (; i < pairs; i += LANES) {
    const int64_t left = 2 * (pairs - i);
    for (int64_t k = 0; k < 2 * LANES && k < left; k += LANES) store(in + k, load(x + 2 * i + k, left - k, 0.0f));
    for (int64_t k = 0; k < LANES && k < left / 2; ++k) {
      const float a = in[2 * k], b = in[2 * k + 1], c = cos[i + k], s = sin[i + k] * sign;
      out[2 * k] = a * c - b * s;
      out[2 * k + 1] = b * c + a * s;
    }
    for (int64_t k = 0; k < 2 * LANES && k < left; k += LANES) store(y + 2 * i + k, load(out + k), left - k);
  }
}

}  // namespace

extern "C" void rotate(int64_t dtype, const void* x, void* y, const float* cos, const float* sin, int64_t batch, int64_t heads,
                       int64_t positions, int64_t size, int64_t pairs, int64_t x_batch, int64_t x_head, int64_t x_position, int64_t y_batch,
                       int64_t y_head, int64_t y_position, int64_t tables, int64_t interleaved, int64_t back, int threads) {
  const float sign = back ? -1.0f : 1.0f;
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t rows = batch * positions;
    // all heads of a position share its row of the tables, and are adjacent in memory after a
    // projection
#pragma omp parallel for schedule(dynamic, items_per_turn(heads * size)) num_threads(thread_count(rows * heads * size, threads))
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t b = row / positions, s = row % positions, table = ((tables == 1 ? 0 : b) * positions + s) * pairs;
      for (int64_t h = 0; h < heads; ++h) {
        const T* from = (const T*)x + b * x_batch + h * x_head + s * x_position;
        T* to = (T*)y + b * y_batch + h * y_head + s * y_position;
        (interleaved ? rotate_neighbours<T> : rotate_halves<T>)(from, to, cos + table, sin + table, sign, pairs);
        std::memcpy(to + 2 * pairs, from + 2 * pairs, (size - 2 * pairs) * sizeof(T));
      }
    }
  });
}
