// The tiled attention forward on tensor cores (Dao, "FlashAttention-2", 2023), for one thread block.
//
// `Machine` provides the instructions of one thread: on a GPU an empty class of intrinsics (cuda/device_machine.cuh),
// in the tests an emulated thread block that runs this same source on a CPU. Its asynchronous copies from global to
// shared memory complete at wait_all(); copies and stores of other threads are visible after the next sync().
#pragma once

#include "attention.h"
#include "core/attention_drop.h"
#include "core/attention_mask.h"
#include "core/fragments.h"
#include "core/scalar.h"

#ifdef __CUDACC__
#define ML_TILE __device__ __forceinline__
#define ML_UNROLL _Pragma("unroll")
#define ML_UNROLL_TWICE _Pragma("unroll 2")
#else
#define ML_TILE inline
#define ML_UNROLL
#define ML_UNROLL_TWICE
#endif

namespace ml {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kInfinity = __builtin_huge_valf();

// One of the packed sequences, and the visible band of its attention matrix.
struct Sequence {
  int first_query, first_key;
  Band band;
};

ML_TILE Sequence sequence_of(const MegaliteAttention& a, int sequence) {
  const int query = a.query_starts[sequence], key = a.key_starts[sequence];
  return {query, key,
          band_of(a, query, key, a.query_starts[sequence + 1] - query, a.key_starts[sequence + 1] - key)};
}

// Starts the asynchronous copy of a tile into shared memory; rows from `rows` on become zero. Called by all threads.
template <class Tile, int kRows, class Machine>
ML_TILE void copy_tile(Machine& m, uint32_t tile, const uint16_t* source, int64_t stride, int rows) {
  constexpr int kAtOnce = Tile::kChunks & -Tile::kChunks;  // chunks of a row per step: all if a power of 2
  constexpr int kStep = Machine::kThreads / kAtOnce;
  static_assert(Machine::kThreads % kAtOnce == 0 && kRows % kStep == 0);
  const int own = m.thread() % kAtOnce, first = m.thread() / kAtOnce;
  source += first * stride + own * 8;
  ML_UNROLL
  for (int row = 0; row < kRows; row += kStep, source += kStep * stride) {
    ML_UNROLL
    for (int chunk = 0; chunk < Tile::kChunks; chunk += kAtOnce) {
      // The swizzle permutes chunks only within one step, so `chunk` can be added to the swizzled offset.
      m.template copy<16>(
          tile + Tile::offset(first + row, own) + chunk * 16, source + chunk * 8, first + row < rows);
    }
  }
}

// sums [kTiles x 16, kColumns] += left x right^T, both stored [.., kSum] in shared memory; left starts at row `row`.
template <class Element, int kTiles, int kColumns, int kSum, class Machine>
ML_TILE void add_product_of_rows(
    Machine& m, float (&sums)[kTiles][kColumns / 8][4], uint32_t left, int row, uint32_t right) {
  using Tile = Swizzle<kSum>;
  const typename Tile::Lane left_lane = Tile::lane(tile_place(Order::kDown, m.lane()));
  const typename Tile::Lane right_lane = Tile::lane(tile_place(Order::kRight, m.lane()));
  left += row * Tile::kRowBytes;
  ML_UNROLL_TWICE  // unrolled completely, the addresses would use too many registers
  for (int k = 0; k < kSum / 16; ++k) {
    uint32_t a[kTiles][4];
    ML_UNROLL
    for (int t = 0; t < kTiles; ++t) m.load_matrix(a[t], left + left_lane.offset(t * 16, k * 2));
    ML_UNROLL
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      m.load_matrix(b, right + right_lane.offset(n * 16, k * 2));
      ML_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        m.template multiply<Element>(sums[t][2 * n], a[t], b[0], b[1]);
        m.template multiply<Element>(sums[t][2 * n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Converts two neighbouring 16 x 8 accumulators to a 16 x 16 A operand of mma.sync; each lane already holds the
// elements that the operand needs.
template <class Element, class Machine>
ML_TILE void narrow(Machine& m, uint32_t (&left)[4], const float (&low)[4], const float (&high)[4]) {
  left[0] = m.template pack<Element>(low[0], low[1]);
  left[1] = m.template pack<Element>(low[2], low[3]);
  left[2] = m.template pack<Element>(high[0], high[1]);
  left[3] = m.template pack<Element>(high[2], high[3]);
}

// sums [kTiles x 16, kColumns] += left x right; left: the accumulators [kTiles x 16, kSum] of an earlier product;
// right: stored [kSum, kColumns] in shared memory.
template <class Element, int kTiles, int kColumns, int kSum, class Machine>
ML_TILE void add_product_of_sums(
    Machine& m, float (&sums)[kTiles][kColumns / 8][4], const float (&left)[kTiles][kSum / 8][4], uint32_t right) {
  using Tile = Swizzle<kColumns>;
  const typename Tile::Lane right_lane = Tile::lane(tile_place(Order::kDown, m.lane()));
  uint32_t a[kSum / 16][kTiles][4];
  ML_UNROLL
  for (int k = 0; k < kSum / 16; ++k) {
    ML_UNROLL
    for (int t = 0; t < kTiles; ++t) narrow<Element>(m, a[k][t], left[t][2 * k], left[t][2 * k + 1]);
  }
  ML_UNROLL
  for (int n = 0; n < kColumns / 16; ++n) {
    ML_UNROLL
    for (int k = 0; k < kSum / 16; ++k) {
      uint32_t b[4];
      m.load_matrix_transposed(b, right + right_lane.offset(k * 16, n * 2));
      ML_UNROLL
      for (int t = 0; t < kTiles; ++t) {
        m.template multiply<Element>(sums[t][2 * n], a[k][t], b[0], b[1]);
        m.template multiply<Element>(sums[t][2 * n + 1], a[k][t], b[2], b[3]);
      }
    }
  }
}

// Writes a warp's accumulators, each row times its factor, to the rows of `target`. Goes through the warp's own rows of
// `tile` in shared memory, so that global stores are 16 bytes wide and coalesced.
template <class Element, int kTiles, int kHead, class Machine>
ML_TILE void store_rows(
    Machine& m, const float (&sums)[kTiles][kHead / 8][4], const float (&factors)[kTiles][2], uint32_t tile, int row,
    uint16_t* target, int64_t stride, int rows) {
  using Tile = Swizzle<kHead>;
  ML_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    ML_UNROLL
    for (int n = 0; n < kHead / 8; ++n) {
      ML_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Place place = accumulator_place(m.lane(), half * 2);
        m.store_shared(
            tile + Tile::offset(row + t * 16 + place.row, n) + place.column * 2,
            m.template pack<Element>(
                sums[t][n][half * 2] * factors[t][half], sums[t][n][half * 2 + 1] * factors[t][half]));
      }
    }
  }
  m.sync_warp();
  ML_UNROLL
  for (int i = m.lane(); i < kTiles * 16 * Tile::kChunks; i += 32) {
    const int stored = row + i / Tile::kChunks, chunk = i % Tile::kChunks;
    if (stored < rows) m.store_chunk(target + stored * stride + chunk * 8, tile + Tile::offset(stored, chunk));
  }
}

template <class Element_, int kHead_, int kWarps_, int kTiles_, int kKeys_, bool kDrops_ = false>
struct ForwardShape {
  using Element = Element_;
  static constexpr int kHead = kHead_, kThreads = kWarps_ * 32, kTiles = kTiles_, kKeys = kKeys_;
  static constexpr bool kDrops = kDrops_;  // with dropout of probabilities
  static constexpr int kRows = kWarps_ * kTiles * 16;  // queries per thread block, kTiles x 16 per warp
  using Tile = Swizzle<kHead>;
  static constexpr int kKeyTile = kRows * Tile::kRowBytes;
  static constexpr int kValueTile = kKeyTile + kKeys * Tile::kRowBytes;
  static constexpr int kDropRows = kValueTile + kKeys * Tile::kRowBytes;  // the DropRow of each query
  static constexpr int kSharedBytes = kDropRows + (kDrops ? kRows * 8 : 0);
};

// Online softmax state of the rows that a thread shares with the other three lanes of its quad: the row maximum, and
// the thread's own part of the row sum.
template <int kTiles>
struct SoftmaxRows {
  float greatest[kTiles][2], total[kTiles][2];
};

// Online softmax step of one row: updates the row maximum, replaces the scores by exp2(score * scale - maximum), adds
// them to the row sum, and returns the factor that rescales earlier sums to the new maximum.
template <int kTiles, int kKeys, class Machine>
ML_TILE float softmax_row(
    Machine& m, float (&scores)[kTiles][kKeys / 8][4], SoftmaxRows<kTiles>& rows, int t, int half, float scale) {
  float greatest = rows.greatest[t][half];
  ML_UNROLL
  for (int n = 0; n < kKeys / 8; ++n) {
    greatest = m.larger(greatest, m.larger(scores[t][n][half * 2], scores[t][n][half * 2 + 1]));
  }
  greatest = m.larger(greatest, m.shuffle_xor(greatest, 1));
  greatest = m.larger(greatest, m.shuffle_xor(greatest, 2));
  // If the whole row is masked so far, subtract 0: -inf - -inf would be NaN.
  const float base = greatest == -kInfinity ? 0.0f : greatest * scale;
  const float factor = m.exp2(rows.greatest[t][half] * scale - base);
  rows.greatest[t][half] = greatest;
  float total = rows.total[t][half] * factor;
  ML_UNROLL
  for (int n = 0; n < kKeys / 8; ++n) {
    ML_UNROLL
    for (int i = half * 2; i < half * 2 + 2; ++i) {
      scores[t][n][i] = m.exp2(scores[t][n][i] * scale - base);
      total += scores[t][n][i];
    }
  }
  rows.total[t][half] = total;
  return factor;
}

template <int kTiles, int kHead>
ML_TILE void scale_row(float (&sums)[kTiles][kHead / 8][4], int t, int half, float factor) {
  ML_UNROLL
  for (int n = 0; n < kHead / 8; ++n) {
    sums[t][n][half * 2] *= factor;
    sums[t][n][half * 2 + 1] *= factor;
  }
}

template <int kTiles, int kKeys, int kHead, class Machine>
ML_TILE void online_softmax(
    Machine& m, float (&scores)[kTiles][kKeys / 8][4], SoftmaxRows<kTiles>& rows,
    float (&sums)[kTiles][kHead / 8][4], float scale) {
  ML_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    ML_UNROLL
    for (int half = 0; half < 2; ++half) {
      scale_row<kTiles, kHead>(sums, t, half, softmax_row<kTiles, kKeys>(m, scores, rows, t, half, scale));
    }
  }
}

// Stores the log-sum-exps of a warp's rows, starting at `row` of `count`, and returns in `factors` the reciprocal row
// sums.
template <int kTiles, class Machine>
ML_TILE void finish_rows(
    Machine& m, const SoftmaxRows<kTiles>& rows, float (&factors)[kTiles][2], float scale, float* lse, int row,
    int count) {
  ML_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    ML_UNROLL
    for (int half = 0; half < 2; ++half) {
      float total = rows.total[t][half];
      total += m.shuffle_xor(total, 1);
      total += m.shuffle_xor(total, 2);
      const bool nothing = total == 0.0f;
      factors[t][half] = nothing ? 0.0f : 1.0f / total;
      const int own = row + t * 16 + accumulator_place(m.lane(), half * 2).row;
      if (m.lane() % 4 == 0 && own < count) {
        const float log_total = m.log2(total) + rows.greatest[t][half] * scale;
        lse[own] = nothing ? -kInfinity : log_total / kLog2E;
      }
    }
  }
}

// Sets the masked scores of a row to -infinity; `first`: the key of the thread's first score.
template <int kTiles, int kKeys>
ML_TILE void mask_row(float (&scores)[kTiles][kKeys / 8][4], int t, int half, Range seen, int first) {
  ML_UNROLL
  for (int n = 0; n < kKeys / 8; ++n) {
    ML_UNROLL
    for (int i = half * 2; i < half * 2 + 2; ++i) {
      if (!seen.holds(first + n * 8 + i % 2)) scores[t][n][i] = -kInfinity;
    }
  }
}

// Masks the scores of all rows; `row`, `first_key`: the query and the key of the tile's first score.
template <int kTiles, int kKeys, class Machine>
ML_TILE void mask_keys(
    Machine& m, float (&scores)[kTiles][kKeys / 8][4], const Band& band, int row, int first_key) {
  const Place own = accumulator_place(m.lane(), 0);
  ML_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    ML_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Range seen = band.keys_of(row + own.row + t * 16 + half * 8);
      mask_row<kTiles, kKeys>(scores, t, half, seen, first_key + own.column);
    }
  }
}

