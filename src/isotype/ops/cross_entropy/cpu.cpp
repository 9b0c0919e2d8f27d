// Cross-entropy of rows that stay in a core's cache: a row is read once for its maximum, once for exp and its sum, once for the gradient.
// fp32 inside whatever the logits' dtype; block sums are added in double, so that the error does not grow with the vocabulary.
#include <vector>

#include "lanes.h"
#include "logit_rule.h"

using namespace isotype;

namespace {

struct Rule {
  int64_t ignore_index;
  float smoothing, scale, softcap, z_loss;
};

struct Shape {
  int64_t rows, columns, row_stride;
};

struct Row {
  float top, lse, total, loss;
};

constexpr int64_t BLOCK = 8192;

// The row's loss and logsumexp; exp(z - top) of every element into `kept` where it is wanted.
template <bool CAPPED, class T>
Row row_loss(const T* logits, int64_t columns, int64_t target, const Rule& rule, float* kept) {
  constexpr int UNROLLED = 4;
  f32 top[UNROLLED];
  for (auto& m : top) m = all(-INFINITY);
  double mean = 0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    const int64_t stop = start + BLOCK < columns ? start + BLOCK : columns;
    f32 total = {};
    int64_t i = start;
    for (; i + UNROLLED * LANES <= stop; i += UNROLLED * LANES)
      for (int k = 0; k < UNROLLED; ++k) {
        const f32 z = rule_logits<CAPPED>(load(logits + i + k * LANES), rule);
        top[k] = z > top[k] ? z : top[k];
        if (rule.smoothing != 0) total += z;
      }
    for (; i < stop; i += LANES) {
      const f32 z = rule_logits<CAPPED>(load(logits + i, stop - i, 0.0f), rule);
      for (int64_t k = 0; k < LANES && i + k < stop; ++k) top[0][k] = z[k] > top[0][k] ? z[k] : top[0][k];
      if (rule.smoothing != 0) total += z;
    }
    mean += sum(total);
  }
  Row row;
  row.top = max(top[0]);
  for (int k = 1; k < UNROLLED; ++k) row.top = max(top[k]) > row.top ? max(top[k]) : row.top;
  // a row of -inf has no finite maximum: its logsumexp is -inf, not nan
  const float shift = row.top == -INFINITY ? 0.0f : row.top;
  double sum_of_exp = 0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    const int64_t stop = start + BLOCK < columns ? start + BLOCK : columns;
    f32 total = {};
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) {
      const f32 e = exp(rule_logits<CAPPED>(load(logits + i), rule) - shift);
      if (kept) store(kept + i, e);
      total += e;
    }
    if (i < stop) {
      f32 e = exp(rule_logits<CAPPED>(load(logits + i, stop - i, 0.0f), rule) - shift);
      for (int64_t k = stop - i; k < LANES; ++k) e[k] = 0;
      if (kept) store(kept + i, e, stop - i);
      total += e;
    }
    sum_of_exp += sum(total);
  }
  row.total = (float)sum_of_exp;
  row.lse = (float)std::log(sum_of_exp) + row.top;
  const float picked = rule_logits<CAPPED>(all(load_one(logits + target)), rule)[0];
  row.loss = (1 - rule.smoothing) * (row.lse - picked) + rule.z_loss * row.lse * row.lse;
  if (rule.smoothing != 0) row.loss += rule.smoothing * (row.lse - (float)(mean / columns));
  return row;
}

template <class T>
void zero(T* out, int64_t columns) {
  std::memset(out, 0, columns * sizeof(T));
}

