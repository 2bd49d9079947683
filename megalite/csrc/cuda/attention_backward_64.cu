#include "cuda/attention_launch.cuh"

namespace ml {
template int launch_backward<bf16, 64>(const MegaliteAttention&, cudaStream_t);
template int launch_backward<fp16, 64>(const MegaliteAttention&, cudaStream_t);
}  // namespace ml
