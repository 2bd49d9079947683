// Runs CUDA kernels on a CPU, to test their results without a GPU: each thread of a block is a fiber, blocks run one
// after another, and fibers wait at barriers and shuffles.
//
// Of the runnable fibers, the first in a shuffled order runs until it waits, so that some warps get as far ahead of the
// others as the barriers allow. A kernel that lacks a barrier reads unwritten or overwritten data in some order;
// compiled with -fsanitize=thread it is reported as a data race, because fibers are threads to the sanitizer and only
// barriers order them. Replaces CUDA's own header, for sources in which tests/support/emulated_cuda.py has replaced the
// constructs that are not C++: launches and dynamic shared memory.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "chip.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define EMULATOR_UNSEEN
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void __tsan_switch_to_fiber(void*, unsigned) {}
constexpr unsigned __tsan_switch_to_fiber_no_sync = 0;
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct uint2 {
  unsigned x, y;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = emulator::kSuccess;
inline int cudaGetLastError() { return emulator::take_last_error(); }

#define CUDART_VERSION 13000
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr int cudaEnableDefault = 0;
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const int major = emulator::chip.capability / 10, minor = emulator::chip.capability % 10;
  const int values[] = {major, minor, static_cast<int>(emulator::chip.most_shared)};
  *value = values[which];
  return cudaSuccess;
}

namespace emulator {
inline std::map<void*, size_t> allowed_shared;  // kernel -> opt-in limit of shared memory, if set
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int bytes) {
  if (bytes < 0 || static_cast<size_t>(bytes) > emulator::chip.most_shared) {
    return emulator::remember(emulator::kInvalidValue);
  }
  emulator::allowed_shared[reinterpret_cast<void*>(kernel)] = bytes;
  return cudaSuccess;
}

inline dim3 blockIdx, blockDim, gridDim;
#define threadIdx (emulator::thread_index())
inline unsigned megalite_emulator_order = 0;  // seed of the shuffled order; 0: ascending thread index
inline const char* megalite_emulator_problem = nullptr;  // the first forbidden action

namespace emulator {

constexpr size_t kStack = 256 * 1024;

inline bool misaligned = false;  // whether there was a misaligned access

inline void fail(const char* what) {
  if (megalite_emulator_problem == nullptr) megalite_emulator_problem = what;
}

// Asynchronous work of a block (copies, products), if the header that emulates it is included.
struct Beside {
  virtual void begin(int threads) = 0;
  virtual bool step() = 0;  // executes one pending item; false: there is none
  virtual void end() = 0;
};
inline Beside* beside = nullptr;

struct Fiber;

// A barrier at which fibers wait until all live fibers of their group have arrived.
struct Barrier {
  int arrived = 0, alive = 0;
  unsigned generation = 0;
  char order[2];  // addresses for the sanitizer's happens-before annotations

  EMULATOR_UNSEEN void open_if_complete() {
    if (arrived > 0 && arrived == alive) {
      arrived = 0;
      ++generation;
    }
  }
};

struct Warp {
  Barrier barrier;
  uint32_t named = 0;  // lanes in the mask of the current shuffle
  uint64_t values[2][32];
};

struct Fiber {
  ucontext_t context;
  void* known = nullptr;  // to the sanitizer
  std::unique_ptr<char[]> stack;
  dim3 index;
  unsigned number = 0, shuffles = 0;
  bool finished = false;
  Barrier* waits_at = nullptr;
  unsigned generation = 0;

