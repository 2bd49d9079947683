// Softmax cross entropy on the CPU. One thread computes each row, so results do not depend on the number of threads.
#include "cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cross_entropy.h"

namespace ml {
namespace {

// Elements per block: a block stays in the L1 cache from the maximum to the sum.
constexpr int64_t kBlock = 2048;
// Independent accumulators. Each adds 64 exponentials of a block in the logits' type and is then added to a float64
// sum: a longer float32 sum would lose small exponentials next to the maximum's, which is 1.
constexpr int64_t kLanes = 32;
// Prefetch distance in bytes: the hardware prefetcher stops at the end of a 4 KiB page.
constexpr int64_t kAheadBytes = 16384;
// 1 / kReadAhead of the next row is prefetched while this row's gradient is written.
constexpr int64_t kReadAhead = 8;

// Memory to prefetch: [from, end).
template <typename T>
struct Ahead {
  const T *from = nullptr, *end = nullptr;

  // Prefetches `count` elements into the L2 cache; does nothing if they start at or after the end. Always inline: the
  // compiler would remove a call to a function that only prefetches as having no effect.
  ML_HD void fetch(int64_t first, int64_t count) const {
    constexpr int64_t kLine = 64 / sizeof(T);
    if (from + first >= end) return;
    for (int64_t i = first; i < first + count; i += kLine) __builtin_prefetch(from + i, 0, 2);
  }
};

// Returns a block as Wide<T>: the block itself, or a converted copy in `space`.
template <typename T>
const Wide<T>* widened(const T* block, int64_t count, Wide<T>* space) {
  if constexpr (sizeof(T) == sizeof(Wide<T>)) {
    return block;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) space[i] = to_wide(block[i]);
    return space;
  }
}

// Returns the maximum; ignores NaN, which the sum of exponentials will show.
template <typename W>
W highest_of(const W* values, int64_t count) {
  W lanes[kLanes];
  std::fill_n(lanes, kLanes, lowest_of<W>());
  const int64_t whole = count - count % kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] = values[first + l] > lanes[l] ? values[first + l] : lanes[l];
  }
  for (int64_t i = whole; i < count; ++i) lanes[i - whole] = std::max(lanes[i - whole], values[i]);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
#pragma omp simd
    for (int64_t l = 0; l < half; ++l) lanes[l] = lanes[l + half] > lanes[l] ? lanes[l + half] : lanes[l];
  }
  return lanes[0];
}

// Returns the sum of of(i) for i in [0, count), in W per lane; prefetches `count` elements from `ahead` meanwhile.
template <typename W, typename Of, typename T>
ML_HD double sum_over(int64_t count, Of of, const Ahead<T>& ahead) {
  W lanes[kLanes] = {};
  const int64_t whole = count - count % kLanes;
  for (int64_t first = 0; first < whole; first += kLanes) {
    ahead.fetch(first, kLanes);
#pragma omp simd
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += of(first + l);
  }
  for (int64_t i = whole; i < count; ++i) lanes[i - whole] += of(i);
  double sum = 0;
  for (const W lane : lanes) sum += lane;
  return sum;
}

// The statistics of core/cross_entropy.h's Softmax over the blocks of a row in order, summed in float64.
template <typename W>
struct RowSums {
  W maximum = lowest_of<W>();
  double sum = 0, excess = 0;
  int64_t count = 0;

  void rise_to(W highest) {
    if (!(highest > maximum)) return;
    const W shift = maximum - highest;
    sum *= exp_nonpositive(shift);
    // Skip before the first logits: subtracting the lowest finite number may give infinity.
    if (count > 0) excess += static_cast<double>(count) * shift;
    maximum = highest;
  }

  // This shard's part of sum(target * (logit - maximum)).
  double expected(const Target<W>& target, bool here, W at_label) const {
    const double of_all = target.uniform > 0 ? target.uniform * excess : 0.0;
    return here ? of_all + static_cast<double>(target.on_label) * (at_label - maximum) : of_all;
  }
};

