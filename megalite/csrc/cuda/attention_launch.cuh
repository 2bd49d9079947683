// Grids and launches of the attention kernels; each head size and direction has a .cu file of its own.
#pragma once

#include <cuda_runtime.h>

#include "attention.h"
#include "core/attention_gradients.h"
#include "cuda/device_machine.cuh"

namespace ml {

// Grids are (blocks of the longest sequence, heads, sequences); blocks that see the most keys go first.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2) forward_kernel(
    const __grid_constant__ MegaliteAttention a) {
  DeviceMachine<Shape::kThreads> machine;
  attention_forward<Shape>(machine, a, gridDim.x - 1 - blockIdx.x, blockIdx.y, blockIdx.z);
}

template <class Element, int kHead, bool kDrops>
__global__ void __launch_bounds__(128) statistics_kernel(const __grid_constant__ MegaliteAttention a) {
  DeviceMachine<128> machine;
  const int64_t row = blockIdx.x * 4ll + threadIdx.x / 32;
  if (row >= a.queries * a.heads) return;
  attention_statistics<Element, kHead, kDrops>(machine, a, row / a.heads, row % a.heads);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) key_gradients_kernel(
    const __grid_constant__ MegaliteAttention a) {
  DeviceMachine<Shape::kThreads> machine;
  attention_key_gradients<Shape>(machine, a, blockIdx.x, blockIdx.y, blockIdx.z);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) query_gradients_kernel(
    const __grid_constant__ MegaliteAttention a) {
  DeviceMachine<Shape::kThreads> machine;
  attention_query_gradients<Shape>(machine, a, gridDim.x - 1 - blockIdx.x, blockIdx.y, blockIdx.z);
}

template <class Element>
__global__ void __launch_bounds__(256) narrow_query_sums_kernel(
    const __grid_constant__ MegaliteAttention a, int64_t pairs) {
  const int64_t pair = blockIdx.x * 256ll + threadIdx.x;
  if (pair >= pairs) return;
  const float2 sums = reinterpret_cast<const float2*>(a.query_sums)[pair];
  const float scale = static_cast<float>(a.scale);
  static_cast<uint32_t*>(a.query_grad)[pair] =
      DeviceMachine<256>().pack<Element>(sums.x * scale, sums.y * scale);
}

// Launches a tile kernel over blocks of `block` rows of the longest sequence.
template <class Shape>
int launch(
    void (*kernel)(const MegaliteAttention), const MegaliteAttention& a, int64_t longest, int block, int64_t heads,
    cudaStream_t stream) {
  if (longest == 0 || heads == 0 || a.sequences == 0) return 0;
  const dim3 grid((longest + block - 1) / block, heads, a.sequences);  // more than 65535 heads or sequences: an error
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, stream>>>(a);
  return cudaGetLastError();
}

template <class Element, int kHead, bool kDrops = false>
int launch_forward(const MegaliteAttention& a, cudaStream_t stream) {
  using Shape = ForwardShapeOf<Element, kHead, kDrops>;
  return launch<Shape>(forward_kernel<Shape>, a, a.longest_query, Shape::kRows, a.heads, stream);
}

template <class Keys>
int launch_keys(const MegaliteAttention& a, cudaStream_t stream) {
  return launch<Keys>(key_gradients_kernel<Keys>, a, a.longest_key, Keys::kKeys, a.kv_heads, stream);
}

template <class Element, int kHead, bool kDrops>
int launch_backward_in_order(const MegaliteAttention& a, cudaStream_t stream) {
  if constexpr (kHead <= kWideHead) {
    if (const int error = launch_keys<KeyShapeOf<Element, kHead, false, kDrops>>(a, stream)) return error;
  } else {
    using Keys = KeyShapeOf<Element, kHead, false, kDrops, Gives::kKeys>;
    using Values = KeyShapeOf<Element, kHead, false, kDrops, Gives::kValues>;
    if (const int error = launch_keys<Keys>(a, stream)) return error;
    if (const int error = launch_keys<Values>(a, stream)) return error;
  }
  using Queries = QueryShapeOf<Element, kHead, kDrops>;
  return launch<Queries>(query_gradients_kernel<Queries>, a, a.longest_query, Queries::kRows, a.heads, stream);
}

template <class Element, int kHead, bool kDrops = false>
int launch_backward(const MegaliteAttention& a, cudaStream_t stream) {
  const int64_t rows = a.queries * a.heads;
  if (rows > 0) {
    statistics_kernel<Element, kHead, kDrops><<<static_cast<unsigned>((rows + 3) / 4), 128, 0, stream>>>(a);
    if (const int error = cudaGetLastError()) return error;
  }
  if (!kSumsInAnyOrder<kHead, kDrops> || a.query_sums == nullptr) {
    return launch_backward_in_order<Element, kHead, kDrops>(a, stream);
  }
  if constexpr (kSumsInAnyOrder<kHead, kDrops>) {
    const int64_t numbers = rows * kHead;
    if (const int error = cudaMemsetAsync(a.query_sums, 0, numbers * sizeof(float), stream)) return error;
    if (const int error = launch_keys<KeyShapeOf<Element, kHead, true, false>>(a, stream)) return error;
    if (numbers > 0) {
      const int64_t blocks = (numbers / 2 + 255) / 256;
      narrow_query_sums_kernel<Element><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(a, numbers / 2);
    }
  }
  return cudaGetLastError();
}

// Of either 16-bit type, with probabilities dropped or not.
template <int kHead>
int launch_any_forward(const MegaliteAttention& a, int dtype, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool drops = a.dropped > 0;
  if (dtype == kBFloat16) return (drops ? launch_forward<bf16, kHead, true> : launch_forward<bf16, kHead>)(a, queue);
  if (dtype == kFloat16) return (drops ? launch_forward<fp16, kHead, true> : launch_forward<fp16, kHead>)(a, queue);
  return kUnsupported;
}

template <int kHead>
int launch_any_backward(const MegaliteAttention& a, int dtype, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const bool drops = a.dropped > 0;
  if (dtype == kBFloat16) return (drops ? launch_backward<bf16, kHead, true> : launch_backward<bf16, kHead>)(a, queue);
  if (dtype == kFloat16) return (drops ? launch_backward<fp16, kHead, true> : launch_backward<fp16, kHead>)(a, queue);
  return kUnsupported;
}

}  // namespace ml
