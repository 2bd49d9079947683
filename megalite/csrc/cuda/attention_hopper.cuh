// Attention forward for compute capability 9.0 (Shah et al., "FlashAttention-3", 2024), warp-specialised. The producer
// warpgroup copies tiles of keys and values by TMA into circular buffers in shared memory; consumer warpgroups of 64
// queries each multiply with wgmma. Within a warpgroup, softmax overlaps with the asynchronous products of the next
// scores and the previous values; the warpgroups take turns at issuing products (ping-pong), so that one's softmax
// overlaps with another's products.
//
// Masks, tiles, softmax and results are those of core/attention_tiles.h.
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <string_view>

#include "attention.h"
#include "core/attention_tiles.h"
#include "cuda/attention_runtime.cuh"
#include "cuda/device_machine.cuh"
#include "cuda/hopper.cuh"

namespace ml {

// Tensor maps of [tokens, heads, kHead] with boxes of rows x 1 x 64: a box row of 64 elements is 128 bytes, with the
// 128-byte swizzle.
struct AttentionMaps {
  CUtensorMap query, key, value;
};

template <class Element_, int kHead_, int kGroups_, int kStages_>
struct HopperShape {
  using Element = Element_;
  static constexpr int kHead = kHead_, kGroups = kGroups_, kStages = kStages_;
  static constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows, kKeys = 128;
  static constexpr int kThreads = (1 + kGroups) * hopper::kGroup;
  static constexpr int kHalves = kHead / 64;  // boxes along the head dim
  // Registers per thread of each role (setmaxnreg); the register file has 65536.
  static constexpr int kProducerRegisters = kGroups == 2 ? 24 : 32, kConsumerRegisters = kGroups == 2 ? 240 : 160;
  static_assert(kProducerRegisters * hopper::kGroup + kConsumerRegisters * kGroups * hopper::kGroup <= 65536);

  // Shared memory: queries [group][half][64][64], then keys and values [stage][half][128][64], then the barriers.
  static constexpr int kQueryGroup = kGroupRows * kHead * 2, kTile = kKeys * kHead * 2;
  static constexpr int kKeyTiles = kGroups * kQueryGroup, kValueTiles = kKeyTiles + kStages * kTile;
  static constexpr int kBarriers = kValueTiles + kStages * kTile;
  static constexpr int kAlignment = 1024;  // required by the 128-byte swizzle
  static constexpr int kSharedBytes = kAlignment + kBarriers + (2 + 4 * kStages) * 8;

  static constexpr int kTurns = 1, kOwn = kTurns + kGroups;  // first named barriers (bar.sync), one per warpgroup each
};

// The state of a thread block that all threads share; mbarriers and tiles by their shared-memory addresses.
template <class Shape>
struct HopperBlock {
  uint32_t memory;
  Sequence piece;
  int head, kv_head, first_row, past_row, first_key, tiles;

  ML_TILE uint32_t queries_full() const { return memory + Shape::kBarriers; }
  ML_TILE uint32_t values_landed() const { return queries_full() + 8; }
  ML_TILE uint32_t keys_full(int tile) const { return ring(tile); }
  ML_TILE uint32_t keys_empty(int tile) const { return ring(tile) + 8; }
  ML_TILE uint32_t values_full(int tile) const { return ring(tile) + 16; }
  ML_TILE uint32_t values_empty(int tile) const { return ring(tile) + 24; }
  ML_TILE uint32_t keys(int tile) const { return memory + Shape::kKeyTiles + tile % Shape::kStages * Shape::kTile; }
  ML_TILE uint32_t values(int tile) const {
    return memory + Shape::kValueTiles + tile % Shape::kStages * Shape::kTile;
  }
  // The parity of the mbarrier phase that completes when this tile has arrived.
  ML_TILE static uint32_t parity(int tile) { return tile / Shape::kStages % 2; }

