// RMSNorm and LayerNorm on a GPU. Each row is read from memory once: blockDim.x threads share a row and keep it in
// registers, kPacks times 16 bytes each; blockDim.y rows are processed at a time. The `_any` kernels serve rows that
// are not aligned to 16 bytes or too long for registers, and float64; they read a row again in each step.

#include "norms.h"

#include <algorithm>
#include <type_traits>

#include <cuda_runtime.h>

#include "core/norm.h"
#include "cuda/pack.cuh"

namespace {

using namespace ml;

constexpr int kForwardThreads = 1024, kBlockThreads = 256, kAnyThreads = 256;
constexpr int64_t kMostBlocks = 264;  // two for each multiprocessor of an H100 or H200
constexpr int kSumLanes = 32, kSumRows = 8;

// Threads per block of norm_backward: fewer if the sums of weight and bias (LayerNorm) need many registers.
constexpr int backward_threads(int packs, int pack_size, bool centred) {
  return centred && packs * pack_size > 16 ? 256 : 512;
}

// Sums kValues values over the threads of a row; all its threads get the result. Consecutive calls alternate `slot`
// between 0 and 1, which saves a second barrier: a warp can write its part while others still read the previous call's.
template <typename W, int kValues>
struct RowSums {
  W parts[2][kValues][32];

  __device__ __forceinline__ void add_up(W (&values)[kValues], int slot) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = warp_sum(values[i]);
    const int warps = blockDim.x / 32;
    if (warps == 1) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.y * warps;
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) parts[slot][i][first + warp] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = warp_sum(lane < warps ? parts[slot][i][first + lane] : W(0));
  }
};

template <typename T, int kPacks, bool kCentred>
__global__ void __launch_bounds__(kForwardThreads) norm_forward(
    const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* output, Wide<T>* mean, Wide<T>* inverse,
    int64_t rows, int columns, float eps) {
  using W = Wide<T>;
  constexpr int kSize = Pack<T>::kSize;
  __shared__ RowSums<W, 1> sums;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = row < rows;  // inactive threads only take part in the barriers
  const int64_t at = row * columns;
  Pack<T> packs[kPacks];
  W total[1] = {0};
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (p * blockDim.x + threadIdx.x) * kSize;
    if (!active || column >= columns) continue;
    packs[p] = load(x + at + column);
    if (residual != nullptr) {
      const Pack<T> other = load(residual + at + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        packs[p].values[i] = from_wide<T>(to_wide(packs[p].values[i]) + to_wide(other.values[i]));
      }
      store(sum + at + column, packs[p]);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const W value = to_wide(packs[p].values[i]);
      total[0] += kCentred ? value : value * value;
    }
  }
  sums.add_up(total, 0);
  W centre = 0;
  if (kCentred) {
    centre = total[0] / static_cast<W>(columns);
    total[0] = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (p * blockDim.x + threadIdx.x) * kSize;
      if (!active || column >= columns) continue;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const W deviation = to_wide(packs[p].values[i]) - centre;
        total[0] += deviation * deviation;
      }
    }
    sums.add_up(total, 1);
  }
  if (!active) return;
  const W scale = W(1) / sqrt(total[0] / static_cast<W>(columns) + static_cast<W>(eps));
  if (threadIdx.x == 0) {
    if (kCentred) mean[row] = centre;
    inverse[row] = scale;
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (p * blockDim.x + threadIdx.x) * kSize;
    if (column >= columns) continue;
    const Pack<T> factors = load(weight + column);
    Pack<T> shifts;
    if (kCentred) shifts = load(bias + column);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      W value = normalised(to_wide(packs[p].values[i]), centre, scale) * to_wide(factors.values[i]);
      if (kCentred) value += to_wide(shifts.values[i]);
      packs[p].values[i] = from_wide<T>(value);
    }
    store(output + at + column, packs[p]);
  }
}

