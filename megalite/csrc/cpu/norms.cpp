#include "norms.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/norm.h"
#include "cpu/streaming.h"

namespace {

using namespace ml;

constexpr int64_t kMostBlocks = 256, kFewestRows = 16;
// Columns of the weight gradients that one thread sums at a time.
constexpr int64_t kColumns = 256;

template <typename T, bool kCentred>
void forward_row(
    const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* output, Wide<T>* mean, Wide<T>* inverse,
    int64_t columns, double eps) {
  using W = Wide<T>;
  W total = 0;
  if (residual != nullptr) {
    for (int64_t i = 0; i < columns; ++i) {
      sum[i] = from_wide<T>(to_wide(x[i]) + to_wide(residual[i]));
      // Statistics use the rounded sum, because the backward reads the rounded sum.
      const W value = to_wide(sum[i]);
      total += kCentred ? value : value * value;
    }
    x = sum;
  } else {
    for (int64_t i = 0; i < columns; ++i) {
      const W value = to_wide(x[i]);
      total += kCentred ? value : value * value;
    }
  }
  W centre = 0;
  if (kCentred) {
    centre = total / static_cast<W>(columns);
    total = 0;
    for (int64_t i = 0; i < columns; ++i) {
      const W deviation = to_wide(x[i]) - centre;
      total += deviation * deviation;
    }
    *mean = centre;
  }
  const W scale = 1 / std::sqrt(total / static_cast<W>(columns) + static_cast<W>(eps));
  *inverse = scale;
  for (int64_t i = 0; i < columns; ++i) {
    const W value = normalised(to_wide(x[i]), centre, scale) * to_wide(weight[i]);
    output[i] = from_wide<T>(kCentred ? value + to_wide(bias[i]) : value);
  }
}

template <typename T, bool kCentred>
void input_grad_row(
    const T* grad, const T* sum_grad, const T* x, const T* weight, Wide<T> mean, Wide<T> inverse, T* x_grad,
    int64_t columns) {
  using W = Wide<T>;
  W average = 0, projection = 0;
  for (int64_t i = 0; i < columns; ++i) {
    const W weighted = to_wide(grad[i]) * to_wide(weight[i]);
    if (kCentred) average += weighted;
    projection += weighted * normalised(to_wide(x[i]), mean, inverse);
  }
  average /= static_cast<W>(columns);
  projection /= static_cast<W>(columns);
  for (int64_t i = 0; i < columns; ++i) {
    const W weighted = to_wide(grad[i]) * to_wide(weight[i]);
    const W through = input_grad(weighted, normalised(to_wide(x[i]), mean, inverse), average, projection, inverse);
    x_grad[i] = from_wide<T>(sum_grad != nullptr ? through + to_wide(sum_grad[i]) : through);
  }
}

template <typename T, bool kCentred>
void add_weight_grad_row(
    const T* grad, const T* x, Wide<T> mean, Wide<T> inverse, Wide<T>* weight_grad, Wide<T>* bias_grad,
    int64_t columns) {
  for (int64_t i = 0; i < columns; ++i) {
    weight_grad[i] += to_wide(grad[i]) * normalised(to_wide(x[i]), mean, inverse);
    if (kCentred) bias_grad[i] += to_wide(grad[i]);
  }
}

template <typename T, bool kCentred>
void forward(
    const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* output, Wide<T>* mean, Wide<T>* inverse,
    int64_t rows, int64_t columns, double eps) {
  const bool streams = outgrows_caches<T>((sum != nullptr ? 2 : 1) * rows * columns);
#pragma omp parallel
  {
    std::vector<T> space(streams ? 2 * columns : 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t at = row * columns;
      T* made_sum = sum == nullptr ? nullptr : streams ? space.data() : sum + at;
      T* made = streams ? space.data() + columns : output + at;
      forward_row<T, kCentred>(
          x + at, residual != nullptr ? residual + at : nullptr, weight, bias, made_sum, made,
          kCentred ? mean + row : nullptr, inverse + row, columns, eps);
      if (!streams) continue;
      if (sum != nullptr) stream(sum + at, made_sum, columns, residual + at + columns);
      stream(output + at, made, columns, x + at + columns);
    }
    end_streams();
  }
}

template <typename T, bool kCentred>
void backward(
    const T* grad, const T* sum_grad, const T* x, const T* weight, const Wide<T>* mean, const Wide<T>* inverse,
    T* x_grad, T* weight_grad, T* bias_grad, Wide<T>* partials, int64_t blocks, int64_t rows, int64_t columns) {
  const int64_t sums = kCentred ? 2 : 1;
  const bool streams = x_grad != nullptr && outgrows_caches<T>(rows * columns);
#pragma omp parallel
  {
    std::vector<T> space(streams ? columns : 0);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      Wide<T>* own = weight_grad != nullptr ? partials + block * sums * columns : nullptr;
      if (own != nullptr) std::fill_n(own, sums * columns, Wide<T>(0));
      for (int64_t row = rows * block / blocks; row < rows * (block + 1) / blocks; ++row) {
        const int64_t at = row * columns;
        const Wide<T> centre = kCentred ? mean[row] : Wide<T>(0);
        if (x_grad != nullptr) {
          input_grad_row<T, kCentred>(
              grad + at, sum_grad != nullptr ? sum_grad + at : nullptr, x + at, weight, centre, inverse[row],
              streams ? space.data() : x_grad + at, columns);
          if (streams) {
            const T* also = sum_grad != nullptr ? sum_grad : grad;
            const int64_t next = at + columns;
            stream(x_grad + at, space.data(), columns, grad + next, x + next, also + next);
          }
        }
        if (own != nullptr) {
          add_weight_grad_row<T, kCentred>(grad + at, x + at, centre, inverse[row], own, own + columns, columns);
        }
      }
    }
    end_streams();
    if (weight_grad != nullptr) {
#pragma omp for schedule(static)
      for (int64_t begin = 0; begin < sums * columns; begin += kColumns) {
        const int64_t width = std::min(kColumns, sums * columns - begin);
        double totals[kColumns] = {};  // fp32 would add rounding errors over up to 256 blocks
        for (int64_t block = 0; block < blocks; ++block) {
          const Wide<T>* own = partials + block * sums * columns + begin;
          for (int64_t i = 0; i < width; ++i) totals[i] += own[i];
        }
        for (int64_t i = 0; i < width; ++i) {
          const int64_t at = begin + i;
          (at < columns ? weight_grad[at] : bias_grad[at - columns]) = from_wide<T>(static_cast<Wide<T>>(totals[i]));
        }
      }
    }
  }
}

}  // namespace

