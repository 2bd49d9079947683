// Softmax cross entropy of one row of a vocabulary shard's logits, columns [0, n): the statistics of one pass over the
// row, and the gradient, which overwrites the logits.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "core/scalar.h"
#include "core/softmax_exp.h"

#ifdef __CUDA_ARCH__
#define ML_UNROLL _Pragma("unroll")
#else
#define ML_UNROLL
#endif

namespace ml {

template <typename W>
ML_HD W lowest_of() {
  return sizeof(W) == 4 ? static_cast<W>(-FLT_MAX) : static_cast<W>(-DBL_MAX);
}

// The target distribution: `uniform` at every id, plus `on_label` at the label.
template <typename W>
struct Target {
  int64_t label;  // column in this shard; outside [0, columns) if another shard holds the label
  W on_label, uniform;
};

// Statistics of a subset of a row's logits. `maximum` starts at the lowest finite number rather than -infinity, so that
// logits of -infinity add 0 to the sum instead of NaN.
template <typename W>
struct Softmax {
  W maximum = lowest_of<W>();
  W sum = 0;     // of exp(logit - maximum)
  W excess = 0;  // of logit - maximum
  W count = 0;
};

// Combines the statistics of two disjoint subsets (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018).
template <typename W>
ML_HD Softmax<W> joined(const Softmax<W>& a, const Softmax<W>& b) {
  Softmax<W> both;
  both.maximum = a.maximum > b.maximum ? a.maximum : b.maximum;
  const W from_a = a.maximum - both.maximum, from_b = b.maximum - both.maximum;
  both.sum = a.sum * softmax_exp(from_a) + b.sum * softmax_exp(from_b);
  both.count = a.count + b.count;
  // Skip empty subsets: subtracting their maximum, the lowest finite number, may give infinity.
  both.excess = (a.count > 0 ? a.excess + a.count * from_a : W(0)) + (b.count > 0 ? b.excess + b.count * from_b : W(0));
  return both;
}

// This shard's part of sum(target * (logit - maximum)).
template <typename T>
ML_HD Wide<T> expected_excess(const T* row, int64_t columns, const Target<Wide<T>>& target, const Softmax<Wide<T>>& all) {
  Wide<T> expected = target.uniform > 0 ? target.uniform * all.excess : Wide<T>(0);
  if (target.label >= 0 && target.label < columns) {
    expected += target.on_label * (to_wide(row[target.label]) - all.maximum);
  }
  return expected;
}

// The coefficients of one row's gradient: softmax * weight = exp(logit - maximum) * factor, with this shard's maximum.
template <typename W>
struct RowGradient {
  W maximum, factor, weight;
  // A row with weight 0 may hold any values, NaN too, so its logits are not read.
  ML_HD bool is_zero() const { return factor == 0 && weight == 0; }
  ML_HD W of(W logit, W uniform) const { return softmax_exp(logit - maximum) * factor - weight * uniform; }
};

// Splits a row at any address for vector access: head elements up to the first 16-byte boundary, packs of 16 bytes,
// tail elements.
constexpr int kPackBytes = 16;

template <typename T>
struct alignas(kPackBytes) Pack {
  static constexpr int kSize = kPackBytes / sizeof(T);
  T values[kSize];
};

struct RowSplit {
  int64_t head, packs, tail;  // the tail begins at column `tail`
};

template <typename T>
ML_HD RowSplit split_row(const T* row, int64_t columns) {
  const uint64_t beyond = reinterpret_cast<uintptr_t>(row) % kPackBytes;
  const int64_t to_aligned = static_cast<int64_t>((kPackBytes - beyond) % kPackBytes / sizeof(T));
  const int64_t head = to_aligned < columns ? to_aligned : columns;
  const int64_t packs = (columns - head) / Pack<T>::kSize;
  return {head, packs, head + packs * Pack<T>::kSize};
}

// Packs that a thread loads before it uses them: hides memory latency, limited by registers.
template <typename T>
constexpr int kPacksAtOnce = sizeof(T) == 8 ? 2 : 4;

template <typename W, bool kExcess, int kCount>
ML_HD void take(Softmax<W>& state, const W (&logits)[kCount]) {
  W highest = state.maximum;
  ML_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (logits[i] > highest) highest = logits[i];
  }
  if (highest > state.maximum) {
    const W shift = state.maximum - highest;
    state.sum *= softmax_exp(shift);
    if (kExcess && state.count > 0) state.excess += state.count * shift;
    state.maximum = highest;
  }
  ML_UNROLL
  for (int i = 0; i < kCount; ++i) {
    state.sum += softmax_exp(logits[i] - highest);
    if (kExcess) state.excess += logits[i] - highest;
  }
  state.count += kCount;
}

