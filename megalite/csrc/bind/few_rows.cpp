#include "few_rows.h"

#include <optional>
#include <vector>

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using torch::headeronly::ScalarType;

// inputs [..., in], weight [out, in], or int8 with scale of out values -> [..., out]
Tensor few_rows_linear(Tensor given, Tensor given_weight, std::optional<Tensor> given_scale) {
  const Tensor inputs = ml::contiguous(given), weight = ml::contiguous(given_weight);
  const int64_t in = ml::columns_of(inputs), rows = ml::rows_of(inputs);
  STD_TORCH_CHECK(
      weight.dim() == 2 && weight.size(1) == in, "megalite: the weight must be [out, ", in, "] for these inputs");
  const int64_t out = weight.size(0);
  const bool int8 = weight.scalar_type() == ScalarType::Char;
  const float* scales = nullptr;
  Tensor scale = weight;
  if (int8) {
    STD_TORCH_CHECK(given_scale.has_value(), "megalite: an int8 weight needs a scale");
    scale = ml::contiguous(*given_scale);
    STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Float, "megalite: the scale must be float32");
    ml::check_size(scale, out, "scale");
    ml::check_same_device(inputs, scale, "scale");
    ml::check_same_device(inputs, weight, "weight");
    scales = static_cast<const float*>(scale.const_data_ptr());
  } else {
    ml::check_same_type(inputs, weight, "weight");
  }
  std::vector<int64_t> sizes(inputs.sizes().begin(), inputs.sizes().end());
  sizes.back() = out;
  Tensor output = torch::stable::new_empty(inputs, {sizes.data(), sizes.size()});
  ml::check(
      megalite_few_rows_linear_cpu(
          inputs.const_data_ptr(), weight.const_data_ptr(), scales, output.mutable_data_ptr(), rows, out, in, int8,
          ml::dtype_of(inputs)),
      "megalite_few_rows_linear");
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def("few_rows_linear(Tensor inputs, Tensor weight, Tensor? scale=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { m.impl("few_rows_linear", TORCH_BOX(&few_rows_linear)); }
