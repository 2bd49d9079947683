// Rotary embedding on the CPU: one pass over the heads of every token.
#include "rotary.h"

#include <cstring>

#include "core/rotary.h"
#include "cpu/streaming.h"

namespace {

using namespace ml;

// The least number of values for which several threads pay.
constexpr int64_t kParallel = 32768;
// The largest head that is written with non-temporal stores.
constexpr int64_t kLargest = 256;

template <bool kInterleaved, typename T>
void turn_head(const T* from, T* to, const T* cosines, const T* sines, Wide<T> direction, int64_t pairs) {
  // Safe in place: each pair is read before it is written, and pairs do not overlap.
#pragma omp simd
  for (int64_t i = 0; i < pairs; ++i) {
    const Pair at = pair_of<kInterleaved>(i, pairs);
    const auto point = turned(
        to_wide(from[at.first]), to_wide(from[at.second]), to_wide(cosines[i]), direction * to_wide(sines[i]));
    to[at.first] = from_wide<T>(point.first);
    to[at.second] = from_wide<T>(point.second);
  }
}

template <bool kInterleaved, typename T>
void turn(
    const MegaliteHeads* parts, int count, const MegaliteAngles& angles, int64_t batch, int64_t sequence,
    int64_t head_dim) {
  const int64_t pairs = head_dim / 2;
  const Wide<T> direction = angles.inverse ? -1 : 1;
  int64_t heads = 0;
  for (int part = 0; part < count; ++part) heads += parts[part].heads;
  const int64_t values = batch * sequence * heads * head_dim;
  // Not in place: there the cache lines have been read anyway.
  const bool streams = head_dim <= kLargest && parts[0].from != parts[0].to && outgrows_caches<T>(values);
#pragma omp parallel if (values > kParallel)
  {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < batch * sequence; ++token) {
      const int64_t row = token / sequence, column = token % sequence;
      const int64_t angle = table_row(row, column, angles.positions, angles.batch_stride) * pairs;
      const T* cosines = static_cast<const T*>(angles.cosines) + angle;
      const T* sines = static_cast<const T*>(angles.sines) + angle;
      for (int part = 0; part < count; ++part) {
        const MegaliteHeads& each = parts[part];
        const T* from =
            static_cast<const T*>(each.from) + row * each.from_strides[0] + column * each.from_strides[1];
        T* to = static_cast<T*>(each.to) + row * each.to_strides[0] + column * each.to_strides[1];
        for (int64_t head = 0; head < each.heads; ++head) {
          alignas(kLineBytes) T space[kLargest];
          T* made = streams ? space : to;
          if (each.turns) turn_head<kInterleaved>(from, made, cosines, sines, direction, pairs);
          if (streams) {
            stream(to, each.turns ? made : from, head_dim);
          } else if (!each.turns) {
            memcpy(to, from, head_dim * sizeof(T));
          }
          from += each.from_strides[2];
          to += each.to_strides[2];
        }
      }
    }
    end_streams();
  }
}

}  // namespace

extern "C" int megalite_rotary_cpu(
    const MegaliteHeads* parts, int count, const MegaliteAngles* angles, int64_t batch, int64_t sequence,
    int64_t head_dim, int dtype) {
  return for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = angles->interleaved ? turn<true, T> : turn<false, T>;
    run(parts, count, *angles, batch, sequence, head_dim);
  });
}
