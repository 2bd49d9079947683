// Which keys a query sees, and which blocks of keys and queries meet: integers only, tested exhaustively.
#pragma once

#include "core/scalar.h"

namespace ml {

struct Range {
  int begin, end;  // empty where end <= begin
  ML_HD bool empty() const { return end <= begin; }
  ML_HD bool holds(int index) const { return begin <= index && index < end; }
};

ML_HD int at_least(int value, int floor) { return value < floor ? floor : value; }
ML_HD int at_most(int value, int ceiling) { return value > ceiling ? ceiling : value; }
ML_HD int blocks_of(int length, int block) { return (length + block - 1) / block; }

// The part of one sequence's attention matrix [queries, keys] that is seen: a band along the diagonal that ends in
// the bottom right corner. A query sees `left` keys before its own place and `right` behind it; below 0: all.
// Every row's keys, and every column's queries, are one range whose ends never decrease from one to the next:
// what holds for the first and the last row of a block bounds all between.
struct Band {
  int queries, keys, left, right;

  ML_HD int shift() const { return keys - queries; }

  ML_HD Range keys_of(int query) const {
    const int place = query + shift();
    return {left < 0 ? 0 : at_least(place - left, 0),
            right < 0 ? keys : at_most(at_least(place + right + 1, 0), keys)};
  }

  ML_HD Range queries_of(int key) const {
    const int place = key - shift();
    return {right < 0 ? 0 : at_least(place - right, 0),
            left < 0 ? queries : at_most(at_least(place + left + 1, 0), queries)};
  }

  // All keys that any of the queries [begin, end) sees.
  ML_HD Range keys_of_block(int begin, int end) const {
    return {keys_of(begin).begin, keys_of(end - 1).end};
  }

  // All queries that see any of the keys [begin, end).
  ML_HD Range queries_of_block(int begin, int end) const {
    return {queries_of(begin).begin, queries_of(end - 1).end};
  }

  // Whether each of the queries [query, query_end) sees each of the keys [key, key_end); none sees one past the last.
  ML_HD bool full(int query, int query_end, int key, int key_end) const {
    return keys_of(query_end - 1).begin <= key && key_end <= keys_of(query).end;
  }
};

}  // namespace ml
