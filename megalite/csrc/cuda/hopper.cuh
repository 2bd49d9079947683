// Wrappers of the instructions of compute capability 9.0, one function each: mbarrier, TMA (cp.async.bulk.tensor),
// wgmma and setmaxnreg; see these names in the PTX ISA. Tests replace this file by
// tests/kernels/emulator/cuda/hopper.cuh.
//
// Shared memory is addressed by 32 bits, see DeviceMachine::shared().
#pragma once

#include <cuda.h>

#include <type_traits>

#include "core/scalar.h"

namespace ml::hopper {

constexpr int kGroup = 128;  // threads of a warpgroup: four warps, the first one's index a multiple of four

// Broadcasts lane 0's value, so that the compiler knows that it is warp-uniform and keeps it in uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Initialises an mbarrier (8 bytes): a phase completes after `arrivals` arrivals and all expected bytes.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes this thread's mbarrier initialisations visible; the block must synchronise afterwards, before using them.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to the bytes that the phase expects.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has completed. After init, phase 0 is in progress and parity 1 counts as
// completed.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t ended = 0;
  while (ended == 0) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}\n"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the TMA copy of the map's box at these coordinates. Elements outside of the tensor become zero; their bytes,
// too, count on the mbarrier.
__device__ __forceinline__ void load_box(
    uint32_t target, const CUtensorMap* map, uint32_t barrier, int column, int head, int token) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token)
      : "memory");
}

__device__ __forceinline__ void store_zeros(uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// Makes this thread's stores to shared memory visible to the async proxy (wgmma, TMA), after a following barrier.
__device__ __forceinline__ void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Named barriers of `threads` threads; number 0 is __syncthreads().
__device__ __forceinline__ void sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// wgmma products: begin_products(), add_product() any number of times, commit_products(). wait_products<n>(sums) waits
// until all but the last n committed groups are done; until then their sums and register operands must not be touched.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kUnder, int kBlocks>
__device__ __forceinline__ void wait_products(float (&sums)[kBlocks][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kUnder) : "memory");
  // Keeps the compiler from moving uses of the sums before the wait.
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
  }
}

// Forces the computation of `sum`, which is >= 0, before the next wait for products. Otherwise the compiler would wait
// first, and the softmax would not overlap with the products.
__device__ __forceinline__ void before_products(float sum) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.lt.f32 never, %0, 0f00000000;\n"
      "@never nanosleep.u32 0;\n"
      "}\n" ::"f"(sum)
      : "memory");
}

// A thread's accumulators as asm operands, and their placeholders in the instruction text.
#define ML_SUMS_4(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define ML_SUMS_16(n) ML_SUMS_4(n), ML_SUMS_4(n + 1), ML_SUMS_4(n + 2), ML_SUMS_4(n + 3)
#define ML_SUMS_32 ML_SUMS_16(0), ML_SUMS_16(4)
#define ML_SUMS_64 ML_SUMS_32, ML_SUMS_16(8), ML_SUMS_16(12)
#define ML_NAMES_32                                                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ML_NAMES_64                                                                                             \
  ML_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
              "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define ML_FROM_SHARED(type)                                                                            \
  asm volatile(                                                                                         \
      "{\n"                                                                                             \
      ".reg .pred add;\n"                                                                               \
      "setp.ne.b32 add, %66, 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" ML_NAMES_64 "}, %64, %65, add, " \
      "1, 1, 0, 0;\n"                                                                                   \
      "}\n"                                                                                             \
      : ML_SUMS_64                                                                                      \
      : "l"(left_tile), "l"(right_tile), "r"(static_cast<int>(add)))
#define ML_FROM_REGISTERS(columns, numbers, type, left, right)                                                  \
  asm volatile(                                                                                                 \
      "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" ML_NAMES_##numbers "}, {" left \
      "}, " right ", 1, 1, 1, 1;\n"                                                                             \
      : ML_SUMS_##numbers                                                                                       \
      : "r"(left_words[0]), "r"(left_words[1]), "r"(left_words[2]), "r"(left_words[3]), "l"(right_tile))

// A warpgroup's sums [64, 8 kBlocks] (+)= left [64, 16] x right [8 kBlocks, 16]^T; both operands K-major in shared
// memory, given by matrix descriptors. add: false overwrites the sums.
template <class Element, int kBlocks>
__device__ __forceinline__ void add_product(
    float (&sums)[kBlocks][4], uint64_t left_tile, uint64_t right_tile, bool add) {
  static_assert(kBlocks == 16, "the only size in use");
  if constexpr (std::is_same_v<Element, bf16>) {
    ML_FROM_SHARED("bf16");
  } else {
    ML_FROM_SHARED("f16");
  }
}

// A warpgroup's sums [64, 8 kBlocks] += left [64, 16] x right [16, 8 kBlocks]; left in registers, per warp a 16 x 16
// fragment as in mma.sync; right MN-major in shared memory, given by its matrix descriptor.
template <class Element, int kBlocks>
__device__ __forceinline__ void add_product(
    float (&sums)[kBlocks][4], const uint32_t (&left_words)[4], uint64_t right_tile) {
  static_assert(kBlocks == 8 || kBlocks == 16);
  if constexpr (kBlocks == 16 && std::is_same_v<Element, bf16>) {
    ML_FROM_REGISTERS(128, 64, "bf16", "%64, %65, %66, %67", "%68");
  } else if constexpr (kBlocks == 16) {
    ML_FROM_REGISTERS(128, 64, "f16", "%64, %65, %66, %67", "%68");
  } else if constexpr (std::is_same_v<Element, bf16>) {
    ML_FROM_REGISTERS(64, 32, "bf16", "%32, %33, %34, %35", "%36");
  } else {
    ML_FROM_REGISTERS(64, 32, "f16", "%32, %33, %34, %35", "%36");
  }
}

#undef ML_SUMS_4
#undef ML_SUMS_16
#undef ML_SUMS_32
#undef ML_SUMS_64
#undef ML_NAMES_32
#undef ML_NAMES_64
#undef ML_FROM_SHARED
#undef ML_FROM_REGISTERS

}  // namespace ml::hopper
