// The tiled attention backward. P, the probabilities, are recomputed from scores and log-sum-exps:
//   dV = P^T dO,  dS = P (dO V^T - delta),  delta = sum(dO O) - dLSE,  dQ = scale dS K,  dK = scale dS^T Q.
// dK and dV: one thread block per block of keys, which loops over the queries of all heads that share them. dQ: one
// thread block per block of queries, or, if the order of the additions may vary, atomic additions from the blocks of
// keys.
// With dropout, keep being 0 or s > 1: dV = (P keep)^T dO, dS = P (dO V^T keep - delta). The kernels compute dS / s
// from delta / s and multiply the final sums by s.
#pragma once

#include <cmath>

#include "core/attention_tiles.h"

namespace ml {

// Computes the backward's statistics of one row, by one warp: the log-sum-exp to base 2 (infinity, which makes P = 0,
// if the query sees no key) and delta; with kDrops delta / s and the two words of the row's DropRow.
template <class Element, int kHead, bool kDrops, class Machine>
ML_TILE void attention_statistics(Machine& m, const MegaliteAttention& a, int64_t token, int64_t head) {
  const int64_t first = (token * a.heads + head) * kHead;
  const auto* output = static_cast<const uint16_t*>(a.output) + first;
  const auto* grad = static_cast<const uint16_t*>(a.output_grad) + first;
  float delta = 0.0f;
  ML_UNROLL
  for (int i = m.lane(); i < kHead; i += 32) {
    delta += to_wide(Element{output[i]}) * to_wide(Element{grad[i]});
  }
  ML_UNROLL
  for (int distance = 16; distance > 0; distance /= 2) delta += m.shuffle_xor(delta, distance);
  if (m.lane() != 0) return;
  const int64_t row = head * a.queries + token;
  const float lse = static_cast<const float*>(a.lse)[row];
  const bool nothing = lse == -kInfinity;
  if (a.lse_grad != nullptr) delta -= static_cast<const float*>(a.lse_grad)[row];
  if constexpr (kDrops) delta /= drop_scale<float>(a);
  a.statistics[row] = nothing ? kInfinity : lse * kLog2E;
  a.statistics[a.heads * a.queries + row] = nothing ? 0.0f : delta;
  if constexpr (kDrops) {
    const DropRow drawn = drop_row_of(a, token, head);
    auto* words = reinterpret_cast<uint32_t*>(a.statistics) + 2 * a.heads * a.queries + row;
    words[0] = drawn.start, words[a.heads * a.queries] = drawn.tweak;
  }
}

// The gradients that a thread block of keys computes: both, or, if the sums of both need too many registers, one of
// them.
enum class Gives { kBoth, kKeys, kValues };

// kKeys = kWarps x kTiles x 16 keys of a thread block stay in shared memory, and tiles of kQueries queries stream
// through two stages: the next tile is copied while the current one is used.
template <
    class Element_, int kHead_, int kWarps_, int kTiles_, int kQueries_, bool kSumQueries_, bool kDrops_ = false,
    Gives kGives = Gives::kBoth>
struct KeyShape {
  using Element = Element_;
  static constexpr int kHead = kHead_, kWarps = kWarps_, kThreads = kWarps * 32, kTiles = kTiles_;
  static constexpr int kQueries = kQueries_, kKeys = kWarps * kTiles * 16;
  static constexpr bool kSumQueries = kSumQueries_, kDrops = kDrops_;
  static constexpr bool kGivesKeys = kGives != Gives::kValues, kGivesValues = kGives != Gives::kKeys;
  using Tile = Swizzle<kHead>;
  using ScoreTile = Swizzle<kQueries>;  // [kKeys, kQueries]
  static constexpr int kValueTile = kKeys * Tile::kRowBytes;
  static constexpr int kStages = 2 * kValueTile;
  // A stage: queries, output gradients, then one row each of log-sum-exps and deltas, with dropout of starts and
  // tweaks.
  static constexpr int kStatistics = kDrops ? 4 : 2;
  static constexpr int kGradTile = kQueries * Tile::kRowBytes;
  static constexpr int kRows = 2 * kGradTile;
  static constexpr int kStageBytes = kRows + kStatistics * kQueries * 4;
  static constexpr int kScoreTile = kStages + 2 * kStageBytes;
  static constexpr int kPosition = kScoreTile + (kSumQueries ? kKeys * kQueries * 2 : 0);
  static constexpr int kSharedBytes = kPosition + (kDrops ? 8 : 0);
  static constexpr bool kBlocksOfKeys = true;
};

// Starts the copy of one stage: a tile of one head's queries, their output gradients and statistics.
template <class Shape, class Machine>
ML_TILE void copy_queries(
    Machine& m, const MegaliteAttention& a, const Sequence& piece, int64_t head, int first, uint32_t stage) {
  constexpr int kQueries = Shape::kQueries;
  const int64_t token = static_cast<int64_t>(piece.first_query) + first, stride = a.heads * Shape::kHead;
  const int rows = piece.band.queries - first;
  const auto* query = static_cast<const uint16_t*>(a.query) + token * a.query_token + head * a.query_head;
  const auto* grad = static_cast<const uint16_t*>(a.output_grad) + token * stride + head * Shape::kHead;
  copy_tile<typename Shape::Tile, kQueries>(m, stage, query, a.query_token, rows);
  copy_tile<typename Shape::Tile, kQueries>(m, stage + Shape::kGradTile, grad, stride, rows);
  static_assert(Shape::kStatistics * kQueries <= Machine::kThreads);
  if (m.thread() < Shape::kStatistics * kQueries) {
    const int which = m.thread() / kQueries, row = m.thread() % kQueries;
    const float* statistics = a.statistics + (which * a.heads + head) * a.queries + token;
    // Rows past the last one have zero queries and output gradients, so they add nothing for any P.
    m.template copy<4>(stage + Shape::kRows + m.thread() * 4, statistics + row, row < rows);
  }
}

// Same as mask_keys, for transposed scores [keys, queries].
template <int kTiles, int kQueries, class Machine>
ML_TILE void mask_queries(
    Machine& m, float (&scores)[kTiles][kQueries / 8][4], const Band& band, int first_key, int first_query) {
  ML_UNROLL
  for (int t = 0; t < kTiles; ++t) {
    ML_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + t * 16 + accumulator_place(m.lane(), half * 2).row;
      const Range seen = key < band.keys ? band.queries_of(key) : Range{0, 0};
      ML_UNROLL
      for (int n = 0; n < kQueries / 8; ++n) {
        ML_UNROLL
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          const int query = first_query + n * 8 + accumulator_place(m.lane(), i).column;
          if (!seen.holds(query)) scores[t][n][i] = -kInfinity;
        }
      }
    }
  }
}

