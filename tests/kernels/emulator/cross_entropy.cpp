// The CUDA kernels of the cross entropy, one thread after another on the host: the same functions of core/, combined in
// the order of the kernel's shuffles.
#include <vector>

#include "core/cross_entropy.h"

namespace {

constexpr int kWarp = 32;

template <typename W>
ml::Softmax<W> joined_over_warp(std::vector<ml::Softmax<W>> lanes) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    // Ascending, so that each lane reads the other lane's value from before this step.
    for (int lane = 0; lane + offset < kWarp; ++lane) lanes[lane] = ml::joined(lanes[lane], lanes[lane + offset]);
  }
  return lanes[0];
}

template <typename T>
ml::Softmax<ml::Wide<T>> block_softmax(const T* row, int64_t columns, int threads, bool excess) {
  using State = ml::Softmax<ml::Wide<T>>;
  std::vector<State> of_warps(kWarp);
  for (int warp = 0; warp < threads / kWarp; ++warp) {
    std::vector<State> lanes;
    for (int lane = 0; lane < kWarp; ++lane) {
      const int rank = warp * kWarp + lane;
      lanes.push_back(excess ? ml::thread_softmax<T, true>(row, columns, rank, threads)
                             : ml::thread_softmax<T, false>(row, columns, rank, threads));
    }
    of_warps[warp] = joined_over_warp(lanes);
  }
  return joined_over_warp(of_warps);
}

template <typename T>
void run(T* logits, const int64_t* labels, const ml::Wide<T>* weights, ml::Wide<T>* statistics, int64_t rows,
         int64_t columns, int64_t first_id, double on_label, double uniform, int threads) {
  using W = ml::Wide<T>;
  for (int64_t r = 0; r < rows; ++r) {
    T* row = logits + r * columns;
    const ml::Target<W> target{labels[r] - first_id, static_cast<W>(on_label), static_cast<W>(uniform)};
    const auto all = block_softmax(row, columns, threads, uniform > 0);
    statistics[r] = all.maximum, statistics[rows + r] = all.sum;
    statistics[2 * rows + r] = ml::expected_excess(row, columns, target, all);
    const ml::RowGradient<W> gradient{all.maximum, weights[r] / all.sum, weights[r]};
    for (int rank = 0; rank < threads; ++rank) ml::thread_gradient(row, columns, gradient, target, rank, threads);
  }
}

}  // namespace

extern "C" void run_cross_entropy(void* logits, const int64_t* labels, const void* weights, void* statistics,
                                  int64_t rows, int64_t columns, int64_t first_id, double on_label, double uniform,
                                  int threads, int dtype) {
  const auto of = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    using W = ml::Wide<T>;
    run(typed, labels, static_cast<const W*>(weights), static_cast<W*>(statistics), rows, columns, first_id, on_label,
        uniform, threads);
  };
  if (dtype == ml::kFloat32) of(static_cast<float*>(logits));
  if (dtype == ml::kFloat64) of(static_cast<double*>(logits));
  if (dtype == ml::kBFloat16) of(static_cast<ml::bf16*>(logits));
  if (dtype == ml::kFloat16) of(static_cast<ml::fp16*>(logits));
}
