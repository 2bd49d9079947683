// Tiled attention on the CPU, in Wide<T> throughout: the counterpart of the CUDA kernels.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <vector>

#include "core/attention_drop.h"
#include "core/attention_mask.h"
#include "core/exponential.h"

namespace {

using namespace ml;

constexpr int kBlock = 64;  // queries per block, and keys per block
constexpr double kLn2 = 0.69314718055994530942;

template <typename W>
constexpr W kInfinity = std::numeric_limits<W>::infinity();

// Register blocking of products: kSumRows rows of two vectors are accumulated in registers; the rest hold operands.
#ifdef __AVX512F__
constexpr int kVectorBytes = 64, kSumRows = 8;  // 16 of 32 registers; a block has a multiple of 8 rows
#else
constexpr int kVectorBytes = 32, kSumRows = 6;  // 12 of 16 registers
#endif

// A SIMD vector; products compute a pair of vectors at once.
template <typename W>
struct Vector {
  typedef W Type __attribute__((vector_size(kVectorBytes), aligned(sizeof(W)), may_alias));
  static constexpr int kLanes = kVectorBytes / sizeof(W), kPair = 2 * kLanes;
};

// Aligns to cache lines: a vector that crosses a cache line needs two loads.
template <typename W>
struct LineAllocator {
  using value_type = W;
  static constexpr std::align_val_t kLine{64};
  W* allocate(size_t count) { return static_cast<W*>(::operator new(count * sizeof(W), kLine)); }
  void deallocate(W* data, size_t) { ::operator delete(data, kLine); }
  bool operator==(const LineAllocator&) const { return true; }
};

template <typename W>
using Buffer = std::vector<W, LineAllocator<W>>;

// The left operand of a product: left(row, k) = data[row * row_step + k * k_step].
template <typename W>
struct Left {
  const W* data;
  int row_step, k_step;
};

// The microkernel: kRows rows of sums, two vectors each, stay in registers.
template <int kRows, typename W>
inline void add_rows(W* sums, int sums_step, Left<W> left, const W* right, int right_step, int depth) {
  using V = typename Vector<W>::Type;
  constexpr int kLanes = Vector<W>::kLanes;
  V low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) {
    low[r] = *reinterpret_cast<const V*>(sums + r * sums_step);
    high[r] = *reinterpret_cast<const V*>(sums + r * sums_step + kLanes);
  }
  for (int k = 0; k < depth; ++k) {
    const V right_low = *reinterpret_cast<const V*>(right + k * right_step);
    const V right_high = *reinterpret_cast<const V*>(right + k * right_step + kLanes);
    for (int r = 0; r < kRows; ++r) {
      const W factor = left.data[r * left.row_step + k * left.k_step];
      low[r] += factor * right_low;
      high[r] += factor * right_high;
    }
  }
  for (int r = 0; r < kRows; ++r) {
    *reinterpret_cast<V*>(sums + r * sums_step) = low[r];
    *reinterpret_cast<V*>(sums + r * sums_step + kLanes) = high[r];
  }
}

// sums [rows, columns] += left [rows, depth] x right [depth, columns]; columns is a multiple of Vector::kPair.
template <typename W>
void add_product(
    W* sums, int sums_step, Left<W> left, const W* right, int right_step, int rows, int columns, int depth) {
  constexpr int kMost = kSumRows;
  for (int column = 0; column < columns; column += Vector<W>::kPair) {
    W* target = sums + column;
    Left<W> from = left;
    int row = 0;
    for (; row + kMost <= rows; row += kMost, target += kMost * sums_step, from.data += kMost * left.row_step) {
      add_rows<kMost>(target, sums_step, from, right + column, right_step, depth);
    }
    for (; row + 2 <= rows; row += 2, target += 2 * sums_step, from.data += 2 * left.row_step) {
      add_rows<2>(target, sums_step, from, right + column, right_step, depth);
    }
    for (; row < rows; ++row, target += sums_step, from.data += left.row_step) {
      add_rows<1>(target, sums_step, from, right + column, right_step, depth);
    }
  }
}

