// The logistic function and the normal distribution, without branches, so that compilers vectorise loops over them.
#pragma once

#include <cmath>

#include "core/exp.h"
#include "core/scalar.h"

namespace ml {

ML_HD float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  return __fdividef(1.0f, x);
#else
  return 1.0f / x;
#endif
}

ML_HD double reciprocal(double x) { return 1.0 / x; }

template <typename W>
struct Logistic {
  W value, complement;
};

// 1 / (1 + exp(-x)) and its complement 1 / (1 + exp(x)), both without cancellation.
template <typename W>
ML_HD Logistic<W> logistic(W x) {
  const W small = exp_nonpositive(x < 0 ? x : -x);
  const W larger = reciprocal(1 + small), smaller = small * larger;
  return {x < 0 ? smaller : larger, x < 0 ? larger : smaller};
}

template <typename W>
struct Normal {
  W below, density;
};

// The cumulative normal distribution and its density. For |x| < 1, (cdf - 1/2) / x is a polynomial in x^2 (error 8e-9).
// For larger a = |x|, Mills' ratio times (a + 3.5) is a polynomial in (a - 3.5) / (a + 3.5) (error 8e-9 for a in
// [0, 14.5]), which keeps the relative accuracy of the lower tail.
ML_HD Normal<float> normal(float x) {
  float size = x < 0 ? -x : x;
  size = size > 16.0f ? 16.0f : size;
  const float square = size * size;
  const float lost = fmaf(size, size, -square);
  const float bell = exp_nonpositive(-0.5f * square) * (1.0f - 0.5f * lost);
  const float share = reciprocal(size + 3.5f);
  const float place = fmaf(-7.0f, share, 1.0f);
  float series = 1.10692978e-4f;
  series = fmaf(series, place, 4.21902369e-4f);
  series = fmaf(series, place, -4.94946318e-4f);
  series = fmaf(series, place, -3.17531475e-3f);
  series = fmaf(series, place, 6.49311673e-3f);
  series = fmaf(series, place, 1.74063798e-2f);
  series = fmaf(series, place, -1.16053037e-1f);
  series = fmaf(series, place, 3.15425038e-1f);
  series = fmaf(series, place, -5.65561771e-1f);
  series = fmaf(series, place, 7.44416058e-1f);
  const float tail = bell * (share * series);
  float near = 9.24480919e-5f;
  near = fmaf(near, square, -1.16531027e-3f);
  near = fmaf(near, square, 9.96414013e-3f);
  near = fmaf(near, square, -6.64887205e-2f);
  near = fmaf(near, square, 3.98942202e-1f);
  const float beyond = x < 0 ? tail : 1.0f - tail;
  return {size < 1.0f ? fmaf(near, x, 0.5f) : beyond, 0.39894228f * bell};
}

ML_HD Normal<double> normal(double x) {
  return {0.5 * erfc(-0.70710678118654752440 * x), 0.39894228040143267794 * exp(-0.5 * x * x)};
}

}  // namespace ml