// Replaces the scores [keys, queries] by P^T, given the queries' log-sum-exps in shared memory.
template <int kTiles, int kQueries, class Machine>
ML_TILE void key_probabilities(
    Machine& m, float (&scores)[kTiles][kQueries / 8][4], float scale, uint32_t lses) {
  ML_UNROLL
  for (int n = 0; n < kQueries / 8; ++n) {
    float lse[2];
    m.load_pair(lse, lses + (n * 8 + accumulator_place(m.lane(), 0).column) * 4);
    ML_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      ML_UNROLL
      for (int i = 0; i < 4; ++i) scores[t][n][i] = m.exp2(scores[t][n][i] * scale - lse[i % 2]);
    }
  }
}

// Negates the dropped probabilities [keys, queries] to mark them. row: the first key, relative to the block's first
// key, whose position is in shared memory.
template <int kTiles, int kQueries, class Machine>
ML_TILE void mark_dropped(
    Machine& m, float (&probabilities)[kTiles][kQueries / 8][4], uint32_t starts, uint32_t position, int row,
    int32_t threshold) {
  uint32_t first[2];
  m.load_pair(first, position);
  const uint32_t first_step = drop_step(first[0] + row + accumulator_place(m.lane(), 0).row);
  ML_UNROLL
  for (int n = 0; n < kQueries / 8; ++n) {
    uint32_t start[2], tweak[2];
    const uint32_t from = starts + (n * 8 + accumulator_place(m.lane(), 0).column) * 4;
    m.load_pair(start, from);
    m.load_pair(tweak, from + kQueries * 4);
    ML_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      ML_UNROLL
      for (int i = 0; i < 4; ++i) {
        const DropRow drawn{m.opaque(start[i % 2] + first_step), tweak[i % 2]};
        float& probability = probabilities[t][n][i];
        if (drop_word(drawn, drop_step(t * 16 + i / 2 * 8)) < threshold) probability = -probability;
      }
    }
  }
}

