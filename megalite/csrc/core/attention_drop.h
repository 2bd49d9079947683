// What attention's dropped probabilities are drawn from: of the rows of a batch, by positions in them.
#pragma once

#include "attention.h"
#include "core/counter.h"

namespace ml {

// The row of probabilities of one query of one head; `query` counts all there are.
ML_HD DropRow drop_row_of(const MegaliteAttention& a, int64_t query, int64_t head) {
  const int64_t queries = a.queries / a.rows, row = query / queries;
  const int64_t position = query - row * queries + a.keys / a.rows - queries;
  return drop_row(
      static_cast<uint32_t>(position), static_cast<uint32_t>(a.first_head + head), a.samples[row],
      static_cast<uint32_t>(a.drop_key_low), static_cast<uint32_t>(a.drop_key_high));
}

// The position of a sequence's first key, and so of its others, in its row.
ML_HD int drop_position(const MegaliteAttention& a, int64_t first_key) {
  return a.keys == 0 ? 0 : static_cast<int>(first_key % (a.keys / a.rows));
}

// What is kept of the probabilities has to make up for the rest.
template <typename W>
ML_HD W drop_scale(const MegaliteAttention& a) {
  return W(65536) / static_cast<W>(65536 - a.dropped);
}

}  // namespace ml
