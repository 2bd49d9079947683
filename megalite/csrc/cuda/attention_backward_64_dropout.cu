#include "cuda/attention_launch.cuh"

int megalite_attention_backward_64_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == ml::kBFloat16) return ml::launch_backward<ml::bf16, 64, true>(*attention, queue);
  if (dtype == ml::kFloat16) return ml::launch_backward<ml::fp16, 64, true>(*attention, queue);
  return ml::kUnsupported;
}