// sums += (P keep)^T dO / s.
template <class Element, int kTiles, int kHead, int kQueries, class Machine>
ML_TILE void add_kept_product(
    Machine& m, float (&sums)[kTiles][kHead / 8][4], const float (&marked)[kTiles][kQueries / 8][4],
    uint32_t grad_tile) {
  float kept[kTiles][kQueries / 8][4];
  ML_UNROLL
  for (int i = 0; i < kTiles * kQueries / 2; ++i) {
    const float probability = marked[i / (kQueries / 2)][i / 4 % (kQueries / 8)][i % 4];
    kept[i / (kQueries / 2)][i / 4 % (kQueries / 8)][i % 4] = probability < 0.0f ? 0.0f : probability;
  }
  add_product_of_sums<Element, kTiles, kHead, kQueries>(m, sums, kept, grad_tile);
}

// Replaces dP^T by dS^T = P^T (dP^T - delta); for dropped probabilities, which are negative, dP is 0.
template <int kTiles, int kQueries, bool kDrops, class Machine>
ML_TILE void key_score_gradients(
    Machine& m, const float (&probabilities)[kTiles][kQueries / 8][4], float (&grads)[kTiles][kQueries / 8][4],
    uint32_t deltas) {
  ML_UNROLL
  for (int n = 0; n < kQueries / 8; ++n) {
    float delta[2];
    m.load_pair(delta, deltas + (n * 8 + accumulator_place(m.lane(), 0).column) * 4);
    ML_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      ML_UNROLL
      for (int i = 0; i < 4; ++i) {
        float probability = probabilities[t][n][i];
        if constexpr (kDrops) {
          if (probability < 0.0f) grads[t][n][i] = 0.0f;
          probability = fabsf(probability);
        }
        grads[t][n][i] = probability * (grads[t][n][i] - delta[i % 2]);
      }
    }
  }
}

// Adds this block's dS K to the queries' sums in global memory. dS^T is transposed through shared memory; each warp
// computes 16 queries and a part of the columns.
template <class Shape, class Machine>
ML_TILE void add_to_queries(
    Machine& m, const MegaliteAttention& a, const Sequence& piece, int64_t head, int first_query,
    const float (&grads)[Shape::kTiles][Shape::kQueries / 8][4], uint32_t key_tile, uint32_t score_tile) {
  using Element = typename Shape::Element;
  using Tile = typename Shape::Tile;
  using ScoreTile = typename Shape::ScoreTile;
  constexpr int kSlices = Shape::kQueries / 16, kColumns = Shape::kHead / (Shape::kWarps / kSlices);
  static_assert(Shape::kWarps % kSlices == 0 && kColumns % 16 == 0);
  const int warp = m.thread() / 32;
  ML_UNROLL
  for (int t = 0; t < Shape::kTiles; ++t) {
    ML_UNROLL
    for (int n = 0; n < Shape::kQueries / 8; ++n) {
      ML_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Place place = accumulator_place(m.lane(), half * 2);
        m.store_shared(
            score_tile + ScoreTile::offset((warp * Shape::kTiles + t) * 16 + place.row, n) + place.column * 2,
            m.template pack<Element>(grads[t][n][half * 2], grads[t][n][half * 2 + 1]));
      }
    }
  }
  m.sync();  // dS of all keys is stored; the sync at the start of the next step keeps it from being overwritten early
  const int slice = warp % kSlices, first_column = warp / kSlices * kColumns;
  const typename ScoreTile::Lane left_lane = ScoreTile::lane(tile_place(Order::kRight, m.lane()));
  const typename Tile::Lane right_lane = Tile::lane(tile_place(Order::kDown, m.lane()));
  float sums[kColumns / 8][4] = {};
  ML_UNROLL_TWICE
  for (int k = 0; k < Shape::kKeys / 16; ++k) {
    uint32_t left[4];
    m.load_matrix_transposed(left, score_tile + left_lane.offset(k * 16, slice * 2));
    ML_UNROLL
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t right[4];
      m.load_matrix_transposed(right, key_tile + right_lane.offset(k * 16, first_column / 8 + n * 2));
      m.template multiply<Element>(sums[2 * n], left, right[0], right[1]);
      m.template multiply<Element>(sums[2 * n + 1], left, right[2], right[3]);
    }
  }
  ML_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int query = first_query + slice * 16 + accumulator_place(m.lane(), half * 2).row;
    if (query >= piece.band.queries) continue;
    float* target = a.query_sums + ((piece.first_query + query) * a.heads + head) * Shape::kHead + first_column;
    ML_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      const int column = n * 8 + accumulator_place(m.lane(), 0).column;
      m.add_pair(target + column, sums[n][half * 2], sums[n][half * 2 + 1]);
    }
  }
}