template <typename W>
int padded(int64_t columns) {
  return static_cast<int>((columns + Vector<W>::kPair - 1) / Vector<W>::kPair * Vector<W>::kPair);
}

// Strided rows of one head.
template <typename T>
struct Rows {
  const T* data;
  int64_t step;
};

template <typename T>
Rows<T> rows_of(const void* data, int64_t first, int64_t token, int64_t head, int64_t head_step) {
  return {static_cast<const T*>(data) + first * token + head * head_step, token};
}

// Prefetches a few rows ahead: the stride between rows is too large for the hardware prefetcher.
template <typename T>
inline void fetch_ahead(const T* row, int64_t step, int columns) {
  constexpr int kRowsAhead = 6, kLine = 64 / sizeof(T);
  for (int column = 0; column < columns; column += kLine) __builtin_prefetch(row + kRowsAhead * step + column);
}

// Converts [rows, columns] to Wide<T> in `to` [rows, step]; pads columns with 0.
template <typename T>
void widen(Wide<T>* to, int step, Rows<T> from, int rows, int columns) {
  for (int row = 0; row < rows; ++row, to += step) {
    const T* source = from.data + row * from.step;
    fetch_ahead(source, from.step, columns);
    for (int column = 0; column < columns; ++column) to[column] = to_wide(source[column]);
    std::fill(to + columns, to + step, Wide<T>(0));
  }
}

// Converts [rows, columns] to Wide<T> and transposes to `to` [columns, kBlock]; pads rows with 0.
template <typename T>
void widen_transposed(Wide<T>* to, Rows<T> from, int rows, int columns) {
  if (rows < kBlock) std::fill(to, to + columns * kBlock, Wide<T>(0));
  for (int row = 0; row < rows; ++row) {
    const T* source = from.data + row * from.step;
    fetch_ahead(source, from.step, columns);
    for (int column = 0; column < columns; ++column) to[column * kBlock + row] = to_wide(source[column]);
  }
}

struct Sequence {
  int64_t first_query, first_key;
  Band band;
};

Sequence sequence_of(const MegaliteAttention& a, int64_t sequence) {
  const int32_t query = a.query_starts[sequence], key = a.key_starts[sequence];
  return {query, key,
          band_of(a, query, key, a.query_starts[sequence + 1] - query, a.key_starts[sequence + 1] - key)};
}

// The blocks of kBlock queries (or keys) that overlap a range.
Range blocks_of_range(Range range) {
  return range.empty() ? Range{0, 0} : Range{range.begin / kBlock, blocks_of(range.end, kBlock)};
}

// Multiplies a row's visible scores by `scale`, sets the masked ones to -infinity, and returns the row maximum.
template <typename W>
W scale_seen(W* scores, Range seen, W scale) {
  const int begin = std::clamp(seen.begin, 0, kBlock), end = std::clamp(seen.end, begin, kBlock);
  std::fill(scores, scores + begin, -kInfinity<W>);
  std::fill(scores + end, scores + kBlock, -kInfinity<W>);
  for (int i = begin; i < end; ++i) scores[i] *= scale;
  // Vectorised by hand: NaN semantics keep the compiler from vectorising the maximum.
  using V = typename Vector<W>::Type;
  V most = *reinterpret_cast<const V*>(scores);
  for (int i = Vector<W>::kLanes; i < kBlock; i += Vector<W>::kLanes) {
    const V next = *reinterpret_cast<const V*>(scores + i);
    most = next > most ? next : most;
  }
  W greatest = most[0];
  for (int i = 1; i < Vector<W>::kLanes; ++i) greatest = most[i] > greatest ? most[i] : greatest;
  return greatest;
}

Range keys_in_block(const Band& band, int query, int block) {
  const Range seen = band.keys_of(query);
  return {seen.begin - block * kBlock, seen.end - block * kBlock};
}

