// The conversions of lanes.h, one array in, one out: for tests/ops/test_lanes.py.
#include "lanes.h"

using namespace isotype;

extern "C" void convert(int64_t from, int64_t to, const void* x, void* y, int64_t count, int threads) {
  (void)threads;
  with_dtype(from, [&](auto a) {
    with_dtype(to, [&](auto b) {
      for (int64_t i = 0; i < count; i += LANES) store((decltype(b)*)y + i, load((const decltype(a)*)x + i, count - i, 0.0f), count - i);
    });
  });
}
