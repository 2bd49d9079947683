// Replaces csrc/cuda/device_machine.cuh for emulated kernels, with the functions that they use.
#pragma once

#include <cuda_runtime.h>

#include "core/scalar.h"

namespace emulator {

constexpr uint32_t kShared = 0x480;  // start of shared memory, aligned to 128 bytes but no more

// Maps a shared-memory address to host memory; addresses outside of the block's memory map to a scratch area.
EMULATOR_UNSEEN inline unsigned char* shared_place(uint32_t address, uint32_t bytes) {
  static unsigned char elsewhere[64];
  const bool inside = address >= kShared && address - kShared + bytes <= block.shared.size() * 8;
  if (!inside || address % bytes != 0) fail("a shared address that is outside or not aligned");
  return inside ? reinterpret_cast<unsigned char*>(block.shared.data()) + (address - kShared) : elsewhere;
}

}  // namespace emulator

namespace ml {

template <int kThreads_>
struct DeviceMachine {
  static constexpr int kThreads = kThreads_;

  int thread() const { return threadIdx.x; }
  int lane() const { return threadIdx.x % 32; }
  uint32_t shared() const { return emulator::kShared; }
  void sync() const { __syncthreads(); }
  void sync_warp() const { __syncwarp(); }

  template <class Element>
  uint32_t pack(float low, float high) const {
    return from_wide<Element>(low).bits | static_cast<uint32_t>(from_wide<Element>(high).bits) << 16;
  }

  void store_shared(uint32_t address, uint32_t value) const {
    *reinterpret_cast<uint32_t*>(emulator::shared_place(address, 4)) = value;
  }

  void store_chunk(void* target, uint32_t address) const {
    const auto* words = reinterpret_cast<const uint64_t*>(emulator::shared_place(address, 16));
    for (int i = 0; i < 2; ++i) static_cast<uint64_t*>(target)[i] = words[i];
  }

  float shuffle_xor(float value, int distance) const { return __shfl_xor_sync(0xffffffffu, value, distance); }
  float larger(float one, float other) const { return std::fmax(one, other); }
  float exp2(float value) const { return std::exp2(value); }
  float log2(float value) const { return std::log2(value); }
};

}  // namespace ml