template <typename T, bool kCentred>
__global__ void __launch_bounds__(kAnyThreads) norm_forward_any(
    const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* output, Wide<T>* mean, Wide<T>* inverse,
    int64_t columns, double eps) {
  using W = Wide<T>;
  __shared__ RowSums<W, 1> sums;
  const int64_t row = blockIdx.x, at = row * columns;
  // Each thread reads back only elements of `sum` that it wrote itself, so no barrier is needed.
  const T* from = residual != nullptr ? sum + at : x + at;
  W total[1] = {0};
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    if (residual != nullptr) sum[at + i] = from_wide<T>(to_wide(x[at + i]) + to_wide(residual[at + i]));
    const W value = to_wide(from[i]);
    total[0] += kCentred ? value : value * value;
  }
  sums.add_up(total, 0);
  W centre = 0;
  if (kCentred) {
    centre = total[0] / static_cast<W>(columns);
    total[0] = 0;
    for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      const W deviation = to_wide(from[i]) - centre;
      total[0] += deviation * deviation;
    }
    sums.add_up(total, 1);
  }
  const W scale = W(1) / sqrt(total[0] / static_cast<W>(columns) + static_cast<W>(eps));
  if (threadIdx.x == 0) {
    if (kCentred) mean[row] = centre;
    inverse[row] = scale;
  }
  for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
    W value = normalised(to_wide(from[i]), centre, scale) * to_wide(weight[i]);
    if (kCentred) value += to_wide(bias[i]);
    output[at + i] = from_wide<T>(value);
  }
}

// Grid-stride loop over groups of blockDim.y rows; each thread keeps its sums for weight and bias in registers. At the
// end a block adds them over its blockDim.y rows, in order, and writes its own row of `partials`.
template <typename T, int kPacks, bool kCentred>
__global__ void __launch_bounds__(backward_threads(kPacks, Pack<T>::kSize, kCentred))
    norm_backward(
    const T* grad, const T* sum_grad, const T* x, const T* weight, const Wide<T>* mean, const Wide<T>* inverse,
    T* x_grad, Wide<T>* partials, int64_t rows, int columns) {
  using W = Wide<T>;
  constexpr int kSize = Pack<T>::kSize, kSums = kCentred ? 2 : 1;
  __shared__ RowSums<W, kSums> sums;
  extern __shared__ __align__(16) unsigned char dynamic[];
  W weight_sums[kPacks][kSize] = {}, bias_sums[kCentred ? kPacks : 1][kSize] = {};
  // The weight is kept if registers allow; otherwise it is read again twice per row.
  constexpr bool kKeeps = kPacks <= 2;
  W kept[kKeeps ? kPacks : 1][kSize];
  if (kKeeps && x_grad != nullptr) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (p * blockDim.x + threadIdx.x) * kSize;
      if (column >= columns) continue;
      const Pack<T> factors = load(weight + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) kept[kKeeps ? p : 0][i] = to_wide(factors.values[i]);
    }
  }
  int slot = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows; first += step, slot ^= 1) {
    const int64_t row = first + threadIdx.y, at = row * columns;
    const bool active = row < rows;
    const W centre = kCentred && active ? mean[row] : W(0), scale = active ? inverse[row] : W(0);
    Pack<T> values[kPacks], grads[kPacks], passed[kPacks];
    W totals[kSums] = {};
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (p * blockDim.x + threadIdx.x) * kSize;
      if (!active || column >= columns) continue;
      values[p] = load(x + at + column);
      grads[p] = load(grad + at + column);
      if (x_grad != nullptr && sum_grad != nullptr) passed[p] = load(sum_grad + at + column);
    }
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (p * blockDim.x + threadIdx.x) * kSize;
      if (!active || column >= columns) continue;
      Pack<T> factors;
      if (!kKeeps && x_grad != nullptr) factors = load(weight + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const W from = to_wide(grads[p].values[i]);
        const W value = normalised(to_wide(values[p].values[i]), centre, scale);
        weight_sums[p][i] += from * value;
        if (kCentred) bias_sums[p][i] += from;
        if (x_grad != nullptr) {
          const W weighted = from * (kKeeps ? kept[kKeeps ? p : 0][i] : to_wide(factors.values[i]));
          totals[0] += weighted * value;
          if (kCentred) totals[kSums - 1] += weighted;
        }
      }
    }
    if (x_grad == nullptr) continue;
    sums.add_up(totals, slot);
    const W projection = totals[0] / static_cast<W>(columns);
    const W average = kCentred ? totals[kSums - 1] / static_cast<W>(columns) : W(0);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (p * blockDim.x + threadIdx.x) * kSize;
      if (!active || column >= columns) continue;
      Pack<T> factors;
      if (!kKeeps) factors = load(weight + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const W factor = kKeeps ? kept[kKeeps ? p : 0][i] : to_wide(factors.values[i]);
        const W weighted = to_wide(grads[p].values[i]) * factor;
        const W value = normalised(to_wide(values[p].values[i]), centre, scale);
        W through = input_grad(weighted, value, average, projection, scale);
        if (sum_grad != nullptr) through += to_wide(passed[p].values[i]);
        values[p].values[i] = from_wide<T>(through);
      }
      store(x_grad + at + column, values[p]);
    }
  }
  if (partials == nullptr) return;
  W* own = partials + static_cast<int64_t>(blockIdx.x) * kSums * columns;
  W* shared = reinterpret_cast<W*>(dynamic);
  for (int turn = blockDim.y - 1; turn >= 0; --turn) {
    if (threadIdx.y == turn) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = (p * blockDim.x + threadIdx.x) * kSize;
        if (column >= columns) continue;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
#pragma unroll
          for (int s = 0; s < kSums; ++s) {
            const int place = s * columns + column + i;
            W value = s == 0 ? weight_sums[p][i] : bias_sums[kCentred ? p : 0][i];
            if (turn < static_cast<int>(blockDim.y) - 1) value += shared[place];
            (turn == 0 ? own : shared)[place] = value;
          }
        }
      }
    }
    __syncthreads();
  }
}

