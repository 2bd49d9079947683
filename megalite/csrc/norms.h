// RMSNorm and LayerNorm of rows, optionally with a residual add before the norm.
//
// x, residual, sum, output and their gradients: [rows, columns] of `dtype`; weight and bias: [columns] of `dtype`;
// mean, inverse (1 / sqrt(mean square or variance + eps)): [rows] of Wide<dtype>; partials: Wide<dtype>.
// RMSNorm if mean and bias are null, else LayerNorm.
#pragma once

#include <cstdint>

extern "C" {

// sum = x + residual, rounded to dtype; both may be null. output = normalised sum (or x) * weight + bias.
int megalite_norm_forward_cpu(
    const void* x, const void* residual, const void* weight, const void* bias, void* sum, void* output, void* mean,
    void* inverse, int64_t rows, int64_t columns, double eps, int dtype);
int megalite_norm_forward_cuda(
    const void* x, const void* residual, const void* weight, const void* bias, void* sum, void* output, void* mean,
    void* inverse, int64_t rows, int64_t columns, double eps, int dtype, void* stream);

// x: the input of the norm. x_grad = gradient through the norm + sum_grad (if not null); null: not computed, and weight
// is not read. weight_grad, bias_grad: null, or summed through partials [blocks, 1 (2 with bias_grad), columns].
int megalite_norm_backward_cpu(
    const void* grad, const void* sum_grad, const void* x, const void* weight, const void* mean, const void* inverse,
    void* x_grad, void* weight_grad, void* bias_grad, void* partials, int64_t blocks, int64_t rows, int64_t columns,
    int dtype);
int megalite_norm_backward_cuda(
    const void* grad, const void* sum_grad, const void* x, const void* weight, const void* mean, const void* inverse,
    void* x_grad, void* weight_grad, void* bias_grad, void* partials, int64_t blocks, int64_t rows, int64_t columns,
    int dtype, void* stream);

// The number of row blocks for the weight gradients; depends on the sizes only, not on the threads or the chip, so that
// the sums are equal to the bit.
int64_t megalite_norm_blocks_cpu(int64_t rows, int64_t columns);
int64_t megalite_norm_blocks_cuda(int64_t rows, int64_t columns);

}