// Adds a block to the sums; calls keep(i, exp(values[i] - maximum)) with the maximum so far and adds what keep returns.
template <typename W, typename Keep, typename T>
ML_HD void take_block(RowSums<W>& sums, const W* values, int64_t count, bool with_excess, Keep keep,
                      const Ahead<T>& ahead) {
  sums.rise_to(highest_of(values, count));
  const W maximum = sums.maximum;
  if (with_excess) {
    sums.excess += sum_over<W>(count, [&](int64_t i) { return values[i] - maximum; }, Ahead<T>());
  }
  sums.sum += sum_over<W>(count, [&](int64_t i) { return keep(i, exp_nonpositive(values[i] - maximum)); }, ahead);
  sums.count += count;
}

template <typename T>
RowSums<Wide<T>> row_sums(const T* row, int64_t columns, bool with_excess, const T* end) {
  using W = Wide<T>;
  constexpr int64_t kAhead = kAheadBytes / sizeof(T);
  W space[kBlock];
  RowSums<W> sums;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const T* block = row + begin;
    const int64_t count = std::min(kBlock, columns - begin);
    take_block(
        sums, widened(block, count, space), count, with_excess, [](int64_t, W value) { return value; },
        Ahead<T>{block + kAhead, end});
  }
  return sums;
}

template <typename T>
void statistics(const T* logits, const int64_t* labels, const Wide<T>* weights, Wide<T>* results, int64_t rows,
                int64_t columns, int64_t first_id, Wide<T> on_label, Wide<T> uniform) {
  using W = Wide<T>;
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    W *maximum = results + r, *sum = maximum + rows, *expected = sum + rows;
    *maximum = 0, *sum = 1, *expected = 0;
    if (weights[r] == 0) continue;
    const T* row = logits + r * columns;
    const Target<W> target{labels[r] - first_id, on_label, uniform};
    const bool here = target.label >= 0 && target.label < columns;
    const RowSums<W> sums = row_sums(row, columns, uniform > 0, logits + rows * columns);
    *maximum = sums.maximum, *sum = static_cast<W>(sums.sum);
    *expected = static_cast<W>(sums.expected(target, here, here ? to_wide(row[target.label]) : W(0)));
  }
}

// Returns a row's weighted loss and overwrites the row with its weighted gradient while the row is in the L2 cache: the
// first pass writes exponentials over the logits, the second scales them once their sum is known. following: the next
// row, or `end`. maxima: workspace, the running maximum at each block.
template <typename W>
W loss_over_gradient(W* row, const W* following, const W* end, int64_t columns, const Target<W>& target, W weight,
                     W z_loss, W* maxima) {
  const bool here = target.label >= 0 && target.label < columns;
  const W at_label = here ? row[target.label] : W(0);
  // The second pass, the cheaper one, prefetches this much of the next row, so that memory stays busy in both passes.
  const int64_t ahead = columns / kReadAhead;
  RowSums<W> sums;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    W* block = row + begin;
    take_block(
        sums, block, std::min(kBlock, columns - begin), target.uniform > 0,
        [&](int64_t i, W value) { return block[i] = value; },
        Ahead<W>{block + ahead, row + columns});
    maxima[begin / kBlock] = sums.maximum;
  }
  const double log_sum = std::log(sums.sum), normaliser = sums.maximum + log_sum;
  const double loss = log_sum - sums.expected(target, here, at_label) + z_loss * normaliser * normaliser;
  const double factor = weight * (1 + 2 * z_loss * normaliser) / sums.sum;
  const W of_all = weight * target.uniform;
  const Ahead<W> next{following, end};
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    W* block = row + begin;
    const int64_t count = std::min(kBlock, columns - begin);
    const W of_block = static_cast<W>(factor * exp_nonpositive(maxima[begin / kBlock] - sums.maximum));
    for (int64_t first = 0; first < count; first += kLanes * kReadAhead) {
      next.fetch((begin + first) / kReadAhead, kLanes);
      const int64_t stop = std::min(count, first + kLanes * kReadAhead);
#pragma omp simd
      for (int64_t i = first; i < stop; ++i) block[i] = block[i] * of_block - of_all;
    }
  }
  if (here) row[target.label] -= weight * target.on_label;
  return static_cast<W>(loss * weight);
}

