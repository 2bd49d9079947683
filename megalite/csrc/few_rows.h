// The C interface of products of a few rows with a weight. dtype: ml::DType. CPU only: GPUs have cuBLAS.
#pragma once

#include <cstdint>

extern "C" {

// inputs [rows, in], weight [out, in] -> output [rows, out] = inputs weight^T, summed in Wide<dtype>.
// int8 tells that the weight is int8_t with scales [out] of float, which each output is multiplied by; else the weight
// has `dtype`, and scales is null.
int megalite_few_rows_linear_cpu(
    const void* inputs, const void* weight, const float* scales, void* output, int64_t rows, int64_t out, int64_t in,
    int int8, int dtype);

}
