// Attention over packed sequences: the C interface, and what the kernels are told.
#pragma once

#include <cstdint>

// Sequence n has the queries [query_starts[n], query_starts[n + 1]) and likewise its keys: all sequences lie end to
// end. A row of a head is head_size neighbouring numbers; tokens and heads are any distance apart (in elements; for
// CUDA a multiple of 8, from addresses that are a multiple of 16 bytes). What has no strides here is contiguous:
// output and its gradient [queries, heads, head_size], the gradients of query, key and value as those.
struct MegaliteAttention {
  int64_t sequences, queries, keys;      // counts; queries and keys of all sequences together
  int64_t longest_query, longest_key;    // of one sequence
  int64_t heads, kv_heads, head_size;    // heads is a multiple of kv_heads
  int64_t left, right;                   // keys before and behind its own place that a query sees; -1: all
  double scale;                          // of the scores, above 0

  const void *query, *key, *value;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  const int32_t *query_starts, *key_starts;  // [sequences + 1]

  // Probabilities that are dropped, by core/counter.h: `dropped` of 65536, 0 for none and then without the rest. Queries
  // and keys are those of `rows` rows of equally many, with a sample each; positions count from a row's start, aligned
  // at the ends. Head h of these is first_head + h of all.
  const int64_t* samples;  // [rows]
  int64_t rows, dropped, drop_key_low, drop_key_high, first_head;

  void* output;
  void* lse;  // [heads, queries] of Wide<T>: log of the sum of exp(score); -inf where nothing is seen

  // Of the backward alone.
  const void* output_grad;
  const void* lse_grad;  // as lse, or null
  void *query_grad, *key_grad, *value_grad;
  float* statistics;  // CUDA: room for [2, heads, queries], of [4, ..] where probabilities are dropped
  float* query_sums;  // CUDA: room for [queries, heads, head_size] to add up query_grad in any order; null: in order,
                      // as always where probabilities are dropped, for heads of 256, and where a block may have less
                      // shared memory than the sums take
};

extern "C" {
int megalite_attention_forward_cpu(const MegaliteAttention* attention, int dtype);
int megalite_attention_backward_cpu(const MegaliteAttention* attention, int dtype);
// For head_size 64, 96, 128 and 256.
int megalite_attention_forward_64_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_96_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_128_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_256_cuda(const MegaliteAttention* attention, int dtype, void* stream);
// The same on chips of compute capability 9.0 alone; the unsupported dtype's code where it is not to be had: on others,
// or for strides that no copy of boxes takes. megalite_attention_forward_64_cuda and _128_cuda ask it first.
int megalite_attention_forward_hopper_64_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_hopper_128_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_64_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_96_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_128_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_256_cuda(const MegaliteAttention* attention, int dtype, void* stream);
// Bytes of shared memory that a block of these kernels has at most, forward or backward, where a chip gives a block up to
// `limit`. The backward has smaller tiles for chips that give less than the larger ones take; any_order: of the gradient
// of queries (query_sums above), where `limit` lets it. That of 9.0 alone, which gives 227 KiB, is not counted.
int64_t megalite_attention_shared_64_cuda(int backward, int dropped, int any_order, int64_t limit);
int64_t megalite_attention_shared_96_cuda(int backward, int dropped, int any_order, int64_t limit);
int64_t megalite_attention_shared_128_cuda(int backward, int dropped, int any_order, int64_t limit);
int64_t megalite_attention_shared_256_cuda(int backward, int dropped, int any_order, int64_t limit);
// What those of 64 and 128 call where probabilities are dropped.
int megalite_attention_forward_64_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_forward_128_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_64_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
int megalite_attention_backward_128_dropout_cuda(const MegaliteAttention* attention, int dtype, void* stream);
}
