// Gated activations and bias + GELU on a GPU: each value is read and written once, by 16-byte accesses if rows are
// aligned.
#include "activations.h"

#include "core/activation.h"
#include "cuda/values.cuh"

namespace {

using namespace ml;

constexpr int kLanes = 128;
// Columns and rows per thread; their loads are in flight together. One of each for float64, whose exp and erfc are
// function calls: values that live across a call would spill.
template <typename T>
constexpr int kColumns = sizeof(T) == 8 ? 1 : kPerLoad<T>;
template <typename T>
constexpr int kRows = sizeof(T) == 8 ? 1 : 4;
// Block of the kernels that sum over rows: kSumLanes threads along columns, kSumGroups along rows.
constexpr int kSumLanes = 32, kSumGroups = 8;

// A thread's tile: N columns from `column` on, kRows rows from `row` on.
struct Place {
  int64_t row, column;
};

template <typename T, int N>
__device__ __forceinline__ Place place_of() {
  const int64_t tile = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  return {tile * kRows<T>, (int64_t(blockIdx.x) * kLanes + threadIdx.x) * N};
}

template <typename A, typename T, int N>
__global__ void __launch_bounds__(kLanes)
    glu(const T* __restrict__ gate_up, T* __restrict__ out, int64_t rows, int64_t features) {
  const Place at = place_of<T, N>();
  if (at.column >= features) return;
  Values<T, N> gate[kRows<T>], up[kRows<T>];
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (at.row + r < rows) {
      const T* from = gate_up + (at.row + r) * 2 * features + at.column;
      gate[r] = load<N>(from);
      up[r] = load<N>(from + features);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (at.row + r < rows) {
      Values<T, N> made;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        made.values[i] = from_wide<T>(A::at(to_wide(gate[r].values[i])).value * to_wide(up[r].values[i]));
      }
      store(out + (at.row + r) * features + at.column, made);
    }
  }
}

template <typename A, typename T, int N>
__global__ void __launch_bounds__(kLanes) glu_backward(
    const T* __restrict__ grad, const T* __restrict__ gate_up, T* __restrict__ gate_up_grad, int64_t rows,
    int64_t features) {
  const Place at = place_of<T, N>();
  if (at.column >= features) return;
  Values<T, N> given[kRows<T>], gate[kRows<T>], up[kRows<T>];
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (at.row + r < rows) {
      const T* from = gate_up + (at.row + r) * 2 * features + at.column;
      given[r] = load<N>(grad + (at.row + r) * features + at.column);
      gate[r] = load<N>(from);
      up[r] = load<N>(from + features);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (at.row + r < rows) {
      Values<T, N> gate_grad, up_grad;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Wide<T> passed = to_wide(given[r].values[i]);
        const auto activated = A::at(to_wide(gate[r].values[i]));
        gate_grad.values[i] = from_wide<T>(passed * to_wide(up[r].values[i]) * activated.slope);
        up_grad.values[i] = from_wide<T>(passed * activated.value);
      }
      T* to = gate_up_grad + (at.row + r) * 2 * features + at.column;
      store(to, gate_grad);
      store(to + features, up_grad);
    }
  }
}

// bias may be null.
template <int N, typename T>
__device__ __forceinline__ void load_bias(const T* bias, int64_t column, Wide<T> (&wide)[N]) {
  Values<T, N> values;
  if (bias != nullptr) values = load<N>(bias + column);
#pragma unroll
  for (int i = 0; i < N; ++i) wide[i] = bias != nullptr ? to_wide(values.values[i]) : Wide<T>(0);
}

template <typename A, typename T, int N>
__global__ void __launch_bounds__(kLanes) bias_gelu(
    const T* __restrict__ inputs, const T* __restrict__ bias, T* __restrict__ out, int64_t rows,
    int64_t features) {
  const Place at = place_of<T, N>();
  if (at.column >= features) return;
  Values<T, N> given[kRows<T>];
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (at.row + r < rows) given[r] = load<N>(inputs + (at.row + r) * features + at.column);
  }
  Wide<T> shift[N];
  load_bias<N>(bias, at.column, shift);
