// Fragment layouts of mma.sync.m16n8k16 and ldmatrix in the lanes of a warp, and the swizzle of tiles in shared memory
// (PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix").
#pragma once

#include "core/scalar.h"

namespace ml {

struct Place {
  int row, column;
};

// The element of the 16 x 8 result that a lane's accumulator register `index` holds.
ML_HD constexpr Place accumulator_place(int lane, int index) {
  return {lane / 4 + index / 2 * 8, lane % 4 * 2 + index % 2};
}

// ldmatrix.x4 of a 16 x 16 tile: lane l gives the address of 8 elements: a row, and which half of the columns.
// The order of the four 8 x 8 matrices is column-major (kDown) or row-major (kRight). Depending on the order and on
// .trans, the registers are an A operand or two B operands of mma.sync (k: the index that is summed over):
//   kDown:         A, stored [m][k]            kRight:         two B, stored [n][k]
//   kDown, .trans: two B, stored [k][n]        kRight, .trans: A, stored [k][m]
enum class Order { kDown, kRight };

ML_HD constexpr Place tile_place(Order order, int lane) {
  return order == Order::kDown ? Place{lane % 16, lane / 16} : Place{lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// A swizzled tile in shared memory: rows of kColumns 16-bit elements in chunks of 16 bytes. The chunk index is XORed
// with a function of the row, so that the chunks of eight rows in the same column are in different banks (no bank
// conflicts of ldmatrix). If a row is a multiple of 128 bytes, the XOR differs for each of eight rows. Otherwise (96
// elements are 1.5 x 128 bytes) consecutive rows already start half of the banks apart, so pairs of rows share one of
// four values.
template <int kColumns>
struct Swizzle {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kRowBytes = kColumns * 2;
  static_assert(kChunks % 4 == 0, "the exchange stays within eight chunks, or four");

  ML_HD static constexpr int exchange(int row) { return kChunks % 8 == 0 ? row % 8 : row / 2 % 4; }

  ML_HD static constexpr uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ exchange(row)) << 4));
  }

  // The per-lane part of offset(row + tile_row, chunk + tile_chunk), for tile_row a multiple of 8 and tile_chunk even:
  // tile_row does not change the XOR, and tile_chunk does not touch the lane's low chunk bit, so the two parts combine
  // by XOR.
  struct Lane {
    uint32_t base, exchange;
    ML_HD uint32_t offset(int tile_row, int tile_chunk) const {
      return base + tile_row * kRowBytes + (exchange ^ (tile_chunk << 4));
    }
  };

  ML_HD static constexpr Lane lane(Place place) {
    return {static_cast<uint32_t>(place.row * kRowBytes),
            static_cast<uint32_t>((place.column ^ exchange(place.row)) << 4)};
  }
};

}  // namespace ml
