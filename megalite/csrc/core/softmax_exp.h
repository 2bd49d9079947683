// e^(logit - maximum), of which a softmax is made.
#pragma once

#include "core/exp.h"

namespace ml {

// e^x for x <= 0; 0 of -infinity, NaN of NaN. On a GPU 2^(x log2 e), two instructions where expf takes eight: the rounded
// product makes a relative error of up to |x| / 2^24, which in a sum beside e^0 is at most 2.2e-8.
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
