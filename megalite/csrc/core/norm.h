// Normalisation of one value and its gradient, given the row's statistics: RMSNorm (Zhang and Sennrich 2019), with mean
// 0, and LayerNorm (Ba et al. 2016).
#pragma once

#include "core/scalar.h"

namespace ml {

template <typename W>
ML_HD W normalised(W x, W mean, W inverse) {
  return (x - mean) * inverse;
}

// The gradient of one value x of a row. average: the row's mean of grad * weight (0 for RMSNorm). projection: the row's
// mean of grad * weight * normalised x. Normalisation removes both components.
template <typename W>
ML_HD W input_grad(W weighted_grad, W normalised_x, W average, W projection, W inverse) {
  return inverse * (weighted_grad - average - normalised_x * projection);
}

}  // namespace ml