// Draws the dropout factors, 0 or `scale`, of one query and a block of keys; position: of the block's first key.
template <typename W>
void draw_factors(
    W* factors, const MegaliteAttention& a, int64_t query, int64_t head, int position, W scale) {
  const DropRow row = drop_row_of(a, query, head);
  const int32_t threshold = drop_threshold(a.dropped);
  for (int i = 0; i < kBlock; ++i) {
    factors[i] = drop_word(row, drop_step(static_cast<uint32_t>(position + i))) >= threshold ? scale : W(0);
  }
}

// Keys (transposed) and values of one key-value head of one sequence, packed in blocks for the forward's products.
template <typename W>
struct PackedKeys {
  Buffer<W> keys, values;  // blocks of [head_size, kBlock], of [kBlock, columns]
  int head_size, columns;

  template <typename T>
  void pack(const MegaliteAttention& a, const Sequence& piece, int64_t kv_head) {
    head_size = static_cast<int>(a.head_size);
    columns = padded<W>(a.head_size);
    const int count = piece.band.keys, blocks = blocks_of(count, kBlock);
    keys.resize(static_cast<size_t>(blocks) * kBlock * head_size);
    values.resize(static_cast<size_t>(blocks) * kBlock * columns);
    for (int block = 0; block < blocks; ++block) {
      const int rows = std::min(kBlock, count - block * kBlock);
      const int64_t first = piece.first_key + block * kBlock;
      widen_transposed<T>(
          keys_of(block), rows_of<T>(a.key, first, a.key_token, kv_head, a.key_head), rows, head_size);
      W* target = values_of(block);
      widen<T>(target, columns, rows_of<T>(a.value, first, a.value_token, kv_head, a.value_head), rows, head_size);
      std::fill(target + rows * columns, target + kBlock * columns, W(0));
    }
  }

  W* keys_of(int block) { return keys.data() + static_cast<size_t>(block) * kBlock * head_size; }
  W* values_of(int block) { return values.data() + static_cast<size_t>(block) * kBlock * columns; }
};

// One thread's workspace.
template <typename W>
struct ForwardWorkspace {
  Buffer<W> queries, scores, sums;
  W greatest[kBlock], total[kBlock], above[kBlock], factors[kBlock];  // one per row
  ForwardWorkspace(int64_t head_size)
      : queries(kBlock * padded<W>(head_size)), scores(kBlock * kBlock), sums(queries.size()) {}
};

// One online softmax step over a block of keys, for `rows` queries from `first` on: updates row maxima and sums, turns
// scores into unnormalised probabilities, and rescales the output accumulators to the new maxima.
template <typename W>
void online_rows(
    ForwardWorkspace<W>& work, int rows, int columns, const Band& band, int first, int key_block, W scale) {
  for (int row = 0; row < rows; ++row) {
    const Range seen = keys_in_block(band, first + row, key_block);
    work.above[row] = std::max(work.greatest[row], scale_seen(work.scores.data() + row * kBlock, seen, scale));
  }
  for (int row = 0; row < rows; ++row) {
    const W base = work.above[row] == -kInfinity<W> ? W(0) : work.above[row];
    work.factors[row] = exp2_below(work.greatest[row] - base);
    work.greatest[row] = work.above[row];
    work.above[row] = base;
  }
  for (int row = 0; row < rows; ++row) {
    W* scores = work.scores.data() + row * kBlock;
    const W base = work.above[row], factor = work.factors[row];
    W sum = 0;
    for (int i = 0; i < kBlock; ++i) {
      scores[i] = exp2_below(scores[i] - base);
      sum += scores[i];
    }
    work.total[row] = work.total[row] * factor + sum;
    if (factor != W(1)) {
      W* sums = work.sums.data() + row * columns;
      for (int i = 0; i < columns; ++i) sums[i] *= factor;
    }
  }
}

