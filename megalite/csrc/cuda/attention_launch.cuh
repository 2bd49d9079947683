// Grids and launches of the attention kernels; each head size and direction has a .cu file of its own.
#pragma once

#include <cuda_runtime.h>

#include "attention.h"
#include "core/attention_gradients.h"
#include "cuda/device_machine.cuh"

namespace ml {

// Blocks of one sequence and head next to each other: they read the same keys. Those that see the most go first.
struct Grid {
  int64_t blocks, heads, sequences;
};

struct GridPlace {
  int block, head, sequence;
};

ML_TILE GridPlace grid_place(const Grid& grid) {
  const int64_t index = blockIdx.x, rest = index / grid.blocks;
  return {static_cast<int>(index % grid.blocks), static_cast<int>(rest % grid.heads),
          static_cast<int>(rest / grid.heads)};
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kHead == 64 ? 3 : 2) forward_kernel(
    const __grid_constant__ MegaliteAttention a, const __grid_constant__ Grid grid) {
  DeviceMachine<Shape::kThreads> machine;
  const GridPlace at = grid_place(grid);
  attention_forward<Shape>(machine, a, static_cast<int>(grid.blocks) - 1 - at.block, at.head, at.sequence);
}

template <class Element, int kHead>
__global__ void __launch_bounds__(128) statistics_kernel(const __grid_constant__ MegaliteAttention a) {
  DeviceMachine<128> machine;
  const int64_t row = blockIdx.x * 4ll + threadIdx.x / 32;
  if (row < a.queries * a.heads) attention_statistics<Element, kHead>(machine, a, row / a.heads, row % a.heads);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) key_gradients_kernel(
    const __grid_constant__ MegaliteAttention a, const __grid_constant__ Grid grid) {
  DeviceMachine<Shape::kThreads> machine;
  const GridPlace at = grid_place(grid);
  attention_key_gradients<Shape>(machine, a, at.block, at.head, at.sequence);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) query_gradients_kernel(
    const __grid_constant__ MegaliteAttention a, const __grid_constant__ Grid grid) {
  DeviceMachine<Shape::kThreads> machine;
  const GridPlace at = grid_place(grid);
  attention_query_gradients<Shape>(machine, a, static_cast<int>(grid.blocks) - 1 - at.block, at.head, at.sequence);
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
    void (*kernel)(const MegaliteAttention, const Grid), const MegaliteAttention& a, int64_t longest, int block,
    int64_t heads, cudaStream_t stream) {
  const Grid grid{(longest + block - 1) / block, heads, a.sequences};
  const int64_t count = grid.blocks * grid.heads * grid.sequences;
  if (count == 0) return 0;
  if (count > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(count), Shape::kThreads, Shape::kSharedBytes, stream>>>(a, grid);
  return cudaGetLastError();
}

template <class Element, int kHead>
int launch_forward(const MegaliteAttention& a, cudaStream_t stream) {
  using Shape = ForwardShapeOf<Element, kHead>;
  return launch<Shape>(forward_kernel<Shape>, a, a.longest_query, Shape::kRows, a.heads, stream);
}

template <class Element, int kHead>
int launch_backward(const MegaliteAttention& a, cudaStream_t stream) {
  const int64_t rows = a.queries * a.heads;
  if (rows > 0) {
    statistics_kernel<Element, kHead><<<static_cast<unsigned>((rows + 3) / 4), 128, 0, stream>>>(a);
    if (const int error = cudaGetLastError()) return error;
  }
  if (a.query_sums == nullptr) {
    using Keys = KeyShapeOf<Element, kHead, false>;
    using Queries = QueryShapeOf<Element, kHead>;
    if (const int error =
            launch<Keys>(key_gradients_kernel<Keys>, a, a.longest_key, Keys::kKeys, a.kv_heads, stream)) {
      return error;
    }
    return launch<Queries>(query_gradients_kernel<Queries>, a, a.longest_query, Queries::kRows, a.heads, stream);
  }
  using Keys = KeyShapeOf<Element, kHead, true>;
  const int64_t numbers = rows * kHead;
  if (const int error = cudaMemsetAsync(a.query_sums, 0, numbers * sizeof(float), stream)) return error;
  if (const int error =
          launch<Keys>(key_gradients_kernel<Keys>, a, a.longest_key, Keys::kKeys, a.kv_heads, stream)) {
    return error;
  }
  if (numbers > 0) {
    const int64_t blocks = (numbers / 2 + 255) / 256;
    narrow_query_sums_kernel<Element><<<static_cast<unsigned>(blocks), 256, 0, stream>>>(a, numbers / 2);
  }
  return cudaGetLastError();
}

}  // namespace ml
