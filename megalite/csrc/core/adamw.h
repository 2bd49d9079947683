// The AdamW update of one element, and the chunks of a list of tensors; for host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/scalar.h"

namespace ml {

// Elements per thread block. Constant, so that sums over chunks, added in order, do not depend on the number of threads
// or multiprocessors. A multiple of every vector width, so that chunks keep the alignment.
constexpr int64_t kChunk = 8192;

ML_HD int64_t chunks_of(int64_t size) { return (size + kChunk - 1) / kChunk; }

// Returns the tensor that contains `chunk`: the last of `count` tensors whose first chunk is not after `chunk`. A
// tensor without elements has no chunks, so the search skips it.
template <typename Index>
ML_HD int tensor_of_chunk(const Index* first_chunk, int count, int64_t chunk) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (int64_t(first_chunk[middle]) <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The coefficients of one AdamW step, equal for all elements (Loshchilov and Hutter 2019; bias corrections of Kingma
// and Ba 2015).
template <typename W>
struct AdamWStep {
  W gradient_scale;  // clipping factor / loss scale
  W kept;            // 1 - learning rate * weight decay
  W beta1, beta2;
  W fresh1, fresh2;  // 1 - beta
  W step_size;       // learning rate / (1 - beta1^step)
  W correction;      // 1 / sqrt(1 - beta2^step)
  W eps;

  // step: the number of updates, this one included.
  static AdamWStep of(double learning_rate, double beta1, double beta2, double eps, double weight_decay, double step,
                      double gradient_scale) {
    return {W(gradient_scale),
            W(1 - learning_rate * weight_decay),
            W(beta1),
            W(beta2),
            W(1 - beta1),
            W(1 - beta2),
            W(learning_rate / (1 - std::pow(beta1, step))),
            W(1 / std::sqrt(1 - std::pow(beta2, step))),
            W(eps)};
  }
};

ML_HD float square_root(float x) { return sqrtf(x); }
ML_HD double square_root(double x) { return sqrt(x); }

template <typename W>
ML_HD void adamw_update(const AdamWStep<W>& step, W gradient, W& weight, W& mean, W& square) {
  gradient *= step.gradient_scale;
  mean = step.beta1 * mean + step.fresh1 * gradient;
  square = step.beta2 * square + step.fresh2 * gradient * gradient;
  weight = step.kept * weight - step.step_size * mean / (square_root(square) * step.correction + step.eps);
}

}  // namespace ml