template <bool CAPPED, class T>
void losses(const T* logits, Shape s, const int64_t* targets, float* loss, float* lse, Rule rule, T* out, int64_t out_stride, float dloss,
            int threads) {
#pragma omp parallel num_threads(team(s.rows * s.columns, threads))
  {
    std::vector<float> kept(out ? s.columns : 0);
#pragma omp for schedule(dynamic, share(s.columns))
    for (int64_t r = 0; r < s.rows; ++r) {
      const T* x = logits + r * s.row_stride;
      T* g = out + r * out_stride;
      const int64_t target = targets[r];
      if (target == rule.ignore_index) {
        loss[r] = lse[r] = 0;
        if (out) zero(g, s.columns);
        continue;
      }
      const Row row = row_loss<CAPPED>(x, s.columns, target, rule, kept.data());
      loss[r] = row.loss, lse[r] = row.lse;
      if (!out) continue;
      const float factor = dloss * (1 + 2 * rule.z_loss * row.lse) / row.total, uniform = dloss * rule.smoothing / s.columns;
      // the target's own element from fp32, before its logit may be overwritten
      const float at_target =
          (kept[target] * factor - uniform - (1 - rule.smoothing) * dloss) * slope<CAPPED>(all(load_one(x + target)), rule)[0];
      each_vector(s.columns, [&](int64_t i, auto left) {
        store(g + i, (load(kept.data() + i, left, 0.0f) * factor - uniform) * slope<CAPPED>(load(x + i, left, 0.0f), rule), left);
      });
      store(g + target, all(at_target), 1);
    }
  }
}

template <bool CAPPED, class T>
void gradients(const T* logits, Shape s, const int64_t* targets, const float* lse, const float* dloss, Rule rule, T* out,
               int64_t out_stride, int64_t classes, int64_t first, int threads) {
#pragma omp parallel for schedule(dynamic, share(s.columns)) num_threads(team(s.rows * s.columns, threads))
  for (int64_t r = 0; r < s.rows; ++r) {
    const T* x = logits + r * s.row_stride;
    T* g = out + r * out_stride;
    if (targets[r] == rule.ignore_index) {
      zero(g, s.columns);
      continue;
    }
    const float factor = dloss[r] * (1 + 2 * rule.z_loss * lse[r]), uniform = dloss[r] * rule.smoothing / classes;
    const auto gradient = [&](f32 v) { return (exp(rule_logits<CAPPED>(v, rule) - lse[r]) * factor - uniform) * slope<CAPPED>(v, rule); };
    const int64_t target = targets[r] - first;
    const bool here = target >= 0 && target < s.columns;
    float at_target = 0;
    if (here) {
      const f32 v = all(load_one(x + target));
      at_target = gradient(v)[0] - (1 - rule.smoothing) * dloss[r] * slope<CAPPED>(v, rule)[0];
    }
    each_vector(s.columns, [&](int64_t i, auto left) { store(g + i, gradient(load(x + i, left, 0.0f)), left); });
    if (here) store(g + target, all(at_target), 1);
  }
}

}  // namespace

// out may be null (no gradient), or the logits themselves
extern "C" void losses_and_gradients(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t row_stride,
                                     const int64_t* targets, float* loss, float* lse, int64_t ignore_index, float smoothing, float scale,
                                     float softcap, float z_loss, void* out, int64_t out_stride, float dloss, int threads) {
  const Rule rule{ignore_index, smoothing, scale, softcap, z_loss};
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    (softcap != 0 ? losses<true, T> : losses<false, T>)((const T*)logits, {rows, columns, row_stride}, targets, loss, lse, rule, (T*)out,
                                                        out_stride, dloss, threads);
  });
}

// the logits' columns are the classes from `first` on
extern "C" void gradients_from_lse(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t row_stride,
                                   const int64_t* targets, const float* lse, const float* dloss, int64_t ignore_index, float smoothing,
                                   float scale, float softcap, float z_loss, void* out, int64_t out_stride, int64_t classes, int64_t first,
                                   int threads) {
  const Rule rule{ignore_index, smoothing, scale, softcap, z_loss};
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    (softcap != 0 ? gradients<true, T> : gradients<false, T>)((const T*)logits, {rows, columns, row_stride}, targets, lse, dloss, rule,
                                                              (T*)out, out_stride, classes, first, threads);
  });
}
