// Experts' rows on a GPU: one thread block a token, or a row in the backward; no atomics, sums in a fixed order.
#include "expert_rows.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/pack.cuh"
#include "cuda/values.cuh"

namespace {

using namespace ml;

constexpr int kWarp = 32, kThreads = 256;

__device__ __forceinline__ int64_t row_at(const MegalitePlaces& at, int64_t choice) {
  const int64_t row = at.places[choice];
  if (row < 0 || row >= at.rows) __trap();
  return row;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    expert_rows(const T* __restrict__ values, T* __restrict__ rows, const __grid_constant__ MegalitePlaces at) {
  const int64_t token = blockIdx.x;
  for (int64_t column = int64_t(threadIdx.x) * N; column < at.columns; column += blockDim.x * N) {
    const Values<T, N> value = load<N>(values + token * at.columns + column);
#pragma unroll 1
    for (int64_t j = 0; j < at.chosen; ++j) store(rows + row_at(at, token * at.chosen + j) * at.columns + column, value);
  }
}

// weights may be null. Two rows of a token are in flight; 4 blocks: without that ptxas spills for more of them.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 4) expert_sums(
    const T* __restrict__ rows, const T* __restrict__ weights, T* __restrict__ sums,
    const __grid_constant__ MegalitePlaces at) {
  const int64_t token = blockIdx.x;
  for (int64_t column = int64_t(threadIdx.x) * N; column < at.columns; column += blockDim.x * N) {
    Wide<T> totals[N] = {};
#pragma unroll 2
    for (int64_t j = token * at.chosen; j < (token + 1) * at.chosen; ++j) {
      const Values<T, N> value = load<N>(rows + row_at(at, j) * at.columns + column);
      const Wide<T> weight = weights == nullptr ? Wide<T>(1) : to_wide(weights[j]);
#pragma unroll
      for (int i = 0; i < N; ++i) totals[i] += weight * to_wide(value.values[i]);
    }
    Values<T, N> total;
#pragma unroll
    for (int i = 0; i < N; ++i) total.values[i] = from_wide<T>(totals[i]);
    store(sums + token * at.columns + column, total);
  }
}

// Thread block j computes one row, of choice j.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) expert_sums_backward(
    const T* __restrict__ grad, const T* __restrict__ rows, const T* __restrict__ weights, T* __restrict__ rows_grad,
    T* __restrict__ weights_grad, const __grid_constant__ MegalitePlaces at) {
  __shared__ Wide<T> of_warps[kThreads / kWarp];
  const int64_t j = blockIdx.x, start = row_at(at, j) * at.columns;
  const T* from = grad + j / at.chosen * at.columns;
  const Wide<T> weight = to_wide(weights[j]);
  Wide<T> dot = 0;
#pragma unroll 1
  for (int64_t column = int64_t(threadIdx.x) * N; column < at.columns; column += blockDim.x * N) {
    const Values<T, N> given = load<N>(from + column), row = load<N>(rows + start + column);
    Values<T, N> made;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dot += to_wide(given.values[i]) * to_wide(row.values[i]);
      made.values[i] = from_wide<T>(weight * to_wide(given.values[i]));
    }
    store(rows_grad + start + column, made);
  }
  dot = warp_sum(dot);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = dot;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Wide<T> total = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) total += of_warps[warp];
  weights_grad[j] = from_wide<T>(total);
}

// Calls run(T{}, whether all rows are aligned to 16 bytes, threads of a block).
template <typename Run, typename... Addresses>
int over_rows(const MegalitePlaces& at, int dtype, Run run, Addresses... addresses) {
  const int unknown = for_dtype(dtype, [&](auto type) {
    constexpr int64_t N = kPerLoad<decltype(type)>;
    const bool wide = at.columns % N == 0 && (on_16_bytes(addresses) && ...);
    const int64_t columns = wide ? at.columns / N : at.columns;
    run(type, wide, static_cast<unsigned>(std::clamp<int64_t>(divided_up(columns, kWarp) * kWarp, kWarp, kThreads)));
  });
  return unknown != 0 ? unknown : cudaGetLastError();
}

}  // namespace

extern "C" {

int megalite_expert_rows_cuda(const void* values, void* rows, const MegalitePlaces* places, int dtype, void* stream) {
  if (places->tokens == 0 || places->columns == 0) return 0;
  const auto run = [&](auto type, bool wide, unsigned threads) {
    using T = decltype(type);
    const auto kernel = wide ? expert_rows<T, kPerLoad<T>> : expert_rows<T, 1>;
    kernel<<<places->tokens, threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(values), static_cast<T*>(rows), *places);
  };
  return over_rows(*places, dtype, run, values, rows);
}

int megalite_expert_sums_cuda(
    const void* rows, const void* weights, void* sums, const MegalitePlaces* places, int dtype, void* stream) {
  if (places->tokens == 0 || places->columns == 0) return 0;
  const auto run = [&](auto type, bool wide, unsigned threads) {
    using T = decltype(type);
    const auto kernel = wide ? expert_sums<T, kPerLoad<T>> : expert_sums<T, 1>;
    kernel<<<places->tokens, threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(rows), static_cast<const T*>(weights), static_cast<T*>(sums), *places);
  };
  return over_rows(*places, dtype, run, rows, sums);
}

int megalite_expert_sums_backward_cuda(
    const void* grad, const void* rows, const void* weights, void* rows_grad, void* weights_grad,
    const MegalitePlaces* places, int dtype, void* stream) {
  if (places->tokens * places->chosen == 0) return 0;
  const auto run = [&](auto type, bool wide, unsigned threads) {
    using T = decltype(type);
    const auto kernel = wide ? expert_sums_backward<T, kPerLoad<T>> : expert_sums_backward<T, 1>;
    kernel<<<places->tokens * places->chosen, threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(grad), static_cast<const T*>(rows), static_cast<const T*>(weights),
        static_cast<T*>(rows_grad), static_cast<T*>(weights_grad), *places);
  };
  return over_rows(*places, dtype, run, grad, rows, rows_grad);
}

}
