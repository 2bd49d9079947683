// e^x for x <= 0, for softmax and activations. On the host without calls and branches, so that compilers vectorise
// loops over it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/scalar.h"

namespace ml {

// Error at most 2 units in the last place; results below the smallest normal number and e^-infinity are 0; NaN gives
// NaN. On the host: Cody and Waite's reduction (1980) to |rest| <= ln(2) / 2 and a minimax polynomial of degree 6.
// Explicit fma keeps the compiler from merging the two parts of ln(2) by reassociation.
ML_HD float exp_nonpositive(float x) {
#ifdef __CUDA_ARCH__
  return expf(x);
#else
  x = x < -88.0f ? -88.0f : x;
  // Adding 1.5 * 2^23 + 127 rounds to an integer and leaves the biased exponent, power + 127, in the lowest bits.
  const float shifted = std::fma(x, 1.44269504f, 12583039.0f);
  const float power = shifted - 12583039.0f;
  const float rest = std::fma(power, -1.42860677e-6f, std::fma(power, -0.693145752f, x));
  float series = 0.00138146046f;
  series = std::fma(series, rest, 0.00836871192f);
  series = std::fma(series, rest, 0.041668389f);
  series = std::fma(series, rest, 0.166665211f);
  series = std::fma(series, rest, 0.49999994f);
  const float value = std::fma(std::fma(series, rest, 1.0f), rest, 1.0f);
  // At x = -88 the power is -127, so the shifted exponent bits are those of 0.
  return value * float_of(bits_of(shifted) << 23);
#endif
}

ML_HD double exp_nonpositive(double x) {
#ifdef __CUDA_ARCH__
  return exp(x);
#else
  constexpr double kLowest = -709.0;  // here the power is -1023, so the exponent bits are those of 0
  const double bounded = x < kLowest ? kLowest : x;
  const int32_t power = static_cast<int32_t>(bounded * 1.4426950408889634 - 0.5);
  const double n = power;
  const double rest = std::fma(n, -1.42860682030941723212e-6, std::fma(n, -6.93145751953125e-1, bounded));
  // Taylor series up to x^13 / 13!: the remainder is below 5e-18 for |rest| <= ln 2 / 2.
  double sum = 1.6059043836821613e-10;
  sum = sum * rest + 2.08767569878681e-9;
  sum = sum * rest + 2.505210838544172e-8;
  sum = sum * rest + 2.755731922398589e-7;
  sum = sum * rest + 2.7557319223985893e-6;
  sum = sum * rest + 2.48015873015873e-5;
  sum = sum * rest + 1.984126984126984e-4;
  sum = sum * rest + 1.388888888888889e-3;
  sum = sum * rest + 8.333333333333333e-3;
  sum = sum * rest + 4.1666666666666664e-2;
  sum = sum * rest + 1.6666666666666666e-1;
  sum = sum * rest + 0.5;
  sum = sum * rest * rest + rest + 1.0;
  const uint64_t bits = static_cast<uint64_t>(static_cast<int64_t>(power) + 1023) << 52;
  double scale;
  memcpy(&scale, &bits, sizeof scale);
  return sum * scale;
#endif
}

}  // namespace ml