 private:
  ML_TILE uint32_t ring(int tile) const { return queries_full() + 16 + tile % Shape::kStages * 32; }
};

// The wgmma matrix descriptor of a tile in shared memory (PTX ISA, "Matrix descriptor"): 128-byte swizzle, stride 1024
// bytes between groups of eight rows. halves: the leading-dim byte offset, for MN-major operands (values) the distance
// from one 64-column half to the next; 0 for K-major operands.
ML_TILE uint64_t operand(uint32_t address, uint32_t halves) {
  constexpr uint64_t kExchanged = 1ull << 62, kEight = 1024 >> 4;
  return kExchanged | kEight << 32 | static_cast<uint64_t>(halves >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Starts the TMA copies of a tile's boxes; their bytes complete on `barrier`.
template <class Shape, int kRows>
ML_TILE void load_rows(uint32_t target, const CUtensorMap& map, uint32_t barrier, int head, int token) {
  ML_UNROLL
  for (int half = 0; half < Shape::kHalves; ++half) {
    hopper::load_box(target + half * kRows * 128, &map, barrier, half * 64, head, token);
  }
}

// Zeroes the value rows past the end of this sequence, which belong to another sequence: a probability of 0 times NaN
// would be NaN. Called by one warp after the values have arrived.
template <class Shape, class Machine>
ML_TILE void clear_values(Machine& m, uint32_t tile, int keys) {
  for (int i = keys * 8 + m.lane(); i < Shape::kKeys * 8; i += 32) {
    ML_UNROLL
    for (int half = 0; half < Shape::kHalves; ++half) {
      hopper::store_zeros(tile + half * Shape::kKeys * 128 + i * 16);
    }
  }
  hopper::publish_stores();
  m.sync_warp();
}

// The producer warp: fills the circular buffers, keys one tile ahead of values, the order in which they are needed.
template <class Shape, class Machine>
ML_TILE void produce(
    Machine& m, const MegaliteAttention& a, const AttentionMaps& maps, const HopperBlock<Shape>& block) {
  const bool leads = m.lane() == 0;
  const Sequence& piece = block.piece;
  const auto load_keys = [&](int tile) {
    hopper::wait(block.keys_empty(tile), block.parity(tile) ^ 1);
    if (!leads) return;
    hopper::arrive_expecting(block.keys_full(tile), Shape::kTile);
    load_rows<Shape, Shape::kKeys>(
        block.keys(tile), maps.key, block.keys_full(tile), block.kv_head,
        piece.first_key + block.first_key + tile * Shape::kKeys);
  };
  if (leads) {
    hopper::arrive_expecting(block.queries_full(), Shape::kGroups * Shape::kQueryGroup);
    ML_UNROLL
    for (int group = 0; group < Shape::kGroups; ++group) {
      load_rows<Shape, Shape::kGroupRows>(
          block.memory + group * Shape::kQueryGroup, maps.query, block.queries_full(), block.head,
          piece.first_query + block.first_row + group * Shape::kGroupRows);
    }
  }
  load_keys(0);
  for (int tile = 0; tile < block.tiles; ++tile) {
    if (tile + 1 < block.tiles) load_keys(tile + 1);
    const int first = block.first_key + tile * Shape::kKeys, own = piece.band.keys - first;
    // Only the last tile reaches past its sequence; past the end of the tensor TMA itself fills in zeros.
    const bool clears = own < Shape::kKeys && piece.first_key + piece.band.keys < a.keys;
    const uint32_t barrier = clears ? block.values_landed() : block.values_full(tile);
    hopper::wait(block.values_empty(tile), block.parity(tile) ^ 1);
    if (leads) {
      hopper::arrive_expecting(barrier, Shape::kTile);
      load_rows<Shape, Shape::kKeys>(
          block.values(tile), maps.value, barrier, block.kv_head, piece.first_key + first);
    }
    if (clears) {
      hopper::wait(block.values_landed(), 0);
      clear_values<Shape>(m, block.values(tile), own);
      if (leads) hopper::arrive(block.values_full(tile));
    }
  }
}

// A consumer warpgroup: computes the output of its 64 queries over all tiles of keys.
template <class Shape, class Machine>
ML_TILE void consume(Machine& m, const MegaliteAttention& a, const HopperBlock<Shape>& block, int group) {
  using Element = typename Shape::Element;
  constexpr int kHead = Shape::kHead, kKeys = Shape::kKeys, kRowBytes = 128;
  const int warp_row = group * Shape::kGroupRows + m.thread() / 32 % 4 * 16;
  const float scale = static_cast<float>(a.scale) * kLog2E;
  const uint32_t queries = block.memory + group * Shape::kQueryGroup;
  const int row = block.first_row + group * Shape::kGroupRows;

  float sums[1][kHead / 8][4] = {};
  float scores[1][kKeys / 8][4], factors[1][2];
  uint32_t probabilities[kKeys / 16][4];
  SoftmaxRows<1> rows = {{{-kInfinity, -kInfinity}}, {{0.0f, 0.0f}}};

  // Starts scores = queries x keys^T, asynchronously.
  const auto multiply_keys = [&](int tile) {
    const uint64_t left = operand(queries, 0), right = operand(block.keys(tile), 0);
    hopper::begin_products();
    ML_UNROLL
    for (int k = 0; k < kHead / 16; ++k) {
      const int half = k / 4, columns = k % 4 * 32;
      hopper::add_product<Element>(
          scores[0], left + ((half * Shape::kGroupRows * kRowBytes + columns) >> 4),
          right + ((half * kKeys * kRowBytes + columns) >> 4), k > 0);
    }
    hopper::commit_products();
  };
  // Starts sums += probabilities x values, asynchronously.
  const auto multiply_values = [&](int tile) {
    const uint64_t right = operand(block.values(tile), kKeys * kRowBytes);
    hopper::begin_products();
    ML_UNROLL
    for (int k = 0; k < kKeys / 16; ++k) {
      hopper::add_product<Element>(sums[0], probabilities[k], right + ((k * 16 * kRowBytes) >> 4));
    }
    hopper::commit_products();
  };
  const auto release = [&](uint32_t barrier) {
    if (m.lane() == 0) hopper::arrive(barrier);
  };
  const auto exponentiate = [&](int tile) {
    const int first = block.first_key + tile * kKeys;
    if (!block.piece.band.full(row, at_most(row + Shape::kGroupRows, block.past_row), first, first + kKeys)) {
      const Place own = accumulator_place(m.lane(), 0);
      ML_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Range seen = block.piece.band.keys_of(block.first_row + warp_row + own.row + half * 8);
        // Relative to the thread's first key, so that its key indices are constants, which saves registers.
        mask_row<1, kKeys>(scores, 0, half, {seen.begin - first - own.column, seen.end - first - own.column}, 0);
      }
    }
    ML_UNROLL
    for (int half = 0; half < 2; ++half) {
      factors[0][half] = softmax_row<1, kKeys>(m, scores, rows, 0, half, scale);
    }
  };
  const auto narrow_scores = [&] {
    ML_UNROLL
    for (int k = 0; k < kKeys / 16; ++k) {
      narrow<Element>(m, probabilities[k], scores[0][2 * k], scores[0][2 * k + 1]);
    }
  };

  const int last = block.tiles - 1;
  if (last >= 0) {
    if (group == 0 && last > 0) hopper::arrive(Shape::kTurns, 2 * hopper::kGroup);  // warpgroup 0 has the first turn
    hopper::wait(block.queries_full(), 0);
    hopper::wait(block.keys_full(0), 0);
    multiply_keys(0);
    hopper::wait_products<0>(scores[0]);
    release(block.keys_empty(0));
    exponentiate(0);
    narrow_scores();
    for (int tile = 1; tile <= last; ++tile) {
      hopper::wait(block.keys_full(tile), block.parity(tile));
      hopper::sync(Shape::kTurns + group, 2 * hopper::kGroup);
      multiply_keys(tile);
      hopper::wait(block.values_full(tile - 1), block.parity(tile - 1));
      multiply_values(tile - 1);
      const int next = (group + 1) % Shape::kGroups;
      if (tile < last || next != 0) hopper::arrive(Shape::kTurns + next, 2 * hopper::kGroup);
      hopper::wait_products<1>(scores[0]);
      release(block.keys_empty(tile));
      exponentiate(tile);
      hopper::before_products(rows.total[0][0] + rows.total[0][1]);
      hopper::wait_products<0>(sums[0]);
      release(block.values_empty(tile - 1));
      ML_UNROLL
      for (int half = 0; half < 2; ++half) scale_row<1, kHead>(sums, 0, half, factors[0][half]);
      narrow_scores();
    }
    hopper::wait(block.values_full(last), block.parity(last));
    multiply_values(last);
    hopper::wait_products<0>(sums[0]);
  }

  const int64_t first_token = static_cast<int64_t>(block.piece.first_query) + block.first_row;
  const int count = block.past_row - block.first_row;
  float* lse = static_cast<float*>(a.lse) + block.head * a.queries + first_token;
  finish_rows<1>(m, rows, factors, scale, lse, warp_row, count);
  // The output reuses the warpgroup's query tile: all its warps have finished reading the queries.
  hopper::sync(Shape::kOwn + group, hopper::kGroup);
  auto* output = static_cast<uint16_t*>(a.output) + (first_token * a.heads + block.head) * kHead;
  store_rows<Element, 1, kHead>(
      m, sums, factors, block.memory, warp_row, output, a.heads * kHead, count);
}

template <class Shape, class Machine>
ML_TILE void attention_forward_hopper(
    Machine& m, const MegaliteAttention& a, const AttentionMaps& maps, int index, int head, int sequence) {
  HopperBlock<Shape> block;
  block.memory = (m.shared() + Shape::kAlignment - 1) / Shape::kAlignment * Shape::kAlignment;
  block.piece = sequence_of(a, sequence);
  const Band& band = block.piece.band;
  block.head = head, block.kv_head = head / static_cast<int>(a.heads / a.kv_heads);
  block.first_row = index * Shape::kRows;
  if (block.first_row >= band.queries) return;
  block.past_row = at_most(block.first_row + Shape::kRows, band.queries);
  const Range seen = band.keys_of_block(block.first_row, block.past_row);
  block.first_key = seen.begin / Shape::kKeys * Shape::kKeys;
  block.tiles = seen.empty() ? 0 : blocks_of(seen.end - block.first_key, Shape::kKeys);

  const int group = hopper::uniform(m.thread() / hopper::kGroup);
  if (m.thread() == 0) {
    for (const CUtensorMap* map : {&maps.query, &maps.key, &maps.value}) hopper::prefetch_map(map);
    hopper::init_barrier(block.queries_full(), 1);
    hopper::init_barrier(block.values_landed(), 1);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      hopper::init_barrier(block.keys_full(stage), 1);
      hopper::init_barrier(block.keys_empty(stage), Shape::kGroups * 4);  // each consumer warp arrives once
      hopper::init_barrier(block.values_full(stage), 1);
      hopper::init_barrier(block.values_empty(stage), Shape::kGroups * 4);
    }
    hopper::publish_barriers();
  }
  m.sync();
  if (group == 0) {
    hopper::leave_registers<Shape::kProducerRegisters>();
    if (m.thread() < 32 && block.tiles > 0) produce<Shape>(m, a, maps, block);
  } else {
    hopper::take_registers<Shape::kConsumerRegisters>();
    consume<Shape>(m, a, block, group - 1);
  }
}

// Same grid as forward_kernel. The body is compiled for sm_90a only; launch_hopper never launches it on other chips.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) forward_hopper_kernel(
    const __grid_constant__ MegaliteAttention a, const __grid_constant__ AttentionMaps maps) {
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  DeviceMachine<Shape::kThreads> machine;
  attention_forward_hopper<Shape>(machine, a, maps, gridDim.x - 1 - blockIdx.x, blockIdx.y, blockIdx.z);
#endif
}

