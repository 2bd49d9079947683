#include "cuda/attention_launch.cuh"

int megalite_attention_backward_64_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  if (attention->dropped > 0) return megalite_attention_backward_64_dropout_cuda(attention, dtype, stream);
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == ml::kBFloat16) return ml::launch_backward<ml::bf16, 64>(*attention, queue);
  if (dtype == ml::kFloat16) return ml::launch_backward<ml::fp16, 64>(*attention, queue);
  return ml::kUnsupported;
}

int64_t megalite_attention_shared_64_cuda(int backward, int dropped, int any_order, int64_t limit) {
  return ml::shared_bytes<64>(backward, dropped, any_order, limit);
}