template <typename T>
void forward_block(
    const MegaliteAttention& a, const Sequence& piece, PackedKeys<Wide<T>>& packed, int64_t head, int block,
    ForwardWorkspace<Wide<T>>& work) {
  using W = Wide<T>;
  const Band& band = piece.band;
  const int first = block * kBlock, past = std::min(first + kBlock, band.queries), rows = past - first;
  const int columns = packed.columns, head_size = packed.head_size;
  const int64_t token = piece.first_query + first;
  const W scale = static_cast<W>(a.scale / kLn2);
  const int position = a.dropped > 0 ? drop_position(a, piece.first_key) : 0;
  W *queries = work.queries.data(), *scores = work.scores.data(), *sums = work.sums.data();
  widen<T>(queries, columns, rows_of<T>(a.query, token, a.query_token, head, a.query_head), rows, head_size);
  std::fill(sums, sums + kBlock * columns, W(0));
  std::fill(work.greatest, work.greatest + kBlock, -kInfinity<W>);
  std::fill(work.total, work.total + kBlock, W(0));
  const Range blocks = blocks_of_range(band.keys_of_block(first, past));
  for (int key_block = blocks.begin; key_block < blocks.end; ++key_block) {
    std::fill(scores, scores + rows * kBlock, W(0));
    add_product<W>(
        scores, kBlock, {queries, columns, 1}, packed.keys_of(key_block), kBlock, rows, kBlock, head_size);
    online_rows<W>(work, rows, columns, band, first, key_block, scale);
    if (a.dropped > 0) {
      for (int row = 0; row < rows; ++row) {
        draw_factors(work.factors, a, token + row, head, position + key_block * kBlock, W(1));
        for (int i = 0; i < kBlock; ++i) scores[row * kBlock + i] *= work.factors[i];
      }
    }
    add_product<W>(
        sums, columns, {scores, kBlock, 1}, packed.values_of(key_block), columns, rows, columns, kBlock);
  }
  T* output = static_cast<T*>(a.output) + (token * a.heads + head) * a.head_size;
  W* lse = static_cast<W*>(a.lse) + head * a.queries + token;
  const W kept_scale = a.dropped > 0 ? drop_scale<W>(a) : W(1);
  for (int row = 0; row < rows; ++row, output += a.heads * a.head_size) {
    const W total = work.total[row], inverse = total == W(0) ? W(0) : kept_scale / total;
    for (int i = 0; i < head_size; ++i) output[i] = from_wide<T>(sums[row * columns + i] * inverse);
    const W log_total = (work.greatest[row] + std::log2(total)) * static_cast<W>(kLn2);
    lse[row] = total == W(0) ? -kInfinity<W> : log_total;
  }
}

template <typename T>
void forward(const MegaliteAttention& a) {
  using W = Wide<T>;
  std::vector<PackedKeys<W>> packed(a.sequences * a.kv_heads);
  const int64_t blocks = (a.longest_query + kBlock - 1) / kBlock, items = a.sequences * a.heads * blocks;
#pragma omp parallel if (items > 1)
  {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < a.sequences * a.kv_heads; ++i) {
      packed[i].template pack<T>(a, sequence_of(a, i / a.kv_heads), i % a.kv_heads);
    }
    ForwardWorkspace<W> work(a.head_size);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; ++item) {
      const int64_t head = item / blocks % a.heads, sequence = item / blocks / a.heads;
      const Sequence piece = sequence_of(a, sequence);
      const int block = static_cast<int>(item % blocks);
      if (block * kBlock >= piece.band.queries) continue;
      forward_block<T>(a, piece, packed[sequence * a.kv_heads + head / (a.heads / a.kv_heads)], head, block, work);
    }
  }
}

// One thread's backward workspace for one key-value head of one sequence.
template <typename W>
struct BackwardWorkspace {
  int head_size, columns;
  Buffer<W> keys, keys_across, values_across;  // [keys, columns]; then transposed blocks [head_size, kBlock]
  Buffer<W> key_grads, value_grads;            // [keys, columns]
  Buffer<W> queries, output_grads, query_grads;  // of one block: [kBlock, columns]
  Buffer<W> scores, grads;                       // [kBlock, kBlock]
  W lse[kBlock], delta[kBlock], factors[kBlock];

