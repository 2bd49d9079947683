#include "cuda/attention_launch.cuh"

int megalite_attention_backward_96_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  return ml::launch_any_backward<96>(*attention, dtype, stream);
}

int64_t megalite_attention_shared_96_cuda(int backward, int dropped, int any_order, int64_t limit) {
  return ml::shared_bytes<96>(backward, dropped, any_order, limit);
}
