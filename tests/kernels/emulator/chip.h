// A chip's launch limits and the runtime's last error, shared by the emulator and the PTX interpreter.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

// Error codes of the CUDA runtime.
constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidConfiguration = 9, kMisalignedAddress = 716;

// Compute capability times ten, and the opt-in limit of shared memory per block in bytes (CUDA C++ Programming Guide,
// "Technical Specifications per Compute Capability").
struct Chip {
  int capability;
  size_t most_shared;
};
constexpr Chip kChips[] = {
    {80, 163 * 1024}, {86, 99 * 1024}, {89, 99 * 1024}, {90, 227 * 1024}, {100, 227 * 1024}, {120, 99 * 1024},
};
constexpr size_t kSharedWithoutAsking = 48 * 1024;
constexpr unsigned kMostThreads = 1024, kMostThreadsDeep = 64;
constexpr unsigned kMostBlocks = 0x7fffffff, kMostBlocksAcross = 65535;

inline Chip chip = {90, 227 * 1024};
inline int last_error = kSuccess;

inline bool choose_chip(int capability) {
  for (const Chip& each : kChips) {
    if (each.capability == capability) return chip = each, true;
  }
  return false;
}

// Keeps an error until cudaGetLastError() returns it; success does not clear it.
inline int remember(int error) {
  if (error != kSuccess) last_error = error;
  return error;
}

inline int take_last_error() {
  const int error = last_error;
  last_error = kSuccess;
  return error;
}

// Returns the error that the runtime would give for a launch.
struct Extent {
  unsigned x, y, z;
};

inline int refused(Extent grid, Extent block, size_t shared, size_t allowed_shared) {
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  const bool fits = threads >= 1 && threads <= kMostThreads && block.x <= kMostThreads && block.y <= kMostThreads &&
                    block.z <= kMostThreadsDeep;
  const bool spread = grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= kMostBlocks &&
                      grid.y <= kMostBlocksAcross && grid.z <= kMostBlocksAcross;
  if (!fits || !spread) return kInvalidConfiguration;
  return shared > allowed_shared ? kInvalidValue : kSuccess;
}

}  // namespace emulator
