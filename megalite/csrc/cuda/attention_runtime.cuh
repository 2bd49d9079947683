// CUDA runtime calls of the attention launches, with error handling.
#pragma once

#include <cuda_runtime.h>

#include "attention.h"

namespace ml {

// The smallest limit of shared memory per block among the supported chips: compute capability 8.6.
constexpr int kLeastShared = 99 * 1024;
constexpr int64_t kMostSequences = 65535;  // per launch: the largest gridDim.z

// Returns the error and clears it in the runtime, so that the next cudaGetLastError() does not return it.
inline int cleared(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

// Gets the limit of shared memory per block of the current device.
inline int most_shared(int& bytes) {
  int device = 0;
  if (const int error = cleared(cudaGetDevice(&device))) return error;
  return cleared(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

template <class Kernel>
int allow_shared(Kernel* kernel, int bytes) {
  return cleared(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// Calls launch(part) for up to kMostSequences sequences at a time, until one launch fails.
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
