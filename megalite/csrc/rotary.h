// The C interface of the rotary embedding.
#pragma once

#include <cstdint>

// Heads are read from `from` and written to `to` (may be the same): [batch, sequence, heads, head_dim], the last dim
// contiguous, strides of the first three in elements. turns: 0: the heads are copied without rotation.
struct MegaliteHeads {
  const void* from;
  void* to;
  int64_t from_strides[3];
  int64_t to_strides[3];
  int64_t heads;
  int turns;
};

// cosines, sines: [rows, head_dim / 2]. Token (b, s) uses row positions[b * batch_stride + s], or row
// b * batch_stride + s if positions is null; batch_stride 0: the same for the whole batch. inverse: rotate by the
// negative angle.
struct MegaliteAngles {
  const void* cosines;
  const void* sines;
  const int64_t* positions;
  int64_t rows;
  int64_t batch_stride;
  int interleaved;
  int inverse;
};

constexpr int kMegaliteMostParts = 3;

extern "C" {

int megalite_rotary_cpu(
    const MegaliteHeads* parts, int count, const MegaliteAngles* angles, int64_t batch, int64_t sequence,
    int64_t head_dim, int dtype);
// Traps if a position has no row; on the CPU the caller checks the positions.
int megalite_rotary_cuda(
    const MegaliteHeads* parts, int count, const MegaliteAngles* angles, int64_t batch, int64_t sequence,
    int64_t head_dim, int dtype, void* stream);

}
