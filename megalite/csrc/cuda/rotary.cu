// Rotary embedding on a GPU: one thread block rotates all heads of a token and reads the token's angles once.
#include "rotary.h"

#include "core/rotary.h"
#include "cuda/values.cuh"

namespace {

using namespace ml;

constexpr int kThreads = 256;

struct Parts {
  MegaliteHeads part[kMegaliteMostParts];
  int64_t heads;
};

// Rotates N pairs of a head by N angles. low, high: the first and second values of the pairs; if interleaved, the 2 N
// consecutive values of the pairs.
template <bool kInterleaved, int N, typename T>
__device__ __forceinline__ void turn_values(
    Values<T, N>& low, Values<T, N>& high, const Values<T, N>& cosines, const Values<T, N>& sines, Wide<T> direction) {
  Wide<T> values[2 * N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    values[i] = to_wide(low.values[i]);
    values[N + i] = to_wide(high.values[i]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Pair at = pair_of<kInterleaved>(i, N);
    const auto point = turned(
        values[at.first], values[at.second], to_wide(cosines.values[i]), direction * to_wide(sines.values[i]));
    values[at.first] = point.first;
    values[at.second] = point.second;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    low.values[i] = from_wide<T>(values[i]);
    high.values[i] = from_wide<T>(values[N + i]);
  }
}

// The source and target of one head of token (b, s); turns: false copies without rotation.
template <typename T>
struct Head {
  const T* from;
  T* to;
  bool turns;
};

template <typename T>
__device__ __forceinline__ Head<T> head_at(const Parts& parts, int64_t b, int64_t s, int64_t head) {
  int which = 0;
  while (head >= parts.part[which].heads) head -= parts.part[which++].heads;
  const MegaliteHeads& part = parts.part[which];
  return {static_cast<const T*>(part.from) + b * part.from_strides[0] + s * part.from_strides[1] +
              head * part.from_strides[2],
          static_cast<T*>(part.to) + b * part.to_strides[0] + s * part.to_strides[1] + head * part.to_strides[2],
          static_cast<bool>(part.turns)};
}

// Thread block (s, y, z) computes token s of row z * gridDim.y + y. threadIdx.x counts groups of N pairs, threadIdx.y
// heads; each thread has two heads in flight.
template <bool kInterleaved, typename T, int N>
__global__ void __launch_bounds__(kThreads) turn(
    const __grid_constant__ Parts parts, const __grid_constant__ MegaliteAngles angles, int64_t batch, int64_t pairs) {
  constexpr int kAtOnce = 2;
  const int64_t s = blockIdx.x, b = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  if (b >= batch) return;
  const int64_t row = table_row(b, s, angles.positions, angles.batch_stride);
  if (row < 0 || row >= angles.rows) __trap();
  const Wide<T> direction = angles.inverse ? -1 : 1;
  for (int64_t pair = int64_t(threadIdx.x) * N; pair < pairs; pair += blockDim.x * N) {
    const auto cosines = load<N>(static_cast<const T*>(angles.cosines) + row * pairs + pair);
    const auto sines = load<N>(static_cast<const T*>(angles.sines) + row * pairs + pair);
    const Pair at = pair_of<kInterleaved>(pair, pairs);
    const int64_t low_at = at.first, high_at = kInterleaved ? low_at + N : at.second;
    for (int64_t head = threadIdx.y; head < parts.heads; head += blockDim.y * kAtOnce) {
      Head<T> heads[kAtOnce];
      Values<T, N> low[kAtOnce], high[kAtOnce];
#pragma unroll
      for (int h = 0; h < kAtOnce; ++h) {
        if (head + h * blockDim.y >= parts.heads) continue;
        heads[h] = head_at<T>(parts, b, s, head + h * blockDim.y);
        low[h] = load<N>(heads[h].from + low_at), high[h] = load<N>(heads[h].from + high_at);
      }
#pragma unroll
      for (int h = 0; h < kAtOnce; ++h) {
        if (head + h * blockDim.y >= parts.heads) continue;
        if (heads[h].turns) turn_values<kInterleaved>(low[h], high[h], cosines, sines, direction);
        store(heads[h].to + low_at, low[h]);
        store(heads[h].to + high_at, high[h]);
      }
    }
  }
}

// Whether all groups of pairs are aligned to 16 bytes.
template <typename T>
bool packs(const MegaliteHeads* parts, int count, const MegaliteAngles& angles, int64_t pairs) {
  constexpr int N = kPerLoad<T>;
  bool aligned = pairs % N == 0 && on_16_bytes(angles.cosines) && on_16_bytes(angles.sines);
  for (int part = 0; part < count; ++part) {
    aligned = aligned && on_16_bytes(parts[part].from) && on_16_bytes(parts[part].to);
    for (int dim = 0; dim < 3; ++dim) {
      aligned = aligned && parts[part].from_strides[dim] % N == 0 && parts[part].to_strides[dim] % N == 0;
    }
  }
  return aligned;
}

}  // namespace

extern "C" int megalite_rotary_cuda(
    const MegaliteHeads* parts, int count, const MegaliteAngles* angles, int64_t batch, int64_t sequence,
    int64_t head_dim, int dtype, void* stream) {
  Parts given{};
  for (int part = 0; part < count; ++part) {
    given.part[part] = parts[part];
    given.heads += parts[part].heads;
  }
  const int64_t pairs = head_dim / 2;
  if (batch * sequence * given.heads * pairs == 0) return 0;
  const int unknown = for_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int N = kPerLoad<T>;
    const bool wide = packs<T>(parts, count, *angles, pairs);
    const auto kernel = angles->interleaved ? (wide ? turn<true, T, N> : turn<true, T, 1>)
                                            : (wide ? turn<false, T, N> : turn<false, T, 1>);
    const int64_t columns = wide ? pairs / N : pairs;
    const unsigned lanes = static_cast<unsigned>(columns < kThreads ? columns : kThreads);
    const unsigned groups = static_cast<unsigned>(given.heads < kThreads / lanes ? given.heads : kThreads / lanes);
    const int64_t layers = divided_up(batch, kMostBlocks);
    const dim3 grid(sequence, divided_up(batch, layers), layers);
    kernel<<<grid, dim3(lanes, groups), 0, static_cast<cudaStream_t>(stream)>>>(given, *angles, batch, pairs);
  });
  return unknown != 0 ? unknown : cudaGetLastError();
}
