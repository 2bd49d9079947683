// The part of the CUDA driver API that encodes tensor maps, for emulated kernels: the map stores its arguments.
#pragma once

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  const unsigned char* begin;
  uint64_t sizes[3], strides[2];
  uint32_t box[3];
  CUtensorMapSwizzle swizzle;
};

// Refuses the arguments that the driver refuses, for three-dimensional tensors of 16-bit elements.
inline CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* begin, const cuuint64_t* sizes,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  bool fits = rank == 3 && reinterpret_cast<uintptr_t>(begin) % 16 == 0 && box[0] * 2 % 16 == 0;
  fits = fits && (swizzle != CU_TENSOR_MAP_SWIZZLE_128B || box[0] * 2 <= 128);
  for (int i = 0; i < 3; ++i) {
    fits = fits && 0 < sizes[i] && sizes[i] <= 1ull << 32 && 0 < box[i] && box[i] <= 256 && steps[i] == 1;
    map->sizes[i] = sizes[i], map->box[i] = box[i];
  }
  for (int i = 0; i < 2; ++i) {
    fits = fits && strides[i] % 16 == 0 && strides[i] < 1ull << 40;
    map->strides[i] = strides[i];
  }
  map->begin = static_cast<const unsigned char*>(begin), map->swizzle = swizzle;
  return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

#define cudaGetDriverEntryPointByVersion(name, found, version, flags, result) \
  (*(found) = reinterpret_cast<void*>(&cuTensorMapEncodeTiled), *(result) = cudaDriverEntryPointSuccess, cudaSuccess)