// The statistics of the elements of a row that thread `rank` of `size` reads.
template <typename T, bool kExcess>
ML_HD Softmax<Wide<T>> thread_softmax(const T* row, int64_t columns, int rank, int size) {
  using W = Wide<T>;
  const RowSplit split = split_row(row, columns);
  Softmax<W> state;
  const int64_t singles = split.head + (columns - split.tail);
  for (int64_t i = rank; i < singles; i += size) {
    const W single[1] = {to_wide(row[i < split.head ? i : split.tail + (i - split.head)])};
    take<W, kExcess, 1>(state, single);
  }
  constexpr int kAtOnce = kPacksAtOnce<T>;
  const Pack<T>* packs = reinterpret_cast<const Pack<T>*>(row + split.head);
  for (int64_t first = rank; first < split.packs; first += static_cast<int64_t>(size) * kAtOnce) {
    Pack<T> read[kAtOnce];
    ML_UNROLL
    for (int p = 0; p < kAtOnce; ++p) {
      const int64_t at = first + static_cast<int64_t>(p) * size;
      if (at < split.packs) read[p] = packs[at];
    }
    ML_UNROLL
    for (int p = 0; p < kAtOnce; ++p) {
      if (first + static_cast<int64_t>(p) * size >= split.packs) break;
      W logits[Pack<T>::kSize];
      ML_UNROLL
      for (int i = 0; i < Pack<T>::kSize; ++i) logits[i] = to_wide(read[p].values[i]);
      take<W, kExcess, Pack<T>::kSize>(state, logits);
    }
  }
  return state;
}

// Overwrites the elements of a row that belong to thread `rank` of `size` with their gradient.
template <typename T>
ML_HD void thread_gradient(T* row, int64_t columns, const RowGradient<Wide<T>>& gradient, const Target<Wide<T>>& target,
                           int64_t rank, int64_t size) {
  using W = Wide<T>;
  const RowSplit split = split_row(row, columns);
  const bool zero = gradient.is_zero();
  const W at_label = gradient.weight * target.on_label;
  const int64_t singles = split.head + (columns - split.tail);
  for (int64_t i = rank; i < singles; i += size) {
    const int64_t column = i < split.head ? i : split.tail + (i - split.head);
    W value = zero ? W(0) : gradient.of(to_wide(row[column]), target.uniform);
    if (column == target.label && !zero) value -= at_label;
    row[column] = from_wide<T>(value);
  }
  constexpr int kAtOnce = kPacksAtOnce<T>;
  Pack<T>* packs = reinterpret_cast<Pack<T>*>(row + split.head);
  for (int64_t first = rank; first < split.packs; first += size * kAtOnce) {
    Pack<T> read[kAtOnce];
    ML_UNROLL
    for (int p = 0; p < kAtOnce; ++p) {
      const int64_t at = first + p * size;
      if (at < split.packs && !zero) read[p] = packs[at];
    }
    ML_UNROLL
    for (int p = 0; p < kAtOnce; ++p) {
      const int64_t at = first + p * size;
      if (at >= split.packs) break;
      const int64_t offset = target.label - (split.head + at * Pack<T>::kSize);
      ML_UNROLL
      for (int i = 0; i < Pack<T>::kSize; ++i) {
        W value = zero ? W(0) : gradient.of(to_wide(read[p].values[i]), target.uniform);
        if (offset == i && !zero) value -= at_label;
        read[p].values[i] = from_wide<T>(value);
      }
      packs[at] = read[p];
    }
  }
}

}  // namespace ml