// Returns the driver's cuTensorMapEncodeTiled, or null; looked up at run time, because the library does not link
// libcuda.
inline decltype(&cuTensorMapEncodeTiled) map_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const int error =
      cleared(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
#else
  const int error = cleared(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result));
#endif
  const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return there ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found) : nullptr;
}

// Creates the tensor map of [tokens, heads, head_size] 16-bit elements; false if tensor maps do not support the
// strides.
template <class Element>
bool make_map(
    CUtensorMap& map, const void* tensor, int64_t tokens, int64_t heads, int64_t head_size, int64_t token,
    int64_t head, int rows) {
  static const auto encode = map_encoder();
  if (encode == nullptr) return false;
  const auto type = std::is_same_v<Element, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t sizes[3] = {
      static_cast<cuuint64_t>(head_size), static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(tokens)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head * 2), static_cast<cuuint64_t>(token * 2)};
  const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(rows)}, steps[3] = {1, 1, 1};
  const CUresult result = encode(
      &map, type, 3, const_cast<void*>(tensor), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS;
}

// Whether the current device has compute capability 9.0, the library has sm_90a code, and MEGALITE_NO_HOPPER is not 1.
// The variable is read in each call, so that tests can compare with the general kernel. Without sm_90a code the
// kernel's body is empty: a 9.0 chip would run it from another chip's code or PTX and leave the output unwritten.
inline bool takes_hopper() {
#ifdef MEGALITE_WITHOUT_SM90A
  return false;
#else
  const char* without = std::getenv("MEGALITE_NO_HOPPER");
  int device = 0, major = 0, minor = 0;
  return (without == nullptr || std::string_view(without) != "1") && cleared(cudaGetDevice(&device)) == 0 &&
         cleared(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) == 0 &&
         cleared(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) == 0 && major == 9 &&
         minor == 0;
#endif
}