#pragma unroll
  for (int r = 0; r < kRows<T>; ++r) {
    if (at.row + r < rows) {
      Values<T, N> made;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        made.values[i] = from_wide<T>(A::at(to_wide(given[r].values[i]) + shift[i]).value);
      }
      store(out + (at.row + r) * features + at.column, made);
    }
  }
}

// Thread block y computes `taken` rows, from row y * taken on; bias and partials may be null.
template <typename A, typename T, int N>
__global__ void __launch_bounds__(kSumLanes * kSumGroups) bias_gelu_backward(
    const T* __restrict__ grad, const T* __restrict__ inputs, const T* __restrict__ bias,
    T* __restrict__ inputs_grad, Wide<T>* __restrict__ partials, int64_t rows, int64_t features, int64_t taken) {
  __shared__ Wide<T> sums[kSumGroups][kSumLanes * N];
  const int64_t column = (int64_t(blockIdx.x) * kSumLanes + threadIdx.x) * N;
  const int64_t first = blockIdx.y * taken, end = first + taken < rows ? first + taken : rows;
  Wide<T> shift[N], sum[N] = {};
  if (column < features) {
    load_bias<N>(bias, column, shift);
    constexpr int kAtOnce = kRows<T> > 1 ? 2 : 1;  // rows in flight; fewer than kRows, because sums take registers
    for (int64_t row = first + threadIdx.y; row < end; row += kSumGroups * kAtOnce) {
      Values<T, N> from[kAtOnce], of[kAtOnce];
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (row + r * kSumGroups < end) {
          from[r] = load<N>(grad + (row + r * kSumGroups) * features + column);
          of[r] = load<N>(inputs + (row + r * kSumGroups) * features + column);
        }
      }
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        if (row + r * kSumGroups < end) {
          Values<T, N> made;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const Wide<T> passed = to_wide(from[r].values[i]) * A::at(to_wide(of[r].values[i]) + shift[i]).slope;
            made.values[i] = from_wide<T>(passed);
            sum[i] += passed;
          }
          store(inputs_grad + (row + r * kSumGroups) * features + column, made);
        }
      }
    }
  }
  if (partials == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; ++i) sums[threadIdx.y][threadIdx.x * N + i] = sum[i];
  __syncthreads();
  static_assert(N <= kSumGroups, "a thread for each column");
  const int own = threadIdx.y * kSumLanes + threadIdx.x;
  const int64_t to = int64_t(blockIdx.x) * kSumLanes * N + own;
  if (own >= kSumLanes * N || to >= features) return;
  Wide<T> total = 0;
#pragma unroll
  for (int group = 0; group < kSumGroups; ++group) total += sums[group][own];
  partials[blockIdx.y * features + to] = total;
}

// bias_grad = the sum of the rows of partials, in a fixed order.
template <typename T>
__global__ void __launch_bounds__(kSumLanes * kSumGroups)
    sum_partials(const Wide<T>* __restrict__ partials, T* __restrict__ bias_grad, int64_t blocks, int64_t features) {
  __shared__ Wide<T> sums[kSumGroups][kSumLanes];
  const int64_t column = int64_t(blockIdx.x) * kSumLanes + threadIdx.x;
  Wide<T> sum = 0;
  if (column < features) {
#pragma unroll 4
    for (int64_t block = threadIdx.y; block < blocks; block += kSumGroups) sum += partials[block * features + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < features) {
    Wide<T> total = 0;
#pragma unroll
    for (int group = 0; group < kSumGroups; ++group) total += sums[group][threadIdx.x];
    bias_grad[column] = from_wide<T>(total);
  }
}

// Whether rows of `features` values at these addresses allow 16-byte accesses.
template <typename T, typename... Addresses>
bool packs(int64_t features, Addresses... addresses) {
  return features % kColumns<T> == 0 && (on_16_bytes(addresses) && ...);
}

// The grid: tiles of columns along x, tiles of rows along y, and along z if there are more than gridDim.y allows.
template <typename T>
dim3 tiles_of(int64_t rows, int64_t features, int columns) {
  const int64_t tiles = divided_up(rows, kRows<T>), layers = divided_up(tiles, kMostBlocks);
  return dim3(divided_up(features, kLanes * columns), divided_up(tiles, layers), layers);
}

}  // namespace

