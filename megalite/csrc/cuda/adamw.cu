// The optimizer's operators on lists of tensors on a GPU (multi-tensor apply): a launch processes as many tensors as
// fit into its kernel arguments, and each thread block one chunk of one tensor.
#include "adamw.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "core/adamw.h"
#include "core/adamw_types.h"

namespace {

using ml::kChunk;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLanes = 4;  // vector width: 16 bytes of float32, the widest type that matters
constexpr int kSumThreads = 1024;

// Kernel arguments are limited to 4096 bytes on every chip and driver.
constexpr int64_t kArgumentBytes = 4096 - 256;

// The tensors of one launch, read directly from the constant bank that holds kernel arguments.
template <int kPointers>
struct Table {
  static constexpr int kTensors = int(kArgumentBytes / ((kPointers + 2) * 8));
  void* pointers[kPointers][kTensors];
  int64_t sizes[kTensors];
  uint32_t first_chunk[kTensors];
  int count;
};

template <typename T>
struct alignas(sizeof(T) * kLanes > 16 ? 16 : sizeof(T) * kLanes) Lanes {
  T values[kLanes];
};

template <typename T>
__device__ inline bool aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Lanes<T>) == 0;
}

template <typename T>
__device__ inline Lanes<T> load(const T* pointer) {
  return *reinterpret_cast<const Lanes<T>*>(pointer);
}

template <typename T>
__device__ inline void store(T* pointer, const Lanes<T>& lanes) {
  *reinterpret_cast<Lanes<T>*>(pointer) = lanes;
}

// Fills a table with the tensors from `begin` on; returns how many fit, and in `chunks` their number of thread blocks.
template <int kPointers>
int64_t fill(Table<kPointers>& table, void* const* const (&lists)[kPointers], const int64_t* sizes, int64_t begin,
             int64_t count, int64_t* chunks) {
  constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;
  int64_t blocks = 0;
  int held = 0;
  while (held < Table<kPointers>::kTensors && begin + held < count) {
    const int64_t size = sizes[begin + held], more = ml::chunks_of(size);
    if (held > 0 && blocks + more > kMostBlocks) break;
    for (int which = 0; which < kPointers; ++which) {
      table.pointers[which][held] = lists[which] == nullptr ? nullptr : lists[which][begin + held];
    }
    table.sizes[held] = size;
    table.first_chunk[held] = uint32_t(blocks);
    blocks += more;
    ++held;
  }
  table.count = held;
  *chunks = blocks;
  return held;
}

template <typename W, typename G, typename C>
__device__ inline void update_lanes(const ml::AdamWStep<W>& step, W* weight, C* copy, const G* gradient, W* mean,
                                    W* square) {
  Lanes<W> w = load(weight), m = load(mean), s = load(square);
  const Lanes<G> g = load(gradient);
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    ml::adamw_update(step, W(ml::to_wide(g.values[lane])), w.values[lane], m.values[lane], s.values[lane]);
  }
  store(weight, w);
  store(mean, m);
  store(square, s);
  if constexpr (!std::is_same_v<C, ml::NoCopy>) {
    Lanes<C> rounded;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) rounded.values[lane] = ml::from_wide<C>(w.values[lane]);
    store(copy, rounded);
  }
}

template <typename W, typename G, typename C>
__global__ void __launch_bounds__(kThreads)
    update(const __grid_constant__ Table<5> table, const __grid_constant__ ml::AdamWStep<W> step) {
  const int tensor = ml::tensor_of_chunk(table.first_chunk, table.count, blockIdx.x);
  const int64_t begin = int64_t(blockIdx.x - table.first_chunk[tensor]) * kChunk;
  const int size = int(min(kChunk, table.sizes[tensor] - begin));
  W* const weight = static_cast<W*>(table.pointers[0][tensor]) + begin;
  const G* const gradient = static_cast<const G*>(table.pointers[1][tensor]) + begin;
  W* const mean = static_cast<W*>(table.pointers[2][tensor]) + begin;
  W* const square = static_cast<W*>(table.pointers[3][tensor]) + begin;
  C* copy = nullptr;
  bool in_lanes = aligned(weight) && aligned(gradient) && aligned(mean) && aligned(square);
  if constexpr (!std::is_same_v<C, ml::NoCopy>) {
    copy = static_cast<C*>(table.pointers[4][tensor]) + begin;
    in_lanes = in_lanes && aligned(copy);
  }
  const int whole = in_lanes ? size / kLanes * kLanes : 0;
#pragma unroll 2
  for (int i = threadIdx.x * kLanes; i < whole; i += kThreads * kLanes) {
    update_lanes<W, G, C>(step, weight + i, copy == nullptr ? nullptr : copy + i, gradient + i, mean + i, square + i);
  }
  for (int i = whole + threadIdx.x; i < size; i += kThreads) {
    W w = weight[i], m = mean[i], s = square[i];
    ml::adamw_update(step, W(ml::to_wide(gradient[i])), w, m, s);
    weight[i] = w, mean[i] = m, square[i] = s;
    if constexpr (!std::is_same_v<C, ml::NoCopy>) copy[i] = ml::from_wide<C>(w);
  }
}