extern "C" int64_t megalite_norm_blocks_cpu(int64_t rows, int64_t) {
  return std::clamp<int64_t>(rows / kFewestRows, 1, kMostBlocks);
}

extern "C" int megalite_norm_forward_cpu(
    const void* x, const void* residual, const void* weight, const void* bias, void* sum, void* output, void* mean,
    void* inverse, int64_t rows, int64_t columns, double eps, int dtype) {
  return for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto run = bias != nullptr ? forward<T, true> : forward<T, false>;
    run(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
        static_cast<const T*>(bias), static_cast<T*>(sum), static_cast<T*>(output), static_cast<W*>(mean),
        static_cast<W*>(inverse), rows, columns, eps);
  });
}

extern "C" int megalite_norm_backward_cpu(
    const void* grad, const void* sum_grad, const void* x, const void* weight, const void* mean, const void* inverse,
    void* x_grad, void* weight_grad, void* bias_grad, void* partials, int64_t blocks, int64_t rows, int64_t columns,
    int dtype) {
  return for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    // With 0 rows the mean is a null pointer: bias_grad also identifies LayerNorm.
    const auto run = mean != nullptr || bias_grad != nullptr ? backward<T, true> : backward<T, false>;
    run(static_cast<const T*>(grad), static_cast<const T*>(sum_grad), static_cast<const T*>(x),
        static_cast<const T*>(weight), static_cast<const W*>(mean), static_cast<const W*>(inverse),
        static_cast<T*>(x_grad), static_cast<T*>(weight_grad), static_cast<T*>(bias_grad), static_cast<W*>(partials),
        blocks, rows, columns);
  });
}