template <typename W>
void losses_over_gradient(W* logits, const int64_t* labels, const W* weights, W* losses, int64_t rows, int64_t columns,
                          int64_t first_id, W on_label, W uniform, W z_loss) {
#pragma omp parallel
  {
    std::vector<W> maxima((columns + kBlock - 1) / kBlock);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      W* row = logits + r * columns;
      losses[r] = 0;
      if (weights[r] == 0) {
        std::fill_n(row, columns, W(0));
        continue;
      }
      losses[r] = loss_over_gradient(
          row, row + columns, logits + rows * columns, columns, Target<W>{labels[r] - first_id, on_label, uniform},
          weights[r], z_loss, maxima.data());
    }
  }
}

template <typename T>
void gradient(T* logits, const int64_t* labels, const Wide<T>* maximum, const Wide<T>* factor, const Wide<T>* weight,
              int64_t rows, int64_t columns, int64_t first_id, Wide<T> on_label, Wide<T> uniform) {
  using W = Wide<T>;
  const T* end = logits + rows * columns;
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    T* row = logits + r * columns;
    const RowGradient<W> of_row{maximum[r], factor[r], weight[r]};
    if (of_row.is_zero()) {
      std::fill_n(row, columns, from_wide<T>(0));
      continue;
    }
    const int64_t label = labels[r] - first_id;
    const bool here = label >= 0 && label < columns;
    const W at_label = here ? of_row.of(to_wide(row[label]), uniform) - of_row.weight * on_label : W(0);
    const Ahead<T> ahead{row + kAheadBytes / sizeof(T), end};
    for (int64_t begin = 0; begin < columns; begin += kLanes) {
      ahead.fetch(begin, kLanes);
      const int64_t stop = std::min(columns, begin + kLanes);
#pragma omp simd
      for (int64_t i = begin; i < stop; ++i) row[i] = from_wide<T>(of_row.of(to_wide(row[i]), uniform));
    }
    if (here) row[label] = from_wide<T>(at_label);
  }
}

// Calls `run` with a null pointer of the type that a DType stands for.
template <typename Run>
int of_type(int dtype, Run run) {
  switch (dtype) {
    case kFloat32: run(static_cast<float*>(nullptr)); return 0;
    case kFloat64: run(static_cast<double*>(nullptr)); return 0;
    case kBFloat16: run(static_cast<bf16*>(nullptr)); return 0;
    case kFloat16: run(static_cast<fp16*>(nullptr)); return 0;
    default: return kUnsupported;
  }
}

}  // namespace
}  // namespace ml

extern "C" int megalite_cross_entropy_statistics_cpu(const void* logits, const int64_t* labels, const void* weights,
                                                     void* statistics, int64_t rows, int64_t columns, int64_t first_id,
                                                     double on_label, double uniform, int dtype) {
  return ml::of_type(dtype, [&]<typename T>(T*) {
    using W = ml::Wide<T>;
    ml::statistics(static_cast<const T*>(logits), labels, static_cast<const W*>(weights), static_cast<W*>(statistics),
                   rows, columns, first_id, static_cast<W>(on_label), static_cast<W>(uniform));
  });
}

extern "C" int megalite_cross_entropy_gradient_cpu(void* logits, const int64_t* labels, const void* maximum,
                                                   const void* factor, const void* weight, int64_t rows,
                                                   int64_t columns, int64_t first_id, double on_label, double uniform,
                                                   int dtype) {
  return ml::of_type(dtype, [&]<typename T>(T*) {
    using W = ml::Wide<T>;
    ml::gradient(static_cast<T*>(logits), labels, static_cast<const W*>(maximum), static_cast<const W*>(factor),
                 static_cast<const W*>(weight), rows, columns, first_id, static_cast<W>(on_label),
                 static_cast<W>(uniform));
  });
}

extern "C" int megalite_cross_entropy_losses_cpu(void* logits, const int64_t* labels, const void* weights, void* losses,
                                                 int64_t rows, int64_t columns, int64_t first_id, double on_label,
                                                 double uniform, double z_loss, int dtype) {
  if (dtype != ml::kFloat32 && dtype != ml::kFloat64) return ml::kUnsupported;
  return ml::of_type(dtype, [&]<typename T>(T*) {
    if constexpr (sizeof(T) == sizeof(ml::Wide<T>)) {
      ml::losses_over_gradient(static_cast<T*>(logits), labels, static_cast<const T*>(weights), static_cast<T*>(losses),
                               rows, columns, first_id, static_cast<T>(on_label), static_cast<T>(uniform),
                               static_cast<T>(z_loss));
    }
  });
}