  EMULATOR_UNSEEN bool may_run() const { return !finished && (waits_at == nullptr || waits_at->generation != generation); }
};

struct Block {
  ucontext_t scheduler;
  void* known = nullptr;
  char begun, ended;
  Fiber fibers[kMostThreads];
  Warp warps[kMostThreads / 32];
  Barrier barrier;
  Fiber* running = nullptr;
  unsigned threads = 0;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  std::vector<uint64_t> shared;
};

inline Block block;

inline void* dynamic_shared() { return block.shared.data(); }

EMULATOR_UNSEEN inline dim3 thread_index() { return block.running->index; }

EMULATOR_UNSEEN inline void wait(Barrier& barrier) {
  Fiber& self = *block.running;
  self.waits_at = &barrier;
  self.generation = barrier.generation;
  char* order = &barrier.order[self.generation % 2];
  __tsan_release(order);
  ++barrier.arrived;
  barrier.open_if_complete();
  __tsan_switch_to_fiber(block.known, __tsan_switch_to_fiber_no_sync);
  swapcontext(&self.context, &block.scheduler);
  self.waits_at = nullptr;
  __tsan_acquire(order);
}

constexpr const char* kNamesExited = "a shuffle whose mask names a lane that has exited";

// Ends the current thread, from any point in the kernel.
EMULATOR_UNSEEN inline void finish() {
  Fiber& self = *block.running;
  __tsan_release(&block.ended);
  self.finished = true;
  Warp& warp = block.warps[self.number / 32];
  if (warp.barrier.arrived > 0 && (warp.named >> self.number % 32 & 1) != 0) fail(kNamesExited);
  for (Barrier* each : {&block.barrier, &warp.barrier}) {
    --each->alive;
    each->open_if_complete();
  }
  __tsan_switch_to_fiber(block.known, __tsan_switch_to_fiber_no_sync);
  setcontext(&block.scheduler);
}

EMULATOR_UNSEEN inline void start() {
  __tsan_acquire(&block.begun);
  block.body(block.arguments);
  finish();
}

EMULATOR_UNSEEN inline void run_block(const std::vector<unsigned>& order) {
  const int threads = static_cast<int>(order.size());
  block.known = __tsan_get_current_fiber();
  block.threads = threads;
  block.barrier = {0, threads, 0, {}};
  for (Warp& warp : block.warps) warp.barrier = {0, 0, 0, {}}, warp.named = 0;
  for (int number = 0; number < threads; ++number) {
    Fiber& fiber = block.fibers[number];
    ++block.warps[number / 32].barrier.alive;
    fiber.number = number;
    fiber.index = dim3(number % blockDim.x, number / blockDim.x % blockDim.y, number / (blockDim.x * blockDim.y));
    fiber.finished = false;
    fiber.waits_at = nullptr;
    fiber.shuffles = 0;
    if (fiber.stack == nullptr) {
      fiber.stack.reset(new char[kStack]);
      fiber.known = __tsan_create_fiber(0);
    }
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &block.scheduler;
    makecontext(&fiber.context, start, 0);
  }
  if (beside != nullptr) beside->begin(threads);
  __tsan_release(&block.begun);
  for (int left = threads; left > 0;) {
    Fiber* next = nullptr;
    for (size_t i = 0; i < order.size() && next == nullptr; ++i) {
      if (block.fibers[order[i]].may_run()) next = &block.fibers[order[i]];
    }
    if (next == nullptr && beside != nullptr) {
      if (beside->step()) continue;
      return fail("threads that wait for each other");
    }
    if (next == nullptr) {
      std::fprintf(stderr, "emulated CUDA: %d threads wait at barriers that the others do not come to\n", left);
      std::abort();
    }
    block.running = next;
    __tsan_switch_to_fiber(next->known, __tsan_switch_to_fiber_no_sync);
    swapcontext(&block.scheduler, &next->context);
    if (next->finished) --left;
  }
  block.running = nullptr;
  __tsan_acquire(&block.ended);
  if (beside != nullptr) beside->end();
}

// Implements kernel<<<grid, threads, shared, stream>>>; returns a function to call with the kernel's arguments.
template <typename... Parameters>
auto launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared = 0, cudaStream_t = nullptr) {
  return [=](Parameters... arguments) {
    const auto allowed = allowed_shared.find(reinterpret_cast<void*>(kernel));
    const int error = refused({grid.x, grid.y, grid.z}, {threads.x, threads.y, threads.z}, shared,
                              allowed == allowed_shared.end() ? kSharedWithoutAsking : allowed->second);
    if (remember(error) != kSuccess) return;
    const size_t count = static_cast<size_t>(threads.x) * threads.y * threads.z;
    auto body = [&] { kernel(arguments...); };
    block.body = [](void* self) { (*static_cast<decltype(body)*>(self))(); };
    block.arguments = &body;
    // Shared memory is uninitialised: fill it with NaN.
    block.shared.assign((shared + 7) / 8, 0x7ff8dead7fc0deadu);
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    std::mt19937 random(megalite_emulator_order);
    blockDim = threads;
    gridDim = grid;
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) {
          if (megalite_emulator_order != 0) std::shuffle(order.begin(), order.end(), random);
          blockIdx = dim3(x, y, z);
          run_block(order);
        }
      }
    }
    if (misaligned) remember(kMisalignedAddress);
    misaligned = false;
  };
}

// A shuffle: every live lane of the warp gives a value and gets that of lane from(own lane); all lanes of `mask` must
// be alive.
template <typename T, typename From>
EMULATOR_UNSEEN T exchange(unsigned mask, T value, From from) {
  static_assert(sizeof(T) <= 8);
  Fiber& self = *block.running;
  Warp& warp = block.warps[self.number / 32];
  uint64_t* values = warp.values[self.shuffles++ % 2];
  const int lane = static_cast<int>(self.number % 32);
  warp.named = mask;
  for (unsigned other = 0; other < 32; ++other) {
    const unsigned number = self.number / 32 * 32 + other;
    const bool gone = number >= block.threads || block.fibers[number].finished;
    if ((mask >> other & 1) != 0 && gone) fail(kNamesExited);
  }
  if ((mask >> lane & 1) == 0) fail("a shuffle whose mask does not name its own lane");
  std::memcpy(&values[lane], &value, sizeof value);
  wait(warp.barrier);
  if ((mask >> from(lane) & 1) == 0) fail("a shuffle from a lane that its mask does not name");
  std::memcpy(&value, &values[from(lane)], sizeof value);
  return value;
}

}  // namespace emulator

#ifndef __SANITIZE_THREAD__
// Replaces the handler of -fsanitize=alignment: on a GPU a misaligned access ends the kernel with an error, while on
// the CPU it may end the process.
extern "C" __attribute__((used)) inline void __ubsan_handle_type_mismatch_v1(void*, uintptr_t) {
  emulator::misaligned = true;
  if (emulator::block.running != nullptr) emulator::finish();
}
#endif

extern "C" __attribute__((used)) inline int megalite_emulator_chip(int capability) { return emulator::choose_chip(capability); }

inline void __trap() { emulator::fail("a trap"); }

EMULATOR_UNSEEN inline void __syncthreads() { emulator::wait(emulator::block.barrier); }

EMULATOR_UNSEEN inline void __syncwarp(unsigned = 0xffffffffu) {
  emulator::Warp& warp = emulator::block.warps[emulator::block.running->number / 32];
  warp.named = 0;
  emulator::wait(warp.barrier);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int = 32) {
  return emulator::exchange(mask, value, [=](int lane) { return lane ^ distance; });
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, int distance, int = 32) {
  return emulator::exchange(mask, value, [=](int lane) { return lane + distance < 32 ? lane + distance : lane; });
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int = 32) {
  return emulator::exchange(mask, value, [=](int) { return source; });
}
