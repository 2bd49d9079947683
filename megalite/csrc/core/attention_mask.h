// The visible keys of each query, and the tiles of keys and queries that are not fully masked. Integers only, tested
// exhaustively.
#pragma once

#include "attention.h"
#include "core/scalar.h"

namespace ml {

struct Range {
  int begin, end;  // empty if end <= begin
  ML_HD bool empty() const { return end <= begin; }
  ML_HD bool holds(int index) const { return begin <= index && index < end; }
};

ML_HD int at_least(int value, int floor) { return value < floor ? floor : value; }
ML_HD int at_most(int value, int ceiling) { return value > ceiling ? ceiling : value; }
ML_HD int blocks_of(int length, int block) { return (length + block - 1) / block; }

// The visible part of one sequence's attention matrix [queries, keys]: a band along a diagonal. Query i has the
// position of key i + shift, which may lie outside of the keys; with shift = keys - queries the diagonal ends in the
// bottom right corner.
// A query sees `left` keys before its own position and `right` keys after it; negative: no limit.
// The visible keys of each row, and queries of each column, form one range; both ends of the range are nondecreasing
// from row to row (column to column), so the first and the last row of a block bound all rows between them.
struct Band {
  int queries, keys, left, right, shift;

  ML_HD Range keys_of(int query) const {
    const int place = query + shift;
    return {left < 0 ? 0 : at_least(place - left, 0),
            right < 0 ? keys : at_most(at_least(place + right + 1, 0), keys)};
  }

  ML_HD Range queries_of(int key) const {
    const int place = key - shift;
    return {right < 0 ? 0 : at_least(place - right, 0),
            left < 0 ? queries : at_most(at_least(place + left + 1, 0), queries)};
  }

  // All keys that at least one of the queries [begin, end) sees.
  ML_HD Range keys_of_block(int begin, int end) const {
    return {keys_of(begin).begin, keys_of(end - 1).end};
  }

  // All queries that see at least one of the keys [begin, end).
  ML_HD Range queries_of_block(int begin, int end) const {
    return {queries_of(begin).begin, queries_of(end - 1).end};
  }

  // Whether every query of [query, query_end) sees every key of [key, key_end); false if key_end is past the last key.
  ML_HD bool full(int query, int query_end, int key, int key_end) const {
    return keys_of(query_end - 1).begin <= key && key_end <= keys_of(query).end;
  }
};

// Returns the band of the sequence whose queries begin at `query` among all queries, its keys at `key` among all keys.
ML_HD Band band_of(const MegaliteAttention& a, int query, int key, int queries, int keys) {
  int shift = keys - queries;
  if (a.positioned != 0) {
    // 32 bits: a GPU divides 64 slowly.
    shift = static_cast<int>(a.first_query) + query % static_cast<int>(a.query_row) - static_cast<int>(a.first_key) -
            key % static_cast<int>(a.key_row);
  }
  return {queries, keys, static_cast<int>(a.left), static_cast<int>(a.right), shift};
}

}  // namespace ml
