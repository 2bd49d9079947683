// Rows over threads, each row by one: results do not depend on how many there are.
#include "cross_entropy.h"

#include <algorithm>
#include <cstring>

#include "core/cross_entropy.h"

namespace ml {
namespace {

// Elements at once: they stay in the first-level cache from the maximum to the sum.
constexpr int64_t kBlock = 8192;
// Exponentials summed in their own type, before their sum goes to a float64 one: beside the one of the maximum, which is
// 1, a longer float32 sum loses the many that are small.
constexpr int64_t kRun = 64;

// Whole numbers in the order of what they stand for: compilers make vector code of their maximum.
inline int32_t ordered(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits ^ ((bits >> 31) & INT32_MAX);
}

inline int64_t ordered(double value) {
  int64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits ^ ((bits >> 63) & INT64_MAX);
}

inline float of_ordered(int32_t key) {
  key ^= (key >> 31) & INT32_MAX;
  float value;
  memcpy(&value, &key, sizeof value);
  return value;
}

inline double of_ordered(int64_t key) {
  key ^= (key >> 63) & INT64_MAX;
  double value;
  memcpy(&value, &key, sizeof value);
  return value;
}

// A block in its wide type: itself, or copied into `space`.
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

template <typename W>
Softmax<W> block_softmax(const W* values, int64_t count, bool with_excess) {
  auto highest = ordered(lowest_of<W>());
#pragma omp simd reduction(max : highest)
  for (int64_t i = 0; i < count; ++i) {
    const auto key = ordered(values[i]);
    highest = key > highest ? key : highest;
  }
  const W maximum = of_ordered(highest);
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += kRun) {
    const int64_t end = std::min(begin + kRun, count);
    W of_run = 0;
#pragma omp simd reduction(+ : of_run)
    for (int64_t i = begin; i < end; ++i) of_run += exp_nonpositive(values[i] - maximum);
    sum += of_run;
  }
  W excess = 0;
  if (with_excess) {
#pragma omp simd reduction(+ : excess)
    for (int64_t i = 0; i < count; ++i) excess += values[i] - maximum;
  }
  Softmax<W> state;
  state.maximum = maximum, state.sum = static_cast<W>(sum), state.excess = excess, state.count = static_cast<W>(count);
  return state;
}

template <typename T>
Softmax<Wide<T>> row_softmax(const T* row, int64_t columns, bool with_excess) {
  Wide<T> space[kBlock];
  Softmax<Wide<T>> all;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, columns - begin);
    all = joined(all, block_softmax(widened(row + begin, count, space), count, with_excess));
  }
  return all;
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
    const Softmax<W> all = row_softmax(row, columns, uniform > 0);
    *maximum = all.maximum, *sum = all.sum;
    *expected = expected_excess(row, columns, Target<W>{labels[r] - first_id, on_label, uniform}, all);
  }
}

template <typename T>
void gradient(T* logits, const int64_t* labels, const Wide<T>* maximum, const Wide<T>* factor, const Wide<T>* weight,
              int64_t rows, int64_t columns, int64_t first_id, Wide<T> on_label, Wide<T> uniform) {
  using W = Wide<T>;
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
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) row[i] = from_wide<T>(of_row.of(to_wide(row[i]), uniform));
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
