// Attention kernels and their launches; each head size and direction is instantiated in its own .cu file.
#pragma once

#include <cuda_runtime.h>

#include "attention.h"
#include "core/attention_gradients.h"
#include "cuda/attention_runtime.cuh"
#include "cuda/device_machine.cuh"

namespace ml {

// Grid: (blocks of the longest sequence, heads, sequences). Blocks with the most visible keys start first, which
// balances the load.
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

// Launches a tile kernel with one thread block per `block` rows, head and sequence; several launches if there are more
// sequences than gridDim.z allows.
template <class Shape>
int launch(
    void (*kernel)(const MegaliteAttention), const MegaliteAttention& a, int64_t longest, int block, int64_t heads,
    cudaStream_t stream) {
  if (longest == 0 || heads == 0) return 0;
  if (const int error = allow_shared(kernel, Shape::kSharedBytes)) return error;
  return in_parts(a, [&](const MegaliteAttention& part) {
    const dim3 grid((longest + block - 1) / block, heads, part.sequences);
    kernel<<<grid, Shape::kThreads, Shape::kSharedBytes, stream>>>(part);
  });
}

template <class Element, int kHead, bool kDrops = false>
int launch_forward(const MegaliteAttention& a, cudaStream_t stream) {
  using Shape = ForwardShapeOf<Element, kHead, kDrops>;
  static_assert(Shape::kSharedBytes <= kLeastShared);
  return launch<Shape>(forward_kernel<Shape>, a, a.longest_query, Shape::kRows, a.heads, stream);
}

// Launches the kernel over blocks of keys; with kSumQueries also zeroes the float32 sums of dQ and rounds them at the
// end.
template <class Keys>
int launch_keys(const MegaliteAttention& a, cudaStream_t stream) {
  const int64_t numbers = a.queries * a.heads * Keys::kHead;
  if constexpr (Keys::kSumQueries) {
    if (const int error = cleared(cudaMemsetAsync(a.query_sums, 0, numbers * sizeof(float), stream))) return error;
  }
  const int error = launch<Keys>(key_gradients_kernel<Keys>, a, a.longest_key, Keys::kKeys, a.kv_heads, stream);
  if constexpr (Keys::kSumQueries) {
    if (error != 0 || numbers == 0) return error;
    const int64_t blocks = (numbers / 2 + 255) / 256;
    narrow_query_sums_kernel<typename Keys::Element><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(a, numbers / 2);
    return cudaGetLastError();
  }
  return error;
}

template <class Element, int kHead, bool kDrops = false>
int launch_backward(const MegaliteAttention& a, cudaStream_t stream) {
  int limit = 0;
  if (const int error = most_shared(limit)) return error;
  const int64_t rows = a.queries * a.heads;
  if (rows > 0) {
    statistics_kernel<Element, kHead, kDrops><<<static_cast<unsigned>((rows + 3) / 4), 128, 0, stream>>>(a);
    if (const int error = cudaGetLastError()) return error;
  }
  static_assert(
      KeyShapeOf<Element, kHead, false, kDrops, true>::kSharedBytes <= kLeastShared &&
      QueryShapeOf<Element, kHead, kDrops, true>::kSharedBytes <= kLeastShared);
  return for_backward_shapes<Element, kHead, kDrops>(a.query_sums != nullptr, limit, [&](auto shape) {
    using Shape = decltype(shape);
    if constexpr (Shape::kBlocksOfKeys) {
      return launch_keys<Shape>(a, stream);
    } else {
      return launch<Shape>(query_gradients_kernel<Shape>, a, a.longest_query, Shape::kRows, a.heads, stream);
    }
  });
}

// Returns the largest shared memory in bytes per block, forward or backward, on a chip that allows `limit`.
template <int kHead>
int64_t shared_bytes(int backward, int dropped, int any_order, int64_t limit) {
  const int most = static_cast<int>(limit);
  if (backward != 0) {
    return dropped != 0 ? backward_shared<bf16, kHead, true>(any_order != 0, most)
                        : backward_shared<bf16, kHead, false>(any_order != 0, most);
  }
  return dropped != 0 ? ForwardShapeOf<bf16, kHead, true>::kSharedBytes
                      : ForwardShapeOf<bf16, kHead, false>::kSharedBytes;
}

// Dispatches on bf16 or fp16, with or without dropout.
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
