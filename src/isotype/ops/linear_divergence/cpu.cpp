// Divergences of two rows of logits, which stay in a core's cache. Each row is widened once, and
// its largest logits are recomputed in fp32. Arithmetic is fp32 for logits of any dtype. Sums of
// blocks are added in double, so that the error does not grow with the vocabulary.
#include <type_traits>
#include <vector>

#include "logits.h"

using namespace isotype;

namespace {

// the logits of one head
struct Side {
  int64_t dtype;
  const void* logits;
  int64_t stride;
  Rule rule;
  Source source;
};

// calls f(whether there is a softcap, a value of the logits' dtype)
template <class F>
void with_side(const Side& side, F&& f) {
  with_dtype(side.dtype, [&](auto t) {
    if (side.rule.softcap != 0) f(std::true_type{}, t);
    else f(std::false_type{}, t);
  });
}

// widens a row of logits to fp32, after scale and softcap
void widen(const Side& side, int64_t r, int64_t columns, float* z) {
  with_side(side, [&](auto capped, auto v) {
    const auto* x = (const decltype(v)*)side.logits + r * side.stride;
    each_vector(columns, [&](int64_t i, auto left) { store(z + i, apply_rule<capped>(load(x + i, left, 0.0f), side.rule), left); });
  });
}

// replaces the logits of the classes `exact.columns` by recomputed ones
void replace_logits(const Side& side, int64_t r, const RecomputedLogits& exact, float* z) {
  if (!side.source.x) return;
  with_side(side, [&](auto capped, auto v) {
    for (int k = 0; k < exact.count; ++k) z[exact.columns[k]] = recompute_logit<capped, decltype(v)>(side.rule, side.source, r, exact.columns[k]);
  });
}

// sums the vectors f(first, count), whose lanes past `count` are 0
template <class F>
double sum_columns(int64_t columns, F&& f) {
  constexpr int64_t BLOCK = 8192;
  double total = 0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    const int64_t stop = start + BLOCK < columns ? start + BLOCK : columns;
    f32 sums = {};
    each_vector(stop - start, [&](int64_t i, auto left) { sums += f(start + i, left); });
    total += sum(sums);
  }
  return total;
}

// replaces z by log-probabilities and writes probabilities to e
void log_softmax(float* z, float* e, int64_t columns) {
  f32 highest = broadcast(-INFINITY);
  each_vector(columns, [&](int64_t i, auto left) {
    const f32 x = load(z + i, left, -INFINITY);
    highest = x > highest ? x : highest;
  });
  const float top = max(highest);
  const double total = sum_columns(columns, [&](int64_t i, auto left) {
    const f32 x = exp(load(z + i, left, -INFINITY) - top);
    store(e + i, x, left);
    return x;
  });
  const float lse = (float)std::log(total) + top, scale = (float)(1 / total);
  each_vector(columns, [&](int64_t i, auto left) {
    // at least -1e30, so that p ln p of a masked class is 0
    const f32 x = load(z + i, left, 0.0f) - lse;
    store(z + i, x > -1e30f ? x : broadcast(-1e30f), left);
    store(e + i, load(e + i, left, 0.0f) * scale, left);
  });
}

// returns the student's entropy, -sum of p s
double row_entropy(const float* s, const float* p, int64_t columns) {
  return -sum_columns(columns, [&](int64_t i, auto left) { return load(p + i, left, 0.0f) * load(s + i, left, 0.0f); });
}