// Computes dK and dV, or one of them, of one block of keys of one key-value head; with kSumQueries also its part of dQ.
template <class Shape, class Machine>
ML_TILE void attention_key_gradients(Machine& m, const MegaliteAttention& a, int block, int kv_head, int sequence) {
  using Element = typename Shape::Element;
  using Tile = typename Shape::Tile;
  constexpr int kTiles = Shape::kTiles, kKeys = Shape::kKeys, kQueries = Shape::kQueries, kHead = Shape::kHead;
  const Sequence piece = sequence_of(a, sequence);
  const Band& band = piece.band;
  const int first_key = block * kKeys, past_key = at_most(first_key + kKeys, band.keys);
  if (first_key >= band.keys) return;
  const int64_t token = static_cast<int64_t>(piece.first_key) + first_key;
  const uint32_t key_tile = m.shared(), value_tile = key_tile + Shape::kValueTile;
  const uint32_t stages = key_tile + Shape::kStages;
  const int warp_row = m.thread() / 32 * kTiles * 16;
  const float scale = static_cast<float>(a.scale) * kLog2E;
  if constexpr (Shape::kDrops) {
    if (m.thread() == 0) m.store_shared(key_tile + Shape::kPosition, drop_position(a, piece.first_key) + first_key);
  }

  const Range seen = band.queries_of_block(first_key, past_key);
  const int first_block = seen.begin / kQueries;
  const int blocks = seen.empty() ? 0 : blocks_of(seen.end, kQueries) - first_block;
  const int group = static_cast<int>(a.heads / a.kv_heads), steps = blocks * group;
  const auto copy_next = [&](int step, int shared_head, int block_of_queries) {
    copy_queries<Shape>(
        m, a, piece, shared_head, block_of_queries * kQueries, stages + step % 2 * Shape::kStageBytes);
  };
  const auto* key = static_cast<const uint16_t*>(a.key) + token * a.key_token + kv_head * a.key_head;
  const auto* value = static_cast<const uint16_t*>(a.value) + token * a.value_token + kv_head * a.value_head;
  copy_tile<Tile, kKeys>(m, key_tile, key, a.key_token, past_key - first_key);
  if constexpr (Shape::kGivesKeys) {
    copy_tile<Tile, kKeys>(m, value_tile, value, a.value_token, past_key - first_key);
  }
  int shared_head = kv_head * group, block_of_queries = first_block;
  if (steps > 0) copy_next(0, shared_head, block_of_queries);

  [[maybe_unused]] float key_grads[kTiles][kHead / 8][4] = {}, value_grads[kTiles][kHead / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    m.wait_all();
    m.sync();  // this step's queries have arrived, and all warps have read those of the previous step
    const int first_query = block_of_queries * kQueries;
    const bool wraps = block_of_queries + 1 == first_block + blocks;
    const int next_head = shared_head + wraps, next_block = wraps ? first_block : block_of_queries + 1;
    if (step + 1 < steps) copy_next(step + 1, next_head, next_block);
    const uint32_t query_tile = stages + step % 2 * Shape::kStageBytes, grad_tile = query_tile + Shape::kGradTile;
    const uint32_t lses = query_tile + Shape::kRows, deltas = lses + kQueries * 4;
    const bool full = band.full(
        first_query, at_most(first_query + kQueries, band.queries), first_key, first_key + kKeys);
    float scores[kTiles][kQueries / 8][4] = {};
    add_product_of_rows<Element, kTiles, kQueries, kHead>(m, scores, key_tile, warp_row, query_tile);
    if (!full) mask_queries<kTiles, kQueries>(m, scores, band, first_key + warp_row, first_query);
    key_probabilities<kTiles, kQueries>(m, scores, scale, lses);
    if constexpr (Shape::kDrops) {
      mark_dropped<kTiles, kQueries>(
          m, scores, deltas + kQueries * 4, key_tile + Shape::kPosition, warp_row, drop_threshold(a.dropped));
    }
    if constexpr (Shape::kGivesValues && Shape::kDrops) {
      add_kept_product<Element, kTiles, kHead, kQueries>(m, value_grads, scores, grad_tile);
    } else if constexpr (Shape::kGivesValues) {
      add_product_of_sums<Element, kTiles, kHead, kQueries>(m, value_grads, scores, grad_tile);
    }
    if constexpr (Shape::kGivesKeys) {
      float grads[kTiles][kQueries / 8][4] = {};
      add_product_of_rows<Element, kTiles, kQueries, kHead>(m, grads, value_tile, warp_row, grad_tile);
      key_score_gradients<kTiles, kQueries, Shape::kDrops>(m, scores, grads, deltas);
      add_product_of_sums<Element, kTiles, kHead, kQueries>(m, key_grads, grads, query_tile);
      if constexpr (Shape::kSumQueries) {
        const Sequence again = sequence_of(a, sequence);  // read again to save registers in the loop
        add_to_queries<Shape>(
            m, a, again, shared_head, first_query, grads, key_tile, key_tile + Shape::kScoreTile);
      }
    }
    shared_head = next_head, block_of_queries = next_block;
  }

  const float kept_scale = Shape::kDrops ? drop_scale<float>(a) : 1.0f;
  float kept_scales[kTiles][2], scales[kTiles][2];
  ML_UNROLL
  for (int i = 0; i < kTiles * 2; ++i) {
    kept_scales[i / 2][i % 2] = kept_scale;
    scales[i / 2][i % 2] = static_cast<float>(a.scale) * kept_scale;
  }
  m.wait_all();
  m.sync();  // all warps have read keys and values: their tiles are reused to store the gradients
  const int64_t stride = a.kv_heads * kHead, place = (token * a.kv_heads + kv_head) * kHead;
  const int rows = past_key - first_key;
  if constexpr (Shape::kGivesKeys) {
    store_rows<Element, kTiles, kHead>(
        m, key_grads, scales, key_tile, warp_row, static_cast<uint16_t*>(a.key_grad) + place, stride, rows);
  }
  if constexpr (Shape::kGivesValues) {
    store_rows<Element, kTiles, kHead>(
        m, value_grads, kept_scales, value_tile, warp_row, static_cast<uint16_t*>(a.value_grad) + place, stride, rows);
  }
}