template <typename T, bool kCentred>
__global__ void __launch_bounds__(kAnyThreads) norm_backward_any(
    const T* grad, const T* sum_grad, const T* x, const T* weight, const Wide<T>* mean, const Wide<T>* inverse,
    T* x_grad, Wide<T>* partials, int64_t rows, int64_t columns) {
  using W = Wide<T>;
  constexpr int kSums = kCentred ? 2 : 1;
  __shared__ RowSums<W, kSums> sums;
  // Each thread adds to its own columns, so no barrier is needed.
  W* own = partials != nullptr ? partials + static_cast<int64_t>(blockIdx.x) * kSums * columns : nullptr;
  if (own != nullptr) {
    for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      own[i] = W(0);
      if (kCentred) own[columns + i] = W(0);
    }
  }
  int slot = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x, slot ^= 1) {
    const int64_t at = row * columns;
    const W centre = kCentred ? mean[row] : W(0), scale = inverse[row];
    W totals[kSums] = {};
    for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      const W from = to_wide(grad[at + i]), value = normalised(to_wide(x[at + i]), centre, scale);
      if (own != nullptr) {
        own[i] += from * value;
        if (kCentred) own[columns + i] += from;
      }
      if (x_grad != nullptr) {
        const W weighted = from * to_wide(weight[i]);
        totals[0] += weighted * value;
        if (kCentred) totals[kSums - 1] += weighted;
      }
    }
    if (x_grad == nullptr) continue;
    sums.add_up(totals, slot);
    const W projection = totals[0] / static_cast<W>(columns);
    const W average = kCentred ? totals[kSums - 1] / static_cast<W>(columns) : W(0);
    for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) {
      const W weighted = to_wide(grad[at + i]) * to_wide(weight[i]);
      const W value = normalised(to_wide(x[at + i]), centre, scale);
      W through = input_grad(weighted, value, average, projection, scale);
      if (sum_grad != nullptr) through += to_wide(sum_grad[at + i]);
      x_grad[at + i] = from_wide<T>(through);
    }
  }
}

