// Scaled dot-product attention in bf16 and its backward, by the recurrences of FlashAttention-2
// (Dao, 2023), without a [queries x keys] matrix.
//
// Scores are computed transposed, [keys x queries], so that the lanes of a vector are queries. The
// maximum and the sum of a softmax then need no operation across lanes, and the probabilities have
// the layout that the next product reads. Products take pairs of bf16 along the summed dimension
// and add in fp32. This is one instruction for 32 values with AVX512-BF16, and two multiply-adds
// per vector elsewhere.
#pragma GCC optimize("O3")
#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

using namespace isotype;

namespace {

// queries and keys per block; its scores (16 KB) and their operands stay in the L1 cache
constexpr int64_t QUERIES = 64, KEYS = 64;
// rows and vectors of a product that are held in registers
#if defined(__AVX512F__)
constexpr int ROWS = 6, COLUMNS = 4;
#else
constexpr int ROWS = 4, COLUMNS = 2;
#endif

// --- products

using Pairs = uint32_t;  // two bf16, the first in the low half

inline u32 load_pairs(const Pairs* p) {
  u32 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline void store_pairs(Pairs* p, f32 first, f32 second) {
  const u32 low = __builtin_convertvector(Narrow<bf16>::narrow(first), u32), high = __builtin_convertvector(Narrow<bf16>::narrow(second), u32);
  const u32 both = low | (high << 16);
  std::memcpy(p, &both, sizeof both);
}

inline u32 same_pair(const bf16* p) {
  Pairs pair;
  std::memcpy(&pair, p, sizeof pair);
  return u32{} + pair;
}

// returns in each lane sum + a.first b.first + a.second b.second
inline f32 dot(f32 sum, u32 a, u32 b) {
#ifdef __AVX512BF16__
  return (f32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum += float_of(a << 16) * float_of(b << 16);
  return sum + float_of(a & 0xffff0000) * float_of(b & 0xffff0000);
#endif
}

// c[R, V vectors] = a[R, pairs] b[pairs, V vectors], or += with ADD
template <int R, int V, bool ADD>
inline void tile(const bf16* a, int64_t a_stride, const Pairs* b, int64_t b_stride, float* c, int64_t c_stride, int64_t pairs) {
  f32 sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sum[r][v] = ADD ? load(c + r * c_stride + v * LANES) : f32{};
  for (int64_t p = 0; p < pairs; ++p) {
    u32 right[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) right[v] = load_pairs(b + p * b_stride + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const u32 left = same_pair(a + r * a_stride + 2 * p);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], left, right[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * LANES, sum[r][v]);
}

template <int R, bool ADD>
inline void strip(const bf16* a, int64_t a_stride, const Pairs* b, float* c, int64_t columns, int64_t pairs) {
  int64_t v = 0;
  for (; v + COLUMNS * LANES <= columns; v += COLUMNS * LANES) tile<R, COLUMNS, ADD>(a, a_stride, b + v, columns, c + v, columns, pairs);
  for (; v < columns; v += LANES) tile<R, 1, ADD>(a, a_stride, b + v, columns, c + v, columns, pairs);
}

// c[rows, columns] = a[rows, 2 pairs] b[pairs, columns], or += with ADD. Rows of b and of c are
// adjacent
template <bool ADD>
void product(const bf16* a, int64_t a_stride, const Pairs* b, float* c, int64_t rows, int64_t columns, int64_t pairs) {
  for (; rows >= ROWS; rows -= ROWS, a += ROWS * a_stride, c += ROWS * columns) strip<ROWS, ADD>(a, a_stride, b, c, columns, pairs);
  switch (rows) {
    case 5: return strip<5, ADD>(a, a_stride, b, c, columns, pairs);
    case 4: return strip<4, ADD>(a, a_stride, b, c, columns, pairs);
    case 3: return strip<3, ADD>(a, a_stride, b, c, columns, pairs);
    case 2: return strip<2, ADD>(a, a_stride, b, c, columns, pairs);
    case 1: return strip<1, ADD>(a, a_stride, b, c, columns, pairs);
  }
}

// --- the layouts of operands; values past `rows` are zero

struct Rows {
  const bf16* first;
  int64_t stride;
  const bf16* operator[](int64_t i) const { return first + i * stride; }
  Rows from(int64_t i) const { return {(*this)[i], stride}; }
};

// copies x[rows, depth] to [depth / 2, QUERIES]: lanes are rows, and pairs lie along depth
void rows_as_lanes(Rows x, int64_t rows, int64_t depth, Pairs* out) {
  for (int64_t m = 0; m < QUERIES; ++m)
    for (int64_t p = 0; p < depth / 2; ++p) {
      Pairs pair = 0;
      if (m < rows) std::memcpy(&pair, x[m] + 2 * p, sizeof pair);
      out[p * QUERIES + m] = pair;
    }
}

// copies x[rows, depth] to [QUERIES / 2, depth]: lanes lie along depth, and pairs are rows
void rows_as_pairs(Rows x, int64_t rows, int64_t depth, Pairs* out) {
  for (int64_t p = 0; p < QUERIES / 2; ++p)
    for (int64_t d = 0; d < depth; ++d) {
      const Pairs low = 2 * p < rows ? x[2 * p][d].bits : 0, high = 2 * p + 1 < rows ? x[2 * p + 1][d].bits : 0;
      out[p * depth + d] = low | high << 16;
    }
}

// copies x[rows, depth] to [depth, padded], in strips that reuse the cache lines of a few rows
void transpose(Rows x, int64_t rows, int64_t depth, bf16* out, int64_t padded) {
  constexpr int64_t STRIP = 32;
  for (int64_t start = 0; start < padded; start += STRIP)
    for (int64_t d = 0; d < depth; ++d)
      for (int64_t n = start; n < start + STRIP; ++n) out[d * padded + n].bits = n < rows ? x[n][d].bits : 0;
}

// copies x[depth, QUERIES] to rows of `out`, each multiplied by its factor
void store_rows(const float* x, const float* factor, int64_t rows, int64_t depth, bf16* out, int64_t stride) {
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t d = 0; d < depth; d += LANES) {
      f32 row;
      for (int i = 0; i < LANES; ++i) row[i] = x[(d + i) * QUERIES + m];
      store(out + m * stride + d, row * factor[m]);
    }
}

// --- which keys a query attends to

enum Cover { NONE, SOME, EVERY };

struct Mask {
  const uint8_t* allowed;  // [keys, padded queries], or null
  // [padded queries] the first key that each query attends to, or null. It never decreases from a
  // query to the next one
  const int32_t* first_keys;
  int64_t stride, queries, keys;
  bool causal;

  // how much of the block that starts at key n0 and query m0 is attended to
  Cover cover(int64_t n0, int64_t m0) const {
    const int64_t key_count = std::min(KEYS, keys - n0), query_count = std::min(QUERIES, queries - m0);
    if (causal && n0 > m0 + query_count - 1) return NONE;
    if (first_keys && n0 + key_count <= first_keys[m0]) return NONE;
    const bool all_past = (!causal || n0 + key_count - 1 <= m0) && (!first_keys || n0 >= first_keys[m0 + query_count - 1]);
    if (!allowed) return all_past ? EVERY : SOME;
    uint8_t any = 0, every = 1;
    for (int64_t n = n0; n < n0 + key_count; ++n)
      for (int64_t m = m0; m < m0 + query_count; ++m) any |= allowed[n * stride + m], every &= allowed[n * stride + m];
    return !any ? NONE : every && all_past ? EVERY : SOME;
  }

  // replaces the scores of key n by -inf for the queries from m on that do not attend to it
  f32 apply(f32 score, int64_t n, int64_t m) const {
    if (causal) {
      i32 query;
      for (int i = 0; i < LANES; ++i) query[i] = (int32_t)m + i;
      score = query >= (int32_t)n ? score : broadcast(-INFINITY);
    }
    if (first_keys) {
      i32 first;
      std::memcpy(&first, first_keys + m, sizeof first);
      score = first <= (int32_t)n ? score : broadcast(-INFINITY);
    }
    if (allowed) {
      uint8_t __attribute__((vector_size(LANES))) bytes;
      std::memcpy(&bytes, allowed + n * stride + m, sizeof bytes);
      score = __builtin_convertvector(bytes, i32) != 0 ? score : broadcast(-INFINITY);
    }
    return score;
  }
};

// --- the arguments, in the order of op.py's _pack_shape

struct Stride {
  int64_t batch, head, position;
};

struct Shape {
  int64_t batch, heads, key_heads, queries, keys, depth, causal, mask_batch, mask_key;
  Stride q, k, v, out, dy;

  int64_t shared() const { return heads / key_heads; }
  int64_t query_blocks() const { return (queries + QUERIES - 1) / QUERIES; }
  int64_t padded_keys() const { return (keys + KEYS - 1) / KEYS * KEYS; }
  Mask mask(const void* allowed, const void* first_keys, int64_t b) const {
    return {allowed ? (const uint8_t*)allowed + b * mask_batch : nullptr, first_keys ? (const int32_t*)first_keys + b * query_blocks() * QUERIES : nullptr,
            mask_key, queries, keys, causal != 0};
  }
};

Rows rows_of(const void* x, Stride stride, int64_t b, int64_t h) {
  return {(const bf16*)x + b * stride.batch + h * stride.head, stride.position};
}

// the state of the running softmax of a block of queries
struct Softmax {
  float top[QUERIES], total[QUERIES];
};

// Replaces scores [keys, QUERIES] by exp(scale score - highest), as pairs of keys, where highest is
// the highest scaled score of all blocks so far. Scales `sum` to the new highest score.
void softmax(float* score, int64_t keys, float scale, Softmax& state, Pairs* share, float* sum, int64_t depth) {
  for (int64_t m = 0; m < QUERIES; m += LANES) {
    const f32 previous_top = load(state.top + m);
    f32 top = previous_top;
    for (int64_t n = 0; n < keys; ++n) {
      const f32 x = load(score + n * QUERIES + m);
      top = x > top ? x : top;
    }
    // for a query without keys so far, top is -inf and base 0: exp(-inf - 0) is 0
    const f32 base = top == broadcast(-INFINITY) ? f32{} : top * scale, shrink = exp(previous_top * scale - base);
    f32 added = {};
    for (int64_t n = 0; n < KEYS; n += 2) {
      const f32 first = n < keys ? exp(load(score + n * QUERIES + m) * scale - base) : f32{};
      const f32 second = n + 1 < keys ? exp(load(score + (n + 1) * QUERIES + m) * scale - base) : f32{};
      added += first + second;
      store_pairs(share + n / 2 * QUERIES + m, first, second);
    }
    store(state.total + m, load(state.total + m) * shrink + added);
    store(state.top + m, top);
    for (int64_t d = 0; d < depth; ++d) store(sum + d * QUERIES + m, load(sum + d * QUERIES + m) * shrink);
  }
}

}  // namespace

// Writes out in bf16 and the logsumexp of each query's scores, which is inf for a query that
// attends to no key. `transposed` is scratch memory for the transposed values.
extern "C" void forward(const void* shape, const void* q, const void* k, const void* v, const void* allowed, const void* first_keys, void* out,
                        void* lse, void* transposed, float scale, int threads) {
  const Shape s = *(const Shape*)shape;
  const int64_t depth = s.depth, padded = s.padded_keys(), heads = s.batch * s.heads;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < s.batch * s.key_heads; ++i)
      transpose(rows_of(v, s.v, i / s.key_heads, i % s.key_heads), s.keys, depth, (bf16*)transposed + i * depth * padded, padded);
    std::vector<Pairs> query(depth / 2 * QUERIES), share(KEYS / 2 * QUERIES);
    std::vector<float> score(KEYS * QUERIES), sum(depth * QUERIES);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < heads * s.query_blocks(); ++item) {
      // the last queries come first, since they take longest with a causal mask
      const int64_t m0 = (s.query_blocks() - 1 - item / heads) * QUERIES, b = item % heads / s.heads, h = item % s.heads;
      const int64_t rows = std::min(QUERIES, s.queries - m0), key_head = h / s.shared();
      const Rows keys = rows_of(k, s.k, b, key_head);
      const bf16* values = (const bf16*)transposed + (b * s.key_heads + key_head) * depth * padded;
      const Mask mask = s.mask(allowed, first_keys, b);
      rows_as_lanes(rows_of(q, s.q, b, h).from(m0), rows, depth, query.data());
      std::fill(sum.begin(), sum.end(), 0.0f);
      Softmax state;
      std::fill_n(state.top, QUERIES, -INFINITY);
      std::fill_n(state.total, QUERIES, 0.0f);
      for (int64_t n0 = 0; n0 < s.keys; n0 += KEYS) {
        const Cover cover = mask.cover(n0, m0);
        if (cover == NONE) continue;
        const int64_t count = std::min(KEYS, s.keys - n0);
        product<false>(keys[n0], keys.stride, query.data(), score.data(), count, QUERIES, depth / 2);
        if (cover == SOME)
          for (int64_t i = 0; i < count * QUERIES; i += LANES)
            store(score.data() + i, mask.apply(load(score.data() + i), n0 + i / QUERIES, m0 + i % QUERIES));
        softmax(score.data(), count, scale, state, share.data(), sum.data(), depth);
        product<true>(values + n0, padded, share.data(), sum.data(), depth, QUERIES, KEYS / 2);
      }
      float inverse[QUERIES];
      for (int64_t m = 0; m < QUERIES; ++m) inverse[m] = state.total[m] == 0.0f ? 0.0f : 1.0f / state.total[m];
      store_rows(sum.data(), inverse, rows, depth, (bf16*)rows_of(out, s.out, b, h)[m0], s.out.position);
      float* logs = (float*)lse + (b * s.heads + h) * s.queries + m0;
      for (int64_t m = 0; m < rows; ++m) logs[m] = state.total[m] == 0.0f ? INFINITY : state.top[m] * scale + std::log(state.total[m]);
    }
  }
}

