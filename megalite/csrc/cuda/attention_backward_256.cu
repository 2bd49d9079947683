#include "cuda/attention_launch.cuh"

int megalite_attention_backward_256_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  return ml::launch_any_backward<256>(*attention, dtype, stream);
}

int64_t megalite_attention_shared_256_cuda(int backward, int dropped, int any_order, int64_t limit) {
  return ml::shared_bytes<256>(backward, dropped, any_order, limit);
}
