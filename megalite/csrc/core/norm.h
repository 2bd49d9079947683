// What normalisation computes of one value, given its row's statistics. Formulas of Zhang and Sennrich 2019 (root mean
// square, whose mean is 0 here) and Ba et al. 2016 (layer norm).
#pragma once

#include "core/scalar.h"

namespace ml {

template <typename W>
ML_HD W normalised(W x, W mean, W inverse) {
  return (x - mean) * inverse;
}

// The gradient of a row's value x, from grad * weight; `average` is the row's mean of these (0 for root mean square),
// `projection` its mean of these times the normalised x: the parts that normalisation removes.
template <typename W>
ML_HD W input_grad(W weighted_grad, W normalised_x, W average, W projection, W inverse) {
  return inverse * (weighted_grad - average - normalised_x * projection);
}

}  // namespace ml
