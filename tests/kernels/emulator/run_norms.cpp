// Runs forward and backward of the emulated LayerNorm, several warps per row, under -fsanitize=thread.
#include <vector>

#include "cuda_runtime.h"
#include "norms.h"

int main() {
  constexpr int64_t kRows = 5, kColumns = 516;
  const int64_t blocks = 2;  // fewer than rows, so that each block loops
  const auto values = [](int64_t count) { return std::vector<float>(count, 0.5f); };
  std::vector<float> x = values(kRows * kColumns), residual = x, sum = x, output = x, x_grad = x;
  std::vector<float> weight = values(kColumns), bias = weight, weight_grad = weight, bias_grad = weight;
  std::vector<float> mean = values(kRows), inverse = mean, partials = values(blocks * 2 * kColumns);
  for (unsigned order = 0; order < 2; ++order) {
    megalite_emulator_order = order;
    megalite_norm_forward_cuda(
        x.data(), residual.data(), weight.data(), bias.data(), sum.data(), output.data(), mean.data(), inverse.data(),
        kRows, kColumns, 1e-5, 0, nullptr);
    megalite_norm_backward_cuda(
        x.data(), residual.data(), sum.data(), weight.data(), mean.data(), inverse.data(), x_grad.data(),
        weight_grad.data(), bias_grad.data(), partials.data(), blocks, kRows, kColumns, 0, nullptr);
  }
  std::puts("done");
}
