// Products of a few rows with a weight, as of a decode step: the weight is read once, at the speed of memory.
#include "few_rows.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "core/scalar.h"

namespace {

using namespace ml;

#ifdef __AVX512F__
constexpr int kVectorBytes = 64, kMostRows = 4;  // 16 of 32 registers hold sums
#else
constexpr int kVectorBytes = 32, kMostRows = 2;  // 8 of 16
#endif
// Rows of the weight at a time where the inputs outgrow a quarter of an L1 cache or so: each value of the inputs is then
// loaded once for all of them. Smaller inputs take one row of the weight at a time, since a processor fetches one stream
// ahead better than four short ones: 69 MB of rows of 384 values take 2.2 ms instead of 4.8, a plain sum 2.1 (Zen 4).
constexpr int kOut = 4;
constexpr int64_t kNearBytes = 16384;
// The least number of multiplications for which several threads pay.
constexpr int64_t kParallel = 1 << 16;

template <typename V, int kBytes = kVectorBytes>
struct VectorOf {
  typedef V Type __attribute__((vector_size(kBytes), aligned(sizeof(V)), may_alias));
};

template <typename W>
constexpr int kLanes = kVectorBytes / sizeof(W);

template <typename W, typename S>
inline W widened(S value) {
  if constexpr (std::is_same_v<S, int8_t>) {
    return static_cast<W>(value);
  } else {
    return to_wide(value);
  }
}

// `kLanes` consecutive values of a weight, widened.
template <typename W, typename S>
inline typename VectorOf<W>::Type load(const S* from) {
  using Wide = typename VectorOf<W>::Type;
  if constexpr (std::is_same_v<S, W>) {
    return *reinterpret_cast<const Wide*>(from);
  } else if constexpr (std::is_same_v<S, bf16>) {
    using Bits = typename VectorOf<uint16_t, kVectorBytes / 2>::Type;
    using Words = typename VectorOf<uint32_t>::Type;
    const Words words = __builtin_convertvector(*reinterpret_cast<const Bits*>(from), Words) << 16;
    return reinterpret_cast<Wide>(words);
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<S, int8_t> && std::is_same_v<W, float>) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  } else if constexpr (std::is_same_v<S, int8_t> && std::is_same_v<W, float>) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#endif
  } else {
    Wide values;
    for (int lane = 0; lane < kLanes<W>; ++lane) values[lane] = widened<W>(from[lane]);
    return values;
  }
}

// sums[row][o] = inputs[row] . weight[o] for kRows rows and kCount rows of the weight. A sum's order of additions does
// not depend on the rows beside it.
template <int kRows, int kCount, typename W, typename S>
inline void dot(const W* inputs, const S* weight, int64_t in, W (&sums)[kMostRows][kOut]) {
  using V = typename VectorOf<W>::Type;
  V partial[kRows][kCount] = {};
  int64_t k = 0;
  for (; k + kLanes<W> <= in; k += kLanes<W>) {
    V weights[kCount];
    for (int o = 0; o < kCount; ++o) {
      weights[o] = load<W>(weight + o * in + k);
      // The next block of rows.
      if (kCount > 1) __builtin_prefetch(weight + (kCount + o) * in + k);
    }
    for (int row = 0; row < kRows; ++row) {
      const V values = *reinterpret_cast<const V*>(inputs + row * in + k);
      for (int o = 0; o < kCount; ++o) partial[row][o] += values * weights[o];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int o = 0; o < kCount; ++o) {
      W sum = 0;
      for (int lane = 0; lane < kLanes<W>; ++lane) sum += partial[row][o][lane];
      for (int64_t rest = k; rest < in; ++rest) sum += inputs[row * in + rest] * widened<W>(weight[o * in + rest]);
      sums[row][o] = sum;
    }
  }
}

// One block of kCount outputs for all rows.
template <int kCount, typename T, typename S>
void block(
    const Wide<T>* inputs, const S* weight, const float* scales, T* output, int64_t rows, int64_t out, int64_t in) {
  for (int64_t row = 0; row < rows;) {
    const int64_t taken = std::min<int64_t>(kMostRows, rows - row);
    Wide<T> sums[kMostRows][kOut];
    const Wide<T>* from = inputs + row * in;
    switch (taken) {
      case 1:
        dot<1, kCount>(from, weight, in, sums);
        break;
      case 2:
        dot<2, kCount>(from, weight, in, sums);
        break;
      default:
        if constexpr (kMostRows == 4) {
          taken == 3 ? dot<3, kCount>(from, weight, in, sums) : dot<4, kCount>(from, weight, in, sums);
        }
    }
    for (int64_t each = 0; each < taken; ++each) {
      for (int o = 0; o < kCount; ++o) {
        const Wide<T> scale = scales == nullptr ? 1 : scales[o];
        output[(row + each) * out + o] = from_wide<T>(sums[each][o] * scale);
      }
    }
    row += taken;
  }
}

template <typename T, typename S>
void product(const T* given, const S* weight, const float* scales, T* output, int64_t rows, int64_t out, int64_t in) {
  std::vector<Wide<T>> space;
  const Wide<T>* inputs;
  if constexpr (std::is_same_v<T, Wide<T>>) {
    inputs = given;
  } else {
    space.resize(rows * in);
    for (int64_t i = 0; i < rows * in; ++i) space[i] = to_wide(given[i]);
    inputs = space.data();
  }
  const int64_t taken = rows * in * static_cast<int64_t>(sizeof(Wide<T>)) <= kNearBytes ? 1 : kOut;
#pragma omp parallel for schedule(static) if (rows * out * in > kParallel)
  for (int64_t o = 0; o < out; o += taken) {
    if (taken == kOut && o + kOut <= out) {
      block<kOut>(inputs, weight + o * in, scales == nullptr ? nullptr : scales + o, output + o, rows, out, in);
      continue;
    }
    for (int64_t each = o; each < std::min(o + taken, out); ++each) {
      block<1>(
          inputs, weight + each * in, scales == nullptr ? nullptr : scales + each, output + each, rows, out, in);
    }
  }
}

}  // namespace

extern "C" int megalite_few_rows_linear_cpu(
    const void* inputs, const void* weight, const float* scales, void* output, int64_t rows, int64_t out, int64_t in,
    int int8, int dtype) {
  return for_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(inputs);
    T* to = static_cast<T*>(output);
    if (int8) {
      product(from, static_cast<const int8_t*>(weight), scales, to, rows, out, in);
    } else {
      product(from, static_cast<const T*>(weight), static_cast<const float*>(nullptr), to, rows, out, in);
    }
  });
}