// Stores the DropRow of each query of the block, offset to the sequence's first key, in shared memory to save
// registers.
template <class Shape, class Machine>
ML_TILE void store_drop_rows(
    Machine& m, const MegaliteAttention& a, const Sequence& piece, int first_row, int rows, int head) {
  const uint32_t first_step = drop_step(drop_position(a, piece.first_key));
  static_assert(Shape::kRows <= Machine::kThreads);
  if (const int row = m.thread(); row < rows) {
    const DropRow drawn = drop_row_of(a, static_cast<int64_t>(piece.first_query) + first_row + row, head);
    const uint32_t target = m.shared() + Shape::kDropRows + row * 8;
    m.store_shared(target, drawn.start + first_step);
    m.store_shared(target + 4, drawn.tweak);
  }
}

// Sets the dropped probabilities [queries, keys] to 0; `first_key`: the key of the first column.
template <int kTiles, int kKeys, class Machine>
ML_TILE void drop_keys(
    Machine& m, float (&probabilities)[kTiles][kKeys / 8][4], uint32_t drop_rows, int first_key, int32_t threshold) {
  const uint32_t first_step = drop_step(first_key + accumulator_place(m.lane(), 0).column);
  ML_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    ML_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t drawn[2];
      m.load_pair(drawn, drop_rows + (accumulator_place(m.lane(), 0).row + t * 16 + half * 8) * 8);
      const DropRow row{m.opaque(drawn[0] + first_step), drawn[1]};
      ML_UNROLL
      for (int n = 0; n < kKeys / 8; ++n) {
        ML_UNROLL
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          if (drop_word(row, drop_step(n * 8 + i % 2)) < threshold) probabilities[t][n][i] = 0.0f;
        }
      }
    }
  }
}

