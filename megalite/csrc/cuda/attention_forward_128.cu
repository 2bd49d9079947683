#include "cuda/attention_launch.cuh"

namespace ml {
template int launch_forward<bf16, 128>(const MegaliteAttention&, cudaStream_t);
template int launch_forward<fp16, 128>(const MegaliteAttention&, cudaStream_t);
}  // namespace ml
