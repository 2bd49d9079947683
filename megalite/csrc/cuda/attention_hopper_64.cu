#include "cuda/attention_hopper.cuh"

int megalite_attention_forward_hopper_64_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  if (dtype == ml::kBFloat16) return ml::launch_hopper<ml::HopperShape<ml::bf16, 64, 3, 4>>(*attention, queue);
  if (dtype == ml::kFloat16) return ml::launch_hopper<ml::HopperShape<ml::fp16, 64, 3, 4>>(*attention, queue);
  return ml::kUnsupported;
}
