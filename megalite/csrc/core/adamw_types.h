// The type combinations that the optimizer's operators support, for host and device.
#pragma once

#include "core/scalar.h"

namespace ml {

template <typename T>
struct TypeTag {
  using type = T;
};
struct NoCopy {};

// Calls visit(TypeTag<weight>, TypeTag<gradient>); returns -1 for unsupported combinations.
template <typename Visit>
int visit_weight_and_gradient(int weight_dtype, int gradient_dtype, const Visit& visit) {
  if (weight_dtype == kFloat64 && gradient_dtype == kFloat64) return visit(TypeTag<double>{}, TypeTag<double>{});
  if (weight_dtype != kFloat32) return -1;
  switch (gradient_dtype) {
    case kFloat32: return visit(TypeTag<float>{}, TypeTag<float>{});
    case kBFloat16: return visit(TypeTag<float>{}, TypeTag<bf16>{});
    case kFloat16: return visit(TypeTag<float>{}, TypeTag<fp16>{});
    default: return -1;
  }
}

// Calls visit(TypeTag<copy>), or visit(TypeTag<NoCopy>) if there are no copies; copy_dtype is then ignored.
template <typename Visit>
int visit_copy(bool copies, int copy_dtype, const Visit& visit) {
  if (!copies) return visit(TypeTag<NoCopy>{});
  switch (copy_dtype) {
    case kBFloat16: return visit(TypeTag<bf16>{});
    case kFloat16: return visit(TypeTag<fp16>{});
    default: return -1;
  }
}

template <typename Visit>
int visit_type(int dtype, const Visit& visit) {
  switch (dtype) {
    case kFloat32: return visit(TypeTag<float>{});
    case kFloat64: return visit(TypeTag<double>{});
    case kBFloat16: return visit(TypeTag<bf16>{});
    case kFloat16: return visit(TypeTag<fp16>{});
    default: return -1;
  }
}

}  // namespace ml
