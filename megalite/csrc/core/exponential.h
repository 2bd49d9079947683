// 2^x for x <= 0, without branches, so that compilers vectorise loops over it.
#pragma once

#include <cmath>

#include "core/scalar.h"

namespace ml {

// Error at most 2 units in the last place; 0 for results below 2^-126 and for -infinity; NaN for NaN.
ML_HD float exp2_below(float x) {
  const float whole = __builtin_rintf(x < -126.0f ? -126.0f : x);
  const float part = x - whole;  // in [-0.5, 0.5]; then the Taylor polynomial of 2^part
  float power = 1.5403530e-4f;
  power = power * part + 1.3333558e-3f;
  power = power * part + 9.6181291e-3f;
  power = power * part + 5.5504109e-2f;
  power = power * part + 2.4022651e-1f;
  power = power * part + 6.9314718e-1f;
  power = power * part + 1.0f;
  const float scaled = power * float_of(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
  return x < -126.0f ? 0.0f : scaled;
}

ML_HD double exp2_below(double x) { return ::exp2(x); }

}  // namespace ml