  BackwardWorkspace(int64_t head_size)
      : head_size(static_cast<int>(head_size)), columns(padded<W>(head_size)), queries(kBlock * columns),
        output_grads(kBlock * columns), query_grads(kBlock * columns), scores(kBlock * kBlock),
        grads(kBlock * kBlock) {}

  template <typename T>
  void begin(const MegaliteAttention& a, const Sequence& piece, int64_t kv_head) {
    const int count = piece.band.keys, blocks = blocks_of(count, kBlock);
    keys.assign(static_cast<size_t>(blocks) * kBlock * columns, W(0));
    keys_across.resize(static_cast<size_t>(blocks) * kBlock * head_size);
    values_across.resize(keys_across.size());
    key_grads.assign(keys.size(), W(0));
    value_grads.assign(keys.size(), W(0));
    widen<T>(
        keys.data(), columns, rows_of<T>(a.key, piece.first_key, a.key_token, kv_head, a.key_head), count, head_size);
    for (int block = 0; block < blocks; ++block) {
      const int rows = std::min(kBlock, count - block * kBlock);
      const int64_t first = piece.first_key + block * kBlock;
      const size_t place = static_cast<size_t>(block) * kBlock * head_size;
      widen_transposed<T>(
          keys_across.data() + place, rows_of<T>(a.key, first, a.key_token, kv_head, a.key_head), rows, head_size);
      widen_transposed<T>(
          values_across.data() + place, rows_of<T>(a.value, first, a.value_token, kv_head, a.value_head), rows,
          head_size);
    }
  }

  // Loads the queries [token, token + rows) of a head, their output gradients, log-sum-exps and deltas.
  template <typename T>
  void take_queries(const MegaliteAttention& a, int64_t token, int64_t head, int rows) {
    const int64_t place = (token * a.heads + head) * head_size, step = a.heads * head_size;
    widen<T>(queries.data(), columns, rows_of<T>(a.query, token, a.query_token, head, a.query_head), rows, head_size);
    widen<T>(output_grads.data(), columns, {static_cast<const T*>(a.output_grad) + place, step}, rows, head_size);
    std::fill(query_grads.begin(), query_grads.end(), W(0));
    for (int row = 0; row < rows; ++row) {
      const T* output = static_cast<const T*>(a.output) + place + row * step;
      const W* grad = output_grads.data() + row * columns;
      fetch_ahead(output, step, head_size);
      W sum = 0;
      for (int i = 0; i < head_size; ++i) sum += grad[i] * to_wide(output[i]);
      const int64_t at = head * a.queries + token + row;
      const W own = static_cast<const W*>(a.lse)[at];
      const bool nothing = own == -kInfinity<W>;  // no visible key: lse = infinity makes every probability 0
      if (a.lse_grad != nullptr) sum -= static_cast<const W*>(a.lse_grad)[at];
      lse[row] = nothing ? kInfinity<W> : own / static_cast<W>(kLn2);
      delta[row] = nothing ? W(0) : sum;
    }
  }
};