// Like ForwardShape, with output gradients next to the queries and two stages of keys and values.
template <class Element_, int kHead_, int kWarps_, int kTiles_, int kKeys_, bool kDrops_ = false>
struct QueryShape {
  using Element = Element_;
  static constexpr int kHead = kHead_, kThreads = kWarps_ * 32, kTiles = kTiles_, kKeys = kKeys_;
  static constexpr bool kDrops = kDrops_;
  static constexpr int kRows = kWarps_ * kTiles * 16;
  using Tile = Swizzle<kHead>;
  static constexpr int kGradTile = kRows * Tile::kRowBytes;
  static constexpr int kStages = 2 * kGradTile;
  static constexpr int kValueTile = kKeys * Tile::kRowBytes;  // offset in a stage: keys, then values
  static constexpr int kStageBytes = 2 * kValueTile;
  static constexpr int kSharedBytes = kStages + 2 * kStageBytes;
  static constexpr bool kBlocksOfKeys = false;
};

// Computes dQ of one block of queries of one head, looping over the keys in order.
template <class Shape, class Machine>
ML_TILE void attention_query_gradients(Machine& m, const MegaliteAttention& a, int block, int head, int sequence) {
  using Element = typename Shape::Element;
  using Tile = typename Shape::Tile;
  constexpr int kTiles = Shape::kTiles, kKeys = Shape::kKeys, kHead = Shape::kHead;
  const Sequence piece = sequence_of(a, sequence);
  const Band& band = piece.band;
  const int first_row = block * Shape::kRows, past_row = at_most(first_row + Shape::kRows, band.queries);
  if (first_row >= band.queries) return;
  const int64_t kv_head = head / (a.heads / a.kv_heads), stride = a.heads * kHead;
  const int64_t token = static_cast<int64_t>(piece.first_query) + first_row, place = token * stride + head * kHead;
  const uint32_t query_tile = m.shared(), grad_tile = query_tile + Shape::kGradTile;
  const uint32_t stages = query_tile + Shape::kStages;
  const int warp_row = m.thread() / 32 * kTiles * 16;
  const float scale = static_cast<float>(a.scale) * kLog2E;
  const auto* query = static_cast<const uint16_t*>(a.query) + token * a.query_token + head * a.query_head;
  const auto* grad = static_cast<const uint16_t*>(a.output_grad) + place;
  const auto copy_keys = [&](uint32_t stage, int first) {
    const int64_t from = static_cast<int64_t>(piece.first_key) + first;
    const auto* key = static_cast<const uint16_t*>(a.key) + from * a.key_token + kv_head * a.key_head;
    const auto* value = static_cast<const uint16_t*>(a.value) + from * a.value_token + kv_head * a.value_head;
    copy_tile<Tile, kKeys>(m, stage, key, a.key_token, band.keys - first);
    copy_tile<Tile, kKeys>(m, stage + Shape::kValueTile, value, a.value_token, band.keys - first);
  };
  const Range seen = band.keys_of_block(first_row, past_row);
  const int past_key = seen.empty() ? 0 : seen.end;
  int first_key = seen.begin / kKeys * kKeys;
  copy_tile<Tile, Shape::kRows>(m, query_tile, query, a.query_token, past_row - first_row);
  copy_tile<Tile, Shape::kRows>(m, grad_tile, grad, stride, past_row - first_row);
  if (first_key < past_key) copy_keys(stages, first_key);

  float lses[kTiles][2], deltas[kTiles][2], scales[kTiles][2];
  [[maybe_unused]] DropRow drawn[kTiles * 2];  // offset to the sequence's first key
  const uint32_t first_step = Shape::kDrops ? drop_step(drop_position(a, piece.first_key)) : 0;
  ML_UNROLL
  for (int i = 0; i < kTiles * 2; ++i) {
    const int row = warp_row + i / 2 * 16 + accumulator_place(m.lane(), i % 2 * 2).row;
    const bool there = first_row + row < past_row;
    const float* statistics = a.statistics + head * a.queries + token + (there ? row : 0);
    lses[i / 2][i % 2] = there ? statistics[0] : kInfinity;
    deltas[i / 2][i % 2] = there ? statistics[a.heads * a.queries] : 0.0f;
    scales[i / 2][i % 2] = static_cast<float>(a.scale);
    if constexpr (Shape::kDrops) {
      scales[i / 2][i % 2] *= drop_scale<float>(a);
      const auto* words = reinterpret_cast<const uint32_t*>(statistics) + 2 * a.heads * a.queries;
      drawn[i] = {words[0] + first_step, words[a.heads * a.queries]};
    }
  }
  float sums[kTiles][kHead / 8][4] = {};
  for (int stage = 0; first_key < past_key; first_key += kKeys, stage ^= 1) {
    m.wait_all();
    m.sync();  // these keys have arrived, and all warps have read the previous ones
    if (first_key + kKeys < past_key) {
      copy_keys(stages + (stage ^ 1) * Shape::kStageBytes, first_key + kKeys);
    }
    const uint32_t key_tile = stages + stage * Shape::kStageBytes;
    float scores[kTiles][kKeys / 8][4] = {}, grads[kTiles][kKeys / 8][4] = {};
    add_product_of_rows<Element, kTiles, kKeys, kHead>(m, scores, query_tile, warp_row, key_tile);
    if (!band.full(first_row, past_row, first_key, first_key + kKeys)) {
      mask_keys<kTiles, kKeys>(m, scores, band, first_row + warp_row, first_key);
    }
    add_product_of_rows<Element, kTiles, kKeys, kHead>(
        m, grads, grad_tile, warp_row, key_tile + Shape::kValueTile);
    ML_UNROLL
    for (int t = 0; t < kTiles; ++t) {
      ML_UNROLL
      for (int i = 0; i < kKeys / 2; ++i) {
        const int n = i / 4, c = i % 4, half = c / 2;
        const float probability = m.exp2(scores[t][n][c] * scale - lses[t][half]);
        if constexpr (Shape::kDrops) {
          const uint32_t step = drop_step(first_key + accumulator_place(m.lane(), 0).column);
          const DropRow row{m.opaque(drawn[t * 2 + half].start + step), drawn[t * 2 + half].tweak};
          if (drop_word(row, drop_step(n * 8 + c % 2)) < drop_threshold(a.dropped)) grads[t][n][c] = 0.0f;
        }
        grads[t][n][c] = probability * (grads[t][n][c] - deltas[t][half]);
      }
    }
    add_product_of_sums<Element, kTiles, kHead, kKeys>(m, sums, grads, key_tile);
  }
  m.wait_all();
  m.sync();  // with no visible key, the copy of the queries may still be writing to the tile that is overwritten now
  store_rows<Element, kTiles, kHead>(
      m, sums, scales, query_tile, warp_row, static_cast<uint16_t*>(a.query_grad) + place, stride,
      past_row - first_row);
}

