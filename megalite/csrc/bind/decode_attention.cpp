#include "decode_attention.h"

#include "bind/tensor.h"

namespace {

using ml::Tensor;

void check_heads(const Tensor& given, const Tensor& cache, int64_t rows, int64_t heads, const char* what) {
  ml::check_same_type(cache, given, what);
  STD_TORCH_CHECK(
      given.dim() == 3 && given.size(0) == rows && given.size(1) == heads && given.size(2) == cache.size(4),
      "megalite: ", what, " must be [", rows, ", ", heads, ", ", cache.size(4), "]");
  STD_TORCH_CHECK(given.stride(2) == 1, "megalite: the last dim of ", what, " must be contiguous");
}

// Returns contiguous lengths [rows] of slots with room for `room` tokens, after checking that each fits another token
// behind `prefix` virtual ones.
Tensor checked_lengths(const Tensor& given, int64_t rows, int64_t prefix, int64_t room) {
  STD_TORCH_CHECK(
      given.scalar_type() == torch::headeronly::ScalarType::Long, "megalite: the lengths must be int64");
  ml::check_size(given, rows, "lengths");
  const Tensor lengths = ml::contiguous(given);
  const auto* each = static_cast<const int64_t*>(lengths.const_data_ptr());
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(
        each[row] >= 0 && prefix + each[row] < room, "megalite: slot ", row, " holds ", each[row],
        " tokens behind a prefix of ", prefix, " and has room for ", room);
  }
  return lengths;
}

Tensor decode_attention(
    Tensor query, Tensor key, Tensor value, Tensor cache, Tensor given_lengths, int64_t prefix, int64_t window,
    double scale, double softcap) {
  STD_TORCH_CHECK(
      cache.dim() == 5 && cache.size(0) == 2 && cache.is_contiguous(),
      "megalite: the cache must be a contiguous [2, slots, kv_heads, room, head_size]");
  STD_TORCH_CHECK(query.dim() == 3, "megalite: query has ", query.dim(), " dims, not 3");
  const int64_t rows = query.size(0), heads = query.size(1), slots = cache.size(1), kv_heads = cache.size(2);
  STD_TORCH_CHECK(rows <= slots, "megalite: ", rows, " rows, but the cache has ", slots, " slots");
  STD_TORCH_CHECK(
      heads % kv_heads == 0, "megalite: ", heads, " heads are no multiple of the ", kv_heads, " heads of the cache");
  check_heads(query, cache, rows, heads, "query");
  check_heads(key, cache, rows, kv_heads, "key");
  check_heads(value, cache, rows, kv_heads, "value");
  const Tensor lengths = checked_lengths(given_lengths, rows, prefix, cache.size(3));
  STD_TORCH_CHECK(window == -1 || window > 0, "megalite: the window must be positive, or -1 for none, not ", window);
  Tensor output = ml::new_empty(query, {rows, heads, cache.size(4)});
  const MegaliteDecodeAttention attention{
      rows,
      heads,
      kv_heads,
      cache.size(4),
      slots,
      cache.size(3),
      static_cast<const int64_t*>(lengths.const_data_ptr()),
      prefix,
      window,
      scale,
      softcap,
      query.const_data_ptr(),
      key.const_data_ptr(),
      value.const_data_ptr(),
      query.stride(0),
      query.stride(1),
      key.stride(0),
      key.stride(1),
      value.stride(0),
      value.stride(1),
      cache.mutable_data_ptr(),
      output.mutable_data_ptr()};
  ml::check(megalite_decode_attention_cpu(&attention, ml::dtype_of(query)), "megalite_decode_attention");
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(megalite, m) {
  m.def(
      "decode_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) cache, Tensor lengths, int prefix, "
      "int window, float scale, float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megalite, CPU, m) { m.impl("decode_attention", TORCH_BOX(&decode_attention)); }
