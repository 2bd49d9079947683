// Replaces core/softmax_exp.h: computes its GPU branch on the host, with ex2.approx.ftz.f32 off by a random error of
// the size that the PTX ISA allows (relative 2^-22.5).
#pragma once

#include "core/exp.h"

namespace ml {

inline float softmax_exp(float x) {
  const float product = x * 1.44269504f;
  const double chance = bits_of(product) * 2654435761u * 0x1p-31 - 1;
  const double error = product == 0 ? 0 : 1.686e-7 * chance;  // 2^0 is 1
  const double power = std::exp2(static_cast<double>(product)) * (1 + error);
  return power < 0x1p-126 ? 0.0f : static_cast<float>(power);
}

inline double softmax_exp(double x) { return exp_nonpositive(x); }

}  // namespace ml