// Tile sizes for each head size, limited by registers per thread and shared memory per block: 163 KiB or more, or with
// kSmall 99 KiB (compute capability 8.6, 8.9 and 12.0), where tiles of large heads that are streamed have half the
// rows.
constexpr int kWideHead = 128;  // the accumulators of larger heads take half of a thread's registers
template <class Element, int kHead, bool kDrops>
using ForwardShapeOf = ForwardShape<
    Element, kHead, 4, kHead <= kWideHead ? 2 : 1, (kHead > kWideHead) || (kDrops && kHead == kWideHead) ? 32 : 64,
    kDrops>;
template <int kHead, bool kSmall>
constexpr int kPassing = (kHead <= kWideHead ? 64 : 32) / (kSmall && kHead >= kWideHead ? 2 : 1);
template <class Element, int kHead, bool kSumQueries, bool kDrops, bool kSmall = false, Gives kGives = Gives::kBoth>
using KeyShapeOf = KeyShape<
    Element, kHead, kHead <= kWideHead ? 8 : 4, 1, kPassing<kHead, kSmall>, kSumQueries, kDrops, kGives>;
template <class Element, int kHead, bool kDrops, bool kSmall = false>
using QueryShapeOf = QueryShape<Element, kHead, kHead <= kWideHead ? 8 : 4, 1, kPassing<kHead, kSmall>, kDrops>;

