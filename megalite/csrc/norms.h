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

// x: what was normalised. x_grad = gradient through the norm, plus sum_grad unless that is null; skipped where null.
// weight_grad, bias_grad: skipped where weight_grad is null, else through partials
// [norm_blocks(rows), 1 or with bias_grad 2, columns].
int megalite_norm_backward_cpu(
    const void* grad, const void* sum_grad, const void* x, const void* weight, const void* mean, const void* inverse,
    void* x_grad, void* weight_grad, void* bias_grad, void* partials, int64_t rows, int64_t columns, int dtype);

// Over how many blocks of rows the gradients of weights are summed; of the rows alone, whatever the threads.
int64_t megalite_norm_blocks_cpu(int64_t rows);

}
