// What attention's launches ask of the CUDA runtime, and its errors.
#pragma once

#include <cuda_runtime.h>

#include "attention.h"

namespace ml {

// Shared memory that a block may have on every chip these kernels are compiled for, the least: compute capability 8.6.
constexpr int kLeastShared = 99 * 1024;
constexpr int64_t kMostSequences = 65535;  // of one launch, whose grid has a layer for each

// The error, of which the runtime keeps nothing for whoever asks next for the last one.
inline int cleared(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// The shared memory that a block may have on the current device.
inline int most_shared(int& bytes) {
  int device = 0;
  if (const int error = cleared(cudaGetDevice(&device))) return error;
  return cleared(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

template <class Kernel>
int allow_shared(Kernel* kernel, int bytes) {
  return cleared(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// Calls launch(part) for as many sequences at once as a grid takes, until one launch fails.
template <class Launch>
int in_parts(const MegaliteAttention& all, const Launch& launch) {
  for (int64_t first = 0; first < all.sequences; first += kMostSequences) {
    MegaliteAttention part = all;
    part.query_starts += first, part.key_starts += first;
    part.sequences = all.sequences - first < kMostSequences ? all.sequences - first : kMostSequences;
    launch(part);
    if (const int error = cudaGetLastError()) return error;
  }
  return 0;
}

}  // namespace ml
