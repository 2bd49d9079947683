// Experts' rows on the CPU: each token is read once for all of its rows.
#include "expert_rows.h"

#include <algorithm>
#include <vector>

#include "cpu/dot.h"
#include "cpu/streaming.h"

namespace {

using namespace ml;

// The least number of values for which several threads pay.
constexpr int64_t kParallel = 32768;
// Columns that are summed at once, in vectors that stay in registers.
constexpr int kVectors = 4;
template <typename T>
using Vector = typename VectorOf<Wide<T>>::Type;
template <typename T>
constexpr int64_t kBlock = kVectors * kLanes<Wide<T>>;

template <typename T>
void spread(const T* values, T* rows, const MegalitePlaces& at) {
  const int64_t count = at.tokens * at.chosen * at.columns;
  const bool streams = outgrows_caches<T>(count);
#pragma omp parallel if (count > kParallel)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < at.tokens; ++token) {
      const T* from = values + token * at.columns;
      for (int64_t j = 0; j < at.chosen; ++j) {
        T* to = rows + at.places[token * at.chosen + j] * at.columns;
        if (streams) {
          stream(to, from, at.columns);
        } else {
          memcpy(to, from, at.columns * sizeof(T));
        }
      }
    }
    end_streams();
  }
}

// Rows lie apart in memory, so that processors do not fetch the next one by themselves.
template <typename T>
inline void fetch(const T* next, int64_t column) {
  for (size_t byte = 0; byte < kBlock<T> * sizeof(T); byte += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(next + column) + byte);
  }
}

template <typename T>
inline void write(T* to, const Vector<T> (&values)[kVectors]) {
  Wide<T> wide[kBlock<T>];
  memcpy(wide, values, sizeof wide);
#pragma omp simd
  for (int64_t i = 0; i < kBlock<T>; ++i) to[i] = from_wide<T>(wide[i]);
}

template <typename T>
void sum(const T* rows, const T* weights, T* sums, const MegalitePlaces& at) {
  const int64_t count = at.tokens * at.chosen, whole = at.columns / kBlock<T> * kBlock<T>;
#pragma omp parallel for schedule(static) if (count * at.columns > kParallel)
  for (int64_t token = 0; token < at.tokens; ++token) {
    const int64_t begin = token * at.chosen, end = begin + at.chosen;
    const auto weight = [=](int64_t j) { return weights == nullptr ? Wide<T>(1) : to_wide(weights[j]); };
    T* to = sums + token * at.columns;
    for (int64_t column = 0; column < whole; column += kBlock<T>) {
      Vector<T> totals[kVectors] = {};
      for (int64_t j = begin; j < end; ++j) {
        const T* from = rows + at.places[j] * at.columns + column;
        const Wide<T> factor = weight(j);
        for (int v = 0; v < kVectors; ++v) totals[v] += factor * load<Wide<T>>(from + v * kLanes<Wide<T>>);
        fetch(rows + at.places[std::min(j + at.chosen, count - 1)] * at.columns, column);
      }
      write(to + column, totals);
    }
    for (int64_t column = whole; column < at.columns; ++column) {
      Wide<T> total = 0;
      for (int64_t j = begin; j < end; ++j) total += weight(j) * to_wide(rows[at.places[j] * at.columns + column]);
      to[column] = from_wide<T>(total);
    }
  }
}

// Writes weight * grad to `rows_grad` and returns grad . row.
template <typename T>
Wide<T> row_backward(const T* grad, const T* row, const T* next, Wide<T> weight, T* rows_grad, int64_t columns) {
  Vector<T> partial[kVectors] = {};
  int64_t column = 0;
  for (; column + kBlock<T> <= columns; column += kBlock<T>) {
    Vector<T> products[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const Vector<T> given = load<Wide<T>>(grad + column + v * kLanes<Wide<T>>);
      partial[v] += given * load<Wide<T>>(row + column + v * kLanes<Wide<T>>);
      products[v] = weight * given;
    }
    write(rows_grad + column, products);
    fetch(next, column);
  }
  Wide<T> dot = 0;
  for (const Vector<T>& each : partial) {
    for (int lane = 0; lane < kLanes<Wide<T>>; ++lane) dot += each[lane];
  }
  for (; column < columns; ++column) {
    dot += to_wide(grad[column]) * to_wide(row[column]);
    rows_grad[column] = from_wide<T>(weight * to_wide(grad[column]));
  }
  return dot;
}

template <typename T>
void sum_backward(
    const T* grad, const T* rows, const T* weights, T* rows_grad, T* weights_grad, const MegalitePlaces& at) {
  const int64_t count = at.tokens * at.chosen;
  const bool streams = outgrows_caches<T>(count * at.columns);
#pragma omp parallel if (count * at.columns > kParallel)
  {
    std::vector<T> space(streams ? at.columns : 0);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < at.tokens; ++token) {
      for (int64_t j = token * at.chosen; j < (token + 1) * at.chosen; ++j) {
        const T* next = rows + at.places[std::min(j + 1, count - 1)] * at.columns;
        T* to = rows_grad + at.places[j] * at.columns;
        weights_grad[j] = from_wide<T>(row_backward(
            grad + token * at.columns, rows + at.places[j] * at.columns, next, to_wide(weights[j]),
            streams ? space.data() : to, at.columns));
        if (streams) stream(to, space.data(), at.columns);
      }
    }
    end_streams();
  }
}

}  // namespace

extern "C" {

int megalite_expert_rows_cpu(const void* values, void* rows, const MegalitePlaces* places, int dtype) {
  return for_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    spread(static_cast<const T*>(values), static_cast<T*>(rows), *places);
  });
}

int megalite_expert_sums_cpu(
    const void* rows, const void* weights, void* sums, const MegalitePlaces* places, int dtype) {
  return for_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    sum(static_cast<const T*>(rows), static_cast<const T*>(weights), static_cast<T*>(sums), *places);
  });
}

int megalite_expert_sums_backward_cpu(
    const void* grad, const void* rows, const void* weights, void* rows_grad, void* weights_grad,
    const MegalitePlaces* places, int dtype) {
  return for_dtype(dtype, [=](auto type) {
    using T = decltype(type);
    sum_backward(
        static_cast<const T*>(grad), static_cast<const T*>(rows), static_cast<const T*>(weights),
        static_cast<T*>(rows_grad), static_cast<T*>(weights_grad), *places);
  });
}

}
