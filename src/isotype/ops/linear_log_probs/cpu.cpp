// Per-token values of rows of logits, and their gradient: a row stays in a core's cache and is read for its maximum, then for its
// sums, then for the gradient. fp32 inside whatever the logits' dtype; block sums are added in double.
#include "lanes.h"
#include "logit_rule.h"

using namespace isotype;

namespace {

struct Rule {
  float scale, softcap;
};

struct Shape {
  int64_t rows, columns, row_stride;
};

// what is null was not asked for
struct RowValues {
  float *log_probs, *lse, *entropy, *log_sum_sq, *mean;
  int64_t* top1;
};

struct Upstream {
  const float *dlog_probs, *dlse, *dentropy, *entropy;
};

constexpr int64_t BLOCK = 8192;

// f(start, stop) for each block of columns
template <class F>
inline void by_block(int64_t columns, F&& f) {
  for (int64_t start = 0; start < columns; start += BLOCK) f(start, start + BLOCK < columns ? start + BLOCK : columns);
}

template <bool CAPPED, class T>
void values_of_row(const T* x, int64_t columns, int64_t target, const Rule& rule, int64_t r, const RowValues& values) {
  f32 highest = all(-INFINITY);
  double mean = 0;
  by_block(columns, [&](int64_t start, int64_t stop) {
    f32 total = {};
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) {
      const f32 z = rule_logits<CAPPED>(load(x + i), rule);
      highest = z > highest ? z : highest;
      total += z;
    }
    if (i < stop) {
      const f32 z = rule_logits<CAPPED>(load(x + i, stop - i, 0.0f), rule);
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
  by_block(columns, [&](int64_t start, int64_t stop) {
    f32 total = {}, products = {}, squares = {};
    const auto add = [&](f32 d, int64_t count) {
      f32 e = exp(d);
      for (int64_t k = count; k < LANES; ++k) e[k] = 0;
      total += e;
      // a masked class has e = 0 and d = -inf
      products += e * (d > -1e30f ? d : all(-1e30f));
      squares += e * e;
    };
    int64_t i = start;
    for (; i + LANES <= stop; i += LANES) add(rule_logits<CAPPED>(load(x + i), rule) - shift, LANES);
    if (i < stop) add(rule_logits<CAPPED>(load(x + i, stop - i, 0.0f), rule) - shift, stop - i);
    sum_of_exp += sum(total), weighted += sum(products), squared += sum(squares);
  });
  const double log_total = std::log(sum_of_exp);
  const float lse = (float)log_total + shift;
  values.lse[r] = lse;
  values.log_probs[r] = rule_logits<CAPPED>(all(load_one(x + target)), rule)[0] - lse;
  if (values.entropy) values.entropy[r] = (float)(log_total - weighted / sum_of_exp);
  if (values.log_sum_sq) values.log_sum_sq[r] = (float)(std::log(squared) - 2 * log_total);
  if (values.mean) values.mean[r] = (float)(mean / columns);
  if (!values.top1) return;
  values.top1[r] = 0;
  bool found = false;
  for (int64_t i = 0; i < columns && !found; i += LANES) {
    const int64_t left = columns - i < LANES ? columns - i : LANES;
    const f32 z = rule_logits<CAPPED>(left == LANES ? load(x + i) : load(x + i, left, 0.0f), rule);
    if (max(z) < top) continue;
    for (int64_t k = 0; k < left && !found; ++k)
      if (z[k] == top) values.top1[r] = i + k, found = true;
  }
}

template <bool CAPPED, class T>
void forward(const T* logits, Shape s, const int64_t* targets, Rule rule, RowValues values, int threads) {
#pragma omp parallel for schedule(dynamic, share(s.columns)) num_threads(team(s.rows * s.columns, threads))
  for (int64_t r = 0; r < s.rows; ++r) values_of_row<CAPPED>(logits + r * s.row_stride, s.columns, targets[r], rule, r, values);
}

template <bool CAPPED, class T>
void backward(const T* logits, Shape s, const int64_t* targets, const float* lse, Upstream up, Rule rule, T* out, int64_t out_stride,
              int64_t first, int threads) {
#pragma omp parallel for schedule(dynamic, share(s.columns)) num_threads(team(s.rows * s.columns, threads))
  for (int64_t r = 0; r < s.rows; ++r) {
    const T* x = logits + r * s.row_stride;
    T* g = out + r * out_stride;
    const float at = up.dlog_probs ? up.dlog_probs[r] : 0.0f;
    const float constant = (up.dlse ? up.dlse[r] : 0.0f) - at;
    const float dentropy = up.dentropy ? up.dentropy[r] : 0.0f, entropy = up.entropy ? up.entropy[r] : 0.0f;
    const auto gradient = [&](f32 v) {
      const f32 log_p = rule_logits<CAPPED>(v, rule) - lse[r];
      f32 factor = all(constant);
      if (dentropy != 0) factor -= dentropy * ((log_p > -1e30f ? log_p : all(-1e30f)) + entropy);
      return exp(log_p) * factor;
    };
    const int64_t target = targets[r] - first;
    const bool here = up.dlog_probs && target >= 0 && target < s.columns;
    float at_target = 0;
    if (here) {
      // in fp32, before its logit may be overwritten
      const f32 v = all(load_one(x + target));
      at_target = ((gradient(v) + at) * slope<CAPPED>(v, rule))[0];
    }
    each_vector(s.columns, [&](int64_t i, auto left) {
      const f32 v = load(x + i, left, 0.0f);
      store(g + i, gradient(v) * slope<CAPPED>(v, rule), left);
    });
    if (here) store(g + target, all(at_target), 1);
  }
}

}  // namespace

extern "C" void row_values(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t row_stride, const int64_t* targets,
                             float scale, float softcap, float* log_probs, float* lse, float* entropy, float* log_sum_sq, float* mean,
                             int64_t* top1, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    (softcap != 0 ? forward<true, T> : forward<false, T>)((const T*)logits, {rows, columns, row_stride}, targets, {scale, softcap},
                                                          {log_probs, lse, entropy, log_sum_sq, mean, top1}, threads);
  });
}

// the logits' columns are the classes from `first` on; out may be the logits themselves
extern "C" void row_value_gradients(int64_t dtype, const void* logits, int64_t rows, int64_t columns, int64_t row_stride,
                                  const int64_t* targets, const float* lse, const float* dlog_probs, const float* dlse,
                                  const float* dentropy, const float* entropy, float scale, float softcap, void* out, int64_t out_stride,
                                  int64_t first, int threads) {
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    (softcap != 0 ? backward<true, T> : backward<false, T>)((const T*)logits, {rows, columns, row_stride}, targets, lse,
                                                            {dlog_probs, dlse, dentropy, entropy}, {scale, softcap}, (T*)out, out_stride,
                                                            first, threads);
  });
}
