#include "cross_entropy.h"

#include "bind/tensor.h"

namespace {

using ml::Tensor;

void check_device(const Tensor& tensor, const Tensor& logits, const char* what) {
  STD_TORCH_CHECK(
      tensor.is_cuda() == logits.is_cuda() && tensor.get_device_index() == logits.get_device_index(), "megalite: ",
      what, " is on another device");
}

// Requires contiguous logits [rows, columns]: a copy would be large, and one operator overwrites them.
const int64_t* checked_labels(const Tensor& labels, const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), "megalite: logits must be contiguous [rows, columns]");
  STD_TORCH_CHECK(
      labels.scalar_type() == torch::headeronly::ScalarType::Long && labels.is_contiguous(),
      "megalite: labels must be contiguous int64");
  check_device(labels, logits, "labels");
  ml::check_size(labels, logits.size(0), "labels");
  return static_cast<const int64_t*>(labels.const_data_ptr());
}

// Returns the data of [rows] values of type Wide<T>, after checks.
const void* checked(const Tensor& values, const Tensor& logits, const char* what) {
  STD_TORCH_CHECK(
      values.scalar_type() == ml::wide_type(logits) && values.is_contiguous(), "megalite: ", what,
      " must be contiguous, and float32 (float64 for float64 logits)");
  check_device(values, logits, what);
  ml::check_size(values, logits.size(0), what);
  return values.const_data_ptr();
}

Tensor statistics(Tensor logits, Tensor labels, Tensor weights, int64_t first_id, double on_label, double uniform) {
  const int dtype = ml::dtype_of(logits);
  const int64_t* ids = checked_labels(labels, logits);
  const void* of_rows = checked(weights, logits, "weights");
  Tensor made = ml::new_empty(logits, {3, logits.size(0)}, ml::wide_type(logits));
  ML_CALL(
      logits, megalite_cross_entropy_statistics, logits.const_data_ptr(), ids, of_rows, made.mutable_data_ptr(),
      logits.size(0), logits.size(1), first_id, on_label, uniform, dtype);
  return made;
}

void gradient(
    Tensor logits, Tensor labels, Tensor maximum, Tensor factor, Tensor weights, int64_t first_id, double on_label,
    double uniform) {
  const int dtype = ml::dtype_of(logits);
  const int64_t* ids = checked_labels(labels, logits);
  ML_CALL(
      logits, megalite_cross_entropy_gradient, logits.mutable_data_ptr(), ids, checked(maximum, logits, "maximum"),
      checked(factor, logits, "factor"), checked(weights, logits, "weights"), logits.size(0), logits.size(1), first_id,
      on_label, uniform, dtype);
}

Tensor losses(
    Tensor logits, Tensor labels, Tensor weights, int64_t first_id, double on_label, double uniform, double z_loss) {
  const int dtype = ml::dtype_of(logits);
  STD_TORCH_CHECK(logits.scalar_type() == ml::wide_type(logits), "megalite: logits must be float32 or float64");
  const int64_t* ids = checked_labels(labels, logits);
  const void* of_rows = checked(weights, logits, "weights");
  Tensor made = ml::new_empty(logits, {logits.size(0)}, ml::wide_type(logits));
  ml::check(
      megalite_cross_entropy_losses_cpu(
          logits.mutable_data_ptr(), ids, of_rows, made.mutable_data_ptr(), logits.size(0), logits.size(1), first_id,
          on_label, uniform, z_loss, dtype),
      "megalite_cross_entropy_losses");
  return made;
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("cross_entropy_statistics", TORCH_BOX(&statistics));
  m.impl("cross_entropy_gradient_", TORCH_BOX(&gradient));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "cross_entropy_statistics(Tensor logits, Tensor labels, Tensor weights, int first_id, float on_label, "
      "float uniform) -> Tensor");
  m.def(
      "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor maximum, Tensor factor, Tensor weights, "
      "int first_id, float on_label, float uniform) -> ()");
  m.def(
      "cross_entropy_losses_(Tensor(a!) logits, Tensor labels, Tensor weights, int first_id, float on_label, "
      "float uniform, float z_loss) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) {
  implement(m);
  m.impl("cross_entropy_losses_", TORCH_BOX(&losses));
}

#ifdef MEGALITE_CUDA
STABLE_TORCH_LIBRARY_IMPL(megalite, CUDA, m) { implement(m); }
#endif
