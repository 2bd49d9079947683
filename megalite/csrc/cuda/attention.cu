// Chooses the kernel of a head size and type.
#include <cuda_runtime.h>

#include "attention.h"
#include "core/scalar.h"

namespace ml {

template <class Element, int kHead>
int launch_forward(const MegaliteAttention& attention, cudaStream_t stream);
template <class Element, int kHead>
int launch_backward(const MegaliteAttention& attention, cudaStream_t stream);

}  // namespace ml

extern "C" int megalite_attention_forward_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == ml::kBFloat16 && attention->head_size == 64) return ml::launch_forward<ml::bf16, 64>(*attention, queue);
  if (dtype == ml::kBFloat16 && attention->head_size == 128) return ml::launch_forward<ml::bf16, 128>(*attention, queue);
  if (dtype == ml::kFloat16 && attention->head_size == 64) return ml::launch_forward<ml::fp16, 64>(*attention, queue);
  if (dtype == ml::kFloat16 && attention->head_size == 128) return ml::launch_forward<ml::fp16, 128>(*attention, queue);
  return ml::kUnsupported;
}

extern "C" int megalite_attention_backward_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == ml::kBFloat16 && attention->head_size == 64) return ml::launch_backward<ml::bf16, 64>(*attention, queue);
  if (dtype == ml::kBFloat16 && attention->head_size == 128) return ml::launch_backward<ml::bf16, 128>(*attention, queue);
  if (dtype == ml::kFloat16 && attention->head_size == 64) return ml::launch_backward<ml::fp16, 64>(*attention, queue);
  if (dtype == ml::kFloat16 && attention->head_size == 128) return ml::launch_backward<ml::fp16, 128>(*attention, queue);
  return ml::kUnsupported;
}
