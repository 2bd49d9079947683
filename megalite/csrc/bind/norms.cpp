#include "norms.h"

#include <optional>

#include "bind/tensor.h"

namespace {

using ml::Tensor;
using Maybe = std::optional<Tensor>;

const void* data(const Maybe& tensor) { return tensor.has_value() ? tensor->const_data_ptr() : nullptr; }

struct Forward {
  Tensor sum, output, mean, inverse;
};

// mean stays untouched, of no size, for the root-mean-square norm; sum likewise where nothing is added.
Forward forward(const Tensor& given, const Maybe& other, const Tensor& weight, const Maybe& bias, double eps) {
  const Tensor x = ml::contiguous(given), scale = ml::contiguous(weight);
  const int64_t rows = ml::rows_of(x), columns = ml::columns_of(x);
  Maybe residual, shift;
  ml::check_same_type(x, scale, "weight");
  ml::check_size(scale, columns, "weight");
  if (other.has_value()) {
    residual = ml::contiguous(*other);
    ml::check_same_type(x, *residual, "residual");
    ml::check_size(*residual, x.numel(), "residual");
  }
  if (bias.has_value()) {
    shift = ml::contiguous(*bias);
    ml::check_same_type(x, *shift, "bias");
    ml::check_size(*shift, columns, "bias");
  }
  const auto wide = ml::wide_type(x);
  Forward made{
      residual ? ml::empty_like(x) : ml::new_empty(x, {0}), ml::empty_like(x),
      ml::new_empty(x, {shift ? rows : 0}, wide), ml::new_empty(x, {rows}, wide)};
  void* sum = residual ? made.sum.mutable_data_ptr() : nullptr;
  void* mean = shift ? made.mean.mutable_data_ptr() : nullptr;
  const int code = megalite_norm_forward_cpu(
      x.const_data_ptr(), data(residual), scale.const_data_ptr(), data(shift), sum, made.output.mutable_data_ptr(),
      mean, made.inverse.mutable_data_ptr(), rows, columns, eps, ml::dtype_of(x));
  ml::check(code, "norm_forward");
  return made;
}

std::tuple<Tensor, Tensor> rms_norm(Tensor x, Tensor weight, double eps) {
  Forward made = forward(x, std::nullopt, weight, std::nullopt, eps);
  return {made.output, made.inverse};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  Forward made = forward(x, residual, weight, std::nullopt, eps);
  return {made.sum, made.output, made.inverse};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm(Tensor x, Tensor weight, Tensor bias, double eps) {
  Forward made = forward(x, std::nullopt, weight, bias, eps);
  return {made.output, made.mean, made.inverse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(
    Tensor x, Tensor residual, Tensor weight, Tensor bias, double eps) {
  Forward made = forward(x, residual, weight, bias, eps);
  return {made.sum, made.output, made.mean, made.inverse};
}

struct Backward {
  Tensor x, weight, bias;
};

// What is asked for with `of_x` and `of_weight`; mean is given for layer norms.
Backward backward(
    const Tensor& output_grad, const Maybe& sum_grad, const Tensor& given, const Tensor& weight, const Maybe& mean,
    const Tensor& inverse, bool of_x, bool of_weight) {
  const Tensor x = ml::contiguous(given), grad = ml::contiguous(output_grad), scale = ml::contiguous(weight);
  const int64_t rows = ml::rows_of(x), columns = ml::columns_of(x);
  ml::check_same_type(x, grad, "grad");
  ml::check_size(grad, x.numel(), "grad");
  ml::check_same_type(x, scale, "weight");
  ml::check_size(scale, columns, "weight");
  ml::check_size(inverse, rows, "inverse");
  Maybe passed;
  if (sum_grad.has_value()) {
    passed = ml::contiguous(*sum_grad);
    ml::check_same_type(x, *passed, "sum_grad");
    ml::check_size(*passed, x.numel(), "sum_grad");
  }
  const int64_t sums = mean.has_value() ? 2 : 1, of_weights = of_weight ? columns : 0;
  const int64_t blocks = megalite_norm_blocks_cpu(rows);
  Backward made{
      of_x ? ml::empty_like(x) : ml::new_empty(x, {0}), ml::new_empty(x, {of_weights}),
      ml::new_empty(x, {mean.has_value() ? of_weights : 0})};
  Tensor partials = ml::new_empty(x, {blocks, sums, of_weights}, ml::wide_type(x));
  const int code = megalite_norm_backward_cpu(
      grad.const_data_ptr(), data(passed), x.const_data_ptr(), scale.const_data_ptr(), data(mean),
      inverse.const_data_ptr(), of_x ? made.x.mutable_data_ptr() : nullptr,
      of_weight ? made.weight.mutable_data_ptr() : nullptr, of_weight ? made.bias.mutable_data_ptr() : nullptr,
      partials.mutable_data_ptr(), rows, columns, ml::dtype_of(x));
  ml::check(code, "norm_backward");
  return made;
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    Tensor grad, Maybe sum_grad, Tensor x, Tensor weight, Tensor inverse) {
  Backward made = backward(grad, sum_grad, x, weight, std::nullopt, inverse, true, true);
  return {made.x, made.weight};
}

Tensor rms_norm_input_grad(Tensor grad, Maybe sum_grad, Tensor x, Tensor weight, Tensor inverse) {
  return backward(grad, sum_grad, x, weight, std::nullopt, inverse, true, false).x;
}

Tensor rms_norm_weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor inverse) {
  return backward(grad, std::nullopt, x, weight, std::nullopt, inverse, false, true).weight;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    Tensor grad, Maybe sum_grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse) {
  Backward made = backward(grad, sum_grad, x, weight, mean, inverse, true, true);
  return {made.x, made.weight, made.bias};
}

Tensor layer_norm_input_grad(
    Tensor grad, Maybe sum_grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse) {
  return backward(grad, sum_grad, x, weight, mean, inverse, true, false).x;
}

std::tuple<Tensor, Tensor> layer_norm_weight_grad(
    Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse) {
  Backward made = backward(grad, std::nullopt, x, weight, mean, inverse, false, true);
  return {made.weight, made.bias};
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  m.impl("rms_norm_input_grad", TORCH_BOX(&rms_norm_input_grad));
  m.impl("rms_norm_weight_grad", TORCH_BOX(&rms_norm_weight_grad));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  m.impl("layer_norm_input_grad", TORCH_BOX(&layer_norm_input_grad));
  m.impl("layer_norm_weight_grad", TORCH_BOX(&layer_norm_weight_grad));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor output, Tensor inverse)");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> "
      "(Tensor sum, Tensor output, Tensor inverse)");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor output, Tensor mean, Tensor inverse)");
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> "
      "(Tensor sum, Tensor output, Tensor mean, Tensor inverse)");
  m.def(
      "rms_norm_backward(Tensor grad, Tensor? sum_grad, Tensor x, Tensor weight, Tensor inverse) -> "
      "(Tensor x_grad, Tensor weight_grad)");
  m.def(
      "rms_norm_input_grad(Tensor grad, Tensor? sum_grad, Tensor x, Tensor weight, Tensor inverse) -> Tensor x_grad");
  m.def("rms_norm_weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor inverse) -> Tensor weight_grad");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor? sum_grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse) -> "
      "(Tensor x_grad, Tensor weight_grad, Tensor bias_grad)");
  m.def(
      "layer_norm_input_grad(Tensor grad, Tensor? sum_grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse) -> "
      "Tensor x_grad");
  m.def(
      "layer_norm_weight_grad(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor inverse) -> "
      "(Tensor weight_grad, Tensor bias_grad)");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { implement(m); }
