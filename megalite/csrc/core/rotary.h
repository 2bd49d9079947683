// Rotary position embedding (Su et al. 2021): the indices of a pair, and its rotation.
#pragma once

#include "core/scalar.h"

namespace ml {

// The indices of pair i among 2 * pairs values: (i, i + pairs), or (2 i, 2 i + 1) if interleaved.
struct Pair {
  int64_t first, second;
};

template <bool kInterleaved>
ML_HD Pair pair_of(int64_t i, int64_t pairs) {
  if constexpr (kInterleaved) return {2 * i, 2 * i + 1};
  return {i, i + pairs};
}

template <typename W>
struct Point {
  W first, second;
};

template <typename W>
ML_HD Point<W> turned(W first, W second, W cosine, W sine) {
  return {first * cosine - second * sine, second * cosine + first * sine};
}

// Returns the row of the cosine and sine tables for token (b, s).
ML_HD int64_t table_row(int64_t b, int64_t s, const int64_t* positions, int64_t batch_stride) {
  const int64_t entry = b * batch_stride + s;
  return positions != nullptr ? positions[entry] : entry;
}

}  // namespace ml
