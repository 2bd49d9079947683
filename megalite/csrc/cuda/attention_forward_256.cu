#include "cuda/attention_launch.cuh"

int megalite_attention_forward_256_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  return ml::launch_any_forward<256>(*attention, dtype, stream);
}
