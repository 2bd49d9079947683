// 16-byte loads and stores, and warp sums.
#pragma once

#include <cstdint>

#include "core/scalar.h"

namespace ml {

template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename T>
__device__ __forceinline__ Pack<T> load(const T* from) {
  Pack<T> pack;
  *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
  return pack;
}

template <typename T>
__device__ __forceinline__ void store(T* to, const Pack<T>& pack) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&pack);
}

// Whether a pointer has the alignment of load and store.
inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Returns the sum over the warp in every lane, in a fixed order; called by all 32 lanes.
template <typename W>
__device__ __forceinline__ W warp_sum(W value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

}  // namespace ml
