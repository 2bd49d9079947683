// Activations of the feed-forward block; value and derivative share one exponential.
#pragma once

#include "core/elementary.h"

namespace ml {

// The gradient of a bias is summed over blocks of this many rows, then over the blocks, so the order of the additions
// does not depend on the number of threads.
ML_HD int64_t rows_per_block(int64_t rows) {
  const int64_t of_256 = (rows + 255) / 256;
  return of_256 > 16 ? of_256 : 16;
}

enum Activation { kSilu = 0, kGelu = 1, kGeluTanh = 2 };

template <typename W>
struct Activated {
  W value, slope;
};

// x * logistic(x) (Elfwing et al. 2017)
struct Silu {
  template <typename W>
  static ML_HD Activated<W> at(W x) {
    const Logistic<W> gate = logistic(x);
    return {x * gate.value, gate.value + x * (gate.value * gate.complement)};
  }
};

// x * Phi(x) (Hendrycks and Gimpel 2016)
struct Gelu {
  template <typename W>
  static ML_HD Activated<W> at(W x) {
    const Normal<W> gate = normal(x);
    return {x * gate.below, gate.below + x * gate.density};
  }
};

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3); (1 + tanh(u)) / 2 = logistic(2 u).
struct GeluTanh {
  template <typename W>
  static ML_HD Activated<W> at(W x) {
    constexpr W scale = W(1.5957691216057307118), cubic = W(0.044715);
    // For |x| > 64 the gate is exactly 0 or 1: clamping changes no result and keeps x^2 in the slope finite.
    W square = x * x;
    square = cubic * (square > W(4096) ? W(4096) : square);
    const Logistic<W> gate = logistic(scale * x * (1 + square));
    const W steepness = scale * (1 + 3 * square);
    return {x * gate.value, gate.value + x * (gate.value * gate.complement) * steepness};
  }
};

// Calls run(A(), T()) for kGelu or kGeluTanh and a DType; returns kUnsupported for other values.
template <typename Run>
inline int for_gelu(int activation, int dtype, Run run) {
  if (activation == kGelu) return for_dtype(dtype, [&](auto type) { run(Gelu{}, type); });
  if (activation == kGeluTanh) return for_dtype(dtype, [&](auto type) { run(GeluTanh{}, type); });
  return kUnsupported;
}

// The same for every Activation.
template <typename Run>
inline int for_activation(int activation, int dtype, Run run) {
  if (activation == kSilu) return for_dtype(dtype, [&](auto type) { run(Silu{}, type); });
  return for_gelu(activation, dtype, run);
}

}  // namespace ml
