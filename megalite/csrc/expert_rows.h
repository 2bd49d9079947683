// The C interface of experts' rows: tokens copied to the rows of their experts, and rows summed back. dtype: ml::DType.
#pragma once

#include <cstdint>

// Token t has the rows places[t * chosen + j] of `rows`. Functions on a GPU trap if a place is no row; on the CPU the
// caller checks the places. Rows that are no token's place are not written.
struct MegalitePlaces {
  const int64_t* places;
  int64_t tokens;
  int64_t chosen;
  int64_t rows;
  int64_t columns;
};

extern "C" {

// values [tokens, columns] -> rows [rows, columns]
int megalite_expert_rows_cpu(const void* values, void* rows, const MegalitePlaces* places, int dtype);
int megalite_expert_rows_cuda(const void* values, void* rows, const MegalitePlaces* places, int dtype, void* stream);

// rows, weights [tokens, chosen] or null for 1 -> sums [tokens, columns], in the order of the choices, in Wide<dtype>
int megalite_expert_sums_cpu(
    const void* rows, const void* weights, void* sums, const MegalitePlaces* places, int dtype);
int megalite_expert_sums_cuda(
    const void* rows, const void* weights, void* sums, const MegalitePlaces* places, int dtype, void* stream);

// grad [tokens, columns], rows, weights -> rows_grad like rows, weights_grad like weights
int megalite_expert_sums_backward_cpu(
    const void* grad, const void* rows, const void* weights, void* rows_grad, void* weights_grad,
    const MegalitePlaces* places, int dtype);
int megalite_expert_sums_backward_cuda(
    const void* grad, const void* rows, const void* weights, void* rows_grad, void* weights_grad,
    const MegalitePlaces* places, int dtype, void* stream);

}
