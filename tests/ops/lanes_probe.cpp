// The functions of lanes.h, one array in, one out: for tests/ops/test_lanes.py.
#include "lanes.h"

using namespace isotype;

extern "C" void apply(int64_t which, const float* x, float* y, int64_t count, int threads) {
  (void)threads;
  for (int64_t i = 0; i < count; i += LANES) {
    const f32 v = load(x + i, count - i, 0.0f);
    f32 density;
    const f32 p = normal_cdf(v, density);
    store(y + i, which == 0 ? exp(v) : which == 1 ? tanh(v) : which == 2 ? sigmoid(v) : which == 3 ? p : which == 4 ? density : log(v), count - i);
  }
}

extern "C" void convert(int64_t from, int64_t to, const void* x, void* y, int64_t count, int threads) {
  (void)threads;
  with_dtype(from, [&](auto a) {
    with_dtype(to, [&](auto b) {
      for (int64_t i = 0; i < count; i += LANES) store((decltype(b)*)y + i, load((const decltype(a)*)x + i, count - i, 0.0f), count - i);
    });
  });
}
