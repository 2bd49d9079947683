// The optimizer's operators on the CPU, the counterpart of cuda/adamw.cu.
#include "adamw.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/adamw.h"
#include "core/adamw_types.h"

namespace {

using ml::kChunk;

// Below this many elements, starting threads costs more than they save.
constexpr int64_t kElementsWorthThreads = 4 * kChunk;

std::vector<int64_t> first_chunks(const int64_t* sizes, int64_t count) {
  std::vector<int64_t> first(count + 1, 0);
  for (int64_t tensor = 0; tensor < count; ++tensor) {
    first[tensor + 1] = first[tensor] + ml::chunks_of(sizes[tensor]);
  }
  return first;
}

// Calls work(chunk, tensor, begin, end) for every chunk of every tensor.
template <typename Work>
void for_each_chunk(const int64_t* sizes, int64_t count, const Work& work) {
  const std::vector<int64_t> first = first_chunks(sizes, count);
  const int64_t chunks = first[count];
#pragma omp parallel for schedule(static) if (chunks * kChunk > kElementsWorthThreads)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int tensor = ml::tensor_of_chunk(first.data(), int(count), chunk);
    const int64_t begin = (chunk - first[tensor]) * kChunk;
    work(chunk, tensor, begin, std::min(begin + kChunk, sizes[tensor]));
  }
}

template <typename T>
double sum_of_squares(const T* values, int64_t size) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < size; ++i) {
    const double value = double(ml::to_wide(values[i]));
    sum += value * value;
  }
  return sum;
}

template <typename W, typename G, typename C>
void update(const ml::AdamWStep<W>& given, W* __restrict weight, C* __restrict copy, const G* __restrict gradient,
            W* __restrict mean, W* __restrict square, int64_t size) {
  const ml::AdamWStep<W> step = given;  // a local copy stays in registers: the pointers might alias a reference
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    W w = weight[i], m = mean[i], s = square[i];
    ml::adamw_update(step, W(ml::to_wide(gradient[i])), w, m, s);
    weight[i] = w, mean[i] = m, square[i] = s;
    if constexpr (!std::is_same_v<C, ml::NoCopy>) copy[i] = ml::from_wide<C>(w);
  }
}

}  // namespace

extern "C" {

int64_t megalite_adamw_chunks(const int64_t* sizes, int64_t count) { return first_chunks(sizes, count)[count]; }

int megalite_adamw_sum_of_squares_cpu(const void* const* tensors, const int64_t* sizes, int64_t count,
                                      double* partials, double* total, int dtype) {
  return ml::visit_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_chunk(sizes, count, [&](int64_t chunk, int tensor, int64_t begin, int64_t end) {
      partials[chunk] = sum_of_squares(static_cast<const T*>(tensors[tensor]) + begin, end - begin);
    });
    const int64_t chunks = megalite_adamw_chunks(sizes, count);
    double sum = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk];
    *total = sum;
    return 0;
  });
}

int megalite_adamw_update_cpu(void* const* weights, void* const* copies, const void* const* gradients,
                              void* const* means, void* const* squares, const int64_t* sizes, int64_t count,
                              double learning_rate, double beta1, double beta2, double eps, double weight_decay,
                              double step, double gradient_scale, int weight_dtype, int gradient_dtype,
                              int copy_dtype) {
  return ml::visit_weight_and_gradient(weight_dtype, gradient_dtype, [&](auto weight_tag, auto gradient_tag) {
    using W = typename decltype(weight_tag)::type;
    using G = typename decltype(gradient_tag)::type;
    const auto coefficients =
        ml::AdamWStep<W>::of(learning_rate, beta1, beta2, eps, weight_decay, step, gradient_scale);
    return ml::visit_copy(copies != nullptr, copy_dtype, [&](auto copy_tag) {
      using C = typename decltype(copy_tag)::type;
      for_each_chunk(sizes, count, [&](int64_t, int tensor, int64_t begin, int64_t end) {
        update<W, G, C>(coefficients, static_cast<W*>(weights[tensor]) + begin,
                        copies == nullptr ? nullptr : static_cast<C*>(copies[tensor]) + begin,
                        static_cast<const G*>(gradients[tensor]) + begin, static_cast<W*>(means[tensor]) + begin,
                        static_cast<W*>(squares[tensor]) + begin, end - begin);
      });
      return 0;
    });
  });
}

int megalite_adamw_accumulate_cpu(void* total, const void* gradient, int64_t size, int total_dtype,
                                  int gradient_dtype) {
  return ml::visit_weight_and_gradient(total_dtype, gradient_dtype, [&](auto total_tag, auto gradient_tag) {
    using W = typename decltype(total_tag)::type;
    using G = typename decltype(gradient_tag)::type;
    for_each_chunk(&size, 1, [&](int64_t, int, int64_t begin, int64_t end) {
      W* __restrict sums = static_cast<W*>(total);
      const G* __restrict added = static_cast<const G*>(gradient);
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) sums[i] += W(ml::to_wide(added[i]));
    });
    return 0;
  });
}
}