// Sums the columns of `partials` over the blocks, in a fixed order; blockDim is (kSumLanes columns, kSumRows).
template <typename T>
__global__ void __launch_bounds__(kSumLanes* kSumRows) norm_sum_partials(
    const Wide<T>* partials, T* weight_grad, T* bias_grad, int64_t blocks, int64_t columns, int64_t width) {
  using W = Wide<T>;
  __shared__ W parts[kSumRows][kSumLanes];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumLanes + threadIdx.x;
  W total = 0;
  if (column < width) {
    for (int64_t block = threadIdx.y; block < blocks; block += kSumRows) total += partials[block * width + column];
  }
  parts[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
#pragma unroll
  for (int row = 1; row < kSumRows; ++row) total += parts[row][threadIdx.x];
  (column < columns ? weight_grad[column] : bias_grad[column - columns]) = from_wide<T>(total);
}

// The shape of a thread block: `packs` packs for each of `threads` threads of a row, `rows` rows. packs = 0: a row does
// not fit.
struct Plan {
  int packs = 0, threads = 0, rows = 1;
};

template <typename MostThreads>
Plan plan_for(int64_t packs, int64_t most_of_warp, MostThreads most_threads) {
  // Rows of at most `most_of_warp` packs get one warp, which needs no barrier. For longer rows two packs per thread
  // keep enough loads in flight.
  const int candidates[] = {packs <= 32 ? 1 : packs <= 64 ? 2 : packs <= most_of_warp ? 4 : 2, 4};
  for (const int each : candidates) {
    const int64_t threads = (packs + each * 32 - 1) / (each * 32) * 32;
    if (packs > 0 && threads <= most_threads(each)) {
      return {each, static_cast<int>(threads), static_cast<int>(std::max<int64_t>(1, kBlockThreads / threads))};
    }
  }
  return {};
}

template <typename Run>
void with_packs(int packs, Run run) {
  switch (packs) {
    case 1:
      run(std::integral_constant<int, 1>{});
      break;
    case 2:
      run(std::integral_constant<int, 2>{});
      break;
    default:
      run(std::integral_constant<int, 4>{});
  }
}

template <typename T, bool kCentred>
void forward(
    const T* x, const T* residual, const T* weight, const T* bias, T* sum, T* output, Wide<T>* mean, Wide<T>* inverse,
    int64_t rows, int64_t columns, double eps, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    const bool in_packs = columns % Pack<T>::kSize == 0 && aligned(x) && aligned(residual) && aligned(weight) &&
                          aligned(bias) && aligned(sum) && aligned(output);
    const Plan plan = plan_for(in_packs ? columns / Pack<T>::kSize : 0, 128, [](int) { return kForwardThreads; });
    if (plan.packs > 0) {
      const dim3 block(plan.threads, plan.rows);
      const auto grid = static_cast<unsigned>((rows + plan.rows - 1) / plan.rows);
      with_packs(plan.packs, [&](auto packs) {
        norm_forward<T, packs.value, kCentred><<<grid, block, 0, stream>>>(
            x, residual, weight, bias, sum, output, mean, inverse, rows, static_cast<int>(columns),
            static_cast<float>(eps));
      });
      return;
    }
  }
  norm_forward_any<T, kCentred><<<static_cast<unsigned>(rows), kAnyThreads, 0, stream>>>(
      x, residual, weight, bias, sum, output, mean, inverse, columns, eps);
}

