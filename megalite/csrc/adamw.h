// Lists of tensors: the sum of squares, AdamW's update, and the accumulation of gradients. Each tensor is contiguous.
//
// Functions return 0, -1 for types that are not served, or CUDA's error code.
#pragma once

#include <cstdint>

extern "C" {

// How many partial sums `megalite_adamw_sum_of_squares_*` wants room for.
int64_t megalite_adamw_chunks(const int64_t* sizes, int64_t count);

// total[0] = the sum of all squares, added in float64 in an order that only the sizes decide.
int megalite_adamw_sum_of_squares_cpu(const void* const* tensors, const int64_t* sizes, int64_t count,
                                      double* partials, double* total, int dtype);
int megalite_adamw_sum_of_squares_cuda(const void* const* tensors, const int64_t* sizes, int64_t count,
                                       double* partials, double* total, int dtype, void* stream);

// One update of `count` weights of float32 or float64 and their two moments in place. gradients: of the weights' type
// or 16 bits. copies: null, or the weights' rounded values of 16 bits, which are written.
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

// total += gradient; total is of float32 or float64, the gradient of that type or of 16 bits.
int megalite_adamw_accumulate_cpu(void* total, const void* gradient, int64_t size, int total_dtype,
                                  int gradient_dtype);
int megalite_adamw_accumulate_cuda(void* total, const void* gradient, int64_t size, int total_dtype,
                                   int gradient_dtype, void* stream);
}
