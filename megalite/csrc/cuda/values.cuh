// Vectors of N values: loads and stores are 16 bytes wide if N values are 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include "core/scalar.h"

namespace ml {

template <typename T>
constexpr int kPerLoad = 16 / sizeof(T);

template <typename T, int N>
struct Values {
  T values[N];
};

template <int N, typename T>
__device__ __forceinline__ Values<T, N> load(const T* from) {
  Values<T, N> some;
  if constexpr (N * sizeof(T) == 16) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    memcpy(&some, &bits, 16);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) some.values[i] = from[i];
  }
  return some;
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, const Values<T, N>& some) {
  if constexpr (N * sizeof(T) == 16) {
    uint4 bits;
    memcpy(&bits, &some, 16);
#ifdef __CUDACC__
    // In PTX, because nvcc turns an assignment into four stores. No "memory" clobber, which would keep later loads from
    // moving up: no kernel reads what it stored.
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w));
#else
    *reinterpret_cast<uint4*>(to) = bits;
#endif
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = some.values[i];
  }
}

inline bool on_16_bytes(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// The largest gridDim.y and gridDim.z; gridDim.x may be 2^31 - 1.
constexpr int64_t kMostBlocks = 65535;

inline int64_t divided_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

}  // namespace ml
