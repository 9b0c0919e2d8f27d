// Changes to the logits of a head before their softmax: the scale, the softcap, and the
// recomputation of a row's largest logits in fp32.
#pragma once
#include <algorithm>

#include "lanes.h"

namespace isotype {

struct Rule {
  int64_t ignore_index;
  float smoothing, scale, softcap, z_loss;
};

// a logit after scale and softcap; CAPPED is whether there is a softcap
template <bool CAPPED>
inline f32 apply_rule(f32 x, const Rule& rule) {
  const f32 z = x * rule.scale;
  return CAPPED ? rule.softcap * tanh(z / rule.softcap) : z;
}

// the derivative of apply_rule by x
template <bool CAPPED>
inline f32 slope(f32 x, const Rule& rule) {
  if (!CAPPED) return broadcast(rule.scale);
  const f32 t = tanh(x * (rule.scale / rule.softcap));
  return rule.scale * (1.0f - t * t);
}

// The operands of bf16 logits: x[rows size] W[classes size]^T + bias[classes] (or null). Elements
// of a row are adjacent. x is null where the operands are not known.
struct Source {
  const void* x;
  int64_t x_stride;
  const void* weight;
  int64_t weight_stride, size;
  const void* bias;
};

// Rounding a product to bf16 loses most precision at the largest logits, which also have the
// largest weight in the softmax. So the target's logit and the LARGEST other logits of a row are
// recomputed in fp32. For 9 logits of 32,000 this is 0.03% of the product's work.
constexpr int LARGEST = 8, RECOMPUTED = LARGEST + 1;

// The recomputed logits of a row, after scale and softcap: their columns, their values as rounded to bf16, and their values in fp32.
struct RecomputedLogits {
  int count = 0;
  int64_t columns[RECOMPUTED];
  float rounded[RECOMPUTED], values[RECOMPUTED];

  // returns the position of a column, or -1
  int find(int64_t column) const {
    for (int k = 0; k < count; ++k)
      if (columns[k] == column) return k;
    return -1;
  }
};

// recomputes the logit of one class in fp32, after scale and softcap
template <bool CAPPED, class T>
float recompute_logit(const Rule& rule, const Source& source, int64_t r, int64_t column) {
  const T *x = (const T*)source.x + r * source.x_stride, *w = (const T*)source.weight + column * source.weight_stride;
  f32 total = {};
  each_vector(source.size, [&](int64_t j, auto left) { total += load(x + j, left, 0.0f) * load(w + j, left, 0.0f); });
  return apply_rule<CAPPED>(broadcast(sum(total) + (source.bias ? load_one((const T*)source.bias + column) : 0.0f)), rule)[0];
}

// finds the largest logits of a row and fills `columns` and `rounded`
template <bool CAPPED, class T>
RecomputedLogits find_largest(const T* logits, int64_t columns, const Rule& rule) {
  constexpr int UNROLLED = 4;
  RecomputedLogits exact;
  float least = -INFINITY;
  const auto insert = [&](f32 z, int64_t i, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      if (!(z[k] > least)) continue;
      int slot = exact.count;
      if (slot < LARGEST) ++exact.count;
      else slot = std::min_element(exact.rounded, exact.rounded + LARGEST) - exact.rounded;
      exact.rounded[slot] = z[k], exact.columns[slot] = i + k;
      if (exact.count == LARGEST) least = *std::min_element(exact.rounded, exact.rounded + LARGEST);
    }
  };
  int64_t i = 0;
  for (; i + UNROLLED * LANES <= columns; i += UNROLLED * LANES) {
    f32 z[UNROLLED], top = broadcast(-INFINITY);
    for (int k = 0; k < UNROLLED; ++k) {
      z[k] = apply_rule<CAPPED>(load(logits + i + k * LANES), rule);
      top = z[k] > top ? z[k] : top;
    }
    if (max(top) > least)
      for (int k = 0; k < UNROLLED; ++k) insert(z[k], i + k * LANES, LANES);
  }
  for (; i < columns; i += LANES) insert(apply_rule<CAPPED>(load(logits + i, columns - i, 0.0f), rule), i, std::min<int64_t>(LANES, columns - i));
  return exact;
}

template <bool CAPPED, class T>
RecomputedLogits recompute_logits(const T* logits, int64_t columns, int64_t target, const Rule& rule, const Source& source, int64_t r) {
  if (!source.x) return {};
  RecomputedLogits exact = find_largest<CAPPED>(logits, columns, rule);
  if (exact.find(target) < 0) {
    exact.rounded[exact.count] = apply_rule<CAPPED>(broadcast(load_one(logits + target)), rule)[0];
    exact.columns[exact.count++] = target;
  }
  for (int k = 0; k < exact.count; ++k) exact.values[k] = recompute_logit<CAPPED, T>(rule, source, r, exact.columns[k]);
  return exact;
}

}  // namespace isotype
