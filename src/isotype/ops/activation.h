// Activations of gated products and their derivatives.
#pragma once
#include "lanes.h"

namespace isotype {

enum Activation { SILU, GELU, GELU_TANH };

struct Activated {
  f32 value, slope;
};

// computes the activation and its derivative with one exp and one division
template <Activation A>
inline Activated activate(f32 x) {
  if (A == SILU) {
    const f32 s = sigmoid(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
  }
  if (A == GELU_TANH) {
    // (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel for a negative u
    const f32 s = sigmoid(x * (1.59576912f + 0.0713548163f * x * x));
    return {x * s, s + x * s * (1.0f - s) * (1.59576912f + 0.214064449f * x * x)};
  }
  f32 density;
  const f32 p = normal_cdf(x, density);
  // for large |x| both factors are exact, and their product is not 0 times inf
  return {x * p, p + x * density};
}

}  // namespace isotype
