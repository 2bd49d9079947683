// Gated activations and bias + GELU on the CPU.
#include "activations.h"

#include "core/activation.h"

namespace {

using namespace ml;

// Values per tile of a thread, and the least number of values for which several threads pay.
constexpr int64_t kTile = 2048, kParallel = 32768;

// Calls run(row, begin, end) for every tile of columns of every row.
template <typename Run>
void over_tiles(int64_t rows, int64_t features, Run run) {
  const int64_t tiles = (features + kTile - 1) / kTile;
#pragma omp parallel for collapse(2) schedule(static) if (rows * features > kParallel)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = tile * kTile;
      run(row, first, first + kTile < features ? first + kTile : features);
    }
  }
}

template <typename A, typename T>
void glu(const T* gate_up, T* out, int64_t rows, int64_t features) {
  over_tiles(rows, features, [=](int64_t row, int64_t begin, int64_t end) {
    const T* gate = gate_up + 2 * row * features;
    const T* up = gate + features;
    T* to = out + row * features;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      to[i] = from_wide<T>(A::at(to_wide(gate[i])).value * to_wide(up[i]));
    }
  });
}

template <typename A, typename T>
void glu_backward(const T* grad, const T* gate_up, T* gate_up_grad, int64_t rows, int64_t features) {
  over_tiles(rows, features, [=](int64_t row, int64_t begin, int64_t end) {
    const T* gate = gate_up + 2 * row * features;
    const T* up = gate + features;
    const T* from = grad + row * features;
    T* gate_grad = gate_up_grad + 2 * row * features;
    T* up_grad = gate_grad + features;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const Wide<T> slope_of = to_wide(from[i]);
      const auto activated = A::at(to_wide(gate[i]));
      gate_grad[i] = from_wide<T>(slope_of * to_wide(up[i]) * activated.slope);
      up_grad[i] = from_wide<T>(slope_of * activated.value);
    }
  });
}

template <typename A, typename T>
void bias_gelu(const T* inputs, const T* bias, T* out, int64_t rows, int64_t features) {
  over_tiles(rows, features, [=](int64_t row, int64_t begin, int64_t end) {
    const T* from = inputs + row * features;
    T* to = out + row * features;
    if (bias == nullptr) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) to[i] = from_wide<T>(A::at(to_wide(from[i])).value);
      return;
    }
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      to[i] = from_wide<T>(A::at(to_wide(from[i]) + to_wide(bias[i])).value);
    }
  });
}

template <typename A, typename T>
void gelu_backward(const T* grad, const T* inputs, T* inputs_grad, int64_t rows, int64_t features) {
  over_tiles(rows, features, [=](int64_t row, int64_t begin, int64_t end) {
    const int64_t start = row * features;
#pragma omp simd
    for (int64_t i = start + begin; i < start + end; ++i) {
      inputs_grad[i] = from_wide<T>(to_wide(grad[i]) * A::at(to_wide(inputs[i])).slope);
    }
  });
}

template <typename A, typename T>
void bias_gelu_backward(
    const T* grad, const T* inputs, const T* bias, T* inputs_grad, T* bias_grad, Wide<T>* partials, int64_t rows,
    int64_t features) {
  const int64_t taken = rows_per_block(rows), blocks = (rows + taken - 1) / taken;
#pragma omp parallel if (rows * features > kParallel)
  {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      Wide<T>* sums = partials + block * features;
      for (int64_t i = 0; i < features; ++i) sums[i] = 0;
      const int64_t end = (block + 1) * taken < rows ? (block + 1) * taken : rows;
      for (int64_t row = block * taken; row < end; ++row) {
        const T* from = grad + row * features;
        const T* of = inputs + row * features;
        T* to = inputs_grad + row * features;
#pragma omp simd
        for (int64_t i = 0; i < features; ++i) {
          const Wide<T> passed = to_wide(from[i]) * A::at(to_wide(of[i]) + to_wide(bias[i])).slope;
          to[i] = from_wide<T>(passed);
          sums[i] += passed;
        }
      }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < features; ++i) {
      double sum = 0;  // fp32 would add rounding errors over up to 256 partial sums
      for (int64_t block = 0; block < blocks; ++block) sum += partials[block * features + i];
      bias_grad[i] = from_wide<T>(static_cast<Wide<T>>(sum));
    }
  }
}

}  // namespace

extern "C" {

int megalite_glu_cpu(
    const void* gate_up, void* out, int64_t rows, int64_t features, int activation, int dtype) {
  return for_activation(activation, dtype, [=](auto kind, auto type) {
    using T = decltype(type);
    glu<decltype(kind)>(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, features);
  });
}

int megalite_glu_backward_cpu(
    const void* grad, const void* gate_up, void* gate_up_grad, int64_t rows, int64_t features, int activation,
    int dtype) {
  return for_activation(activation, dtype, [=](auto kind, auto type) {
    using T = decltype(type);
    glu_backward<decltype(kind)>(
        static_cast<const T*>(grad), static_cast<const T*>(gate_up), static_cast<T*>(gate_up_grad), rows, features);
  });
}

int megalite_bias_gelu_cpu(
    const void* inputs, const void* bias, void* out, int64_t rows, int64_t features, int activation, int dtype) {
  return for_gelu(activation, dtype, [=](auto kind, auto type) {
    using T = decltype(type);
    bias_gelu<decltype(kind)>(
        static_cast<const T*>(inputs), static_cast<const T*>(bias), static_cast<T*>(out), rows, features);
  });
}

int64_t megalite_bias_blocks(int64_t rows) {
  const int64_t taken = rows_per_block(rows);
  return (rows + taken - 1) / taken;
}

int megalite_bias_gelu_backward_cpu(
    const void* grad, const void* inputs, const void* bias, void* inputs_grad, void* bias_grad, void* partials,
    int64_t rows, int64_t features, int activation, int dtype) {
  return for_gelu(activation, dtype, [=](auto kind, auto type) {
    using T = decltype(type);
    const T *from = static_cast<const T*>(grad), *of = static_cast<const T*>(inputs);
    T* to = static_cast<T*>(inputs_grad);
    if (bias == nullptr) {
      gelu_backward<decltype(kind)>(from, of, to, rows, features);
    } else {
      bias_gelu_backward<decltype(kind)>(
          from, of, static_cast<const T*>(bias), to, static_cast<T*>(bias_grad), static_cast<Wide<T>*>(partials),
          rows, features);
    }
  });
}

}
