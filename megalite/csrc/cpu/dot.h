// Dot products of a few rows of inputs with rows of a matrix that is read once, at the speed of memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "core/scalar.h"

namespace ml {

#ifdef __AVX512F__
constexpr int kVectorBytes = 64, kMostRows = 4;  // 16 of 32 registers hold sums
#else
constexpr int kVectorBytes = 32, kMostRows = 2;  // 8 of 16
#endif
// Rows of the matrix at a time: each value of the inputs is loaded once for all of them.
constexpr int kOut = 4;

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

// `kLanes` consecutive values, widened.
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
    const __m512i words = _mm512_maskz_cvtepi8_epi32(0xffff, bytes);  // without a mask GCC warns within its own header
    return _mm512_maskz_cvtepi32_ps(0xffff, words);
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

// sums[row][o] = inputs[row] . matrix[o] for kRows rows of inputs [rows, depth] and kCount rows of the matrix; rows
// from `rows` on repeat the last one. A sum's order of additions does not depend on the rows beside it.
template <int kRows, int kCount, typename W, typename S>
inline void dot(const W* inputs, const S* matrix, int64_t rows, int64_t depth, W (&sums)[kMostRows][kOut]) {
  using V = typename VectorOf<W>::Type;
  const W* from[kRows];
  for (int row = 0; row < kRows; ++row) from[row] = inputs + std::min<int64_t>(row, rows - 1) * depth;
  V partial[kRows][kCount] = {};
  int64_t k = 0;
  for (; k + kLanes<W> <= depth; k += kLanes<W>) {
    V loaded[kCount];
    for (int o = 0; o < kCount; ++o) {
      loaded[o] = load<W>(matrix + o * depth + k);
      // The next rows in the order of memory: processors fetch one stream ahead well, and kCount short ones badly.
      __builtin_prefetch(matrix + kCount * (depth + k) + o * kLanes<W>);
    }
    for (int row = 0; row < kRows; ++row) {
      const V values = *reinterpret_cast<const V*>(from[row] + k);
      for (int o = 0; o < kCount; ++o) partial[row][o] += values * loaded[o];
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int o = 0; o < kCount; ++o) {
      W sum = 0;
      for (int lane = 0; lane < kLanes<W>; ++lane) sum += partial[row][o][lane];
      for (int64_t rest = k; rest < depth; ++rest) sum += from[row][rest] * widened<W>(matrix[o * depth + rest]);
      sums[row][o] = sum;
    }
  }
}

// Calls write(row, o, sum) for each of the rows of inputs [rows, depth] and each of kCount rows of the matrix.
template <int kCount, typename W, typename S, typename Write>
inline void dot_all(const W* inputs, const S* matrix, int64_t rows, int64_t depth, Write write) {
  for (int64_t row = 0; row < rows; row += kMostRows) {
    const int64_t taken = std::min<int64_t>(kMostRows, rows - row);
    W sums[kMostRows][kOut];
    if (taken == 1) {
      dot<1, kCount>(inputs + row * depth, matrix, 1, depth, sums);
    } else {
      dot<kMostRows, kCount>(inputs + row * depth, matrix, taken, depth, sums);
    }
    for (int64_t each = 0; each < taken; ++each) {
      for (int o = 0; o < kCount; ++o) write(row + each, o, sums[each][o]);
    }
  }
}

}  // namespace ml