// Returns kUnsupported, so that the caller uses the general kernel, on other chips, with MEGALITE_NO_HOPPER=1, or if
// tensor maps do not support the strides.
template <class Shape>
int launch_hopper(const MegaliteAttention& a, cudaStream_t stream) {
  using Element = typename Shape::Element;
  if (a.longest_query == 0 || a.heads == 0 || a.sequences == 0) return 0;
  AttentionMaps maps;
  const bool maps_made =
      a.keys > 0 && takes_hopper() &&
      make_map<Element>(
          maps.query, a.query, a.queries, a.heads, Shape::kHead, a.query_token, a.query_head, Shape::kGroupRows) &&
      make_map<Element>(
          maps.key, a.key, a.keys, a.kv_heads, Shape::kHead, a.key_token, a.key_head, Shape::kKeys) &&
      make_map<Element>(
          maps.value, a.value, a.keys, a.kv_heads, Shape::kHead, a.value_token, a.value_head, Shape::kKeys);
  if (!maps_made) return kUnsupported;
  static_assert(Shape::kSharedBytes <= 227 * 1024, "what a block may have on compute capability 9.0");
  if (const int error = allow_shared(forward_hopper_kernel<Shape>, Shape::kSharedBytes)) return error;
  return in_parts(a, [&](const MegaliteAttention& part) {
    const dim3 grid((a.longest_query + Shape::kRows - 1) / Shape::kRows, a.heads, part.sequences);
    forward_hopper_kernel<Shape><<<grid, Shape::kThreads, Shape::kSharedBytes, stream>>>(part, maps);
  });
}

}  // namespace ml
