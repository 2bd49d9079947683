// Sum of squares, AdamW update and gradient accumulation over lists of contiguous tensors.
//
// Functions return 0, -1 for unsupported dtypes, or the cudaError_t.
#pragma once

#include <cstdint>

extern "C" {

// The number of partial sums that `megalite_adamw_sum_of_squares_*` needs memory for.
int64_t megalite_adamw_chunks(const int64_t* sizes, int64_t count);

// total[0] = the sum of all squares in float64; the order of the additions depends on the sizes only.
int megalite_adamw_sum_of_squares_cpu(const void* const* tensors, const int64_t* sizes, int64_t count,
                                      double* partials, double* total, int dtype);
int megalite_adamw_sum_of_squares_cuda(const void* const* tensors, const int64_t* sizes, int64_t count,
                                       double* partials, double* total, int dtype, void* stream);

// Updates `count` weights (float32 or float64) and their two moments in place. gradients: of the weights' dtype, bf16
// or fp16. copies: null, or the output for the weights rounded to bf16 or fp16.
int megalite_adamw_update_cpu(void* const* weights, void* const* copies, const void* const* gradients,
                              void* const* means, void* const* squares, const int64_t* sizes, int64_t count,
                              double learning_rate, double beta1, double beta2, double eps, double weight_decay,
                              double step, double gradient_scale, int weight_dtype, int gradient_dtype,
                              int copy_dtype);
int megalite_adamw_update_cuda(void* const* weights, void* const* copies, const void* const* gradients,
                               void* const* means, void* const* squares, const int64_t* sizes, int64_t count,
                               double learning_rate, double beta1, double beta2, double eps, double weight_decay,
                               double step, double gradient_scale, int weight_dtype, int gradient_dtype,
                               int copy_dtype, void* stream);

// total += gradient; total is float32 or float64, the gradient has the same dtype or is bf16 or fp16.
int megalite_adamw_accumulate_cpu(void* total, const void* gradient, int64_t size, int total_dtype,
                                  int gradient_dtype);
int megalite_adamw_accumulate_cuda(void* total, const void* gradient, int64_t size, int total_dtype,
                                   int gradient_dtype, void* stream);
}
