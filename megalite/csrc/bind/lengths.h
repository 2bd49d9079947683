// Checks of the lengths of slots of a key-value cache, shared by the operators of a decode step.
#pragma once

#include "bind/tensor.h"

namespace ml {

// Returns contiguous lengths [rows] of slots with room for `room` tokens, after checking that each fits another token
// behind `prefix` virtual ones.
inline Tensor checked_lengths(const Tensor& given, int64_t rows, int64_t prefix, int64_t room) {
  STD_TORCH_CHECK(
      given.scalar_type() == torch::headeronly::ScalarType::Long, "megalite: the lengths must be int64");
  check_size(given, rows, "lengths");
  const Tensor lengths = ml::contiguous(given);
  const auto* each = static_cast<const int64_t*>(lengths.const_data_ptr());
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(
        each[row] >= 0 && prefix + each[row] < room, "megalite: slot ", row, " holds ", each[row],
        " tokens behind a prefix of ", prefix, " and has room for ", room);
  }
  return lengths;
}

}  // namespace ml
