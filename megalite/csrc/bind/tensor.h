// The bindings' only use of torch, through its stable ABI, so that one library serves every torch from 2.11 on.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "core/scalar.h"

#ifdef MEGALITE_CUDA
extern "C" const char* cudaGetErrorString(int error);  // from the CUDA runtime, declared here to avoid its headers
#endif

namespace ml {

using Tensor = torch::stable::Tensor;

inline int dtype_of(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return kFloat32;
    case ScalarType::Double:
      return kFloat64;
    case ScalarType::BFloat16:
      return kBFloat16;
    case ScalarType::Half:
      return kFloat16;
    default:
      STD_TORCH_CHECK(false, "megalite: the dtype must be float32, float64, bfloat16 or float16");
  }
}

// The scalar type of Wide<T> for the tensor's type T.
inline torch::headeronly::ScalarType wide_type(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline Tensor contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline Tensor empty_like(const Tensor& tensor) { return torch::stable::empty_like(tensor); }

// Returns an uninitialised tensor on the device of `tensor`, with its dtype unless `dtype` is given.
inline Tensor new_empty(
    const Tensor& tensor, std::initializer_list<int64_t> sizes,
    std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(tensor, {sizes.begin(), sizes.size()}, dtype);
}

// Rows and columns of a tensor viewed as [rows, last dim].
inline int64_t columns_of(const Tensor& tensor) { return tensor.dim() == 0 ? 1 : tensor.size(tensor.dim() - 1); }

inline int64_t rows_of(const Tensor& tensor) {
  const int64_t columns = columns_of(tensor);
  return columns == 0 ? 0 : tensor.numel() / columns;
}

inline void check_same_device(const Tensor& one, const Tensor& other, const char* what) {
  STD_TORCH_CHECK(
      one.is_cuda() == other.is_cuda() && one.get_device_index() == other.get_device_index(),
      "megalite: ", what, " is on another device");
}

inline void check_same_type(const Tensor& one, const Tensor& other, const char* what) {
  STD_TORCH_CHECK(one.scalar_type() == other.scalar_type(), "megalite: ", what, " has another dtype");
  check_same_device(one, other, what);
}

inline void check_size(const Tensor& tensor, int64_t elements, const char* what) {
  STD_TORCH_CHECK(
      tensor.numel() == elements, "megalite: ", what, " has ", tensor.numel(), " elements, not ", elements);
}

// Throws if a C function returned an error code.
inline void check(int code, const char* entry) {
  STD_TORCH_CHECK(code != kUnsupported, "megalite: ", entry, " has no kernel for this dtype or size");
#ifdef MEGALITE_CUDA
  STD_TORCH_CHECK(
      code == 0, "megalite: ", entry, " failed on the GPU: ", cudaGetErrorString(code), " (CUDA error ", code,
      "); model.kernels = \"reference\" computes without it");
#else
  STD_TORCH_CHECK(code == 0, "megalite: ", entry, " failed with code ", code);
#endif
}

// Device guard: makes the tensor's device current for a scope; stream() is the device's current stream.
class __attribute__((visibility("hidden"))) OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor)
      : guard_(tensor.get_device_index()), stream_(current_stream(tensor.get_device_index())) {}

  void* stream() const { return stream_; }

 private:
  using StreamOf = AOTITorchError (*)(int32_t device, void** stream);

  // Looked up on first use, because torch's CPU build lacks the function and this library must load there too.
  static void* current_stream(int32_t device) {
    static const StreamOf stream_of = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      return reinterpret_cast<StreamOf>(
          dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    }();
    STD_TORCH_CHECK(stream_of != nullptr, "megalite: this torch has no CUDA streams");
    void* stream = nullptr;
    STD_TORCH_CHECK(stream_of(device, &stream) == 0, "megalite: torch returned no current CUDA stream");
    return stream;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_;
};

}  // namespace ml

// Calls the C function for the tensor's device: entry_cpu(arguments), or entry_cuda(arguments, current stream).
#ifdef MEGALITE_CUDA
#define ML_CALL(tensor, entry, ...)                                    \
  do {                                                                 \
    if ((tensor).is_cuda()) {                                          \
      const ml::OnDevice device(tensor);                               \
      ml::check(entry##_cuda(__VA_ARGS__, device.stream()), #entry);   \
    } else {                                                           \
      ml::check(entry##_cpu(__VA_ARGS__), #entry);                     \
    }                                                                  \
  } while (0)
#else
#define ML_CALL(tensor, entry, ...) ml::check(entry##_cpu(__VA_ARGS__), #entry)
#endif
