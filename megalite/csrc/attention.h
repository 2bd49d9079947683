// The C interface of attention over packed sequences, and the arguments of the kernels.
#pragma once

#include <cstdint>

// Sequences are packed end to end: sequence n has the queries [query_starts[n], query_starts[n + 1]), and its keys
// likewise (cu_seqlens). The head dim is contiguous; the strides of tokens and heads are free (in elements; for CUDA a
// multiple of 8, and addresses a multiple of 16 bytes). Tensors without strides here are contiguous: output and its
// gradient [queries, heads, head_size], the gradients of query, key and value in the shapes of these.
struct MegaliteAttention {
  int64_t sequences, queries, keys;      // queries, keys: totals over all sequences
  int64_t longest_query, longest_key;    // max_seqlen of queries and keys
  int64_t heads, kv_heads, head_size;    // heads is a multiple of kv_heads
  int64_t left, right;                   // window_size: keys before and after the query's position; -1: no limit
  double scale;                          // factor on the scores, above 0

  const void *query, *key, *value;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  const int32_t *query_starts, *key_starts;  // [sequences + 1]

  // The queries consist of rows of `query_row` queries, the keys of rows of `key_row`, both above 0. A row's first
  // query and first key have the positions first_query and first_key: dropout and, if `positioned`, the window count
  // from there. Otherwise the window is aligned at the ends of each sequence's queries and keys.
  int64_t query_row, key_row, first_query, first_key, positioned;

  // Dropout by core/counter.h: the drop probability is `dropped` / 65536; 0: no dropout, the other fields are unused.
  // Local head h is head first_head + h of the model.
  const int64_t* samples;  // one per row
  int64_t dropped, drop_key_low, drop_key_high, first_head;

  void* output;
  void* lse;  // [heads, queries] of Wide<T>: logsumexp of the scores; -inf if the query attends to no key

  // Backward only.
  const void* output_grad;
  const void* lse_grad;  // like lse, or null
  void *query_grad, *key_grad, *value_grad;
  float* statistics;  // CUDA: workspace [2, heads, queries], [4, heads, queries] with dropout
  float* query_sums;  // CUDA: workspace [queries, heads, head_size] to sum query_grad in any order; null: in order,
                      // as always with dropout, with head_size 256, and if a block has too little shared memory for
                      // the sums
};

extern "C" {
int megalite_attention_forward_cpu(const MegaliteAttention* attention, int dtype);
int megalite_attention_backward_cpu(const MegaliteAttention* attention, int dtype);
// For head_size 64, 96, 128 and 256.
int megalite_attention_forward_64_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_96_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_128_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_256_cuda(const MegaliteAttention* attention, int dtype, void* stream);
// The same for compute capability 9.0 only; returns the code for an unsupported dtype on other chips, and for strides
// that tensor maps do not support. megalite_attention_forward_64_cuda and _128_cuda try it first.
int megalite_attention_forward_hopper_64_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_hopper_128_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_64_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_96_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_128_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_256_cuda(const MegaliteAttention* attention, int dtype, void* stream);
// The largest shared memory of a block of these kernels in bytes, forward or backward, on a chip that allows `limit`
// per block. The backward uses smaller tiles if `limit` is too small for the larger ones. any_order: with query_sums,
// if `limit` allows them. Excludes the kernel for 9.0, whose limit is 227 KiB.
int64_t megalite_attention_shared_64_cuda(int backward, int dropped, int any_order, int64_t limit);
int64_t megalite_attention_shared_96_cuda(int backward, int dropped, int any_order, int64_t limit);
int64_t megalite_attention_shared_128_cuda(int backward, int dropped, int any_order, int64_t limit);
int64_t megalite_attention_shared_256_cuda(int backward, int dropped, int any_order, int64_t limit);
// The variants with dropout that the kernels of head_size 64 and 128 call.
int megalite_attention_forward_64_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_128_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_64_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_128_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
}
