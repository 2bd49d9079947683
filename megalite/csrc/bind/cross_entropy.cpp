#include "cross_entropy.h"

#include "bind/tensor.h"

namespace {

using ml::Tensor;

// logits [rows, columns] are contiguous: they are large, and one of the operators writes over them.
void check(const Tensor& logits, const Tensor& labels) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), "megalite: logits must be contiguous rows and columns");
  STD_TORCH_CHECK(
      labels.scalar_type() == torch::headeronly::ScalarType::Long && labels.is_contiguous(),
      "megalite: labels must be contiguous int64");
  ml::check_size(labels, logits.size(0), "labels");
}

void check_row_values(const Tensor& values, const Tensor& logits, const char* what) {
  STD_TORCH_CHECK(
      values.scalar_type() == ml::wide_type(logits) && values.is_contiguous(),
      "megalite: ", what, " must be contiguous, float64 beside float64 logits, else float32");
  ml::check_size(values, logits.size(0), what);
}

Tensor statistics_of(const Tensor& logits, const Tensor& labels, const Tensor& weights) {
  check(logits, labels);
  check_row_values(weights, logits, "weights");
  return ml::new_empty(logits, {3, logits.size(0)}, ml::wide_type(logits));
}

Tensor statistics_cpu(
    Tensor logits, Tensor labels, Tensor weights, int64_t first_id, double on_label, double uniform) {
  Tensor made = statistics_of(logits, labels, weights);
  const int code = megalite_cross_entropy_statistics_cpu(
      logits.const_data_ptr(), static_cast<const int64_t*>(labels.const_data_ptr()), weights.const_data_ptr(),
      made.mutable_data_ptr(), logits.size(0), logits.size(1), first_id, on_label, uniform, ml::dtype_of(logits));
  ml::check(code, "cross_entropy_statistics");
  return made;
}

void check_all(
    const Tensor& logits, const Tensor& labels, const Tensor& maximum, const Tensor& factor, const Tensor& weights) {
  check(logits, labels);
  check_row_values(maximum, logits, "maximum");
  check_row_values(factor, logits, "factor");
  check_row_values(weights, logits, "weights");
}

void gradient_cpu(
    Tensor logits, Tensor labels, Tensor maximum, Tensor factor, Tensor weights, int64_t first_id, double on_label,
    double uniform) {
  check_all(logits, labels, maximum, factor, weights);
  const int code = megalite_cross_entropy_gradient_cpu(
      logits.mutable_data_ptr(), static_cast<const int64_t*>(labels.const_data_ptr()), maximum.const_data_ptr(),
      factor.const_data_ptr(), weights.const_data_ptr(), logits.size(0), logits.size(1), first_id, on_label, uniform,
      ml::dtype_of(logits));
  ml::check(code, "cross_entropy_gradient_");
}

#ifdef MEGALITE_CUDA
Tensor statistics_cuda(
    Tensor logits, Tensor labels, Tensor weights, int64_t first_id, double on_label, double uniform) {
  Tensor made = statistics_of(logits, labels, weights);
  const ml::OnDevice device(logits);
  const int code = megalite_cross_entropy_statistics_cuda(
      logits.const_data_ptr(), static_cast<const int64_t*>(labels.const_data_ptr()), weights.const_data_ptr(),
      made.mutable_data_ptr(), logits.size(0), logits.size(1), first_id, on_label, uniform, ml::dtype_of(logits),
      device.stream());
  ml::check(code, "cross_entropy_statistics");
  return made;
}

void gradient_cuda(
    Tensor logits, Tensor labels, Tensor maximum, Tensor factor, Tensor weights, int64_t first_id, double on_label,
    double uniform) {
  check_all(logits, labels, maximum, factor, weights);
  const ml::OnDevice device(logits);
  const int code = megalite_cross_entropy_gradient_cuda(
      logits.mutable_data_ptr(), static_cast<const int64_t*>(labels.const_data_ptr()), maximum.const_data_ptr(),
      factor.const_data_ptr(), weights.const_data_ptr(), logits.size(0), logits.size(1), first_id, on_label, uniform,
      ml::dtype_of(logits), device.stream());
  ml::check(code, "cross_entropy_gradient_");
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "cross_entropy_statistics(Tensor logits, Tensor labels, Tensor weights, int first_id, float on_label, "
      "float uniform) -> Tensor");
  m.def(
      "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor maximum, Tensor factor, Tensor weights, "
      "int first_id, float on_label, float uniform) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&statistics_cpu));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&gradient_cpu));
}

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&statistics_cuda));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&gradient_cuda));
}
#endif