extern "C" {

int megalite_glu_cuda(
    const void* gate_up, void* out, int64_t rows, int64_t features, int activation, int dtype, void* stream) {
  if (rows == 0 || features == 0) return 0;
  const int unknown = for_activation(activation, dtype, [&](auto kind, auto type) {
    using A = decltype(kind);
    using T = decltype(type);
    constexpr int N = kColumns<T>;
    const bool wide = packs<T>(features, gate_up, out);
    const auto kernel = wide ? glu<A, T, N> : glu<A, T, 1>;
    const dim3 tiles = tiles_of<T>(rows, features, wide ? N : 1);
    kernel<<<tiles, kLanes, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(gate_up), static_cast<T*>(out), rows, features);
  });
  return unknown != 0 ? unknown : cudaGetLastError();
}

int megalite_glu_backward_cuda(
    const void* grad, const void* gate_up, void* gate_up_grad, int64_t rows, int64_t features, int activation,
    int dtype, void* stream) {
  if (rows == 0 || features == 0) return 0;
  const int unknown = for_activation(activation, dtype, [&](auto kind, auto type) {
    using A = decltype(kind);
    using T = decltype(type);
    constexpr int N = kColumns<T>;
    const bool wide = packs<T>(features, grad, gate_up, gate_up_grad);
    const auto kernel = wide ? glu_backward<A, T, N> : glu_backward<A, T, 1>;
    const dim3 tiles = tiles_of<T>(rows, features, wide ? N : 1);
    kernel<<<tiles, kLanes, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(grad), static_cast<const T*>(gate_up), static_cast<T*>(gate_up_grad), rows, features);
  });
  return unknown != 0 ? unknown : cudaGetLastError();
}

int megalite_bias_gelu_cuda(
    const void* inputs, const void* bias, void* out, int64_t rows, int64_t features, int activation, int dtype,
    void* stream) {
  if (rows == 0 || features == 0) return 0;
  const int unknown = for_gelu(activation, dtype, [&](auto kind, auto type) {
    using A = decltype(kind);
    using T = decltype(type);
    constexpr int N = kColumns<T>;
    const bool wide = packs<T>(features, inputs, bias, out);
    const auto kernel = wide ? bias_gelu<A, T, N> : bias_gelu<A, T, 1>;
    const dim3 tiles = tiles_of<T>(rows, features, wide ? N : 1);
    kernel<<<tiles, kLanes, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(inputs), static_cast<const T*>(bias), static_cast<T*>(out), rows, features);
  });
  return unknown != 0 ? unknown : cudaGetLastError();
}

int megalite_bias_gelu_backward_cuda(
    const void* grad, const void* inputs, const void* bias, void* inputs_grad, void* bias_grad, void* partials,
    int64_t rows, int64_t features, int activation, int dtype, void* stream) {
  if (features == 0 || (rows == 0 && bias == nullptr)) return 0;
  const int unknown = for_gelu(activation, dtype, [&](auto kind, auto type) {
    using A = decltype(kind);
    using T = decltype(type);
    constexpr int N = kColumns<T>;
    const bool wide = packs<T>(features, grad, inputs, bias, inputs_grad);
    const auto kernel = wide ? bias_gelu_backward<A, T, N> : bias_gelu_backward<A, T, 1>;
    const int64_t taken = rows_per_block(rows), blocks = divided_up(rows, taken);
    const dim3 threads(kSumLanes, kSumGroups);
    Wide<T>* sums = bias != nullptr ? static_cast<Wide<T>*>(partials) : nullptr;
    if (rows != 0) {
      const dim3 grid(divided_up(features, kSumLanes * (wide ? N : 1)), blocks);
      kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(
          static_cast<const T*>(grad), static_cast<const T*>(inputs), static_cast<const T*>(bias),
          static_cast<T*>(inputs_grad), sums, rows, features, taken);
    }
    if (bias != nullptr) {
      sum_partials<T><<<divided_up(features, kSumLanes), threads, 0, static_cast<cudaStream_t>(stream)>>>(
          sums, static_cast<T*>(bias_grad), blocks, features);
    }
  });
  return unknown != 0 ? unknown : cudaGetLastError();
}

}
