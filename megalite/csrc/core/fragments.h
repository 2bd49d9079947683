// Where the numbers of mma.sync.m16n8k16 and ldmatrix lie, in the lanes of a warp and in shared memory (PTX ISA,
// "Matrix fragments for mma.m16n8k16" and "ldmatrix").
#pragma once

#include "core/scalar.h"

namespace ml {

struct Place {
  int row, column;
};

// Accumulator `index` of a lane in the 16 x 8 result.
ML_HD constexpr Place accumulator_place(int lane, int index) {
  return {lane / 4 + index / 2 * 8, lane % 4 * 2 + index % 2};
}

// ldmatrix.x4 of a 16 x 16 tile: lane l gives the address of 8 numbers, the row and the half of the columns below.
// The four 8 x 8 matrices come down first, then right (kDown), or right first, then down (kRight).
//   kDown, as stored:   a left operand [row][sum]        kRight, as stored:  two right operands [column][sum]
//   kDown, transposed:  two right operands [sum][column] kRight, transposed: a left operand [sum][row]
enum class Order { kDown, kRight };

ML_HD constexpr Place tile_place(Order order, int lane) {
  return order == Order::kDown ? Place{lane % 16, lane / 16} : Place{lane % 8 + lane / 16 * 8, lane / 8 % 2};
}

// A tile in shared memory: rows of kColumns 16-bit numbers in chunks of 16 bytes. A row's chunks are exchanged by its
// number, so that eight rows' chunks of one column lie in eight different groups of banks: of rows that fill these, each
// by its own; of those that end amid them, as 96 numbers do, two by one, since they begin half of the banks apart.
template <int kColumns>
struct Swizzle {
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kRowBytes = kColumns * 2;
  static_assert(kChunks % 4 == 0, "the exchange stays within eight chunks, or four");

  ML_HD static constexpr int exchange(int row) { return kChunks % 8 == 0 ? row % 8 : row / 2 % 4; }

  ML_HD static constexpr uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ exchange(row)) << 4));
  }

  // The part of offset(row + tile_row, chunk + tile_chunk) that is a lane's own, where the tile's row is a multiple
  // of 8 and its chunk is even: the low chunk bit is the lane's, so the exchange falls into two parts.
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