template <typename T, bool kCentred>
void backward(
    const T* grad, const T* sum_grad, const T* x, const T* weight, const Wide<T>* mean, const Wide<T>* inverse,
    T* x_grad, T* weight_grad, T* bias_grad, Wide<T>* partials, int64_t blocks, int64_t rows, int64_t columns,
    cudaStream_t stream) {
  const int64_t width = (kCentred ? 2 : 1) * columns;
  partials = weight_grad != nullptr ? partials : nullptr;
  const auto grid = static_cast<unsigned>(blocks);
  Plan plan;
  if constexpr (sizeof(T) < 8) {
    const bool in_packs = columns % Pack<T>::kSize == 0 && aligned(grad) && aligned(sum_grad) && aligned(x) &&
                          aligned(weight) && aligned(x_grad);
    // With four packs, LayerNorm's sums would take half of a thread's registers: use two warps per row instead.
    plan = plan_for(in_packs ? columns / Pack<T>::kSize : 0, kCentred ? 64 : 128, [](int each) {
      return backward_threads(each, Pack<T>::kSize, kCentred);
    });
    if (plan.packs > 0) {
      const dim3 block(plan.threads, plan.rows);
      const size_t shared = plan.rows > 1 ? width * sizeof(Wide<T>) : 0;
      with_packs(plan.packs, [&](auto packs) {
        norm_backward<T, packs.value, kCentred><<<grid, block, shared, stream>>>(
            grad, sum_grad, x, weight, mean, inverse, x_grad, partials, rows, static_cast<int>(columns));
      });
    }
  }
  if (plan.packs == 0) {
    norm_backward_any<T, kCentred><<<grid, kAnyThreads, 0, stream>>>(
        grad, sum_grad, x, weight, mean, inverse, x_grad, partials, rows, columns);
  }
  if (partials != nullptr) {
    const auto blocks_of_columns = static_cast<unsigned>((width + kSumLanes - 1) / kSumLanes);
    norm_sum_partials<T><<<blocks_of_columns, dim3(kSumLanes, kSumRows), 0, stream>>>(
        partials, weight_grad, bias_grad, blocks, columns, width);
  }
}

}  // namespace

extern "C" int64_t megalite_norm_blocks_cuda(int64_t rows, int64_t) { return std::clamp<int64_t>(rows, 1, kMostBlocks); }

extern "C" int megalite_norm_forward_cuda(
    const void* x, const void* residual, const void* weight, const void* bias, void* sum, void* output, void* mean,
    void* inverse, int64_t rows, int64_t columns, double eps, int dtype, void* stream) {
  if (rows == 0 || columns == 0) return 0;
  const int code = for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    const auto run = bias != nullptr ? forward<T, true> : forward<T, false>;
    run(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const T*>(weight),
        static_cast<const T*>(bias), static_cast<T*>(sum), static_cast<T*>(output), static_cast<W*>(mean),
        static_cast<W*>(inverse), rows, columns, eps, static_cast<cudaStream_t>(stream));
  });
  return code != 0 ? code : cudaGetLastError();
}

extern "C" int megalite_norm_backward_cuda(
    const void* grad, const void* sum_grad, const void* x, const void* weight, const void* mean, const void* inverse,
    void* x_grad, void* weight_grad, void* bias_grad, void* partials, int64_t blocks, int64_t rows, int64_t columns,
    int dtype, void* stream) {
  if (columns == 0) return 0;
  const int code = for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    using W = Wide<T>;
    // With 0 rows the mean is a null pointer: bias_grad also identifies LayerNorm.
    const auto run = mean != nullptr || bias_grad != nullptr ? backward<T, true> : backward<T, false>;
    run(static_cast<const T*>(grad), static_cast<const T*>(sum_grad), static_cast<const T*>(x),
        static_cast<const T*>(weight), static_cast<const W*>(mean), static_cast<const W*>(inverse),
        static_cast<T*>(x_grad), static_cast<T*>(weight_grad), static_cast<T*>(bias_grad), static_cast<W*>(partials),
        blocks, rows, columns, static_cast<cudaStream_t>(stream));
  });
  return code != 0 ? code : cudaGetLastError();
}
