// Widens a packed weight row by row. A value is (number - zero point) * scale, with numbers of 8 or
// 4 bits, and a scale and zero point per block. Each byte is read once; each value is computed in
// fp32 and written once.
#include "lanes.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using namespace isotype;

namespace {

enum Kind : int64_t { E4M3, E5M2, INT8, FP4, INT4 };

using u8 = uint8_t __attribute__((vector_size(LANES)));

// Converts a small float with `MANTISSA` bits of mantissa to fp32. A subnormal number is an integer
// times `unit`. A normal number has the bits of an fp32 after `bias` is added to the exponent. No
// step produces a subnormal fp32, which would take a hundred times as long.
template <int MANTISSA>
inline f32 small_float(u32 magnitude, u32 sign, uint32_t bias, float unit) {
  const f32 below = __builtin_convertvector((i32)magnitude, f32) * unit;
  const u32 normal = (magnitude << (23 - MANTISSA)) + (bias << 23);
  return float_of(((magnitude >> MANTISSA) != 0 ? normal : bits_of(below)) | (sign << 31));
}

template <Kind K>
inline f32 decode(u32 q) {
  if constexpr (K == E4M3) return small_float<3>(q & 0x7f, q >> 7, 120, 0x1p-9f);
  if constexpr (K == E5M2) return small_float<2>(q & 0x7f, q >> 7, 112, 0x1p-16f);
  if constexpr (K == FP4) return small_float<1>(q & 7, q >> 3, 126, 0.5f);
  if constexpr (K == INT8) return __builtin_convertvector((i32)(q << 24) >> 24, f32);
  return __builtin_convertvector((i32)q - 8, f32);
}

inline u32 load_bytes(const uint8_t* from, Full) {
#if defined(__AVX512F__)
  // GCC compiles the conversion below to a dozen instructions
  return (u32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
  u8 bytes;
  std::memcpy(&bytes, from, LANES);
  return __builtin_convertvector(bytes, u32);
#endif
}

inline u32 load_bytes(const uint8_t* from, int64_t left) {
  u8 bytes{};
  std::memcpy(&bytes, from, left);
  return __builtin_convertvector(bytes, u32);
}

// Converts `count` numbers of 4 bits to fp32, the low half of a byte first. `count` is even, and
// `to` must have room for 2 * LANES more numbers.
template <Kind K>
inline void decode_halves(const uint8_t* from, float* to, int64_t count, const Lanes& lanes, u32 shift) {
  each_vector(count / 2, [&](int64_t i, auto left) {
    const f32 q = float_of(load_bytes(from + i, left));
    const f32 first = decode<K>(bits_of(permute(q, lanes.lower)) >> shift & 15);
    const f32 second = decode<K>(bits_of(permute(q, lanes.upper)) >> shift & 15);
    std::memcpy(to + 2 * i, &first, sizeof first);
    std::memcpy(to + 2 * i + LANES, &second, sizeof second);
  });
}

template <class F>
void with_kind(int64_t kind, F&& f) {
  if (kind == E4M3) f(std::integral_constant<Kind, E4M3>{});
  if (kind == E5M2) f(std::integral_constant<Kind, E5M2>{});
  if (kind == INT8) f(std::integral_constant<Kind, INT8>{});
  if (kind == FP4) f(std::integral_constant<Kind, FP4>{});
  if (kind == INT4) f(std::integral_constant<Kind, INT4>{});
}

}  // namespace

// packed   bytes, `packed_stride` per row; of two numbers of 4 bits the low half is first
// scale    [blocks of `height` rows, groups of `width` columns], from the weight's row `first` on
// zero     as scale, or null
extern "C" void widen(int64_t dtype, const void* packed, const void* scale, const void* zero, void* out, int64_t rows, int64_t columns,
                      int64_t packed_stride, int64_t out_stride, int64_t kind, int64_t first, int64_t height, int64_t width, int threads) {
  const int64_t groups = (columns + width - 1) / width;
  with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    with_kind(kind, [&](auto k) {
      constexpr Kind K = decltype(k)::value;
      constexpr bool HALF = K == FP4 || K == INT4;
      constexpr int64_t MOST = 1024;
      const Lanes lanes;
      u32 shift{};
      for (int lane = 1; lane < LANES; lane += 2) shift[lane] = 4;
#pragma omp parallel for schedule(dynamic, items_per_turn(columns)) num_threads(thread_count(rows * columns, threads))
      for (int64_t row = 0; row < rows; ++row) {
        float values[MOST + 2 * LANES];
        const int64_t block = ((first + row) / height - first / height) * groups;
        const uint8_t* bytes = (const uint8_t*)packed + row * packed_stride;
        for (int64_t start = 0; start < columns; start += MOST) {
          const int64_t end = start + MOST < columns ? start + MOST : columns;
          if constexpr (HALF) decode_halves<K>(bytes + start / 2, values, end - start, lanes, shift);
          for (int64_t from = start; from < end;) {
            const int64_t group = from / width, stop = (group + 1) * width < end ? (group + 1) * width : end;
            const float s = ((const float*)scale)[block + group], z = zero ? ((const float*)zero)[block + group] : 0.0f;
            const float* v = values + (from - start);
            T* to = (T*)out + row * out_stride + from;
            each_vector(stop - from, [&](int64_t i, auto left) {
              f32 number;
              if constexpr (HALF)
                number = load(v + i, left, 0.0f);
              else
                number = decode<K>(load_bytes(bytes + from + i, left));
              store(to + i, (number - z) * s, left);
            });
            from = stop;
          }
        }
      }
    });
  });
}
