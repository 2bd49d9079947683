// Dropout of attention probabilities: maps queries and keys to positions in a batch row, which the mask is drawn from.
#pragma once

#include "attention.h"
#include "core/counter.h"

namespace ml {

// Returns the random state of one row of probabilities; `query` is the index among all queries.
ML_HD DropRow drop_row_of(const MegaliteAttention& a, int64_t query, int64_t head) {
  const int64_t row = query / a.query_row, position = a.first_query + query - row * a.query_row;
  return drop_row(
      static_cast<uint32_t>(position), static_cast<uint32_t>(a.first_head + head), a.samples[row],
      static_cast<uint32_t>(a.drop_key_low), static_cast<uint32_t>(a.drop_key_high));
}

// Returns the position, within its batch row, of a sequence's first key.
ML_HD int drop_position(const MegaliteAttention& a, int64_t first_key) {
  return static_cast<int>(a.first_key + first_key % a.key_row);
}

// The factor 1 / P(keep) of the kept probabilities.
template <typename W>
ML_HD W drop_scale(const MegaliteAttention& a) {
  return W(65536) / static_cast<W>(65536 - a.dropped);
}

}  // namespace ml
