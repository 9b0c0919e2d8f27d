// Cross-entropy and per-token values of rows. A row stays in a core's cache and is read three
// times: for its maximum, for exp and its sums, and for the gradient. Arithmetic is fp32 for logits
// of any dtype. Sums of blocks are added in double, so that the error does not grow with the
// vocabulary.
#include <vector>

#include "logits.h"

using namespace isotype;

namespace {

struct Shape {
  int64_t rows, columns, row_stride;
};

struct Row {
  float top, lse, total, loss;
};

constexpr int64_t BLOCK = 8192;

// Computes the loss and logsumexp of a row. Writes exp(z - top) of every element to `exps`, unless
// `exps` is null.
template <bool CAPPED, class T>
Row row_loss(const T* logits, int64_t columns, int64_t target, const Rule& rule, const RecomputedLogits& exact, float* exps) {
  constexpr int UNROLLED = 4;
  f32 top[UNROLLED];
  for (auto& m : top) m = broadcast(-INFINITY);
  double mean = 0;
  for (int64_t start = 0; start < columns; start += BLOCK) {
    const int64_t stop = start + BLOCK < columns ? start + BLOCK : columns;
    f32 total = {};
    int64_t i = start;
    for (; i + UNROLLED * LANES <= stop; i += UNROLLED * LANES)
      for (int k = 0; k < UNROLLED; ++k) {
        const f32 z = apply_rule<CAPPED>(load(logits + i + k * LANES), rule);
        top[k] = z > top[k] ? z : top[k];
        if (rule.smoothing != 0) total += z;
      }
    for (; i < stop; i += LANES) {
      const f32 z = apply_rule<CAPPED>(load(logits + i, stop - i, 0.0f), rule);
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
      const f32 e = exp(apply_rule<CAPPED>(load(logits + i), rule) - shift);
      if (exps) store(exps + i, e);
      total += e;
    }
    if (i < stop) {
      f32 e = exp(apply_rule<CAPPED>(load(logits + i, stop - i, 0.0f), rule) - shift);
      for (int64_t k = stop - i; k < LANES; ++k) e[k] = 0;
      if (exps) store(exps + i, e, stop - i);
      total += e;
    }
    sum_of_exp += sum(total);
  }
  for (int k = 0; k < exact.count; ++k) {
    const float e = std::exp(exact.values[k] - shift);
    sum_of_exp += (double)e - std::exp(exact.rounded[k] - shift);
    if (exps) exps[exact.columns[k]] = e;
  }
  row.total = (float)sum_of_exp;
  row.lse = (float)std::log(sum_of_exp) + row.top;
  const int k = exact.find(target);
  const float picked = k < 0 ? apply_rule<CAPPED>(broadcast(load_one(logits + target)), rule)[0] : exact.values[k];
  row.loss = (1 - rule.smoothing) * (row.lse - picked) + rule.z_loss * row.lse * row.lse;
  if (rule.smoothing != 0) row.loss += rule.smoothing * (row.lse - (float)(mean / columns));
  return row;
}

template <class T>
void zero(T* out, int64_t columns) {
  std::memset(out, 0, columns * sizeof(T));
}

template <bool CAPPED, class T>
void losses(const T* logits, Shape s, const int64_t* targets, float* loss, float* lse, Rule rule, Source source, T* out, int64_t out_stride,
            float dloss, int threads) {
#pragma omp parallel num_threads(thread_count(s.rows * s.columns, threads))
  {
    std::vector<float> exps(out ? s.columns : 0);
#pragma omp for schedule(dynamic, items_per_turn(s.columns))
    for (int64_t r = 0; r < s.rows; ++r) {
      const T* x = logits + r * s.row_stride;
      T* g = out + r * out_stride;
      const int64_t target = targets[r];
      if (target == rule.ignore_index) {
        loss[r] = lse[r] = 0;
        if (out) zero(g, s.columns);
        continue;
      }
      const Row row = row_loss<CAPPED>(x, s.columns, target, rule, recompute_logits<CAPPED>(x, s.columns, target, rule, source, r), exps.data());
      loss[r] = row.loss, lse[r] = row.lse;
      if (!out) continue;
      const float factor = dloss * (1 + 2 * rule.z_loss * row.lse) / row.total, uniform = dloss * rule.smoothing / s.columns;
      // the target's gradient is computed from fp32, before its logit may be overwritten
      const float at_target =
          (exps[target] * factor - uniform - (1 - rule.smoothing) * dloss) * slope<CAPPED>(broadcast(load_one(x + target)), rule)[0];
      each_vector(s.columns, [&](int64_t i, auto left) {
        store(g + i, (load(exps.data() + i, left, 0.0f) * factor - uniform) * slope<CAPPED>(load(x + i, left, 0.0f), rule), left);
      });
      store(g + target, broadcast(at_target), 1);
    }
  }
}

template <bool CAPPED, class T>
void gradients(const T* logits, Shape s, const int64_t* targets, const float* lse, const float* dloss, Rule rule, T* out,
               int64_t out_stride, int64_t classes, int64_t first, int threads) {
#pragma omp parallel for schedule(dynamic, items_per_turn(s.columns)) num_threads(thread_count(s.rows * s.columns, threads))
  for (int64_t r = 0; r < s.rows; ++r) {
    const T* x = logits + r * s.row_stride;
    T* g = out + r * out_stride;
    if (targets[r] == rule.ignore_index) {
      zero(g, s.columns);
      continue;
    }
    const float factor = dloss[r] * (1 + 2 * rule.z_loss * lse[r]), uniform = dloss[r] * rule.smoothing / classes;
    const auto gradient = [&](f32 v) { return (exp(apply_rule<CAPPED>(v, rule) - lse[r]) * factor - uniform) * slope<CAPPED>(v, rule); };
    const int64_t target = targets[r] - first;
    const bool has_target = target >= 0 && target < s.columns;
    float at_target = 0;
    if (has_target) {
      const f32 v = broadcast(load_one(x + target));
      at_target = gradient(v)[0] - (1 - rule.smoothing) * dloss[r] * slope<CAPPED>(v, rule)[0];
    }
    each_vector(s.columns, [&](int64_t i, auto left) { store(g + i, gradient(load(x + i, left, 0.0f)), left); });
    if (has_target) store(g + target, broadcast(at_target), 1);
  }
}

// --- per-token values

// a pointer is null if its value is not requested
struct RowValues {
  float *log_probs, *lse, *entropy, *log_sum_sq, *mean;
  int64_t* top1;
  // [rows RECOMPUTED], which the backward reads
  int64_t* recomputed_columns;
  float* recomputed_logits;
};

struct Upstream {
  const float *dlog_probs, *dlse, *dentropy, *entropy;
};

// calls f(start, stop) for each block of columns
template <class F>
inline void each_column_block(int64_t columns, F&& f) {
  for (int64_t start = 0; start < columns; start += BLOCK) f(start, start + BLOCK < columns ? start + BLOCK : columns);
}

template <bool CAPPED, class T>
void values_of_row(const T* x, int64_t columns, int64_t target, const Rule& rule, const RecomputedLogits& exact, int64_t r, const RowValues& values) {
  f32 highest = broadcast(-INFINITY);
  double mean = 0;
  each_column_block(columns, [&](int64_t start, int64_t stop) {
    f32 total = {};
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) {
      const f32 z = apply_rule<CAPPED>(load(x + i), rule);
      highest = z > highest ? z : highest;
      total += z;
    }
    if (i < stop) {
      const f32 z = apply_rule<CAPPED>(load(x + i, stop - i, 0.0f), rule);
      for (int64_t k = 0; i + k < stop; ++k) {
        highest[k] = z[k] > highest[k] ? z[k] : highest[k];
        total[k] += z[k];
      }
    }
    mean += sum(total);
  });
  const float top = max(highest);
  // a row of -inf has no finite maximum: its logsumexp is -inf, not nan
  const float shift = top == -INFINITY ? 0.0f : top;
  double sum_of_exp = 0, weighted = 0, squared = 0;
  each_column_block(columns, [&](int64_t start, int64_t stop) {
    f32 total = {}, products = {}, squares = {};
    const auto add = [&](f32 d, int64_t count) {
      f32 e = exp(d);
      for (int64_t k = count; k < LANES; ++k) e[k] = 0;
      total += e;
      // a masked class has e = 0 and d = -inf
      products += e * (d > -1e30f ? d : broadcast(-1e30f));
      squares += e * e;
    };
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) add(apply_rule<CAPPED>(load(x + i), rule) - shift, LANES);
    if (i < stop) add(apply_rule<CAPPED>(load(x + i, stop - i, 0.0f), rule) - shift, stop - i);
    sum_of_exp += sum(total), weighted += sum(products), squared += sum(squares);
  });
  for (int k = 0; k < exact.count; ++k) {
    const double old_z = exact.rounded[k] - shift, new_z = exact.values[k] - shift;
    const double old_exp = std::exp(old_z), new_exp = std::exp(new_z);
    sum_of_exp += new_exp - old_exp;
    weighted += new_exp * new_z - (old_exp > 0 ? old_exp * old_z : 0);
    squared += new_exp * new_exp - old_exp * old_exp;
  }
  if (values.recomputed_columns)
    for (int k = 0; k < RECOMPUTED; ++k) {
      values.recomputed_columns[r * RECOMPUTED + k] = k < exact.count ? exact.columns[k] : -1;
      values.recomputed_logits[r * RECOMPUTED + k] = k < exact.count ? exact.values[k] : 0;
    }
  const double log_total = std::log(sum_of_exp);
  const float lse = (float)log_total + shift;
  values.lse[r] = lse;
  const int position = exact.find(target);
  values.log_probs[r] = (position < 0 ? apply_rule<CAPPED>(broadcast(load_one(x + target)), rule)[0] : exact.values[position]) - lse;
  if (values.entropy) values.entropy[r] = (float)(log_total - weighted / sum_of_exp);
  if (values.log_sum_sq) values.log_sum_sq[r] = (float)(std::log(squared) - 2 * log_total);
  if (values.mean) values.mean[r] = (float)(mean / columns);
  if (!values.top1) return;
  values.top1[r] = 0;
  if (exact.count) {
    int best = 0;
    for (int k = 1; k < exact.count; ++k)
      if (exact.values[k] > exact.values[best] || (exact.values[k] == exact.values[best] && exact.columns[k] < exact.columns[best])) best = k;
    values.top1[r] = exact.columns[best];
    return;
  }
  bool is_found = false;
  for (int64_t i = 0; i < columns && !is_found; i += LANES) {
    const int64_t left = columns - i < LANES ? columns - i : LANES;
    const f32 z = apply_rule<CAPPED>(left == LANES ? load(x + i) : load(x + i, left, 0.0f), rule);
    if (max(z) < top) continue;
    for (int64_t k = 0; k < left && !is_found; ++k)
      if (z[k] == top) values.top1[r] = i + k, is_found = true;
  }
}