// Block-wide sum, valid in thread 0; the order of additions depends only on the number of threads.
template <int kCount>
__device__ inline double block_sum(double sum) {
  __shared__ double of_warps[kCount];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    sum = 0;
    for (int warp = 0; warp < kCount; ++warp) sum += of_warps[warp];
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_chunks(const __grid_constant__ Table<1> table, double* partials) {
  const int tensor = ml::tensor_of_chunk(table.first_chunk, table.count, blockIdx.x);
  const int64_t begin = int64_t(blockIdx.x - table.first_chunk[tensor]) * kChunk;
  const int size = int(min(kChunk, table.sizes[tensor] - begin));
  const T* const values = static_cast<const T*>(table.pointers[0][tensor]) + begin;
  const bool in_lanes = aligned(values);
  const int whole = size / kLanes * kLanes;
  double sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x * kLanes; i < whole; i += kThreads * kLanes) {
    Lanes<T> lanes;
    if (in_lanes) {
      lanes = load(values + i);
    } else {  // the same thread loads the same elements, so that the sum does not depend on the alignment
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) lanes.values[lane] = values[i + lane];
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = double(ml::to_wide(lanes.values[lane]));
      sum += value * value;
    }
  }
  for (int i = whole + threadIdx.x; i < size; i += kThreads) {
    const double value = double(ml::to_wide(values[i]));
    sum += value * value;
  }
  sum = block_sum<kWarps>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kSumThreads) sum_partials(const double* partials, int64_t count, double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += partials[i];
  sum = block_sum<kSumThreads / 32>(sum);
  if (threadIdx.x == 0) *total = sum;
}

template <typename W, typename G>
__global__ void __launch_bounds__(kThreads) accumulate(W* total, const G* gradient, int64_t size, bool in_lanes) {
  const int64_t begin = int64_t(blockIdx.x) * kChunk, end = min(size, begin + kChunk);
  const int64_t whole = in_lanes ? begin + (end - begin) / kLanes * kLanes : begin;
#pragma unroll 4
  for (int64_t i = begin + threadIdx.x * kLanes; i < whole; i += kThreads * kLanes) {
    Lanes<W> sums = load(total + i);
    const Lanes<G> added = load(gradient + i);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sums.values[lane] += W(ml::to_wide(added.values[lane]));
    store(total + i, sums);
  }
  for (int64_t i = whole + threadIdx.x; i < end; i += kThreads) total[i] += W(ml::to_wide(gradient[i]));
}

bool on_vector_boundary(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % std::min<size_t>(16, bytes * kLanes) == 0;
}

}  // namespace

extern "C" {

int megalite_adamw_sum_of_squares_cuda(const void* const* tensors, const int64_t* sizes, int64_t count,
                                       double* partials, double* total, int dtype, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  return ml::visit_type(dtype, [&](auto tag) -> int {
    using T = typename decltype(tag)::type;
    Table<1> table;
    void* const* const lists[1] = {const_cast<void* const*>(tensors)};
    int64_t done = 0, chunks = 0;
    for (int64_t begin = 0; begin < count;) {
      int64_t blocks = 0;
      begin += fill<1>(table, lists, sizes, begin, count, &blocks);
      done += blocks;
      if (blocks > 0) {
        sum_chunks<T><<<unsigned(blocks), kThreads, 0, queue>>>(table, partials + chunks);
        if (const cudaError_t error = cudaGetLastError()) return int(error);
      }
      chunks = done;
    }
    sum_partials<<<1, kSumThreads, 0, queue>>>(partials, chunks, total);
    return int(cudaGetLastError());
  });
}

int megalite_adamw_update_cuda(void* const* weights, void* const* copies, const void* const* gradients,
                               void* const* means, void* const* squares, const int64_t* sizes, int64_t count,
                               double learning_rate, double beta1, double beta2, double eps, double weight_decay,
                               double step, double gradient_scale, int weight_dtype, int gradient_dtype,
                               int copy_dtype, void* stream) {
  auto* const queue = static_cast<cudaStream_t>(stream);
  return ml::visit_weight_and_gradient(weight_dtype, gradient_dtype, [&](auto weight_tag, auto gradient_tag) -> int {
    using W = typename decltype(weight_tag)::type;
    using G = typename decltype(gradient_tag)::type;
    const auto coefficients =
        ml::AdamWStep<W>::of(learning_rate, beta1, beta2, eps, weight_decay, step, gradient_scale);
    return ml::visit_copy(copies != nullptr, copy_dtype, [&](auto copy_tag) -> int {
      using C = typename decltype(copy_tag)::type;
      Table<5> table;
      void* const* const lists[5] = {weights, const_cast<void* const*>(gradients), means, squares, copies};
      for (int64_t begin = 0; begin < count;) {
        int64_t blocks = 0;
        begin += fill<5>(table, lists, sizes, begin, count, &blocks);
        if (blocks == 0) continue;
        update<W, G, C><<<unsigned(blocks), kThreads, 0, queue>>>(table, coefficients);
        if (const cudaError_t error = cudaGetLastError()) return int(error);
      }
      return 0;
    });
  });
}

int megalite_adamw_accumulate_cuda(void* total, const void* gradient, int64_t size, int total_dtype,
                                   int gradient_dtype, void* stream) {
  if (size == 0) return 0;
  auto* const queue = static_cast<cudaStream_t>(stream);
  return ml::visit_weight_and_gradient(total_dtype, gradient_dtype, [&](auto total_tag, auto gradient_tag) -> int {
    using W = typename decltype(total_tag)::type;
    using G = typename decltype(gradient_tag)::type;
    const bool in_lanes = on_vector_boundary(total, sizeof(W)) && on_vector_boundary(gradient, sizeof(G));
    accumulate<W, G><<<unsigned(ml::chunks_of(size)), kThreads, 0, queue>>>(
        static_cast<W*>(total), static_cast<const G*>(gradient), size, in_lanes);
    return int(cudaGetLastError());
  });
}
}
