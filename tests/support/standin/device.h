// The stand-in's tensors, seen as CPU tensors over the same memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace standin {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// Returns a CPU tensor over the bytes of a device tensor, which it keeps alive.
at::Tensor host_view(const at::Tensor& tensor);

void register_device();

}  // namespace standin
