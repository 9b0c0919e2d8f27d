// What becomes of a head's product before its softmax: scale and softcap, and the largest logits of a row made again in fp32.
#pragma once
#include <algorithm>

#include "lanes.h"

namespace isotype {

struct Rule {
  int64_t ignore_index;
  float smoothing, scale, softcap, z_loss;
};

// what a loss does to a logit before its softmax; CAPPED: there is a softcap
template <bool CAPPED>
inline f32 rule_logits(f32 x, const Rule& rule) {
  const f32 z = x * rule.scale;
  return CAPPED ? rule.softcap * tanh(z / rule.softcap) : z;
}

// d z / d x of the above
template <bool CAPPED>
inline f32 slope(f32 x, const Rule& rule) {
  if (!CAPPED) return all(rule.scale);
  const f32 t = tanh(x * (rule.scale / rule.softcap));
  return rule.scale * (1.0f - t * t);
}

// What bf16 logits were made of: x[rows size] W[classes size]^T + bias[classes] (or null), each row's elements adjacent. Null x: unknown.
struct Source {
  const void* x;
  int64_t x_stride;
  const void* weight;
  int64_t weight_stride, size;
  const void* bias;
};

// A bf16 product loses its fp32 sum where the logit is largest, and there the softmax weighs most: the target's and the LARGEST logits of
// a row are made again in fp32. Of 9 logits of 32,000 that is 0.03% of the product.
constexpr int LARGEST = 8, MADE_AGAIN = LARGEST + 1;

// after the rule: what a logit was, and what it is in fp32; at -1: fewer classes than MADE_AGAIN, or none was made again
struct Exact {
  int count = 0;
  int64_t at[MADE_AGAIN];
  float was[MADE_AGAIN], is[MADE_AGAIN];

  int of(int64_t column) const {
    for (int k = 0; k < count; ++k)
      if (at[k] == column) return k;
    return -1;
  }
};

// the logit of one class in fp32, after the rule
template <bool CAPPED, class T>
float logit_again(const Rule& rule, const Source& source, int64_t r, int64_t column) {
  const T *x = (const T*)source.x + r * source.x_stride, *w = (const T*)source.weight + column * source.weight_stride;
  f32 total = {};
  each_vector(source.size, [&](int64_t j, auto left) { total += load(x + j, left, 0.0f) * load(w + j, left, 0.0f); });
  return rule_logits<CAPPED>(all(sum(total) + (source.bias ? load_one((const T*)source.bias + column) : 0.0f)), rule)[0];
}

// the largest logits of a row as they are: `at` and `was`
template <bool CAPPED, class T>
Exact largest(const T* logits, int64_t columns, const Rule& rule) {
  constexpr int UNROLLED = 4;
  Exact exact;
  float least = -INFINITY;
  const auto offer = [&](f32 z, int64_t i, int64_t here) {
    for (int64_t k = 0; k < here; ++k) {
      if (!(z[k] > least)) continue;
      int into = exact.count;
      if (into < LARGEST) ++exact.count;
      else into = std::min_element(exact.was, exact.was + LARGEST) - exact.was;
      exact.was[into] = z[k], exact.at[into] = i + k;
      if (exact.count == LARGEST) least = *std::min_element(exact.was, exact.was + LARGEST);
    }
  };
  int64_t i = 0;
  for (; i + UNROLLED * LANES <= columns; i += UNROLLED * LANES) {
    f32 z[UNROLLED], top = all(-INFINITY);
    for (int k = 0; k < UNROLLED; ++k) {
      z[k] = rule_logits<CAPPED>(load(logits + i + k * LANES), rule);
      top = z[k] > top ? z[k] : top;
    }
    if (max(top) > least)
      for (int k = 0; k < UNROLLED; ++k) offer(z[k], i + k * LANES, LANES);
  }
  for (; i < columns; i += LANES) offer(rule_logits<CAPPED>(load(logits + i, columns - i, 0.0f), rule), i, std::min<int64_t>(LANES, columns - i));
  return exact;
}

template <bool CAPPED, class T>
Exact made_again(const T* logits, int64_t columns, int64_t target, const Rule& rule, const Source& source, int64_t r) {
  if (!source.x) return {};
  Exact exact = largest<CAPPED>(logits, columns, rule);
  if (exact.of(target) < 0) {
    exact.was[exact.count] = rule_logits<CAPPED>(all(load_one(logits + target)), rule)[0];
    exact.at[exact.count++] = target;
  }
  for (int k = 0; k < exact.count; ++k) exact.is[k] = logit_again<CAPPED, T>(rule, source, r, exact.at[k]);
  return exact;
}

}  // namespace isotype