// Computes the divergence of a row. s and t are log-probabilities, p and q probabilities. t is
// replaced by ln(p / m) with the mixture m (ln(p / q) for beta 1), which the gradient needs; for
// beta 0 it does not change. `student_sum` receives the sum of p ln(p / m).
double divergence(const float* s, float* t, const float* p, const float* q, int64_t columns, float beta, double& student_sum) {
  if (beta == 0)
    return sum_columns(columns, [&](int64_t i, auto left) {
      return load(q + i, left, 0.0f) * (load(t + i, left, 0.0f) - load(s + i, left, 0.0f));
    });
  student_sum = sum_columns(columns, [&](int64_t i, auto left) {
    const f32 ratio = load(s + i, left, 0.0f) - load(t + i, left, 0.0f);
    store(t + i, ratio, left);
    return load(p + i, left, 0.0f) * ratio;
  });
  if (beta == 1) return student_sum;
  // ln(p / m) = -ln(1 - beta + beta q / p) avoids the cancellation of two large logarithms. At a
  // ratio above e^80 one of p and q is 0
  const auto to_mixture = [&](f32 ratio) {
    const f32 up = -ratio, clamped = up > 80.0f ? broadcast(80.0f) : up < -80.0f ? broadcast(-80.0f) : up;
    return -log(1.0f + beta * (exp(clamped) - 1.0f));
  };
  const double teacher_sum = sum_columns(columns, [&](int64_t i, auto left) {
    const f32 ratio = load(t + i, left, 0.0f), to_m = to_mixture(ratio), up = -ratio;
    store(t + i, to_m, left);
    return load(q + i, left, 0.0f) * ((up > 80.0f ? broadcast(80.0f) : up) + to_m);
  });
  student_sum = sum_columns(columns, [&](int64_t i, auto left) { return load(p + i, left, 0.0f) * load(t + i, left, 0.0f); });
  return beta * teacher_sum + (1 - beta) * student_sum;
}

}  // namespace

// entropy, upstream and out may be null. out has the dtype of the student's logits and may be these
// logits themselves
extern "C" void divergences(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t stride, float scale, float softcap,
                            const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, int64_t size, const void* bias,
                            int64_t teacher_dtype, const void* teacher_logits, int64_t teacher_stride, float teacher_scale,
                            float teacher_softcap, const void* teacher_x, int64_t teacher_x_stride, const void* teacher_weight,
                            int64_t teacher_weight_stride, int64_t teacher_size, const void* teacher_bias, float beta, float* out_divergence,
                            float* entropy, const float* upstream, void* out, int64_t out_stride, int threads) {
  const Side student{dtype, logits, stride, {0, 0, scale, softcap, 0}, {x, x_stride, weight, weight_stride, size, bias}};
  const Side teacher{teacher_dtype, teacher_logits, teacher_stride, {0, 0, teacher_scale, teacher_softcap, 0},
                     {teacher_x, teacher_x_stride, teacher_weight, teacher_weight_stride, teacher_size, teacher_bias}};
#pragma omp parallel num_threads(thread_count(rows * columns, threads))
  {
    std::vector<float> buffer(4 * columns);
    float *s = buffer.data(), *t = s + columns, *p = t + columns, *q = p + columns;
#pragma omp for schedule(dynamic, items_per_turn(columns))
    for (int64_t r = 0; r < rows; ++r) {
      widen(student, r, columns, s), widen(teacher, r, columns, t);
      if (student.source.x || teacher.source.x) {
        const Rule no_rule{0, 0, 1, 0, 0};
        const RecomputedLogits of_each_side[] = {find_largest<false>(s, columns, no_rule), find_largest<false>(t, columns, no_rule)};
        for (const auto& exact : of_each_side) replace_logits(student, r, exact, s), replace_logits(teacher, r, exact, t);
      }
      log_softmax(s, p, columns), log_softmax(t, q, columns);
      if (entropy) entropy[r] = (float)row_entropy(s, p, columns);
      double student_sum = 0;
      out_divergence[r] = (float)divergence(s, t, p, q, columns, beta, student_sum);
      if (!upstream) continue;
      const float factor = upstream[r] * (beta == 0 || beta == 1 ? 1 : 1 - beta), kl = (float)student_sum;
      with_side(student, [&](auto capped, auto v) {
        using T = decltype(v);
        const T* from = (const T*)logits + r * stride;
        T* g = (T*)out + r * out_stride;
        each_vector(columns, [&](int64_t i, auto left) {
          const f32 probability = load(p + i, left, 0.0f);
          // the derivatives through the mixture cancel
          const f32 gradient = beta == 0 ? probability - load(q + i, left, 0.0f) : probability * (load(t + i, left, 0.0f) - kl);
          store(g + i, gradient * factor * slope<capped>(load(from + i, left, 0.0f), student.rule), left);
        });
      });
    }
  }
}
