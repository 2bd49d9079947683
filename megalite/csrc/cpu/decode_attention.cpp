// Attention of one new token a row over its slot of a key-value cache, in Wide<T> throughout.
#include "decode_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/exp.h"
#include "cpu/dot.h"

namespace {

using namespace ml;

// The least number of cached values for which several threads pay.
constexpr int64_t kParallel = 1 << 15;
// Vectors of an output row that are summed in registers at a time.
constexpr int kStrip = 4;

// A range of keys that a row sees.
struct Seen {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// One row and one key-value head: the queries of the head's group, and its keys and values in the cache.
template <typename T>
struct Group {
  const Wide<T>* queries;  // [rows, size]
  const T *keys, *values;  // [room, size]
  int64_t rows, size;
};

// scores[row * step + i] = queries[row] . keys[seen.begin + i]
template <typename T>
void score(const Group<T>& group, Seen seen, Wide<T>* scores, int64_t step) {
  const T* keys = group.keys + seen.begin * group.size;
  int64_t key = 0;
  for (; key + kOut <= seen.count(); key += kOut) {
    dot_all<kOut>(group.queries, keys + key * group.size, group.rows, group.size, [=](int64_t row, int o, Wide<T> sum) {
      scores[row * step + key + o] = sum;
    });
  }
  for (; key < seen.count(); ++key) {
    dot_all<1>(group.queries, keys + key * group.size, group.rows, group.size, [=](int64_t row, int, Wide<T> sum) {
      scores[row * step + key] = sum;
    });
  }
}

// Replaces scores by e^(score - greatest score); returns the inverse of their sum.
template <typename W>
W exponentials(W* scores, int64_t count, W scale, W softcap) {
  if (softcap > 0) {
    for (int64_t i = 0; i < count; ++i) scores[i] = softcap * std::tanh(scores[i] * scale / softcap);
  } else {
    for (int64_t i = 0; i < count; ++i) scores[i] *= scale;
  }
  W greatest = -std::numeric_limits<W>::infinity();
  for (int64_t i = 0; i < count; ++i) greatest = scores[i] > greatest ? scores[i] : greatest;
  for (int64_t i = 0; i < count; ++i) scores[i] = exp_nonpositive(scores[i] - greatest);
  W sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scores[i];
  return 1 / sum;
}

// sums[row] += weights[row * step + i] values[seen.begin + i]; rows from `rows` on repeat the last one.
template <int kRows, typename T>
void add_values(
    const T* values, Seen seen, int64_t size, const Wide<T>* weights, int64_t step, int64_t rows, Wide<T>* sums) {
  using W = Wide<T>;
  using V = typename VectorOf<W>::Type;
  constexpr int kColumns = kStrip * kLanes<W>;
  const W* from[kRows];
  for (int row = 0; row < kRows; ++row) from[row] = weights + std::min<int64_t>(row, rows - 1) * step;
  const T* first = values + seen.begin * size;
  int64_t column = 0;
  for (; column + kColumns <= size; column += kColumns) {
    V partial[kRows][kStrip] = {};
    for (int64_t i = 0; i < seen.count(); ++i) {
      V loaded[kStrip];
      for (int each = 0; each < kStrip; ++each) loaded[each] = load<W>(first + i * size + column + each * kLanes<W>);
      for (int row = 0; row < kRows; ++row) {
        for (int each = 0; each < kStrip; ++each) partial[row][each] += from[row][i] * loaded[each];
      }
    }
    for (int row = 0; row < std::min<int64_t>(kRows, rows); ++row) {
      for (int each = 0; each < kStrip; ++each) {
        V* to = reinterpret_cast<V*>(sums + row * size + column + each * kLanes<W>);
        *to += partial[row][each];
      }
    }
  }
  for (int64_t i = 0; column < size && i < seen.count(); ++i) {
    for (int row = 0; row < std::min<int64_t>(kRows, rows); ++row) {
      for (int64_t rest = column; rest < size; ++rest) {
        sums[row * size + rest] += from[row][i] * widened<W>(first[i * size + rest]);
      }
    }
  }
}

template <typename T>
struct Space {
  std::vector<Wide<T>> queries, scores, sums, inverse;
};

template <typename T>
void attend(const MegaliteDecodeAttention& a, int64_t row, int64_t kv_head, Space<T>& space) {
  using W = Wide<T>;
  const int64_t size = a.head_size, group_rows = a.heads / a.kv_heads, place = a.prefix + a.lengths[row];
  T* keys = static_cast<T*>(a.cache) + (row * a.kv_heads + kv_head) * a.room * size;
  T* values = keys + a.slots * a.kv_heads * a.room * size;
  const T* key = static_cast<const T*>(a.key) + row * a.key_row + kv_head * a.key_head;
  const T* value = static_cast<const T*>(a.value) + row * a.value_row + kv_head * a.value_head;
  std::copy(key, key + size, keys + place * size);
  std::copy(value, value + size, values + place * size);

  const int64_t begin = a.window < 0 ? 0 : std::max<int64_t>(0, place + 1 - a.window);
  const Seen virtual_tokens{0, std::min(a.prefix, begin)}, tokens{begin, place + 1};
  const int64_t count = virtual_tokens.count() + tokens.count();
  space.queries.resize(group_rows * size);
  space.scores.resize(group_rows * count);
  space.sums.assign(group_rows * size, 0);
  const T* query = static_cast<const T*>(a.query) + row * a.query_row + kv_head * group_rows * a.query_head;
  for (int64_t each = 0; each < group_rows; ++each) {
    for (int64_t i = 0; i < size; ++i) space.queries[each * size + i] = to_wide(query[each * a.query_head + i]);
  }
  const Group<T> group{space.queries.data(), keys, values, group_rows, size};
  score(group, virtual_tokens, space.scores.data(), count);
  score(group, tokens, space.scores.data() + virtual_tokens.count(), count);

  space.inverse.resize(group_rows);
  for (int64_t each = 0; each < group_rows; ++each) {
    space.inverse[each] = exponentials<W>(
        space.scores.data() + each * count, count, static_cast<W>(a.scale), static_cast<W>(a.softcap));
  }
  for (const auto& [seen, offset] : {std::pair{virtual_tokens, int64_t{0}}, {tokens, virtual_tokens.count()}}) {
    for (int64_t each = 0; each < group_rows; each += kMostRows) {
      const int64_t taken = std::min<int64_t>(kMostRows, group_rows - each);
      const W* weights = space.scores.data() + each * count + offset;
      W* sums = space.sums.data() + each * size;
      if (taken == 1) {
        add_values<1, T>(values, seen, size, weights, count, 1, sums);
      } else {
        add_values<kMostRows, T>(values, seen, size, weights, count, taken, sums);
      }
    }
  }
  T* output = static_cast<T*>(a.output) + (row * a.heads + kv_head * group_rows) * size;
  for (int64_t each = 0; each < group_rows; ++each) {
    for (int64_t i = 0; i < size; ++i) {
      output[each * size + i] = from_wide<T>(space.sums[each * size + i] * space.inverse[each]);
    }
  }
}

template <typename T>
void attend_all(const MegaliteDecodeAttention& a) {
  int64_t cached = 0;
  for (int64_t row = 0; row < a.rows; ++row) cached += a.lengths[row] * a.kv_heads * a.head_size;
#pragma omp parallel if (cached > kParallel)
  {
    Space<T> space;
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t row = 0; row < a.rows; ++row) {
      for (int64_t kv_head = 0; kv_head < a.kv_heads; ++kv_head) attend<T>(a, row, kv_head, space);
    }
  }
}

}  // namespace

extern "C" int megalite_decode_attention_cpu(const MegaliteDecodeAttention* attention, int dtype) {
  return for_dtype(dtype, [=](auto type) { attend_all<decltype(type)>(*attention); });
}