// Computes output and log-sum-exp of one thread block's queries, which start at block * kRows in `sequence`, for
// `head`.
template <class Shape, class Machine>
ML_TILE void attention_forward(Machine& m, const MegaliteAttention& a, int block, int head, int sequence) {
  using Element = typename Shape::Element;
  using Tile = typename Shape::Tile;
  constexpr int kTiles = Shape::kTiles, kKeys = Shape::kKeys, kHead = Shape::kHead;
  const Sequence piece = sequence_of(a, sequence);
  const Band& band = piece.band;
  const int first_row = block * Shape::kRows;
  if (first_row >= band.queries) return;
  const int past_row = at_most(first_row + Shape::kRows, band.queries);
  const auto* query = static_cast<const uint16_t*>(a.query) +
                      (static_cast<int64_t>(piece.first_query) + first_row) * a.query_token + head * a.query_head;
  const uint32_t query_tile = m.shared(), key_tile = query_tile + Shape::kKeyTile;
  const uint32_t value_tile = query_tile + Shape::kValueTile;
  const int warp_row = m.thread() / 32 * kTiles * 16;
  const float scale = static_cast<float>(a.scale) * kLog2E;

  const Range seen = band.keys_of_block(first_row, past_row);
  const int past_key = seen.empty() ? 0 : seen.end;
  // Copies keys or values; recomputes addresses each time to save registers.
  const auto copy_keys = [&](uint32_t tile, const void* all, int64_t token, int64_t own_head, int first) {
    const int kv_head = head / (static_cast<int>(a.heads) / static_cast<int>(a.kv_heads));
    const auto* source = static_cast<const uint16_t*>(all) + kv_head * own_head;
    const int64_t row = static_cast<int64_t>(piece.first_key) + first;
    copy_tile<Tile, kKeys>(m, tile, source + row * token, token, band.keys - first);
  };
  int first_key = seen.begin / kKeys * kKeys;
  copy_tile<Tile, Shape::kRows>(m, query_tile, query, a.query_token, past_row - first_row);
  if (first_key < past_key) copy_keys(key_tile, a.key, a.key_token, a.key_head, first_key);
  if constexpr (Shape::kDrops) store_drop_rows<Shape>(m, a, piece, first_row, past_row - first_row, head);

  float sums[kTiles][kHead / 8][4] = {};
  SoftmaxRows<kTiles> rows;
  ML_UNROLL
  for (int i = 0; i < kTiles * 2; ++i) {
    rows.greatest[i / 2][i % 2] = -kInfinity;
    rows.total[i / 2][i % 2] = 0.0f;
  }
  for (; first_key < past_key; first_key += kKeys) {
    m.wait_all();
    m.sync();  // the keys have arrived, and all warps have read the previous values
    copy_keys(value_tile, a.value, a.value_token, a.value_head, first_key);
    float scores[kTiles][kKeys / 8][4] = {};
    add_product_of_rows<Element, kTiles, kKeys, kHead>(m, scores, query_tile, warp_row, key_tile);
    if (!band.full(first_row, past_row, first_key, first_key + kKeys)) {
      mask_keys<kTiles, kKeys>(m, scores, band, first_row + warp_row, first_key);
    }
    m.wait_all();
    m.sync();  // the values have arrived, and all warps have read these keys
    if (first_key + kKeys < past_key) {
      copy_keys(key_tile, a.key, a.key_token, a.key_head, first_key + kKeys);
    }
    online_softmax<kTiles, kKeys, kHead>(m, scores, rows, sums, scale);
    if constexpr (Shape::kDrops) {
      drop_keys<kTiles, kKeys>(
          m, scores, m.shared() + Shape::kDropRows + warp_row * 8, first_key, drop_threshold(a.dropped));
    }
    add_product_of_sums<Element, kTiles, kHead, kKeys>(m, sums, scores, value_tile);
  }

  float factors[kTiles][2];
  // Read again, because keeping them through the loop would cost registers.
  const Sequence again = sequence_of(a, sequence);
  const int64_t first_token = static_cast<int64_t>(again.first_query) + first_row;
  const int count = at_most(Shape::kRows, again.band.queries - first_row);
  float* lse = static_cast<float*>(a.lse) + head * a.queries + first_token;
  finish_rows<kTiles>(m, rows, factors, scale, lse, warp_row, count);
  if constexpr (Shape::kDrops) {
    ML_UNROLL
    for (int i = 0; i < kTiles * 2; ++i) factors[i / 2][i % 2] *= drop_scale<float>(a);
  }
  m.wait_all();
  m.sync();  // with no visible key, the copy of the queries may still be writing to the tile that is overwritten now
  auto* output = static_cast<uint16_t*>(a.output) + (first_token * a.heads + head) * kHead;
  store_rows<Element, kTiles, kHead>(
      m, sums, factors, query_tile, warp_row, output, a.heads * kHead, count);
}

}  // namespace ml
