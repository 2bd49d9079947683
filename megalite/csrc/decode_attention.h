// The C interface of attention of a decode step over a key-value cache. dtype: ml::DType. CPU only.
#pragma once

#include <cstdint>

// Slot i of the cache holds `prefix` virtual tokens and lengths[i] tokens; row i is its next token. Head dims are
// contiguous; the strides of rows and heads are free, in elements.
struct MegaliteDecodeAttention {
  int64_t rows, heads, kv_heads, head_size;  // heads is a multiple of kv_heads
  int64_t slots, room;                       // of the cache [2, slots, kv_heads, room, head_size], keys then values
  const int64_t* lengths;                    // [rows]; prefix + lengths[i] is below room
  int64_t prefix, window;                    // window: the tokens that a row sees, itself included; -1: all
  double scale, softcap;                     // softcap: 0 for none
  const void *query, *key, *value;           // query [rows, heads, head_size]; key, value [rows, kv_heads, head_size]
  int64_t query_row, query_head, key_row, key_head, value_row, value_head;
  void* cache;
  void* output;  // [rows, heads, head_size]
};

extern "C" {

// Writes each row's key and value into its slot, then attends from its query to the virtual tokens and to the last
// `window` tokens of the slot. A row's result does not depend on the rows beside it.
int megalite_decode_attention_cpu(const MegaliteDecodeAttention* attention, int dtype);

}
