#include "norms.h"

#include <optional>

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using Maybe = std::optional<Tensor>;

const void* data(const Maybe& tensor) { return tensor.has_value() ? tensor->const_data_ptr() : nullptr; }

// Returns a contiguous `tensor`, after checking that it has the dtype of `x` and this number of elements.
Tensor checked(const Tensor& tensor, const Tensor& x, int64_t elements, const char* what) {
  ml::check_same_type(x, tensor, what);
  ml::check_size(tensor, elements, what);
  return ml::contiguous(tensor);
}

Maybe checked(const Maybe& tensor, const Tensor& x, int64_t elements, const char* what) {
  return tensor.has_value() ? Maybe(checked(*tensor, x, elements, what)) : std::nullopt;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> norm(
    Tensor given, Maybe given_residual, Tensor given_weight, Maybe given_bias, double eps) {
  const Tensor x = ml::contiguous(given);
  const int dtype = ml::dtype_of(x);
  const int64_t rows = ml::rows_of(x), columns = ml::columns_of(x);
  const Tensor weight = checked(given_weight, x, columns, "weight");
  const Maybe residual = checked(given_residual, x, x.numel(), "residual");
  const Maybe bias = checked(given_bias, x, columns, "bias");
  const auto wide = ml::wide_type(x);
  Tensor sum = residual ? ml::empty_like(x) : ml::new_empty(x, {0}), output = ml::empty_like(x);
  Tensor mean = ml::new_empty(x, {bias ? rows : 0}, wide), inverse = ml::new_empty(x, {rows}, wide);
  ML_CALL(
      x, megalite_norm_forward, x.const_data_ptr(), data(residual), weight.const_data_ptr(), data(bias),
      residual ? sum.mutable_data_ptr() : nullptr, output.mutable_data_ptr(),
      bias ? mean.mutable_data_ptr() : nullptr, inverse.mutable_data_ptr(), rows, columns, eps, dtype);
  return {sum, output, mean, inverse};
}

// Returns a contiguous statistic [rows] of Wide<T>, after checks.
Tensor statistic(const Tensor& tensor, const Tensor& x, int64_t rows, const char* what) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ml::wide_type(x), "megalite: ", what,
      " has another dtype than float32 (float64 for a float64 input)");
  ml::check_same_device(x, tensor, what);
  ml::check_size(tensor, rows, what);
  return ml::contiguous(tensor);
}

struct Gradients {
  Tensor x, weight, bias;
};

// Computes the gradient of x if `given_weight` is given, and those of weight and bias if `of_weight`; gradients that
// are not computed have no elements.
Gradients gradients(
    const Tensor& given_grad, const Maybe& given_sum_grad, const Tensor& given, const Maybe& given_weight,
    const Maybe& given_mean, const Tensor& given_inverse, bool of_weight) {
  const Tensor x = ml::contiguous(given);
  const int64_t rows = ml::rows_of(x), columns = ml::columns_of(x);
  const Tensor grad = checked(given_grad, x, x.numel(), "grad");
  const Maybe sum_grad = checked(given_sum_grad, x, x.numel(), "sum_grad");
  const Maybe weight = checked(given_weight, x, columns, "weight");
  const Tensor inverse = statistic(given_inverse, x, rows, "inverse");
  Maybe mean;
  if (given_mean) mean.emplace(statistic(*given_mean, x, rows, "mean"));
  const int64_t sums = mean ? 2 : 1, summed = of_weight ? columns : 0;
  int64_t blocks = megalite_norm_blocks_cpu(rows, columns);
#ifdef MEGALITE_CUDA
  if (x.is_cuda()) blocks = megalite_norm_blocks_cuda(rows, columns);
#endif
  Gradients made{
      weight ? ml::empty_like(x) : ml::new_empty(x, {0}), ml::new_empty(x, {summed}),
      ml::new_empty(x, {mean ? summed : 0})};
  Tensor partials = ml::new_empty(x, {blocks, sums, summed}, ml::wide_type(x));
  ML_CALL(
      x, megalite_norm_backward, grad.const_data_ptr(), data(sum_grad), x.const_data_ptr(), data(weight), data(mean),
      inverse.const_data_ptr(), weight ? made.x.mutable_data_ptr() : nullptr,
      of_weight ? made.weight.mutable_data_ptr() : nullptr,
      of_weight && mean ? made.bias.mutable_data_ptr() : nullptr,
      partials.mutable_data_ptr(), blocks, rows, columns, ml::dtype_of(x));
  return made;
}

std::tuple<Tensor, Tensor, Tensor> norm_backward(
    Tensor grad, Maybe sum_grad, Tensor x, Tensor weight, Maybe mean, Tensor inverse) {
  Gradients made = gradients(grad, sum_grad, x, weight, mean, inverse, true);
  return {made.x, made.weight, made.bias};
}

Tensor norm_input_grad(Tensor grad, Maybe sum_grad, Tensor x, Tensor weight, Maybe mean, Tensor inverse) {
  return gradients(grad, sum_grad, x, weight, mean, inverse, false).x;
}

std::tuple<Tensor, Tensor> norm_weight_grad(Tensor grad, Tensor x, Maybe mean, Tensor inverse) {
  Gradients made = gradients(grad, std::nullopt, x, std::nullopt, mean, inverse, true);
  return {made.weight, made.bias};
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("norm", TORCH_BOX(&norm));
  m.impl("norm_backward", TORCH_BOX(&norm_backward));
  m.impl("norm_input_grad", TORCH_BOX(&norm_input_grad));
  m.impl("norm_weight_grad", TORCH_BOX(&norm_weight_grad));
}

}  // namespace

// LayerNorm if there is a bias, else RMSNorm. Outputs that do not exist have no elements: sum without a residual, mean
// and bias_grad of RMSNorm.
STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps) -> "
      "(Tensor sum, Tensor output, Tensor mean, Tensor inverse)");
  m.def(
      "norm_backward(Tensor grad, Tensor? sum_grad, Tensor x, Tensor weight, Tensor? mean, Tensor inverse) -> "
      "(Tensor x_grad, Tensor weight_grad, Tensor bias_grad)");
  m.def(
      "norm_input_grad(Tensor grad, Tensor? sum_grad, Tensor x, Tensor weight, Tensor? mean, Tensor inverse) -> "
      "Tensor x_grad");
  m.def(
      "norm_weight_grad(Tensor grad, Tensor x, Tensor? mean, Tensor inverse) -> "
      "(Tensor weight_grad, Tensor bias_grad)");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { implement(m); }

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) { implement(m); }
#endif