// Whether blocks of keys can also sum dQ by atomic additions: only if there are enough registers.
template <int kHead, bool kDrops>
constexpr bool kSumsInAnyOrder = kHead <= kWideHead && !kDrops;

// Calls run(shape) for each kernel of the deterministic backward, until one returns an error.
template <class Element, int kHead, bool kDrops, bool kSmall, class Run>
int for_shapes_in_order(const Run& run) {
  int error;
  if constexpr (kHead <= kWideHead) {
    error = run(KeyShapeOf<Element, kHead, false, kDrops, kSmall>{});
  } else {
    error = run(KeyShapeOf<Element, kHead, false, kDrops, kSmall, Gives::kKeys>{});
    if (error == 0) error = run(KeyShapeOf<Element, kHead, false, kDrops, kSmall, Gives::kValues>{});
  }
  return error != 0 ? error : run(QueryShapeOf<Element, kHead, kDrops, kSmall>{});
}

// Calls run(shape) for each kernel of the backward on a chip that allows `limit` bytes of shared memory per block.
template <class Element, int kHead, bool kDrops, class Run>
int for_backward_shapes(bool any_order, int limit, const Run& run) {
  if constexpr (kSumsInAnyOrder<kHead, kDrops>) {
    using Keys = KeyShapeOf<Element, kHead, true, false>;
    if (any_order && Keys::kSharedBytes <= limit) return run(Keys{});
  }
  int most = 0;
  for_shapes_in_order<Element, kHead, kDrops, false>([&](auto shape) {
    most = at_least(most, decltype(shape)::kSharedBytes);
    return 0;
  });
  return most <= limit ? for_shapes_in_order<Element, kHead, kDrops, false>(run)
                       : for_shapes_in_order<Element, kHead, kDrops, true>(run);
}

// Returns the largest shared memory of these kernels in bytes per block.
template <class Element, int kHead, bool kDrops>
int backward_shared(bool any_order, int limit) {
  int most = 0;
  for_backward_shapes<Element, kHead, kDrops>(any_order, limit, [&](auto shape) {
    most = at_least(most, decltype(shape)::kSharedBytes);
    return 0;
  });
  return most;
}

}  // namespace ml