template <bool CAPPED, class T>
void values(const T* logits, Shape s, const int64_t* targets, Rule rule, Source source, RowValues outputs, int threads) {
#pragma omp parallel for schedule(dynamic, items_per_turn(s.columns)) num_threads(thread_count(s.rows * s.columns, threads))
  for (int64_t r = 0; r < s.rows; ++r) {
    const T* x = logits + r * s.row_stride;
    values_of_row<CAPPED>(x, s.columns, targets[r], rule, recompute_logits<CAPPED>(x, s.columns, targets[r], rule, source, r), r, outputs);
  }
}

template <bool CAPPED, class T>
void value_gradients(const T* logits, Shape s, const int64_t* targets, const float* lse, Upstream up, const int64_t* recomputed_columns, const float* recomputed_logits,
                     Rule rule, T* out, int64_t out_stride, int64_t first, int threads) {
#pragma omp parallel for schedule(dynamic, items_per_turn(s.columns)) num_threads(thread_count(s.rows * s.columns, threads))
  for (int64_t r = 0; r < s.rows; ++r) {
    const T* x = logits + r * s.row_stride;
    T* g = out + r * out_stride;
    const float at = up.dlog_probs ? up.dlog_probs[r] : 0.0f;
    const float constant = (up.dlse ? up.dlse[r] : 0.0f) - at;
    const float dentropy = up.dentropy ? up.dentropy[r] : 0.0f, entropy = up.entropy ? up.entropy[r] : 0.0f;
    const auto gradient_of_z = [&](f32 z) {
      const f32 log_p = z - lse[r];
      f32 factor = broadcast(constant);
      if (dentropy != 0) factor -= dentropy * ((log_p > -1e30f ? log_p : broadcast(-1e30f)) + entropy);
      return exp(log_p) * factor;
    };
    const auto gradient = [&](f32 v) { return gradient_of_z(apply_rule<CAPPED>(v, rule)); };
    const int64_t target = targets[r] - first;
    const bool has_target = up.dlog_probs && target >= 0 && target < s.columns;
    float at_target = 0;
    if (has_target) {
      // computed in fp32, before the target's logit may be overwritten
      const f32 v = broadcast(load_one(x + target));
      at_target = ((gradient(v) + at) * slope<CAPPED>(v, rule))[0];
    }
    float gradients[RECOMPUTED];
    for (int k = 0; recomputed_columns && k < RECOMPUTED; ++k) {
      const int64_t column = recomputed_columns[r * RECOMPUTED + k] - first;
      if (column < 0 || column >= s.columns) continue;
      const f32 v = broadcast(load_one(x + column));
      gradients[k] = ((gradient_of_z(broadcast(recomputed_logits[r * RECOMPUTED + k])) + (has_target && column == target ? at : 0.0f)) * slope<CAPPED>(v, rule))[0];
    }
    each_vector(s.columns, [&](int64_t i, auto left) {
      const f32 v = load(x + i, left, 0.0f);
      store(g + i, gradient(v) * slope<CAPPED>(v, rule), left);
    });
    if (has_target) store(g + target, broadcast(at_target), 1);
    for (int k = 0; recomputed_columns && k < RECOMPUTED; ++k)
      if (const int64_t column = recomputed_columns[r * RECOMPUTED + k] - first; column >= 0 && column < s.columns) store(g + column, broadcast(gradients[k]), 1);
  }
}

}  // namespace

