// Softmax cross entropy on a GPU. Statistics: one thread block per row, which reads each logit once; partial results
// are combined in a fixed order, so that results are reproducible.
#include "cross_entropy.h"

#include <cuda_runtime.h>

#include "core/cross_entropy.h"

namespace ml {
namespace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 512;
// Packs of 16 bytes per thread block in the gradient kernel; longer rows are split over several blocks.
constexpr int64_t kPacksOfBlock = 8 * kMostThreads;
constexpr int64_t kMostBlocksOfRow = 65535;

template <typename W>
__device__ Softmax<W> from_lane(const Softmax<W>& mine, int offset) {
  Softmax<W> theirs;
  theirs.maximum = __shfl_down_sync(0xffffffffu, mine.maximum, offset);
  theirs.sum = __shfl_down_sync(0xffffffffu, mine.sum, offset);
  theirs.excess = __shfl_down_sync(0xffffffffu, mine.excess, offset);
  theirs.count = __shfl_down_sync(0xffffffffu, mine.count, offset);
  return theirs;
}

// Warp reduction; the result is valid in lane 0.
template <typename W>
__device__ Softmax<W> joined_over_warp(Softmax<W> state) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) state = joined(state, from_lane(state, offset));
  return state;
}

// Block reduction, called by all threads; the result is valid in thread 0. blockDim.x is a multiple of the warp size.
template <typename W>
__device__ Softmax<W> joined_over_block(Softmax<W> state) {
  // Raw bytes, because __shared__ variables cannot have constructors.
  __shared__ alignas(16) unsigned char bytes[kMostThreads / kWarp * sizeof(Softmax<W>)];
  Softmax<W>* of_warps = reinterpret_cast<Softmax<W>*>(bytes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  state = joined_over_warp(state);
  if (lane == 0) of_warps[warp] = state;
  __syncthreads();
  if (warp == 0) {
    state = lane < warps ? of_warps[lane] : Softmax<W>();
    state = joined_over_warp(state);
  }
  return state;
}

template <typename T, bool kExcess>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy_statistics(const T* __restrict__ logits, const int64_t* __restrict__ labels,
                      const Wide<T>* __restrict__ weights, Wide<T>* __restrict__ results, int64_t rows,
                      int64_t columns, int64_t first_id, Wide<T> on_label, Wide<T> uniform) {
  using W = Wide<T>;
  const int64_t r = blockIdx.x;
  W maximum = 0, sum = 1, expected = 0;
  if (weights[r] != 0) {  // uniform over the block, so the barrier inside is safe
    const T* row = logits + r * columns;
    const Softmax<W> all = joined_over_block(thread_softmax<T, kExcess>(row, columns, threadIdx.x, blockDim.x));
    maximum = all.maximum, sum = all.sum;
    if (threadIdx.x == 0) {
      expected = expected_excess(row, columns, Target<W>{labels[r] - first_id, on_label, uniform}, all);
    }
  }
  if (threadIdx.x == 0) results[r] = maximum, results[rows + r] = sum, results[2 * rows + r] = expected;
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy_gradient(T* __restrict__ logits, const int64_t* __restrict__ labels, const Wide<T>* __restrict__ maximum,
                    const Wide<T>* __restrict__ factor, const Wide<T>* __restrict__ weight, int64_t columns,
                    int64_t first_id, Wide<T> on_label, Wide<T> uniform) {
  using W = Wide<T>;
  const int64_t r = blockIdx.x;
  thread_gradient(logits + r * columns, columns, RowGradient<W>{maximum[r], factor[r], weight[r]},
                  Target<W>{labels[r] - first_id, on_label, uniform},
                  static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x,
                  static_cast<int64_t>(gridDim.y) * blockDim.x);
}

// The number of threads per block: whole warps, with about two iterations over packs per thread.
template <typename T>
int threads_for(int64_t columns) {
  const int64_t wanted = columns / (Pack<T>::kSize * 2 * kPacksAtOnce<T>) / kWarp * kWarp;
  return static_cast<int>(wanted < 128 ? 128 : wanted > kMostThreads ? kMostThreads : wanted);
}

template <typename Run>
int of_type(int dtype, Run run) {
  switch (dtype) {
    case kFloat32: run(static_cast<float*>(nullptr)); break;
    case kFloat64: run(static_cast<double*>(nullptr)); break;
    case kBFloat16: run(static_cast<bf16*>(nullptr)); break;
    case kFloat16: run(static_cast<fp16*>(nullptr)); break;
    default: return kUnsupported;
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace
}  // namespace ml

extern "C" int megalite_cross_entropy_statistics_cuda(const void* logits, const int64_t* labels, const void* weights,
                                                      void* statistics, int64_t rows, int64_t columns,
                                                      int64_t first_id, double on_label, double uniform, int dtype,
                                                      void* stream) {
  if (rows == 0) return 0;
  return ml::of_type(dtype, [&]<typename T>(T*) {
    using W = ml::Wide<T>;
    const auto kernel = uniform > 0 ? ml::cross_entropy_statistics<T, true> : ml::cross_entropy_statistics<T, false>;
    kernel<<<static_cast<unsigned>(rows), ml::threads_for<T>(columns), 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(logits), labels, static_cast<const W*>(weights), static_cast<W*>(statistics), rows,
        columns, first_id, static_cast<W>(on_label), static_cast<W>(uniform));
  });
}

extern "C" int megalite_cross_entropy_gradient_cuda(void* logits, const int64_t* labels, const void* maximum,
                                                    const void* factor, const void* weight, int64_t rows,
                                                    int64_t columns, int64_t first_id, double on_label,
                                                    double uniform, int dtype, void* stream) {
  if (rows == 0 || columns == 0) return 0;
  return ml::of_type(dtype, [&]<typename T>(T*) {
    using W = ml::Wide<T>;
    const int64_t packs = columns / ml::Pack<T>::kSize;
    int64_t blocks = (packs + ml::kPacksOfBlock - 1) / ml::kPacksOfBlock;
    blocks = blocks < 1 ? 1 : blocks > ml::kMostBlocksOfRow ? ml::kMostBlocksOfRow : blocks;
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(blocks));
    ml::cross_entropy_gradient<T><<<grid, ml::threads_for<T>(columns / blocks), 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<T*>(logits), labels, static_cast<const W*>(maximum), static_cast<const W*>(factor),
        static_cast<const W*>(weight), columns, first_id, static_cast<W>(on_label), static_cast<W>(uniform));
  });
}
