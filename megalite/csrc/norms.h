// Root-mean-square and layer normalisation of rows, with and without a residual add before.
//
// x, residual, sum, output and their gradients are [rows, columns] of `dtype`, weight and bias [columns] of it too;
// mean, inverse (one over the root of mean square or variance, plus eps) [rows] and partials are of Wide<dtype>.
// Where mean and bias are null, it is the root-mean-square norm.
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

// x: what was normalised. x_grad = gradient through the norm, plus sum_grad unless that is null; null: not wanted, and
// weight is not read. weight_grad, bias_grad: null, or by way of partials [blocks, 1 or with bias_grad 2, columns].
int megalite_norm_backward_cpu(
    const void* grad, const void* sum_grad, const void* x, const void* weight, const void* mean, const void* inverse,
    void* x_grad, void* weight_grad, void* bias_grad, void* partials, int64_t blocks, int64_t rows, int64_t columns,
    int dtype);
int megalite_norm_backward_cuda(
    const void* grad, const void* sum_grad, const void* x, const void* weight, const void* mean, const void* inverse,
    void* x_grad, void* weight_grad, void* bias_grad, void* partials, int64_t blocks, int64_t rows, int64_t columns,
    int dtype, void* stream);

// Over how many blocks of rows the gradients of weights are summed: of the sizes alone, whatever the threads or the
// chip, so that the sums are the same to the bit.
int64_t megalite_norm_blocks_cpu(int64_t rows, int64_t columns);
int64_t megalite_norm_blocks_cuda(int64_t rows, int64_t columns);

}
