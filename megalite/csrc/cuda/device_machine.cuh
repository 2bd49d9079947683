// The Machine of core/attention_tiles.h on a GPU: one thread's instructions, for compute capability 8.0 and later.
#pragma once

#include <type_traits>

#include "core/scalar.h"

namespace ml {

template <int kThreads_>
struct DeviceMachine {
  static constexpr int kThreads = kThreads_;

  __device__ __forceinline__ int thread() const { return threadIdx.x; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }

  // The 32-bit address of the block's shared memory, for ldmatrix and cp.async.
  __device__ __forceinline__ uint32_t shared() const {
    extern __shared__ __align__(128) unsigned char memory[];
    return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  }

  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() const { __syncwarp(); }

  // Starts an asynchronous copy (cp.async); if not `there`, reads nothing and writes zeros to shared memory.
  template <int kBytes>
  __device__ __forceinline__ void copy(uint32_t target, const void* source, bool there) const {
    const int bytes = there ? kBytes : 0;
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes)
                   : "memory");
    } else {
      static_assert(kBytes == 4);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes)
                   : "memory");
    }
  }

  __device__ __forceinline__ void wait_all() const { asm volatile("cp.async.wait_all;" ::: "memory"); }

  __device__ __forceinline__ void load_matrix(uint32_t (&to)[4], uint32_t address) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }

  __device__ __forceinline__ void load_matrix_transposed(uint32_t (&to)[4], uint32_t address) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }

  template <class Element>
  __device__ __forceinline__ void multiply(
      float (&sums)[4], const uint32_t (&left)[4], uint32_t right_low, uint32_t right_high) const {
    if constexpr (std::is_same_v<Element, bf16>) {
      asm(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
          : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
    } else {
      static_assert(std::is_same_v<Element, fp16>);
      asm(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
          : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
    }
  }

  template <class Element>
  __device__ __forceinline__ uint32_t pack(float low, float high) const {
    uint32_t both;
    if constexpr (std::is_same_v<Element, bf16>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    }
    return both;
  }

  // Returns the value, opaque to the optimiser, which would otherwise split sums with it and keep the terms in
  // registers.
  __device__ __forceinline__ uint32_t opaque(uint32_t value) const {
    asm volatile("" : "+r"(value));
    return value;
  }

  __device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) const {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
  }

  __device__ __forceinline__ void load_pair(float (&to)[2], uint32_t address) const {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(address) : "memory");
  }

  __device__ __forceinline__ void load_pair(uint32_t (&to)[2], uint32_t address) const {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(address) : "memory");
  }

  // Copies 16 bytes from shared to global memory.
  __device__ __forceinline__ void store_chunk(void* target, uint32_t address) const {
    uint32_t words[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
    // In PTX, because the compiler would turn an assignment into four stores.
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
  }

  __device__ __forceinline__ void add_pair(float* target, float first, float second) const {
#if __CUDA_ARCH__ >= 900 && CUDART_VERSION >= 12010  // PTX 8.1
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(first), "f"(second) : "memory");
#else
    atomicAdd(target, first);
    atomicAdd(target + 1, second);
#endif
  }

  __device__ __forceinline__ float shuffle_xor(float value, int distance) const {
    return __shfl_xor_sync(0xffffffffu, value, distance);
  }

  __device__ __forceinline__ float larger(float one, float other) const { return fmaxf(one, other); }

  __device__ __forceinline__ float exp2(float value) const {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
    return power;
  }

  __device__ __forceinline__ float log2(float value) const { return log2f(value); }
};

}  // namespace ml