// Writes dq [batch, heads, queries, depth] in bf16, and dk and dv [batch, key_heads, parts, keys,
// depth], in fp32 if parts > 1, else in bf16. The query heads that read a key head are divided
// among the parts; each part holds the gradients of its query heads.
extern "C" void backward(const void* shape, const void* q, const void* k, const void* v, const void* allowed, const void* first_keys,
                         const void* out, const void* lse, const void* dy, void* dq, void* dk, void* dv, int64_t parts, float scale, int threads) {
  const Shape s = *(const Shape*)shape;
  const int64_t depth = s.depth, padded = s.padded_keys(), blocks = s.query_blocks(), heads = s.shared() / parts;
  // with one head the gradients of a key block are complete after the block; with several heads
  // they are kept until the last head
  const int64_t kept_rows = heads > 1 ? padded : KEYS;
  const int64_t lanes_block = depth / 2 * QUERIES, pairs_block = QUERIES / 2 * depth;
  const std::vector<float> ones(QUERIES, 1.0f);
#pragma omp parallel num_threads(threads)
  {
    std::vector<Pairs> q_lanes(blocks * lanes_block), dy_lanes(blocks * lanes_block), q_pairs(blocks * pairs_block), dy_pairs(blocks * pairs_block);
    std::vector<Pairs> slope_pairs(KEYS / 2 * QUERIES);
    std::vector<bf16> transposed(depth * padded), share(KEYS * QUERIES), slope(KEYS * QUERIES);
    std::vector<float> score(KEYS * QUERIES), dshare(KEYS * QUERIES), dq_sum(blocks * depth * QUERIES), dk_sum(kept_rows * depth), dv_sum(kept_rows * depth);
    std::vector<float> delta(blocks * QUERIES), logs(blocks * QUERIES);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < s.batch * s.key_heads * parts; ++item) {
      const int64_t b = item / (s.key_heads * parts), key_head = item / parts % s.key_heads;
      const Rows keys = rows_of(k, s.k, b, key_head), values = rows_of(v, s.v, b, key_head);
      const Mask mask = s.mask(allowed, first_keys, b);
      transpose(keys, s.keys, depth, transposed.data(), padded);
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t h = key_head * s.shared() + item % parts * heads + head;
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t m0 = i * QUERIES, rows = std::min(QUERIES, s.queries - m0);
          const Rows query = rows_of(q, s.q, b, h).from(m0), slopes = rows_of(dy, s.dy, b, h).from(m0), result = rows_of(out, s.out, b, h).from(m0);
          rows_as_lanes(query, rows, depth, q_lanes.data() + i * lanes_block);
          rows_as_lanes(slopes, rows, depth, dy_lanes.data() + i * lanes_block);
          rows_as_pairs(query, rows, depth, q_pairs.data() + i * pairs_block);
          rows_as_pairs(slopes, rows, depth, dy_pairs.data() + i * pairs_block);
          for (int64_t m = 0; m < QUERIES; ++m) {
            f32 along = {};
            if (m < rows)
              for (int64_t d = 0; d < depth; d += LANES) along += load(result[m] + d) * load(slopes[m] + d);
            delta[m0 + m] = sum(along);
            logs[m0 + m] = m < rows ? ((const float*)lse)[(b * s.heads + h) * s.queries + m0 + m] : INFINITY;
          }
        }
        std::fill(dq_sum.begin(), dq_sum.end(), 0.0f);
        for (int64_t n0 = 0; n0 < s.keys; n0 += KEYS) {
          const int64_t count = std::min(KEYS, s.keys - n0);
          float* dk_block = dk_sum.data() + (kept_rows > KEYS ? n0 * depth : 0);
          float* dv_block = dv_sum.data() + (kept_rows > KEYS ? n0 * depth : 0);
          if (head == 0) std::fill_n(dk_block, KEYS * depth, 0.0f), std::fill_n(dv_block, KEYS * depth, 0.0f);
          for (int64_t i = 0; i < blocks; ++i) {
            const int64_t m0 = i * QUERIES;
            const Cover cover = mask.cover(n0, m0);
            if (cover == NONE) continue;
            product<false>(keys[n0], keys.stride, q_lanes.data() + i * lanes_block, score.data(), count, QUERIES, depth / 2);
            product<false>(values[n0], values.stride, dy_lanes.data() + i * lanes_block, dshare.data(), count, QUERIES, depth / 2);
            for (int64_t m = 0; m < QUERIES; m += LANES) {
              const f32 log = load(logs.data() + m0 + m), shift = load(delta.data() + m0 + m);
              for (int64_t n = 0; n < KEYS; n += 2) {
                f32 slopes[2] = {};
                for (int64_t j = 0; j < 2 && n + j < count; ++j) {
                  const int64_t at = (n + j) * QUERIES + m;
                  f32 x = load(score.data() + at);
                  if (cover == SOME) x = mask.apply(x, n0 + n + j, m0 + m);
                  x = exp(x * scale - log);
                  slopes[j] = x * (load(dshare.data() + at) - shift) * scale;
                  store(share.data() + at, x);
                  store(slope.data() + at, slopes[j]);
                }
                store_pairs(slope_pairs.data() + n / 2 * QUERIES + m, slopes[0], slopes[1]);
              }
            }
            product<true>(share.data(), QUERIES, dy_pairs.data() + i * pairs_block, dv_block, count, depth, QUERIES / 2);
            product<true>(slope.data(), QUERIES, q_pairs.data() + i * pairs_block, dk_block, count, depth, QUERIES / 2);
            product<true>(transposed.data() + n0, padded, slope_pairs.data(), dq_sum.data() + i * depth * QUERIES, depth, QUERIES, KEYS / 2);
          }
          if (head < heads - 1) continue;
          const int64_t at = (item * s.keys + n0) * depth;
          for (int64_t i = 0; i < count * depth; i += LANES) {
            const f32 key = load(dk_block + i), value = load(dv_block + i);
            if (parts > 1) {
              store((float*)dk + at + i, key), store((float*)dv + at + i, value);
            } else {
              store((bf16*)dk + at + i, key), store((bf16*)dv + at + i, value);
            }
          }
        }
        for (int64_t i = 0; i < blocks; ++i) {
          const int64_t m0 = i * QUERIES;
          bf16* rows = (bf16*)dq + ((b * s.heads + h) * s.queries + m0) * depth;
          store_rows(dq_sum.data() + i * depth * QUERIES, ones.data(), std::min(QUERIES, s.queries - m0), depth, rows, depth);
        }
      }
    }
  }
}
