// Products of a few rows with a weight, as of a decode step.
#include "few_rows.h"

#include <type_traits>
#include <vector>

#include "cpu/dot.h"

namespace {

using namespace ml;

// The least number of multiplications for which several threads pay.
constexpr int64_t kParallel = 1 << 16;

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
#pragma omp parallel for schedule(static) if (rows * out * in > kParallel)
  for (int64_t first = 0; first < out; first += kOut) {
    const auto write = [=](int64_t row, int64_t column, Wide<T> sum) {
      output[row * out + column] = from_wide<T>(scales == nullptr ? sum : sum * scales[column]);
    };
    if (first + kOut <= out) {
      dot_all<kOut>(inputs, weight + first * in, rows, in, [=](int64_t row, int o, Wide<T> sum) {
        write(row, first + o, sum);
      });
      continue;
    }
    for (int64_t each = first; each < out; ++each) {
      dot_all<1>(inputs, weight + each * in, rows, in, [=](int64_t row, int, Wide<T> sum) { write(row, each, sum); });
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
