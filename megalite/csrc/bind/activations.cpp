#include "activations.h"

#include <optional>
#include <vector>

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using Maybe = std::optional<Tensor>;

Tensor glu(Tensor given, int64_t activation) {
  const Tensor gate_up = ml::contiguous(given);
  const int64_t rows = ml::rows_of(gate_up), columns = ml::columns_of(gate_up);
  STD_TORCH_CHECK(
      gate_up.dim() > 0 && columns % 2 == 0, "megalite: gate_up must have an even number of columns, not ", columns);
  std::vector<int64_t> sizes(gate_up.sizes().begin(), gate_up.sizes().end());
  sizes.back() = columns / 2;
  Tensor out = torch::stable::new_empty(gate_up, {sizes.data(), sizes.size()});
  ML_CALL(
      gate_up, megalite_glu, gate_up.const_data_ptr(), out.mutable_data_ptr(), rows, columns / 2,
      static_cast<int>(activation), ml::dtype_of(gate_up));
  return out;
}

Tensor glu_backward(Tensor given_grad, Tensor given, int64_t activation) {
  const Tensor grad = ml::contiguous(given_grad), gate_up = ml::contiguous(given);
  const int64_t rows = ml::rows_of(gate_up), columns = ml::columns_of(gate_up);
  ml::check_same_type(gate_up, grad, "grad");
  ml::check_size(grad, rows * (columns / 2), "grad");
  Tensor gate_up_grad = ml::empty_like(gate_up);
  ML_CALL(
      gate_up, megalite_glu_backward, grad.const_data_ptr(), gate_up.const_data_ptr(),
      gate_up_grad.mutable_data_ptr(), rows, columns / 2, static_cast<int>(activation), ml::dtype_of(gate_up));
  return gate_up_grad;
}

// Returns a contiguous `bias`, checked against the rows to which it is added.
Maybe bias_of(const Tensor& inputs, const Maybe& bias) {
  if (!bias.has_value()) return std::nullopt;
  ml::check_same_type(inputs, *bias, "bias");
  ml::check_size(*bias, ml::columns_of(inputs), "bias");
  return ml::contiguous(*bias);
}

const void* data_or_null(const Maybe& tensor) { return tensor.has_value() ? tensor->const_data_ptr() : nullptr; }

Tensor bias_gelu(Tensor given, Maybe given_bias, int64_t activation) {
  const Tensor inputs = ml::contiguous(given);
  const Maybe bias = bias_of(inputs, given_bias);
  Tensor out = ml::empty_like(inputs);
  ML_CALL(
      inputs, megalite_bias_gelu, inputs.const_data_ptr(), data_or_null(bias), out.mutable_data_ptr(),
      ml::rows_of(inputs), ml::columns_of(inputs), static_cast<int>(activation), ml::dtype_of(inputs));
  return out;
}

// Without a bias, its gradient has no elements.
std::tuple<Tensor, Tensor> bias_gelu_backward(
    Tensor given_grad, Tensor given, Maybe given_bias, int64_t activation) {
  const Tensor grad = ml::contiguous(given_grad), inputs = ml::contiguous(given);
  const Maybe bias = bias_of(inputs, given_bias);
  const int64_t rows = ml::rows_of(inputs), features = ml::columns_of(inputs);
  ml::check_same_type(inputs, grad, "grad");
  ml::check_size(grad, inputs.numel(), "grad");
  Tensor inputs_grad = ml::empty_like(inputs);
  Tensor bias_grad = ml::new_empty(inputs, {bias.has_value() ? features : 0});
  Tensor partials = ml::new_empty(
      inputs, {bias.has_value() ? megalite_bias_blocks(rows) : 0, features}, ml::wide_type(inputs));
  ML_CALL(
      inputs, megalite_bias_gelu_backward, grad.const_data_ptr(), inputs.const_data_ptr(), data_or_null(bias),
      inputs_grad.mutable_data_ptr(), bias_grad.mutable_data_ptr(), partials.mutable_data_ptr(), rows, features,
      static_cast<int>(activation), ml::dtype_of(inputs));
  return {inputs_grad, bias_grad};
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("glu", TORCH_BOX(&glu));
  m.impl("glu_backward", TORCH_BOX(&glu_backward));
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def("glu(Tensor gate_up, int activation) -> Tensor");
  m.def("glu_backward(Tensor grad, Tensor gate_up, int activation) -> Tensor gate_up_grad");
  m.def("bias_gelu(Tensor inputs, Tensor? bias, int activation) -> Tensor");
  m.def(
      "bias_gelu_backward(Tensor grad, Tensor inputs, Tensor? bias, int activation) -> "
      "(Tensor inputs_grad, Tensor bias_grad)");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { implement(m); }

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) { implement(m); }
#endif