// out may be null if no gradient is needed, or may be the logits themselves
extern "C" void losses_and_gradients(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t row_stride,
                                     const int64_t* targets, float* loss, float* lse, int64_t ignore_index, float smoothing, float scale,
                                     float softcap, float z_loss, const void* x, int64_t x_stride, const void* weight,
                                     int64_t weight_stride, int64_t size, const void* bias, void* out, int64_t out_stride, float dloss,
                                     int threads) {
  const Rule rule{ignore_index, smoothing, scale, softcap, z_loss};
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    (softcap != 0 ? losses<true, T> : losses<false, T>)((const T*)logits, {rows, columns, row_stride}, targets, loss, lse, rule,
                                                        {x, x_stride, weight, weight_stride, size, bias}, (T*)out, out_stride, dloss, threads);
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

extern "C" void row_values(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t row_stride, const int64_t* targets,
                             float scale, float softcap, float* log_probs, float* lse, float* entropy, float* log_sum_sq, float* mean,
                           int64_t* top1, const void* x, int64_t x_stride, const void* weight, int64_t weight_stride, int64_t size,
                           const void* bias, int64_t* recomputed_columns, float* recomputed_logits, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    (softcap != 0 ? values<true, T> : values<false, T>)((const T*)logits, {rows, columns, row_stride}, targets, Rule{0, 0, scale, softcap, 0},
                                                        {x, x_stride, weight, weight_stride, size, bias},
                                                        {log_probs, lse, entropy, log_sum_sq, mean, top1, recomputed_columns, recomputed_logits}, threads);
  });
}

// the logits' columns are the classes from `first` on; out may be the logits themselves
extern "C" void row_value_gradients(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t row_stride,
                                  const int64_t* targets, const float* lse, const float* dlog_probs, const float* dlse,
                                    const float* dentropy, const float* entropy, const int64_t* recomputed_columns, const float* recomputed_logits, float scale,
                                    float softcap, void* out, int64_t out_stride, int64_t first, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    (softcap != 0 ? value_gradients<true, T> : value_gradients<false, T>)((const T*)logits, {rows, columns, row_stride}, targets, lse,
                                                            {dlog_probs, dlse, dentropy, entropy}, recomputed_columns, recomputed_logits,
                                                                      Rule{0, 0, scale, softcap, 0}, (T*)out, out_stride, first, threads);
  });
}
