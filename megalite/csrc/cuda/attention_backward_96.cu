#include "cuda/attention_launch.cuh"

int megalite_attention_backward_96_cuda(const MegaliteAttention* attention, int dtype, void* stream) {
  return ml::launch_any_backward<96>(*attention, dtype, stream);
}