template <typename T>
void backward_block(
    const MegaliteAttention& a, const Sequence& piece, int64_t head, int block, BackwardWorkspace<Wide<T>>& work) {
  using W = Wide<T>;
  const Band& band = piece.band;
  const int first = block * kBlock, past = std::min(first + kBlock, band.queries), rows = past - first;
  const int columns = work.columns, head_size = work.head_size;
  const int64_t token = piece.first_query + first;
  const W scale = static_cast<W>(a.scale / kLn2);
  const int position = a.dropped > 0 ? drop_position(a, piece.first_key) : 0;
  const W kept_scale = a.dropped > 0 ? drop_scale<W>(a) : W(1);
  work.template take_queries<T>(a, token, head, rows);
  W *scores = work.scores.data(), *grads = work.grads.data();
  const Range blocks = blocks_of_range(band.keys_of_block(first, past));
  for (int key_block = blocks.begin; key_block < blocks.end; ++key_block) {
    const size_t across = static_cast<size_t>(key_block) * kBlock * head_size;
    const size_t along = static_cast<size_t>(key_block) * kBlock * columns;
    std::fill(scores, scores + rows * kBlock, W(0));
    std::fill(grads, grads + rows * kBlock, W(0));
    add_product<W>(
        scores, kBlock, {work.queries.data(), columns, 1}, work.keys_across.data() + across, kBlock, rows, kBlock,
        head_size);
    add_product<W>(
        grads, kBlock, {work.output_grads.data(), columns, 1}, work.values_across.data() + across, kBlock, rows,
        kBlock, head_size);
    for (int row = 0; row < rows; ++row) {
      W *score = scores + row * kBlock, *grad = grads + row * kBlock;
      scale_seen(score, keys_in_block(band, first + row, key_block), scale);
      const W lse = work.lse[row], delta = work.delta[row];
      if (a.dropped > 0) {
        draw_factors(work.factors, a, token + row, head, position + key_block * kBlock, kept_scale);
        for (int i = 0; i < kBlock; ++i) {
          const W probability = exp2_below(score[i] - lse);
          score[i] = probability * work.factors[i];
          grad[i] = probability * (grad[i] * work.factors[i] - delta);
        }
        continue;
      }
      for (int i = 0; i < kBlock; ++i) {
        score[i] = exp2_below(score[i] - lse);
        grad[i] = score[i] * (grad[i] - delta);
      }
    }
    add_product<W>(
        work.value_grads.data() + along, columns, {scores, 1, kBlock}, work.output_grads.data(), columns, kBlock,
        columns, rows);
    add_product<W>(
        work.key_grads.data() + along, columns, {grads, 1, kBlock}, work.queries.data(), columns, kBlock, columns,
        rows);
    add_product<W>(
        work.query_grads.data(), columns, {grads, kBlock, 1}, work.keys.data() + along, columns, rows, columns,
        kBlock);
  }
  T* target = static_cast<T*>(a.query_grad) + (token * a.heads + head) * head_size;
  for (int row = 0; row < rows; ++row, target += a.heads * head_size) {
    const W* from = work.query_grads.data() + row * columns;
    for (int i = 0; i < head_size; ++i) target[i] = from_wide<T>(from[i] * static_cast<W>(a.scale));
  }
}

template <typename T>
void backward(const MegaliteAttention& a) {
  using W = Wide<T>;
  const int64_t items = a.sequences * a.kv_heads, group = a.heads / a.kv_heads;
#pragma omp parallel if (items > 1)
  {
    BackwardWorkspace<W> work(a.head_size);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < items; ++item) {
      const Sequence piece = sequence_of(a, item / a.kv_heads);
      const int64_t kv_head = item % a.kv_heads;
      work.template begin<T>(a, piece, kv_head);
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int block = 0; block * kBlock < piece.band.queries; ++block) {
          backward_block<T>(a, piece, head, block, work);
        }
      }
      const int64_t place = (piece.first_key * a.kv_heads + kv_head) * a.head_size, step = a.kv_heads * a.head_size;
      T* key_grad = static_cast<T*>(a.key_grad) + place;
      T* value_grad = static_cast<T*>(a.value_grad) + place;
      for (int key = 0; key < piece.band.keys; ++key, key_grad += step, value_grad += step) {
        const size_t from = static_cast<size_t>(key) * work.columns;
        for (int i = 0; i < work.head_size; ++i) {
          key_grad[i] = from_wide<T>(work.key_grads[from + i] * static_cast<W>(a.scale));
          value_grad[i] = from_wide<T>(work.value_grads[from + i]);
        }
      }
    }
  }
}

}  // namespace

int megalite_attention_forward_cpu(const MegaliteAttention* attention, int dtype) {
  return for_dtype(dtype, [&](auto zero) { forward<decltype(zero)>(*attention); });
}

int megalite_attention_backward_cpu(const MegaliteAttention* attention, int dtype) {
  return for_dtype(dtype, [&](auto zero) { backward<decltype(zero)>(*attention); });
}
