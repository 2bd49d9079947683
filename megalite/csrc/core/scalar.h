// The number types of all kernels, on host and device: stored as in torch, computed in Wide<T>.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define ML_HD __host__ __device__ __forceinline__
#else
#define ML_HD inline __attribute__((always_inline))
#endif

namespace ml {

enum DType { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Returned by all C functions if there is no kernel for a DType; CUDA errors are positive.
constexpr int kUnsupported = -1;

// bf16 and fp16 bits as torch stores them. No arithmetic: convert with to_wide and from_wide.
struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

template <typename T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
// The type of arithmetic, statistics and sums: fp32 for bf16, fp16 and fp32; fp64 for fp64.
template <typename T>
using Wide = typename WideOf<T>::type;

ML_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ML_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

ML_HD double to_wide(double value) { return value; }
ML_HD float to_wide(float value) { return value; }
ML_HD float to_wide(bf16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

ML_HD float to_wide(fp16 value) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
#else
  // Without branches, so that compilers vectorise loops over it.
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = shifted + (224u << 23);  // infinities and NaN keep the largest exponent
  const uint32_t subnormal = bits_of(static_cast<float>(shifted >> 13) * 0x1p-24f);
  const uint32_t exponent = shifted & (31u << 23);
  const uint32_t magnitude = exponent == 0 ? subnormal : exponent == (31u << 23) ? special : normal;
  return float_of(sign | magnitude);
#endif
}

template <typename T>
ML_HD T from_wide(Wide<T> value);

template <>
ML_HD double from_wide<double>(double value) {
  return value;
}

template <>
ML_HD float from_wide<float>(float value) {
  return value;
}

template <>
ML_HD bf16 from_wide<bf16>(float value) {
#ifdef __CUDA_ARCH__
  bf16 narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;  // by its bits: compilers may optimise value != value away
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
#endif
}

template <>
ML_HD fp16 from_wide<fp16>(float value) {
#ifdef __CUDA_ARCH__
  fp16 narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
  return narrow;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Rounds away the low 13 bits; a carry into the exponent correctly gives the next power of two, or infinity.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 aligns the mantissa to multiples of 2^-24 in its low bits; the addition itself rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t narrow = magnitude < (113u << 23) ? subnormal : magnitude >= (143u << 23) ? special : normal;
  return {static_cast<uint16_t>(sign | narrow)};
#endif
}

// Host only: calls run(T{}) with the storage type T of `dtype` and returns 0; returns kUnsupported for other values.
template <typename Run>
inline int for_dtype(int dtype, Run run) {
  switch (dtype) {
    case kFloat32:
      run(float{});
      return 0;
    case kFloat64:
      run(double{});
      return 0;
    case kBFloat16:
      run(bf16{});
      return 0;
    case kFloat16:
      run(fp16{});
      return 0;
    default:
      return kUnsupported;
  }
}

}  // namespace ml
