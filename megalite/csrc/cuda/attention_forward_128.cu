#include "cuda/attention_launch.cuh"

int megalite_attention_forward_128_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  if (attention->dropped > 0) return megalite_attention_forward_128_dropout_cuda(attention, dtype, stream);
  const int done = megalite_attention_forward_hopper_128_cuda(attention, dtype, stream);
  if (done != ml::kUnsupported) return done;
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == ml::kBFloat16) return ml::launch_forward<ml::bf16, 128>(*attention, queue);
  if (dtype == ml::kFloat16) return ml::launch_forward<ml::fp16, 128>(*attention, queue);
  return ml::kUnsupported;
}
