// The exponential of a softmax: e^(logit - maximum).
#pragma once

#include "core/exp.h"

namespace ml {

// e^x for x <= 0; 0 for -infinity, NaN for NaN. On a GPU 2^(x log2 e), two instructions instead of expf's eight:
// rounding the product gives a relative error of up to |x| / 2^24, at most 2.2e-8 of a sum that contains e^0 = 1.
ML_HD float softmax_exp(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
  return power;
#else
  return exp_nonpositive(x);
#endif
}

ML_HD double softmax_exp(double x) { return exp_nonpositive(x); }

}  // namespace ml
