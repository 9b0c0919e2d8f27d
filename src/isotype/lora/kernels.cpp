// Exports the products of `ops/low_rank.h` for one layer.
#include "low_rank.h"

extern "C" void shrink(const uint16_t* x, const uint16_t* a, uint16_t* out, int64_t tokens, int64_t n, int64_t ranks, int64_t x_step,
                       int64_t a_rank_step, int64_t a_step, int64_t out_step, float scale, int threads) {
#ifdef NATIVE
  low_rank::shrink(x, a, out, tokens, n, ranks, x_step, a_rank_step, a_step, out_step, scale, threads);
#endif
}

extern "C" void expand(uint16_t* y, const uint16_t* l, const uint16_t* b, int64_t tokens, int64_t n, int64_t ranks, int64_t y_step,
                       int64_t l_step, int64_t b_rank_step, int64_t b_step, float scale, int threads) {
#ifdef NATIVE
  low_rank::expand(y, l, b, tokens, n, ranks, y_step, l_step, b_rank_step, b_step, scale, threads);
#endif
}

extern "C" void gradient(const uint16_t* x, const uint16_t* l, float* grad, int64_t tokens, int64_t n, int64_t ranks, int64_t x_step,
                         int64_t l_step, int64_t grad_rank_step, int64_t grad_step, float scale, int threads) {
#ifdef NATIVE
  low_rank::gradient(x, l, grad, tokens, n, ranks, x_step, l_step, grad_rank_step, grad_step, scale, threads);
#endif
}
